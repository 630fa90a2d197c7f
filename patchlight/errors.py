"""The one exception that a user's mistake raises, the one warning, and what their lines have in common."""


class PatchlightError(ValueError):
    """Something the caller can put right: the message names the value and the remedy, in one line."""


class PatchlightWarning(UserWarning):
    """What was guessed, and may make the result wrong: the message names the value and how to settle it."""


def and_more(count: int, shown: int) -> str:
    """What follows the first `shown` of `count` names: " and 1,234 more", or nothing where these are all."""
    return f" and {count - shown:,} more" if count > shown else ""
