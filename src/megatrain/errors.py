"""Errors a user can mend: what, the value, and the remedy in one sentence. Exit code 2, no traceback."""


class UserError(ValueError):
    """Something the user asked for or gave cannot be used; the message says what, the value, and what to do."""


class ConfigError(UserError):
    """A configuration key or value is wrong."""


class DataError(UserError):
    """A dataset cannot be used."""


class ModelError(UserError):
    """A model folder, weight file or architecture cannot be used."""


class PlanError(UserError):
    """The run does not fit the budgets; the message names the smallest budget that would do."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class DiskError(UserError):
    """What a run keeps on its scratch disk cannot be written there, or came back changed."""
