"""Spans, sent where OpenTelemetry's environment variables say, and nothing without them."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from patchlight.errors import PatchlightWarning
from patchlight.serve.telemetry import start_telemetry
from served import Served, form, serving

PHOTO = (Path(__file__).parents[3] / "demo" / "dragonfly.jpg").read_bytes()
HERE = "http://127.0.0.1"


@pytest.fixture
def sent() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a receiver of traces, and the bodies that it got."""
    bodies: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"{HERE}:{server.server_port}", bodies
    server.shutdown()
    server.server_close()
    thread.join()


def ask(served: Served) -> None:
    edge = b"----edge7MA4YWxkTrZu0gW"
    one, kind = form(PHOTO)
    body = one.removesuffix(b"--" + edge + b"--\r\n") + one  # two photos
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = served.ask("POST", "/api/v1/predict", body, **{"Content-Type": kind, "traceparent": caller})
    assert answer.status == 200
    served.ask("GET", "/livez")
    served.get("/photos/none")


def test_a_request_is_a_span(tiny_folder: Path, sent: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `telemetry` is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    where, bodies = sent
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", where)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with serving(str(tiny_folder)) as served:
        ask(served)
    spans = {}
    for body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            of = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert (of["service.name"], of["deployment.environment"]) == ("patchlight", "test")
            spans |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert sorted(spans) == ["GET /api/v1/photos/{photo}", "POST /api/v1/predict"], "and not /livez"
    span = spans["POST /api/v1/predict"]
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    said = {each.key: each.value for each in span.attributes}
    assert said["http.response.status_code"].int_value == 200
    assert (said["patchlight.model"].string_value, said["patchlight.photos"].int_value) == ("tiny", 2)
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 < said["patchlight.model_seconds"].double_value < seconds
    assert 0 <= said["patchlight.queue_seconds"].double_value < seconds
    assert {each.key for each in spans["GET /api/v1/photos/{photo}"].attributes} == {
        "http.request.method",
        "http.route",
        "http.response.status_code",
    }


def test_without_the_variables_nothing_is_imported(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    with serving(str(tiny_folder)) as served:
        ask(served)
    assert "opentelemetry" not in sys.modules


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": HERE, "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": HERE, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_what_turns_it_off(given: dict[str, str]) -> None:
    assert start_telemetry(given) is None


def test_what_cannot_be_is_said_and_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": HERE}
    with pytest.warns(PatchlightWarning, match="not grpc"):
        assert start_telemetry(wanted | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.warns(PatchlightWarning, match=r"patchlight\[telemetry\]"):
        assert start_telemetry(wanted) is None
