"""Processes that do one thing at a time each, and may die of it: only what they were at is lost then.

A photo that brings down a decoder must cost its own row and nothing else. So every thread here drives one process
through a pipe of its own: it knows what the process was at, and starts another.
"""

import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, ParamSpec, TypeVar

from patchlight.errors import PatchlightError
from patchlight.signals import main_hidden, worker_context

Given = ParamSpec("Given")
Result = TypeVar("Result")

_SECONDS_TO_END = 5.0
"""For a process that is told to end to finish what it is at."""


class WorkerDied(Exception):  # noqa: N818
    """The process that was at it is gone: a crash in a decoder, or no memory left."""


class NoWorkers(PatchlightError):  # noqa: N818
    """No process could be started."""


class Pool:
    """`submit` calls functions in this many processes, first come, first served; with 0 it calls them at once, here.

    Functions, arguments and results are pickled. The processes take no notice of Ctrl-C and SIGTERM, which may reach
    a whole group; they end with this pool, or with the process that made it, however that ends.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._own = threading.local()
        self._started: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False
        self._threads: ThreadPoolExecutor | None = None
        if workers:
            self._context = worker_context("patchlight.batch.work")
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="patchlight-pool")

    def submit(
        self, function: Callable[Given, Result], /, *given: Given.args, **named: Given.kwargs
    ) -> "Future[Result]":
        if self._threads is not None:
            return self._threads.submit(self._call, function, given, named)
        future: Future[Result] = Future()
        try:
            future.set_result(function(*given, **named))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """What has not begun is dropped; what has is given a moment to end."""
        if self._threads is None:
            return
        with self._lock:
            self._closed = True
            started = list(self._started)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.tell_to_end()
        for worker in started:
            worker.process.join(_SECONDS_TO_END)
            worker.process.kill()
            worker.process.join()
        self._threads.shutdown(wait=True)
        for worker in started:
            worker.pipe.close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, function: Callable[..., Result], given: tuple[Any, ...], named: dict[str, Any]) -> Result:
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            with self._lock:
                if self._closed:
                    raise WorkerDied
                worker = self._own.worker = _Worker(self._context)
                self._started.append(worker)
        try:
            failed, result = worker.call(function, given, named)
        except (EOFError, OSError):
            self._own.worker = None
            with self._lock:
                if not self._closed:
                    self._started.remove(worker)
                    worker.process.join()
                    worker.pipe.close()
            raise WorkerDied from None
        if failed:
            raise result
        return result


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, context: BaseContext) -> None:
        self.pipe, theirs = context.Pipe()
        self._sending = threading.Lock()
        try:
            given = (theirs, dict(os.environ))
            self.process = context.Process(target=_serve, args=given, daemon=True)  # type: ignore[attr-defined]
            with main_hidden():
                self.process.start()
        except (EOFError, OSError) as error:
            raise NoWorkers(f"processes that read photos could not be started ({error!r}); use 0 workers") from None
        finally:
            theirs.close()  # so that the pipe ends when the process does

    def call(self, function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> tuple[bool, Any]:
        with self._sending:
            self.pipe.send((function, given, named))
        return self.pipe.recv()

    def tell_to_end(self) -> None:
        with self._sending, contextlib.suppress(OSError):
            self.pipe.send(None)


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """What a process does. The pipe ends with the process at its other end, and so does this one."""
    # The server that forks processes has the environment of the moment in which it was started, which may lack the
    # keys of a bucket.
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Decoders write what they find in a broken file there; what matters comes back through the pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(EOFError, OSError):
        while (job := pipe.recv()) is not None:
            function, given, named = job
            try:
                answer = False, function(*given, **named)
            except Exception as error:
                answer = True, error
            try:
                pipe.send(answer)
            except (pickle.PicklingError, TypeError, AttributeError):
                pipe.send((True, RuntimeError(repr(answer[1]))))  # an error that cannot travel
