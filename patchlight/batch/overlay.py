"""Pictures of what was found: each photo, its heat map over it, and the boxes."""

import base64
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from patchlight.batch.report import mark_of
from patchlight.batch.rows import Row
from patchlight.batch.work import Stamp, stamp_of
from patchlight.files import replacing, writing
from patchlight.geometry import fit_inside
from patchlight.images.decode import ImageError, decode

LONGEST = 1024
"""Pixels of a picture's longer side."""

# From cold to hot, dark to bright, so that the order is seen without colours, too.
_COLOURS = np.array([(20, 11, 53), (106, 23, 110), (188, 55, 84), (243, 120, 25), (252, 255, 164)], np.float64)


def draw_found(photo: Image.Image, row: Row) -> Image.Image:
    """A photo (RGB, upright, of any size) with what its row says: heat in colours, boxes in white, unless it is that
    there is nothing."""
    size = fit_inside(photo.size, LONGEST)
    picture = photo.resize(size, Image.Resampling.LANCZOS)
    if row["heat"] is not None:
        share_HW = np.asarray(_heat_on(size, row), np.float64) / 255
        blend_HW1 = (0.65 * share_HW)[..., None]
        levels_HWC = (1 - blend_HW1) * np.asarray(picture) + blend_HW1 * _coloured(share_HW)
        picture = Image.fromarray(levels_HWC.round().astype(np.uint8))
    width, height = row["size"]
    draw, line = ImageDraw.Draw(picture), max(2, max(size) // 200)
    for number, box in enumerate(row["boxes"] if row["decision"] != "none" else ()):
        x0, y0, x1, y1 = box["xyxy"]
        corners = (x0 / width * size[0], y0 / height * size[1], x1 / width * size[0] - 1, y1 / height * size[1] - 1)
        corners = (corners[0], corners[1], max(corners[::2]), max(corners[1::2]))
        draw.rectangle(corners, outline="black", width=line + 2)
        draw.rectangle(corners, outline="white", width=line if number == 0 else max(1, line // 2))
    return picture


def overlay_name(place: str) -> str:
    """Of the photo whose crops go to this place, in overlays/.

    Pictures end in .jpg and folders never do, so that no picture stands where a folder has to: a folder that is named
    so gets an underscore, and one that has some gets one more, so that no two folders become one.
    """
    *folders, name = place.split(os.sep)
    named = (each + "_" if re.search(r"\.jpg_*\Z", each, re.IGNORECASE) else each for each in folders)
    return os.path.join(*named, f"{name}.jpg")


def overlay_mark(stamp: Stamp | None, row: Row) -> bytes:
    """Of all that the picture shows: the photo, and what its row says, whatever its path is."""
    return mark_of(stamp, row | {"path": ""})


def draw_overlay(file: str, stamp: Stamp | None, row: Row, target: Path) -> bool:
    """Draw what was found over a photo; whether that could be: it may be gone by now, or be another."""
    if stamp_of(file) != stamp:
        return False
    try:
        photo = decode(file, fast_size=(LONGEST, LONGEST)).image
    except ImageError:
        return False
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, durable=False) as temporary:  # one that is lost in a crash is drawn again
            draw_found(photo, row).save(temporary, "JPEG", quality=88, comment=overlay_mark(stamp, row))
    return True


def _heat_on(size: tuple[int, int], row: dict[str, Any]) -> Image.Image:
    """The map where it lies on a picture of this (width, height); cold where the model did not look."""
    heat, (width, height) = row["heat"], row["size"]
    h, w = heat["size"]
    levels = Image.fromarray(np.frombuffer(base64.b64decode(heat["levels"]), np.uint8).reshape(h, w))
    x0, y0, x1, y1 = heat.get("region", (0, 0, width, height))
    left, right = round(x0 / width * size[0]), round(x1 / width * size[0])
    top, bottom = round(y0 / height * size[1]), round(y1 / height * size[1])
    whole = Image.new("L", size)
    whole.paste(levels.resize((max(1, right - left), max(1, bottom - top)), Image.Resampling.BICUBIC), (left, top))
    return whole


def _coloured(share_HW: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    stops = np.linspace(0, 1, len(_COLOURS))
    return np.stack([np.interp(share_HW, stops, channel) for channel in _COLOURS.T], -1)
