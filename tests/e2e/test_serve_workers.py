"""`patchlight serve --workers`: several processes at one socket, as one server from outside."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from models_at_random import tiny_vit
from patchlight.weights.save import save
from served import form

if sys.platform != "linux":
    pytest.skip("--workers needs Linux", allow_module_level=True)
parser = pytest.importorskip("prometheus_client.parser", reason="the extra `serve` is not installed")

PHOTO = (Path(__file__).parents[2] / "demo" / "dragonfly.jpg").read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save(tiny_vit(), folder, labels=["ant", "bee", "cow", "dog", "eel"])
    return folder


@dataclass
class Running:
    process: "subprocess.Popen[str]"
    port: int
    token: str
    temporary: Path

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"x-patchlight-token": self.token} | ({"Content-Type": kind} if kind else {})
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def predict(self) -> tuple[int, bytes]:
        return self.ask("POST", "/api/v1/predict?outputs=classes", *form(PHOTO))

    def metrics(self) -> dict[tuple[str, ...], float]:
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in parser.text_string_to_metric_families(self.ask("GET", "/metrics")[1].decode())
            for sample in family.samples
        }

    @property
    def workers(self) -> set[int]:
        process = self.process.pid
        return {int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()}


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def is_there(process: int) -> bool:
    """And no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def started(temporary: Path, *arguments: str, stderr: Any = subprocess.PIPE) -> Iterator[Running]:
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "patchlight", "serve", "--port", "0", "--workers", "2", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | {"TMPDIR": str(temporary)}
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().rpartition(":")[2].strip(" /\n")
        token = process.stdout.readline().split()[-1]
        yield Running(process, int(port), token, temporary)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_they_answer_as_one(model: Path, tmp_path: Path) -> None:
    with started(tmp_path / "tmp", "--model", str(model)) as server:
        until(lambda: server.metrics().get(("patchlight_ready",)) == 2)
        workers = server.workers
        assert len(workers) == 2
        with ThreadPoolExecutor(8) as clients:
            answers = Counter(clients.map(lambda _: server.predict(), range(40)))
        ((status, _),) = answers
        assert (status, len(answers)) == (200, 1), "each answers the same"
        counted = "patchlight_requests_total", "POST", "/api/v1/predict", "200"
        until(lambda: server.metrics()[counted] == 40)  # whoever is asked
        assert server.metrics()["patchlight_batch_photos_sum", "tiny"] == 40

        status, said = server.ask("POST", "/api/v1/photos", *form(PHOTO))
        assert status == 404
        assert "without --workers" in json.loads(said)["error"]["message"]
        assert "without --workers" in server.ask("GET", "/")[1].decode()
        assert server.ask("GET", "/v2/models/tiny/ready")[0] == 200

        # One that dies is started again; what it counted stays counted.
        killed = min(workers)
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(server.workers) == 2 and killed not in server.workers)
        until(lambda: server.metrics()["patchlight_ready",] == 2)
        assert server.predict()[0] == 200
        until(lambda: server.metrics()[counted] == 41)

        # The end; what is under way is finished.
        workers = server.workers
        body, kind = form(PHOTO)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.putrequest("POST", "/api/v1/predict")
        for name, value in (
            ("Content-Type", kind),
            ("x-patchlight-token", server.token),
            ("Content-Length", str(len(body))),
        ):
            connection.putheader(name, value)
        connection.endheaders(body[:1000])
        time.sleep(0.5)  # it is being read now
        for process in (server.process.pid, *workers):  # as Ctrl-C reaches all of them
            os.kill(process, signal.SIGINT)
        time.sleep(0.3)
        connection.send(body[1000:])
        assert connection.getresponse().status == 200
        connection.close()
        _, errors = server.process.communicate(timeout=60)
        assert server.process.returncode == 0, errors
        assert not any(map(is_there, workers))
        assert not list(server.temporary.glob("patchlight-*"))
        assert "Traceback" not in errors, errors
        lines = [json.loads(line) for line in errors.splitlines()]
        assert [line["ended"] for line in lines if "worker" in line] == ["was ended by SIGKILL"]
        asked = [line for line in lines if line.get("path") == "/api/v1/predict"]
        assert asked[0]["photos"] == 1
        assert asked[0]["model_ms"] > 0


def test_when_the_first_process_is_killed_no_other_stays(model: Path, tmp_path: Path) -> None:
    with started(tmp_path / "tmp", "--model", str(model), stderr=subprocess.DEVNULL) as server:
        until(lambda: server.metrics().get(("patchlight_ready",)) == 2)
        workers = server.workers
        server.process.kill()
        server.process.wait()
        until(lambda: not any(map(is_there, workers)))
        assert not list(server.temporary.glob("patchlight-*"))


def one_line(*arguments: str) -> str:
    command = [sys.executable, "-m", "patchlight", "serve", "--no-open", "--workers", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_mistakes_are_one_line(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port 0 takes a free one" in one_line("--port", str(taken.getsockname()[1]))
    # Which the processes find out, each for itself:
    (tmp_path / "empty").mkdir()
    said = one_line("--port", "0", "--model", str(model), "--engine", str(tmp_path / "empty"))
    assert str(tmp_path / "empty") in said
