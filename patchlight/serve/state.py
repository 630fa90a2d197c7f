"""What the requests share: the engine, the photos, and the threads that work on them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from patchlight.config import ViTConfig
from patchlight.geometry import View
from patchlight.localizing.detector import read
from patchlight.localizing.heat import Method
from patchlight.serve.engine import Engine, Seen, Served
from patchlight.serve.limits import Limits
from patchlight.serve.photos import Photo, Photos
from patchlight.serve.queues import Workers
from patchlight.serve.spent import current, note
from patchlight.weights.load import Loaded

P = ParamSpec("P")
T = TypeVar("T")


class ServerState:
    """Where every request is dealt with."""

    def __init__(self, engine: Engine, threads: int) -> None:
        """`threads` read photos."""
        self.engine = engine
        self.limits: Limits = engine.limits
        self.photos = Photos(engine.limits)
        self.workers = Workers(threads, limit=engine.limits.waiting_work)
        # Reading ahead of the model on cores that the model needs, too, would make those wait that came first.
        self._hands = asyncio.Semaphore(threads if engine.device == "cpu" else max(threads, 2 * engine.limits.batch))
        self.waiting = 0
        """Photos of predictions whose turn to be read has not come."""
        self.stopping = False
        self._under_way: dict[tuple[str, int, Method, bool], asyncio.Task[Seen]] = {}
        self._timed: dict[ViTConfig, float] = {}

    def close(self) -> None:
        self.workers.close()
        self.engine.close()

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self.workers.submit(call, *args, **kwargs))

    @contextlib.asynccontextmanager
    async def in_hand(self) -> AsyncIterator[None]:
        """For a photo of a prediction, from when it is read until it is answered: so many at a time, as they came.
        Raises `BusyError` where too many wait for that."""
        if self._hands.locked() and self.waiting >= self.limits.queue:
            raise self.engine.batches.full()
        start = time.monotonic()
        self.waiting += 1
        try:
            await self._hands.acquire()
        finally:
            self.waiting -= 1
        try:
            spent = current()
            if spent is not None:
                spent.turn_seconds = max(spent.turn_seconds, time.monotonic() - start)
            yield
        finally:
            self._hands.release()

    def add(self, photo: Photo) -> None:
        for gone in self.photos.add(photo):
            self.engine.forget(gone)

    async def prepared(self, photo: Photo, served: Served) -> tuple[Tensor, View]:
        """The photo as the model takes it, exactly as `pl.localize` prepares it."""
        note(served.name, 1)
        ready = photo.prepared.pop(served.number, None)  # not kept: it is larger than the file, and soon made again
        if ready is None:
            ready = await self.work(prepare, served.loaded, photo.content, self.limits.pixels)
        return ready

    async def seen(self, photo: Photo, number: int, method: str = "auto", *, whole: bool = True) -> tuple[Served, Seen]:
        """What the model did with the photo; one forward pass, however many ask for it. Not `whole`: its answer will
        do, which an exported form of it can give."""
        served = self.engine.model(number)
        assert served.vit  # or it is refused
        used = served.detector(method).method
        whole = whole or served.answering(used).engine is None
        known = self.engine.known(photo.id, number)
        if known is not None and used in known.heat and (known.whole or not whole):
            return served, known
        key = (photo.id, number, used, whole)
        if key not in self._under_way:
            task = asyncio.create_task(self._look(photo, served, used, whole=whole))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return served, await asyncio.shield(self._under_way[key])

    async def _look(self, photo: Photo, served: Served, method: Method, *, whole: bool) -> Seen:
        image_CHW, view = await self.prepared(photo, served)
        seen = await asyncio.wrap_future(self.engine.look(served, image_CHW, view, method, whole=whole))
        return self.engine.keep(photo.id, served.number, seen)

    async def latency(self, served: Served, config: ViTConfig, macs: int) -> float | None:
        """Milliseconds, measured; None where one pass would take too long."""
        if config not in self._timed:
            if served.latency_ms / 1000 * macs / served.macs > self.limits.timed_seconds:
                return None
            self._timed[config] = (await asyncio.wrap_future(self.engine.latency(config))).median_ms
        return self._timed[config]


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them give. Where one fails, the others are cancelled: they would take the turns of photos that are
    still to be answered."""
    tasks = [asyncio.create_task(each) for each in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def prepare(loaded: Loaded, content: bytes, most_pixels: int) -> tuple[Tensor, View]:
    return loaded.preprocess(read(content, loaded.preprocess, max_pixels=most_pixels))
