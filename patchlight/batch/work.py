"""What the worker processes do: read a photo as the model sees it, and cut its crops out of the original.

Nothing here imports torch, which would take each run more than a second of a core.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from patchlight.batch.frames import Frame, frame_thumb, pack_thumb, read_frame
from patchlight.batch.inputs import crop_name
from patchlight.batch.report import thumbnail
from patchlight.config import PreprocessConfig
from patchlight.geometry import Box, View
from patchlight.images.crop import Cut, cut_out, write_crop
from patchlight.images.decode import ImageError, decode
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
class Unwritable:
    """An output could not be written, which no other photo will change."""

    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A photo as the model takes it."""

    level_HWC: npt.NDArray[Any]
    """From 0 to 255, see `Preprocess.levels`."""
    view: View
    stamp: Stamp
    frame: Frame | None = None
    """Where and when it was taken, and"""
    thumb: bytes | None = None
    """what its scene looks like, see frames.py; for camera traps."""


def stamp_of(file: str) -> Stamp | None:
    """None where there is no such file."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def read_photo(
    file: str, config: PreprocessConfig, thumb: Path | None, path: str, as_frame: bool = False
) -> Seen | Failed | Unwritable:
    """Decode a file, no larger than the model needs it; write its thumbnail, marked with the row's path."""
    stamp = stamp_of(file)
    try:
        photo = decode(file, fast_size=None if config.resize == "none" else config.scaled_size)
    except ImageError as error:
        return Failed(error.reason, error.detail, stamp)
    level_HWC, view = Preprocess(config).levels(photo)
    if stamp is None:
        return Failed("gone", "it came and went while it was read")
    if thumb is not None:
        content = thumbnail(photo, path=path)
        temporary = thumb.with_name(f".{thumb.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(content)  # one that is lost in a crash is made again: no waiting for the disk
            temporary.replace(thumb)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            return unwritable(thumb, error)
    level_HWC = np.ascontiguousarray(level_HWC)
    if as_frame:
        return Seen(level_HWC, view, stamp, read_frame(file), pack_thumb(frame_thumb(level_HWC)))
    return Seen(level_HWC, view, stamp)


def cut_photo(
    file: str, stamp: Stamp, boxes: Sequence[Box], how: Cut, folder: Path, place: str
) -> list[str] | Failed | Unwritable:
    """Write the crops of a photo under `folder`; their names there, in the order of the boxes."""
    now = stamp_of(file)
    if now is None:
        return Failed("gone", "it was there when its subject was looked for, and is no longer")
    if now != stamp:
        return Failed("changed", "it was changed between being looked at and being cropped")
    try:
        crops = cut_out(file, boxes, how)
    except ImageError as error:
        return Failed(error.reason, error.detail, stamp)
    names = []
    for number, crop in enumerate(crops, 1):
        name = crop_name(place, number, crop.format)
        try:
            write_crop(folder / name, crop.content)
        except OSError as error:
            return unwritable(folder / name, error)
        names.append(name)
    return names


def unwritable(path: Path, error: OSError) -> Unwritable:
    name = str(path) if str(path).isprintable() else ascii(str(path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Unwritable(f"{name}: the disk is full; make room, and run the same command again to go on")
    return Unwritable(f"{name}: cannot be written ({error.strerror or error}); mend that, and run it again to go on")
