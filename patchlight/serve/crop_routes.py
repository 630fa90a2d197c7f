"""The API, of subjects: where they are in a photo, and crops around them."""

import io
import math
import re
import zipfile
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from PIL import Image

from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.crop import SUFFIXES, Crop, Cut, cut_out, parse_aspect, region_around
from patchlight.localizing.detector import DetectorOptions
from patchlight.serve import answers
from patchlight.serve.limits import Limits
from patchlight.serve.photos import Photo, crop_stem
from patchlight.serve.state import ServerState

Edge = Annotated[float, Query(ge=-1e6, le=1e6, description="In pixels of the upright photo")]
Margin = Annotated[float, Query(ge=0, le=2, description="On every side, as a share of the box's sides")]
Aspect = Annotated[str, Query(max_length=12, description="free, or width:height such as 1:1")]
Method = Literal["auto", "subject", "cls", "rollout", "lost", "tokencut", "features"]


def add_crop_routes(api: APIRouter, state: ServerState) -> None:
    limits = state.limits

    @api.get("/photos/{photo}/localize")
    async def localize(
        photo: answers.PhotoId,
        model: answers.Number = 0,
        method: Method = "auto",
        subjects: Annotated[int, Query(ge=0, le=100, description="How many at most; 0: all")] = 1,
    ) -> answers.Found:
        """Where the subjects are, exactly as `patchlight.localize` says."""
        kept = state.photos.get(photo)
        served, seen = await state.seen(kept, model, method, whole=False)
        detector = served.detector(method, DetectorOptions(subjects=subjects or None))
        patches_hw5 = seen.patches.get(detector.method)
        (found,) = detector.judge(
            seen.heat[detector.method][None],
            [seen.view],
            seen.output_K[None],
            None if patches_hw5 is None else patches_hw5[None],
        )
        found = detector.by_alpha(found, kept.alpha)
        return answers.Found(
            decision=found.decision,
            confidence=found.confidence,
            count=found.count,
            method=found.method,
            subjects=[
                answers.FoundSubject(box=answers.corners(each.box), score=each.score, confidence=each.confidence)
                for each in found.subjects
            ],
            named=None if found.named is None else answers.Naming(**asdict(found.named)),
            heat=answers.heat_map(seen, found.heat_hw),
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
        size = state.photos.get(photo).size
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
        kept = state.photos.get(photo)
        order = answers.CropOrder(photo=photo, box=[left, top, right, bottom], margin=margin, aspect=aspect)
        made = await state.work(_cut, kept, order, limits.pixels)
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
        kept = [(state.photos.get(order.photo), order) for order in orders.crops]
        content = await state.work(_archive, kept, limits)
        headers = {"content-disposition": _attachment("patchlight-crops.zip")}
        return Response(content, media_type="application/zip", headers=headers)


def _box(corners: list[float], size: tuple[int, int]) -> Box:
    """A box that has an area inside the photo."""
    box = Box(*corners)
    if not all(map(math.isfinite, corners)) or box.clip(size).area <= 0:
        raise PatchlightError(f"the box {corners} has no area inside the photo of {size[1]} x {size[0]} pixels")
    return box


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


def _attachment(name: str) -> str:
    """The header that makes a browser save the answer under this name."""
    plain = re.sub(r'[^ -~]|["\\]', "_", name)
    spelt = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-._~") else _percent(letter) for letter in name
    )
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{spelt}"


def _percent(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode(errors="replace"))
