"""Gather the photos that the default model learns from: one CSV with labels and boxes, and a file a photo.

    python recipes/gather_default_photos.py OUT [--shared ../shared/data] [--sheets FOLDER] [--photos-times 3]

OUT gets photos.csv (file,label,x0,y0,x1,y1; empty where a photo has no box), photos/ (27,013 WebP files, as they are in
the zip files of SHARED/photos) and things/ (the tiles of the sheets of SHARED/things, or of --sheets, see
pack_tiny_imagenet.py). The photos, which are sharper and fewer than the things, have three rows each, so that they are
learnt from as often. It appears whole, or not at all. Train on OUT/photos.csv, judge by OUT/held_out.csv: the 1,000
photos that benchmarks/default_model.py asks about, and that are not in the other file.
"""

import argparse
import csv
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchlight.errors import PatchlightError

TILE, ACROSS = 64, 40
TILES = ACROSS * ACROSS
CHUNK = 1_000  # photos of a zip file that one process copies at a time

IMAGENETTE = {
    "n01440764": "tench",
    "n02102040": "English_springer",
    "n02979186": "cassette_player",
    "n03000684": "chain_saw",
    "n03028079": "church",
    "n03394916": "French_horn",
    "n03417042": "garbage_truck",
    "n03425413": "gas_pump",
    "n03445777": "golf_ball",
    "n03888257": "parachute",
}

Corners = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels, x1 and y1 exclusive


class Row(NamedTuple):
    file: str
    label: str
    box: Corners | None


class CopyPhotos(NamedTuple):
    """Files of a zip file, copied out as they are."""

    archive: Path
    names: list[str]

    def write(self, out: Path) -> int:
        with zipfile.ZipFile(self.archive) as archive:
            for name in self.names:
                (out / "photos" / name).write_bytes(archive.read(name))
        return len(self.names)


class CutSheet(NamedTuple):
    """The first tiles of a sheet, each into a file of its own."""

    sheet: Path
    files: list[str]

    def write(self, out: Path) -> int:
        with Image.open(self.sheet) as image:
            if image.size != (ACROSS * TILE, ACROSS * TILE):
                raise PatchlightError(f"{self.sheet}: is {image.size[0]} x {image.size[1]} pixels; take a whole sheet")
            levels_HWC = np.asarray(image.convert("RGB"))
        tiles_NHWC = levels_HWC.reshape(ACROSS, TILE, ACROSS, TILE, 3).swapaxes(1, 2).reshape(TILES, TILE, TILE, 3)
        # PPM needs no encoder: 0.10 ms to write so and 0.14 to read. By Pillow, PPM takes 0.16 and 0.14, BMP 0.17 and
        # 0.12, PNG at level 1 0.73 and 0.34 (measured once, on a busy machine).
        head = f"P6\n{TILE} {TILE}\n255\n".encode()
        for file, tile_HWC in zip(self.files, tiles_NHWC, strict=False):
            (out / file).write_bytes(head + tile_HWC.tobytes())
        return len(self.files)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Gather the photos that the default model learns from.")
    parser.add_argument("out", type=Path, help="where to put them; must not exist yet, or be empty")
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"), help="has photos/ and things/")
    parser.add_argument("--sheets", type=Path, help="other sheets of things than those in SHARED/things")
    parser.add_argument("--photos-times", type=int, default=3, help="rows that each photo has in the CSV (default: 3)")
    parser.add_argument("--held-out", type=int, default=1000, help="photos to judge by (default: 1000)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    given = parser.parse_args(arguments)
    try:
        lines = gather(
            given.out,
            given.shared / "photos",
            given.sheets or given.shared / "things",
            given.workers,
            given.photos_times,
            given.held_out,
        )
    except PatchlightError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def gather(
    out: Path, photos: Path, sheets: Path, workers: int, photos_times: int = 1, held_out_count: int = 0
) -> list[str]:
    """Write the CSV and the files; lines that say what is there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PatchlightError(f"{out}: holds something already; give a folder that does not exist yet")
    part = out.with_name(out.name + ".part")
    if part.exists():
        raise PatchlightError(f"{part}: is left from a run that was stopped; remove it")
    if workers < 1 or photos_times < 1:
        raise PatchlightError(f"--workers {workers} and --photos-times {photos_times} must be at least 1")
    try:
        photo_rows, copies = plan_photos(photos)
        held_out = hold_out(photo_rows, held_out_count)
        thing_rows, cuts = plan_things(sheets)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise PatchlightError(f"{photos} or {sheets}: is not as shared/DATA.md says ({error!r})") from None
    rows = photo_rows + thing_rows
    try:
        part.mkdir(parents=True)
        (part / "photos").mkdir()
        (part / "things").mkdir()
        write_files(part, [*cuts, *copies], len(rows), workers)
        learnt = [row for row in photo_rows if row.file not in held_out]
        write_rows(part / "photos.csv", learnt * photos_times + thing_rows)
        write_rows(part / "held_out.csv", [row for row in photo_rows if row.file in held_out])
        os.replace(part, out)
    except (OSError, zipfile.BadZipFile) as error:
        raise PatchlightError(f"{out}: could not be written ({error})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)  # not there any more, if all went well
    counts, boxes = Counter(map(set_name, rows)), Counter(set_name(row) for row in rows if row.box)
    lines = [f"{name}: {count:,} photos, {boxes[name]:,} with a box" for name, count in sorted(counts.items())]
    each = f", {photos_times} rows for each photo" if photos_times > 1 else ""
    return [
        *lines,
        f"{len(learnt) + len(thing_rows):,} photos to learn from in {out / 'photos.csv'}{each}; {len(held_out):,} to "
        f"judge by in {out / 'held_out.csv'}",
    ]


def hold_out(rows: list[Row], count: int) -> set[str]:
    """The files of photos that are kept for judging, drawn as benchmarks/default_model.py draws them, by their ids."""
    files = sorted(row.file for row in rows)
    random.Random(0).shuffle(files)
    return set(files[:count])


def write_rows(path: Path, rows: list[Row]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("file", "label", "x0", "y0", "x1", "y1"))
        writer.writerows((row.file, row.label, *(row.box or ("",) * 4)) for row in rows)


def set_name(row: Row) -> str:
    return row.label.partition("/")[0]


def write_files(out: Path, tasks: list[CopyPhotos | CutSheet], count: int, workers: int) -> None:
    """Do all the tasks, with ten lines of progress."""
    # Started anew, not forked: whoever calls this may have threads.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        done, shown = 0, 0
        for written in pool.imap_unordered(partial(write, out=out), tasks):
            done += written
            if done * 10 // count > shown:
                shown = done * 10 // count
                sys.stderr.write(f"{done:,} of {count:,} photos\n")


def write(task: CopyPhotos | CutSheet, out: Path) -> int:
    return task.write(out)


def plan_photos(folder: Path) -> tuple[list[Row], list[CopyPhotos | CutSheet]]:
    """The photos in the order of their ids."""
    labels: dict[str, str] = json.loads((folder / "labels.json").read_text("utf-8"))
    boxes: dict[str, Corners] = json.loads((folder / "boxes.json").read_text("utf-8"))
    masks = np.load(folder / "masks.npz")
    mask_places = {f"{number:06}": place for place, number in enumerate(masks["ids"])}
    masks_N32x32 = np.unpackbits(masks["bits_32x32"], axis=1).reshape(-1, 32, 32)
    rows, tasks, missing = [], [], set(labels)
    for path in sorted(folder.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if Path(name).stem in missing)
            for name in names:
                key = Path(name).stem
                missing.remove(key)
                box: Corners | None = None
                if key in boxes:
                    x0, y0, x1, y1 = boxes[key]
                    box = whole_box(x0, y0, x1, y1)
                elif key in mask_places:
                    with archive.open(name) as file, Image.open(file) as image:
                        box = around(masks_N32x32[mask_places[key]], *image.size)
                kind, _, class_name = labels[key].partition("/")
                if kind == "imagenette":
                    class_name = IMAGENETTE[class_name]
                rows.append(Row(f"photos/{name}", f"{kind}/{class_name}", box))
        tasks += [CopyPhotos(path, names[start : start + CHUNK]) for start in range(0, len(names), CHUNK)]
    if missing:
        raise PatchlightError(f"{folder}: {len(missing)} photos of labels.json are in no zip file, as {min(missing)}")
    return sorted(rows), list(tasks)


def around(mask_HW: np.ndarray, width: int, height: int) -> Corners | None:
    """The box of what is 1 in a mask that covers a photo of this size."""
    across, down = np.flatnonzero(mask_HW.any(0)), np.flatnonzero(mask_HW.any(1))
    if not len(across):
        return None
    scale_x, scale_y = width / mask_HW.shape[1], height / mask_HW.shape[0]
    x0, x1 = across[0] * scale_x, (across[-1] + 1) * scale_x
    y0, y1 = down[0] * scale_y, (down[-1] + 1) * scale_y
    return float(x0), float(y0), float(x1), float(y1)


def plan_things(folder: Path) -> tuple[list[Row], list[CopyPhotos | CutSheet]]:
    """The tiles of the sheets, row by row."""
    things = np.load(folder / "things.npz")
    classes: list[str] = json.loads((folder / "classes.json").read_text("utf-8"))
    # Theirs is the name before the first comma; the other sets write theirs without spaces too.
    labels = [f"thing/{name.partition(',')[0].strip().replace(' ', '_')}" for name in classes]
    if len(set(labels)) < len(labels):
        raise PatchlightError(f"{folder / 'classes.json'}: two classes have the same first name")
    rows = []
    for place, (label, (x0, y0, x1, y1)) in enumerate(zip(things["label"], things["box"].tolist(), strict=True)):
        # One pixel wide or high is a slip of whoever drew it, in a photo of 64.
        box = whole_box(x0, y0, x1 + 1, y1 + 1) if x1 > x0 and y1 > y0 else None
        rows.append(Row(f"things/{place:06}.ppm", labels[label], box))
    sheets = sorted(folder.glob("*.webp"))
    if len(sheets) != math.ceil(len(rows) / TILES):
        raise PatchlightError(f"{folder}: {len(sheets)} sheets cannot hold {len(rows):,} things, {TILES} each")
    files = [row.file for row in rows]
    return rows, [CutSheet(sheet, files[i * TILES : (i + 1) * TILES]) for i, sheet in enumerate(sheets)]


def whole_box(x0: float, y0: float, x1: float, y1: float) -> Corners | None:
    return (x0, y0, x1, y1) if 0 <= x0 < x1 and 0 <= y0 < y1 else None


if __name__ == "__main__":
    sys.exit(main())
