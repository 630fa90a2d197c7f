"""What Prometheus reads at /metrics: requests, their time, what waits, and how long models take.

Of several processes that answer at one socket, each counts in files of one folder (prometheus_client's multiprocess
mode), and whichever is asked sums them.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from patchlight.serve.guard import Answered
from patchlight.serve.state import ServerState

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_FRESH_SECONDS = 1.0
"""How old what other processes say of now (what waits, what is kept) may be."""


def share_counts(folder: Path, worker: int) -> None:
    """From here on this process counts in files of this folder, as this worker; one that is started again in its
    place goes on counting there."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: worker)


def forget_worker(folder: Path, worker: int) -> None:
    """Nothing waits any longer in a worker that has died; what it counted stays counted."""
    mark_process_dead(worker, str(folder))


class Metrics:
    """Of one server."""

    def __init__(self, state: ServerState, shared: Path | None = None) -> None:
        """`shared`: the folder in which several processes count, see `share_counts`."""
        self._state = state
        own = self.registry = CollectorRegistry()
        if shared is not None:
            self.registry = CollectorRegistry()
            MultiProcessCollector(self.registry, str(shared))
        named = ("method", "route", "status")
        self._requests = Counter("patchlight_requests", "Requests that were answered.", named, registry=own)
        self._seconds = Histogram(
            "patchlight_request_seconds",
            "From a request's first byte to the answer's last.",
            ("route",),
            buckets=_SECONDS,
            registry=own,
        )
        self._queue_seconds = Histogram(
            "patchlight_queue_seconds",
            "The longest that a photo of a request waited for the model.",
            ("model",),
            buckets=_SECONDS,
            registry=own,
        )
        self._batch_seconds = Histogram(
            "patchlight_batch_seconds",
            "A model's work on the photos that it got together.",
            ("model",),
            buckets=_SECONDS,
            registry=own,
        )
        self._batch_photos = Histogram(
            "patchlight_batch_photos",
            "Photos that a model got together.",
            ("model",),
            buckets=(1, 2, 4, 8),
            registry=own,
        )
        self._now = {
            name: Gauge(f"patchlight_{name}", what, registry=own, multiprocess_mode="livesum")
            for name, what in (
                ("ready", "Processes whose models are loaded."),
                ("waiting", "Photos that wait for a model."),
                ("photos", "Photos that are kept."),
            )
        }

    def count(self, answered: Answered) -> None:
        self._requests.labels(answered.method, answered.route, str(answered.status)).inc()
        self._seconds.labels(answered.route).observe(answered.seconds)
        if answered.spent.photos:
            self._queue_seconds.labels(answered.spent.model).observe(answered.spent.queue_seconds)

    def count_batch(self, model: str, photos: int, seconds: float) -> None:
        self._batch_seconds.labels(model).observe(seconds)
        self._batch_photos.labels(model).observe(photos)

    def text(self) -> bytes:
        self._look()
        return generate_latest(self.registry)

    def _look(self) -> None:
        state = self._state
        self._now["ready"].set(state.engine.ready and not state.stopping)
        self._now["waiting"].set(state.waiting + len(state.engine.batches))
        self._now["photos"].set(len(state.photos))

    @contextlib.asynccontextmanager
    async def kept_fresh(self) -> AsyncIterator[None]:
        """For the other processes, as long as this one answers."""

        async def look() -> None:
            while True:
                self._look()
                await asyncio.sleep(_FRESH_SECONDS)

        task = asyncio.create_task(look())
        try:
            yield
        finally:
            task.cancel()


def add_metrics(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def read() -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})
