"""The API under /api/v1, put together from the routes of each topic, and the page, which uses nothing else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Response

from patchlight import __version__
from patchlight.serve import answers
from patchlight.serve.crop_routes import add_crop_routes
from patchlight.serve.engine import Engine
from patchlight.serve.guard import PREFIX, TOKEN_HEADER, AccessPolicy, Answered, Guard, log_line
from patchlight.serve.kserve_routes import add_kserve_routes
from patchlight.serve.look_routes import add_look_routes
from patchlight.serve.metrics import Metrics, add_metrics
from patchlight.serve.model_routes import add_model_routes
from patchlight.serve.page import add_errors, add_page
from patchlight.serve.photo_routes import add_photo_routes
from patchlight.serve.predict_routes import add_predict_routes
from patchlight.serve.state import ServerState
from patchlight.serve.telemetry import start_telemetry

_NO_PAGE = "The page shows what ViTs see, and no ViT is served here. POST photos to /api/v1/predict.\n"
_MANY = (
    "photos are kept in the memory of one process, and here several answer (--workers): POST photos to "
    "/api/v1/predict, or start `patchlight serve` without --workers"
)

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
    engine: Engine,
    access: AccessPolicy,
    log: Callable[[Mapping[str, Any]], None] = log_line,
    threads: int = 2,
    shared: Path | None = None,
) -> Guard:
    """The ASGI application; the engine is started and closed with it. `shared`: this is one of several processes that
    answer at one socket, and count in this folder; then there is no page, and no photo is kept."""
    state = ServerState(engine, threads)
    metrics = Metrics(state, shared)
    engine.told = metrics.count_batch
    telemetry = start_telemetry()

    def told(answered: Answered) -> None:
        metrics.count(answered)
        if telemetry is not None:
            telemetry.tell(answered)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        async with metrics.kept_fresh() if shared else contextlib.nullcontext():
            yield
            state.stopping = True
            await asyncio.to_thread(state.close)
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)

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
    app.include_router(_routes(state, photos=shared is None), prefix=PREFIX)
    kserve = APIRouter(include_in_schema=False)  # its document is the protocol's own
    add_kserve_routes(kserve, state)
    app.include_router(kserve)
    add_metrics(app, metrics)
    _add_health(app, state)

    def instead() -> str | None:
        """What stands in the page's place, where there is nothing that it could show."""
        if shared is not None:
            return f"There is no page: {_MANY}.\n"
        return _NO_PAGE if engine.ready and not any(served.is_shown for served in engine.models) else None

    add_page(app, "index.html", "" if access.remote else access.token, instead)
    add_errors(app)
    return Guard(app, access, engine.limits, log, told)


def _routes(state: ServerState, *, photos: bool) -> APIRouter:
    """`photos`: those of photos that are kept, too."""
    api = APIRouter(responses=_ERRORS)
    add_model_routes(api, state)
    add_predict_routes(api, state)
    if photos:
        add_photo_routes(api, state)
        add_crop_routes(api, state)
        add_look_routes(api, state)
    else:
        _refuse_photos(api)
    return api


def _refuse_photos(api: APIRouter) -> None:
    @api.api_route("/photos", methods=["POST"], include_in_schema=False)
    @api.api_route("/photos/{rest:path}", methods=["GET", "DELETE"], include_in_schema=False)
    @api.api_route("/crops", methods=["POST"], include_in_schema=False)
    async def refuse() -> Response:
        raise HTTPException(404, _MANY)


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
