"""`patchlight serve`: from the command line to a server that listens, and back."""

import os
import secrets
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn

from patchlight.batch.again import FinishedRun
from patchlight.errors import PatchlightError
from patchlight.serve.app import make_app
from patchlight.serve.engine import Engine
from patchlight.serve.guard import AccessPolicy, Guard
from patchlight.serve.limits import Limits
from patchlight.serve.review import Review, make_review_app
from patchlight.signals import STOPPING

LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        return socket.create_server((address.host, address.port), family=family, backlog=128)
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
    # The other cores read photos, cut crops and show the page; threads that wait for each other on busy cores are slow.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    engine = Engine(models, exported=exported, device=device, limits=limits)
    server = _server(lambda access: make_app(engine, access), listening, address, tell, open_page=open_page)

    def watch() -> None:
        """A model that cannot be loaded ends the server."""
        try:
            engine.wait()
        except Exception:
            server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
    server.run(sockets=[listening])
    if not engine.close():
        # A thread that is still at work in torch when Python takes itself apart aborts the process (exit code 134).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if isinstance(engine.failure, PatchlightError):
        raise engine.failure
    if engine.failure is not None:
        raise PatchlightError(
            f"the model could not be loaded ({type(engine.failure).__name__}: {engine.failure!s:.200})"
        )


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
        server = _server(
            lambda access: make_review_app(reviewed, access), listening, address, tell, open_page=open_page
        )
        server.run(sockets=[listening])
    finally:
        reviewed.follower.close()
    if reviewed.follower.trouble is not None:
        raise PatchlightError(
            f"{reviewed.follower.trouble}; the corrections are safe, and `patchlight crop` follows them when it can"
        )


def _server(
    make: Callable[[AccessPolicy], Guard],
    listening: socket.socket,
    address: Address,
    tell: Callable[[str], None],
    *,
    open_page: bool,
) -> uvicorn.Server:
    """A server that is told of signals, for this socket; the page is opened where that is wanted."""
    port = listening.getsockname()[1]
    access = access_policy(address, port)
    config = uvicorn.Config(
        make(access),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=20,
        ws="none",
        proxy_headers=False,
    )
    server = uvicorn.Server(config)

    def stop(number: int, frame: Any) -> None:
        # Heard before uvicorn listens to signals itself, and again after it has ended, when it raises them once more.
        server.should_exit = True

    for number in STOPPING:
        signal.signal(number, stop)
    shown = address.host if address.host not in ("0.0.0.0", "::") else (*address.names, "localhost")[0]
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    tell(f"{url}{'#token=' + access.token if access.remote else ''}")
    if not access.remote:
        tell(f"token for the API: {access.token}")

    if open_page and sys.stdout.isatty():
        threading.Thread(target=lambda: webbrowser.open(url), daemon=True).start()
    return server
