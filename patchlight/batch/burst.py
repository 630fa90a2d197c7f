"""Camera traps: what in the frames of one camera never moves.

A stump that lights up in every frame is not an animal. Where the picture does not differ from the scene's background,
and the heat is there in nearly every frame, the heat is taken away; what moves keeps it.

Bursts (a gap of a minute at most) are what a report counts as one visit. The background is better taken from a longer
sequence: in the three frames of one burst a deer that stands still looks as static as a stump, and that is why little
is taken away on the word of a few frames, or of a few seconds (see `evidence`).

T is frames here, in the order of their time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from patchlight.errors import PatchlightError
from patchlight.localizing.boxes import label_regions
from patchlight.localizing.decide import Decision

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

LEAST_FRAMES = 3
"""From which a background can be told: with fewer, nothing says which of two frames is the empty one."""

SURE_FRAMES = 5
SURE_SECONDS = 120.0
"""From which on what is static is taken away whole: animals stand still, but not for so long."""

NIGHT_CHROMA = 0.012
"""Mean difference of a picture's colours, 0 to 1, below which it was taken by infrared light."""

LEAST_CHANGE = 0.06
"""Of a pixel's brightness, 0 to 1. Less is noise, JPEG or a cloud."""

NOISE_FACTOR, MOST_NOISE = 4.0, 0.1
"""A change is so many times what a pixel does anyway, as grass in the wind; what does more than this is not a scene."""

SAME_SCENE = 0.5
"""How far the middling pixel of a frame is off the background, as a share of how far it is off an even grey, at most:
photos of several scenes in one folder have no background."""

PATCH_SHARES = 0.05, 0.25
"""Share of a patch's pixels that have to change: up to the first it is unchanged, from the second on changed."""

ABSENT_SHARE = 0.2
"""Of the frames, in which heat that is there in "nearly every frame" may be missing; none, for fewer than 6."""

REGION_CHANGE = 0.5
"""The share of a warm region that has to change for all of it to count as changed: an animal that moves by less than
its length leaves its middle looking much the same."""

REGION_STATIC = 0.3, 0.7
"""The share of a warm region whose heat is there in nearly every frame: up to the first nothing of it is static, since
only the places overlap where an animal was, from the second on all."""

MOVED_SHARE = 0.01
"""Of the frame that the box around what changed covers at least, to be given for something that moved."""

FARTHEST_SHIFT = 2
"""Pixels of a thumbnail by which a camera on a swaying tree may be off."""


def is_night(thumb_HWC: npt.NDArray[Any]) -> bool:
    """Whether a picture has no colours, as one that was taken by infrared light; an even tint is none."""
    levels_HWC = _levels(thumb_HWC)
    chroma_HW2 = levels_HWC[..., [0, 2]] - levels_HWC[..., [1]]
    return bool(np.abs(chroma_HW2 - np.median(chroma_HW2, axis=(0, 1))).mean() < NIGHT_CHROMA)


@dataclass(frozen=True)
class Background:
    """The scene without what moves in it, from frames of one kind of light."""

    heat_hw: Floats
    """The heat that is there in nearly every frame, or in nearly every one where nothing moves, if most are such."""
    changed_THW: Bools
    """Which pixels of each frame differ from the background, by more than they do anyway."""

    @classmethod
    def of(cls, heats_Thw: npt.NDArray[Any], thumbs_THWC: npt.NDArray[Any]) -> Self:
        levels_THWC = np.stack([_levels(thumb_HWC) for thumb_HWC in thumbs_THWC])
        # The scene is the median of the frames, each shifted into place and made as bright as the others:
        # first all as bright as the frame of middling brightness, then, where the scene is known, as bright as that.
        middle = int(np.argsort(np.median(levels_THWC, axis=(1, 2, 3)), kind="stable")[len(levels_THWC) // 2])
        scene_HWC = levels_THWC[middle]
        for _ in range(2):
            levels_THWC = np.stack([_fitted(_aligned(frame, scene_HWC), scene_HWC) for frame in levels_THWC])
            scene_HWC = np.median(levels_THWC, axis=0)
        off_THW = np.abs(levels_THWC - scene_HWC).max(-1)
        # By how much a pixel is off as a rule. Leaves that sway do not stay in their pixels.
        noise_HW = _widest(1.4826 * np.median(off_THW, axis=0)).clip(max=MOST_NOISE)
        changed_THW = off_THW > np.maximum(LEAST_CHANGE, NOISE_FACTOR * noise_HW)
        contrast = np.median(np.abs(scene_HWC - np.median(scene_HWC, axis=(0, 1))).max(-1))
        changed_THW |= np.median(off_THW, axis=(1, 2), keepdims=True) > SAME_SCENE * contrast
        # A model that is sure of an animal may not look at the stump beside it: where nothing moves in most frames,
        # those tell best.
        quiet_T = _changed(changed_THW, heats_Thw.shape[1:]).max((1, 2)) < 0.5
        if quiet_T.sum() >= max(LEAST_FRAMES, len(quiet_T) / 2):
            heats_Thw = heats_Thw[quiet_T]
        heat_hw = np.quantile(heats_Thw, ABSENT_SHARE, axis=0, method="lower")
        return cls(heat_hw.astype(np.float32), changed_THW)

    def changed_hw(self, frame: int) -> Floats:
        """How much a frame's patches differ from the background: 0 not at all, 1 certainly."""
        return _changed(self.changed_THW[frame, None], self.heat_hw.shape)[0]


@dataclass(frozen=True)
class Judged:
    """What is left of a sequence's heat, and which of its frames show nothing but the scene."""

    heats_Thw: Floats
    unchanged_T: Bools
    """Nothing differs from the background, and there are enough frames to say so."""
    changed_Thw: Floats
    """How much patches differ from the background, see `Background.changed_hw`; 0 where there are not enough frames."""


def judge(
    heats_Thw: npt.NDArray[Any], thumbs_THWC: npt.NDArray[Any], *, times_T: Sequence[float | None] | None = None
) -> Judged:
    """Heat from 0 to 1 and pictures (uint8, or floats from 0 to 1) of one camera's frames, which show the same part.

    Heat goes where the picture is as the background and the heat is there in nearly every frame. Frames by day and
    by night have each their own background; of fewer than 3 of a kind nothing is changed. `times_T`, in seconds, says
    how long things have stood still; without it, the number of frames alone has to do.
    """
    heats_Thw, thumbs_THWC = _checked(heats_Thw, thumbs_THWC)
    left_Thw = heats_Thw.copy()
    unchanged_T = np.zeros(len(heats_Thw), np.bool_)
    changed_Thw = np.zeros_like(heats_Thw)
    night_T = np.array([is_night(thumb_HWC) for thumb_HWC in thumbs_THWC], np.bool_)
    for night in (False, True):
        members = np.flatnonzero(night_T == night).tolist()
        strength = evidence(len(members), None if times_T is None else [times_T[member] for member in members])
        if not strength:
            continue
        background = Background.of(heats_Thw[members], thumbs_THWC[members])
        for place, member in enumerate(members):
            changed_hw = background.changed_hw(place)
            static_hw = np.minimum(1, 1.5 * background.heat_hw / np.maximum(heats_Thw[member], 1e-6))
            static_hw *= (1 - changed_hw) * _regions_static(heats_Thw[member], changed_hw, static_hw)
            left_Thw[member] *= 1 - strength * static_hw
            if strength == 1:
                unchanged_T[member] = changed_hw.max() < 0.5
                changed_Thw[member] = changed_hw
    return Judged(left_Thw, unchanged_T, changed_Thw)


def evidence(frames: int, times: Sequence[float | None] | None = None) -> float:
    """How far to believe that what did not move never does, 0 to 1: by the number of frames and the time between."""
    if frames < LEAST_FRAMES:
        return 0.0
    strength = min(1.0, (frames - LEAST_FRAMES + 1) / (SURE_FRAMES - LEAST_FRAMES + 1))
    known = [time for time in times if time is not None] if times is not None else []
    if len(known) >= 2:
        strength *= min(1.0, (max(known) - min(known)) / SURE_SECONDS)
    return strength


def settle(decision: Decision, unchanged: bool) -> Decision:
    """A frame's decision, once it is known whether anything in it differs from the scene: an empty one has none."""
    return "none" if unchanged and decision == "unsure" else decision


def _changed(changed_THW: Bools, grid: tuple[int, ...]) -> Floats:
    """How much the patches of frames differ from the background, by their pixels that do: 0 not at all, 1 certainly."""
    shares_Thw = np.stack([_means(changed_HW.astype(np.float32), grid) for changed_HW in changed_THW])
    least, most = PATCH_SHARES
    return ((shares_Thw - least) / (most - least)).clip(0, 1).astype(np.float32)


def _regions_static(heat_hw: Floats, changed_hw: Floats, static_hw: Floats) -> Floats:
    """For the patches of each warm region, how far the region as a whole is static, 0 to 1; 1 outside of them."""
    result_hw = np.ones_like(changed_hw)
    labels_hw, count = label_regions((heat_hw >= 0.5 * heat_hw.max()) & (heat_hw > 0))
    least, most = REGION_STATIC
    for label in range(1, count + 1):
        region_hw = labels_hw == label
        unchanged = 1 - float(changed_hw[region_hw].mean()) / REGION_CHANGE
        static = (float(static_hw[region_hw].mean()) - least) / (most - least)
        result_hw[region_hw] = max(0.0, unchanged) * min(1.0, max(0.0, static))
    return result_hw


def _aligned(frame_HWC: Floats, scene_HWC: Floats) -> Floats:
    """The frame shifted by a pixel or two to where it fits the scene best; as it is, unless that is clearly better."""
    reach = FARTHEST_SHIFT
    if min(frame_HWC.shape[:2]) < 8 * reach:
        return frame_HWC
    inner = slice(reach, -reach)
    scene_HW = _contrast(scene_HWC)[inner, inner]
    frame_HW = _contrast(frame_HWC)
    height, width = scene_HW.shape

    def misfit(down: int, right: int) -> float:
        # What moved in the frame is a small part, on which a mean of square roots does not dwell.
        moved_HW = frame_HW[reach + down :, reach + right :][:height, :width]
        return float(np.sqrt(np.abs(moved_HW - scene_HW)).mean())

    steps = range(-reach, reach + 1)
    down, right = min(((y, x) for y in steps for x in steps), key=lambda step: misfit(*step))
    if misfit(down, right) > 0.85 * misfit(0, 0):
        return frame_HWC
    padded_HWC = np.pad(frame_HWC, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    size = frame_HWC.shape
    return padded_HWC[reach + down :, reach + right :][: size[0], : size[1]]


def _contrast(levels_HWC: Floats) -> Floats:
    """Grey, with the brightness and the contrast of the exposure taken out."""
    grey_HW = levels_HWC.mean(-1)
    grey_HW = grey_HW - np.median(grey_HW)
    return grey_HW / max(float(np.abs(grey_HW).mean()), 1e-3)


def _fitted(frame_HWC: Floats, scene_HWC: Floats) -> Floats:
    """gain * frame + offset of each colour, as it fits those pixels of the scene that have not changed."""
    fitted = frame_HWC.copy()
    for colour in range(frame_HWC.shape[-1]):
        x_P, y_P = frame_HWC[..., colour].ravel(), scene_HWC[..., colour].ravel()
        # The first guess is by the whole; then the worst fitting pixels are left out, where something may have moved.
        gain, offset = _line(np.sort(x_P), np.sort(y_P))
        for _ in range(4):
            off_P = np.abs(gain * x_P + offset - y_P)
            kept_P = off_P <= np.quantile(off_P, 0.6)
            gain, offset = _line(x_P[kept_P], y_P[kept_P])
        fitted[..., colour] = gain * frame_HWC[..., colour] + offset
    return fitted


def _line(x_P: Floats, y_P: Floats) -> tuple[float, float]:
    spread = float(x_P.var())
    gain = float(((x_P - x_P.mean()) * (y_P - y_P.mean())).mean()) / spread if spread > 1e-6 else 1.0
    gain = min(4.0, max(0.25, gain))  # no camera's exposure is off by more, and a flat picture would lead anywhere
    return gain, float(y_P.mean()) - gain * float(x_P.mean())


def _widest(values_HW: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Of each pixel and its eight neighbours, the most."""
    padded = np.pad(values_HW, 1, mode="edge")
    height, width = values_HW.shape
    shifts = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
    most: npt.NDArray[Any] = np.max(shifts, axis=0)
    return most


def _means(values_HW: Floats, grid: tuple[int, ...]) -> Floats:
    """Means over the patches of a grid (h, w); those at pixels that two patches share count for both in their part."""
    down, across = _shares(grid[0], values_HW.shape[0]), _shares(grid[1], values_HW.shape[1])
    return np.asarray(down @ values_HW @ across.T, np.float32)


def _shares(patches: int, pixels: int) -> Floats:
    """(patches, pixels): the part of each patch's length that each pixel takes."""
    edges = np.linspace(0, pixels, patches + 1)
    starts = np.arange(pixels)
    shared = np.minimum(edges[1:, None], starts + 1) - np.maximum(edges[:-1, None], starts)
    return (shared.clip(0) * patches / pixels).astype(np.float32)


def _levels(thumb_HWC: npt.NDArray[Any]) -> Floats:
    """0 to 1, three colours."""
    levels = thumb_HWC.astype(np.float32)
    if thumb_HWC.dtype == np.uint8:
        levels /= 255
    return levels.repeat(3, -1) if levels.shape[-1] == 1 else levels


def _checked(heats_Thw: Any, thumbs_THWC: Any) -> tuple[Floats, npt.NDArray[Any]]:
    heats_Thw, thumbs_THWC = np.asarray(heats_Thw, np.float32), np.asarray(thumbs_THWC)
    if heats_Thw.ndim != 3 or thumbs_THWC.ndim != 4 or len(heats_Thw) != len(thumbs_THWC):
        raise PatchlightError(
            f"a sequence has heat maps (T, h, w) and as many pictures (T, H, W, C), not {heats_Thw.shape} "
            f"and {thumbs_THWC.shape}"
        )
    if thumbs_THWC.shape[-1] not in (1, 3):
        raise PatchlightError(f"pictures have 1 or 3 colours, not {thumbs_THWC.shape[-1]}")
    return heats_Thw, thumbs_THWC
