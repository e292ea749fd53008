"""The mutation meta-test: our own list of faults, each of which some test must find."""
