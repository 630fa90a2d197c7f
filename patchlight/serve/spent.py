"""What a request took of the models, for the log, the metrics and traces."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Spent:
    """By one request."""

    model: str = ""
    photos: int = 0
    turn_seconds: float = 0.0
    """The longest that one of its photos waited to be read."""
    waited_seconds: float = 0.0
    """The longest that one waited for the model, once it was read."""
    model_seconds: float = 0.0
    """That the model worked for it; of a batch that it shared with others, its share."""

    def add(self, waited: float, worked: float) -> None:
        """One photo more; called by the model's thread alone."""
        self.waited_seconds = max(self.waited_seconds, waited)
        self.model_seconds += worked

    @property
    def queue_seconds(self) -> float:
        """That one of its photos waited, at the most."""
        return self.turn_seconds + self.waited_seconds


_CURRENT: ContextVar[Spent | None] = ContextVar("spent", default=None)


def begin() -> Spent:
    """For the request that is answered from here on, and the tasks that it starts."""
    spent = Spent()
    _CURRENT.set(spent)
    return spent


def current() -> Spent | None:
    """Of the request that is being answered; None outside of one."""
    return _CURRENT.get()


def note(model: str, photos: int) -> None:
    """Which model the request asks, about how many photos."""
    spent = _CURRENT.get()
    if spent is not None:
        spent.model, spent.photos = model, photos
