"""What a row says instead of what the model found: a person's corrections, or the boxes of MegaDetector.

DIR/corrections.jsonl has a line for each correction, and of a photo's the last one counts:

    {"file": absolute path, "decision": ..., "boxes": [[x0, y0, x1, y1], ...], "group": ..., "label": ...}

with boxes in pixels of the upright photo, best first; {"file": ..., "undone": true} gives the photo back to the model.
The file is the user's own: `--overwrite` leaves it where it is.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from patchlight.batch.inputs import CORRECTIONS, LABELS
from patchlight.batch.rows import Row, box_of
from patchlight.errors import PatchlightError
from patchlight.files import printable, replacing, writing
from patchlight.json_config import parse_json
from patchlight.localizing.decide import Decision
from patchlight.remote import on_disk
from patchlight.weights.groups import UNKNOWN

DECISIONS: tuple[Decision, ...] = get_args(Decision)
CORRECTED = "corrected"
"""The method of a row that a person has corrected."""
IMPORTED = "boxes"
"""The method of a row whose boxes were read from a file."""

_TYPICAL, _CONSERVATIVE = 0.2, 0.1
"""MegaDetector's thresholds, where its file has none."""


@dataclass(frozen=True, slots=True)
class Override:
    """What is said of one photo."""

    method: str
    decision: Decision
    boxes: tuple[tuple[float, float, float, float], ...]
    """In pixels of the upright photo, or, of an import, in shares of its sides."""
    confidences: tuple[float, ...]
    count: int
    """Subjects; more than there are boxes where fewer were asked for."""
    group: str | None = None
    label: str | None = None

    @property
    def mark(self) -> str:
        """By which crops that were made after it are known."""
        said = repr((self.method, self.decision, self.boxes, self.confidences, self.count, self.group, self.label))
        return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def applied(self, row: Row) -> Row:
        """What the row of a photo becomes; one that has failed stays so."""
        if row["status"] != "ok":
            return row
        width, height = row["size"]
        boxes = []
        for ends, confidence in zip(self.boxes, self.confidences, strict=True):
            if self.method == IMPORTED:
                ends = (ends[0] * width, ends[1] * height, ends[2] * width, ends[3] * height)
            x0, y0, x1, y1 = (
                round(min(max(end, 0.0), side), 1) for end, side in zip(ends, (width, height) * 2, strict=True)
            )
            if x1 > x0 and y1 > y0:
                boxes.append(box_of((x0, y0, x1, y1), confidence, confidence, (height, width)))
        changed = row | {
            "decision": self.decision,
            "confidence": boxes[0]["confidence"] if boxes else 1.0 if self.method == CORRECTED else 0.0,
            "method": self.method,
            "subjects": {"none": 0, "several": max(self.count, 2)}.get(self.decision, max(self.count, 1)),
            "boxes": boxes,
        }
        group = self.group or (None if row["group"] is None else UNKNOWN)  # of a model that has groups
        for name, value in (("group", group), ("label", self.label)):
            if self.method == CORRECTED and value != row[name]:
                changed |= {name: value, f"{name}_confidence": None if value in (None, UNKNOWN) else 1.0}
        if self.method == IMPORTED and self.group is not None:
            changed |= {"group": self.group, "group_confidence": changed["confidence"]}
        return changed


def check_correction(given: Any) -> Override | None:
    """The correction that a line, or a page, holds; None of one that is undone. Raises ValueError for what is none."""
    if not isinstance(given, dict):
        raise ValueError("a correction is an object")
    if given.get("undone") is True:
        return None
    decision, boxes = next((each for each in DECISIONS if each == given.get("decision")), None), given.get("boxes")
    if decision is None:
        raise ValueError(f"decision is one of {', '.join(DECISIONS)}")
    if not isinstance(boxes, list) or len(boxes) > 1000:
        raise ValueError("boxes are a list of [x0, y0, x1, y1]")
    for box in boxes:
        good = isinstance(box, list) and len(box) == 4 and all(type(end) in (int, float) for end in box)
        if not good or not all(-1e6 <= end <= 1e6 for end in box) or box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError("a box is [x0, y0, x1, y1] in pixels, with x0 < x1 and y0 < y1")
    for name in ("group", "label"):
        value = given.get(name)
        if value is not None and (not isinstance(value, str) or not value.strip() or len(value) > 200):
            raise ValueError(f"{name} is a text of up to 200 letters, or null")
    corners = tuple((float(x0), float(y0), float(x1), float(y1)) for x0, y0, x1, y1 in boxes)
    return Override(
        CORRECTED, decision, corners, (1.0,) * len(corners), len(corners), given.get("group"), given.get("label")
    )


def read_corrections(folder: Path) -> dict[str, Override]:
    """By the photos' absolute paths."""
    found: dict[str, Override] = {}
    for _, file, override in correction_lines(folder / CORRECTIONS):
        found.pop(file, None)
        if override is not None:
            found[file] = override
    return found


def correction_lines(path: Path) -> Iterator[tuple[bytes, str, Override | None]]:
    """Each line with the photo that it is about and what it says; None where it gives it back to the model."""
    if not path.exists():
        return
    try:
        *lines, end = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PatchlightError(f"{path}: cannot be read ({error.strerror or error})") from None
    for number, line in enumerate([*lines, end] if _is_json(end) else lines, 1):
        try:
            given = parse_json(line)
            override = check_correction(given)
            file = given["file"]
            if not isinstance(file, str):
                raise ValueError("file is the path of a photo")
        except (ValueError, KeyError) as error:
            raise PatchlightError(
                f"{path}: line {number} is not a correction ({error}); correct or remove it"
            ) from None
        yield line, file, override


def _is_json(end: bytes) -> bool:
    """Whether what follows the last line end is a line that lacks its own, as some editors write it; else a kill has
    cut it off."""
    try:
        parse_json(end)
    except ValueError:
        return False
    return True


def add_correction(folder: Path, file: str, correction: Mapping[str, Any]) -> None:
    """Write down a correction of the photo; it is on the disk when this returns."""
    check_correction(dict(correction))
    path = folder / CORRECTIONS
    line = json.dumps({"file": file} | dict(correction)).encode() + b"\n"
    with writing(path), path.open("a+b") as written:
        end = written.seek(0, os.SEEK_END)
        if end:
            written.seek(0)
            kept = written.read()
            begun = kept.rfind(b"\n") + 1
            if _is_json(kept[begun:]):
                line = b"\n" + line
            else:
                written.truncate(begun)
        written.write(line)
        written.flush()
        os.fsync(written.fileno())


def read_boxes(path: str, base: str, most: int | None) -> dict[str, Override]:
    """The boxes of a file of MegaDetector's, by the absolute paths of photos whose names are relative to `base`; `most`
    of a photo."""
    try:
        with open(path, "rb") as file:
            given = parse_json(file.read())
        images, categories = given["images"], given["detection_categories"]
        metadata = given.get("info", {}).get("detector_metadata", {})
        typical = float(metadata.get("typical_detection_threshold", _TYPICAL))
        conservative = float(metadata.get("conservative_detection_threshold", _CONSERVATIVE))
        found = {}
        for image in images:
            detections = image.get("detections")
            if detections is None:  # it could not be read
                continue
            kept = sorted(
                (each for each in detections if float(each["conf"]) >= conservative), key=lambda each: -each["conf"]
            )
            sure = sum(float(each["conf"]) >= typical for each in kept)
            decision: Decision = "none"
            if kept:
                decision = "several" if sure > 1 else "subject" if sure else "unsure"
            boxes = []
            for each in kept[:most]:
                x, y, width, height = (float(end) for end in each["bbox"])
                boxes.append((x, y, x + width, y + height))
            name = os.path.normpath(os.path.join(base, image["file"].replace("\\", "/")))
            group = str(categories[str(kept[0]["category"])]) if kept else None
            sureness = tuple(round(float(each["conf"]), 4) for each in kept[:most])
            found[name] = Override(IMPORTED, decision, tuple(boxes), sureness, max(sure, len(kept[:1])), group)
    except OSError as error:
        raise PatchlightError(f"{printable(path)}: cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PatchlightError(
            f"{printable(path)}: is not MegaDetector's JSON ({type(error).__name__}: {str(error)[:80]}); "
            "give the file that MegaDetector wrote"
        ) from None
    return found


EMPTY = "empty"
"""The class of photos that show nothing."""


def write_labels(folder: Path) -> Path:
    """The corrections as a CSV to learn from (file, label, boxes), labels.csv in the run's folder.

    A photo's class is its label, else its group; that of a photo which shows nothing is `empty`. A table of that name
    that was not written here, or was changed since, is refused.
    """
    corrections = read_corrections(on_disk(folder))
    if not corrections:
        raise PatchlightError(
            f"{folder}: there are no corrections to learn from; make some with `patchlight review {folder}`"
        )
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("file", "label", "boxes"))
    for photo, said in sorted(corrections.items()):
        group = None if said.group == UNKNOWN else said.group
        label = EMPTY if said.decision == "none" else said.label or group or ""
        boxes = [] if said.decision == "none" else [list(box) for box in said.boxes]
        table.writerow((photo, label, json.dumps(boxes) if boxes or said.decision == "none" else ""))
    _write_own(folder / LABELS, text.getvalue().encode(), folder / ".run" / "labels.sha256")
    return folder / LABELS


def _write_own(path: Path, content: bytes, note: Path) -> None:
    """Write a file, unless one is there that is not what `note` says was written the last time."""
    with writing(path):
        before = path.read_bytes() if path.exists() else content
        noted = note.read_text("utf-8") if note.exists() else None
    if before != content and hashlib.sha256(before).hexdigest() != noted:
        raise PatchlightError(
            f"{path}: is not as `finetune --from` wrote it, and would be overwritten; rename it, or learn from it with "
            f"`patchlight finetune {path}`"
        )
    with writing(path):
        note.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        with replacing(note) as temporary:
            temporary.write_text(hashlib.sha256(content).hexdigest(), "utf-8")
