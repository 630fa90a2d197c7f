"""Camera traps: what the model saw of each frame, kept until its whole sequence can be judged, and judged.

The rows of a sequence depend on all of its frames. So a run first looks at every photo and keeps heat, view and a small
picture of each in a file, and then goes through the sequences: what never moves loses its heat, and the rows are made
of what is left as those of single photos are. A stop costs neither: looks stay, and a row says of which frames it was
made, so that it is made anew when those change.
"""

import base64
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchlight.batch.burst import MOVED_SHARE, judge, settle
from patchlight.batch.frames import Clock, Frame, group_bursts, unpack_thumb
from patchlight.batch.inputs import Input
from patchlight.batch.results import Lines, as_stamp
from patchlight.batch.work import Seen, Stamp
from patchlight.geometry import View
from patchlight.localizing.decide import GENERIC
from patchlight.localizing.detector import Detector, Localization, with_name
from patchlight.weights.groups import Named


@dataclass(frozen=True, slots=True)
class FrameHeat:
    """What the model saw of one frame."""

    heat_hw: npt.NDArray[np.float32]
    view: View
    thumb_HWC: npt.NDArray[np.uint8]
    named: Named | None = None


@dataclass(slots=True)
class FrameEntry:
    """What the file holds of a photo, and where."""

    start: int
    stamp: Stamp | None
    frame: Frame
    """Its camera has the photo's size, too: a sequence's frames are all alike."""


class FrameStore(Lines):
    """The looks of a run; of a file's looks the last one counts."""

    def __init__(self, path: Path) -> None:
        self.entries: dict[str, FrameEntry] = {}
        self._cameras: dict[tuple[str, ...], tuple[str, ...]] = {}
        super().__init__(path)

    def _index(self, record: Any, start: int) -> None:
        height, width = record["view"]["source_size"]
        camera = (*record["camera"], f"{width}x{height}")
        camera = self._cameras.setdefault(camera, camera)  # thousands of photos have the same
        frame = Frame(camera, record["time"], record["clock"])
        self.entries[record["file"]] = FrameEntry(start, as_stamp(record["stamp"]), frame)

    def append(self, photo: Input, seen: Seen, found: Localization) -> None:
        assert seen.frame is not None
        assert seen.thumb is not None
        heat_hw = found.heat_hw.float().contiguous().numpy()
        self._add(
            {
                "file": photo.file,
                "stamp": seen.stamp,
                "camera": seen.frame.camera,
                "time": seen.frame.time,
                "clock": seen.frame.clock,
                "view": asdict(found.view),
                "heat": {"size": heat_hw.shape, "float32": base64.b64encode(heat_hw.astype("<f4").tobytes()).decode()},
                "thumb": base64.b64encode(seen.thumb).decode(),
                "named": None if found.named is None else asdict(found.named),
            }
        )

    def look(self, file: str) -> FrameHeat:
        record = self._at(self.entries[file].start)
        levels = np.frombuffer(base64.b64decode(record["heat"]["float32"]), "<f4")
        view: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in record["view"].items()}
        return FrameHeat(
            levels.astype(np.float32).reshape(record["heat"]["size"]),
            View(**view),
            unpack_thumb(base64.b64decode(record["thumb"])),
            None if record["named"] is None else Named(**record["named"]),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A frame's place in its burst."""

    id: str
    """The same for all frames of a burst."""
    frame: int
    """From 1, in the order of time."""
    frames: int
    time: str | None
    """When it was taken, by the camera's clock; None if that is not known."""
    clock: Clock
    """What the time was read from; of "file", which says when a photo was copied, the place may be wrong."""


@dataclass(frozen=True, slots=True)
class FrameSequence:
    """Frames of one camera that are judged together, in the order of their time."""

    members: tuple[int, ...]
    """Numbers of the photos."""
    places: tuple[Place, ...]
    digest: str
    """Of everything that the rows depend on: which frames, in which state, at which place."""


def sequences_of(photos: Mapping[int, Input], book: FrameStore) -> list[FrameSequence]:
    """The sequences of photos (by their numbers) that were looked at, each photo in one; the first photos' first."""
    numbers = list(photos)
    entries = [book.entries[photos[number].file] for number in numbers]
    frames = [entry.frame for entry in entries]
    places: dict[int, Place] = {}
    for burst in group_bursts(frames):
        first = burst[0]
        # A time alone does not tell two cameras apart, and where there is none, the file has to.
        about = (frames[first].camera, frames[first].clock, frames[first].time)
        key = repr(about if frames[first].time is not None else photos[numbers[first]].file)
        identity = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=6).hexdigest()
        for order, index in enumerate(burst, 1):
            places[index] = Place(identity, order, len(burst), _clock_time(frames[index]), frames[index].clock)
    sequences = []
    for members in group_bursts(frames, gap=math.inf):
        digest = hashlib.blake2b(digest_size=16)
        for index in members:
            place = places[index]
            state = (
                photos[numbers[index]].file,
                entries[index].stamp,
                place.id,
                place.frame,
                place.frames,
                place.clock,
            )
            digest.update(repr(state).encode(errors="surrogateescape"))
        sequences.append(
            FrameSequence(
                tuple(numbers[index] for index in members),
                tuple(places[index] for index in members),
                digest.hexdigest(),
            )
        )
    return sequences


def _clock_time(frame: Frame) -> str | None:
    if frame.time is None:
        return None
    # EXIF and names have the camera's own time, which was read as if it were UTC; a file's is the world's.
    parts = time.localtime(frame.time) if frame.clock == "file" else time.gmtime(frame.time)
    return time.strftime("%Y-%m-%d %H:%M:%S", parts)


def judged(
    looks: Sequence[FrameHeat], times: Sequence[float | None], detector: Detector
) -> list[tuple[Localization, bool]]:
    """What was found in the frames of a sequence, once what never moves is taken away, and whether a frame shows
    nothing but the scene.

    A model that looks at the stump may not look at the deer beside it, so that nothing is left. Where something moved
    meanwhile, that is given instead, as `unsure`, unless the model found nothing to begin with.
    """
    heats_Thw = np.stack([look.heat_hw for look in looks])
    result = judge(heats_Thw, np.stack([look.thumb_HWC for look in looks]), times_T=times)
    options = replace(detector.options, threshold=0.5, min_area=max(detector.options.min_area, MOVED_SHARE))
    # What changed of a patch is a share of it, as what a subject covers is.
    of_changes = replace(detector, method="subject", calibration=GENERIC["subject"], options=options)

    def finds(frame: int, heat_hw: npt.NDArray[np.float32], by: Detector = detector) -> Localization:
        return by.judge(torch.from_numpy(heat_hw)[None], [looks[frame].view])[0]

    answers = []
    for frame, unchanged in enumerate(result.unchanged_T.tolist()):
        found = finds(frame, result.heats_Thw[frame])
        if found.decision != "none" or finds(frame, heats_Thw[frame]).decision == "none":
            found = replace(found, decision=settle(found.decision, unchanged))
        elif (other := finds(frame, result.changed_Thw[frame], of_changes)).subjects:
            sure = max(found.confidence, detector.calibration.nothing)
            subjects = tuple(replace(each, confidence=sure) for each in other.subjects)
            found = replace(found, subjects=subjects, mask_hw=other.mask_hw, decision="unsure", confidence=sure)
        name = looks[frame].named
        if name is not None:
            # What shows nothing but the scene is empty, whatever the scene is called.
            found = replace(found, named=name) if unchanged else with_name(found, name)
        answers.append((found, unchanged))
    return answers
