"""Several processes that do the same: forked, watched, started again where one dies, and ended together (Linux).

They are forked from a process that has loaded what they share, so that it lies in memory once. A pipe of each says that
it is ready, or why it cannot be; another, which ends with the first process, ends them when that was killed.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from patchlight.errors import PatchlightError
from patchlight.signals import STOPPING

_AGAIN_SECONDS = 1.0
"""After which one is started again that lived for less than this many seconds."""
_LAST_SECONDS = 30.0
"""That they may take to end, of which requests under way may take 20."""
_READY = b"ready"


@dataclass
class Worker:
    """One of the processes, as it sees itself."""

    number: int
    _parent: int
    _alive: int
    """Ends when the first process does."""
    _says: int

    def begin(self, stop: Callable[[], None]) -> None:
        """Hear signals, now that there is something that they stop; and hear of the first process' end."""

        def watch() -> None:
            os.read(self._alive, 1)
            stop()

        threading.Thread(target=watch, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def is_ready(self) -> None:
        with contextlib.suppress(OSError):  # the first process is gone
            os.write(self._says, _READY)

    def fail(self, why: str) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(self._says, why.encode()[:4000])
        os._exit(2)

    @property
    def is_orphan(self) -> bool:
        return os.getppid() != self._parent


@dataclass
class _Process:
    """One of them, as the first process sees it."""

    number: int
    heard: int
    """The other end of what it says."""
    told: bytes = b""
    since: float = field(default_factory=time.monotonic)

    def said(self) -> bytes:
        """So far."""
        with contextlib.suppress(BlockingIOError):
            self.told += os.read(self.heard, 4096)
        return self.told


class _Signals:
    """SIGINT, SIGTERM and the ends of processes wake `wait` up, also those that come just before it."""

    def __init__(self) -> None:
        self.stopped = False
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        self._before = {number: signal.signal(number, self._stop) for number in STOPPING}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def wait(self, seconds: float | None) -> None:
        if select.select([self._woken], [], [], seconds)[0]:
            os.read(self._woken, 4096)

    def close(self) -> None:
        """As it was before; in a process that was forked, too."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wakes)


def run_workers(count: int, work: Callable[[Worker], NoReturn], died: Callable[[int], None]) -> None:
    """Fork until SIGINT or SIGTERM comes, and then end all in order; `died` hears which of them has ended by itself.

    Raises `PatchlightError` where one cannot be begun before any was ready.
    """
    alive, held = os.pipe()
    signals, running = _Signals(), dict[int, _Process]()
    waiting = dict.fromkeys(range(count), 0.0)  # when those that do not run are to be started
    was_ready = False

    def fork(number: int) -> None:
        heard, says = os.pipe()
        os.set_blocking(heard, False)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the new process knows what to do then
        process = os.fork()
        if process:
            os.close(says)
            running[process] = _Process(number, heard)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return
        try:
            signals.close()
            for end in (held, heard, *(other.heard for other in running.values())):
                os.close(end)
            work(Worker(number, parent, alive, says))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never back into what the first process was doing

    try:
        while not signals.stopped:
            for number in [number for number, at in waiting.items() if at <= time.monotonic()]:
                del waiting[number]
                fork(number)
            signals.wait(_AGAIN_SECONDS / 4 if waiting else None)
            for process, status in _ended():
                if (one := running.pop(process, None)) is None:
                    continue
                said, how = one.said(), _how(status)
                os.close(one.heard)
                if signals.stopped:
                    continue
                was_ready = was_ready or any(
                    each.startswith(_READY) for each in (said, *(other.said() for other in running.values()))
                )
                if not was_ready:
                    raise PatchlightError(said.decode() or f"a process of --workers {how} before it was ready")
                died(one.number)
                lived = time.monotonic() - one.since
                waiting[one.number] = time.monotonic() + (_AGAIN_SECONDS if lived < _AGAIN_SECONDS else 0.0)
                _log(one.number, how, said.removeprefix(_READY).decode())
    finally:
        _end(running, signals)
        signals.close()
        os.close(alive)
        os.close(held)


def _ended() -> Iterator[tuple[int, int]]:
    """Those that have, and how; also others than were forked here: process 1 of a container inherits every orphan."""
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            yield one


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _log(number: int, how: str, why: str) -> None:
    """As the log of requests is written."""
    line = {"time": round(time.time(), 3), "worker": number, "ended": how} | ({"error": why} if why else {})
    with contextlib.suppress(OSError):
        sys.stderr.write(json.dumps(line) + "\n")
        sys.stderr.flush()


def _end(running: dict[int, _Process], signals: _Signals) -> None:
    """Ask all to end, wait, and kill those that do not."""
    for process in running:
        os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + _LAST_SECONDS
    while running and (left := deadline - time.monotonic()) > 0:
        for process, _ in _ended():
            if (one := running.pop(process, None)) is not None:
                os.close(one.heard)
        if running:
            signals.wait(left)
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
