"""A real S3 server on this machine, that refuses, throttles and dawdles when it is told to."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from patchlight import remote

boto3 = pytest.importorskip("boto3", reason="moto is not installed")
pytest.importorskip("s3fs", reason="the extra `remote` is not installed")
moto = pytest.importorskip("moto.server", reason="moto is not installed")
werkzeug = pytest.importorskip("werkzeug.serving", reason="moto is not installed")


@dataclass
class Bucket:
    """The server, and what it is told to do wrong, by the end of a key."""

    port: int = 0
    throttled: dict[str, int] = field(default_factory=dict)
    """How many more times it asks to slow down."""
    slow: dict[str, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        return boto3.client("s3", endpoint_url=self.url)

    def put(self, key: str, content: bytes, bucket: str = "photos") -> None:
        self.client().put_object(Bucket=bucket, Key=key, Body=content)

    def app(self, real: Any) -> Callable[..., Any]:
        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            path = environ["PATH_INFO"]
            if environ["REQUEST_METHOD"] != "PUT":
                self.asked.append(f"{environ['REQUEST_METHOD']} {path}")
                for end, seconds in list(self.slow.items()):
                    if path.endswith(end):
                        time.sleep(seconds)
                for end, left in list(self.throttled.items()):
                    if path.endswith(end) and left > 0:
                        self.throttled[end] -= 1
                        start("503 Slow Down", [("Content-Type", "application/xml")])
                        told = (
                            b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
                        )
                        return [] if environ["REQUEST_METHOD"] == "HEAD" else [told]
            return real(environ, start)

        return answer


@contextlib.contextmanager
def serving() -> Iterator[Bucket]:
    bucket = Bucket()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    backend = moto.DomainDispatcherApplication(moto.create_backend_app)
    listening = werkzeug.make_server("127.0.0.1", 0, bucket.app(backend), threaded=True)
    bucket.port = listening.server_port
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield bucket
    listening.shutdown()
    thread.join(10)


@contextlib.contextmanager
def used(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With the bucket `photos`, which is emptied afterwards, and with what this process needs to find it."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "mine"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", server.url),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", "/none"),
        ("AWS_SHARED_CREDENTIALS_FILE", "/none"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "WAIT", 0.01)
    fresh()
    client = server.client()
    client.create_bucket(Bucket="photos")
    yield
    server.throttled.clear()
    server.slow.clear()
    for about in client.list_objects_v2(Bucket="photos").get("Contents", ()):
        client.delete_object(Bucket="photos", Key=about["Key"])
    fresh()


def fresh() -> None:
    """Forget the connections of the test before."""
    import s3fs

    remote._system.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
