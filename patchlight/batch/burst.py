"""Camera traps: what in the frames of one camera is the scene, and what is new in a frame.

A stump that lights up at any time of day is not an animal, and what differs from the scene may be one, though the
model does not see it. What the scene is can be told by other times alone: the frames of one burst show a still deer
as they show a stump. So each burst is compared with the *other* bursts of its camera and its kind of light. Where
there are too few of those nothing is held against what the model finds; what moves within a burst counts all the same.

Pictures are compared by their texture, each pixel less the mean around it and in units of what is usual there: light
that changes, and soft shadows, leave that as it is.

T is frames here, in the order of their time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from patchlight.errors import PatchlightError
from patchlight.localizing.boxes import label_regions

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

LEAST_OTHERS = 3
"""Bursts, or frames of a burst, that a picture is compared with at least."""

MOST_OTHERS = 11
"""And at most, the nearest ones: enough to know what a place looks like."""

SURE_OTHERS, SURE_SECONDS = 4, 7200.0
"""Other bursts, and the time between the first and the last, from which on they say as much as they ever do: a deer may
lie still for an hour."""

OUTLIERS = 0.2
"""The share of other bursts, on either side, that say nothing of a pixel: they may show an animal."""

AROUND, USUAL = 8, 0.04
"""A pixel is compared with means over about five times so many pixels, in units of the usual difference, to which so
much of the brightness from black to white is added: noise on an even sky is no texture."""

SWAY = 1
"""Pixels by which leaves are off from frame to frame."""

FARTHEST_SHIFT = 8
"""Pixels by which a camera on a swaying tree may be off; frames are shifted back."""

SAME_SCENE = 0.3
"""The correlation of a frame with the scene from which on it shows the same at all."""

MOVED_FROM = 0.7
"""The difference from which on something is called new; what it comes to is in `sequences`."""

UNKNOWN_FROM = 1.5
"""Where the other bursts differ by more than this from each other, they do not say what a place looks like."""

PATCH_SHARES = 0.02, 0.15
"""Share of a patch's pixels that have to be new: up to the first it is unchanged, from the second on changed."""

REGION_CHANGE = 0.5
"""The share of a warm region that has to change for all of it to count as changed: an animal that moves by less than
its length leaves its middle looking much the same."""

REGION_STATIC = 0.3, 0.7
"""The share of a warm region whose heat is there at other times: up to the first nothing of it is the scene's, since
only the places overlap where an animal was, from the second on all."""


@dataclass(frozen=True)
class Moved:
    """The most that is new in a frame."""

    level: float
    """How far its texture is outside of what the place looks like at other times; see MOVED_FROM."""
    box: tuple[float, float, float, float]
    """x0, y0, x1, y1 as shares of the picture's sides."""


@dataclass(frozen=True)
class Judged:
    """What the frames of a sequence say of each other."""

    same_Thw: Floats
    """How far each patch looks as at other times, 0 to 1; 0 where that is not known."""
    static_Thw: Floats
    """How far its heat is the scene's: it looks the same, and is as warm in most of the other bursts."""
    strength_T: Floats
    """How far to believe that, 0 to 1: by the number of other bursts and the time that they span; 0 where there are too
    few."""
    bursts_T: npt.NDArray[np.int64]
    """How many other bursts a frame was compared with; 0 where there are too few."""
    moved_T: tuple[Moved | None, ...]
    """None where a frame has nothing to be compared with."""
    unchanged_T: Bools
    """Nothing is new against other bursts, which agree on what there is."""


def judge(
    heats_Thw: npt.NDArray[Any],
    pictures_THW: npt.NDArray[Any],
    *,
    bursts: Sequence[Any],
    night: Sequence[bool] | None = None,
    times: Sequence[float | None] | None = None,
) -> Judged:
    """Heat from 0 to 1 and grey pictures (uint8) of one camera's frames, which show the same part.

    `bursts` says by any values which frames were shot together, `night` which were taken by infrared light, and
    `times`, in seconds, how long the sequence took: without them no heat is ever the scene's.
    """
    heats_Thw, pictures_THW = _checked(heats_Thw, pictures_THW)
    count = len(heats_Thw)
    night_T = np.zeros(count, np.bool_) if night is None else np.array(night, np.bool_)
    same_Thw, static_Thw = np.zeros_like(heats_Thw), np.zeros_like(heats_Thw)
    strength_T = np.zeros(count, np.float32)
    bursts_T = np.zeros(count, np.int64)
    unchanged_T = np.zeros(count, np.bool_)
    moved: list[Moved | None] = [None] * count
    for kind in (False, True):
        members: dict[Any, list[int]] = {}
        for frame in np.flatnonzero(night_T == kind).tolist():
            members.setdefault(bursts[frame], []).append(frame)
        of_burst = list(members.values())
        frames_of_kind = [frame for frames in of_burst for frame in frames]
        textures = {frame: texture_of(pictures_THW[frame]) for frame in frames_of_kind}
        shifts = dict.fromkeys(textures, (0, 0))
        if frames_of_kind:
            first = _spectrum(textures[frames_of_kind[len(frames_of_kind) // 2]])
            for frame, texture_HW in textures.items():
                shifts[frame] = down, right = _shift(texture_HW, first)
                textures[frame] = texture_HW.roll((down, right), (0, 1))
        # Where some of the frames do not reach, nothing can be said.
        edge = max((abs(each) for shift in shifts.values() for each in shift), default=0)
        middles = [torch.stack([textures[frame] for frame in frames]).median(0).values for frames in of_burst]
        warmths = [np.median(heats_Thw[frames], axis=0) for frames in of_burst]
        for number, frames in enumerate(of_burst):
            others = _nearest(number, len(of_burst))
            if len(others) >= LEAST_OTHERS:
                scene = Scene.of(torch.stack([middles[other] for other in others]))
                warmth_hw = np.quantile([warmths[other] for other in others], 0.5, axis=0, method="lower")
                away = [frame for other, own in enumerate(of_burst) for frame in own if other != number]
                strength = evidence(len(of_burst) - 1, [times[frame] for frame in away] if times else ())
                unknown_hw = _shares(scene.unknown_HW, warmth_hw.shape)
                for frame in frames:
                    new_HW = scene.new(textures[frame], edge)
                    moved[frame] = most = what_moved(new_HW, shifts[frame])
                    changed_hw = np.maximum(_changed(new_HW, warmth_hw.shape), unknown_hw)
                    if not scene.is_shown_by(textures[frame]):
                        changed_hw = np.ones_like(changed_hw)
                    unchanged_T[frame] = most.level < MOVED_FROM and changed_hw.mean() < 0.5
                    heat_hw = heats_Thw[frame]
                    same_Thw[frame] = 1 - changed_hw
                    static_hw = np.minimum(1, 1.5 * warmth_hw / np.maximum(heat_hw, 1e-6)) * same_Thw[frame]
                    static_Thw[frame] = static_hw * _regions_static(heat_hw, changed_hw, static_hw)
                    strength_T[frame], bursts_T[frame] = strength, len(others)
                continue
            for place, frame in enumerate(frames):
                beside = [frames[other] for other in _nearest(place, len(frames))]
                if len(beside) >= LEAST_OTHERS - 1:
                    scene = Scene.of(torch.stack([textures[other] for other in beside]))
                    moved[frame] = what_moved(scene.new(textures[frame], edge), shifts[frame])
    return Judged(same_Thw, static_Thw, strength_T, bursts_T, tuple(moved), unchanged_T)


def evidence(others: int, times: Sequence[float | None]) -> float:
    """How far to believe that what other bursts show never goes, 0 to 1: by their number and the time they span."""
    known = [time for time in times if time is not None]
    if others < LEAST_OTHERS or len(known) < 2:
        return 0.0
    return min(1.0, others / SURE_OTHERS) * min(1.0, (max(known) - min(known)) / SURE_SECONDS)


@dataclass(frozen=True)
class Scene:
    """What a place looks like at other times: the textures that each pixel has, but for the outliers."""

    least_HW: Tensor
    most_HW: Tensor
    middle_HW: Tensor
    unknown_HW: Tensor
    """1 where the other times differ too much to say."""

    @classmethod
    def of(cls, textures_KHW: Tensor) -> Self:
        ordered_KHW = textures_KHW.sort(0).values
        left_out = int(OUTLIERS * len(ordered_KHW))
        least_HW, most_HW = ordered_KHW[left_out], ordered_KHW[len(ordered_KHW) - 1 - left_out]
        unknown_HW = (_wide_mean(most_HW - least_HW) > UNKNOWN_FROM).float()
        middle_HW = ordered_KHW[len(ordered_KHW) // 2]
        return cls(-_widest(-least_HW), _widest(most_HW), middle_HW, unknown_HW)

    def new(self, texture_HW: Tensor, edge: int) -> Tensor:
        """How far each pixel's texture is outside of what it is at other times, with its neighbours'; nothing within so
        many pixels of the border."""
        off_HW = torch.maximum(texture_HW - self.most_HW, self.least_HW - texture_HW).clamp(min=0)
        new_HW = torch.zeros_like(off_HW)
        inside = slice(edge, -edge or None), slice(edge, -edge or None)
        new_HW[inside] = _mean(off_HW[inside], 1)
        return new_HW

    def is_shown_by(self, texture_HW: Tensor) -> bool:
        both = float((texture_HW * self.middle_HW).mean())
        usual = float(texture_HW.square().mean() * self.middle_HW.square().mean()) ** 0.5
        return both > SAME_SCENE * usual


def texture_of(picture_HW: npt.NDArray[Any]) -> Tensor:
    """Each pixel less the mean around it, in units of what such differences usually are there."""
    level_HW = torch.from_numpy(picture_HW.astype(np.float32) / 255)
    off_HW = level_HW - _wide_mean(level_HW)
    return off_HW / (_wide_mean(off_HW.square()).clamp(min=0).sqrt() + USUAL)


def what_moved(new_HW: Tensor, shift: tuple[int, int] = (0, 0)) -> Moved:
    """The most that is new, and the box around it, in the frame as it was before it was shifted."""
    height, width = new_HW.shape
    level = float(new_HW.max())
    if level <= 0:
        return Moved(0.0, (0.0, 0.0, 1.0, 1.0))
    # An animal is new here and there, by its edges and its hair: those that are near each other belong together.
    step = max(1, min(height, width) // 96)
    most_hw = functional.max_pool2d(new_HW.clamp(max=MOVED_FROM)[None, None], step)[0, 0]
    dense_hw = _mean(most_hw, 1).numpy()
    labels_hw, _ = label_regions(dense_hw >= 0.3 * dense_hw.max())
    own_hw = labels_hw == labels_hw[np.unravel_index(int(dense_hw.argmax()), dense_hw.shape)]
    own_HW = np.zeros((height, width), np.bool_)
    own_HW[: own_hw.shape[0] * step, : own_hw.shape[1] * step] = own_hw.repeat(step, 0).repeat(step, 1)
    inside_HW = np.where(own_HW, new_HW.numpy(), 0)
    rows, columns = np.nonzero(inside_HW >= 0.5 * min(MOVED_FROM, float(inside_HW.max())))
    rows, columns = rows - shift[0], columns - shift[1]
    ends = columns.min() / width, rows.min() / height, (columns.max() + 1) / width, (rows.max() + 1) / height
    x0, y0, x1, y1 = (min(1.0, max(0.0, float(end))) for end in ends)
    return Moved(level, (x0, y0, x1, y1))


def _spectrum(texture_HW: Tensor) -> Tensor:
    return torch.fft.rfft2(texture_HW.clamp(-3, 3))


def _shift(texture_HW: Tensor, first: Tensor) -> tuple[int, int]:
    """(down, right) by which a frame fits the one with this spectrum best; none unless that is clearly better."""
    height, width = texture_HW.shape
    reach = min(FARTHEST_SHIFT, height // 16, width // 16)
    fits_HW = torch.fft.irfft2(first * _spectrum(texture_HW).conj(), s=(height, width)).roll((reach, reach), (0, 1))
    near_hw = fits_HW[: 2 * reach + 1, : 2 * reach + 1]
    best = int(near_hw.argmax())
    down, right = best // near_hw.shape[1], best % near_hw.shape[1]
    if float(near_hw[down, right]) <= 1.1 * float(near_hw[reach, reach]):
        return 0, 0
    return down - reach, right - reach


def _nearest(place: int, count: int) -> list[int]:
    """The other places of so many, MOST_OTHERS at most, those next to this one."""
    others = sorted((each for each in range(count) if each != place), key=lambda each: (abs(each - place), each))
    return sorted(others[:MOST_OTHERS])


def _changed(new_HW: Tensor, grid: tuple[int, ...]) -> Floats:
    """How much patches differ from the scene: 0 not at all, 1 certainly."""
    least, most = PATCH_SHARES
    return ((_shares((new_HW >= MOVED_FROM).float(), grid) - least) / (most - least)).clip(0, 1)


def _shares(values_HW: Tensor, grid: tuple[int, ...]) -> Floats:
    """Means over the patches of a grid (h, w)."""
    means: Floats = functional.adaptive_avg_pool2d(values_HW[None, None], (grid[0], grid[1]))[0, 0].numpy()
    return means


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


def _wide_mean(values_HW: Tensor) -> Tensor:
    """Of what is around each pixel, see AROUND."""
    height, width = values_HW.shape
    step = max(1, min(AROUND, height // 4, width // 4))
    coarse_hw = functional.avg_pool2d(values_HW[None, None], step, ceil_mode=True)
    padded_hw = functional.pad(coarse_hw, (2, 2, 2, 2), mode="replicate")
    means_hw = functional.avg_pool2d(padded_hw, 5, 1)
    return functional.interpolate(means_hw, size=(height, width), mode="bilinear", align_corners=False)[0, 0]


def _mean(values_HW: Tensor, reach: int) -> Tensor:
    """Over the square around each pixel that reaches so far."""
    padded_HW = functional.pad(values_HW[None, None], (reach,) * 4, mode="replicate")
    return functional.avg_pool2d(padded_HW, 2 * reach + 1, 1)[0, 0]


def _widest(values_HW: Tensor) -> Tensor:
    """The most of each pixel and those around it."""
    return functional.max_pool2d(values_HW[None, None], 2 * SWAY + 1, 1, SWAY)[0, 0]


def _checked(heats_Thw: Any, pictures_THW: Any) -> tuple[Floats, npt.NDArray[Any]]:
    heats_Thw, pictures_THW = np.asarray(heats_Thw, np.float32), np.asarray(pictures_THW)
    if heats_Thw.ndim != 3 or pictures_THW.ndim != 3 or len(heats_Thw) != len(pictures_THW):
        raise PatchlightError(
            f"a sequence has heat maps (T, h, w) and as many grey pictures (T, H, W), not {heats_Thw.shape} and "
            f"{pictures_THW.shape}"
        )
    return heats_Thw, pictures_THW
