"""The page that shows what was found in a folder of photos, the least certain first.

It is one file, report.html, beside the thumbnails, and needs nothing else: no network, no server. What comes from
file names and images enters it as data only, never as HTML.
"""

import base64
import binascii
import hashlib
import html
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchlight.batch.rows import Row
from patchlight.files import replacing, writing
from patchlight.geometry import fit_inside
from patchlight.images.decode import Decoded

THUMBNAIL_SIDE = 240
"""Pixels of a thumbnail's longest side."""

_FINE_HEAT, _COARSE_HEAT, _LARGE = 32, 16, 2_500
"""The longest side of a heat map in the page, up to this many photos and beyond: 10,000 fine ones would be 14 MB."""

_PLACE = re.compile(r"/\*\{(\w+)\}\*/")


def write_report(
    folder: Path,
    rows: Iterable[Row],
    thumbs: Sequence[str],
    *,
    title: str = "Patchlight report",
    root: Path | None = None,
) -> Path:
    """Write report.html for these rows, of which each has a thumbnail of this name, or "" for none.

    `root` is the folder that relative paths in the rows start from, the current one unless told. Equal rows give an
    equal page, byte for byte.
    """
    path = folder / "report.html"
    # Row by row: a folder of any size needs no more memory than another.
    with writing(path), replacing(path) as temporary, temporary.open("wb") as file:
        for part in _page(rows, thumbs, title, _way_to(Path.cwd() if root is None else root, folder)):
            file.write(part.encode())
    return path


# Pictures


def thumbnail(photo: Image.Image | Decoded, *, mark: bytes = b"") -> bytes:
    """A JPEG of an upright photo, its longest side 240 pixels at most."""
    if isinstance(photo, Decoded):
        # One that was decoded fast may end inside its last pixels.
        region = (photo.region.left, photo.region.top, photo.region.right, photo.region.bottom)
        image, (height, width) = photo.image, photo.source_size
    else:
        image, region = photo, None
        width, height = photo.size
    size = fit_inside((width, height), THUMBNAIL_SIDE)
    if image.mode != "RGB":
        image = image.convert("RGB")
    # reducing_gap first shrinks by a whole number, which is several times faster and looks the same.
    small = image.resize(size, Image.Resampling.BICUBIC, box=region, reducing_gap=2.0)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=82, comment=mark)
    return file.getvalue()


def thumbnail_name(place: str) -> str:
    """Of the photo whose crops go to this place, in thumbs/."""
    return f"{hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest()}.jpg"


def mark_of(*shown: Any) -> bytes:
    """By which a picture is known again: a comment in its file, of all that it was made of."""
    text = json.dumps(shown, sort_keys=True)
    return b"patchlight " + hashlib.blake2b(text.encode(), digest_size=8).hexdigest().encode()


def current_pictures(folder: Path, wanted: Mapping[str, bytes], drawn: Iterable[str] = ()) -> set[str]:
    """The names of those pictures in a folder that are whole, and have the mark which is wanted of them.

    The others among those that runs have `drawn` go away; nothing else does.
    """
    if not folder.is_dir():
        return set()
    kept = {name for name, mark in wanted.items() if _mark_in(folder / name) == mark}
    for name in {*wanted, *drawn} - kept:
        path = folder / name
        if os.path.lexists(path) and not path.is_dir():  # a folder is none of ours
            with writing(path):
                path.unlink(missing_ok=True)
    return kept


def _mark_in(picture: Path) -> bytes | None:
    """None also of a JPEG that was cut off."""
    try:
        with picture.open("rb") as file:
            head = file.read(128)
            file.seek(-2, os.SEEK_END)
            tail = file.read()
    except OSError:
        return None
    mark = re.search(rb"patchlight [0-9a-f]{16}", head)
    return mark[0] if mark and head.startswith(b"\xff\xd8") and tail == b"\xff\xd9" else None


# The page


def _page(rows: Iterable[Row], thumbs: Sequence[str], title: str, base: str) -> Iterator[str]:
    """The page in pieces."""
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    style, script = (_inside(template, tag) for tag in ("style", "script"))
    parts = {
        "policy": "; ".join(
            [
                "default-src 'none'",
                f"script-src {_source(script)}",
                f"style-src {_source(style)}",
                "img-src 'self' file:",  # for a page that is opened from disk, 'self' is nothing in some browsers
                "base-uri 'none'",
                "form-action 'none'",
            ]
        ),
        "title": html.escape(title.encode(errors="replace").decode()),
    }
    for place, piece in enumerate(_PLACE.split(template)):  # text and names of places by turns
        if place % 2 == 0:
            yield piece
        elif piece == "data":
            yield from _data(rows, thumbs, base)
        else:
            yield parts[piece]


def _data(rows: Iterable[Row], thumbs: Sequence[str], base: str) -> Iterator[str]:
    side = _FINE_HEAT if len(thumbs) <= _LARGE else _COARSE_HEAT
    yield f'{{"base":{_as_data(base)},"separator":{_as_data(os.sep)},"rows":['
    for number, (row, thumb) in enumerate(zip(rows, thumbs, strict=True)):
        yield ("," if number else "") + _as_data(_packed(row, thumb, side))
    yield "]}"


def _packed(row: dict[str, Any], thumb: str, side: int) -> list[Any]:
    """A row as the page's script reads it: no names, since they would be half of the page."""
    if row["status"] != "ok":
        return [row["path"], None, _text(row.get("reason")), _text(row.get("detail"))]
    width, height = row.get("size") or (0, 0)
    boxes = [
        [*(_number(end, 1) for end in box["xyxy"]), _number(box["score"], 3), _number(box["confidence"], 4)]
        for box in row.get("boxes") or ()
    ]
    return [
        row["path"],
        _text(row.get("decision")),
        _number(row.get("confidence"), 4),
        [width, height],
        boxes,
        list(row.get("crops") or ()),
        _heat(row.get("heat"), side),
        thumb,
        _text(row.get("method")),
        *_more(row),
    ]


def _more(row: dict[str, Any]) -> list[Any]:
    """Of its burst and of what it shows, where something is known of these."""
    burst, group = row.get("burst"), row.get("group")
    frame = [burst["id"], burst["frame"], burst["frames"], _text(burst["time"])] if burst else None
    name = [_text(row["label"]), _number(row["label_confidence"], 3)] if row.get("label") is not None else []
    if row["decision"] == "none" or not (group or name):
        return [] if frame is None else [frame]
    return [frame, [group, _number(row["group_confidence"], 3), *name] if group else name]


def _heat(heat: Any, side: int) -> list[Any] | None:
    """[h, w, base64 of uint8] with neither above `side`, and [x0, y0, x1, y1] if the map does not cover the photo."""
    if not heat:
        return None
    height, width = heat["size"]
    try:
        levels = base64.b64decode(heat["levels"], validate=True)
    except (binascii.Error, ValueError):
        return None
    if height < 1 or width < 1 or len(levels) != height * width:
        return None
    if max(height, width) > side:
        size = fit_inside((width, height), side)
        image = Image.fromarray(np.frombuffer(levels, np.uint8).reshape(height, width))
        image = image.resize(size, Image.Resampling.BOX)
        (width, height), levels = size, image.tobytes()
    packed: list[Any] = [height, width, base64.b64encode(levels).decode()]
    region = heat.get("region")
    return [*packed, [_number(end, 1) for end in region]] if region else packed


def _number(value: Any, digits: int) -> float:
    """A finite number: JSON has no others."""
    good = isinstance(value, int | float) and math.isfinite(value)
    rounded = round(float(value), digits) if good else 0.0
    return int(rounded) if rounded.is_integer() else rounded


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _as_data(data: Any) -> str:
    """JSON in ASCII, in which nothing can end the element that it stands in or begin another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _inside(template: str, tag: str) -> str:
    """What stands in the template's one element of this name that has no attributes."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    return str(content)


def _source(content: str) -> str:
    """By which the page's policy knows its own script, and lets no other run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _way_to(root: Path, folder: Path) -> str:
    """The way from the page to the folder that relative paths start from, so that both can be moved together."""
    return os.path.relpath(root.resolve(), folder.resolve())
