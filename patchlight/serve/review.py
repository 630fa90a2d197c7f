"""`patchlight review`: a page on which a person corrects what a run has found, photo by photo.

Each correction is on the disk (corrections.jsonl) before the page hears that it was saved; crops, rows and exports
follow a moment later, see batch/again.py.
"""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from PIL import Image

from patchlight import __version__
from patchlight.batch.again import FinishedRun, Follower
from patchlight.batch.inputs import absolute_path
from patchlight.batch.overrides import add_correction, check_correction, read_corrections
from patchlight.batch.rows import Row, read_rows
from patchlight.errors import PatchlightError
from patchlight.geometry import fit_inside
from patchlight.images.decode import decode
from patchlight.json_config import parse_json
from patchlight.remote import is_remote
from patchlight.serve.guard import PREFIX, AccessPolicy, Guard, log_line
from patchlight.serve.limits import Limits
from patchlight.serve.page import add_errors, add_page
from patchlight.serve.queues import Workers

Number = Annotated[int, InPath(ge=0, le=10_000_000)]


_KEPT = ("decision", "boxes", "group", "label", "undone")
"""Of what the page sends."""


class Review:
    """The photos of a run, as they are corrected."""

    def __init__(self, run: FinishedRun) -> None:
        self.run = run
        corrections = read_corrections(run.folder)
        self.files: list[str] = []
        """The absolute paths of photos that have finds, or could have."""
        self.shown: list[dict[str, Any]] = []
        """What the page is told of each."""
        for row in read_rows(run.results):
            if row["status"] == "ok":
                file = _file_of(row)
                self.files.append(file)
                self.shown.append(_shown(len(self.shown), row, corrected=file in corrections))
        self.follower = Follower(self._follow)

    def _follow(self) -> None:
        """And show what the rows say then, unless there is something newer."""
        behind = self.follower.behind
        self.run.follow()
        corrections = read_corrections(self.run.folder)
        numbers = {file: number for number, file in enumerate(self.files)}
        rows = [row for row in read_rows(self.run.results) if row["status"] == "ok"]
        if self.follower.behind != behind:
            return
        for row in rows:
            file = _file_of(row)
            if (number := numbers.get(file)) is not None:
                self.shown[number] = _shown(number, row, corrected=file in corrections)

    def correct(self, number: int, correction: Mapping[str, Any]) -> dict[str, Any]:
        """Save a correction; what is said of the photo now, where that is known at once."""
        try:
            override = check_correction(dict(correction))
        except ValueError as error:
            raise PatchlightError(str(error)) from None
        kept = {name: correction[name] for name in _KEPT if name in correction}
        add_correction(self.run.folder, self.files[number], kept)
        shown = self.shown[number]
        if override is None:
            shown |= shown.get("found", {}) | {"corrected": False}
        else:
            before = {name: shown[name] for name in ("decision", "boxes", "group", "label", "confidence")}
            shown.setdefault("found", before)
            boxes = [list(box) for box in override.boxes]
            shown |= {"decision": override.decision, "boxes": boxes, "group": override.group, "label": override.label}
            shown |= {"confidence": 1.0, "corrected": True}
        self.follower.note()
        return shown

    def names(self, kind: str) -> list[str]:
        """That photos have, the commonest first."""
        counts: dict[str, int] = {}
        for each in self.shown:
            if each[kind] is not None:
                counts[each[kind]] = counts.get(each[kind], 0) + 1
        return sorted(counts, key=lambda name: (-counts[name], name))[:500]


def _file_of(row: Row) -> str:
    """What corrections call its photo: the absolute path, or the address of one that lies elsewhere."""
    path: str = row["path"]
    return path if is_remote(path) else absolute_path(path)


def _shown(number: int, row: Row, *, corrected: bool) -> dict[str, Any]:
    return {
        "number": number,
        "path": row["path"].encode(errors="replace").decode(),
        "width": row["size"][0],
        "height": row["size"][1],
        "decision": row["decision"],
        "confidence": row["confidence"],
        # The box of a photo that shows nothing is no more than a guess.
        "boxes": [box["xyxy"] for box in row["boxes"]] if row["decision"] != "none" else [],
        "group": row["group"],
        "label": row["label"],
        "corrected": corrected,
    }


def make_review_app(review: Review, access: AccessPolicy, log: Callable[[Mapping[str, Any]], None] = log_line) -> Guard:
    """The ASGI application; what is still to be written is written when it ends."""
    limits = Limits()
    workers = Workers(2, limit=limits.waiting_work)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(review.follower.close)
        workers.close()

    app = FastAPI(version=__version__, openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    api = APIRouter()

    def known(number: int) -> int:
        if number >= len(review.files):
            raise HTTPException(404, "there is no such photo")
        return number

    @api.get("/review")
    async def everything() -> dict[str, Any]:
        return {
            "folder": str(review.run.folder).encode(errors="replace").decode(),
            "photos": review.shown,
            "labels": review.names("label"),
            "groups": review.names("group"),
        }

    @api.get("/review/state")
    async def state() -> dict[str, Any]:
        """How many corrections crops and tables do not say yet."""
        return {"behind": review.follower.behind, "trouble": review.follower.trouble}

    @api.get("/review/photos/{number}/image")
    async def image(number: Number, side: Annotated[int, Query(ge=16, le=2048)] = 1440) -> Response:
        file = review.files[known(number)]
        content = await asyncio.wrap_future(workers.submit(_preview, file, side))
        return Response(content, media_type="image/jpeg")

    @api.put("/review/photos/{number}")
    async def correct(number: Number, request: Request) -> dict[str, Any]:
        try:
            given = parse_json(await request.body())
        except ValueError:
            raise HTTPException(422, "a correction is JSON") from None
        if not isinstance(given, dict):
            raise HTTPException(422, "a correction is an object")
        return await asyncio.to_thread(review.correct, known(number), given)

    app.include_router(api, prefix=PREFIX)
    add_page(app, "review.html", "" if access.remote else access.token)
    add_errors(app)
    return Guard(app, access, limits, log)


def _preview(file: str, side: int) -> bytes:
    decoded = decode(file, fast_size=(max(1, side // 2),) * 2)
    height, width = fit_inside(decoded.source_size, side)
    region = decoded.region
    ends = (region.left, region.top, region.right, region.bottom)
    content = io.BytesIO()
    decoded.image.resize((width, height), Image.Resampling.BICUBIC, ends, reducing_gap=2.0).save(
        content, "JPEG", quality=85
    )
    return content.getvalue()
