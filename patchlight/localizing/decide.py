"""Whether a box can be trusted: a few plain measures of the heat map, one confidence, and a decision.

    subject   one thing stands out, and its box can be relied on
    several   more than one does, and each would stand alone
    unsure    something stands out, and its box may well be wrong
    none      there is nothing

The confidence is that the box, the first of several, overlaps a subject's by half or more (intersection over union);
other regions speak against it, unless the decision is that they are subjects of their own. It is a logistic model of
the measures, whose few numbers belong to the model that made the heat: `config.Calibration`, which
`python benchmarks/localize.py MODEL --calibrate --write` fits and stores. Models without one get `GENERIC`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from patchlight.config import Calibration
from patchlight.localizing.boxes import Region
from patchlight.localizing.heat import Method

Decision = Literal["subject", "several", "unsure", "none"]


@dataclass(frozen=True, slots=True)
class Measures:
    """What says how far a region of a heat map can be trusted; each is about 0 to 1."""

    mean: float
    """The mean heat of its patches."""
    peak: float
    """The heat of its hottest patch."""
    sharpness: float
    """How much hotter its patches are than those around it (next to it, diagonals included)."""
    outside: float
    """The share of the map's heat that lies in no region."""
    others: float
    """The heat of the other regions, as a share of the heat of all."""
    size: float
    """The side of a square as large as its box, as a share of the frame."""
    touching: float
    """The share of the frame's four sides that its patches touch."""
    fit: float
    """How well its box is expected to fit, by the patches that say so; 0 of other models."""


NAMES = tuple(field.name for field in fields(Measures))
"""Of the measures, in the order of a calibration's weights."""


def measure(heat_hw: npt.NDArray[np.floating], region: Region, regions: Sequence[Region] = ()) -> Measures:
    """The measures of a region. `regions` are all of the map's: those that are no part of it speak against it."""
    mask_hw = region.mask_hw
    others = [other for other in regions if not (other.mask_hw & mask_hw).any()]
    beside_hw = np.logical_or.reduce([other.mask_hw for other in others], initial=False) & ~mask_hw
    inside, beside = float(heat_hw[mask_hw].sum()), float(heat_hw[beside_hw].sum())
    ring_hw = _grown(mask_hw) & ~mask_hw
    mean = inside / mask_hw.sum()
    x0, y0, x1, y1 = region.box
    touched = [side.any() for side in (mask_hw[0], mask_hw[-1], mask_hw[:, 0], mask_hw[:, -1])]
    return Measures(
        mean=float(mean),
        peak=float(heat_hw[mask_hw].max()),
        sharpness=float(mean - heat_hw[ring_hw].mean()) if ring_hw.any() else 0.0,
        outside=max(0.0, 1 - (inside + beside) / float(heat_hw.sum())),
        others=beside / (inside + beside),
        size=math.sqrt(max(0.0, x1 - x0) * max(0.0, y1 - y0) / heat_hw.size),
        touching=float(np.mean(touched)),
        fit=region.fit,
    )


_UNSCALED = Calibration(
    bias=-4.5, mean=-2.0, sharpness=6.0, outside=-1.0, others=-3.3, size=6.4, touching=-3.0, sure=0.75, nothing=0.1
)
GENERIC: dict[Method, Calibration] = {
    "subject": Calibration(
        bias=-11.0, mean=13.0, sharpness=3.0, outside=-3.0, others=-4.0, size=2.0, touching=-2.0, sure=0.75, nothing=0.1
    ),
    "cls": _UNSCALED,
    "rollout": _UNSCALED,
    "lost": _UNSCALED,
    "tokencut": _UNSCALED,
    "features": _UNSCALED,
}
"""For models without a calibration of their own: rounded fits on one small model, a start and no promise.

Heat that is the share of a patch which the subject covers says by itself how sure the model is. The maps of the other
methods are each scaled to their own most, so that one which shows nothing looks as hot as any: their one rule trusts
large regions with sharp borders that keep off the frame, and is sure of few.
"""


def confidence_of(measures: Measures, calibration: Calibration) -> float:
    """That the box of a region with these measures overlaps the subject's by half or more, 0 to 1."""
    score = calibration.bias + sum(getattr(calibration, name) * getattr(measures, name) for name in NAMES)
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, score))))


def decide(
    heat_hw: npt.NDArray[np.floating], regions: Sequence[Region], apart: Sequence[Region], calibration: Calibration
) -> tuple[Decision, float]:
    """The decision, and the confidence in the first region's box; of several, if the others are subjects, too.

    `regions` are those that were answered, best first, and `apart` all regions of the map where several subjects are
    looked for: there a deer in two pieces may be two, while one subject that is asked for takes its pieces together.

    Where the boxes beside the first have a calibration of their own, that says whether they are subjects, too.
    """
    if not regions:
        return "none", 0.0
    confidence = confidence_beside(heat_hw, regions[0], apart, calibration)
    further = calibration.further
    if further is not None:
        others = (confidence_beside(heat_hw, region, apart, further) for region in apart[1:])
        if confidence >= calibration.sure and any(each >= further.sure for each in others):
            return "several", confidence
    elif len(apart) > 1:
        alone = [confidence_alone(heat_hw, region, apart, calibration) for region in apart]
        if sum(each >= calibration.sure for each in alone) > 1:
            return "several", confidence_alone(heat_hw, regions[0], apart, calibration)
    return by_confidence(confidence, calibration), confidence


def count_subjects(
    heat_hw: npt.NDArray[np.floating], decision: Decision, apart: Sequence[Region], calibration: Calibration
) -> int:
    """How many subjects a map shows by this decision about it, whether or not all of them were asked for."""
    if decision != "several":
        return int(decision != "none")
    further = calibration.further
    if further is not None:
        return 1 + sum(confidence_beside(heat_hw, each, apart, further) >= further.sure for each in apart[1:])
    return sum(confidence_alone(heat_hw, each, apart, calibration) >= calibration.sure for each in apart)


def by_confidence(confidence: float, calibration: Calibration) -> Decision:
    """The decision about one box."""
    if confidence >= calibration.sure:
        return "subject"
    return "unsure" if confidence >= calibration.nothing else "none"


def with_odds(confidence: float, factor: float) -> float:
    """A confidence whose odds are so many times as high."""
    odds = factor * confidence
    return odds / (1 - confidence + odds) if odds else 0.0


def confidences(
    heat_hw: npt.NDArray[np.floating],
    regions: Sequence[Region],
    apart: Sequence[Region],
    calibration: Calibration,
    *,
    alone: bool,
) -> list[float]:
    """The confidence in each region that was answered, best first; `alone`: the others do not speak against it."""
    if calibration.further is not None:
        own = [calibration, *[calibration.further] * len(regions)]
        pairs = zip(regions, own, strict=False)
        return [confidence_beside(heat_hw, region, apart, its_own) for region, its_own in pairs]
    trust = confidence_alone if alone else confidence_beside
    return [trust(heat_hw, region, apart, calibration) for region in regions]


def confidence_beside(
    heat_hw: npt.NDArray[np.floating], region: Region, regions: Sequence[Region], calibration: Calibration
) -> float:
    """The confidence in a region, against which the others speak."""
    return confidence_of(measure(heat_hw, region, regions), calibration)


def confidence_alone(
    heat_hw: npt.NDArray[np.floating], region: Region, regions: Sequence[Region], calibration: Calibration
) -> float:
    """The confidence in a region if the others are subjects of their own, and do not speak against it."""
    return confidence_of(replace(measure(heat_hw, region, regions), others=0.0), calibration)


def _grown(mask_hw: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The mask and every patch next to it, diagonals included."""
    padded = np.pad(mask_hw, 1)
    height, width = mask_hw.shape
    return np.logical_or.reduce([padded[y : y + height, x : x + width] for y in range(3) for x in range(3)])
