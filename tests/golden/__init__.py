"""Golden runs: 200 steps of six tiny architectures, whose losses and final bits are committed per environment."""
