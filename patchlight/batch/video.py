"""Videos as photos: so many frames a second, written to DIR/frames/, a folder for each video.

A frame is a JPEG that has its time in its name (seconds from the start) and in its EXIF, and its video's time as its
file's, so that it is the same file whenever it is taken. `video.json` in a video's folder says of which state of the
video the frames are, once all of them are there, and from the first one on that they are a run's.
"""

import calendar
import contextlib
import importlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from patchlight.batch.inputs import Input, crop_place
from patchlight.batch.work import stamp_of
from patchlight.errors import PatchlightError
from patchlight.files import replacing, writing
from patchlight.images.decode import MAX_PIXELS
from patchlight.json_config import parse_json

SUFFIXES = frozenset((".mp4", ".m4v", ".mov", ".avi"))

_FRAME = re.compile(r"\d{6}\.\d{3}\.jpg")
_DONE = "video.json"
_NOTED = {"stamp", "rate", "trouble"}
_BEGUN = "begun"
"""Stands in the note in place of the video's stamp until all of its frames are there."""
_QUALITY = 92


def with_frames(
    photos: Sequence[Input], base: str, frames: Path, rate: float, step: Callable[[str, int, int], None]
) -> Iterator[Input]:
    """The photos, in place of each video its frames, `rate` a second; a video that cannot be read stays, with a reason.

    `step` is called before each frame with the video and how many of how many there are.
    """
    av = pyav()
    for photo in photos:
        if os.path.splitext(photo.file)[1].lower() not in SUFFIXES:
            yield photo
            continue
        place = crop_place(photo.file, base)
        folder = frames / place
        trouble = _frames_of(av, photo.file, folder, rate, step)
        for name in sorted(name for name in os.listdir(folder) if _FRAME.fullmatch(name)) if folder.is_dir() else ():
            yield Input(str(folder / name), os.path.abspath(folder / name), place=f"{place}/{name}")
        if trouble is not None:
            yield replace(photo, trouble=f"this video cannot be read{trouble}")


def forget_frames(frames: Path) -> None:
    """Remove what `with_frames` wrote: frames that lie beside its note."""
    for root, _, names in os.walk(frames, topdown=False):
        for name in names if _noted(Path(root)) is not None else ():
            if name == _DONE or _FRAME.fullmatch(name):
                (Path(root) / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody's own file is in it
            os.rmdir(root)


def of_video(path: str, frames: Path) -> dict[str, Any] | None:
    """What a row says of a photo that is a frame: which video's, and the seconds from its start."""
    folder, name = os.path.split(os.path.abspath(path))
    if not _FRAME.fullmatch(name) or not Path(folder).is_relative_to(os.path.abspath(frames)):
        return None
    return {"file": os.path.relpath(folder, frames), "seconds": float(name.removesuffix(".jpg"))}


def _frames_of(av: Any, file: str, folder: Path, rate: float, step: Callable[[str, int, int], None]) -> str | None:
    """Take the frames of a video, unless they are there; what is wrong with it, in brackets."""
    state = {"stamp": stamp_of(file), "rate": rate}
    done = _noted(folder)
    if done is not None and done | {"trouble": None} == json.loads(json.dumps(state)) | {"trouble": None}:
        return done["trouble"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _note(folder, state | {"stamp": _BEGUN, "trouble": None})
    written, trouble = set[str](), None
    try:
        with av.open(file) as video:
            for name, content in _taken(video, file, rate, step):
                path = folder / name
                with writing(path), replacing(path, durable=False) as temporary:
                    temporary.write_bytes(content)
                status = os.stat(file)
                os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
                written.add(name)
    except (av.FFmpegError, OSError, ValueError, MemoryError) as error:
        trouble = f" ({' '.join(str(getattr(error, 'strerror', None) or error).split())[:120]})"
    if not written and trouble is None:
        trouble = " (it has no pictures)"
    for name in os.listdir(folder):
        if _FRAME.fullmatch(name) and name not in written:
            (folder / name).unlink(missing_ok=True)
    _note(folder, state | {"trouble": trouble})
    return trouble


def _noted(folder: Path) -> dict[str, Any] | None:
    """The note in a folder of frames; None where there is none, or somebody else's."""
    try:
        noted = parse_json((folder / _DONE).read_bytes())
    except (OSError, ValueError):
        return None
    return noted if isinstance(noted, dict) and noted.keys() == _NOTED else None


def _note(folder: Path, said: dict[str, Any]) -> None:
    with writing(folder / _DONE), replacing(folder / _DONE) as temporary:
        temporary.write_text(json.dumps(said))


def _taken(video: Any, file: str, rate: float, step: Callable[[str, int, int], None]) -> Iterator[tuple[str, bytes]]:
    """Name and JPEG of each frame that is the first at or after one of the times that are wanted."""
    if not video.streams.video:
        return
    stream = video.streams.video[0]
    if stream.width * stream.height > MAX_PIXELS:
        raise ValueError(f"its pictures have more than {MAX_PIXELS:,} pixels")
    stream.thread_type = "AUTO"
    length = float(video.duration or 0) / 1e6
    start, count = None, 0
    begun = _begun(video, file)
    for frame in video.decode(stream):
        if frame.time is None:
            continue
        start = frame.time if start is None else start
        seconds = frame.time - start
        if seconds * rate < count - 1e-6:
            continue
        step(file, count, max(count + 1, int(length * rate)))
        count = int(seconds * rate + 1e-6) + 1
        yield f"{seconds:010.3f}.jpg", _jpeg(frame.to_image(), begun + seconds)


def _jpeg(image: Image.Image, taken: float) -> bytes:
    exif = Image.Exif()
    details = exif.get_ifd(0x8769)
    details[0x9003] = time.strftime("%Y:%m:%d %H:%M:%S", time.gmtime(taken))
    details[0x9291] = f"{int(1000 * (taken % 1)):03}"
    content = io.BytesIO()
    image.convert("RGB").save(content, "JPEG", quality=_QUALITY, exif=exif)
    return content.getvalue()


def _begun(video: Any, file: str) -> float:
    """When the video began, as seconds of the camera's clock: what it says itself, else its file's time."""
    stamp = re.match(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)", video.metadata.get("creation_time", ""))
    if stamp is not None:
        with contextlib.suppress(ValueError, OverflowError):
            return float(calendar.timegm(tuple(int(part) for part in stamp.groups())))
    parts = time.localtime(os.stat(file).st_mtime)
    return float(calendar.timegm(parts))


def pyav() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError:
        raise PatchlightError("video needs PyAV; install it with: pip install 'patchlight[video]'") from None
