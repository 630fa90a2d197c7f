"""The subject's mask, from the coarse heat and box that were found, at the resolution of the photo.

At about 160 pixels each pixel's heat, its place in the box, and how often its colour occurs inside and outside, say
together whether it belongs to the subject. A guided filter (He et al. 2010) passes that on among neighbours of like
colour, some rounds long. Then the border alone is drawn at full resolution: there the mask follows the photo's
brightness, as in the fast guided filter. Nothing here imports torch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from patchlight.geometry import Box

Floats = npt.NDArray[np.float32]

WORKING_SIDE = 160
"""Pixels of the longer side of what is looked at around a box."""

AROUND = 0.3
"""How far that reaches beyond the box, as a share of its sides: what lies there tells what the background is like."""

_ROUNDS = 5
_NEAR = 0.12
"""The guided filter's radius while masks are passed on, as a share of the longer side; and"""
_CLOSE = 3
"""in pixels, for the border."""
_LIKE = 1e-3
"""Its regularisation: the variance of colours, of 0 to 1, that is an edge."""
_HEAT, _COLOUR, _NEIGHBOURS = 0.4, 1.0, 4.0
"""What each says, as logits."""
_OUTSIDE, _SOFT = 3.0, 0.08
"""What speaks against a pixel outside the box, and the share of the box's sides over which that begins."""
_CONTRAST = 3.0
"""Of the border."""
_LEAST = 0.05
"""The share of a box that its mask covers at least; else the mask has lost the subject, and is the box."""
_TILE = 64
"""Pixels that are drawn at a time."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Where the heat of a photo lies."""

    levels_hw: npt.NDArray[np.uint8]
    region: Box
    """In pixels of the upright photo; the map covers it."""


def around(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """What is looked at for a box of a photo of this (height, width), in whole pixels."""
    left, top, right, bottom = box.clip(size).expanded(AROUND).clip(size).to_ints()
    return left, top, max(right, left + 1), max(bottom, top + 1)


def coarse_mask(seen: Image.Image, shown: tuple[int, int, int, int], box: Box, heat: HeatMap) -> Floats:
    """mask_HW, 0 to 1, of an RGB image that shows this part of the photo, in pixels of the photo."""
    left, top, right, bottom = shown
    across, down = (right - left) / seen.width, (bottom - top) / seen.height
    rgb_HWC = np.asarray(seen, np.float32) / np.float32(255)
    x_W = left + (np.arange(seen.width, dtype=np.float32) + 0.5) * across
    y_H = top + (np.arange(seen.height, dtype=np.float32) + 0.5) * down
    prior_HW = _HEAT * _logit(_heat_at(x_W, y_H, heat)) - _OUTSIDE * _outside(x_W, y_H, box)
    colours = _Colours(np.asarray(seen))
    near = _Guided(rgb_HWC, max(1, round(_NEAR * max(seen.size))), _LIKE)
    mask_HW = _share(prior_HW)
    for _ in range(_ROUNDS):
        passed_HW = near(mask_HW).clip(0, 1)
        said_HW = colours.say(mask_HW**2, (1 - mask_HW) ** 2)
        mask_HW = _share(prior_HW + _COLOUR * said_HW + _NEIGHBOURS * (2 * passed_HW - 1))
    in_box = ((x_W >= box.left) & (x_W <= box.right))[None] & ((y_H >= box.top) & (y_H <= box.bottom))[:, None]
    if not in_box.any() or mask_HW[in_box].mean() < _LEAST:
        return in_box.astype(np.float32)
    return mask_HW


def fine_mask(
    crop: Image.Image, place: tuple[float, float, float, float], seen: Image.Image, mask_HW: Floats
) -> Image.Image:
    """The mask, mode L, of an RGB crop in which the image that `mask_HW` is of, lies at (left, top, right, bottom)."""
    grey_HW1 = np.asarray(seen.convert("L"), np.float32)[:, :, None] / np.float32(255)
    slope_HW1, level_HW = _Guided(grey_HW1, _CLOSE, _LIKE).coefficients(mask_HW)
    # In levels of 0 to 255, with the contrast in it: what is drawn is slope * light + level.
    slope = Image.fromarray(_CONTRAST * slope_HW1[..., 0])
    level = Image.fromarray(255 * ((level_HW - 0.5) * _CONTRAST + 0.5))
    # Wherever the mask is not the same all around, its border may be.
    open_HW = (_means(mask_HW, 2) > 0.02) & (_means(mask_HW, 2) < 0.98)
    coarse = Image.fromarray((255 * mask_HW).round().clip(0, 255).astype(np.uint8))
    left, top, right, bottom = place
    across, down = seen.width / (right - left), seen.height / (bottom - top)
    drawn = Image.new("L", crop.size)
    first_x, first_y = max(0, round(left)), max(0, round(top))
    last_x, last_y = min(crop.width, round(right)), min(crop.height, round(bottom))
    for y0 in range(first_y, last_y, _TILE):
        for x0 in range(first_x, last_x, _TILE):
            x1, y1 = min(x0 + _TILE, last_x), min(y0 + _TILE, last_y)
            part = Box((x0 - left) * across, (y0 - top) * down, (x1 - left) * across, (y1 - top) * down)
            part = part.clip((seen.height, seen.width))
            if part.area <= 0:
                continue
            ends, size = (part.left, part.top, part.right, part.bottom), (x1 - x0, y1 - y0)
            in_x, in_y, out_x, out_y = part.to_ints()
            if not open_HW[in_y:out_y, in_x:out_x].any():
                drawn.paste(int(255 * round(float(mask_HW[in_y:out_y, in_x:out_x].mean()))), (x0, y0, x1, y1))
                continue
            if across >= 1 and down >= 1:  # there is nothing finer to follow
                tile = coarse.resize(size, Image.Resampling.BOX, ends)
            else:
                a, b = (np.asarray(each.resize(size, Image.Resampling.BILINEAR, ends)) for each in (slope, level))
                light_HW = np.asarray(crop.crop((x0, y0, x1, y1)).convert("L"))
                tile = Image.fromarray((a * light_HW + b).round().clip(0, 255).astype(np.uint8))
            drawn.paste(tile, (x0, y0))
    return drawn


def _heat_at(x_W: Floats, y_H: Floats, heat: HeatMap) -> Floats:
    """Between the middles of patches straight lines, and beyond the last ones the same."""
    h, w = heat.levels_hw.shape
    column_W = ((x_W - heat.region.left) / heat.region.width * w - 0.5).clip(0, w - 1)
    row_H = ((y_H - heat.region.top) / heat.region.height * h - 0.5).clip(0, h - 1)
    levels_hw = heat.levels_hw.astype(np.float32) / 255
    x0, y0 = np.floor(column_W).astype(int), np.floor(row_H).astype(int)
    x1, y1 = np.minimum(x0 + 1, w - 1), np.minimum(y0 + 1, h - 1)
    fx, fy = (column_W - x0)[None].astype(np.float32), (row_H - y0)[:, None].astype(np.float32)
    upper = levels_hw[y0][:, x0] * (1 - fx) + levels_hw[y0][:, x1] * fx
    lower = levels_hw[y1][:, x0] * (1 - fx) + levels_hw[y1][:, x1] * fx
    return upper * (1 - fy) + lower * fy


def _outside(x_W: Floats, y_H: Floats, box: Box) -> Floats:
    """0 inside the box, growing to 1 over a share of its sides beyond it."""
    width, height = max(box.width, 1.0), max(box.height, 1.0)
    beside_W = np.maximum(box.left - x_W, x_W - box.right) / width
    beyond_H = np.maximum(box.top - y_H, y_H - box.bottom) / height
    return (np.maximum(beside_W[None], beyond_H[:, None]) / _SOFT).clip(0, 1).astype(np.float32)


def _logit(share: Floats) -> Floats:
    share = share.clip(0.02, 0.98)
    return np.log(share / (1 - share))


def _share(logit: Floats) -> Floats:
    return (1 / (1 + np.exp(-logit.clip(-30, 30)))).astype(np.float32)


class _Colours:
    """How much oftener a pixel's colour occurs in one weighting of an image than in another."""

    _BINS = 16

    def __init__(self, rgb_HWC: npt.NDArray[np.uint8]) -> None:
        red_HW, green_HW, blue_HW = np.moveaxis(rgb_HWC.astype(np.int64) * self._BINS // 256, -1, 0)
        self.bin_HW = (red_HW * self._BINS + green_HW) * self._BINS + blue_HW

    def say(self, inside_HW: Floats, outside_HW: Floats) -> Floats:
        """Log of the ratio, -4 to 4."""
        inside, outside = (np.log(self._shares(each) + 1e-5) for each in (inside_HW, outside_HW))
        return (inside - outside).clip(-4, 4)[self.bin_HW].astype(np.float32)

    def _shares(self, weight_HW: Floats) -> npt.NDArray[np.float64]:
        bins = self._BINS
        count = np.bincount(self.bin_HW.ravel(), weight_HW.ravel(), bins**3).reshape(bins, bins, bins)
        for axis in range(3):  # colours that are nearly the same count, too
            count = 0.25 * np.roll(count, 1, axis) + 0.5 * count + 0.25 * np.roll(count, -1, axis)
        return count.ravel() / max(count.sum(), 1e-9)


def _means(level_HW: Floats, radius: int) -> Floats:
    """Over squares, of (height, width, ...); at the border over what there is of them."""
    for axis in (0, 1):
        length = level_HW.shape[axis]
        shape = list(level_HW.shape)
        shape[axis] += 1
        sums = np.zeros(shape, np.float32)  # of 160 values of 0 to 1, which float32 adds up well enough
        np.cumsum(level_HW, axis, out=sums[1:] if axis == 0 else sums[:, 1:])
        place = np.arange(length)
        first, last = np.maximum(place - radius, 0), np.minimum(place + radius + 1, length)
        count = (last - first).astype(np.float32)
        count = count.reshape([-1 if each == axis else 1 for each in range(level_HW.ndim)])
        level_HW = (np.take(sums, last, axis) - np.take(sums, first, axis)) / count
    return level_HW


class _Guided:
    """A filter that smooths where the guide (height, width, colours) does, and has edges where it has them."""

    def __init__(self, guide_HWC: Floats, radius: int, least: float) -> None:
        self.guide_HWC, self.radius = guide_HWC, radius
        self.mean_HWC = _means(guide_HWC, radius)
        product = guide_HWC[..., :, None] * guide_HWC[..., None, :]
        spread = _means(product, radius) - self.mean_HWC[..., :, None] * self.mean_HWC[..., None, :]
        colours = guide_HWC.shape[-1]
        self.inverse = np.linalg.inv(spread + np.float32(least) * np.eye(colours, dtype=np.float32))

    def coefficients(self, mask_HW: Floats) -> tuple[Floats, Floats]:
        """(slope_HWC, level_HW): the mask is about slope * guide + level."""
        mean_HW = _means(mask_HW, self.radius)
        shared_HWC = _means(self.guide_HWC * mask_HW[..., None], self.radius) - self.mean_HWC * mean_HW[..., None]
        slope_HWC = np.einsum("hwcd,hwd->hwc", self.inverse, shared_HWC)
        level_HW = mean_HW - np.einsum("hwc,hwc->hw", slope_HWC, self.mean_HWC)
        return _means(slope_HWC, self.radius), _means(level_HW, self.radius)

    def __call__(self, mask_HW: Floats) -> Floats:
        slope_HWC, level_HW = self.coefficients(mask_HW)
        return np.einsum("hwc,hwc->hw", slope_HWC, self.guide_HWC) + level_HW
