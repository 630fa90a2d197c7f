"""Cut subjects out of the full-size original, and keep what is the photographer's: EXIF, colour profile, quality, of
JPEGs XMP and IPTC, of PNGs gamma and primaries.

A JPEG is taken apart only as far as its colour planes and put together with its own quantisation tables and
subsampling, so that pixels which were not scaled change as little as they can; with jpegtran they do not change at all.
PNG, WebP and TIFF stay what they are. What Pillow cannot write well becomes PNG (GIF, BMP, PPM) or JPEG (HEIC, AVIF,
JPEG 2000). Nothing here imports torch.
"""

import contextlib
import io
import os
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from PIL import Image, JpegImagePlugin, PngImagePlugin

from patchlight.errors import PatchlightError
from patchlight.files import printable, replacing
from patchlight.geometry import Box, Size, View, fit_inside, upright
from patchlight.images.cutout import WORKING_SIDE, HeatMap, around, coarse_mask, fine_mask
from patchlight.images.decode import (
    MAX_PIXELS,
    TURNS,
    ImageError,
    check_size,
    explain,
    open_file,
    open_image,
    orientation_of,
    quiet,
    to_rgb,
)
from patchlight.images.keywords import with_iptc_keywords, with_keywords
from patchlight.images.pad import colour_in, padded, parse_colour

Pixels = tuple[int, int, int, int]
"""(left, top, right, bottom), whole pixels."""

SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
}
"""How the files of a format that crops are written in may end; a new one ends in the first."""

_WHITE = (255, 255, 255)

_OTHERS_QUALITY = 95
"""Quality of JPEGs that are written from other lossy formats."""

_WEBP_QUALITY = 90
"""Quality for lossy WebP, whose files do not record theirs."""

_FAST_WEBP = {"quality": _WEBP_QUALITY, "method": 0}
"""Of photos that were lossy before; it is written in half the time of the smallest PNG effort, and a sixth as large."""

_WEBP_MOST = 16_383
"""Pixels of a side."""

_TOO_RICH = "encoding error 6"
"""What Pillow says where a lossy WebP has more in its first part than the 512 KB that fit: of some 20 megapixels on."""

_RICHER_WEBP = ({"method": 2}, {"lossless": True, "quality": 0, "method": 0})
"""How it is written then: with more care, and if that is not enough, without loss, which has no such limit."""

_KEPT_COMPRESSIONS = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd", "lzma")

_TIFF_TAGS = (270, 271, 272, 305, 306, 315, 33432)
"""What a TIFF says about the photo: description, make, model, software, date, artist, copyright."""

_TIFF_XMP = 700

_TIFF_DIRECTORIES = (34665, 34853)
"""EXIF and GPS."""

_MARKER_ROOM = 65_533
"""Bytes that a segment of a JPEG holds."""

_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_MORE_XMP = b"http://ns.adobe.com/xmp/extension/\0"
"""How their segments begin."""

_IPTC = 0x0404
"""The number of its block among Photoshop's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How to cut around a box."""

    margin: float = 0.0  # on every side, as a share of the box's own width and height
    aspect: tuple[int, int] | None = None  # (width, height) to grow to, such as (4, 3); None leaves the box as it is
    longest: int | None = None  # pixels of the longer side, to which larger crops are scaled down
    exact: tuple[int, int] | None = None  # (width, height) in pixels of every crop, instead of the two above
    fill: bool = False  # to reach that, enlarge small subjects, and do not show more of what is around them
    scale: float | None = None  # pixels of a crop of that size for each of the photo's; None: as each box needs it
    pad: str | None = None  # what stands beside the photo, see pad.py; None keeps to the photo as far as the box allows
    jpegtran: str | None = None  # the program that cuts JPEGs without decoding them, where that is wanted
    cutout: bool = False  # to leave out what is not the subject, by its mask, see cutout.py
    background: str | None = None  # the colour that stands there then; None leaves it transparent
    keywords: tuple[str, ...] = ()  # to write into the crops, as XMP and, of JPEGs, IPTC

    def region(self, box: Box, size: Size) -> Pixels:
        """What a crop for a box shows of a photo of this (height, width), see `region_around`."""
        least = None
        if self.exact is not None and self.scale is not None:
            least = (round(self.exact[0] / self.scale), round(self.exact[1] / self.scale))
        elif self.exact is not None and not self.fill:
            least = self.exact
        return region_around(
            box,
            size,
            margin=self.margin,
            aspect=self.exact or self.aspect,
            keep_margin=self.pad is not None,
            least=least,
        )

    def size_of(self, region: Pixels) -> tuple[int, int]:
        """(width, height) of the crop that shows this."""
        left, top, right, bottom = region
        if self.exact is not None:
            return self.exact
        shown = right - left, bottom - top
        return shown if self.longest is None else fit_inside(shown, self.longest)


@dataclass(frozen=True, slots=True)
class Crop:
    """The content of a crop's file, not yet written."""

    content: bytes
    format: str
    """"JPEG", "PNG", "WEBP" or "TIFF"."""
    region: Pixels
    """What it shows of the upright photo; what lies beside that was padded."""
    size: tuple[int, int]
    """(width, height) as a viewer shows it."""
    encoded: bool = False
    """Whether it is of a JPEG whose pixels were encoded anew, as jpegtran does not; other formats always are."""


def parse_aspect(text: str) -> tuple[int, int] | None:
    """ "free" or "W:H" -> None or (width, height)."""
    if text == "free":
        return None
    found = re.fullmatch(r"([1-9]\d{0,3}):([1-9]\d{0,3})", text, re.ASCII)
    if not found:
        raise PatchlightError(f"aspect={text!r} is not known; it is 'free', or width and height such as '1:1' or '4:3'")
    return int(found[1]), int(found[2])


def region_around(
    box: Box,
    size: Size,
    *,
    margin: float = 0.0,
    aspect: tuple[int, int] | None = None,
    keep_margin: bool = False,
    least: tuple[int, int] | None = None,
) -> Pixels:
    """The pixels of a photo of this (height, width) to cut for a box, of which no part that is in the photo is cut off.

    Without an aspect that is the box with its margin, inside the photo. With one it grows to the aspect about its
    centre, and to the `least` (width, height), and is moved into the photo. Where the photo is too small for that, the
    margin shrinks first; what is then still missing lies beside the photo, and is to be padded. With `keep_margin` the
    whole margin is kept, beside the photo if it must be.
    """
    height, width = size
    box = box.clip(size)
    wide = box.expanded(margin)
    if not keep_margin:
        wide = wide.clip(size)
    if aspect is None:
        left, top, right, bottom = wide.to_ints()
        left, top = min(left, width - 1), min(top, height - 1)
        return left, top, max(right, left + 1), max(bottom, top + 1)
    left, top, right, bottom = (wide if keep_margin else box).to_ints()
    ratio = aspect[0] / aspect[1]
    fitting = min(width, height * ratio)
    across = min(max(wide.width, wide.height * ratio, 1.0, ratio), fitting)
    across = max(across, right - left, (bottom - top) * ratio, *(() if least is None else (least[0], least[1] * ratio)))
    columns = max(1, round(across), right - left)
    rows = max(1, round(columns / ratio), bottom - top)
    if across <= fitting:
        columns, rows = min(columns, width), min(rows, height)
    left = _start(columns, (wide.left, wide.right), (left, right), width)
    top = _start(rows, (wide.top, wide.bottom), (top, bottom), height)
    return left, top, left + columns, top + rows


def _start(length: int, wide: tuple[float, float], kept: tuple[int, int], photo: int) -> int:
    """Where a stretch begins that is centred on the box with its margin, lies in the photo, or around it, as far as it
    can, and holds what is to be kept."""
    start = round((wide[0] + wide[1] - length) / 2)
    start = min(max(start, min(0, photo - length)), max(0, photo - length))
    return min(max(start, kept[1] - length), kept[0])


def cut_out(
    source: str | os.PathLike[str] | bytes,
    boxes: Sequence[Box],
    how: Cut,
    max_pixels: int = MAX_PIXELS,
    heat: HeatMap | None = None,
) -> list[Crop]:
    """The crops around boxes (pixels of the upright photo) of a path or a file's bytes; raises `ImageError` if it
    cannot be used. Masks are made of the heat, or are the photo's own transparency."""
    name = "image" if isinstance(source, bytes) else printable(os.fspath(source))
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(quiet())
        try:
            opened = io.BytesIO(source) if isinstance(source, bytes) else open_file(source, name)
            file = stack.enter_context(opened)
            image = stack.enter_context(open_image(file, name))
            check_size(image.size, name, max_pixels)
            if image.format in ("JPEG", "MPO"):
                return _cut_jpeg(image, file, boxes, how, heat)
            return _cut_other(image, file, boxes, how, heat)
        except ImageError:
            raise
        except Exception as error:  # Pillow's parsers raise whatever a broken file leads them into
            raise explain(error, name, said) from None


def write_crop(path: Path, content: bytes) -> None:
    """Write the file completely or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


# JPEG


def _cut_jpeg(image: Image.Image, file: IO[bytes], boxes: Sequence[Box], how: Cut, heat: HeatMap | None) -> list[Crop]:
    assert isinstance(image, JpegImagePlugin.JpegImageFile)
    orientation = orientation_of(image)
    stored_size = image.height, image.width
    size = stored_size[::-1] if orientation >= 5 else stored_size
    regions = [how.region(box, size) for box in boxes]
    exif, profile = image.info.get("exif"), image.info.get("icc_profile")
    if how.jpegtran is not None and all(_is_within(region, size) for region in regions):
        lossless = _without_decoding(image, file, regions, orientation, how.jpegtran, how.keywords)
        if lossless is not None:
            return lossless
    in_rgb = _is_coded_in_rgb(image)
    # Its colours as the file holds them need no turning to RGB and back, which takes time and rounds twice.
    transparent = how.cutout and how.background is None
    mode = "YCbCr" if image.mode == "RGB" and not in_rgb and not transparent else None
    settings: dict[str, Any] = {
        "qtables": [image.quantization[key] for key in sorted(image.quantization)],
        "progressive": bool(image.info.get("progressive")),
        "keep_rgb": in_rgb,
    }
    if image.mode == "RGB":
        sampling = JpegImagePlugin.get_sampling(image)
        settings["subsampling"] = max(sampling, 0)  # what Pillow cannot write is written at full resolution
    if image.info.get("dpi"):
        settings["dpi"] = image.info["dpi"]
    drafted = image.draft(mode, _enough(image.size, regions, how))
    image.load()
    scale = (1.0, 1.0)
    if drafted is not None:
        held = Box(*drafted[1])
        scale = held.height / stored_size[0], held.width / stored_size[1]
    crops = []
    if how.cutout:
        if image.mode not in ("RGB", "YCbCr"):
            settings, profile = {"qtables": (settings["qtables"] * 2)[:2]}, None  # a profile of greys, or of inks
            image = to_rgb(image, _WHITE)
        photo = _Upright(image, size, orientation, scale)
        for box, region in zip(boxes, regions, strict=True):
            part = _without_background(photo, box, region, how, heat)
            if transparent:
                target = "WEBP" if max(part.size) <= _WEBP_MOST else "PNG"
                shown = part.height, part.width
                kept = _with_xmp(_FAST_WEBP if target == "WEBP" else {}, target, image.info, how.keywords, shown)
                crops.append(Crop(_encoded(part, target, exif, profile, kept), target, region, part.size))
            else:
                kept = settings | {"extra": _xmp_and_iptc(image.info, (part.height, part.width), keywords=how.keywords)}
                crops.append(Crop(_encoded(part, "JPEG", exif, profile, kept), "JPEG", region, part.size, encoded=True))
        return crops
    photo = _Upright(image, size, orientation, scale)
    for region in regions:
        part = photo.part(region, how)
        kept = settings | {"extra": _xmp_and_iptc(image.info, (part.height, part.width), keywords=how.keywords)}
        crops.append(Crop(_encoded(part, "JPEG", exif, profile, kept), "JPEG", region, part.size, encoded=True))
    return crops


def _is_within(region: Pixels, size: Size) -> bool:
    left, top, right, bottom = region
    return left >= 0 and top >= 0 and right <= size[1] and bottom <= size[0]


def _xmp_and_iptc(info: Mapping[Any, Any], size: Size, orientation: int = 1, keywords: Sequence[str] = ()) -> bytes:
    """What a JPEG says in these ways, as segments of its own, for a crop of this (height, width) and orientation.

    Of Photoshop's blocks IPTC alone: among the others is a thumbnail of the whole photo, as there may be one in XMP.
    """
    bodies = []
    xmp = _xmp_of_crop(info, size, orientation, keywords)
    if xmp is not None:
        bodies.append((0xE1, _XMP + xmp))
    blocks = info.get("photoshop")
    iptc = blocks.get(_IPTC) if isinstance(blocks, dict) else None
    if keywords:
        iptc = with_iptc_keywords(iptc if isinstance(iptc, bytes) else None, keywords)
    if isinstance(iptc, bytes):
        head = b"Photoshop 3.0\0" + b"8BIM" + struct.pack(">HHI", _IPTC, 0, len(iptc))
        bodies.append((0xED, head + iptc + b"\0" * (len(iptc) % 2)))
    return b"".join(
        struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body for marker, body in bodies if len(body) <= _MARKER_ROOM
    )


def _xmp_of_crop(info: Mapping[Any, Any], size: Size, orientation: int, keywords: Sequence[str]) -> bytes | None:
    """The photo's XMP told of a crop's (height, width) and orientation, without thumbnails, and with keywords."""
    xmp = info.get("xmp")
    if isinstance(xmp, bytes):
        height, width = size
        numbers = {"tiff:Orientation": orientation, "tiff:ImageWidth": width, "tiff:ImageLength": height}
        numbers |= {"exif:PixelXDimension": width, "exif:PixelYDimension": height}
        for name, number in numbers.items():
            xmp = re.sub(rb"(%s(?:\s*=\s*[\"']|>))\d+" % name.encode(), rb"\g<1>%d" % number, xmp)
        for prefix in (b"xmp", b"xap"):
            xmp = _without_element(xmp, prefix + b":Thumbnails")
    if keywords:
        return with_keywords(xmp if isinstance(xmp, bytes) else None, keywords)
    return xmp if isinstance(xmp, bytes) else None


def _without_element(xmp: bytes, name: bytes) -> bytes:
    """The XMP without elements of this name; one that is not closed stays."""
    kept, place = [], 0
    for opened in re.finditer(rb"<%s\b" % name, xmp):
        if opened.start() < place:
            continue  # inside the one before
        closed = xmp.find(b"</%s>" % name, opened.end())
        if closed < 0:
            break
        kept.append(xmp[place : opened.start()])
        place = closed + len(name) + 3
    return b"".join([*kept, xmp[place:]])


def _is_coded_in_rgb(image: JpegImagePlugin.JpegImageFile) -> bool:
    """As libjpeg guesses it: by Adobe's marker, else by the components' names."""
    if "adobe_transform" in image.info:
        return image.layers == 3 and image.info["adobe_transform"] == 0
    return "jfif" not in image.info and [layer[0] for layer in image.layer] == [ord(letter) for letter in "RGB"]


def _enough(size: tuple[int, int], regions: Sequence[Pixels], how: Cut) -> tuple[int, int] | None:
    """The (width, height) to decode a JPEG at, if its crops will be scaled down: twice what they need."""
    if not regions or (how.longest is None and how.exact is None):
        return None
    share = max(max(how.size_of(region)) / max(region[2] - region[0], region[3] - region[1]) for region in regions)
    return max(1, round(size[0] * min(1.0, 2 * share))), max(1, round(size[1] * min(1.0, 2 * share)))


def _without_decoding(
    image: JpegImagePlugin.JpegImageFile,
    file: IO[bytes],
    regions: Sequence[Pixels],
    orientation: int,
    program: str,
    keywords: Sequence[str],
) -> list[Crop] | None:
    """Crops that begin where a block of the file does, turned as the file is; None if the program cannot."""
    step_x, step_y = (8 * max(layer[axis] for layer in image.layer) for axis in (1, 2))
    file.seek(0)
    source = file.read()
    file.seek(0)
    size = (image.width, image.height) if orientation >= 5 else (image.height, image.width)
    view = View(source_size=size, model_size=size, orientation=orientation)
    crops = []
    for region in regions:
        left, top, right, bottom = view.to_stored(Box(*region)).to_ints()
        left, top = left // step_x * step_x, top // step_y * step_y
        where = f"{right - left}x{bottom - top}+{left}+{top}"
        try:
            done = subprocess.run(
                [program, "-copy", "all", "-crop", where], input=source, capture_output=True, timeout=120, check=True
            )
            content = _as_a_crop(done.stdout, (bottom - top, right - left), orientation, image.info, keywords)
            with Image.open(io.BytesIO(content), formats=["JPEG"]) as made:
                if made.size != (right - left, bottom - top):
                    return None
        except (OSError, subprocess.SubprocessError, ValueError, SyntaxError):
            return None
        shown = upright(Box(left, top, right, bottom), (image.height, image.width), orientation)
        crops.append(Crop(content, "JPEG", shown.to_ints(), (round(shown.width), round(shown.height))))
    return crops


def _as_a_crop(
    jpeg: bytes, size: Size, orientation: int, info: Mapping[Any, Any], keywords: Sequence[str] = ()
) -> bytes:
    """The JPEG with EXIF and XMP told of its size, without thumbnails of the whole photo that the `info` is of, and
    without the index of further pictures that were behind it."""
    parts, place = [jpeg[:2]], 2
    notes = _xmp_and_iptc(info, size, orientation, keywords)
    while place + 4 <= len(jpeg) and jpeg[place] == 0xFF and jpeg[place + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", jpeg, place + 2)
        marker, body = jpeg[place + 1], jpeg[place + 4 : place + 2 + length]
        place += 2 + length
        if (marker, body[:4]) in ((0xE0, b"JFXX"), (0xE2, b"MPF\0")):
            continue
        if marker == 0xED or (marker == 0xE1 and body.startswith((_XMP, _MORE_XMP))):
            parts.append(notes)  # once, where the first of them was
            notes = b""
            continue
        if marker == 0xE1 and body.startswith(b"Exif\0\0"):
            changed = exif_of_crop(body, size, orientation)
            if changed is None:
                continue
            body = changed
        parts.append(b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body)
    return b"".join([*parts, notes, jpeg[place:]])


# Other formats


def _cut_other(image: Image.Image, file: IO[bytes], boxes: Sequence[Box], how: Cut, heat: HeatMap | None) -> list[Crop]:
    file_format = image.format
    compression = str(image.info.get("compression"))
    lossless = file_format == "WEBP" and _is_lossless_webp(file)
    image.load()  # a TIFF is turned by it, and what a PNG has behind its pixels is read
    orientation = orientation_of(image)
    stored_size = image.height, image.width
    size = stored_size[::-1] if orientation >= 5 else stored_size
    exif, profile = image.info.get("exif"), image.info.get("icc_profile")
    settings: dict[str, Any] = {}
    info = dict(image.info)
    target = "PNG"
    match file_format:
        case "WEBP" | "TIFF":
            target = file_format
        case "PNG" | "GIF" | "BMP" | "PPM":
            pass
        case _ if how.cutout and how.background is None:
            target = "WEBP" if max(size) <= _WEBP_MOST else "PNG"
        case _ if not image.has_transparency_data:
            target = "JPEG"
            image = to_rgb(image, _WHITE)
    match target:
        case "WEBP":
            settings = {"lossless": True} if lossless else {"quality": _WEBP_QUALITY}
            settings |= {"method": 0} if file_format != "WEBP" else {}
        case "TIFF":
            settings = _tiff_settings(image, compression)
        case "JPEG":
            settings = {"quality": _OTHERS_QUALITY}
    if target in ("PNG", "TIFF") and image.info.get("dpi"):
        settings["dpi"] = image.info["dpi"]
    if file_format == "PNG":
        settings["pnginfo"] = _colour_chunks(image.info)
    if target == "PNG" and not _fits_png(image):
        image = to_rgb(image, _WHITE)
    if how.cutout and target == "TIFF" and how.background is None:
        target, settings = "PNG", {}
    if how.cutout:
        profile = profile if image.mode in ("RGB", "RGBA", "P", "PA") else None
        image = image.convert("RGBA") if image.has_transparency_data else to_rgb(image, _WHITE)
        image.info.pop("transparency", None)
    photo = _Upright(image, size, orientation)
    crops = []
    for box in boxes:
        region = how.region(box, size)
        part = _without_background(photo, box, region, how, heat) if how.cutout else photo.part(region, how)
        kept = _with_xmp(settings, target, info, how.keywords, (part.height, part.width))
        crops.append(Crop(_encoded(part, target, exif, profile, kept), target, region, part.size))
    return crops


def _with_xmp(
    settings: Mapping[str, Any], target: str, info: Mapping[Any, Any], keywords: Sequence[str], size: Size
) -> dict[str, Any]:
    """How a crop of this (height, width) is written, with keywords where there are any; also a JPEG of a photo that was
    none."""
    settings = dict(settings)
    if not keywords:
        return settings
    xmp = _xmp_of_crop(info, size, 1, keywords)
    assert xmp is not None
    match target:
        case "PNG":
            chunks = PngImagePlugin.PngInfo()
            chunks.chunks = list(settings["pnginfo"].chunks) if "pnginfo" in settings else []
            chunks.add_itxt("XML:com.adobe.xmp", xmp.decode("utf-8", "replace"))
            settings["pnginfo"] = chunks
        case "WEBP":
            settings["xmp"] = xmp
        case "TIFF":
            tags = Image.Exif()
            tags.load(settings["exif"])
            tags[_TIFF_XMP] = xmp
            settings["exif"] = tags.tobytes()
        case "JPEG":
            iptc = with_iptc_keywords(None, keywords)
            settings["extra"] = _xmp_and_iptc({"xmp": xmp, "photoshop": {_IPTC: iptc}}, size)
    return settings


def _fits_png(image: Image.Image) -> bool:
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and max(key, default=0) > 255:
        return False  # it names a 16-bit colour, and Pillow has reduced the pixels to 8 bits
    return image.mode in ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


def _colour_chunks(info: Mapping[Any, Any]) -> PngImagePlugin.PngInfo:
    """What a PNG says of its colours besides the profile, which Pillow reads and does not write."""
    kept = PngImagePlugin.PngInfo()
    if (gamma := info.get("gamma")) is not None:
        kept.add(b"gAMA", struct.pack(">I", round(gamma * 100_000)))
    if (primaries := info.get("chromaticity")) is not None:
        kept.add(b"cHRM", struct.pack(f">{len(primaries)}I", *(round(each * 100_000) for each in primaries)))
    if (intent := info.get("srgb")) is not None:
        kept.add(b"sRGB", bytes([intent]))
    return kept


def _is_lossless_webp(file: IO[bytes]) -> bool:
    file.seek(0)
    return b"VP8L" in file.read(1 << 16)


def _tiff_settings(image: Image.Image, compression: str) -> dict[str, Any]:
    """What the TIFF says about the photo; how its pixels are stored is written anew."""
    tags, kept = image.getexif(), Image.Exif()
    for tag in _TIFF_TAGS:
        with contextlib.suppress(Exception):  # a broken directory is left out, as a broken EXIF is
            if tag in tags:
                kept[tag] = tags[tag]
    for tag in _TIFF_DIRECTORIES:
        with contextlib.suppress(Exception):
            if directory := dict(tags.get_ifd(tag)):
                kept.get_ifd(tag).update(directory)
                compression = "raw"  # the only one that Pillow writes directories with
    if compression not in _KEPT_COMPRESSIONS:
        compression = "tiff_adobe_deflate"
    return {"compression": compression, "exif": kept.tobytes()}


# The pixels and the file


@dataclass(frozen=True, slots=True)
class _Upright:
    """A photo of this (height, width), in an image that is stored turned and (y, x) times as large."""

    image: Image.Image
    size: Size
    orientation: int
    scale: tuple[float, float] = (1.0, 1.0)

    def part(self, region: Pixels, how: Cut) -> Image.Image:
        """What a crop shows, upright."""
        left, top, right, bottom = region
        columns, rows = how.size_of(region)
        across, down = columns / (right - left), rows / (bottom - top)
        inside = Box(*region).clip(self.size)
        check_size((columns, rows), "the crop", MAX_PIXELS)
        # Where in the crop the photo begins and ends, in whole pixels.
        starts = round((inside.left - left) * across), round((inside.top - top) * down)
        ends = round((inside.right - left) * across), round((inside.bottom - top) * down)
        target = max(1, ends[0] - starts[0]), max(1, ends[1] - starts[1])
        starts = min(starts[0], columns - target[0]), min(starts[1], rows - target[1])
        view = View(source_size=self.size, model_size=self.size, orientation=self.orientation)
        stored = view.to_stored(inside)
        if target == (inside.width, inside.height):
            part = self.image.crop(stored.to_ints())
        else:
            box = stored.scaled(self.scale).clip((self.image.height, self.image.width))
            turned = target[::-1] if self.orientation >= 5 else target
            part = _scaled(self.image, turned, (box.left, box.top, box.right, box.bottom))
        part = part.transpose(TURNS[self.orientation]) if self.orientation in TURNS else part
        sides = (starts[0], starts[1], columns - starts[0] - target[0], rows - starts[1] - target[1])
        return padded(part, sides, how.pad or "blur")


def _without_background(photo: _Upright, box: Box, region: Pixels, how: Cut, heat: HeatMap | None) -> Image.Image:
    """The subject alone: RGBA, transparent where it is not, or of the photo's mode on the background that is wanted."""
    bare = replace(how, pad="black")
    if photo.image.mode == "RGBA":
        alpha = replace(photo, image=photo.image.getchannel("A"))
        part, mask = photo.part(region, bare).convert("RGB"), alpha.part(region, bare)
    else:
        assert heat is not None
        shown = around(box, photo.size)
        seen = photo.part(shown, Cut(longest=WORKING_SIDE)).convert("RGB")
        part = photo.part(region, bare)
        left, top, right, bottom = region
        across, down = part.width / (right - left), part.height / (bottom - top)
        x0, y0, x1, y1 = shown
        place = (x0 - left) * across, (y0 - top) * down, (x1 - left) * across, (y1 - top) * down
        mask = fine_mask(part, place, seen, coarse_mask(seen, shown, box, heat))
        if not _is_within(region, photo.size):  # what was padded belongs to no subject
            inside = Box(*region).clip(photo.size)
            edges = (
                *(round((inside.left - left) * across), round((inside.top - top) * down)),
                *(round((inside.right - left) * across), round((inside.bottom - top) * down)),
            )
            shape = Image.new("L", part.size)
            shape.paste(mask.crop(edges), edges)
            mask = shape
    if how.background is not None:
        under = Image.new(part.mode, part.size, colour_in(part, parse_colour(how.background, "background")))
        under.paste(part, mask=mask)
        return under
    # Nothing of the background is left in the file, which is smaller for it, too.
    part = Image.composite(part, Image.new("RGB", part.size), mask.point(lambda level: 255 if level else 0))
    part.putalpha(mask)
    return part


def _scaled(image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]) -> Image.Image:
    if image.mode in ("1", "P", "PA"):
        transparent = image.has_transparency_data
        image = image.convert("RGBA" if transparent else "L" if image.mode == "1" else "RGB")
        image.info.pop("transparency", None)
    if image.mode.startswith("I;16"):
        # Pillow scales wider greys alone; a box filter does not leave their range.
        return image.convert("I").resize(size, Image.Resampling.BOX, box).convert("I;16")
    smooth = image.mode not in ("I", "F")
    return image.resize(size, Image.Resampling.LANCZOS if smooth else Image.Resampling.BOX, box, reducing_gap=3.0)


def _encoded(
    part: Image.Image, file_format: str, exif: bytes | None, profile: bytes | None, settings: dict[str, Any]
) -> bytes:
    settings = dict(settings)
    if exif and file_format != "TIFF":
        changed = exif_of_crop(exif, (part.height, part.width), 1)
        if changed is not None and len(changed) <= _MARKER_ROOM:
            settings["exif"] = changed
    if profile:
        settings["icc_profile"] = profile
    part.info.pop("exif", None)  # or it would be written as it was
    ways = [settings, *(settings | each for each in _RICHER_WEBP)] if file_format == "WEBP" else [settings]
    while True:
        file = io.BytesIO()
        try:
            part.save(file, file_format, **ways.pop(0))
            return file.getvalue()
        except ValueError as error:
            if not ways or _TOO_RICH not in str(error):
                raise


def exif_of_crop(exif: bytes, size: Size, orientation: int) -> bytes | None:
    """The EXIF for a crop of this (height, width): its orientation, its size, and no thumbnail of the whole photo.

    Changed in place, since cameras' own notes hold offsets that a rewritten EXIF would break. None if it is damaged.
    """
    body = bytearray(exif.removeprefix(b"Exif\0\0"))
    try:
        order = {b"II*\0": "<", b"MM\0*": ">"}[bytes(body[:4])]
        (first,) = struct.unpack_from(order + "I", body, 4)
        height, width = size
        entries, following = _directory(body, order, first)
        _set_number(body, order, entries.get(0x112), orientation)
        _set_number(body, order, entries.get(0x100), width)
        _set_number(body, order, entries.get(0x101), height)
        if 0x8769 in entries:
            inner, _ = _directory(body, order, struct.unpack_from(order + "I", body, entries[0x8769] + 8)[0])
            _set_number(body, order, inner.get(0xA002), width)
            _set_number(body, order, inner.get(0xA003), height)
        (thumbnails,) = struct.unpack_from(order + "I", body, following)
        if thumbnails:
            struct.pack_into(order + "I", body, following, 0)
            with contextlib.suppress(struct.error, KeyError):  # one that cannot be found is out of reach now anyway
                small, _ = _directory(body, order, thumbnails)
                start, length = (struct.unpack_from(order + "I", body, small[tag] + 8)[0] for tag in (0x201, 0x202))
                if start >= 8 and start + length == len(body):
                    del body[start:]
                elif start >= 8 and start + length < len(body):
                    body[start : start + length] = bytes(length)
    except (struct.error, KeyError):
        return None
    return b"Exif\0\0" + bytes(body)


def _directory(body: bytearray, order: str, place: int) -> tuple[dict[int, int], int]:
    """Where each tag's entry of 12 bytes is, and where the place of the next directory is written."""
    (count,) = struct.unpack_from(order + "H", body, place)
    starts = [place + 2 + 12 * index for index in range(count)]
    return {struct.unpack_from(order + "H", body, start)[0]: start for start in starts}, place + 2 + 12 * count


def _set_number(body: bytearray, order: str, entry: int | None, value: int) -> None:
    """Change a single number of 16 or 32 bits where it stands."""
    if entry is None:
        return
    kind, count = struct.unpack_from(order + "HI", body, entry + 2)
    if count == 1 and kind in (3, 4):
        struct.pack_into(order + {3: "H", 4: "I"}[kind], body, entry + 8, value)
