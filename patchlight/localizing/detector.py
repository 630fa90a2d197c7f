"""Photos in, subjects out: boxes in the photo's own pixels, how far to trust them, and the heat that they came from.

`Detector` is the one way there: Python, the command line, the server and the benchmarks all find with it.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, Self, overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from patchlight.config import Calibration
from patchlight.errors import PatchlightError
from patchlight.geometry import Box, View
from patchlight.images.decode import MAX_PIXELS, Alpha, Decoded, Photo, decode, listed
from patchlight.images.preprocess import Preprocess
from patchlight.localizing.boxes import Edges, Region, agreed_regions, regions_of
from patchlight.localizing.closer import Mosaic, Tiles, around, cut_off, look_at
from patchlight.localizing.decide import (
    GENERIC,
    Decision,
    by_confidence,
    confidences,
    count_subjects,
    decide,
    with_odds,
)
from patchlight.localizing.heat import HeatPass, Method, resolve_method
from patchlight.weights.groups import EMPTY, MOVING, Named
from patchlight.weights.load import Loaded, Runs, load_or_given

LOOKS_AT_ONCE = 32
"""Parts of photos that go through the model together: bounds the memory."""

MOST_TILES = 16
"""Down or across; each is a pass of the model."""

LIKE_THE_FIRST = 0.5
"""How far the box of a second look overlaps the first one at least; else it is of something else."""

SAME_SUBJECT = 0.5
"""The share of the smaller of two boxes that both cover, from which on they are of one subject."""


@dataclass(frozen=True)
class Subject:
    """Something that a photo is about."""

    box: Box
    """In pixels of the photo, upright as a viewer shows it."""
    score: float
    """The mean heat of its patches, 0 to 1; to be compared within one method only."""
    confidence: float
    """That its box overlaps a subject's by half or more; of several, if the others are subjects, too."""


@dataclass(frozen=True, eq=False)
class Localization:
    """What was found in one photo."""

    subjects: tuple[Subject, ...]
    """Those with the most heat first (of tiles see `Detector`); empty where nothing stands out."""
    decision: Decision
    """Whether the first box can be relied on; boxes are given whatever it says."""
    confidence: float
    """That the first box overlaps a subject's by half or more, 0 to 1, see `decide`; 0 where there is no box."""
    heat_hw: Tensor = field(repr=False)
    """float32, 0 to 1, over the patches of what the model saw, see `view`; on the CPU."""
    mask_hw: Tensor = field(repr=False)
    """bool: the patches that belong to the subjects."""
    view: View = field(repr=False)
    patch_size: tuple[float, float] = field(repr=False)
    """(height, width) of a patch in pixels of the model's image."""
    method: Method | Literal["alpha"]
    """"alpha": the photo itself says it, by what is transparent."""
    named: Named | None = None
    """What the photo shows, by a model whose classes have names."""
    patches_hw5: Tensor | None = field(default=None, repr=False)
    """What each patch of `heat_hw` says of its own object, of a model that was taught it, see `HeatPass.patch_boxes`;
    None where tiles were looked at, too."""
    count: int = 0
    """How many subjects there are by the decision, though fewer may have been asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorOptions:
    """What to look for, and how closely; see `localize`."""

    subjects: int | None = 1
    """Of a photo, at most; None for all."""
    threshold: float | None = None
    min_area: float = 0.0
    second_look: bool = False
    tiles: Tiles | int | None = None
    """(down, across), or how many along the shorter side, all square."""
    empty_below: float | None = None
    """Confidence of the best box, below which a photo is `none`; None for what the calibration says."""

    @property
    def times(self) -> tuple[int, int]:
        """(down, across): how many times the pixels of the model's image a photo is read with."""
        down, across = (self.tiles, self.tiles) if isinstance(self.tiles, int) else self.tiles or (1, 1)
        return (2 * down, 2 * across) if self.second_look else (down, across)


@dataclass(frozen=True, eq=False)
class Detector:
    """A model that finds subjects, by one method and with one set of options.

    On a CPU each photo goes through the model alone, in as many threads as torch has, so that what is found in it does
    not depend on the photos beside it.
    """

    loaded: Loaded
    method: Method
    calibration: Calibration
    options: DetectorOptions = DetectorOptions()
    uses_alpha: bool = False
    """Whether a photo's own transparency says where its subject is: where no method was asked for by name."""

    @classmethod
    def of(cls, loaded: Loaded, method: str = "auto", options: DetectorOptions | None = None) -> Self:
        """With the method decided, and the calibration that belongs to the model and the method."""
        loaded.preprocess.check_channels()
        used = resolve_method(loaded, method)
        if loaded.naming is not None:
            loaded.check_outputs("logits")
        own = None if loaded.subject is None or used != "subject" else loaded.subject.calibration
        calibration, options = own or GENERIC[used], options or DetectorOptions()
        if (least := options.empty_below) is not None:
            calibration = replace(calibration, nothing=least, sure=max(calibration.sure, least))
        return cls(loaded, used, calibration, options, uses_alpha=method == "auto")

    @property
    def is_calibrated(self) -> bool:
        """Whether confidences were fitted to what the model finds by the method; else they only rank photos."""
        subject = self.loaded.subject
        return self.method == "subject" and subject is not None and subject.calibration is not None

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    def __call__(self, photos: Sequence[Photo], batch_size: int = 32) -> list[Localization]:
        """Find the subjects of photos, in their order; `batch_size` is how many a GPU looks at together."""
        if self.device.type == "cpu":
            return self._each_alone(photos)
        found: list[Localization] = []
        for start in range(0, len(photos), batch_size):
            found += self._in_batch(photos[start : start + batch_size])
        return found

    def read(self, photo: Photo) -> Decoded:
        """Decode a photo with enough pixels for what it is looked at for."""
        return read(photo, self.loaded.preprocess, self.options.times)

    def look(self, images_BCHW: Tensor, views: Sequence[View]) -> list[Localization]:
        """What one look finds in images that the model takes, one view each."""
        seen = HeatPass(self.loaded, images_BCHW, [self.method])
        logits_BK = None if self.loaded.naming is None else seen.logits()
        return self.judge(seen.heat(self.method), views, logits_BK, seen.patch_boxes(self.method))

    def judge(
        self,
        heat_Bhw: Tensor,
        views: Sequence[View],
        logits_BK: Tensor | None = None,
        patches_Bhw5: Tensor | None = None,
    ) -> list[Localization]:
        """What these heat maps say, in the pixels of the photos that the views were made of.

        With logits, photos get the names that the model's classes have, if they have any; and with what the patches say
        of their objects (see `HeatPass.patch_boxes`) the boxes that these agree on.
        """
        each_hw5 = [None] * len(views) if patches_Bhw5 is None else patches_Bhw5.float().cpu()
        maps = zip(heat_Bhw.float().cpu(), each_hw5, views, strict=True)
        found = [self._from_one(heat_hw, own_hw5, view, self.options.min_area) for heat_hw, own_hw5, view in maps]
        if self.loaded.naming is None or logits_BK is None:
            return found
        return [
            self.with_name(each, name) for each, name in zip(found, self.loaded.naming.named(logits_BK), strict=True)
        ]

    def look_again(self, photos: Sequence[Decoded], found: Sequence[Localization]) -> list[Localization]:
        """The same with boxes from a second look at each, which has more pixels for what the first look found.

        Heat, mask, decision and confidence stay those of the first look. A box is kept as it was where the second look
        finds nothing that overlaps it by half.
        """
        places = [(index, subject) for index, each in enumerate(found) for subject in each.subjects]
        boxes: dict[int, list[Subject]] = {index: [] for index in range(len(found))}
        closer = replace(self, options=DetectorOptions(threshold=self.options.threshold))
        for start in range(0, len(places), LOOKS_AT_ONCE):
            part = places[start : start + LOOKS_AT_ONCE]
            looks = [
                look_at(photos[index], around(subject.box, photos[index].source_size), self.loaded.preprocess)
                for index, subject in part
            ]
            images_BCHW = torch.stack([image_CHW for image_CHW, _ in looks])
            seen = HeatPass(self.loaded, images_BCHW, [self.method])
            heat_Bhw, patches_Bhw5 = seen.heat(self.method), seen.patch_boxes(self.method)
            again = closer.judge(heat_Bhw, [view for _, view in looks], patches_Bhw5=patches_Bhw5)
            for (index, subject), each in zip(part, again, strict=True):
                fits = each.subjects and each.subjects[0].box.iou(subject.box) >= LIKE_THE_FIRST
                boxes[index].append(replace(subject, box=each.subjects[0].box) if fits else subject)
        return [replace(each, subjects=tuple(boxes[index])) for index, each in enumerate(found)]

    def with_name(self, found: Localization, named: Named) -> Localization:
        """With what the photo is called; where that is something that moves, it is not empty, though nothing stands
        out, and where it is `empty`, its boxes are believed as far as it may be wrong about that.

        Classes of which each moves say of every photo that something does: such names prove nothing.
        """
        found, groups = replace(found, named=named), self.loaded.groups
        if groups is None:
            return found
        if named.group == EMPTY and named.group_confidence is not None:
            left = 1 - min(1.0, named.group_confidence)
            subjects = tuple(replace(each, confidence=left * each.confidence) for each in found.subjects)
            confidence = left * found.confidence
            decision = by_confidence(confidence, self.calibration)
            return replace(found, subjects=subjects, confidence=confidence, decision=decision)
        # Where the user says from when on a photo is empty, that is what counts.
        missed = self.options.empty_below is None and found.decision == "none" and bool(found.subjects)
        missed = missed and named.group in MOVING
        return replace(found, decision="unsure") if missed and not {*groups.names} <= {*MOVING} else found

    def heat(self, images_BCHW: Tensor) -> Tensor:
        """heat_Bhw of images that the model takes."""
        return HeatPass(self.loaded, images_BCHW, [self.method]).heat(self.method)

    def _each_alone(self, photos: Sequence[Photo]) -> list[Localization]:
        threads = torch.get_num_threads()
        if len(photos) == 1 or threads == 1:
            return [self._in_batch([photo])[0] for photo in photos]
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return [found for (found,) in pool.map(self._in_batch, ([photo] for photo in photos))]
        finally:
            torch.set_num_threads(threads)  # what threads to come begin with

    def _in_batch(self, photos: Sequence[Photo]) -> list[Localization]:
        decoded = [self.read(photo) for photo in photos]
        if self.options.tiles is not None:
            found = [self._in_tiles(photo, self.options.tiles) for photo in decoded]
        else:
            found = []
            for images_BCHW, views in _of_one_size([self.loaded.preprocess(photo) for photo in decoded]):
                found += self.look(images_BCHW, views)
        if self.options.second_look:
            found = self.look_again(decoded, found)
        return [self.by_alpha(each, photo.alpha) for each, photo in zip(found, decoded, strict=True)]

    def by_alpha(self, found: Localization, alpha: Alpha | None) -> Localization:
        """What was found, or, of a photo with a transparent background, what is in front of it, and its name."""
        if alpha is None or not self.uses_alpha:
            return found
        h, w = found.heat_hw.shape
        (down, across), (height, width) = found.patch_size, found.view.source_size
        levels = alpha.levels
        shown = found.view.to_source(Box(0, 0, w * across, h * down))
        shown = shown.scaled((levels.height / height, levels.width / width))
        ends = shown.to_ints()
        # What the model sees beside the photo shows nothing.
        part = levels.crop(ends).resize(
            (w, h),
            Image.Resampling.BOX,
            (shown.left - ends[0], shown.top - ends[1], shown.right - ends[0], shown.bottom - ends[1]),
        )
        heat_hw = torch.from_numpy(np.asarray(part, np.float32) / 255)
        return replace(
            found,
            subjects=(Subject(alpha.box, 1.0, 1.0),),
            decision="subject",
            confidence=1.0,
            heat_hw=heat_hw,
            mask_hw=heat_hw >= 0.5,
            method="alpha",
            patches_hw5=None,
            count=1,
        )

    def _in_tiles(self, photo: Decoded, tiles: Tiles | int) -> Localization:
        """Find the subjects of one photo in overlapping tiles, see `Mosaic`, and in the whole of it.

        Each tile is looked at as a photo of its own, and what its border cuts off is left to the others. What the whole
        photo is sure of comes first, since of a large subject a tile shows a part; else the find with the most
        confidence does. The others follow by their confidence; of the tiles' finds those that are sure, and none at all
        that is less than `nothing`. The heat of all looks is joined to one map, see `Mosaic`.
        """
        loaded, calibration = self.loaded, self.calibration
        most, min_area = self.options.subjects, self.options.min_area
        model_size = loaded.preprocess.config.image_size
        mosaic = Mosaic(tiles, loaded.config.grid_for(model_size), photo.source_size)
        height, width = photo.source_size
        parts = [Box(0, 0, width, height), *mosaic.boxes(photo.source_size)]
        maps: list[tuple[Tensor, Tensor | None]] = []
        views, named = [], None
        for start in range(0, len(parts), LOOKS_AT_ONCE):
            seen = [look_at(photo, part, loaded.preprocess) for part in parts[start : start + LOOKS_AT_ONCE]]
            heat_pass = HeatPass(loaded, torch.stack([image_CHW for image_CHW, _ in seen]), [self.method])
            patches_Bhw5 = heat_pass.patch_boxes(self.method)
            each_hw5 = [None] * len(seen) if patches_Bhw5 is None else patches_Bhw5.float().cpu()
            maps += zip(heat_pass.heat(self.method).float().cpu(), each_hw5, strict=True)
            views += [view for _, view in seen]
            if not start and loaded.naming is not None:
                named = loaded.naming.named(heat_pass.logits()[:1])[0]  # by the whole photo
        whole = self._from_one(*maps[0], views[0], min_area)
        sure = whole.decision in ("subject", "several")
        best, others = whole.subjects[:1], whole.subjects[1:]
        first = [*best, *(each for each in others if self._is_sure(each))] if sure else []
        small = [
            subject
            for part, tile, view in zip(parts[1:], maps[1:], views[1:], strict=True)
            # What lies beside a find in its tile may be a part of what the whole photo shows.
            for subject in self._from_one(*tile, view, 0.0, alone=most != 1).subjects
            if not cut_off(subject.box, part, photo.source_size) and subject.box.area >= min_area * height * width
        ]
        small.sort(key=lambda subject: -subject.confidence)
        # Every tile has something that is warmer than the rest of it.
        small = [each for place, each in enumerate(small) if self._is_sure(each) or not (place or sure)]
        further = [*(each for each in whole.subjects if each not in first), *small]
        subjects = _apart(first, sorted(further, key=lambda subject: -subject.confidence))
        # The best one stays, so that a photo has a box whatever its decision says.
        subjects = [each for place, each in enumerate(subjects) if not place or each.confidence >= calibration.nothing]
        several = sum(map(self._is_sure, subjects[:most])) > 1
        # What is looked for in so many places is found by chance so many times as often.
        subjects = [
            replace(each, confidence=with_odds(each.confidence, 1 / (len(parts) - 1))) if each in small else each
            for each in subjects
        ]
        subjects = [*subjects[: len(first)], *sorted(subjects[len(first) :], key=lambda each: -each.confidence)][:most]
        confidence = subjects[0].confidence if subjects else 0.0
        decision = whole.decision if sure else by_confidence(confidence, calibration)
        if several and decision == "subject":
            decision = "several"
        found = replace(
            whole,
            subjects=tuple(subjects),
            decision=decision,
            confidence=confidence,
            heat_hw=mosaic.joined(torch.stack([heat_hw for heat_hw, _ in maps[1:]]), maps[0][0]),
            mask_hw=mosaic.covered([each.box for each in subjects], photo.source_size),
            view=mosaic.view(photo, whole.patch_size),
            patches_hw5=None,
            count=max(2, sum(map(self._is_sure, subjects))) if decision == "several" else int(decision != "none"),
        )
        return found if named is None else self.with_name(found, named)

    def _is_sure(self, subject: Subject) -> bool:
        return subject.confidence >= self.calibration.sure

    def _from_one(
        self, heat_hw: Tensor, patches_hw5: Tensor | None, view: View, min_area: float, *, alone: bool = False
    ) -> Localization:
        """`alone` says that regions do not speak against each other's subjects, as where there are several."""
        levels_hw, patch_size = heat_hw.numpy(), self.loaded.config.patch_pixels(view.model_size)
        said_hw5 = None if patches_hw5 is None else patches_hw5.numpy()
        options = self.options

        def in_photo(region: Region) -> Box:
            (x0, y0, x1, y1), (down, across) = region.box, patch_size
            return view.to_source(Box(x0 * across, y0 * down, x1 * across, y1 * down))

        # A box without area lies in what was added around the photo.
        regions, apart = (
            [region for region in each if in_photo(region).area > 0]
            for each in regions_by(self.method, levels_hw, options.subjects, options.threshold, min_area, said_hw5)
        )
        decision, confidence = decide(levels_hw, regions, apart, self.calibration)
        alone = alone or decision == "several"
        sure = confidences(levels_hw, regions, apart, self.calibration, alone=alone)
        mask_hw = np.logical_or.reduce([region.mask_hw for region in regions], initial=False)
        return Localization(
            subjects=tuple(
                Subject(in_photo(region), region.score, each) for region, each in zip(regions, sure, strict=True)
            ),
            decision=decision,
            confidence=confidence,
            heat_hw=heat_hw,
            mask_hw=torch.from_numpy(np.broadcast_to(mask_hw, levels_hw.shape).copy()),
            view=view,
            patch_size=patch_size,
            method=self.method,
            patches_hw5=patches_hw5,
            count=count_subjects(levels_hw, decision, apart, self.calibration),
        )


@overload  # a path is a sequence, too, of letters: the first that fits is taken
def localize(  # type: ignore[overload-overlap]
    photos: Photo,
    model: str | os.PathLike[str] | Loaded | Runs = ...,
    method: str = ...,
    *,
    subjects: int | Literal["all"] = ...,
    threshold: float | None = ...,
    min_area: float = ...,
    second_look: bool = ...,
    tiles: tuple[int, int] | int | None = ...,
    device: str | torch.device | None = ...,
    batch_size: int = ...,
) -> Localization: ...


@overload
def localize(
    photos: Sequence[Photo],
    model: str | os.PathLike[str] | Loaded | Runs = ...,
    method: str = ...,
    *,
    subjects: int | Literal["all"] = ...,
    threshold: float | None = ...,
    min_area: float = ...,
    second_look: bool = ...,
    tiles: tuple[int, int] | int | None = ...,
    device: str | torch.device | None = ...,
    batch_size: int = ...,
) -> list[Localization]: ...


def localize(
    photos: Photo | Sequence[Photo],
    model: str | os.PathLike[str] | Loaded | Runs = "default",
    method: str = "auto",
    *,
    subjects: int | Literal["all"] = 1,
    threshold: float | None = None,
    min_area: float = 0.0,
    second_look: bool = False,
    tiles: tuple[int, int] | int | None = None,
    device: str | torch.device | None = None,
    batch_size: int = 32,
) -> Localization | list[Localization]:
    """Find the subjects of a photo (a path, a file's bytes, a Pillow image, an array HWC uint8, or what `decode` gave).

    Several photos give a list, in their order. `model` is what `load` takes, or gave, or what `load_engine` gave.
    `subjects` is how many of a photo are wanted at most, or "all". `threshold` is the least heat of a subject's patch
    (None: from the map itself) and `min_area` the share of the frame that a box covers at least. `second_look` looks
    once more at each found box, with more pixels; `tiles` looks at overlapping parts of the photo besides the whole,
    for subjects that are small in large photos: so many square ones along its shorter side, or (down, across).
    """
    options = DetectorOptions(
        subjects=_most(subjects),
        threshold=threshold,
        min_area=min_area,
        second_look=second_look,
        tiles=_tiles(tiles),
    )
    if batch_size < 1:
        raise PatchlightError(f"batch_size={batch_size} must be 1 or more")
    several, one = listed(photos)
    found = Detector.of(load_or_given(model, device), method, options)(several, batch_size)
    return found[0] if one else found


def _apart(first: Sequence[Subject], further: Sequence[Subject]) -> list[Subject]:
    """The first ones, and those of the further ones that show neither a part of one before nor again the same."""
    chosen = list(first)
    for subject in further:
        shared = [subject.box.intersection(other.box).area for other in chosen]
        smaller = [min(subject.box.area, other.box.area) for other in chosen]
        if all(area < SAME_SUBJECT * least for area, least in zip(shared, smaller, strict=True)):
            chosen.append(subject)
    return chosen


def read(
    photo: Photo, preprocess: Preprocess, times: tuple[int, int] = (1, 1), max_pixels: int = MAX_PIXELS
) -> Decoded:
    """Decode a photo with enough pixels for the model, or (down, across) times as many."""
    config = preprocess.config
    height, width = config.scaled_size
    fast_size = None if config.resize == "none" else (times[0] * height, times[1] * width)
    return decode(photo, fast_size=fast_size, max_pixels=max_pixels)


def regions_by(
    method: Method,
    heat_hw: npt.NDArray[np.floating],
    most: int | None = 1,
    threshold: float | None = None,
    min_area: float = 0.0,
    patches_hw5: npt.NDArray[np.floating] | None = None,
) -> tuple[list[Region], list[Region]]:
    """The regions of a method's map that answer, `most` of them, and all that it has, see `decide`."""
    if patches_hw5 is not None:
        apart = agreed_regions(heat_hw, patches_hw5, threshold=threshold, min_area=min_area)
        return apart[:most], apart
    edges: Edges = "coverage" if method == "subject" else "crossing"
    if threshold is None:
        threshold = threshold_for(method, heat_hw)
    apart = regions_of(heat_hw, threshold=threshold, most=None, min_area=min_area, edges=edges)
    if most != 1 or (len(apart) == 1 and not min_area):  # with one region there is nothing to join
        return apart[:most], apart
    return regions_of(heat_hw, threshold=threshold, most=1, min_area=min_area, edges=edges), apart


def threshold_for(method: Method, heat_hw: npt.NDArray[np.floating]) -> float | None:
    """The least heat of a subject's patch; None where the map's hottest patches say it, see `boxes.own_threshold`.

    A cut has its two sides on either side of 0.5. Attention is shared out among all patches, so that its mean is what
    each would get if the photo showed nothing.
    """
    match method:
        case "lost" | "tokencut" | "features":
            return 0.5
        case "cls" | "rollout":
            return float(heat_hw.mean())
        case _:
            return None


def _of_one_size(prepared: Sequence[tuple[Tensor, View]]) -> Iterator[tuple[Tensor, list[View]]]:
    """Runs of images that have the same size, as batches; without a crop, photos come in several."""
    start = 0
    for end in range(1, len(prepared) + 1):
        if end == len(prepared) or prepared[end][0].shape != prepared[start][0].shape:
            images, views = zip(*prepared[start:end], strict=True)
            yield torch.stack(images), list(views)
            start = end


def _most(subjects: object) -> int | None:
    if subjects == "all":
        return None
    if type(subjects) is not int or subjects < 1:
        raise PatchlightError(f"subjects={subjects!r} is not known; it is a whole number from 1, or 'all'")
    return subjects


def _tiles(tiles: object) -> Tiles | int | None:
    if tiles is None:
        return None
    pair = (tiles, tiles) if type(tiles) is int else tiles
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int and 1 <= n <= MOST_TILES for n in pair)):
        raise PatchlightError(
            f"tiles={tiles!r} is not known; it is a number from 1 to {MOST_TILES}, or (down, across) of such"
        )
    return tiles if isinstance(tiles, int) else pair
