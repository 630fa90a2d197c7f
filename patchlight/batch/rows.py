"""The rows of results.jsonl: a JSON object a line, one for each input, in their order (docs/crop.md has the keys).

A path stands in a row exactly: bytes that are not UTF-8 are surrogates, \\udc80 to \\udcff.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchlight.errors import PatchlightError
from patchlight.geometry import Box, Size
from patchlight.images.cutout import HeatMap
from patchlight.json_config import parse_json

if TYPE_CHECKING:  # worker processes, which read no rows, start sooner without
    from patchlight.localizing.detector import Localization

CUT_OFF = 0.01
"""A box that comes this close to a border of the photo, as a share of its side, ends where the photo does. Of 111 sides
of 365 masks of DUTS that end so, 62 % are said, and 82 % of what is said is so."""

VERSION = 5

NAMED = ("group", "group_confidence", "label", "label_confidence")
"""What the photo shows, by a model whose classes have groups, or names at least; null by others."""

Row = dict[str, Any]


def row_of(path: str, found: "Localization", crops: Sequence[str] = ()) -> Row:
    height, width = found.view.source_size
    levels_hw = (found.heat_hw.float().clamp(0, 1) * 255).round().byte()
    return {
        "version": VERSION,
        "path": path,
        "status": "ok",
        "reason": None,
        "detail": None,
        "size": [width, height],
        "decision": found.decision,
        "confidence": round(float(found.confidence), 4),
        "method": found.method,
        **(dict.fromkeys(NAMED) if found.named is None else found.named.to_dict()),
        "subjects": {"none": 0, "several": max(found.count, 2)}.get(found.decision, 1),
        "boxes": [
            box_of(
                (each.box.left, each.box.top, each.box.right, each.box.bottom),
                float(each.score),
                float(each.confidence),
                (height, width),
            )
            for each in found.subjects
        ],
        "crops": list(crops),
        "cuts": [],
        "heat": {
            "size": list(levels_hw.shape),
            "levels": base64.b64encode(levels_hw.contiguous().numpy().tobytes()).decode(),
        }
        | _region(found),
    }


def box_of(xyxy: tuple[float, float, float, float], score: float, confidence: float, size: Size) -> Row:
    """A box as rows have it, of a photo of this (height, width)."""
    x0, y0, x1, y1 = ends = [round(float(end), 1) + 0.0 for end in xyxy]  # and not -0.0
    height, width = size
    near_x, near_y = CUT_OFF * width, CUT_OFF * height
    touched = {
        "left": x0 <= near_x,
        "top": y0 <= near_y,
        "right": x1 >= width - near_x,
        "bottom": y1 >= height - near_y,
    }
    return {
        "xyxy": ends,
        "score": round(score, 4),
        "confidence": round(confidence, 4),
        "cut_off": [side for side, is_touched in touched.items() if is_touched],
    }


def check_row(row: Any) -> None:
    """Raise ValueError, LookupError or TypeError for what is no row as `row_of` and `error_row` make them."""
    if not isinstance(row["path"], str) or "\0" in row["path"] or row["status"] not in ("ok", "error"):
        raise ValueError("it is of no photo")
    for name in ("reason", "detail", "decision", "method", "group", "label"):
        if not isinstance(row[name], str | None):
            raise ValueError(f"{name} is no text")
    for name in ("confidence", "group_confidence", "label_confidence"):
        if row[name] is not None:
            _check_numbers(name, row[name])
    for place in row["boxes"]:
        x0, y0, x1, y1 = place["xyxy"]
        _check_numbers("boxes", x0, y0, x1, y1, place["score"], place["confidence"])
        _check_texts("cut_off", place["cut_off"])
    _check_texts("crops", row["crops"])
    for cut in row["cuts"]:
        if type(cut["box"]) is not int:
            raise ValueError("cuts are of no boxes")
    for name in ("burst", "video"):
        if not isinstance(row.get(name), dict | None):
            raise ValueError(f"{name} is no object")
    if row.get("burst"):
        _check_texts("burst", [row["burst"]["id"], row["burst"]["clock"]])
    if row["status"] == "error":
        return
    sides, heat, count = row["size"], row["heat"], row["subjects"]
    if len(sides) != 2 or type(count) is not int or not all(type(side) is int and 0 < side < 2**31 for side in sides):
        raise ValueError("it has no size")
    if row["decision"] is None or row["confidence"] is None:
        raise ValueError("it has no decision")
    if heat is not None:
        h, w = heat["size"]
        fits = type(h) is type(w) is int and h > 0 and w > 0 and len(heat["levels"]) == (h * w + 2) // 3 * 4
        if not fits or not re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", heat["levels"]):
            raise ValueError("its heat is no map")
        x0, y0, x1, y1 = heat.get("region", (0, 0, 1, 1))
        _check_numbers("region", x0, y0, x1, y1)


def _check_numbers(name: str, *values: Any) -> None:
    if not all(type(value) in (int, float) and abs(value) < 1e12 for value in values):
        raise ValueError(f"{name} is no number")


def _check_texts(name: str, values: Any) -> None:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} is no list of texts")


def heat_of(row: Row) -> HeatMap:
    """The heat map of a row that has one."""
    h, w = row["heat"]["size"]
    levels = np.frombuffer(base64.b64decode(row["heat"]["levels"]), np.uint8).reshape(h, w)
    return HeatMap(levels, Box(*row["heat"].get("region", (0, 0, *row["size"]))))


def _region(found: "Localization") -> dict[str, list[float]]:
    """Where the map lies, x0 y0 x1 y1 in the photo's pixels, if the model does not see exactly the whole photo."""
    h, w = found.heat_hw.shape
    down, across = found.patch_size
    box = found.view.to_source(Box(0, 0, w * across, h * down))
    height, width = found.view.source_size
    ends = [round(float(end), 1) + 0.0 for end in (box.left, box.top, box.right, box.bottom)]
    whole = all(abs(a - b) < 0.5 for a, b in zip(ends, (0, 0, width, height), strict=True))
    return {} if whole else {"region": ends}


def error_row(path: str, reason: str, detail: str) -> Row:
    empty = dict.fromkeys(("size", "decision", "confidence", "method", *NAMED))
    about = {"version": VERSION, "path": path, "status": "error", "reason": reason, "detail": detail}
    return about | empty | {"subjects": None, "boxes": [], "crops": [], "cuts": [], "heat": None}


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a results.jsonl, in their order."""
    try:
        # Bytes of a name that are not UTF-8 may stand in it as they are, or as JSON's escapes.
        with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            for number, line in enumerate(file, 1):
                row = _parsed(line, path, number)
                if row.get("version") != VERSION:
                    raise PatchlightError(
                        f"{path}: line {number} has version {row.get('version')!r} and this program reads {VERSION}; "
                        "run the command again into a new folder"
                    )
                try:
                    check_row(row)
                except (ValueError, LookupError, TypeError) as error:
                    raise _no_result(path, number, error) from None
                yield row
    except FileNotFoundError:
        raise PatchlightError(f"{path}: there is no such file; name the folder of a finished run") from None
    except OSError as error:
        raise PatchlightError(f"{path}: cannot be read ({error.strerror or error})") from None


def _parsed(line: str, path: Path, number: int) -> Row:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise _no_result(path, number, error) from None
    if not isinstance(row, dict):
        raise _no_result(path, number, ValueError("it is no object"))
    return row


def _no_result(path: Path, number: int, error: Exception) -> PatchlightError:
    what = f"it lacks {error}" if isinstance(error, LookupError) else " ".join(str(error).split())[:80]
    return PatchlightError(f"{path}: line {number} is not a result ({what}); run the command again to repair it")
