"""Gather the photos that the default model learns from: one CSV with labels, boxes and masks, and a file a photo.

    python recipes/gather_default_photos.py OUT [--shared ../shared/data] [--coco FOLDER] [--sheets FOLDER]

OUT gets photos.csv to train on and held_out.csv to judge by, and the files that they name:

    photos/    the WebP files of SHARED/photos, as they are in its zip files
    subjects/  those of SHARED/subjects, a folder a set (subjects/duts_tr/000000.webp)
    coco/      those of --coco, if it is given (see pack_coco.py)
    things/    the tiles of the sheets of SHARED/things, or of --sheets (see pack_tiny_imagenet.py)
    masks/     for pets, salient and camouflaged subjects: where the subject is, grey, stretched over the photo

The columns are file, label, boxes and mask. `label` is empty where a photo has no name. `boxes` is a JSON list of
[x0, y0, x1, y1], x1 and y1 exclusive, in pixels of the photo, of all its objects, the main one first; [] where it is
known to show nothing, empty where that is not known. `mask` is empty where there is none.

Labels are `set/class`, and for subjects and COCO `object/name`, of the main object where that is clearly the main one.
A name that photos or things have already is theirs (`thing/banana`, `catdog/cat`), so that no two classes are one.
Photos of SHARED/photos and subjects have three rows each and COCO's two, so that they are learnt from as often beside
the things, which are small. unlabelled.csv has the photos of which nothing is known, in no row of the others.

Held out are the 1,000 photos of SHARED/photos that benchmarks/default_model.py asks about, a tenth of each set of
subjects and a tenth of the empty scenes, by a hash of the id. OUT appears whole, or not at all.
"""

import argparse
import csv
import hashlib
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import zipfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

OTHER_NAMES = {
    "aeroplane": "airplane",
    "diningtable": "dining_table",
    "keyboard": "computer_keyboard",
    "motorbike": "motorcycle",
    "mouse": "computer_mouse",
    "pottedplant": "potted_plant",
    "remote": "remote_control",
    "sofa": "couch",
    "teddy_bear": "teddy",
    "tvmonitor": "tv",
}
"""Objects that PASCAL VOC calls otherwise than COCO, or COCO otherwise than the things."""

NO_NAME = "salient"
"""The label in SHARED/subjects of a subject that nobody named."""

CLEARLY = 1.5
"""The main object names the photo if it is so many times as large as any other of another name ..."""

LEAST_SHARE = 0.04
"""... and takes so much of the photo."""

PIECE, SPECK, APART = 0.25, 0.05, 3.0
"""A piece of a mask is an object of its own if it is not much smaller than the largest, or stands apart from it."""

EMPTY_SCENES = ("forest", "glacier", "mountain", "sea")
"""Kinds of SHARED/photos' scenes that show nothing in particular. Buildings and streets are full of things."""

# Looked at one by one: what these scenes show is a person, a bird, a boat, a lone rock or the like. (Of `wild/other`
# 720 were looked at: nearly all have a fox, a turkey, tracks or the like, if small. They are not empty.)
OCCUPIED = frozenset(
    (
        707, 715, 1492, 2309, 2350, 3551, 3956, 3989, 5402, 6263, 6498, 7494, 7552, 7649, 7756, 8660, 8767, 9524, 10111,
        10212, 10765, 11231, 12110, 12150, 12203, 12779, 12854, 12892, 14327, 14401, 14958, 15586, 15823, 16024, 17640,
        17887, 18887, 19470, 20089, 20269, 20860, 20890, 21626, 22909, 23712, 25029, 25211, 25430, 25446,
    )
)  # fmt: skip

Corners = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels, x1 and y1 exclusive


class Row(NamedTuple):
    file: str
    label: str
    boxes: tuple[Corners, ...] | None
    """The main one first; none where the photo shows nothing, None where that is not known."""
    mask: str = ""

    @property
    def known(self) -> bool:
        return bool(self.label or self.mask) or self.boxes is not None


class CopyPhotos(NamedTuple):
    """Files of a zip file, copied out as they are."""

    archive: Path
    names: list[str]
    files: list[str]

    def write(self, out: Path) -> int:
        with zipfile.ZipFile(self.archive) as archive:
            for name, file in zip(self.names, self.files, strict=True):
                (out / file).write_bytes(archive.read(name))
        return len(self.names)


class WriteMasks(NamedTuple):
    """Masks of a file of bits, each into a file of its own."""

    source: Path
    bits: str
    places: list[int]
    files: list[str]

    def write(self, out: Path) -> int:
        masks = np.load(self.source)[self.bits][self.places]
        side = math.isqrt(masks.shape[1] * 8)
        for file, mask in zip(self.files, masks, strict=True):
            Image.fromarray(np.unpackbits(mask).reshape(side, side) * np.uint8(255)).save(out / file)
        return len(self.files)


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


Task = CopyPhotos | CutSheet | WriteMasks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Gather the photos that the default model learns from.")
    parser.add_argument("out", type=Path, help="where to put them; must not exist yet, or be empty")
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"), help="has photos/, things/, subjects/")
    parser.add_argument("--sheets", type=Path, help="other sheets of things than those in SHARED/things")
    parser.add_argument("--coco", type=Path, help="further photos, packed by pack_coco.py")
    parser.add_argument("--photos-times", type=int, default=3, help="rows that each photo has in the CSV (default: 3)")
    parser.add_argument("--subjects-times", type=int, default=3, help="and each photo of a subject (default: 3)")
    parser.add_argument("--coco-times", type=int, default=2, help="and each of COCO's (default: 2)")
    parser.add_argument("--held-out", type=int, default=1000, help="photos to judge by (default: 1000)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    given = parser.parse_args(arguments)
    try:
        lines = gather(
            given.out,
            given.shared,
            given.sheets or given.shared / "things",
            given.coco,
            workers=given.workers,
            photos_times=given.photos_times,
            subjects_times=given.subjects_times,
            coco_times=given.coco_times,
            held_out_count=given.held_out,
        )
    except PatchlightError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def gather(
    out: Path,
    shared: Path,
    sheets: Path,
    coco: Path | None = None,
    *,
    workers: int,
    photos_times: int = 1,
    subjects_times: int = 1,
    coco_times: int = 1,
    held_out_count: int = 0,
) -> list[str]:
    """Write the CSVs and the files; lines that say what is there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PatchlightError(f"{out}: holds something already; give a folder that does not exist yet")
    part = out.with_name(out.name + ".part")
    if part.exists():
        raise PatchlightError(f"{part}: is left from a run that was stopped; remove it")
    if min(workers, photos_times, subjects_times, coco_times) < 1:
        raise PatchlightError("--workers and the --...-times must be at least 1")
    try:
        photo_rows, tasks = plan_photos(shared / "photos")
        held_out = hold_out(photo_rows, held_out_count) | {row.file for row in photo_rows if is_held_out_scene(row)}
        subject_rows, more = plan_subjects(shared / "subjects", "subjects")
        held_out |= {row.file for row in subject_rows if in_tenth(row.file)}
        coco_rows, still_more = plan_subjects(coco, "coco") if coco else ([], [])
        thing_rows, cuts = plan_things(sheets)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise PatchlightError(f"{shared}, {sheets} or {coco}: is not as shared/DATA.md says ({error!r})") from None
    known = {row.label.partition("/")[2]: row.label for row in photo_rows + thing_rows if row.label}
    subject_rows, coco_rows = (
        [row._replace(label=known.get(row.label.partition("/")[2], row.label)) for row in own]
        for own in (subject_rows, coco_rows)
    )
    rows = photo_rows + subject_rows + coco_rows + thing_rows
    times = [photos_times] * len(photo_rows) + [subjects_times] * len(subject_rows)
    times += [coco_times] * len(coco_rows) + [1] * len(thing_rows)
    learnt = {row: count for row, count in zip(rows, times, strict=True) if row.known and row.file not in held_out}
    names = {row.label for row in learnt}
    # A name that is not learnt cannot be judged.
    judged = [
        row if row.label in names else row._replace(label="") for row in rows if row.known and row.file in held_out
    ]
    unknown = [row for row in rows if not row.known and row.file not in held_out]
    try:
        for folder in sorted({str(Path(file).parent) for row in rows for file in (row.file, row.mask) if file}):
            (part / folder).mkdir(parents=True)
        # The sheets take longest.
        write_files(part, [*cuts, *tasks, *more, *still_more], len(rows) + sum(bool(row.mask) for row in rows), workers)
        write_rows(part / "photos.csv", [row for row, count in learnt.items() for _ in range(count)])
        write_rows(part / "held_out.csv", judged)
        write_rows(part / "unlabelled.csv", unknown)
        os.replace(part, out)
    except (OSError, zipfile.BadZipFile) as error:
        raise PatchlightError(f"{out}: could not be written ({error})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)  # not there any more, if all went well
    return [
        *counts(rows, held_out),
        f"{len(learnt):,} photos to learn from in {out / 'photos.csv'}, in {sum(learnt.values()):,} rows; "
        f"{len(judged):,} to judge by in {out / 'held_out.csv'}; {len(unknown):,} of which nothing is known in "
        f"{out / 'unlabelled.csv'}",
    ]


def counts(rows: list[Row], held_out: set[str]) -> list[str]:
    """A line for each set of photos."""
    of_set: dict[str, list[Row]] = {}
    for row in rows:
        of_set.setdefault(set_name(row), []).append(row)
    lines = []
    for name, own in sorted(of_set.items()):
        boxed, empty = sum(bool(row.boxes) for row in own), sum(row.boxes == () for row in own)
        masks, named = sum(bool(row.mask) for row in own), sum(bool(row.label) for row in own)
        several = sum(len(row.boxes or ()) > 1 for row in own)
        lines.append(
            f"{name}: {len(own):,} photos, {named:,} named, {boxed:,} with boxes ({several:,} with several), {masks:,} "
            f"with a mask, {empty:,} empty, {sum(row.file in held_out for row in own):,} held out"
        )
    return lines


def hold_out(rows: list[Row], count: int) -> set[str]:
    """The files of photos that are kept for judging, drawn as benchmarks/default_model.py draws them, by their ids."""
    files = sorted(row.file for row in rows)
    random.Random(0).shuffle(files)
    return set(files[:count])


def in_tenth(file: str) -> bool:
    """Whether a photo is of the tenth that is kept for judging, by its id."""
    return hashlib.sha256(Path(file).stem.encode()).digest()[0] * 10 < 256


def is_held_out_scene(row: Row) -> bool:
    return row.boxes == () and in_tenth(row.file)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("file", "label", "boxes", "mask"))
        writer.writerows((row.file, row.label, boxes_cell(row.boxes), row.mask) for row in rows)


def boxes_cell(boxes: tuple[Corners, ...] | None) -> str:
    return "" if boxes is None else json.dumps([[round(value, 1) for value in box] for box in boxes])


def set_name(row: Row) -> str:
    """Of a photo of SHARED/photos and of a thing its label's, else its folder's."""
    folder = str(Path(row.file).parent)
    if folder == "things":
        return "thing"
    return row.label.partition("/")[0] or "wild" if folder == "photos" else folder


def write_files(out: Path, tasks: list[Task], count: int, workers: int) -> None:
    """Do all the tasks, with ten lines of progress."""
    # Started anew, not forked: whoever calls this may have threads.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        done, shown = 0, 0
        for written in pool.imap_unordered(partial(write, out=out), tasks):
            done += written
            if done * 10 // count > shown:
                shown = done * 10 // count
                sys.stderr.write(f"{done:,} of {count:,} files\n")


def write(task: Task, out: Path) -> int:
    return task.write(out)


def plan_photos(folder: Path) -> tuple[list[Row], list[Task]]:
    """The photos in the order of their ids."""
    labels: dict[str, str] = json.loads((folder / "labels.json").read_text("utf-8"))
    boxes: dict[str, Corners] = json.loads((folder / "boxes.json").read_text("utf-8"))
    masks = np.load(folder / "masks.npz")
    mask_places = {f"{number:06}": place for place, number in enumerate(masks["ids"])}
    masks_N32x32 = np.unpackbits(masks["bits_32x32"], axis=1).reshape(-1, 32, 32)
    members = find_members(folder, labels)
    sizes = sizes_of(members, mask_places.keys() - boxes.keys())
    rows = []
    for key, (_, name) in sorted(members.items()):
        own: tuple[Corners, ...] | None = None
        kind, _, class_name = labels[key].partition("/")
        if key in boxes:
            own = whole_boxes([boxes[key]])
        elif key in mask_places:
            own = whole_boxes([around(masks_N32x32[mask_places[key]], *sizes[key])])
        elif kind == "scene" and class_name in EMPTY_SCENES and int(key) not in OCCUPIED:
            own = ()
        if kind == "imagenette":
            class_name = IMAGENETTE[class_name]
        label = "" if labels[key] == "wild/other" else f"{kind}/{class_name}"
        rows.append(Row(f"photos/{name}", label, own, f"masks/photos/{key}.png" if key in mask_places else ""))
    tasks = plan_copies(members, {key: f"photos/{name}" for key, (_, name) in members.items()})
    return rows, tasks + plan_masks(folder / "masks.npz", "bits_32x32", mask_places, rows)


def around(mask_HW: np.ndarray, width: int, height: int) -> Corners | None:
    """The box of what is 1 in a mask that covers a photo of this size."""
    across, down = np.flatnonzero(mask_HW.any(0)), np.flatnonzero(mask_HW.any(1))
    if not len(across):
        return None
    scale_x, scale_y = width / mask_HW.shape[1], height / mask_HW.shape[0]
    x0, x1 = across[0] * scale_x, (across[-1] + 1) * scale_x
    y0, y1 = down[0] * scale_y, (down[-1] + 1) * scale_y
    return float(x0), float(y0), float(x1), float(y1)


def plan_subjects(folder: Path, name: str) -> tuple[list[Row], list[Task]]:
    """The photos of boxes.json in the order of their ids, which go into the folder `name`."""
    found: dict[str, dict[str, Any]] = json.loads((folder / "boxes.json").read_text("utf-8"))
    members = find_members(folder, found)
    sizes = sizes_of(members, found)
    mask_places: dict[str, int] = {}
    if (folder / "masks.npz").exists():
        mask_places = {f"{int(number):06}": place for place, number in enumerate(np.load(folder / "masks.npz")["ids"])}
    rows = []
    for key, (_, member) in sorted(members.items()):
        photo = found[key]
        group = f"{name}/{photo['set']}" if "set" in photo else name
        objects = whole_boxes(pieces(photo["components"]) if "components" in photo else photo["boxes"])
        mask = f"masks/{group}/{key}.png" if key in mask_places else ""
        rows.append(Row(f"{group}/{member}", main_name(photo, *sizes[key]), objects, mask))
    tasks = plan_copies(members, {Path(row.file).stem: row.file for row in rows})
    return rows, tasks + plan_masks(folder / "masks.npz", "bits_48x48", mask_places, rows)


def main_name(photo: dict[str, Any], width: int, height: int) -> str:
    """`object/name` of the largest object, where it is clearly the main one; else empty."""
    named = sorted(zip(map(size_of, photo["boxes"]), photo["labels"], strict=True), reverse=True)
    if not named or NO_NAME in photo["labels"]:
        return ""
    area, label = named[0]
    if area < LEAST_SHARE * width * height or any(area < CLEARLY * other for other, name in named if name != label):
        return ""
    name = label.replace(" ", "_")
    return f"object/{OTHER_NAMES.get(name, name)}"


def pieces(components: list[list[float]]) -> list[list[float]]:
    """The objects that the pieces of a mask are, the largest first: a small piece beside a larger one is its foot."""
    ordered = sorted(components, key=lambda box: (box[0] - box[2]) * (box[3] - box[1]))
    largest = size_of(ordered[0])
    objects: list[list[float]] = []
    for piece in ordered:
        near = next((each for each in objects if gap(each, piece) < APART), None)
        if near is not None and size_of(piece) < PIECE * largest:
            near[:] = [*map(min, near[:2], piece[:2]), *map(max, near[2:], piece[2:])]
        elif size_of(piece) >= SPECK * largest:
            objects.append(list(piece))
    return sorted(objects, key=size_of, reverse=True)


def size_of(box: list[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def gap(one: list[float], other: list[float]) -> float:
    """Pixels between two boxes, across or down; 0 or less where they touch."""
    return max(one[0] - other[2], other[0] - one[2], one[1] - other[3], other[1] - one[3])


def find_members(folder: Path, wanted: Iterable[str]) -> dict[str, tuple[Path, str]]:
    """Where the photo of each id is: its zip file, and its name in there."""
    missing = set(wanted)
    members: dict[str, tuple[Path, str]] = {}
    for path in sorted(folder.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if Path(name).stem in missing]
        members |= {Path(name).stem: (path, name) for name in sorted(names)}
        missing -= members.keys()
    if missing:
        raise PatchlightError(f"{folder}: {len(missing)} photos are in no zip file, as {min(missing)}")
    return members


def sizes_of(members: dict[str, tuple[Path, str]], keys: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Width and height of the photos of these ids."""
    of_archive: dict[Path, list[str]] = {}
    for key in keys:
        of_archive.setdefault(members[key][0], []).append(key)
    sizes = {}
    for path, own in of_archive.items():
        with zipfile.ZipFile(path) as archive:
            for key in own:
                with archive.open(members[key][1]) as file, Image.open(file) as image:
                    sizes[key] = image.size
    return sizes


def plan_copies(members: dict[str, tuple[Path, str]], files: dict[str, str]) -> list[Task]:
    of_archive: dict[Path, list[str]] = {}
    for key, (path, _) in members.items():
        of_archive.setdefault(path, []).append(key)
    tasks: list[Task] = []
    for path, keys in of_archive.items():
        for start in range(0, len(keys), CHUNK):
            part = keys[start : start + CHUNK]
            tasks.append(CopyPhotos(path, [members[key][1] for key in part], [files[key] for key in part]))
    return tasks


def plan_masks(source: Path, bits: str, places: dict[str, int], rows: list[Row]) -> list[Task]:
    files = {places[Path(row.mask).stem]: row.mask for row in rows if row.mask}
    order = sorted(files)
    parts = [order[start : start + CHUNK] for start in range(0, len(order), CHUNK)]
    return [WriteMasks(source, bits, part, [files[place] for place in part]) for part in parts]


def plan_things(folder: Path) -> tuple[list[Row], list[Task]]:
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
        boxes = whole_boxes([(x0, y0, x1 + 1, y1 + 1)]) if x1 > x0 and y1 > y0 else None
        rows.append(Row(f"things/{place:06}.ppm", labels[label], boxes))
    sheets = sorted(folder.glob("*.webp"))
    if len(sheets) != math.ceil(len(rows) / TILES):
        raise PatchlightError(f"{folder}: {len(sheets)} sheets cannot hold {len(rows):,} things, {TILES} each")
    files = [row.file for row in rows]
    return rows, [CutSheet(sheet, files[i * TILES : (i + 1) * TILES]) for i, sheet in enumerate(sheets)]


def whole_boxes(boxes: Sequence[Sequence[float] | None]) -> tuple[Corners, ...] | None:
    """Those that have an inside; None if none has."""
    good = [(x0, y0, x1, y1) for x0, y0, x1, y1 in filter(None, boxes) if 0 <= x0 < x1 and 0 <= y0 < y1]
    return tuple(good) or None


if __name__ == "__main__":
    sys.exit(main())
