"""Work that waits its turn: a bounded queue before the model, and a bounded number of threads for the rest."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from patchlight.errors import PatchlightError
from patchlight.serve.spent import Spent, current

P = ParamSpec("P")
T = TypeVar("T")


class BusyError(PatchlightError):
    """There is no room in the queue; the caller may come again after this many seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(eq=False)
class _Job:
    key: Hashable
    item: Any
    future: "Future[Any]" = field(default_factory=Future)
    spent: Spent | None = field(default_factory=current)
    at: float = field(default_factory=time.monotonic)


class Batches:
    """One thread that takes jobs of one key together, as many as wait and no more than `most`: nobody is waited for.

    `run(key, items)` gives a result for each item. Where it raises, each item is run alone, so that one which cannot
    be done costs no other its result.
    """

    def __init__(
        self,
        run: Callable[[Hashable, Sequence[Any]], Sequence[Any]],
        *,
        most: int,
        limit: int,
        told: Callable[[Hashable, int, float], None] = lambda key, count, seconds: None,
    ) -> None:
        """`told` hears of each batch, how many jobs it had, and how many seconds it took."""
        self._run = run
        self._told = told
        self._most = most
        self._limit = limit
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.pace = 0.0
        """Seconds that a job takes, of late."""
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, item: Any) -> "Future[Any]":
        """The result of an item, in time; raises `BusyError` where too many wait."""
        with self._changed:
            if self._closed:
                raise BusyError("the server is shutting down", 5)
            if len(self._jobs) >= self._limit:
                raise self.full()
            job = _Job(key, item)
            self._jobs.append(job)
            self._changed.notify()
            return job.future

    def full(self) -> BusyError:
        """What to say where no more may wait."""
        half = math.ceil(self._limit * self.pace / 2)  # by then there is room again
        return BusyError(f"{self._limit} photos wait for the model; try again in a moment", min(max(1, half), 30))

    def __len__(self) -> int:
        return len(self._jobs)

    def close(self, timeout: float = 5.0) -> bool:
        """Take no more jobs, do those that wait, and end; whether it did within the time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if not jobs:
                continue
            try:
                results = self._timed(jobs)
            except Exception as error:
                if len(jobs) == 1:
                    jobs[0].future.set_exception(error)
                else:
                    self._each_alone(jobs)
                continue
            for job, result in zip(jobs, results, strict=True):
                job.future.set_result(result)

    def _each_alone(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            try:
                (result,) = self._timed([job])
            except Exception as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _timed(self, jobs: Sequence[_Job]) -> Sequence[Any]:
        start = time.monotonic()
        results = self._run(jobs[0].key, [job.item for job in jobs])
        seconds = time.monotonic() - start
        self.pace += (seconds / len(jobs) - self.pace) / 8
        self._told(jobs[0].key, len(jobs), seconds)
        for job in jobs:
            if job.spent is not None:
                job.spent.add(start - job.at, seconds / len(jobs))
        return results

    def _next(self) -> list[_Job] | None:
        """The first job and those behind it with its key; None at the end."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return None
                self._changed.wait()
            key = self._jobs[0].key
            chosen = [job for job in self._jobs if job.key == key][: self._most]
            for job in chosen:
                self._jobs.remove(job)
            return chosen


class Workers:
    """A few threads for decoding, cutting and counting, and no more waiting work than `limit`."""

    def __init__(self, threads: int, *, limit: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="worker")
        self._limit = limit
        self._waiting = 0
        self._lock = threading.Lock()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        with self._lock:
            if self._waiting >= self._limit:
                raise BusyError(f"{self._limit} requests wait for a thread; try again in a moment")
            self._waiting += 1
        try:
            future = self._pool.submit(call, *args, **kwargs)
        except RuntimeError:  # it was closed
            self._done(None)
            raise BusyError("the server is shutting down", 5) from None
        future.add_done_callback(self._done)
        return future

    def _done(self, _: object) -> None:
        with self._lock:
            self._waiting -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
