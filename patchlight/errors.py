"""The one exception that a user's mistake raises."""


class PatchlightError(ValueError):
    """Something the caller can put right: the message names the value and the remedy, in one line."""
