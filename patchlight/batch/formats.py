"""The results in the formats of other programs, written row by row.

json           results.json: a single list of the rows
csv            results.csv, which every run writes
megadetector   megadetector.json: MegaDetector's batch output, for Timelapse and the like; photos that are `none` have
               their boxes, too, below the typical threshold
parquet        results.parquet: the columns of results.csv, typed, and each row whole in JSON
coco           coco.json: images, annotations (x, y, width, height in pixels) and categories
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, get_args

from patchlight import __version__
from patchlight.batch.inputs import path_below
from patchlight.batch.results import COLUMNS, cells_of
from patchlight.batch.rows import Row
from patchlight.batch.tables import Layout, write_table
from patchlight.config import Calibration
from patchlight.errors import PatchlightError
from patchlight.files import replacing, writing
from patchlight.weights.groups import EMPTY, UNKNOWN

Format = Literal["json", "csv", "parquet", "megadetector", "coco"]


_NUMBERS = ("confidence", "x0", "y0", "x1", "y1", "score", "group_confidence", "label_confidence")
"""Columns of results.csv that are neither texts nor whole."""

CONSERVATIVE = 1 / 8
"""The conservative threshold, as a share of the typical one, which is where `unsure` begins."""


def check_format(name: str) -> None:
    if name not in get_args(Format):
        raise PatchlightError(f"format={name!r} is not known; it is one of {', '.join(get_args(Format))}")
    if name == "parquet" and find_spec("pyarrow") is None:
        raise PatchlightError("format='parquet' needs pyarrow; pip install 'patchlight[tables]', or take csv")


def file_of(name: str) -> str:
    """The name of a format's file."""
    return f"results.{name}" if name in ("json", "csv", "parquet") else f"{name}.json"


def export(
    folder: Path,
    name: str,
    rows: Callable[[], Iterator[Row]],
    *,
    base: str,
    detector: str = "patchlight",
    calibration: Calibration | None = None,
) -> Path:
    """Write the results of a folder in this format; where they are.

    `base` is the folder that the files' names of megadetector and coco are relative to, `detector` the model's name,
    and `calibration` what its confidences mean.
    """
    check_format(name)
    path = folder / file_of(name)
    if name == "csv":
        return path
    if name == "parquet":
        write_table(path, Layout(_TYPED | {"row": "text"}), 0, lambda: _typed(rows()))
        return path
    with writing(path), replacing(path) as temporary, temporary.open("w", encoding="ascii") as file:
        match name:
            case "json":
                _write_list(file, rows())
            case "megadetector":
                _write_megadetector(file, rows(), base, detector, calibration)
            case _:
                _write_coco(file, rows, base)
        file.write("\n")
    return path


_TYPED = {
    name: "whole" if name in ("width", "height", "subjects") else "number" if name in _NUMBERS else "text"
    for name in COLUMNS
}


def _typed(rows: Iterable[Row]) -> Iterator[tuple[Row, None]]:
    for row in rows:
        yield dict(zip(COLUMNS, cells_of(row), strict=True)) | {"row": json.dumps(row)}, None


def _write_megadetector(
    file: IO[str], rows: Iterator[Row], base: str, detector: str, calibration: Calibration | None
) -> None:
    info: dict[str, Any] = {"format_version": "1.4", "detector": f"patchlight {__version__}: {detector}"}
    least = None
    if calibration is not None:
        least = calibration.nothing
        info["detector_metadata"] = {
            "typical_detection_threshold": least,
            "conservative_detection_threshold": round(CONSERVATIVE * least, 4),
        }
    # MegaDetector's own categories come first; other groups follow as they appear.
    groups, labels = _Numbers(1, ("animal", "person", "vehicle")), _Numbers(0)
    file.write(f'{{"info": {json.dumps(info)},\n"images": ')
    _write_list(file, (_megadetector_image(row, base, groups, labels, least) for row in rows))
    file.write(f',\n"detection_categories": {json.dumps(groups.names())}')
    if labels.names():
        file.write(f',\n"classification_categories": {json.dumps(labels.names())}')
    file.write("}")


class _Numbers:
    """Names by numbers, as they come."""

    def __init__(self, first: int, names: Iterable[str] = ()) -> None:
        self._first = first
        self._numbers = {name: str(number) for number, name in enumerate(names, first)}

    def of(self, name: str) -> str:
        return self._numbers.setdefault(name, str(self._first + len(self._numbers)))

    def names(self) -> dict[str, str]:
        return {number: name for name, number in self._numbers.items()}


def _megadetector_image(row: Row, base: str, groups: _Numbers, labels: _Numbers, least: float | None) -> dict[str, Any]:
    image: dict[str, Any] = {"file": _relative(row["path"], base)}
    if row.get("burst"):
        image["burst"] = row["burst"]["id"]  # readers leave alone what they do not know
    if row["status"] != "ok":
        return image | {"failure": f"{row['reason']}: {row['detail']}", "detections": None}
    width, height = row["size"]
    empty = row["decision"] == "none"
    # What may be an animal stays one: to miss it is worse than to look at something else.
    group = "animal" if empty or row["group"] in (None, UNKNOWN, EMPTY) else row["group"]
    category = groups.of(group) if row["boxes"] else ""
    detections: list[dict[str, Any]] = []
    for box in row["boxes"]:
        x0, y0, x1, y1 = box["xyxy"]
        detections.append(
            {
                "category": category,
                "conf": _on_its_side(box["confidence"], least, empty=empty, first=not detections),
                "bbox": [_share(x0, width), _share(y0, height), _share(x1 - x0, width), _share(y1 - y0, height)],
            }
        )
    if detections and not empty and row["label"] is not None:  # what the photo shows, so of its best box
        detections[0]["classifications"] = [[labels.of(row["label"]), row["label_confidence"]]]
    return image | {"width": width, "height": height, "detections": detections}


def _on_its_side(confidence: float, least: float | None, *, empty: bool, first: bool) -> float:
    """A box's confidence on the side of the threshold that its photo's decision says: one that is `unsure` because of
    what it is called has a box that is likely wrong, and yet is not to be hidden; and what was rounded stays below."""
    if least is None:
        return confidence
    if empty:
        return max(0.0, min(confidence, round(least - 0.0001, 4)))
    return max(confidence, least) if first else confidence


def _share(pixels: float, side: int) -> float:
    return round(min(max(pixels / side, 0.0), 1.0), 6)


def _write_coco(file: IO[str], rows: Callable[[], Iterator[Row]], base: str) -> None:
    file.write(f'{{"info": {json.dumps({"description": f"patchlight {__version__}", "version": "1"})},\n')
    file.write('"categories": [{"id": 1, "name": "subject", "supercategory": "subject"}],\n"images": ')
    _write_list(
        file,
        (
            {"id": number, "file_name": _relative(row["path"], base), "width": row["size"][0], "height": row["size"][1]}
            for number, row in enumerate(rows(), 1)
            if row["status"] == "ok"
        ),
    )
    file.write(',\n"annotations": ')
    _write_list(file, _coco_annotations(rows()))
    file.write("}")


def _coco_annotations(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    identity = 0
    for number, row in enumerate(rows, 1):
        for box in row["boxes"] if row["decision"] != "none" else []:
            identity += 1
            x0, y0, x1, y1 = box["xyxy"]
            width, height = round(x1 - x0, 1), round(y1 - y0, 1)
            yield {
                "id": identity,
                "image_id": number,
                "category_id": 1,
                "bbox": [x0, y0, width, height],
                "area": round(width * height, 2),
                "iscrowd": 0,
                "score": box["confidence"],
            }


def _relative(path: str, base: str) -> str:
    return path_below(path, base).replace(os.sep, "/")


def _write_list(file: IO[str], values: Iterable[Any]) -> None:
    file.write("[")
    for number, value in enumerate(values):
        file.write((",\n" if number else "\n") + json.dumps(value))
    file.write("\n]")
