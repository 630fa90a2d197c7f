"""A server in a thread of this process, and a client that sends exactly what it is told to."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from patchlight.serve.app import make_app  # noqa: E402
from patchlight.serve.engine import Engine  # noqa: E402
from patchlight.serve.limits import Limits  # noqa: E402
from patchlight.serve.running import Address, access_policy, listen  # noqa: E402


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        return str(self.json()["error"]["reason"])


@dataclass
class Served:
    port: int
    token: str
    engine: Engine
    log: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """`headers` with _ for -; the token goes with what is not a GET, unless one is given."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if method != "GET":
            names = {"x-patchlight-token": self.token} | names
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host="Host" in names)
            if body is not None and "Transfer-Encoding" not in names:
                names.setdefault("Content-Length", str(len(body)))
            for name, value in names.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    @contextlib.contextmanager
    def batches(self) -> Iterator[list[int]]:
        """How many photos the models get together meanwhile."""
        sizes: list[int] = []
        told = self.engine.told
        self.engine.told = lambda name, photos, seconds: sizes.append(photos)
        try:
            yield sizes
        finally:
            self.engine.told = told

    def get(self, path: str, **values: Any) -> Answer:
        query = "&".join(f"{name}={value}" for name, value in values.items())
        return self.ask("GET", f"/api/v1{path}" + (f"?{query}" if query else ""))

    def json(self, path: str, **values: Any) -> Any:
        answer = self.get(path, **values)
        assert answer.status == 200, answer.body[:500]
        return answer.json()

    def send(self, content: bytes, name: str = "photo.jpg", part: str = "photo", **headers: str) -> Answer:
        body, kind = form(content, name, part)
        return self.ask("POST", "/api/v1/photos", body, **{"Content-Type": kind} | headers)

    def photo(self, content: bytes, name: str = "photo.jpg") -> str:
        answer = self.send(content, name)
        assert answer.status == 201, answer.body[:500]
        return str(answer.json()["id"])


def form(content: bytes, name: str = "photo.jpg", part: str = "photo") -> tuple[bytes, str]:
    """The body of a multipart form with one file, and its type."""
    edge = b"----edge7MA4YWxkTrZu0gW"
    head = f'Content-Disposition: form-data; name="{part}"; filename="{name}"\r\nContent-Type: image/jpeg\r\n\r\n'
    body = b"--" + edge + b"\r\n" + head.encode() + content + b"\r\n--" + edge + b"--\r\n"
    return body, f"multipart/form-data; boundary={edge.decode()}"


@contextlib.contextmanager
def serving(
    *models: str,
    exported: Sequence[Path] = (),
    limits: Limits | None = None,
    token: str | None = None,
    remote: bool = False,
) -> Iterator[Served]:
    listening = listen(Address(port=0))
    port = listening.getsockname()[1]
    access = access_policy(Address(port=port, token=token), port)
    if remote:
        access = type(access)(token=access.token, hosts=access.hosts, remote=True)
    engine = Engine(models or ("default",), exported=exported, limits=limits)
    served = Served(port, access.token, engine)
    config = uvicorn.Config(
        make_app(engine, access, served.log.append), log_config=None, access_log=False, ws="none", server_header=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not engine.ready and time.monotonic() < deadline:
            if engine.failure is not None:
                raise engine.failure
            time.sleep(0.02)
        yield served
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
