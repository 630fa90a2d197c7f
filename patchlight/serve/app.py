"""The API under /api/v1, and the page, which uses nothing else."""

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import math
import re
import zipfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import safetensors.torch
import torch.nn.functional as F
from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import Image
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from torch import Tensor

from patchlight import __version__
from patchlight.classification import check_names_classes, likeliest
from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.explain.attention import resolve_layers, resolve_queries
from patchlight.explain.probes import position_similarity
from patchlight.explain.shuffling import shuffled_order
from patchlight.geometry import Box, View
from patchlight.images.crop import SUFFIXES, Crop, Cut, cut_out, parse_aspect, region_around
from patchlight.images.decode import Decoded, ImageError, decode
from patchlight.localizing.find import read
from patchlight.localizing.heat import resolve_method
from patchlight.serve import answers
from patchlight.serve.engine import Engine, Seen, Served, UnknownModelError, subjects_in
from patchlight.serve.guard import TOKEN_HEADER, Door, Guard, error_body, log_line
from patchlight.serve.limits import Limits
from patchlight.serve.line import BusyError, Workers
from patchlight.serve.photos import Photo, Photos, UnknownPhotoError, crop_stem, plain_name
from patchlight.weights.load import Loaded

WEB = Path(__file__).with_name("web")
PREFIX = "/api/v1"
SAMPLES = ("chelsea", "coffee", "rocket", "astronaut", "dragonfly")

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
        400: "The request is not in order",
        401: "The token is missing or wrong",
        403: "Asked by a page of somebody else",
        404: "There is no such photo or model, or no longer",
        408: "The request did not arrive in time",
        413: "Too many bytes",
        415: "Not a photo in a form",
        421: "Called by a name that is not this server's",
        422: "A value that cannot be, or a photo that cannot be used: `reason` says why",
        503: "Too many requests, or the model is being loaded; Retry-After says when to come again",
        504: "It took too long",
    }.items()
}
_BINARY: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "A safetensors file"}
}

P = ParamSpec("P")
T = TypeVar("T")

Number = Annotated[int, Query(ge=0, le=1000, description="Of the model, as /models lists them")]
Layer = Annotated[int, Query(ge=-1000, le=1000, description="Of the block, from 0, or from -1 backwards")]
Edge = Annotated[float, Query(ge=-1e6, le=1e6, description="In pixels of the upright photo")]
Margin = Annotated[float, Query(ge=0, le=2, description="On every side, as a share of the box's sides")]
Aspect = Annotated[str, Query(max_length=12, description="free, or width:height such as 1:1")]
Method = Literal["auto", "subject", "cls", "rollout", "lost", "tokencut", "features"]


def make_app(
    engine: Engine, door: Door, log: Callable[[Mapping[str, Any]], None] = log_line, workers: int = 2
) -> Guard:
    """The ASGI application; the engine is started and closed with it."""
    desk = Desk(engine, workers)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        desk.stopping = True
        await asyncio.to_thread(desk.close)

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
    app.include_router(_routes(desk), prefix=PREFIX)
    _add_health(app, desk)
    _add_page(app, "" if door.remote else door.token)
    _add_errors(app)
    return Guard(app, door, engine.limits, log)


class Desk:
    """What the requests share."""

    def __init__(self, engine: Engine, workers: int) -> None:
        self.engine = engine
        self.limits: Limits = engine.limits
        self.photos = Photos(engine.limits)
        self.workers = Workers(workers, limit=engine.limits.waiting_work)
        self.stopping = False
        self._under_way: dict[tuple[str, int, str], asyncio.Task[Seen]] = {}
        self._timed: dict[ViTConfig, float] = {}

    def close(self) -> None:
        self.workers.close()
        self.engine.close()

    async def work(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self.workers.submit(call, *args, **kwargs))

    def add(self, photo: Photo) -> None:
        for gone in self.photos.add(photo):
            self.engine.forget(gone)

    async def prepared(self, photo: Photo, served: Served) -> tuple[Tensor, View]:
        """The photo as the model takes it, exactly as `pl.localize` prepares it."""
        ready = photo.prepared.pop(served.number, None)  # not kept: it is larger than the file, and soon made again
        if ready is None:
            ready = await self.work(_prepare, served.loaded, photo.content, self.limits.pixels)
        return ready

    async def seen(self, photo: Photo, number: int, method: str = "auto") -> tuple[Served, Seen]:
        """What the model did with the photo; one forward pass, however many ask for it."""
        served = self.engine.model(number)
        used = resolve_method(served.loaded, method)
        known = self.engine.known(photo.id, number)
        if known is not None and used in known.heat:
            return served, known
        key = (photo.id, number, used)
        if key not in self._under_way:
            task = asyncio.create_task(self._look(photo, served, used))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return served, await asyncio.shield(self._under_way[key])

    async def _look(self, photo: Photo, served: Served, method: str) -> Seen:
        image_CHW, view = await self.prepared(photo, served)
        seen = await asyncio.wrap_future(self.engine.look(served, image_CHW, view, method))
        return self.engine.keep(photo.id, served.number, seen)

    async def latency(self, served: Served, config: ViTConfig, macs: int) -> float | None:
        """Milliseconds, measured; None where one pass would take too long."""
        if config not in self._timed:
            if served.latency_ms / 1000 * macs / served.macs > self.limits.timed_seconds:
                return None
            self._timed[config] = (await asyncio.wrap_future(self.engine.latency(config))).median_ms
        return self._timed[config]


# The API


def _routes(desk: Desk) -> APIRouter:
    api = APIRouter(responses=_ERRORS)
    engine, limits = desk.engine, desk.limits

    @api.get("/models")
    async def models() -> answers.Models:
        """The models that are served; empty until they are loaded."""
        served = engine.models if engine.ready else ()
        return answers.Models(ready=engine.ready, models=[_info(each) for each in served], version=__version__)

    @api.get("/models/{model}/positions", response_class=Response, responses=_BINARY)
    async def positions(model: int) -> Response:
        """How alike the model takes two positions to be: `similarity` (h, w, h, w) float32."""
        served = engine.model(model)
        similarity_hwhw = await desk.work(position_similarity, served.vit)
        return _tensors({"similarity": similarity_hwhw.float().cpu().contiguous()})

    @api.get("/costs")
    async def costs(
        model: Number = 0,
        patch_size: Annotated[int, Query(ge=4, le=64)] = 16,
        image_size: Annotated[int, Query(ge=32, le=limits.image_size, description="Of a side, in pixels")] = 224,
        timed: bool = False,
    ) -> answers.CostsAnswer:
        """What a model of this kind costs with other patches or images."""
        served = engine.model(model)
        side = patch_size * max(1, round(image_size / patch_size))
        config = dataclasses.replace(served.config, patch_size=(patch_size,) * 2, image_size=(side, side))
        counted = await asyncio.wrap_future(engine.costs(config))
        latency = await desk.latency(served, config, counted.macs) if timed else None
        values = counted.to_dict() | {"image_size": side, "patch_size": patch_size, "latency_ms": latency}
        return answers.CostsAnswer(**values | {"grid": list(counted.grid)})

    @api.post("/photos", status_code=201, openapi_extra={"requestBody": _UPLOAD})
    async def send_photo(request: Request) -> answers.PhotoInfo:
        """Send a photo, as the part `photo` of a form. It is kept in memory until others need the room."""
        served = engine.model(0)
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise HTTPException(415, "send the photo as the part `photo` of a multipart form")
        async with request.form(max_files=1, max_fields=0) as form:
            part = form.get("photo")
            if not isinstance(part, UploadFile):
                raise HTTPException(422, "the form has no file called `photo`")
            content, name = await part.read(), plain_name(part.filename)
        decoded = await desk.work(_read, served.loaded, content, limits.pixels)
        height, width = decoded.source_size
        photo = Photo(content=content, name=name, size=(height, width), format=decoded.format or "image")
        photo.prepared[0] = await desk.work(served.loaded.preprocess, decoded)
        desk.add(photo)
        return _photo_info(photo)

    @api.get("/photos/{photo}")
    async def photo_info(photo: answers.PhotoId) -> answers.PhotoInfo:
        return _photo_info(desk.photos.get(photo))

    @api.delete("/photos/{photo}", status_code=204)
    async def forget(photo: answers.PhotoId) -> None:
        """Let go of a photo and of all that was seen in it."""
        desk.photos.remove(photo)
        engine.forget(photo)

    @api.get(
        "/photos/{photo}/preview",
        response_class=Response,
        responses={200: {"content": {"image/jpeg": {}}, "description": "An upright JPEG"}},
    )
    async def preview(photo: answers.PhotoId, side: Annotated[int, Query(ge=16, le=2048)] = 1440) -> Response:
        """The photo with a longer side of this many pixels at most."""
        content = desk.photos.get(photo).content
        return Response(await desk.work(_preview, content, side, limits.pixels), media_type="image/jpeg")

    @api.get("/photos/{photo}/localize")
    async def localize(
        photo: answers.PhotoId,
        model: Number = 0,
        method: Method = "auto",
        subjects: Annotated[int, Query(ge=0, le=100, description="How many at most; 0: all")] = 1,
    ) -> answers.Found:
        """Where the subjects are, exactly as `patchlight.localize` says."""
        served, seen = await desk.seen(desk.photos.get(photo), model, method)
        found = subjects_in(seen, served.loaded, method, subjects or None)
        return answers.Found(
            decision=found.decision,
            confidence=float(found.confidence),
            method=found.method,
            subjects=[answers.FoundSubject(box=_corners(each.box), score=float(each.score)) for each in found.subjects],
            heat=_heat_map(seen, found.heat_hw),
            mask=found.mask_hw.int().flatten().tolist(),
        )

    @api.get("/photos/{photo}/region")
    async def region(
        photo: answers.PhotoId,
        left: Edge,
        top: Edge,
        right: Edge,
        bottom: Edge,
        margin: Margin = 0.03,
        aspect: Aspect = "free",
    ) -> answers.Region:
        """What a crop around this box would show, without cutting it."""
        size = desk.photos.get(photo).size
        shown = region_around(_box([left, top, right, bottom], size), size, margin=margin, aspect=parse_aspect(aspect))
        return answers.Region(region=list(shown), width=shown[2] - shown[0], height=shown[3] - shown[1])

    @api.get(
        "/photos/{photo}/crop",
        response_class=Response,
        responses={
            200: {"content": {"image/*": {}}, "description": "The crop, in the photo's own format if it can be"}
        },
    )
    async def crop(
        photo: answers.PhotoId,
        left: Edge,
        top: Edge,
        right: Edge,
        bottom: Edge,
        margin: Margin = 0.03,
        aspect: Aspect = "free",
    ) -> Response:
        """The part of the original around this box, in full resolution, with its EXIF and colour profile."""
        kept = desk.photos.get(photo)
        order = answers.CropOrder(photo=photo, box=[left, top, right, bottom], margin=margin, aspect=aspect)
        made = await desk.work(_cut, kept, order, limits.pixels)
        name = f"{crop_stem(kept.name)}-crop{SUFFIXES[made.format][0]}"
        return Response(
            made.content,
            media_type=Image.MIME.get(made.format, "application/octet-stream"),
            headers={"content-disposition": _attachment(name)},
        )

    @api.post(
        "/crops",
        response_class=Response,
        responses={200: {"content": {"application/zip": {}}, "description": "An archive with a crop of each photo"}},
    )
    async def crops(orders: answers.CropOrders) -> Response:
        """The crops of several photos in one archive, by the photos' names."""
        kept = [(desk.photos.get(order.photo), order) for order in orders.crops]
        content = await desk.work(_archive, kept, limits)
        headers = {"content-disposition": _attachment("patchlight-crops.zip")}
        return Response(content, media_type="application/zip", headers=headers)

    @api.get("/photos/{photo}/attention")
    async def attention(
        photo: answers.PhotoId,
        model: Number = 0,
        layer: Layer = -1,
        query: Annotated[
            str,
            Query(pattern=r"^(cls|distill|registers|\d{1,4},\d{1,4})$", description="A name, or a patch: row,column"),
        ] = "cls",
        heads: Literal["all", "mean"] = "all",
    ) -> answers.AttentionRows:
        """What tokens attended to, exactly as `patchlight.attention` says."""
        served, seen = await desk.seen(desk.photos.get(photo), model)
        (block,) = resolve_layers(layer, served.config.depth)
        asked = resolve_queries(_query(query), served.config, seen.grid)
        rows_AQN = seen.layers[block].rows(asked)[0]
        if heads == "mean":
            rows_AQN = rows_AQN.mean(0, keepdim=True)
        return answers.AttentionRows(
            layer=block,
            queries=asked,
            num_prefix=seen.num_prefix,
            grid=list(seen.grid),
            region=_corners(seen.frame),
            weights=rows_AQN.tolist(),
        )

    @api.get("/photos/{photo}/heads", response_class=Response, responses=_BINARY)
    async def heads(photo: answers.PhotoId, model: Number = 0, layer: Layer = -1) -> Response:
        """What a block's attention is made of, for all tokens at once: `q` and `k` (heads, tokens, E) in float32.

        The row of token i in head a is softmax(q[a, i] . k[a] / sqrt(E)), to which `bias` (heads, tokens, tokens) is
        added before the softmax where the model has one.
        """
        served, seen = await desk.seen(desk.photos.get(photo), model)
        (block,) = resolve_layers(layer, served.config.depth)
        kept = seen.layers[block]
        tensors = {"q": kept.q_BANE[0], "k": kept.k_BANE[0]}
        if kept.mask is not None:
            heads, tokens, _ = tensors["q"].shape
            tensors["bias"] = kept.mask[0].expand(heads, tokens, tokens).contiguous()
        return _tensors(tensors)

    @api.get("/photos/{photo}/features", response_class=Response, responses=_BINARY)
    async def features(photo: answers.PhotoId, model: Number = 0) -> Response:
        """The last block's `patches` (P, D), each of length one, in float32: their products are cosines."""
        _, seen = await desk.seen(desk.photos.get(photo), model)
        return _tensors({"patches": F.normalize(seen.tokens_ND[seen.num_prefix :], dim=1).contiguous()})

    @api.get("/photos/{photo}/rollout")
    async def rollout(photo: answers.PhotoId, model: Number = 0) -> answers.HeatMap:
        """Attention followed through all blocks, exactly as `patchlight.explain.rollout` says."""
        kept = desk.photos.get(photo)
        served, seen = await desk.seen(kept, model)
        image_CHW, _ = await desk.prepared(kept, served)
        return _heat_map(seen, await asyncio.wrap_future(engine.rollout(served, image_CHW)))

    @api.get("/photos/{photo}/classify")
    async def classify(
        photo: answers.PhotoId, model: Number = 0, top: Annotated[int, Query(ge=1, le=100)] = 5
    ) -> answers.Classes:
        """The likeliest classes, by a model that names them."""
        check_names_classes(engine.model(model).loaded)
        served, seen = await desk.seen(desk.photos.get(photo), model)
        named = likeliest(served.loaded, seen.output_K).named
        about = {} if named is None else named.to_dict()
        return answers.Classes(classes=_classes(served.loaded, seen.output_K, top), **about)

    @api.get("/photos/{photo}/shuffle")
    async def shuffle(
        photo: answers.PhotoId,
        model: Number = 0,
        seed: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
        top: Annotated[int, Query(ge=1, le=20)] = 3,
    ) -> answers.Shuffled:
        """What the model says of the photo with its patches in another order, with and without positions."""
        kept = desk.photos.get(photo)
        served, seen = await desk.seen(kept, model)
        image_CHW, _ = await desk.prepared(kept, served)
        order_P = shuffled_order(math.prod(seen.grid), seed)
        said_4K = await asyncio.wrap_future(engine.shuffle(served, image_CHW, order_P))
        named = _names_classes(served.loaded)
        lists = [_classes(served.loaded, said_K, top) if named else [] for said_K in said_4K]
        return answers.Shuffled(
            seed=seed,
            order=order_P.tolist(),
            grid=list(seen.grid),
            region=_corners(seen.frame),
            with_positions=lists[0],
            shuffled_with_positions=lists[1],
            without_positions=lists[2],
            shuffled_without_positions=lists[3],
            likeness_with_positions=float(F.cosine_similarity(said_4K[0], said_4K[1], 0)),
            likeness_without_positions=float(F.cosine_similarity(said_4K[2], said_4K[3], 0)),
        )

    return api


_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["photo"],
                "properties": {"photo": {"type": "string", "format": "binary"}},
            }
        }
    },
}


def _info(served: Served) -> answers.ModelInfo:
    loaded, config = served.loaded, served.config
    image_size = loaded.preprocess.config.image_size
    grid = config.grid_for(image_size)
    return answers.ModelInfo(
        number=served.number,
        name=served.name,
        origin=loaded.provenance.origin,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        image_size=list(image_size),
        patch_size=list(config.patch_size),
        grid=list(grid),
        tokens=config.num_prefix + math.prod(grid),
        depth=config.depth,
        heads=config.num_heads,
        class_token=config.class_token,
        distill_token=config.distill_token,
        registers=config.num_registers,
        positions=config.position,
        classes=config.num_classes if _names_classes(loaded) else 0,
        method=resolve_method(loaded, "auto"),
        taught=loaded.subject is not None,
        latency_ms=round(served.latency_ms, 2),
        device=str(loaded.model.norm.weight.device),
    )


def _photo_info(photo: Photo) -> answers.PhotoInfo:
    height, width = photo.size
    return answers.PhotoInfo(
        id=photo.id, name=photo.name, width=width, height=height, format=photo.format, bytes=len(photo.content)
    )


def _names_classes(loaded: Loaded) -> bool:
    try:
        check_names_classes(loaded)
    except PatchlightError:
        return False
    return True


def _classes(loaded: Loaded, logits_K: Tensor, top: int) -> list[answers.LabelledShare]:
    said = likeliest(loaded, logits_K, top)
    pairs = zip(said.labels, said.probabilities, strict=True)
    return [answers.LabelledShare(label=label, probability=probability) for label, probability in pairs]


def _query(text: str) -> Any:
    row, comma, column = text.partition(",")
    return (int(row), int(column)) if comma else text


def _heat_map(seen: Seen, heat_hw: Tensor) -> answers.HeatMap:
    return answers.HeatMap(grid=list(heat_hw.shape), region=_corners(seen.frame), values=heat_hw.flatten().tolist())


def _corners(box: Box) -> list[float]:
    return [float(end) for end in (box.left, box.top, box.right, box.bottom)]


def _box(corners: list[float], size: tuple[int, int]) -> Box:
    """A box that has an area inside the photo."""
    box = Box(*corners)
    if not all(map(math.isfinite, corners)) or box.clip(size).area <= 0:
        raise PatchlightError(f"the box {corners} has no area inside the photo of {size[1]} x {size[0]} pixels")
    return box


def _tensors(tensors: Mapping[str, Tensor]) -> Response:
    return Response(safetensors.torch.save(dict(tensors)), media_type="application/octet-stream")


def _attachment(name: str) -> str:
    """The header that makes a browser save the answer under this name."""
    plain = re.sub(r'[^ -~]|["\\]', "_", name)
    spelt = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-._~") else _percent(letter) for letter in name
    )
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{spelt}"


def _percent(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode(errors="replace"))


# Done in threads


def _read(loaded: Loaded, content: bytes, most_pixels: int) -> Decoded:
    return read(content, loaded.preprocess, max_pixels=most_pixels)


def _prepare(loaded: Loaded, content: bytes, most_pixels: int) -> tuple[Tensor, View]:
    return loaded.preprocess(_read(loaded, content, most_pixels))


def _preview(content: bytes, side: int, most_pixels: int) -> bytes:
    decoded = decode(content, fast_size=(max(1, side // 2),) * 2, max_pixels=most_pixels)
    image, (height, width), region = decoded.image, decoded.source_size, decoded.region
    scale = min(1.0, side / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    box = (region.left, region.top, region.right, region.bottom)
    file = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC, box, reducing_gap=2.0).save(file, "JPEG", quality=85)
    return file.getvalue()


def _cut(photo: Photo, order: answers.CropOrder, most_pixels: int) -> Crop:
    box = _box(order.box, photo.size)
    how = Cut(margin=order.margin, aspect=parse_aspect(order.aspect))
    return cut_out(photo.content, [box], how, most_pixels)[0]


def _archive(kept: list[tuple[Photo, answers.CropOrder]], limits: Limits) -> bytes:
    file, names, total = io.BytesIO(), set[str](), 0
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for photo, order in kept:
            crop = _cut(photo, order, limits.pixels)
            total += len(crop.content)
            if total > limits.zip_bytes:
                raise PatchlightError("these crops are too large for one archive; ask for fewer at a time")
            stem, suffix, number = crop_stem(photo.name), SUFFIXES[crop.format][0], 1
            while (name := f"{stem}{'' if number == 1 else f'-{number}'}{suffix}").lower() in names:
                number += 1
            names.add(name.lower())
            archive.writestr(name, crop.content)
    return file.getvalue()


# Everything around


def _add_health(app: FastAPI, desk: Desk) -> None:
    @app.get("/livez", tags=["health"])
    async def livez() -> answers.Health:
        """The process answers."""
        return answers.Health(status="ok")

    @app.get(
        "/readyz", tags=["health"], responses={503: {"model": answers.Health, "description": "Not yet, or no longer"}}
    )
    async def readyz(response: Response) -> answers.Health:
        """The models are loaded, and photos are welcome."""
        if desk.engine.ready and not desk.stopping:
            return answers.Health(status="ok")
        response.status_code = 503
        response.headers["retry-after"] = "1"
        return answers.Health(status="stopping" if desk.stopping else "loading")


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
