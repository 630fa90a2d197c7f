"""Pack the training photos of Tiny-ImageNet-200, each with its object's box, into a few sheets that are fast to copy.

    python recipes/pack_tiny_imagenet.py TINY_IMAGENET_FOLDER OUT

The folder is the unpacked tiny-imagenet-200: train/<wnid>/images/*.JPEG, train/<wnid>/<wnid>_boxes.txt and words.txt.
OUT gets sheets of 40 x 40 tiles of 64 x 64 pixels, row by row (things-00.webp, ...), in the best quality at which they
take at most --megabytes together; things.npz (`label`, `box` as x0, y0, x1, y1 inclusive, in the tile's pixels); and
classes.json, in the order of the wnids. Photos whose box is not at least two pixels wide and high are left out.
gather_default_photos.py --sheets OUT reads it.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import multiprocessing.pool
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchlight.errors import PatchlightError

TILE, ACROSS = 64, 40
TILES = ACROSS * ACROSS
SAMPLED = 4  # sheets that the quality is chosen by


class Photo(NamedTuple):
    path: str
    label: int
    box: tuple[int, int, int, int]  # x0, y0, x1, y1, inclusive


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pack Tiny-ImageNet's training photos and boxes into sheets.")
    parser.add_argument("folder", type=Path, help="the unpacked tiny-imagenet-200")
    parser.add_argument("out", type=Path, help="where to put the sheets; must not exist yet, or be empty")
    parser.add_argument("--megabytes", type=float, default=75.0, help="that the sheets take at most (default 75)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    given = parser.parse_args(arguments)
    try:
        line = pack(given.folder, given.out, given.megabytes, given.workers)
    except PatchlightError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{line}\n")
    return 0


def pack(folder: Path, out: Path, megabytes: float, workers: int) -> str:
    """Write the sheets; a line that says what is there."""
    part = out.with_name(out.name + ".part")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PatchlightError(f"{out}: holds something already; give a folder that does not exist yet")
    if part.exists():
        raise PatchlightError(f"{part}: is left from a run that was stopped; remove it")
    classes, photos, left_out = find(folder)
    sheets = [photos[start : start + TILES] for start in range(0, len(photos), TILES)]
    part.mkdir(parents=True)
    try:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            sampled = sheets[:: max(1, len(sheets) // SAMPLED)]
            share = sum(map(len, sampled)) / len(photos)
            quality = best_quality(sampled, megabytes * 1e6 * share, pool)
            while True:
                total = 0
                for number, sheet in enumerate(pool.imap(partial(encode, quality=quality), sheets)):
                    (part / f"things-{number:02}.webp").write_bytes(sheet)
                    total += len(sheet)
                if total <= megabytes * 1e6:
                    break
                if quality == 0:
                    raise PatchlightError(f"--megabytes {megabytes:g} is too little for {len(photos):,} photos")
                quality -= 1  # the sampled sheets were smaller than the rest
        labels_N = np.array([photo.label for photo in photos], np.int16)
        boxes_N4 = np.array([photo.box for photo in photos], np.int16)
        np.savez_compressed(part / "things.npz", label=labels_N, box=boxes_N4)
        (part / "classes.json").write_text(json.dumps(classes), "utf-8")
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return (
        f"{len(photos):,} photos of {len(classes)} classes in {len(sheets)} sheets, {total / 1e6:.1f} MB at WebP "
        f"quality {quality}, {left_out} left out for their boxes, in {out}"
    )


def find(folder: Path) -> tuple[list[str], list[Photo], int]:
    """Names of the classes, in the order of the wnids; the photos, shuffled; and how many are left out."""
    train = folder / "train"
    if not train.is_dir():
        raise PatchlightError(f"{folder}: has no train/; give the unpacked tiny-imagenet-200")
    wnids = sorted(entry.name for entry in train.iterdir() if entry.is_dir())
    words = dict(line.split("\t", 1) for line in lines_of(folder / "words.txt") if "\t" in line)
    unnamed = [wnid for wnid in wnids if wnid not in words]
    if unnamed:
        raise PatchlightError(
            f"{folder / 'words.txt'}: does not name {unnamed[0]}; give the unpacked tiny-imagenet-200"
        )
    photos, left_out = [], 0
    for label, wnid in enumerate(wnids):
        for line in lines_of(train / wnid / f"{wnid}_boxes.txt"):
            name, *numbers = line.split()
            x0, y0, x1, y1 = map(int, numbers)
            if 0 <= x0 < x1 < TILE and 0 <= y0 < y1 < TILE:
                photos.append(Photo(str(train / wnid / "images" / name), label, (x0, y0, x1, y1)))
            else:
                left_out += 1
    if not photos:
        raise PatchlightError(f"{train}: holds no photos with boxes; give the unpacked tiny-imagenet-200")
    # By a hash of its name a photo lands in the same tile wherever this runs, and every sheet has all classes.
    photos.sort(key=lambda photo: hashlib.sha256(os.path.basename(photo.path).encode()).digest())
    return [words[wnid] for wnid in wnids], photos, left_out


def lines_of(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError as error:
        raise PatchlightError(f"{path}: {error.strerror}; give the unpacked tiny-imagenet-200") from None


def best_quality(sheets: list[list[Photo]], most_bytes: float, pool: multiprocessing.pool.Pool) -> int:
    """The highest WebP quality at which these sheets are at most so large; 0 if there is none."""
    low, high = 0, 100
    while low < high:
        middle = (low + high + 1) // 2
        if sum(map(len, pool.imap(partial(encode, quality=middle), sheets))) <= most_bytes:
            low = middle
        else:
            high = middle - 1
        sys.stderr.write(f"quality from {low} to {high}\n")
    return low


def encode(photos: list[Photo], quality: int) -> bytes:
    """A sheet as a WebP file; tiles after the last photo are black."""
    sheet = Image.new("RGB", (ACROSS * TILE, ACROSS * TILE))
    for place, photo in enumerate(photos):
        with Image.open(photo.path) as image:
            if image.size != (TILE, TILE):
                raise PatchlightError(f"{photo.path}: is {image.size[0]} x {image.size[1]} pixels, not {TILE} x {TILE}")
            sheet.paste(image.convert("RGB"), (place % ACROSS * TILE, place // ACROSS * TILE))
    file = io.BytesIO()
    sheet.save(file, "WEBP", quality=quality, method=5)
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
