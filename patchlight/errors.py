"""The one exception that a user's mistake raises, and the one warning."""


class PatchlightError(ValueError):
    """Something the caller can put right: the message names the value and the remedy, in one line."""


class PatchlightWarning(UserWarning):
    """What was guessed, and may make the result wrong: the message names the value and how to settle it."""
