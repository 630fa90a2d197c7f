"""From a heat map to the boxes around what it lights up, with edges that are finer than the patches.

Coordinates are in patches of the map: the first patch covers 0 to 1, a map of w columns reaches from 0 to w.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from patchlight.errors import PatchlightError

Edges = Literal["coverage", "crossing"]

HOTTEST_SHARE = 0.02
"""Of a map's patches, whose mean heat is the level that a subject is measured by."""

OF_THE_HOTTEST = 0.6
"""The share of that level which a patch of the subject has at least."""

GAP_SHARE = 1 / 16
"""Of the map's longer side: the widest gap between two pieces of one subject."""

LEAST_PIECE = 0.1
"""The heat of a piece, as a share of the subject's that it is joined to. What is less is a speck."""

AGREE = 0.5
"""How far the boxes of two patches overlap that vote for the same object."""

VOTES_FROM = 0.5
"""The share of a warm patch's least heat with which a patch votes, too."""

MOST_PIECE = 0.5
"""Where several subjects are asked for: a piece with a larger share is a subject of its own."""


@dataclass(frozen=True)
class Region:
    """A part of a heat map that belongs together, and the box around it, xyxy in patches."""

    box: tuple[float, float, float, float]
    score: float
    """The mean heat of its patches."""
    mask_hw: npt.NDArray[np.bool_]
    fit: float = 0.0
    """How well its box is expected to fit (intersection over union), where patches say that."""


def regions_of(
    heat_hw: Any,
    *,
    threshold: float | None = None,
    most: int | None = 1,
    min_area: float = 0.0,
    edges: Edges = "coverage",
) -> list[Region]:
    """The warm regions of a map (h, w) from 0 to 1, those with the most heat first; none if nothing is above 0.

    `threshold` is the least heat of a warm patch; None takes it from the map, see `own_threshold`. `most` is how many
    are wanted, None for all. `min_area` is the share of the map that a box covers at least. With edges="coverage" the
    heat is the share of each patch that the subject covers, and says how far an edge reaches into its patch; with
    "crossing" an edge lies where the heat, drawn as lines between the patches' centres, crosses the threshold (for a
    map of zeros and ones and a threshold of 0.5 that is between the patches).
    """
    heat_hw = _checked(heat_hw)
    if most is not None and most < 1:
        raise PatchlightError(f"most={most} must be 1 or more, or None for all")
    if edges not in ("coverage", "crossing"):
        raise PatchlightError(f"edges={edges!r} is not known; it is 'coverage' or 'crossing'")
    if not 0 <= min_area <= 1:
        raise PatchlightError(f"min_area={min_area} is a share of the frame, from 0 to 1")
    threshold = own_threshold(heat_hw) if threshold is None else threshold
    labels_hw, count = label_regions((heat_hw >= threshold) & (heat_hw > 0))
    masks = [labels_hw == label for label in range(1, count + 1)]
    masks.sort(key=lambda mask_hw: -float(heat_hw[mask_hw].sum()))
    gap = max(1, round(GAP_SHARE * max(heat_hw.shape)))
    masks = _join_pieces(heat_hw, masks, gap, 1.0 if most == 1 else MOST_PIECE)
    regions = [
        Region(_box(heat_hw, mask_hw, threshold, edges), float(heat_hw[mask_hw].mean()), mask_hw) for mask_hw in masks
    ]
    return [region for region in regions if _area(region.box) >= min_area * heat_hw.size][:most]


def agreed_regions(
    heat_hw: Any, patches_hw5: npt.NDArray[np.floating], *, threshold: float | None = None, min_area: float = 0.0
) -> list[Region]:
    """The boxes that the patches of a map agree on, those with the most votes first; none if nothing is above 0.

    `patches_hw5` is what each patch says of its own object: the box, x0 y0 x1 y1 in shares of the map's sides, and how
    well it is expected to fit. Patches vote by their heat and by that for their box, and for those that overlap it by
    half: the box with the most votes is the first, as the mean of the boxes that voted for it, which then vote no
    more. `threshold` is the least heat of one of its patches.
    """
    heat_hw = _checked(heat_hw)
    h, w = heat_hw.shape
    threshold = own_threshold(heat_hw) if threshold is None else threshold
    patches_P5 = np.asarray(patches_hw5, np.float64).reshape(-1, 5)
    boxes_P4, fit_P, heat_P = patches_P5[:, :4] * (w, h, w, h), patches_P5[:, 4], heat_hw.ravel()
    voters_V = np.flatnonzero(heat_P >= max(VOTES_FROM * threshold, 1e-6))
    boxes_V4, heat_V, fit_V = boxes_P4[voters_V], heat_P[voters_V], fit_P[voters_V]
    agree_VV = _overlaps(boxes_V4, boxes_V4) >= AGREE
    votes_V = heat_V * fit_V
    left_V = np.ones(len(voters_V), np.bool_)
    regions: list[Region] = []
    while (warm_V := left_V & (heat_V >= threshold)).any():
        best = int(np.argmax(agree_VV @ (votes_V * left_V)))
        own_V = agree_VV[best] & left_V
        weight_V = votes_V * own_V
        total = float(weight_V.sum())
        left_V &= ~own_V
        if not total or not (own_V & warm_V).any():
            if not own_V.any():
                break
            continue
        box_4 = weight_V @ boxes_V4 / total
        mask_hw = np.zeros(h * w, np.bool_)
        mask_hw[voters_V[own_V & warm_V]] = True
        mask_hw = mask_hw.reshape(h, w)
        x0, y0, x1, y1 = (float(value) for value in box_4)
        regions.append(
            Region((x0, y0, x1, y1), float(heat_hw[mask_hw].mean()), mask_hw, float(weight_V @ fit_V / total))
        )
    return [region for region in regions if _area(region.box) >= min_area * heat_hw.size]


def own_threshold(heat_hw: npt.NDArray[np.float64]) -> float:
    """What a patch of the subject has at least, by the map's own hottest patches.

    A model that is less sure of a subject gives less heat to all of it, so that one threshold for all photos would
    cut off parts of those.
    """
    hottest = max(1, round(HOTTEST_SHARE * heat_hw.size))
    return OF_THE_HOTTEST * float(np.sort(heat_hw, axis=None)[-hottest:].mean())


def label_regions(mask_hw: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], int]:
    """Number the connected parts of a mask from 1, diagonal neighbours included: labels (h, w), and how many."""
    padded_hw = np.pad(mask_hw, ((0, 0), (1, 1)))
    rows, turns = np.nonzero(padded_hw[:, 1:] != padded_hw[:, :-1])
    # Row, start and end of each unbroken run of patches.
    runs = list(zip(rows[::2].tolist(), turns[::2].tolist(), turns[1::2].tolist(), strict=True))
    parent = list(range(len(runs)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    in_row: dict[int, list[int]] = {}
    for run, (row, start, end) in enumerate(runs):
        in_row.setdefault(row, []).append(run)
        for other in in_row.get(row - 1, ()):
            if runs[other][1] <= end and start <= runs[other][2]:
                parent[root(run)] = root(other)
    labels_hw = np.zeros(mask_hw.shape, np.int64)
    numbers: dict[int, int] = {}
    for run, (row, start, end) in enumerate(runs):
        labels_hw[row, start:end] = numbers.setdefault(root(run), len(numbers) + 1)
    return labels_hw, len(numbers)


def _join_pieces(
    heat_hw: npt.NDArray[np.float64], masks: list[npt.NDArray[np.bool_]], gap: int, most_piece: float
) -> list[npt.NDArray[np.bool_]]:
    """Regions, hottest first, in which pieces of one subject are one: a deer behind a trunk is in two."""
    whole: list[npt.NDArray[np.bool_]] = []
    for mask_hw in masks:
        heat = heat_hw[mask_hw].sum()
        for index, larger_hw in enumerate(whole):
            share = heat / heat_hw[larger_hw].sum()
            if LEAST_PIECE <= share <= most_piece and _gap(_around(mask_hw), _around(larger_hw)) <= gap:
                whole[index] = larger_hw | mask_hw
                break
        else:
            whole.append(mask_hw)
    return whole


def _box(
    heat_hw: npt.NDArray[np.float64], mask_hw: npt.NDArray[np.bool_], threshold: float, edges: Edges
) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = _around(mask_hw)
    heat_hw = np.where(mask_hw | (heat_hw < threshold), heat_hw, 0)  # other regions say nothing of this one's edges
    # The warmest patch of each row or column stands for it: an ear covers one patch of the row that it reaches into.
    across_w, down_h = heat_hw[y0:y1].max(0), heat_hw[:, x0:x1].max(1)

    def edge(profile: npt.NDArray[np.float64], first: int) -> float:
        return _covered_edge(profile, first) if edges == "coverage" else _crossing_edge(profile, first, threshold)

    width, height = len(across_w), len(down_h)
    left, right = _in_order(edge(across_w, x0), width - edge(across_w[::-1], width - x1), x0, x1)
    top, bottom = _in_order(edge(down_h, y0), height - edge(down_h[::-1], height - y1), y0, y1)
    return left, top, right, bottom


def _overlaps(one_N4: npt.NDArray[np.float64], other_M4: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Intersection over union of each box with each: (N, M)."""
    first_NM2 = np.maximum(one_N4[:, None, :2], other_M4[None, :, :2])
    last_NM2 = np.minimum(one_N4[:, None, 2:], other_M4[None, :, 2:])
    shared_NM = (last_NM2 - first_NM2).clip(0).prod(-1)
    area_N, area_M = ((boxes[:, 2:] - boxes[:, :2]).clip(0).prod(-1) for boxes in (one_N4, other_M4))
    either_NM = area_N[:, None] + area_M - shared_NM
    return np.asarray(shared_NM / np.maximum(either_NM, 1e-9))


def _in_order(start: float, end: float, first: int, last: int) -> tuple[float, float]:
    """Both ends, or those of whole patches where a faint subject within one patch has its ends the wrong way round."""
    return (start, end) if start < end else (float(first), float(last))


def _covered_edge(profile: npt.NDArray[np.float64], first: int) -> float:
    """Where a subject begins that covers these shares of the patches along a line, and is warm from `first` on.

    It lies in the first warm patch, or in the one before, where it covers too little of it to be warm.
    """
    before = float(profile[first - 1]) if first else 0.0
    return max(first + 1 - float(profile[first]) - before, 0.0)


def _crossing_edge(profile: npt.NDArray[np.float64], first: int, threshold: float) -> float:
    """Where the line between the centres of the first warm patch and the one before crosses the threshold."""
    if not first:
        return 0.0
    before, inside = float(profile[first - 1]), float(profile[first])
    return first - 0.5 + (threshold - before) / (inside - before)


def _around(mask_hw: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """The box of whole patches around a mask."""
    rows, columns = np.flatnonzero(mask_hw.any(1)), np.flatnonzero(mask_hw.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _gap(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> int:
    """Patches between two boxes, along the axis on which there are more; 0 if they touch or overlap."""
    return max(other[0] - one[2], one[0] - other[2], other[1] - one[3], one[1] - other[3], 0)


def _area(box: tuple[float, float, float, float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _checked(heat_hw: Any) -> npt.NDArray[np.float64]:
    if isinstance(heat_hw, torch.Tensor):
        heat_hw = heat_hw.detach().float().cpu().numpy()
    array = np.asarray(heat_hw, np.float64)
    if array.ndim != 2 or not array.size:
        raise PatchlightError(f"one heat map has rows and columns, (h, w); this has shape {tuple(array.shape)}")
    if not np.isfinite(array).all():
        raise PatchlightError("the heat map holds values that are not numbers; use float32, or check the weights")
    return array
