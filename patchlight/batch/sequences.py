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

from patchlight.batch.burst import Floats, Moved, judge
from patchlight.batch.frames import Clock, Frame, group_bursts, unpack_picture
from patchlight.batch.inputs import Input
from patchlight.batch.results import Lines, as_stamp
from patchlight.batch.work import Seen, Stamp
from patchlight.errors import PatchlightError
from patchlight.files import printable
from patchlight.geometry import Box, View
from patchlight.localizing.decide import by_confidence, with_odds
from patchlight.localizing.detector import SAME_SUBJECT, Detector, Localization, Subject
from patchlight.weights.groups import EMPTY, Named

LEAST_CONFIDENCE = 0.001
"""Of a find that is worth a box."""

LEAST_OVERLAP = 0.3
"""Of the box of what moved with a find that it is."""

SAME_PICTURE, SAME_HEAT = 3.0, 3.0
"""How much it takes off a find (of its odds, as a power of e) that its place looks the same in other bursts, for long
enough, and that it is as warm there."""

MOST_OF_MOVED, HALF_OF_MOVED, SPREAD_OF_MOVED = 0.65, 1.0, 0.15
"""How likely what moved is an animal, by how new it is: fitted by eye on frames of `benchmarks/triage.py` with other
scenes and lights than it measures with."""


@dataclass(frozen=True, slots=True)
class FrameLook:
    """What the model saw of one frame, and what is compared with other frames."""

    found: Localization
    picture_HW: npt.NDArray[np.uint8]
    night: bool
    of_tiles: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """What a frame's row says of its scene."""

    background: int
    """How many other bursts say what it is; 0 where there are too few."""
    unchanged: bool
    """Nothing differs from it."""


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
        texts = [record["file"], record["clock"], *record["camera"]]
        if not all(isinstance(text, str) for text in texts) or type(record["time"] or 0.0) not in (int, float):
            raise ValueError("it is no look at a photo")
        camera = (*record["camera"], f"{width}x{height}")
        camera = self._cameras.setdefault(camera, camera)  # thousands of photos have the same
        frame = Frame(camera, record["time"], record["clock"])
        self.entries[record["file"]] = FrameEntry(start, as_stamp(record["stamp"]), frame)

    def append(self, photo: Input, seen: Seen, found: Localization) -> None:
        assert seen.frame is not None
        assert seen.picture is not None
        self._add(
            {
                "file": photo.file,
                "stamp": seen.stamp,
                "camera": seen.frame.camera,
                "time": seen.frame.time,
                "clock": seen.frame.clock,
                "view": asdict(found.view),
                "heat": _packed(found.heat_hw),
                "patches": None if found.patches_hw5 is None else _packed(found.patches_hw5),
                "patch_size": found.patch_size,
                "subjects": [
                    [each.box.left, each.box.top, each.box.right, each.box.bottom, each.score, each.confidence]
                    for each in found.subjects
                ],
                "decision": found.decision,
                "confidence": found.confidence,
                "count": found.count,
                "named": None if found.named is None else asdict(found.named),
                "picture": base64.b64encode(seen.picture).decode(),
                "night": seen.night,
            }
        )

    def look(self, file: str, detector: Detector) -> FrameLook:
        try:
            return self._look(file, detector)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:80]
            raise PatchlightError(
                f"{self.path}: what was seen of {printable(file)} is damaged ({reason}); remove this file, and run the "
                "same command again"
            ) from None

    def _look(self, file: str, detector: Detector) -> FrameLook:
        record = self._at(self.entries[file].start)
        view: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in record["view"].items()}
        heat_hw = _unpacked(record["heat"])
        found = Localization(
            subjects=tuple(Subject(Box(*each[:4]), *each[4:]) for each in record["subjects"]),
            decision=record["decision"],
            confidence=record["confidence"],
            heat_hw=heat_hw,
            mask_hw=torch.zeros(heat_hw.shape, dtype=torch.bool),  # of which no row says anything
            view=View(**view),
            patch_size=tuple(record["patch_size"]),
            method=detector.method,
            named=None if record["named"] is None else Named(**record["named"]),
            patches_hw5=None if record["patches"] is None else _unpacked(record["patches"]),
            count=record["count"],
        )
        picture_HW = unpack_picture(base64.b64decode(record["picture"]))
        return FrameLook(found, picture_HW, record["night"], detector.options.tiles is not None)


def _packed(values: torch.Tensor) -> dict[str, Any]:
    array = values.float().contiguous().numpy()
    return {"size": array.shape, "float32": base64.b64encode(array.astype("<f4").tobytes()).decode()}


def _unpacked(packed: Mapping[str, Any]) -> torch.Tensor:
    values = np.frombuffer(base64.b64decode(packed["float32"]), "<f4").astype(np.float32)
    return torch.from_numpy(values.reshape(packed["size"]))


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
    looks: Sequence[FrameLook], places: Sequence[Place], times: Sequence[float | None], detector: Detector
) -> list[tuple[Localization, Scene]]:
    """What was found in the frames of a sequence, once it is known what is the scene's and what moved.

    What is there at other times, too, is believed the less the longer it was; what the model did not look at because of
    it is looked for in the heat that is left. What moved is given as well, with a confidence that makes it `unsure` at
    most, or speaks for what the model found there.
    """
    result = judge(
        np.stack([look.found.heat_hw.numpy() for look in looks]),
        np.stack([look.picture_HW for look in looks]),
        bursts=[place.id for place in places],
        night=[look.night for look in looks],
        times=times,
    )
    answers = []
    for frame, look in enumerate(looks):
        same_hw, static_hw, strength = result.same_Thw[frame], result.static_Thw[frame], float(result.strength_T[frame])
        unchanged = bool(result.unchanged_T[frame])
        found = _without_scene(look, same_hw, static_hw, strength, detector)
        found = _with_moved(found, result.moved_T[frame], detector)
        name = look.found.named
        if name is not None:
            # What shows nothing but the scene is empty, whatever the scene is called; and of what is called empty the
            # boxes are believed less already.
            sure = name.group == EMPTY or (unchanged and strength == 1)
            found = replace(found, named=name) if sure else detector.with_name(found, name)
        answers.append((found, Scene(int(result.bursts_T[frame]), unchanged)))
    return answers


def _without_scene(
    look: FrameLook, same_hw: Floats, static_hw: Floats, strength: float, detector: Detector
) -> Localization:
    """A frame's finds, those that are the scene's with less confidence, and those that they had hidden."""
    plain, calibration = look.found, detector.calibration
    if not strength:
        return plain
    subjects = []
    for each in plain.subjects:
        same, static = (_share_of(each.box, plain, values_hw) for values_hw in (same_hw, static_hw))
        taken_off = strength * (SAME_PICTURE * same + SAME_HEAT * static)
        confidence = with_odds(each.confidence, math.exp(-taken_off))
        if static < 0.5:  # warm against the scene
            confidence = max(confidence, min(each.confidence, calibration.nothing))
        subjects.append(replace(each, confidence=confidence))
    left = plain
    if not look.of_tiles and (static_hw > 0).any():  # a tile without the scene's has been looked at
        heat_hw = plain.heat_hw * torch.from_numpy(1 - strength * static_hw)
        patches_Bhw5 = None if plain.patches_hw5 is None else plain.patches_hw5[None]
        left = detector.judge(heat_hw[None], [plain.view], patches_Bhw5=patches_Bhw5)[0]
        # What is left of a find is not another one.
        subjects += [each for each in left.subjects if not any(_is_same(each.box, own.box) for own in plain.subjects)]
    return _of(left, subjects, detector)


def _with_moved(found: Localization, moved: Moved | None, detector: Detector) -> Localization:
    """With what moved: another find, or more confidence in the one that it is."""
    if moved is None:
        return found
    confidence = confidence_of_moved(moved.level)
    if confidence < LEAST_CONFIDENCE:
        return found
    height, width = found.view.source_size
    (rows, columns), (x0, y0, x1, y1) = found.view.model_size, moved.box
    box = found.view.to_source(Box(x0 * columns, y0 * rows, x1 * columns, y1 * rows))
    subjects = list(found.subjects)
    own = next((place for place, each in enumerate(subjects) if _is_part(box, each.box)), None)
    if own is not None:
        both = 1 - (1 - subjects[own].confidence) * (1 - confidence)
        subjects[own] = replace(subjects[own], confidence=both)
    elif box.area >= detector.options.min_area * height * width:
        subjects.append(Subject(box, min(1.0, moved.level), confidence))
    return _of(found, subjects, detector)


def _of(found: Localization, subjects: Sequence[Subject], detector: Detector) -> Localization:
    """The same with these subjects, the most likely first, as many as are asked for."""
    calibration = detector.calibration
    subjects = sorted(subjects, key=lambda each: -each.confidence)
    confidence = subjects[0].confidence if subjects else 0.0
    decision = by_confidence(confidence, calibration)
    count = int(decision != "none")
    all_listed = len(found.subjects) != detector.options.subjects  # else there may be more than were asked for
    left = sum(each.confidence >= calibration.nothing for each in subjects)
    if decision == "subject" and found.decision == "several" and (left > 1 or not all_listed):
        decision = "several"
        least = (calibration.further or calibration).sure
        sure = 1 + sum(each.confidence >= least for each in subjects[1:])
        count = max(2, sure, 0 if all_listed else found.count)
    return replace(
        found,
        subjects=tuple(subjects[: detector.options.subjects]),
        confidence=confidence,
        decision=decision,
        count=count,
    )


def confidence_of_moved(level: float) -> float:
    """That what moved is an animal, see `Moved.level`: never enough to be sure, for so does a branch in a storm."""
    return MOST_OF_MOVED / (1 + math.exp(-(level - HALF_OF_MOVED) / SPREAD_OF_MOVED))


def _share_of(box: Box, found: Localization, static_hw: Floats) -> float:
    """How far the heat in a box is the scene's, 0 to 1."""
    h, w = static_hw.shape
    (down, across), on_model = found.patch_size, found.view.to_model(box)
    x0, x1 = max(0, round(on_model.left / across)), min(w, round(on_model.right / across))
    y0, y1 = max(0, round(on_model.top / down)), min(h, round(on_model.bottom / down))
    if x0 >= x1 or y0 >= y1:  # smaller than a patch: the one that its middle lies in
        x0 = min(w - 1, max(0, int((on_model.left + on_model.right) / 2 / across)))
        y0 = min(h - 1, max(0, int((on_model.top + on_model.bottom) / 2 / down)))
        x1, y1 = x0 + 1, y0 + 1
    heat_hw = found.heat_hw.numpy()[y0:y1, x0:x1]
    return float((heat_hw * static_hw[y0:y1, x0:x1]).sum() / max(float(heat_hw.sum()), 1e-6))


def _is_same(one: Box, other: Box) -> bool:
    """Whether the smaller of two boxes lies in the other, for its greater part."""
    return one.intersection(other).area >= SAME_SUBJECT * min(one.area, other.area)


def _is_part(moved: Box, found: Box) -> bool:
    """Whether what moved is what was found there, or a part of it, as its head."""
    return moved.intersection(found).area >= SAME_SUBJECT * moved.area or moved.iou(found) >= LEAST_OVERLAP
