"""What the worker processes do: read a photo as the model sees it, and cut its crops out of the original.

Nothing here imports torch, which would take each run more than a second of a core.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from patchlight import __version__
from patchlight.batch.frames import Frame, frame_picture, is_night, pack_picture, picture_config, read_frame
from patchlight.batch.inputs import Input, crop_name
from patchlight.batch.pool import NoWorkers, WorkerDied
from patchlight.batch.report import mark_of, thumbnail
from patchlight.config import PreprocessConfig
from patchlight.files import Unwritable, replacing, writing
from patchlight.geometry import Box, Size, View
from patchlight.images.containers import is_elsewhere, stamp_elsewhere
from patchlight.images.crop import Crop, Cut, cut_out, write_crop
from patchlight.images.cutout import HeatMap
from patchlight.images.decode import Alpha, Decoded, ImageError, decode
from patchlight.images.preprocess import Preprocess

Stamp = tuple[int, int]
"""(bytes, nanoseconds of the last change): a file with another stamp is another file."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is nothing to say about a photo."""

    reason: str
    detail: str
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A photo as the model takes it."""

    level_HWC: npt.NDArray[Any]
    """From 0 to 255, see `Preprocess.levels`."""
    view: View
    stamp: Stamp
    alpha: Alpha | None = None
    frame: Frame | None = None
    """Where and when it was taken, and"""
    picture: bytes | None = None
    """what its scene looks like, and"""
    night: bool = False
    """whether infrared light was on it, see frames.py; of camera traps."""


@dataclass(frozen=True, slots=True)
class Crops:
    """What was cut out of a photo."""

    names: tuple[str, ...]
    """In the order of the boxes."""
    cuts: tuple[dict[str, Any], ...]
    """What each shows, as rows say it."""
    encoded: int
    """How many are of a JPEG, and were encoded anew."""


def result_of(future: "Future[Any]") -> Any:
    """What a worker says, where it said anything."""
    try:
        return future.result()
    except WorkerDied:
        return Failed("crashed", "the process that read it died: it is damaged in an unusual way, or memory was short")
    except (NoWorkers, Unwritable):
        raise
    except Exception as error:  # whatever a photo can do, it does it to itself alone
        return Failed("crashed", crashed(error))


def crashed(error: Exception) -> str:
    """What an error says, in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@cache
def readers() -> str:
    """What can be read here, by the libraries that are installed."""
    try:
        heic = version("pillow-heif")
    except PackageNotFoundError:
        heic = "none"
    return f"patchlight {__version__}, pillow {version('pillow')}, pillow-heif {heic}"


def stamp_of(file: str) -> Stamp | None:
    """None where there is no such file."""
    if is_elsewhere(file):
        return stamp_elsewhere(file)
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def is_unchanged(photo: Input, stamp: Stamp | None) -> bool:
    """Whether a photo is the one that had this stamp; one elsewhere goes by the list that named it."""
    if is_elsewhere(photo.file):
        return photo.stamp is None or photo.stamp == stamp
    return stamp == stamp_of(photo.file)


def read_photo(
    file: str, config: PreprocessConfig, thumb: Path | None, as_frame: bool = False, whole: bool = False
) -> Seen | Failed:
    """Decode a file, no larger than the model needs it unless the `whole` is asked for; write its thumbnail."""
    stamp = stamp_of(file)
    try:
        photo = decode(file, fast_size=None if whole else _fast_size(config))
    except ImageError as error:
        return Failed(error.reason, error.detail, stamp)
    level_HWC, view = Preprocess(config).levels(photo)
    if stamp is None:
        return Failed("gone", "it kept changing or disappearing while it was read")
    if thumb is not None:
        _write_thumbnail(photo, stamp, thumb)
    level_HWC = np.ascontiguousarray(level_HWC)
    if as_frame:
        larger, decoded = picture_config(config), photo
        if photo.image.size != photo.source_size[::-1] and min(photo.image.size) < max(larger.scaled_size):
            try:
                decoded = decode(file, fast_size=_fast_size(larger))
            except ImageError as error:
                return Failed(error.reason, error.detail, stamp)
        picture = pack_picture(frame_picture(decoded, config))
        return Seen(level_HWC, view, stamp, None, read_frame(file), picture, is_night(level_HWC))
    return Seen(level_HWC, view, stamp, photo.alpha)


def make_thumbnail(file: str, stamp: Stamp | None, config: PreprocessConfig, thumb: Path) -> bool:
    """Write the thumbnail that `read_photo` wrote and that was lost since; whether the photo is still there."""
    if stamp is None or stamp_of(file) != stamp:
        return False
    try:
        _write_thumbnail(decode(file, fast_size=_fast_size(config)), stamp, thumb)
    except ImageError:
        return False
    return True


def _fast_size(config: PreprocessConfig) -> Size | None:
    return None if config.resize == "none" else config.scaled_size


def _write_thumbnail(photo: Decoded, stamp: Stamp, thumb: Path) -> None:
    # One that is lost in a crash is made again: no waiting for the disk.
    with writing(thumb), replacing(thumb, durable=False) as temporary:
        temporary.write_bytes(thumbnail(photo, mark=mark_of(stamp)))


def cut_photo(
    file: str,
    stamp: Stamp,
    boxes: Sequence[Box],
    how: Cut,
    folder: Path,
    place: str,
    *,
    numbered: bool = False,
    heat: HeatMap | None = None,
) -> Crops | Failed:
    """Write the crops of a photo under `folder`; `numbered` says that also one that is alone has a number."""
    now = stamp_of(file)
    if now is None:
        return Failed("gone", "it disappeared before it could be cropped")
    if now != stamp:
        return Failed("changed", "it changed before it could be cropped")
    try:
        crops = cut_out(file, boxes, how, heat=heat)
    except ImageError as error:
        return Failed(error.reason, error.detail, stamp)
    names = [crop_name(place, number, crop.format, numbered=numbered) for number, crop in enumerate(crops, 1)]
    for name, crop in zip(names, crops, strict=True):
        with writing(folder / name):
            write_crop(folder / name, crop.content)
    cuts = tuple(_cut_of(crop, box) for crop, box in zip(crops, boxes, strict=True))
    return Crops(tuple(names), cuts, sum(crop.encoded for crop in crops))


def _cut_of(crop: Crop, box: Box) -> dict[str, Any]:
    """What a crop shows, and the least margin that it has on any side of its box, as a share of the box's."""
    left, top, right, bottom = crop.region
    across = min(box.left - left, right - box.right) / max(box.width, 1e-6)
    down = min(box.top - top, bottom - box.bottom) / max(box.height, 1e-6)
    margin = round(max(0.0, min(across, down)), 3) + 0.0
    return {"region": list(crop.region), "size": list(crop.size), "margin": margin}
