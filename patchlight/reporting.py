"""How long work reports its progress: a `Reporter` receives it; `on_terminal` gives one that shows it on a terminal."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

SECONDS_BETWEEN_LINES = 30.0
"""Seconds between lines of progress, where there is no terminal for a bar."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a piece of work is."""

    what: str
    """The words before the number ("checking photo", "epoch 1.5, step"), or the whole line if there is none."""
    done: int = 0
    total: int | None = None
    """None: not known."""
    how: str = ""
    """More to show after the number, such as the speed."""
    seconds_left: float | None = None

    def line(self) -> str:
        """Everything in one line, for output without a bar."""
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
    """Receives what long work reports. Pass a function for each kind of report; kinds left out are dropped."""

    tell: Callable[[str], None] = _ignore
    """Called with each line worth printing."""
    progress: Callable[[Progress], None] = _ignore
    """Called with the progress, now and then."""
    stopping: Callable[[], None] = _ignore
    """That a stop was asked for, which waits until all is saved; it may do no more than write to a file number."""


SILENT = Reporter()


@contextlib.contextmanager
def on_terminal() -> Iterator[Reporter]:
    """Show a bar on a terminal, or a line from time to time elsewhere; on stderr."""
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
