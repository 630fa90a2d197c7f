"""Who takes a connection, and who is closed that sends nothing."""

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from served import uvicorn  # noqa: F401  (skips where the extra is missing)

from patchlight.serve import running  # isort: skip


@contextlib.contextmanager
def servers(count: int, turn: Callable[[], float] | None, seconds: float = 0.0) -> Iterator[tuple[int, list[int]]]:
    """At one socket; its port, and how many requests each has answered, of which each takes so many seconds."""
    answered = [0] * count

    def application(number: int) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return
            await asyncio.sleep(seconds)
            answered[number] += 1
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

        return answer

    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        made = [running._Server(application(number), turn) for number in range(count)]
        threads = [threading.Thread(target=each.run, kwargs={"sockets": [listening.dup()]}) for each in made]
        for thread in threads:
            thread.start()
        try:
            yield listening.getsockname()[1], answered
        finally:
            for each in made:
                each.stop()
            for thread in threads:
                thread.join(30)


def ask(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/")
    status = connection.getresponse().status
    connection.close()
    return status


def test_silent_connections_keep_nobody_waiting() -> None:
    with servers(2, lambda: 0.02) as (port, _), contextlib.ExitStack() as silent:
        for _ in range(60):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        ask(port)  # all before it are taken
        time.sleep(0.2)
        start = time.monotonic()
        assert [ask(port) for _ in range(20)] == [200] * 20
        assert time.monotonic() - start < 2  # 20 * 60 / 2 * 0.02 s is 12


def test_a_burst_is_shared() -> None:
    with servers(2, lambda: 0.005, 1.0) as (port, answered), ThreadPoolExecutor(40) as clients:
        start = time.monotonic()
        assert list(clients.map(lambda _: ask(port), range(40))) == [200] * 40
        assert sum(answered) == 40
        assert min(answered) >= 12, answered
        assert time.monotonic() - start < 6


@pytest.mark.parametrize("turn", [None, lambda: 0.005], ids=["one", "several"])
def test_headers_that_do_not_come_are_not_waited_for(
    turn: Callable[[], float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_HEADERS_SECONDS", 0.8)
    begun = b"GET / HTTP/1.1\r\nHost: here\r\n"
    with servers(1, turn, 1.0) as (port, answered), contextlib.ExitStack() as held:

        def connect(*sent: bytes) -> socket.socket:
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            for part in sent:
                connection.sendall(part)
            return connection

        silent, half, whole = connect(), connect(begun), connect(begun + b"\r\n")
        time.sleep(0.2)
        half.sendall(b"X-More: so that it is not silent\r\n")
        assert silent.recv(1) == b""
        assert half.recv(1) == b""
        assert whole.recv(12) == b"HTTP/1.1 200"  # an answer may take longer
        whole.sendall(begun[:9])  # neither does the next request take for ever
        while whole.recv(1000):
            pass
        assert answered == [1]
