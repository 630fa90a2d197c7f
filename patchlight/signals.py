"""What SIGINT and SIGTERM do in long work: they ask for a stop, and leave other processes to the one that was asked."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any


@dataclass
class Asked:
    """`signal` is the number of the signal that asked for a stop, 0 while none has."""

    signal: int = 0


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Asked]:
    """SIGINT and SIGTERM ask for a stop at the next moment that suits the work; a second one acts at once."""
    asked = Asked()

    def ask(number: int, frame: Any) -> None:
        if asked.signal:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked.signal = number

    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread hears signals
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """SIGINT and SIGTERM that come meanwhile are heard at its end: for what must not be left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: heard.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in heard:
            signal.raise_signal(each)


def worker_context(preload: str) -> BaseContext:
    """How worker processes are started: from one clean process that has imported the module `preload`, all at once.

    Forking this one, in which torch has started threads, may hang. That process hears neither SIGINT nor SIGTERM:
    whoever stops a whole group of processes (Ctrl-C, `timeout`, a batch system) leaves it to the main process to save,
    and to end the others.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    multiprocessing.resource_tracker.ensure_running()  # first, for it would unblock them
    # A process begins with the signals blocked that its parent blocks. One that comes here meanwhile is heard after it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
