"""The page that shows what was found in a folder of photos, the least certain first.

It is one file, report.html, beside the thumbnails, and needs nothing else: no network, no server. What comes from
file names and images enters it as data only, never as HTML.
"""

import base64
import binascii
import contextlib
import hashlib
import html
import io
import json
import math
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchlight.batch.rows import Row, read_rows
from patchlight.errors import PatchlightError
from patchlight.files import replacing
from patchlight.images.decode import Decoded, ImageError, decode

THUMBNAIL_SIDE = 240
"""Pixels of a thumbnail's longest side."""

MANY = 64
"""Missing thumbnails from which on processes make them: starting those takes about a second."""

_FINE_HEAT, _COARSE_HEAT, _LARGE = 32, 16, 2_500
"""The longest side of a heat map in the page, up to this many photos and beyond: 10,000 fine ones would be 14 MB."""

_PLACE = re.compile(r"/\*\{(\w+)\}\*/")


def thumbnail(photo: Image.Image | Decoded, *, path: str = "") -> bytes:
    """A JPEG of an upright photo, its longest side 240 pixels at most.

    With `path`, the row's own, it is marked as that file's, so that `write_report` does not show it for another whose
    number in the results it has got meanwhile.
    """
    if isinstance(photo, Decoded):
        # One that was decoded fast may end inside its last pixels.
        region = (photo.region.left, photo.region.top, photo.region.right, photo.region.bottom)
        image, (height, width) = photo.image, photo.source_size
    else:
        image, region = photo, None
        width, height = photo.size
    scale = min(1.0, THUMBNAIL_SIDE / max(width, height))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    if image.mode != "RGB":
        image = image.convert("RGB")
    # reducing_gap first shrinks by a whole number, which is several times faster and looks the same.
    small = image.resize(size, Image.Resampling.BICUBIC, box=region, reducing_gap=2.0)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=82, **({"comment": _mark(path)} if path else {}))
    return file.getvalue()


def thumbnail_path(folder: Path, row: int) -> Path:
    """Where the thumbnail of a row of results.jsonl is, counted from 0."""
    return folder / "thumbs" / f"{row}.jpg"


def write_report(
    folder: Path, *, title: str = "Patchlight report", root: Path | None = None, workers: int | None = None
) -> Path:
    """Write report.html for the results.jsonl in this folder, and the thumbnails that are not there yet.

    `root` is the folder that relative paths in the results start from, the current one unless told. `workers` is the
    number of processes for many missing thumbnails (None: one a core, 8 at most; 0: none). Equal results give an
    equal page, byte for byte.
    """
    folder = Path(folder)
    results = folder / "results.jsonl"
    root = Path.cwd() if root is None else root
    try:
        shown = _make_thumbnails(folder, read_rows(results), root, workers)
        path = folder / "report.html"
        # Row by row: a folder of any size needs no more memory than another.
        with replacing(path) as temporary, temporary.open("wb") as file:
            for part in _page(read_rows(results), shown, title, _way_to(root, folder)):
                file.write(part.encode())
    except OSError as error:
        raise PatchlightError(f"{folder}: the report cannot be written ({error.strerror or error})") from None
    return path


# Thumbnails


def _make_thumbnails(folder: Path, rows: Iterable[Row], root: Path, workers: int | None) -> list[bool]:
    """Which rows have a thumbnail, once those that were missing are made."""
    shown: list[bool] = []
    missing: list[tuple[int, str, str, str]] = []
    for number, row in enumerate(rows):
        shown.append(False)
        if row["status"] != "ok":
            continue
        target = thumbnail_path(folder, number)
        shown[number] = _is_of(target, row["path"])
        if not shown[number]:
            missing.append((number, os.path.join(root, row["path"]), row["path"], str(target)))
    if missing:
        (folder / "thumbs").mkdir(parents=True, exist_ok=True)
    for number in _in_processes(missing, workers):
        shown[number] = True
    return shown


def _mark(path: str) -> bytes:
    return b"patchlight " + hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest().encode()


def _is_of(thumb: Path, path: str) -> bool:
    """Whether this is a thumbnail, and not one that is marked as another file's."""
    try:
        with thumb.open("rb") as file:
            head = file.read(128)
    except OSError:
        return False
    mark = re.search(rb"patchlight [0-9a-f]{16}", head)
    return head.startswith(b"\xff\xd8") and (mark is None or mark[0] == _mark(path))


def _in_processes(missing: list[tuple[int, str, str, str]], workers: int | None) -> Iterator[int]:
    """The numbers of the thumbnails that could be made."""
    workers = min(8, os.cpu_count() or 1) if workers is None else workers
    if len(missing) < MANY or workers < 1:
        yield from (job[0] for job in missing if _make_one(job))
        return
    jobs = iter(missing)
    # A file that brings a worker down costs its own thumbnail and those beside it, and not the report.
    with contextlib.suppress(BrokenProcessPool), _pool(workers) as pool:
        while some := list(islice(jobs, 16 * workers)):  # at a time: memory stays bounded whatever the folder's size
            for job, made in zip(some, pool.map(_make_one, some, chunksize=8), strict=True):
                if made:
                    yield job[0]


def _pool(workers: int) -> ProcessPoolExecutor:
    # Forking a process in which torch has started threads may hang.
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _make_one(job: tuple[int, str, str, str]) -> bool:
    _, source, path, target = job
    try:
        # Twice this, which is the least that comes of it, is a thumbnail's longest side.
        content = thumbnail(decode(source, fast_size=(THUMBNAIL_SIDE // 2, THUMBNAIL_SIDE // 2)), path=path)
    except ImageError:
        return False  # it is gone, or was changed since; the page shows a grey card
    # Losing one to a crash costs nothing, so there is no waiting for the disk here.
    temporary = Path(f"{target}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(target)
    return True


# The page


def _page(rows: Iterable[Row], shown: Sequence[bool], title: str, base: str) -> Iterator[str]:
    """The page in pieces, for rows of which `shown` says whether they have a thumbnail."""
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
            yield from _data(rows, shown, base)
        else:
            yield parts[piece]


def _data(rows: Iterable[Row], shown: Sequence[bool], base: str) -> Iterator[str]:
    side = _FINE_HEAT if len(shown) <= _LARGE else _COARSE_HEAT
    yield f'{{"base":{_as_data(base)},"separator":{_as_data(os.sep)},"rows":['
    for number, (row, has_thumb) in enumerate(zip(rows, shown, strict=True)):
        yield ("," if number else "") + _as_data(_packed(row, has_thumb, side))
    yield "]}"


def _packed(row: dict[str, Any], has_thumb: bool, side: int) -> list[Any]:
    """A row as the page's script reads it: no names, since they would be half of the page."""
    if row["status"] != "ok":
        return [row["path"], None, _text(row.get("reason")), _text(row.get("detail"))]
    width, height = row.get("size") or (0, 0)
    boxes = [[*(_number(end, 1) for end in box["xyxy"]), _number(box["score"], 3)] for box in row.get("boxes") or ()]
    return [
        row["path"],
        _text(row.get("decision")),
        _number(row.get("confidence"), 4),
        [width, height],
        boxes,
        list(row.get("crops") or ()),
        _heat(row.get("heat"), side),
        int(has_thumb),
        _text(row.get("method")),
        *_more(row),
    ]


def _more(row: dict[str, Any]) -> list[Any]:
    """Of its burst and of what it shows, where something is known of these."""
    burst, group = row.get("burst"), row.get("group")
    frame = [burst["id"], burst["frame"], burst["frames"], _text(burst["time"])] if burst else None
    if group is None or row["decision"] == "none":
        return [] if frame is None else [frame]
    name = [_text(row["label"]), _number(row["label_confidence"], 3)] if row["label"] is not None else []
    return [frame, [group, _number(row["group_confidence"], 3), *name]]


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
        scale = side / max(height, width)
        size = max(1, round(width * scale)), max(1, round(height * scale))
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
    try:
        return os.path.relpath(root.resolve(), folder.resolve())
    except ValueError:  # Windows: they are on different drives
        return str(root.resolve())
