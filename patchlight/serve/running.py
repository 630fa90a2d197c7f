"""`patchlight serve`: from the command line to a server that listens, and back."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import h11
import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from patchlight.batch.again import FinishedRun
from patchlight.devices import cpu_cores
from patchlight.errors import PatchlightError
from patchlight.serve.app import make_app
from patchlight.serve.engine import Engine
from patchlight.serve.guard import AccessPolicy, Guard
from patchlight.serve.limits import Limits
from patchlight.serve.metrics import forget_worker, share_counts
from patchlight.serve.processes import Worker, run_workers
from patchlight.serve.review import Review, make_review_app
from patchlight.signals import STOPPING
from patchlight.weights.load import load

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BACKLOG = 2048
_PATIENCE_SECONDS = 0.2
"""That a process leaves connections at most to those that answer fewer requests."""
_FRESH_SECONDS = 0.1
"""For which a connection that has not sent its request yet is counted as one that will at once."""
_HEADERS_SECONDS = 10
"""After which a connection is closed on which no request has begun."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen, and for whom."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    remote: bool = False  # listening to other machines is a decision of its own
    token: str | None = None
    names: tuple[str, ...] = ()  # by which other machines call this one

    def check(self) -> None:
        """Refuse what would let other machines in by mistake."""
        if self.host in LOOPBACK:
            return
        if not self.remote:
            raise PatchlightError(
                f"--host {self.host} lets other machines in; add --allow-remote and --token if that is meant"
            )
        if self.token is None or len(self.token) < 16:
            raise PatchlightError(
                f"--host {self.host} needs --token with 16 characters or more, which others have to know; "
                f"such as {secrets.token_urlsafe(16)}"
            )
        if not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise PatchlightError("--token: use letters, digits and signs of ASCII, without spaces")


def listen(address: Address) -> socket.socket:
    """A socket that listens, or one line that says why not."""
    address.check()
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        where = f"{address.host} port {address.port}"
        raise PatchlightError(
            f"cannot listen on {where} ({error.strerror or error}); --port 0 takes a free one"
        ) from None
    except OverflowError:
        raise PatchlightError(f"--port {address.port}: a port is a number from 0 to 65535") from None


def access_policy(address: Address, port: int) -> AccessPolicy:
    """Who may come in at this port."""
    given = {*LOOPBACK, *address.names, address.host} - {"0.0.0.0", "::"}
    names = {f"[{name}]" if ":" in name else name.lower() for name in given}
    hosts = {f"{name}:{port}" for name in names} | (names if port == 80 else set())
    return AccessPolicy(
        token=address.token or secrets.token_urlsafe(32),
        hosts=frozenset(hosts),
        remote=address.host not in LOOPBACK,
    )


def serve(
    models: Sequence[str],
    address: Address,
    *,
    exported: Sequence[str | Path] = (),
    device: str = "cpu",
    open_page: bool = True,
    limits: Limits | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM asks for an end; requests under way are finished first. `exported`: folders of the
    exported forms of some of the models."""
    listening = listen(address)
    access = access_policy(address, listening.getsockname()[1])
    # The other cores read photos, cut crops and show the page; threads that wait for each other on busy cores are slow.
    torch.set_num_threads(max(1, cpu_cores() // 2))
    engine = Engine(models, exported=exported, device=device, limits=limits)
    server = _Server(make_app(engine, access, threads=max(2, cpu_cores())))
    server.hear_stops()
    _announce(listening, address, access, tell, open_page=open_page)
    _run(server, engine, listening)
    if not engine.close():
        _end_at_once(0)
    if engine.failure is not None:
        raise _why(engine.failure)


def serve_by_workers(
    count: int,
    models: Sequence[str],
    address: Address,
    *,
    exported: Sequence[str | Path] = (),
    device: str = "cpu",
    limits: Limits | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """As `serve`, by so many processes that answer at one socket; without the page, whose photos one process keeps.

    The weights are loaded once, before the processes part, and lie in memory once. Exported models, whose engines
    start threads of their own, each process loads for itself.
    """
    if sys.platform != "linux":
        raise PatchlightError("--workers needs Linux; start several servers, each with a --port of its own")
    if torch.device(device).type != "cpu":
        raise PatchlightError(
            f"--workers is for CPUs, and the device is {device}: one process keeps a GPU busy; add --device cpu, or "
            "start a server for each GPU"
        )
    listening = listen(address)
    access = access_policy(address, listening.getsockname()[1])
    _announce(listening, address, access, tell, open_page=False)
    torch.set_num_threads(1)  # threads that were started here would be missing in the processes
    loaded = [load(source, device=device) for source in models]
    threads = max(1, cpu_cores() // count)

    with tempfile.TemporaryDirectory(prefix="patchlight-metrics-", ignore_cleanup_errors=True) as folder:

        def work(worker: Worker) -> NoReturn:
            share_counts(Path(folder), worker.number)
            torch.set_num_threads(threads)
            engine = Engine(models, exported=exported, device=device, limits=limits, loaded=loaded)
            app = make_app(engine, access, threads=threads, shared=Path(folder))
            # A part of what a photo takes, so that whoever waits here would have waited for the model anyway.
            server = _Server(app, lambda: min(0.05, max(0.002, engine.batches.pace / 4)))
            server.hear_stops()
            worker.begin(server.stop)
            _run(server, engine, listening, worker.is_ready)
            engine.close()
            if worker.is_orphan:  # nobody else will
                shutil.rmtree(folder, ignore_errors=True)
            if engine.failure is not None:
                worker.fail(str(_why(engine.failure)))
            _end_at_once(0)

        run_workers(count, work, lambda number: forget_worker(Path(folder), number))


def review(
    folder: Path,
    address: Address,
    *,
    model: str | None = None,
    open_page: bool = True,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve the page on which a run's finds are corrected, until SIGINT or SIGTERM asks for an end."""
    reviewed = Review(FinishedRun(folder, model))
    try:
        listening = listen(address)
        access = access_policy(address, listening.getsockname()[1])
        server = _Server(make_review_app(reviewed, access))
        server.hear_stops()
        _announce(listening, address, access, tell, open_page=open_page)
        server.run(sockets=[listening])
    finally:
        reviewed.follower.close()
    if reviewed.follower.trouble is not None:
        raise PatchlightError(
            f"{reviewed.follower.trouble}; the corrections are safe, and `patchlight crop` follows them when it can"
        )


class _Server(uvicorn.Server):
    """With our settings, and an end that can be asked for before it listens to signals itself."""

    def __init__(self, app: Guard, turn: Callable[[], float] | None = None) -> None:
        """`turn`: other processes answer at the same socket, and are left so many seconds to take a connection first,
        for each request that is being answered here."""
        self._turn = turn
        self._accepting: list[asyncio.Task[None]] = []
        super().__init__(
            uvicorn.Config(
                app,
                # What it does should not hang on which libraries are installed, too.
                loop="asyncio",
                http=_Connection,
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_HEADERS_SECONDS,
                timeout_graceful_shutdown=20,
                ws="none",
                proxy_headers=False,
            )
        )

    def stop(self) -> None:
        self.should_exit = True

    def hear_stops(self) -> None:
        """Signals before uvicorn listens to them itself, and after it has ended, when it raises them once more."""
        for number in STOPPING:
            signal.signal(number, lambda *_: self.stop())

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        """Ctrl-C reaches one of several processes twice, as itself and as the SIGTERM of the one that started it. That
        is no reason to drop what is under way, as uvicorn does at a second signal."""
        if self._turn is None:
            super().handle_exit(sig, frame)
        else:
            self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._turn is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._accepting = [asyncio.create_task(self._accept(each, self._turn)) for each in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for each in self._accepting:
            each.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket, turn: Callable[[], float]) -> None:
        """Whoever answers the fewest requests is first to take a connection. asyncio would take at once all that wait,
        and the others had none of a burst."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            await _readable(listening)
            busy = self._busy()
            await asyncio.sleep(min(_PATIENCE_SECONDS, turn() * busy))
            for _ in range(1 + busy // 4):  # with many, few more or less are no matter, and the next has not to wait
                try:
                    connection, _ = listening.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    break  # another one was first
                except OSError:  # no more files can be opened
                    await asyncio.sleep(1)
                    break
                connection.setblocking(False)
                await loop.connect_accepted_socket(self._protocol, connection)

    def _busy(self) -> int:
        """Connections with a request, or with one that is likely to come at once."""
        return sum(each.is_busy for each in self.server_state.connections if isinstance(each, _Connection))

    def _protocol(self) -> asyncio.Protocol:
        return _Connection(self.config, self.server_state, self.lifespan.state)


class _Connection(H11Protocol):
    """Closed where the headers of a request do not come in time: uvicorn closes only what is silent after an answer."""

    _made = 0.0
    _late: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        if self.cycle is None:
            return self.loop.time() - self._made < _FRESH_SECONDS
        return not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._made = self.loop.time()
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()

    def _expect_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # they are there
            self._expect_nothing()
        elif self._late is None:
            self._late = self.loop.call_later(_HEADERS_SECONDS, self.timeout_keep_alive_handler)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def _readable(listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(listening, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listening)


def _run(
    server: _Server, engine: Engine, listening: socket.socket, is_ready: Callable[[], None] = lambda: None
) -> None:
    """Until the server is asked to stop, or a model cannot be loaded."""

    def watch() -> None:
        try:
            engine.wait()
        except Exception:
            server.stop()
        else:
            is_ready()

    threading.Thread(target=watch, daemon=True).start()
    server.run(sockets=[listening])


def _why(failure: Exception) -> PatchlightError:
    if isinstance(failure, PatchlightError):
        return failure
    return PatchlightError(f"the model could not be loaded ({type(failure).__name__}: {failure!s:.200})")


def _end_at_once(code: int) -> NoReturn:
    """Without taking Python apart: a thread that comes back from torch meanwhile is made to end by Python, in the midst
    of C++ that forbids it, and the process is aborted (exit code 134, "terminate called without an active exception").
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            stream.flush()
    os._exit(code)


def _announce(
    listening: socket.socket,
    address: Address,
    access: AccessPolicy,
    tell: Callable[[str], None],
    *,
    open_page: bool,
) -> None:
    """Say where the server is, and open the page where that is wanted."""
    port = listening.getsockname()[1]
    shown = address.host if address.host not in ("0.0.0.0", "::") else (*address.names, "localhost")[0]
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    tell(f"{url}{'#token=' + access.token if access.remote else ''}")
    if not access.remote:
        tell(f"token for the API: {access.token}")
    if open_page and sys.stdout.isatty():
        threading.Thread(target=lambda: webbrowser.open(url), daemon=True).start()
