"""How long work reacts to SIGINT and SIGTERM: it stops at the next safe moment, and its children ignore them."""

import contextlib
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)

SAME_ONCE_MORE = 1.0
"""Seconds within which a second signal is taken for the first one again."""


class Stopped(BaseException):
    """The work was asked to stop and can go on later; `.signal` says by what. Without a line there is nothing to say.

    Like KeyboardInterrupt it may come out of anything, and is no error of what it comes out of.
    """

    def __init__(self, line: str, signal_number: int) -> None:
        super().__init__(line)
        self.signal = signal_number


@dataclass
class StopRequest:
    """`signal` is the number of the signal that asked for a stop; 0 until one does."""

    signal: int = 0
    _line: str | None = None

    @contextlib.contextmanager
    def at_once(self, line: str) -> Iterator[None]:
        """Inside this block a stop (also one asked for earlier) raises `Stopped(line)` at once; outside it waits."""
        self._line = line
        try:
            if self.signal:
                raise Stopped(line, self.signal)
            yield
        finally:
            self._line = None


@contextlib.contextmanager
def asked_to_stop(on_signal: Callable[[], None] = lambda: None) -> Iterator[StopRequest]:
    """SIGINT and SIGTERM ask for a stop at the next moment that suits the work; a second one acts at once.

    One within a second is the same once more: torchrun, and whoever stops a whole group, passes on what all have heard.
    `on_signal` is called when one comes that has to wait, whatever is going on: it may do no more than write to a file
    number.
    """
    asked, first = StopRequest(), 0.0

    def handle(number: int, frame: Any) -> None:
        nonlocal first
        if asked.signal:
            _act_at_once(number, first)
            return
        asked.signal, first = number, time.monotonic()
        if asked._line is not None:
            raise Stopped(asked._line, number)
        with contextlib.suppress(OSError):  # whoever read what we say was stopped, too
            on_signal()

    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread hears signals
        return
    before = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delay SIGINT and SIGTERM to the end of the block, for work that must not be left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: dict[int, float] = {}

    def handle(number: int, frame: Any) -> None:
        if received:
            _act_at_once(number, min(received.values()))
        received.setdefault(number, time.monotonic())

    before = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)


@contextlib.contextmanager
def block_signals_in_children() -> Iterator[None]:
    """Processes that are started inside do not hear SIGINT and SIGTERM, which Ctrl-C sends to all of them.

    One that comes to this process meanwhile is heard by another of its threads, or afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interrupt_once() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt and SIGTERM `Stopped` once, so that what is half done is cleared
    away, and in what comes of that no more.

    In the midst of an import they end the process: what is imported makes an error of its own of it, or aborts.
    """
    first: float | None = None

    def interrupt(number: int, frame: Any) -> None:
        nonlocal first
        if first is not None or _imports(frame):
            _act_at_once(number, -math.inf if first is None else first)
            return
        first = time.monotonic()
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped("", number)

    for number in STOPPING:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, interrupt)


def _imports(frame: Any) -> bool:
    """Whether the frame belongs to a running import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _act_at_once(number: int, first: float) -> None:
    """Do what the signal does by default, unless it only repeats one that arrived a moment ago."""
    if time.monotonic() - first > SAME_ONCE_MORE:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_HIDING = threading.Lock()


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """A process that is started inside does not run the program that started this one.

    It would, to know the program's functions: that takes the time of all its imports, and starts the work anew where
    the program does so without asking `if __name__ == "__main__"`, as most scripts and notebooks do.
    """
    with _HIDING:  # of two threads, the second would take what the first has put there for the program
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def worker_context(preload: str) -> BaseContext:
    """How worker processes are started: from one clean process that has imported the module `preload`, all at once.

    Forking this one, in which torch has started threads, may hang. That process hears neither SIGINT nor SIGTERM:
    whoever stops a whole group of processes (Ctrl-C, `timeout`, a batch system) leaves it to the main process to save,
    and to end the others.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    multiprocessing.resource_tracker.ensure_running()  # first, for it would unblock them
    with block_signals_in_children():
        multiprocessing.forkserver.ensure_running()
    return context
