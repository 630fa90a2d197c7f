"""Where and when photos were taken, and which of them belong together: one camera's, close in time.

Nothing here imports torch.
"""

import calendar
import io
import math
import os
import re
import stat
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.images.containers import is_elsewhere, read_elsewhere
from patchlight.images.decode import Decoded
from patchlight.images.preprocess import Preprocess

GAP_SECONDS = 60.0
"""Between two frames of one burst, at most."""

MOST_FRAMES = 64
"""Of one group. The light of a longer sequence changes, and so many frames are held in memory together."""

PICTURE_SIDE = 384
"""Longest side of the pictures that are compared, in pixels: an animal that is 2 % as wide as the frame has 8."""

PICTURE_QUALITY = 80
"""Of their JPEGs: what it changes is far below what counts as a change of the scene."""

NIGHT_CHROMA = 0.012
"""Mean difference of a picture's colours, 0 to 1, below which it was taken by infrared light."""


Clock = Literal["exif", "name", "file"]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where and when a photo was taken."""

    camera: tuple[str, ...]
    """(folder, make, model, serial number, pattern of the name), as far as they are known; the pattern where EXIF says
    nothing."""
    time: float | None
    """Seconds; to be compared between frames of one camera and clock only."""
    clock: Clock
    """What the time was read from."""


_STAMP = re.compile(
    r"(?<!\d)((?:19|20)\d\d)([-_.:]?)(\d\d)\2(\d\d)[-_ T.]{0,3}(\d\d)([-_.:h]?)(\d\d)[-_.:m]?(\d\d)(?!\d{4})"
)
"""A date and a time in a file's name: 20240514_063012, 2024-05-14 06.30.12."""


def read_frame(path: str | os.PathLike[str]) -> Frame:
    """Camera and time by the photo's EXIF, else by the digits in its name, else by the file's own time.

    Digits that cannot be a date and a time are none: such a file has no time but its own.
    A file that cannot be read has what its name says; reading it will tell what is wrong with it.
    """
    folder, name = os.path.split(path if is_elsewhere(path) else os.path.abspath(path))
    make = model = serial = ""
    time: float | None = None
    exif = _exif(path)
    if exif is not None:
        details = exif.get_ifd(ExifTags.IFD.Exif)
        make, model = _word(exif.get(ExifTags.Base.Make)), _word(exif.get(ExifTags.Base.Model))
        serial = _word(details.get(ExifTags.Base.BodySerialNumber))
        time = _seconds(re.findall(r"\d+", _word(details.get(ExifTags.Base.DateTimeOriginal))))
        if time is not None:
            digits = re.match(r"\d+", _word(details.get(ExifTags.Base.SubsecTimeOriginal)))
            time += float(f"0.{digits[0]}") if digits else 0.0
    known = time is not None or make or model or serial
    camera = (folder, make, model, serial, "" if known else name_pattern(name))
    if time is not None:
        return Frame(camera, time, "exif")
    for stamp in _STAMP.finditer(name):
        time = _seconds([stamp[group] for group in (1, 3, 4, 5, 7, 8)])
        if time is not None:
            return Frame(camera, time, "name")
    try:
        return Frame(camera, os.stat(path).st_mtime, "file")
    except (OSError, ValueError):
        return Frame(camera, None, "file")


def name_pattern(name: str) -> str:
    """What the names of one camera's files have in common: "cam3_IMG_#.jpg" of "cam3_IMG_0123.JPG".

    The time goes, and so does the counter: the longest digits that stand apart from letters, if they are three or more,
    else the last that do, else the longest of all. Other digits stay, for "cam3" and "cam4" are two cameras.
    """
    root, ending = os.path.splitext(name)
    without = _STAMP.sub("@", root)
    runs = list(re.finditer(r"\d+", without))
    apart = [run for run in runs if not run.start() or not without[run.start() - 1].isalpha()]
    if "@" in without:
        runs = [run for run in runs if run.end() - run.start() > 3]  # the time is enough, and "cam3" is a camera
    if runs := apart or runs:

        def rank(run: re.Match[str]) -> tuple[int, int]:
            length = run.end() - run.start()
            return (length if length > 2 or not apart else 0), run.start()

        counter = max(runs, key=rank)
        without = without[: counter.start()] + "#" + without[counter.end() :]
    return (without + ending).lower()


def group_bursts(
    files: Sequence[str | os.PathLike[str] | Frame], *, gap: float = GAP_SECONDS, most: int = MOST_FRAMES
) -> list[list[int]]:
    """Indices of files that one camera took with `gap` seconds at most between two, each group in the order of time.

    Every file is in one group; one whose time is unknown is alone. A group of more than `most` is parted evenly. With
    gap=math.inf the groups are the cameras' whole sequences.
    """
    if not gap >= 0:
        raise PatchlightError(f"gap={gap} must be 0 seconds or more")
    if most < 1:
        raise PatchlightError(f"most={most} must be 1 frame or more")
    frames = [file if isinstance(file, Frame) else read_frame(file) for file in files]
    of_camera: dict[Any, list[tuple[float, int]]] = defaultdict(list)
    groups: list[list[int]] = []
    for index, frame in enumerate(frames):
        if frame.time is None:
            groups.append([index])
        else:
            # The clocks of EXIF and of a copied file have nothing to do with each other.
            of_camera[frame.camera, frame.clock].append((frame.time, index))
    for timed in of_camera.values():
        timed.sort()
        start = 0
        for end in range(1, len(timed) + 1):
            if end == len(timed) or timed[end][0] - timed[end - 1][0] > gap:
                parts = np.array_split(range(start, end), math.ceil((end - start) / most))
                groups += [[timed[place][1] for place in part] for part in parts]
                start = end
    return sorted(groups, key=min)


def _exif(path: str | os.PathLike[str]) -> Image.Exif | None:
    try:
        opened: Any = path
        if is_elsewhere(path):
            opened = io.BytesIO(read_elsewhere(os.fspath(path)))
        elif not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for ever
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(opened, formats=("JPEG", "MPO", "TIFF", "WEBP")) as image:
                exif = image.getexif()
                exif.get_ifd(ExifTags.IFD.Exif)
                return exif
    except Exception:  # broken files break in many ways, and the photo is read elsewhere
        return None


def _word(value: Any) -> str:
    return value.strip(" \0") if isinstance(value, str) else ""


def _seconds(parts: Sequence[str]) -> float | None:
    """Of year, month, day, hour, minute, second, as if they were UTC: only differences count."""
    if len(parts) < 6:
        return None
    year, month, day, hour, minute, second = (int(part) for part in parts[:6])
    if not (1900 < year < 2200 and 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]):
        return None
    if not (hour < 24 and minute < 60 and second <= 60):
        return None
    return float(calendar.timegm((year, month, day, hour, minute, second)))


# Pictures of them, to be compared


def frame_picture(photo: Decoded, config: PreprocessConfig) -> npt.NDArray[np.uint8]:
    """A grey picture, HW, of what the model sees of a photo, with more pixels, so that it lies patch by patch under the
    heat map."""
    level_HWC, _ = Preprocess(picture_config(config)).levels(photo)
    return np.rint(np.asarray(level_HWC, np.float32).mean(-1).clip(0, 255)).astype(np.uint8)


def picture_config(config: PreprocessConfig) -> PreprocessConfig:
    """How it is made: as the model's image, some times as large."""
    times = max(1, round(PICTURE_SIDE / max(config.image_size))) if config.resize != "none" else 1
    height, width = config.image_size
    return replace(config.for_size((times * height, times * width)), resize_in="bytes")


def is_night(level_HWC: npt.NDArray[Any]) -> bool:
    """Whether an image (0 to 255) has no colours, as one that was taken by infrared light; an even tint is none."""
    levels_HWC = level_HWC.astype(np.float32) / 255
    chroma_HW2 = levels_HWC[..., [0, 2]] - levels_HWC[..., [1]]
    return bool(np.abs(chroma_HW2 - np.median(chroma_HW2, axis=(0, 1))).mean() < NIGHT_CHROMA)


def pack_picture(picture_HW: npt.NDArray[np.uint8]) -> bytes:
    """As a JPEG: many of them are kept on disk."""
    file = io.BytesIO()
    Image.fromarray(picture_HW).save(file, "JPEG", quality=PICTURE_QUALITY)
    return file.getvalue()


def unpack_picture(content: bytes) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
        return np.asarray(image.convert("L"))
