"""Choose photos of COCO whose main object is clear, and pack them with the boxes of all objects, small enough to copy.

    python recipes/pack_coco.py PHOTOS BOXES OUT [--count 24000] [--side 128] [--judges ../shared/data]

PHOTOS is a clone of hai4h/cnn-edge-detection (the 118,287 photos of train2017, each squeezed to 256 x 256 pixels),
BOXES one of giangnn-bkace/CocoToPascal (their boxes and true sizes, a VOC-style XML file each; its ten kinds of animals
are one, `animal`). Both are read by git, from their last commit; no work tree is needed. OUT gets coco-00.zip, ...
(less than 55 MB each; <id>.webp, as wide to high as they were, the short side --side pixels) and boxes.json, by id:
`boxes` in pixels of the stored photo, the largest first, and `labels`. gather_default_photos.py --coco OUT reads it.
Packed once: 22,374 photos, 92,019 boxes, 105 MB, in 4 minutes; 1,626 left out.

Taken are photos of at most twelve objects, the largest of them at least 3 % of the photo and half as large again as any
object of another kind. A share goes to people, to vehicles, to animals and to all else (SHARES), within each equally
to every kind, and of a kind in the order of a hash of the id. Photos that look like one of the judges' (../shared/data:
voc07, localize and demo), or like one of its subjects, which are trained on already, are left out.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchlight.errors import PatchlightError

MOST_OBJECTS = 12
LEAST_SHARE = 0.03
CLEARLY = 1.5  # times as large as any object of another kind
SHARES = {"person": 0.24, "vehicle": 0.26, "animal": 0.3, "else": 0.2}
VEHICLES = ("bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat")
CLUTTERED = ("dining table",)  # its box is the whole photo, and what is on the table is what the photo shows
ZIP_BYTES = 55e6
CHUNK = 100  # photos that one process reads and packs at a time
HASH_SIDE = 16
ALIKE = 40  # of 256 bits; photos that have nothing to do with each other differ in about 128


class Photo(NamedTuple):
    id: str
    size: tuple[int, int]  # its true width and height
    boxes: list[list[float]]  # x0, y0, x1, y1, in pixels of that size, the largest first
    labels: list[str]

    def share(self, index: int) -> float:
        x0, y0, x1, y1 = self.boxes[index]
        return (x1 - x0) * (y1 - y0) / (self.size[0] * self.size[1])


class Packed(NamedTuple):
    id: str
    content: bytes
    size: tuple[int, int]
    look: np.ndarray  # see `look_of`


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pack photos of COCO, with boxes.")
    parser.add_argument("photos", type=Path, help="clone of hai4h/cnn-edge-detection")
    parser.add_argument("boxes", type=Path, help="clone of giangnn-bkace/CocoToPascal")
    parser.add_argument("out", type=Path, help="where to put them; must not exist yet, or be empty")
    parser.add_argument("--count", type=int, default=24_000, help="photos to take (default: 24000)")
    parser.add_argument("--side", type=int, default=128, help="short side in pixels (default: 128)")
    parser.add_argument("--quality", type=int, default=75, help="of WebP (default: 75)")
    parser.add_argument("--judges", type=Path, default=Path("../shared/data"), help="photos that none may look like")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    given = parser.parse_args(arguments)
    try:
        lines = pack(
            given.photos, given.boxes, given.out, given.judges, given.count, given.side, given.quality, given.workers
        )
    except PatchlightError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def pack(
    photos: Path, boxes: Path, out: Path, judges: Path, count: int, side: int, quality: int, workers: int
) -> list[str]:
    """Write the zip files and boxes.json; lines that say what is there."""
    part = out.with_name(out.name + ".part")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PatchlightError(f"{out}: holds something already; give a folder that does not exist yet")
    if part.exists():
        raise PatchlightError(f"{part}: is left from a run that was stopped; remove it")
    known = [photo for photo in map(read_xml, *zip(*read_blobs(boxes, "train2017", None), strict=True)) if photo]
    chosen = choose([photo for photo in known if is_clear(photo)], count)
    tasks = [[photo.id for photo in chosen[start : start + CHUNK]] for start in range(0, len(chosen), CHUNK)]
    sizes = {photo.id: photo.size for photo in chosen}
    by_id = {photo.id: photo for photo in chosen}
    rows: dict[str, dict[str, object]] = {}
    alike = 0
    part.mkdir(parents=True)
    try:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            judged = np.concatenate(list(pool.imap_unordered(looks_of, judge_tasks(judges))))
            with Zips(part) as zips:
                work = partial(encode, repository=photos, sizes=sizes, side=side, quality=quality)
                for done, packed in enumerate(pool.imap(work, tasks)):
                    # Of signs, the dot product is the bits that agree less those that differ.
                    agreed_PJ = np.stack([each.look for each in packed]) @ judged.T
                    for each, agreed in zip(packed, agreed_PJ.max(1), strict=True):
                        if agreed >= HASH_SIDE**2 - 2 * ALIKE:
                            alike += 1
                            continue
                        zips.add(f"{each.id}.webp", each.content)
                        photo = by_id[each.id]
                        scale = np.array(each.size * 2) / np.array(photo.size * 2)
                        stored = [[round(float(value), 1) for value in box * scale] for box in np.array(photo.boxes)]
                        rows[each.id] = {"boxes": stored, "labels": photo.labels}
                    if done % 20 == 0:
                        sys.stderr.write(f"{len(rows):,} of {len(chosen):,} photos, {zips.total / 1e6:.0f} MB\n")
        (part / "boxes.json").write_text(json.dumps(rows, separators=(",", ":")), "utf-8")
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    kinds = Counter(kind_of(by_id[key].labels[0]) for key in rows)
    return [
        *(f"{kind}: {kinds[kind]:,} photos" for kind in SHARES),
        f"{len(rows):,} photos in {out}, {zips.total / 1e6:.1f} MB, {sum(len(by_id[k].boxes) for k in rows):,} boxes; "
        f"{alike} left out that look like a judge's",
    ]


class Zips:
    """Stored zip files, a new one before ZIP_BYTES are reached."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.total, self.number, self.size = folder, 0, -1, 0
        self.file: zipfile.ZipFile | None = None

    def __enter__(self) -> "Zips":
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, name: str, content: bytes) -> None:
        room = len(content) + 2 * len(name) + 150  # its entries, too
        if self.file is None or self.size + room > ZIP_BYTES:
            self.__exit__()
            self.number, self.size = self.number + 1, 0
            self.file = zipfile.ZipFile(self.folder / f"coco-{self.number:02}.zip", "w", zipfile.ZIP_STORED)
        # One date for all, so that the same photos are the same bytes.
        self.file.writestr(zipfile.ZipInfo(name), content)
        self.size += room
        self.total += room


# Choosing


def read_xml(name: str, content: bytes) -> Photo | None:
    """None where it has no objects."""
    text = content.decode("utf-8")
    number = r"([\d.eE+-]+)"
    size = re.search(rf"<width>{number}</width>\s*<height>{number}</height>", text)
    found = re.findall(
        rf"<name>([^<]+)</name>.*?<xmin>{number}</xmin>\s*<ymin>{number}</ymin>\s*<xmax>{number}</xmax>\s*"
        rf"<ymax>{number}</ymax>",
        text,
        re.DOTALL,
    )
    if size is None:
        raise PatchlightError(f"{name}: has no width and height; give a clone of giangnn-bkace/CocoToPascal")
    boxes = [(label, [float(value) for value in corners]) for label, *corners in found]
    boxes = [(label, box) for label, box in boxes if box[0] < box[2] and box[1] < box[3]]
    if not boxes:
        return None
    boxes.sort(key=lambda pair: (pair[1][0] - pair[1][2]) * (pair[1][3] - pair[1][1]))
    return Photo(
        Path(name).stem,
        (int(size[1]), int(size[2])),
        [box for _, box in boxes],
        [label for label, _ in boxes],
    )


def is_clear(photo: Photo) -> bool:
    """Whether one object is what the photo shows, and few others are there."""
    others = [index for index, label in enumerate(photo.labels) if label != photo.labels[0]]
    return (
        len(photo.boxes) <= MOST_OBJECTS
        and photo.labels[0] not in CLUTTERED
        and photo.share(0) >= LEAST_SHARE
        and (not others or photo.share(0) >= CLEARLY * photo.share(others[0]))
    )


def kind_of(label: str) -> str:
    if label in VEHICLES:
        return "vehicle"
    return label if label in SHARES else "else"


def choose(photos: list[Photo], count: int) -> list[Photo]:
    """So many, by SHARES; within a kind as many of each label, as far as they go, in the order of a hash of the id."""
    of_kind: dict[str, dict[str, list[Photo]]] = defaultdict(lambda: defaultdict(list))
    for photo in sorted(photos, key=lambda photo: hashlib.sha256(photo.id.encode()).digest()):
        of_kind[kind_of(photo.labels[0])][photo.labels[0]].append(photo)
    chosen = []
    for kind, share in SHARES.items():
        left, wanted = sorted(of_kind[kind].values(), key=len), round(share * count)
        while left:
            own = left.pop(0)
            taken = own[: wanted // (len(left) + 1)]
            chosen += taken
            wanted -= len(taken)
    # Mixed, so that each zip file has some of everything.
    return sorted(chosen, key=lambda photo: hashlib.sha256(photo.id.encode()).digest())


# Reading and writing photos


def read_blobs(repository: Path, folder: str, stems: set[str] | None) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files of a folder in the last commit, all or those of these names."""

    def git(*arguments: str, given: str = "") -> bytes:
        done = subprocess.run(["git", "-C", str(repository), *arguments], input=given.encode(), capture_output=True)
        if done.returncode:
            raise PatchlightError(f"{repository}: git cannot read it ({done.stderr.decode()[:200].strip()})")
        return done.stdout

    entries = [line.split(None, 3) for line in git("ls-tree", f"HEAD:{folder}").decode().splitlines()]
    wanted = [(name, key) for _, _, key, name in entries if stems is None or Path(name).stem in stems]
    stream = io.BytesIO(git("cat-file", "--batch", given="".join(f"{key}\n" for _, key in wanted)))
    for name, key in wanted:
        head = stream.readline().split()
        if len(head) != 3:
            raise PatchlightError(f"{repository}: lacks the content of {folder}/{name} ({key}); clone it in full")
        yield name, stream.read(int(head[2]) + 1)[:-1]


def encode(
    ids: list[str], repository: Path, sizes: dict[str, tuple[int, int]], side: int, quality: int
) -> list[Packed]:
    """These photos, as wide to high as they once were, as WebP files."""
    packed = []
    for name, content in read_blobs(repository, "train2017", set(ids)):
        with Image.open(io.BytesIO(content)) as image:
            squeezed = image.convert("RGB")
        width, height = sizes[Path(name).stem]
        scale = side / min(width, height)
        size = (round(width * scale), round(height * scale))
        file = io.BytesIO()
        squeezed.resize(size, Image.Resampling.LANCZOS).save(file, "WEBP", quality=quality, method=4)
        packed.append(Packed(Path(name).stem, file.getvalue(), size, look_of(squeezed)))
    return packed


def look_of(photo: Image.Image) -> np.ndarray:
    """For each of 16 x 16 places 1 where it is brighter than to the right of it, else -1."""
    grey = np.asarray(photo.convert("L").resize((HASH_SIDE + 1, HASH_SIDE), Image.Resampling.BOX))
    return np.where(grey[:, :-1] > grey[:, 1:], np.float32(1), np.float32(-1)).ravel()


def judge_tasks(folder: Path) -> list[tuple[Path, list[str]]]:
    """Zip files with some of their members, and photos that are files."""
    tasks: list[tuple[Path, list[str]]] = []
    for path in sorted([*folder.glob("voc07/*.zip"), *folder.glob("subjects/*.zip")]):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        tasks += [(path, names[start : start + 1_000]) for start in range(0, len(names), 1_000)]
    files = [path for name in ("localize", "demo") for path in sorted((folder / name).glob("*"))]
    pictures = [path for path in files if path.suffix in (".jpg", ".png", ".webp")]
    if not tasks or not pictures:
        raise PatchlightError(f"{folder}: has no voc07, subjects, localize and demo to compare with; give --judges")
    return tasks + [(path, []) for path in pictures]


def looks_of(task: tuple[Path, list[str]]) -> np.ndarray:
    path, names = task
    if not names:
        with Image.open(path) as image:
            return look_of(image)[None]
    looks = []
    with zipfile.ZipFile(path) as archive:
        for name in names:
            with archive.open(name) as file, Image.open(file) as image:
                looks.append(look_of(image))
    return np.stack(looks)


if __name__ == "__main__":
    sys.exit(main())
