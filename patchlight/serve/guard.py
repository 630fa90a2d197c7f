"""What every request passes before it reaches the API: who may ask, how much, how long; and the log.

A page from anywhere on the web can make this machine's browser send requests here. So the Host has to be one of ours
(a rebound name is not), a request to the API has to come from our own page or from none at all (Origin), and one that
changes something has to bring the token, which only our page and the terminal know.
"""

import asyncio
import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchlight.serve.limits import Limits
from patchlight.serve.spent import Spent, begin

PREFIX = "/api/v1"
TOKEN_HEADER = "x-patchlight-token"
LINGER_SECONDS = 2.0
HEALTH = ("/livez", "/readyz")

_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]


@dataclass(frozen=True, kw_only=True)
class AccessPolicy:
    """Who may come in."""

    token: str
    hosts: frozenset[str]
    """The names, with their ports, by which this server may be called."""
    remote: bool = False
    """Whether others than this machine can reach it: then nothing is answered without the token but the page itself."""


class RefusedError(Exception):
    """With the status and the words that the client gets."""

    def __init__(self, status: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after


def error_body(reason: str, message: str) -> dict[str, Any]:
    return {"error": {"reason": reason, "message": message}}


def log_line(facts: Mapping[str, Any]) -> None:
    """One JSON object a line, on standard error."""
    sys.stderr.write(json.dumps(facts) + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered, as metrics and traces tell it."""

    scope: Scope
    status: int
    start_ns: int
    """Since the epoch."""
    seconds: float
    spent: Spent = field(default_factory=Spent)

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method if method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS") else "other"

    @property
    def route(self) -> str:
        """Of its path, which may hold a photo's id, the pattern."""
        route: str = getattr(self.scope.get("route"), "path", "refused" if 400 <= self.status < 500 else "other")
        if self.scope["path"].startswith(f"{PREFIX}/") and route.startswith("/"):  # some FastAPIs leave it out
            route = PREFIX + route.removeprefix(PREFIX)
        return route

    @property
    def headers(self) -> Mapping[str, str]:
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.scope["headers"]}


class Guard:
    """ASGI around the API."""

    def __init__(
        self,
        app: ASGIApp,
        access: AccessPolicy,
        limits: Limits,
        log: Callable[[Mapping[str, Any]], None] = log_line,
        told: Callable[[Answered], None] = lambda answered: None,
    ) -> None:
        self.app = app
        self.access = access
        self.limits = limits
        self.log = log
        self.told = told
        self._inside = 0
        self._uploads = asyncio.Semaphore(limits.uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # there are no websockets here
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, start_ns, status, sent = time.perf_counter(), time.time_ns(), 0, 0
        spent = begin()
        facts: dict[str, Any] = {}
        healthy = scope["path"] in HEALTH

        async def send_guarded(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        async def send_for_app(message: Message) -> None:
            if body.refused is None:  # else it does not matter what the application makes of it
                await send_guarded(message)

        body = _Body(receive)
        self._inside += 1
        try:
            await self._let_in(scope, body, send_for_app)
            if body.refused is not None:
                raise body.refused
        except Exception as error:
            refused = body.refused or error
            if isinstance(refused, RefusedError):
                facts["refused"] = refused.reason
            else:
                facts["error"] = f"{type(error).__name__}: {error}"
                refused = RefusedError(500, "internal", "something went wrong here; the log says what")
            if not status:
                await _refuse(refused, send_guarded, body)
        finally:
            self._inside -= 1
            if not healthy:
                seconds = time.perf_counter() - start
                self.told(Answered(scope, status, start_ns, seconds, spent))
                if spent.photos:
                    facts = {
                        "model": spent.model,
                        "photos": spent.photos,
                        "queue_ms": round(1000 * spent.queue_seconds, 1),
                        "model_ms": round(1000 * spent.model_seconds, 1),
                    } | facts
                took = round(1000 * seconds, 1)
                request = {"method": scope["method"], "path": scope["path"][:200], "status": status}
                self.log({"time": round(time.time(), 3), **request, "ms": took, "bytes": sent, **facts})

    async def _let_in(self, scope: Scope, body: "_Body", send: Send) -> None:
        self._check(scope)
        if self._inside > self.limits.requests and scope["path"] not in HEALTH:
            raise RefusedError(503, "busy", f"{self.limits.requests} requests are being answered", 1)
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                await self._pass_on(scope, body, send)
        except TimeoutError:
            raise RefusedError(504, "timeout", "this took too long and was cancelled") from None

    def _check(self, scope: Scope) -> None:
        headers: MutableMapping[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)

        def one(name: bytes) -> str | None:
            values = headers.get(name, [])
            if len(values) > 1:
                raise RefusedError(400, "headers", f"{name.decode()} was given more than once")
            return values[0].decode("latin-1").strip().lower() if values else None

        host = one(b"host")
        if host not in self.access.hosts:
            raise RefusedError(421, "host", "unknown host name; use the address that the server printed")
        origin, site = one(b"origin"), one(b"sec-fetch-site")
        is_api = scope["path"].startswith(("/api/", "/v2", "/metrics"))
        ours = origin is None or origin == f"{scope.get('scheme', 'http')}://{host}"
        if is_api and (not ours or site not in (None, "same-origin", "none")):
            raise RefusedError(403, "origin", "other pages may not use this API")
        unsafe = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if unsafe and not ours:
            raise RefusedError(403, "origin", "other pages may not send anything here")
        if unsafe or (is_api and self.access.remote):
            bearer = headers.get(b"authorization", [b""])[0].partition(b"Bearer ")[
                2
            ]  # as Prometheus and others send it
            given = headers.get(TOKEN_HEADER.encode(), [bearer])[0]
            if not secrets.compare_digest(given, self.access.token.encode()):
                raise RefusedError(
                    401, "token", f"send the token that the server printed, as the header {TOKEN_HEADER}"
                )
        length = one(b"content-length")
        if length is not None and not (length.isascii() and length.isdecimal()):
            raise RefusedError(400, "headers", "content-length is not a number")
        if length is not None and int(length) > self._room(scope):
            raise RefusedError(413, "too-large", f"more than {self._room(scope):,} bytes are not taken")

    def _room(self, scope: Scope) -> int:
        return self.limits.upload_bytes if _is_upload(scope) else self.limits.body_bytes

    async def _pass_on(self, scope: Scope, body: "_Body", send: Send) -> None:
        if _is_upload(scope):
            async with self._uploads:  # those that wait here are not read, and cost nothing
                await self.app(scope, body.within(self._room(scope), self.limits.body_seconds), send)
        else:
            await self.app(scope, body.within(self._room(scope), self.limits.body_seconds), send)


class _Body:
    """What a request sends, as far as it is read."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.whole = False
        self.refused: RefusedError | None = None
        """Why no more of it is read."""

    async def next(self, seconds: float) -> Message:
        async with asyncio.timeout(max(0.0, seconds)):
            message = await self.receive()
        self.whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    def within(self, room: int, seconds: float) -> Receive:
        """The same for the application, up to so many bytes and for so long."""
        deadline, taken = time.monotonic() + seconds, 0

        async def receive() -> Message:
            nonlocal taken
            if self.whole:  # what comes now is the end of the connection
                return await self.receive()
            try:
                message = await self.next(deadline - time.monotonic())
            except TimeoutError:
                self.refused = RefusedError(408, "timeout", "the request did not arrive in time")
                raise self.refused from None
            taken += len(message.get("body", b""))
            if taken > room:
                self.refused = RefusedError(413, "too-large", f"more than {room:,} bytes are not taken")
                raise self.refused
            return message

        return receive

    async def drain(self, seconds: float) -> None:
        """Read what still comes, for a moment: a client that is busy sending would not hear the answer otherwise."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while not self.whole:
                await self.next(deadline - time.monotonic())


def _is_upload(scope: Scope) -> bool:
    """Of photos, or of tensors that are as large."""
    path = scope["path"]
    takes_photos = path in ("/api/v1/photos", "/api/v1/predict") or (
        path.startswith("/v2/") and path.endswith("/infer")
    )
    return scope["method"] == "POST" and takes_photos


async def _refuse(refused: RefusedError, send: Send, body: _Body) -> None:
    content = json.dumps(error_body(refused.reason, refused.message)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),  # what was not read of the request is not the next one
    ]
    if refused.retry_after is not None:
        headers.append((b"retry-after", str(refused.retry_after).encode()))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    await body.drain(LINGER_SECONDS)
    await send({"type": "http.response.body", "body": b""})
