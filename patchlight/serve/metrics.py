"""What Prometheus reads at /metrics: requests, their time, what waits, and how long models take."""

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

from patchlight.serve.state import ServerState

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Of one server."""

    def __init__(self, state: ServerState, prefix: str) -> None:
        """`prefix` is what all routes of the API begin with."""
        self._state, self._prefix = state, prefix
        self.registry = CollectorRegistry()
        named = ("method", "route", "status")
        self._requests = Counter("patchlight_requests", "Requests that were answered.", named, registry=self.registry)
        self._seconds = Histogram(
            "patchlight_request_seconds",
            "From a request's first byte to the answer's last.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._model_seconds = Gauge(
            "patchlight_model_seconds",
            "One photo, the median of the latest forward passes.",
            ("model",),
            registry=self.registry,
        )
        for name, what, value in (
            ("ready", "1 once the models are loaded.", lambda: float(state.engine.ready and not state.stopping)),
            ("waiting", "Photos that wait for a model.", lambda: float(len(state.engine.batches))),
            ("photos", "Photos that are kept.", lambda: float(len(state.photos))),
            ("batch_size", "Photos that went to a model together, the mean of late.", self._batch_size),
        ):
            Gauge(f"patchlight_{name}", what, registry=self.registry).set_function(value)

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """A request that was answered. Its route is counted and not its path, which holds a photo's id."""
        route: str = getattr(scope.get("route"), "path", "refused" if 400 <= status < 500 else "other")
        if scope["path"].startswith(f"{self._prefix}/") and route.startswith("/"):  # some FastAPIs leave it out
            route = self._prefix + route.removeprefix(self._prefix)
        method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "DELETE", "OPTIONS") else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        for served in self._state.engine.models:
            self._model_seconds.labels(served.name).set(served.latency_ms / 1000)
        return generate_latest(self.registry)

    def _batch_size(self) -> float:
        sizes = list(self._state.engine.batches.sizes)
        return sum(sizes) / len(sizes) if sizes else 0.0


def add_metrics(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def read() -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})
