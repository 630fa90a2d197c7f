"""The API under /api/v1, put together from the routes of each topic, and the page, which uses nothing else."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from patchlight import __version__
from patchlight.errors import PatchlightError
from patchlight.images.decode import ImageError
from patchlight.serve import answers
from patchlight.serve.crop_routes import add_crop_routes
from patchlight.serve.engine import Engine, UnknownModelError
from patchlight.serve.guard import TOKEN_HEADER, AccessPolicy, Guard, error_body, log_line
from patchlight.serve.look_routes import add_look_routes
from patchlight.serve.model_routes import add_model_routes
from patchlight.serve.photo_routes import add_photo_routes
from patchlight.serve.photos import UnknownPhotoError
from patchlight.serve.queues import BusyError
from patchlight.serve.state import ServerState

WEB = Path(__file__).with_name("web")
PREFIX = "/api/v1"

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".jpg": "image/jpeg",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": answers.Error, "description": words}
    for status, words in {
        400: "The request is malformed",
        401: "The token is missing or wrong",
        403: "Sent by a page of another site",
        404: "No such photo or model, or no longer",
        408: "The request did not arrive in time",
        413: "Too many bytes",
        415: "Not a photo in a form",
        421: "The Host header does not name this server",
        422: "An invalid value, or a photo that cannot be used: `reason` says why",
        503: "Too many requests, or the model is being loaded; Retry-After says when to come again",
        504: "It took too long",
    }.items()
}


def make_app(
    engine: Engine, access: AccessPolicy, log: Callable[[Mapping[str, Any]], None] = log_line, workers: int = 2
) -> Guard:
    """The ASGI application; the engine is started and closed with it."""
    state = ServerState(engine, workers)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        state.stopping = True
        await asyncio.to_thread(state.close)

    app = FastAPI(
        title="Patchlight",
        version=__version__,
        description=(
            "Where the subject of a photo is, and what a Vision Transformer attends to. Requests other than GET need "
            f"the header `{TOKEN_HEADER}` with the token that the server printed."
        ),
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,  # they would be loaded from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.include_router(_routes(state), prefix=PREFIX)
    _add_health(app, state)
    _add_page(app, "" if access.remote else access.token)
    _add_errors(app)
    return Guard(app, access, engine.limits, log)


def _routes(state: ServerState) -> APIRouter:
    api = APIRouter(responses=_ERRORS)
    add_model_routes(api, state)
    add_photo_routes(api, state)
    add_crop_routes(api, state)
    add_look_routes(api, state)
    return api


def _add_health(app: FastAPI, state: ServerState) -> None:
    @app.get("/livez", tags=["health"])
    async def livez() -> answers.Health:
        """The process answers."""
        return answers.Health(status="ok")

    @app.get(
        "/readyz", tags=["health"], responses={503: {"model": answers.Health, "description": "Not yet, or no longer"}}
    )
    async def readyz(response: Response) -> answers.Health:
        """The models are loaded, and photos are welcome."""
        if state.engine.ready and not state.stopping:
            return answers.Health(status="ok")
        response.status_code = 503
        response.headers["retry-after"] = "1"
        return answers.Health(status="stopping" if state.stopping else "loading")


def _add_page(app: FastAPI, token: str) -> None:
    """The files of the page, read once: nothing that a client says leads to a path."""
    files = {
        str(path.relative_to(WEB).as_posix()): (path.read_bytes(), _KINDS[path.suffix])
        for path in sorted(WEB.rglob("*"))
        if path.suffix in _KINDS
    }
    page, _ = files.pop("index.html")
    page = page.replace(b"{token}", token.encode())
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, (content, _) in files.items()}

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
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


def _add_errors(app: FastAPI) -> None:
    """Every failure is JSON of one shape."""

    def answer(
        make: Callable[[Any], Response],
    ) -> Callable[[Request, Any], Coroutine[Any, Any, Response]]:
        async def handler(request: Request, error: Any) -> Response:
            return make(error)

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
        Exception: lambda error: failed(500, "internal", "something went wrong here; the log says what"),
    }
    for kind, make in handlers.items():
        app.add_exception_handler(kind, answer(make))


_REASONS = {400: "request", 404: "not-found", 405: "method", 415: "media-type", 422: "value"}
