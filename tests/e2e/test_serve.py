"""`patchlight serve` as a user starts and stops it."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from served import form
from warm_python import WarmPython, run_warm

DEMO = Path(__file__).parents[2] / "demo"
COMMAND = ["-m", "patchlight", "serve", "--no-open"]


@contextlib.contextmanager
def started(*, cold: bool = False) -> Iterator[tuple[Any, int, str]]:
    """The process, its port and its token; killed at the end if it is still there."""
    command = [*COMMAND, "--port", "0"]
    process: Any = (
        subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if cold
        else WarmPython(command)
    )
    try:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\n", process.stdout.readline())
        assert found, process.stderr.read()
        token = process.stdout.readline().rpartition(" ")[2].strip()
        yield process, int(found[1]), token
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def wait_until_ready(port: int) -> list[int]:
    statuses = [get(port, "/readyz")[0]]
    for _ in range(600):
        if statuses[-1] == 200:
            return statuses
        time.sleep(0.1)
        statuses.append(get(port, "/readyz")[0])
    raise AssertionError("not ready in a minute")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_at_once_and_ends_in_order(number: signal.Signals) -> None:
    with started(cold=number == signal.SIGTERM) as (process, port, token):
        assert get(port, "/livez") == (200, b'{"status":"ok"}')
        assert b'<meta name="patchlight-token" content="' + token.encode() in get(port, "/")[1]
        assert set(wait_until_ready(port)) <= {200, 503}
        body, kind = form((DEMO / "dragonfly.jpg").read_bytes())
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.putrequest("POST", "/api/v1/photos")
        for name, value in (("Content-Type", kind), ("x-patchlight-token", token), ("Content-Length", str(len(body)))):
            connection.putheader(name, value)
        connection.endheaders(body[:1000])
        time.sleep(0.5)  # it is being read now
        process.send_signal(number)
        time.sleep(0.3)
        connection.send(body[1000:])
        assert connection.getresponse().status == 201, "what was under way is finished"
        connection.close()
        _, errors = process.communicate(timeout=40)
        assert process.returncode == 0
        lines = [json.loads(line) for line in errors.splitlines()]
        assert {"time", "method", "path", "status", "ms", "bytes"} <= set(lines[-1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0, 0.5])
def test_it_ends_in_order_while_the_model_is_loaded(number: signal.Signals, seconds: float) -> None:
    with started() as (process, _, _):
        time.sleep(seconds)
        process.send_signal(number)
        _, errors = process.communicate(timeout=40)
        assert process.returncode == 0, errors


@pytest.mark.parametrize("place", range(10))
def test_stopped_in_its_first_seconds(place: int) -> None:
    number = signal.SIGINT if place % 2 else signal.SIGTERM
    command = [sys.executable, *COMMAND, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(0.2 + place / 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    # As the signal does by default, as main() does it, or as the server does.
    assert process.returncode in (-number, 128 + number, 0), errors
    assert "terminate called" not in errors


def one_line(*arguments: str) -> str:
    done = run_warm([*COMMAND, *arguments])
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_mistakes_are_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port 0 takes a free one" in one_line("--port", str(taken.getsockname()[1]))
    assert "--allow-remote and --token" in one_line("--host", "0.0.0.0")
    assert "16 characters" in one_line("--host", "0.0.0.0", "--allow-remote", "--token", "short")
    assert "no such file, folder or catalogue name" in one_line("--port", "0", "--model", "nothing-like-it")


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; sys.argv = ['', 'serve']; import patchlight.cli as c; c.main()"
    done = run_warm(["-c", code])
    assert done.returncode == 2
    assert done.stderr == "patchlight: the page needs uvicorn; pip install 'patchlight[serve]'\n"
