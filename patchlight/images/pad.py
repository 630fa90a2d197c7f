"""What lies beside a photo: a colour, its border drawn out, or a blurred mirror image of what is next to it."""

import re

import numpy as np
from PIL import Image, ImageColor, ImageFilter

from patchlight.errors import PatchlightError

KINDS = ("blur", "edge")
"""Besides colours."""

_BLURRED_AT = 256
"""Pixels of the longer side that a picture is blurred at: it then shows nothing finer."""

_RADIUS = 10.0
"""Of the blur, in those pixels."""

Sides = tuple[int, int, int, int]
"""(left, top, right, bottom): pixels to add."""


def check_pad(text: str) -> None:
    if text not in KINDS:
        parse_colour(text, "pad", "'blur', 'edge', or ")


def parse_colour(text: str, name: str, others: str = "") -> tuple[int, int, int]:
    """Red, green and blue of a colour's name, or of #rrggbb."""
    try:
        if not re.fullmatch(r"#[0-9a-fA-F]{3}|#[0-9a-fA-F]{6}|[a-zA-Z]+", text):
            raise ValueError
        return ImageColor.getrgb(text)[:3]
    except ValueError:
        raise PatchlightError(
            f"{name}={text!r} is not known; it is {others}a colour such as 'white' or '#f0f0f0'"
        ) from None


def colour_in(image: Image.Image, colour: tuple[int, int, int]) -> float | tuple[int, ...]:
    """An opaque colour as the mode of an image has it, which is one that can hold it."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        grey = Image.new("RGB", (1, 1), colour).convert("L").getpixel((0, 0))
        assert isinstance(grey, int | float)
        return 257 * int(grey)
    level = Image.new("RGB", (1, 1), colour).convert(image.mode).getpixel((0, 0))
    assert level is not None
    return level


def padded(image: Image.Image, sides: Sides, kind: str) -> Image.Image:
    """The image with more on its sides; `kind` is "blur", "edge", or a colour. Palettes become colours."""
    if not any(sides):
        return image
    if image.mode in ("1", "P", "PA"):
        transparent = image.has_transparency_data
        image = image.convert("RGBA" if transparent else "L" if image.mode == "1" else "RGB")
        image.info.pop("transparency", None)
    left, top, right, bottom = sides
    size = image.width + left + right, image.height + top + bottom
    if kind not in KINDS:
        around = Image.new(image.mode, size, colour_in(image, parse_colour(kind, "pad")))
    else:
        # Greys of 16 bits and more cannot be blurred by Pillow.
        deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
        mirrored = kind == "blur" and not deep
        x_W = _places(image.width, left, right, mirrored=mirrored)
        y_H = _places(image.height, top, bottom, mirrored=mirrored)
        levels = np.asarray(image)[y_H][:, x_W]
        around = Image.frombytes(image.mode, size, np.ascontiguousarray(levels).tobytes())
        if mirrored:
            around = _blurred(around)
    around.paste(image, (left, top))
    around.info = image.info
    return around


def _places(length: int, before: int, behind: int, *, mirrored: bool) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Of a row that is so long, the pixels that stand before, in and behind it."""
    place = np.arange(-before, length + behind)
    if not mirrored:
        return place.clip(0, length - 1)
    place = place % (2 * length)
    return np.minimum(place, 2 * length - 1 - place)


def _blurred(image: Image.Image) -> Image.Image:
    share = min(1.0, _BLURRED_AT / max(image.size))
    size = max(1, round(image.width * share)), max(1, round(image.height * share))
    small = image.resize(size, Image.Resampling.BOX)
    blur = ImageFilter.GaussianBlur(_RADIUS * max(small.size) / _BLURRED_AT)
    small = Image.merge(small.mode, [band.filter(blur) for band in small.split()])  # Pillow blurs no YCbCr whole
    return small.resize(image.size, Image.Resampling.BICUBIC)
