"""How long work tells of itself: `Reporter` is who hears it, and `on_terminal` one that shows it to people."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

SECONDS_BETWEEN_LINES = 30.0
"""Of progress, where there is no terminal for a bar."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a piece of work is."""

    what: str
    """In words that a number follows: "checking photo", "epoch 1.5, step"; or that stand alone, where there is none."""
    done: int = 0
    total: int | None = None
    """None where it is not known."""
    how: str = ""
    """What else there is to say, such as how fast it goes."""
    seconds_left: float | None = None

    def line(self) -> str:
        """All of it, for where there is no bar."""
        left = "" if self.seconds_left is None else f"{timedelta(seconds=round(self.seconds_left))} left"
        rest = ", ".join(each for each in (self.how, left) if each)
        return self.what + self.number() + (f": {rest}" if rest else "")

    def number(self) -> str:
        if self.total is None:
            return f" {self.done:,}" if self.done else ""
        return f" {self.done:,} of {self.total:,}"


def _ignore(*heard: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Who hears of long work. Each part is a function of one's own; what is left out hears nothing."""

    tell: Callable[[str], None] = _ignore
    """Of everything that deserves a line."""
    progress: Callable[[Progress], None] = _ignore
    """Of how far it is, now and then."""
    stopping: Callable[[], None] = _ignore
    """That a stop was asked for, which waits until all is saved; it may do no more than write to a file number."""


SILENT = Reporter()


@contextlib.contextmanager
def on_terminal() -> Iterator[Reporter]:
    """A bar on a terminal, and elsewhere a line from time to time; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    # On a narrow terminal what may be wrapped gets shorter: the bar alone.
    whole = Column(no_wrap=True)
    left = TimeRemainingColumn(table_column=Column(no_wrap=True))
    what, how = TextColumn("{task.description}", table_column=whole), TextColumn("{task.fields[how]}")
    has_terminal, said = sys.stderr.isatty(), time.monotonic()
    with Bars(
        what, BarColumn(), how, left, console=Console(stderr=True), disable=not has_terminal, transient=True
    ) as bars:
        bar = bars.add_task("", how="", total=None)

        def tell(line: str) -> None:
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

        def show(now: Progress) -> None:
            nonlocal said
            bars.update(bar, description=now.what + now.number(), completed=now.done, total=now.total, how=now.how)
            if not has_terminal and time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                sys.stderr.write(f"{now.line()}\n")
                sys.stderr.flush()

        def stopping() -> None:  # in the midst of anything, so past whatever else is being written
            os.write(2, b"\npatchlight: stopping as soon as all is saved; a second time stops at once\n")

        yield Reporter(tell=tell, progress=show, stopping=stopping)
