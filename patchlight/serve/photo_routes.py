"""The API, of photos: sent, shown and forgotten."""

import io
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request, Response
from PIL import Image
from starlette.datastructures import UploadFile

from patchlight.geometry import fit_inside
from patchlight.images.decode import decode
from patchlight.localizing.detector import read
from patchlight.serve import answers
from patchlight.serve.photos import Photo, plain_name
from patchlight.serve.state import ServerState

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


def add_photo_routes(api: APIRouter, state: ServerState) -> None:
    engine, limits = state.engine, state.limits

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
        decoded = await state.work(read, content, served.loaded.preprocess, max_pixels=limits.pixels)
        height, width = decoded.source_size
        photo = Photo(
            content=content,
            name=name,
            size=(height, width),
            format=decoded.format or "image",
            alpha=decoded.alpha,
        )
        photo.prepared[0] = await state.work(served.loaded.preprocess, decoded)
        state.add(photo)
        return _photo_info(photo)

    @api.get("/photos/{photo}")
    async def photo_info(photo: answers.PhotoId) -> answers.PhotoInfo:
        return _photo_info(state.photos.get(photo))

    @api.delete("/photos/{photo}", status_code=204)
    async def forget(photo: answers.PhotoId) -> None:
        """Let go of a photo and of all that was seen in it."""
        state.photos.remove(photo)
        engine.forget(photo)

    @api.get(
        "/photos/{photo}/preview",
        response_class=Response,
        responses={200: {"content": {"image/jpeg": {}}, "description": "An upright JPEG"}},
    )
    async def preview(photo: answers.PhotoId, side: Annotated[int, Query(ge=16, le=2048)] = 1440) -> Response:
        """The photo with a longer side of this many pixels at most."""
        content = state.photos.get(photo).content
        return Response(await state.work(_preview, content, side, limits.pixels), media_type="image/jpeg")


def _photo_info(photo: Photo) -> answers.PhotoInfo:
    height, width = photo.size
    return answers.PhotoInfo(
        id=photo.id, name=photo.name, width=width, height=height, format=photo.format, bytes=len(photo.content)
    )


def _preview(content: bytes, side: int, most_pixels: int) -> bytes:
    decoded = decode(content, fast_size=(max(1, side // 2),) * 2, max_pixels=most_pixels)
    image, region = decoded.image, decoded.region
    height, width = fit_inside(decoded.source_size, side)
    box = (region.left, region.top, region.right, region.bottom)
    file = io.BytesIO()
    image.resize((width, height), Image.Resampling.BICUBIC, box, reducing_gap=2.0).save(file, "JPEG", quality=85)
    return file.getvalue()
