"""What every server of ours has: the files of its page, and what a failure says."""

import hashlib
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from python_multipart.exceptions import FormParserError
from starlette.exceptions import HTTPException as StarletteHTTPException

from patchlight.errors import PatchlightError
from patchlight.images.decode import ImageError
from patchlight.serve.engine import UnknownModelError
from patchlight.serve.guard import error_body
from patchlight.serve.photos import UnknownPhotoError
from patchlight.serve.queues import BusyError

WEB = Path(__file__).with_name("web")

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".jpg": "image/jpeg",
}


def add_page(app: FastAPI, page_name: str, token: str, instead: Callable[[], str | None] = lambda: None) -> None:
    """A page and the files of all pages, read once: nothing that a client says leads to a path. `instead` may give a
    text that is shown in its place."""
    files = {
        str(path.relative_to(WEB).as_posix()): (path.read_bytes(), _KINDS[path.suffix])
        for path in sorted(WEB.rglob("*"))
        if path.suffix in _KINDS
    }
    page = files[page_name][0].replace(b"{token}", token.encode())
    files = {name: file for name, file in files.items() if not name.endswith(".html")}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, (content, _) in files.items()}

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        if (text := instead()) is not None:
            return Response(text, media_type="text/plain")
        return Response(page, media_type=_KINDS[".html"], headers={"cache-control": "no-store"})

    @app.get("/web/{name:path}", include_in_schema=False)
    async def web(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file")
        content, kind = files[name]
        headers = {"cache-control": "no-cache", "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)


def add_errors(app: FastAPI) -> None:
    """Every failure is JSON of one shape."""

    def answer(
        make: Callable[[Any], Response],
    ) -> Callable[[Request, Any], Coroutine[Any, Any, Response]]:
        async def handler(request: Request, error: Any) -> Response:
            response = make(error)
            if not request.url.path.startswith("/v2"):
                return response
            # KServe's protocol has a text where we have a reason and a message.
            message = json.loads(bytes(response.body))["error"]["message"]
            retry = {name: value for name, value in response.headers.items() if name == "retry-after"}
            status = 400 if response.status_code == 422 else response.status_code
            return JSONResponse({"error": message}, status, headers=retry)

        return handler

    def failed(status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse(error_body(reason, message), status, headers=dict(headers or {}))

    def invalid(error: RequestValidationError) -> Response:
        first = error.errors()[0] if error.errors() else {"loc": (), "msg": "not in order"}
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, str | int))
        return failed(422, "value", f"{place}: {first['msg']}"[:300])

    def http(error: StarletteHTTPException) -> Response:
        return failed(error.status_code, _REASONS.get(error.status_code, "request"), str(error.detail), error.headers)

    handlers: dict[type[Exception], Callable[[Any], Response]] = {
        RequestValidationError: invalid,
        StarletteHTTPException: http,
        UnknownPhotoError: lambda error: failed(404, "unknown-photo", str(error)),
        UnknownModelError: lambda error: failed(404, "unknown-model", str(error)),
        BusyError: lambda error: failed(503, "busy", str(error), {"retry-after": str(error.retry_after)}),
        ImageError: lambda error: failed(422, error.reason, error.detail),
        PatchlightError: lambda error: failed(422, "value", str(error)),
        FormParserError: lambda error: failed(400, "request", "the form is malformed"),  # older Starlettes pass it on
        Exception: lambda error: failed(500, "internal", "something went wrong here; the log says what"),
    }
    for kind, make in handlers.items():
        app.add_exception_handler(kind, answer(make))


_REASONS = {400: "request", 404: "not-found", 405: "method", 415: "media-type", 422: "value"}
