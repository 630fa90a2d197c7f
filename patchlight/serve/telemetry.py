"""A span for each request, sent by OpenTelemetry to where its usual environment variables say; without them, nothing.

OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) turns it on; everything else (headers, resource,
sampler, batches) is read by the SDK itself. What the libraries make is imported only then.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from patchlight import __version__
from patchlight.errors import PatchlightWarning
from patchlight.serve.guard import Answered, log_line

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True)
class Telemetry:
    tell: Callable[[Answered], None]
    close: Callable[[], None]
    """Sends what was not sent yet."""


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    return (
        any(environment.get(name) for name in _ENDPOINTS)
        and environment.get("OTEL_SDK_DISABLED", "").lower() != "true"
        and environment.get("OTEL_TRACES_EXPORTER", "otlp").lower() == "otlp"
    )


def start_telemetry(environment: Mapping[str, str] = os.environ) -> Telemetry | None:
    """None where no variable asks for it, or where it cannot be, which is said in a warning: a cluster may set these
    variables for every container alike."""
    if not is_wanted(environment):
        return None
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        _without(f"spans are sent by http/protobuf, not {protocol}; set {_PROTOCOLS[0]}=http/protobuf")
        return None
    try:
        from opentelemetry import propagate, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        _without(f"it needs {error.name}; pip install 'patchlight[telemetry]'")
        return None
    logger = logging.getLogger("opentelemetry")  # which says what could not be sent
    if not logger.handlers:
        logger.addHandler(_JsonLines(logging.WARNING))
        logger.propagate = False
    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({"service.version": __version__} | ({} if named else {"service.name": "patchlight"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("patchlight", __version__)

    def tell(answered: Answered) -> None:
        span = tracer.start_span(
            f"{answered.method} {answered.route}",
            context=propagate.extract(answered.headers),  # the caller's span, where it sends one
            kind=trace.SpanKind.SERVER,
            start_time=answered.start_ns,
            attributes={
                "http.request.method": answered.method,
                "http.route": answered.route,
                "http.response.status_code": answered.status,
            },
        )
        spent = answered.spent
        if spent.photos:
            span.set_attributes(
                {
                    "patchlight.model": spent.model,
                    "patchlight.photos": spent.photos,
                    "patchlight.queue_seconds": spent.queue_seconds,
                    "patchlight.model_seconds": spent.model_seconds,
                }
            )
        if answered.status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        span.end(answered.start_ns + int(1e9 * answered.seconds))

    return Telemetry(tell, provider.shutdown)


class _JsonLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log_line({"time": round(time.time(), 3), "traces": record.getMessage()[:500]})


def _without(why: str) -> None:
    warnings.warn(f"no traces: {why}", PatchlightWarning, stacklevel=2)
