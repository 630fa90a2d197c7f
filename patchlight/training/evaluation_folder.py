"""The folder that `patchlight evaluate --out` writes."""

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.explain import plot
from patchlight.files import replacing
from patchlight.remote import on_disk
from patchlight.training.charts import draw_calibration, draw_confusion
from patchlight.training.evaluate import ClassResult, Evaluation, Report

FILES = ("evaluation.json", "per-class.csv", "confusion.png", "calibration.png")
_FIRST_WORDS = b'{\n  "patchlight evaluation": 1,'


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, or in which somebody else's files would be overwritten."""
    if on_disk(folder).exists() and not folder.is_dir():
        raise PatchlightError(f"{folder}: is a file; name a folder for the evaluation")
    try:
        there = [name for name in FILES if (folder / name).exists()]
        ours = FILES[0] in there and (folder / FILES[0]).read_bytes().startswith(_FIRST_WORDS)
    except OSError as error:
        raise PatchlightError(f"{folder}: cannot be read ({error.strerror or error})") from None
    if there and not ours:
        raise PatchlightError(f"{folder}: holds {there[0]}, which is not from an evaluation; name another folder")
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _cannot_write(folder, error) from None


def _cannot_write(folder: Path, error: OSError) -> PatchlightError:
    reason = error.strerror or str(error)
    return PatchlightError(f"{folder}: cannot be written ({reason}); free some space, or name another folder")


def write_report(report: Report, folder: str | os.PathLike[str]) -> list[str]:
    """evaluation.json, per-class.csv, confusion.png and calibration.png: all of them whole, or none where one fails.

    Gives a sentence for each reason why pictures could not be drawn.
    """
    folder, result = Path(folder), report.evaluation
    check_folder(folder)
    bins = [asdict(each) for each in result.calibration.bins]
    scaled = [asdict(each) for each in result.calibrated.bins]
    pictures: dict[str, Callable[[], Any]] = {
        "confusion.png": lambda: draw_confusion(*_confusion_of_classes_with_photos(result)),
        "calibration.png": lambda: draw_calibration(bins, scaled=scaled),
    }
    files = {"per-class.csv": _per_class_csv(result)}
    failures: dict[str, list[str]] = {}
    for name, draw in pictures.items():
        try:
            files[name] = plot.to_png(draw().figure)
        except PatchlightError as error:
            failures.setdefault(str(error), []).append(name)
    files["evaluation.json"] = (json.dumps({"patchlight evaluation": 1} | report.to_dict(), indent=2) + "\n").encode()
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:  # which puts them in place once all are written
            for name, content in files.items():
                stack.enter_context(replacing(folder / name)).write_bytes(content)
        for name in set(FILES) - files.keys():  # of an earlier evaluation
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise _cannot_write(folder, error) from None
    return [f"not drawn: {', '.join(names)}; {reason}" for reason, names in failures.items()]


def _per_class_csv(result: Evaluation) -> bytes:
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(ClassResult)])
    table.writeheader()
    for one in result.per_class:
        row = asdict(one)
        for column in ("name", "confused_with"):
            if (row[column] or "")[:1] in tuple("=+-@\t\r"):
                row[column] = f"'{row[column]}"  # a spreadsheet would compute it
        table.writerow(row)
    return text.getvalue().encode(errors="replace")


def _confusion_of_classes_with_photos(result: Evaluation) -> tuple[Tensor, list[str]]:
    """What was taken for a class without photos is one column more: a model of a thousand classes has many."""
    shown = [k for k, one in enumerate(result.per_class) if one.photos]
    if len(shown) > 2000:
        raise PatchlightError(f"{len(shown):,} classes are too many for a picture; evaluation.json has the numbers")
    place_K = torch.full((len(result.classes),), len(shown))
    place_K[shown] = torch.arange(len(shown))
    rows_N, columns_N = place_K[result.labels_N], place_K[result.predicted_N]
    size = len(shown) + int(columns_N.max() == len(shown))
    matrix = torch.bincount(rows_N * size + columns_N, minlength=size**2).view(size, size)
    return matrix, [result.classes[k] for k in shown] + ["(any other)"] * (size - len(shown))
