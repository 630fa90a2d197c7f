"""Variations of training photos, in batches and on their device; every draw belongs to its sample (see draws.py)."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.config import PreprocessConfig, Size
from patchlight.errors import PatchlightError
from patchlight.images.draws import Draws
from patchlight.json_config import JsonConfig, check_types, require, require_within


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig(JsonConfig):
    """How training photos are varied. Every draw derives from (seed, epoch, sample)."""

    # "none": as in evaluation; "pad": a window of the photo moved by up to `pad` pixels, the border mirrored;
    # "resized": a part of the photo of a random area and aspect, resized.
    crop: Literal["none", "pad", "resized"] = "none"
    pad: int = 4
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (0.75, 1.3333)
    flip: bool = True
    # "randaugment": `policy_ops` random changes at `policy_strength` (0 to 10); "trivial": one at a random strength.
    policy: Literal["none", "randaugment", "trivial"] = "none"
    policy_ops: int = 2
    policy_strength: float = 9.0
    # Brightness, contrast and saturation, each times a number from 1 - colour to 1 + colour.
    colour: float = 0.0
    # The share of photos of which a random rectangle is blanked.
    erase: float = 0.0
    # The probability that photos are mixed in pairs: by Mixup if `mixup`, its beta, is given, by CutMix if `cutmix` is.
    mix: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    # Each photo appears this many times in a row, each time varied anew (repeated augmentation).
    repeats: int = 1
    # How many variations there are of each photo, an epoch each, which then come again; None: new ones in every epoch.
    # Where the head alone learns, the rest of the model looks at each of them once.
    variations: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("colour", "erase", "mix"):
            require_within(self, name, 0, 1)
        require_within(self, "policy_strength", 0, 10)
        require_within(self, "policy_ops", 1, 10)
        require_within(self, "pad", 0, 1024)
        require_within(self, "repeats", 1, 16)
        require(self.variations is None or self.variations >= 1, f"variations={self.variations} must be 1 or more")
        require(0 < self.area[0] <= self.area[1] <= 1, f"area={self.area} must rise, from more than 0 to at most 1")
        require(0 < self.aspect[0] <= self.aspect[1], f"aspect={self.aspect} must rise, from more than 0")
        require(self.mixup >= 0 and self.cutmix >= 0, "mixup and cutmix must be 0 or more")
        require(not self.mix or self.mixup > 0 or self.cutmix > 0, "mix needs mixup or cutmix: the beta to draw from")


# What a policy chooses from, each as likely as the others.
POLICY_OPS = (
    "identity", "translate_x", "translate_y", "shear_x", "shear_y", "rotate", "brightness", "saturation", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip


def augment(images_BCHW: Tensor, draws: Draws, config: AugmentConfig, cropped: bool = False) -> Tensor:
    """Photos (B, 3, H, W), uint8 or floats from 0 to 1, varied: float32 from 0 to 1, of the same size.

    All that moves pixels is done first and at once, so that a photo is interpolated once at most, and what comes into
    the frame is the rest of the photo, mirrored where it ends; a mere flip and shift stays exact. Then come the
    policy's changes of colour, then `colour`, then `erase`. `cropped` says that the crop is done (see `random_part`).

    A photo's result depends on its own draws alone. Nothing here waits for the device or has a shape that depends on
    the draws, so that it can be part of a CUDA graph.
    """
    bytes_or_floats = images_BCHW.dtype == torch.uint8 or images_BCHW.is_floating_point()
    if images_BCHW.ndim != 4 or images_BCHW.shape[1] != 3 or not bytes_or_floats:
        raise PatchlightError(
            f"augment takes photos (B, 3, H, W) in bytes or in floats from 0 to 1, not {tuple(images_BCHW.shape)} of "
            f"{images_BCHW.dtype}; convert them to RGB, channels first"
        )
    size = images_BCHW.shape[2], images_BCHW.shape[3]
    crop = "none" if cropped else config.crop
    changes = _policy_changes(draws, config, size)
    if changes or crop == "resized":
        matrix_B33 = _crop_matrix(draws, config, crop, size)
        for change in changes:
            matrix_B33 = _compose(matrix_B33, change.matrix())
        images_BCHW = _warp(_as_floats(images_BCHW), matrix_B33)
    elif crop == "pad" or config.flip:
        images_BCHW = _shift_and_flip(images_BCHW, *_shift(draws, config, crop), _flip(draws, config))
    images_BCHW = _as_floats(images_BCHW)
    for change in changes:
        images_BCHW = _recolour(images_BCHW, change)
    if config.colour:
        images_BCHW = _vary_colour(images_BCHW, draws, config.colour)
    if config.erase:
        images_BCHW = _erase(images_BCHW, draws, config.erase)
    return images_BCHW


@dataclass(frozen=True, kw_only=True)
class RandomView:
    """How random views are drawn. A share is the fraction of photos that get the change."""

    size: Size
    area: tuple[float, float]
    """Least and most of the photo that the view shows."""
    aspect: tuple[float, float] = (0.75, 1.3333)
    flip: bool = True
    colour: float = 0.4
    """How far brightness, contrast and saturation are varied, as in `AugmentConfig`."""
    colour_share: float = 0.8
    grey_share: float = 0.2
    blur_share: float = 0.5
    solarize_share: float = 0.0
    """Solarizing inverts bright levels."""


def random_view(images_BCHW: Tensor, draws: Draws, view: RandomView) -> Tensor:
    """One view of each photo, for self-supervision: a random part of it, resized, its colours varied.

    Photos (B, 3, H, W), uint8 or floats from 0 to 1, become float32 (B, 3, *view.size). Several views need draws of
    their own: `Draws.part`.
    """
    config = AugmentConfig(crop="resized", area=view.area, aspect=view.aspect, flip=view.flip)
    frame, (height, width) = (images_BCHW.shape[2], images_BCHW.shape[3]), view.size
    # Where the largest part would lose pixels between the samples, several are taken and averaged.
    largest = math.sqrt(view.area[1])
    finer = max(1, math.ceil(largest * frame[0] / height - 0.01), math.ceil(largest * frame[1] / width - 0.01))
    matrix_B33 = _crop_matrix(draws, config, "resized", frame)
    view_BCHW = _warp(_as_floats(images_BCHW), matrix_B33, (finer * height, finer * width))
    if finer > 1:
        view_BCHW = F.avg_pool2d(view_BCHW, finer)

    def for_some(name: str, share: float, changed_BCHW: Tensor) -> Tensor:
        return torch.where(draws.chance(name, share)[:, None, None, None], changed_BCHW, view_BCHW)

    if view.colour and view.colour_share:
        view_BCHW = for_some("colour", view.colour_share, _vary_colour(view_BCHW, draws, view.colour))
    if view.grey_share:
        view_BCHW = for_some("grey", view.grey_share, _grey(view_BCHW).expand_as(view_BCHW))
    if view.blur_share:
        # Up to a hundredth of the side: 2 pixels of 224.
        sigma_B = draws.uniform("blur width", 0.001, 0.01) * max(view.size)
        view_BCHW = for_some("blur", view.blur_share, _blur(view_BCHW, sigma_B))
    if view.solarize_share:
        view_BCHW = for_some("solarize", view.solarize_share, torch.where(view_BCHW < 0.5, view_BCHW, 1 - view_BCHW))
    return view_BCHW


def cut_parts(images_BCHW: Tensor, part_B4: Tensor, flip_B: Tensor, size: Size) -> Tensor:
    """These parts of photos (x0, y0, x1, y1 in their pixels), resized to `size`, mirrored where `flip_B` says so.

    Photos in bytes or floats from 0 to 1 become floats. Four samples a pixel are averaged, so that parts of up to
    twice the size lose nothing between them.
    """
    frame = images_BCHW.shape[2], images_BCHW.shape[3]
    matrix_B33 = _part_matrix(part_B4, 1 - 2 * flip_B.float(), frame)
    return F.avg_pool2d(_warp(_as_floats(images_BCHW), matrix_B33, (2 * size[0], 2 * size[1])), 2)


def vary_colours(images_BCHW: Tensor, draws: Draws, *, colour: float, grey: float) -> Tensor:
    """Brightness, contrast and saturation varied as in `AugmentConfig`, and a share `grey` of the photos made grey."""
    images_BCHW = _vary_colour(images_BCHW, draws, colour)
    grey_B111 = draws.chance("grey", grey)[:, None, None, None]
    return torch.where(grey_B111, _grey(images_BCHW).expand_as(images_BCHW), images_BCHW)


def normalise(images_BCHW: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """From 0..1 to the model's range."""
    # Filled on the device, channel by channel: a copy from the host could not be part of a CUDA graph.
    mean_CHW, std_CHW = (
        torch.stack([torch.full(images_BCHW.shape[2:], level, device=images_BCHW.device) for level in colour])
        for colour in (preprocess.mean, preprocess.std)
    )
    return (images_BCHW - mean_CHW) / std_CHW


def mix(
    images_BCHW: Tensor,
    labels_B: Tensor,
    num_classes: int,
    draws: Draws,
    config: AugmentConfig,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Photos (float32) mixed with their neighbours, and what to answer: targets_BK, which sum to one.

    With probability `mix` the pair (0, 1), (2, 3), ... is mixed: image i takes a share of image i ^ 1 and its target.
    Mixup takes that share of every pixel, CutMix takes a rectangle whole; a coin chooses where both are given. The
    first of a pair draws for both. The last of an odd batch stays as it is.
    """
    count, (height, width) = len(labels_B), images_BCHW.shape[2:]
    rest = label_smoothing / num_classes
    targets_BK = torch.full((count, num_classes), rest, device=images_BCHW.device)
    targets_BK = targets_BK.scatter(1, labels_B.long()[:, None], 1 - label_smoothing + rest)
    if not config.mix:
        return images_BCHW, targets_BK

    place_B = torch.arange(count, device=images_BCHW.device)
    first_B, partner_B = place_B & ~1, (place_B ^ 1).clamp(max=count - 1)
    # The partner's share in the whole photo, and in each of its pixels.
    share_B = _beta_quantiles(draws.uniform("mix share"), config.mixup or 1.0)
    share_BHW = share_B[:, None, None].expand(-1, height, width)
    if config.cutmix:
        box_B4 = _cutmix_box(draws, config.cutmix, (height, width))
        cut_B = draws.chance("mix by cutting", 0.5 if config.mixup else 1.0)
        area_B = (box_B4[:, 2] - box_B4[:, 0]) * (box_B4[:, 3] - box_B4[:, 1])
        share_B = torch.where(cut_B, area_B / (height * width), share_B)
        share_BHW = torch.where(cut_B[:, None, None], _inside(box_B4, (height, width)).float(), share_BHW)
    mixed_B = draws.chance("mix", config.mix)
    share_B = torch.where(mixed_B, share_B, 0)[first_B]
    share_BHW = torch.where(mixed_B[:, None, None], share_BHW, 0)[first_B]
    images_BCHW = torch.lerp(images_BCHW, images_BCHW[partner_B], share_BHW[:, None])
    return images_BCHW, torch.lerp(targets_BK, targets_BK[partner_B], share_B[:, None])


def random_part(draws: Draws, size: Size, config: AugmentConfig) -> Tensor:
    """What crop="resized" keeps of a photo of this (height, width): box_B4, x0 y0 x1 y1 in pixels, not rounded.

    Ten tries of an area and an aspect; where none fits into the photo, the largest part about its centre that keeps to
    the aspects allowed.
    """
    (height, width), tries = size, 10
    area_BT = draws.uniforms("part area", tries, *config.area) * (height * width)
    aspect_BT = draws.uniforms("part aspect", tries, *map(math.log, config.aspect)).exp()
    width_BT, height_BT = (area_BT * aspect_BT).sqrt(), (area_BT / aspect_BT).sqrt()
    fits_BT = (width_BT <= width) & (height_BT <= height)
    first_B1 = fits_BT.int().argmax(1, keepdim=True)  # of several that are largest argmax takes the first
    fits_B = fits_BT.any(1)
    whole_width, whole_height = min(width, height * config.aspect[1]), min(height, width / config.aspect[0])
    width_B = torch.where(fits_B, width_BT.gather(1, first_B1)[:, 0], whole_width)
    height_B = torch.where(fits_B, height_BT.gather(1, first_B1)[:, 0], whole_height)
    x0_B = torch.where(fits_B, draws.uniform("part x"), 0.5) * (width - width_B)
    y0_B = torch.where(fits_B, draws.uniform("part y"), 0.5) * (height - height_B)
    return torch.stack((x0_B, y0_B, x0_B + width_B, y0_B + height_B), 1)


def _as_floats(images: Tensor) -> Tensor:
    return images.float().div_(255) if images.dtype == torch.uint8 else images.float()


def _flip(draws: Draws, config: AugmentConfig) -> Tensor:
    return draws.chance("flip", 0.5 if config.flip else 0.0)


def _shift(draws: Draws, config: AugmentConfig, crop: str) -> tuple[Tensor, Tensor]:
    """Random shifts right and down, in whole pixels: two tensors (B,)."""
    pad = config.pad if crop == "pad" else 0
    return draws.choice("shift x", 2 * pad + 1) - pad, draws.choice("shift y", 2 * pad + 1) - pad


def _shift_and_flip(images_BCHW: Tensor, right_B: Tensor, down_B: Tensor, flip_B: Tensor) -> Tensor:
    """The window moved by whole pixels, then flipped; no pixel changes its value, so bytes stay bytes."""
    height, width = images_BCHW.shape[2:]
    rows_H, columns_W = torch.arange(height, device=flip_B.device), torch.arange(width, device=flip_B.device)
    columns_BW = torch.where(flip_B[:, None], columns_W.flip(0), columns_W) + right_B[:, None]
    rows_BH = rows_H + down_B[:, None]
    index_BHW = _mirror(rows_BH, height)[:, :, None] * width + _mirror(columns_BW, width)[:, None]
    index_BCX = index_BHW.flatten(1)[:, None].expand(-1, images_BCHW.shape[1], -1)
    return images_BCHW.flatten(2).gather(2, index_BCX).view(images_BCHW.shape)


def _mirror(index: Tensor, length: int) -> Tensor:
    """Places outside of 0 .. length - 1 reflected at the border, whose pixels so appear twice (as grid_sample does)."""
    index = index.remainder(2 * length)
    return torch.minimum(index, 2 * length - 1 - index)


# Geometry: a matrix (B, 3, 3) says where a pixel (x, y, 1) of the result comes from, in pixels from the photo's centre.


def _matrix(x_from: tuple[Tensor, Tensor, Tensor], y_from: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The six numbers (B,) that say x = x_from . (x, y, 1) and y = y_from . (x, y, 1)."""
    zero_B = torch.zeros_like(x_from[0])
    rows = (torch.stack(row, 1) for row in (x_from, y_from, (zero_B, zero_B, zero_B + 1)))
    return torch.stack(tuple(rows), 1)


def _compose(first_B33: Tensor, then_B33: Tensor) -> Tensor:
    """The matrix of one change after another. Not by `@`, which on a GPU may round to ten bits."""
    return (first_B33[:, :, :, None] * then_B33[:, None]).sum(2)


def _crop_matrix(draws: Draws, config: AugmentConfig, crop: str, size: Size) -> Tensor:
    """The crop, then the flip."""
    mirror_B = 1 - 2 * _flip(draws, config).float()
    zero_B = torch.zeros_like(mirror_B)
    if crop == "resized":
        return _part_matrix(random_part(draws, size, config), mirror_B, size)
    right_B, down_B = _shift(draws, config, crop)
    return _matrix((mirror_B, zero_B, right_B.float()), (zero_B, zero_B + 1, down_B.float()))


def _part_matrix(part_B4: Tensor, mirror_B: Tensor, size: Size) -> Tensor:
    """A part of the photo (x0, y0, x1, y1 in its pixels) fills the frame, from right to left where `mirror_B` is -1."""
    zero_B = torch.zeros_like(mirror_B)
    wide_B, high_B = (part_B4[:, 2] - part_B4[:, 0]) / size[1], (part_B4[:, 3] - part_B4[:, 1]) / size[0]
    right_B, down_B = (part_B4[:, 0] + part_B4[:, 2] - size[1]) / 2, (part_B4[:, 1] + part_B4[:, 3] - size[0]) / 2
    return _matrix((mirror_B * wide_B, zero_B, right_B), (zero_B, high_B, down_B))


def _warp(images_BCHW: Tensor, matrix_B33: Tensor, size: Size | None = None) -> Tensor:
    """Pixels (floats) from where the matrix says, bilinear, the border mirrored.

    A result of another `size` covers the same frame with fewer or more pixels; the matrix is that of the frame.
    """
    height, width = images_BCHW.shape[2:]
    rows, columns = size or (height, width)
    x_W = (torch.arange(columns, device=images_BCHW.device) - (columns - 1) / 2) * (width / columns)
    y_H1 = ((torch.arange(rows, device=images_BCHW.device) - (rows - 1) / 2) * (height / rows))[:, None]
    xx, xy, x1, yx, yy, y1 = (number_B[:, None, None] for number_B in matrix_B33[:, :2].flatten(1).unbind(1))
    x_BHW, y_BHW = xx * x_W + xy * y_H1 + x1, yx * x_W + yy * y_H1 + y1
    grid_BHW2 = torch.stack((x_BHW * (2 / width), y_BHW * (2 / height)), -1)
    return F.grid_sample(images_BCHW, grid_BHW2, padding_mode="reflection", align_corners=False)


# Policies


class _Change(NamedTuple):
    """One change of each photo: which of POLICY_OPS it is, and how much each of them would do."""

    op_B: Tensor
    shift_x_B: Tensor
    shift_y_B: Tensor
    shear_B: Tensor
    radians_B: Tensor
    blend_B: Tensor
    """Times the difference to black, grey, the mean grey, or the smoothed photo."""
    lost_bits_B: Tensor
    threshold_B: Tensor

    def where(self, op: str, values: Tensor, others: Tensor | float) -> Tensor:
        """`values` for the photos that this op changes."""
        chosen_B = self.op_B == POLICY_OPS.index(op)
        return torch.where(chosen_B.view(-1, *[1] * (values.ndim - 1)), values, others)

    def matrix(self) -> Tensor:
        radians_B = self.where("rotate", self.radians_B, 0)
        sin_B, cos_B = radians_B.sin(), radians_B.cos()
        return _matrix(
            (cos_B, sin_B + self.where("shear_x", self.shear_B, 0), self.where("translate_x", self.shift_x_B, 0)),
            (self.where("shear_y", self.shear_B, 0) - sin_B, cos_B, self.where("translate_y", self.shift_y_B, 0)),
        )


def _policy_changes(draws: Draws, config: AugmentConfig, size: Size) -> list[_Change]:
    """The policy's changes, in their order."""
    if config.policy == "none":
        return []
    if config.policy == "trivial":
        # The strengths of TrivialAugment's wide space (arXiv:2103.10158).
        return [_change(draws, "policy", draws.uniform("policy strength"), (32, 32), 0.99, 135, 0.99, 6)]
    # RandAugment's (arXiv:1909.13719), where 10 is the strongest; 0.45 of a side is 100 pixels of 224.
    shift = 0.45 * size[1], 0.45 * size[0]
    strength_B = torch.full_like(draws.uniform("policy strength"), config.policy_strength / 10)
    return [_change(draws, f"policy {i}", strength_B, shift, 0.3, 30, 0.9, 4) for i in range(config.policy_ops)]


def _change(
    draws: Draws,
    name: str,
    strength_B: Tensor,
    shift: tuple[float, float],
    shear: float,
    degrees: float,
    blend: float,
    bits: int,
) -> _Change:
    """A random change, at a strength from 0 (none) to 1, which is these amounts to either side."""
    amount_B = torch.where(draws.chance(f"{name} sign", 0.5), strength_B, -strength_B)
    return _Change(
        op_B=draws.choice(f"{name} op", len(POLICY_OPS)),
        shift_x_B=shift[0] * amount_B,
        shift_y_B=shift[1] * amount_B,
        shear_B=shear * amount_B,
        radians_B=math.radians(degrees) * amount_B,
        blend_B=1 + blend * amount_B,
        lost_bits_B=(bits * strength_B).round().long(),
        threshold_B=256 * (1 - strength_B),
    )


def _recolour(images_BCHW: Tensor, change: _Change) -> Tensor:
    """The change where it is one of colour, as Pillow makes it: from whole levels 0..255.

    All but saturation and sharpness give a level of a channel always the same new level: a table of 256.
    """
    level_BCX = (images_BCHW * 255).round().long().flatten(2)
    table_BCV = _level_table(level_BCX, change)
    images_BCHW = table_BCV.gather(2, level_BCX).view(images_BCHW.shape)
    images_BCHW = _saturate(images_BCHW, change.where("saturation", change.blend_B, 1))
    return _sharpen(images_BCHW, change.where("sharpness", change.blend_B, 1))


def _level_table(level_BCX: Tensor, change: _Change) -> Tensor:
    """New value of each level 0..255 of each channel: floats from 0 to 1 (B, C, 256)."""
    level_V = torch.arange(256, device=level_BCX.device)
    none_BCV = torch.zeros((*level_BCX.shape[:2], 256), dtype=torch.long, device=level_BCX.device)
    count_BCV = none_BCV.scatter_add(2, level_BCX, torch.ones_like(level_V[:1]).expand(level_BCX.shape))
    blend_B11, pixels = change.blend_B[:, None, None], level_BCX.shape[2]

    mean_B11 = _grey((count_BCV * level_V).sum(2, keepdim=True).float() / pixels)
    lost_B11 = change.lost_bits_B[:, None, None]
    lowest_BC1 = torch.where(count_BCV > 0, level_V, 255).amin(2, keepdim=True)
    highest_BC1 = torch.where(count_BCV > 0, level_V, 0).amax(2, keepdim=True)
    range_BC1 = highest_BC1 - lowest_BC1
    stretched_BCV = ((level_V - lowest_BC1) * 255 // range_BC1.clamp(min=1)).clamp(0, 255)
    # Equalize: a level's new level is the share of darker pixels, in steps of this many pixels.
    step_BC1 = (pixels - count_BCV.gather(2, highest_BC1)) // 255
    darker_BCV = count_BCV.cumsum(2) - count_BCV
    spread_BCV = ((darker_BCV + step_BC1 // 2) // step_BC1.clamp(min=1)).clamp(max=255)

    table_BCV = level_V.float().expand(count_BCV.shape)
    tables = {
        "brightness": blend_B11 * level_V,
        "contrast": mean_B11 + blend_B11 * (level_V - mean_B11),
        "posterize": level_V >> lost_B11 << lost_B11,
        "solarize": torch.where(level_V < change.threshold_B[:, None, None], level_V, 255 - level_V),
        "autocontrast": torch.where(range_BC1 > 0, stretched_BCV, level_V),
        "equalize": torch.where(step_BC1 > 0, spread_BCV, level_V),
    }
    for op, changed_BCV in tables.items():
        table_BCV = change.where(op, changed_BCV.float(), table_BCV)
    return table_BCV.clamp(0, 255) / 255


def _grey(images_BCHW: Tensor) -> Tensor:
    """The brightness of colours, as Pillow and television weigh them; the channels (dimension 1) become one."""
    red, green, blue = images_BCHW.split(1, 1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _saturate(images_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Scale each colour's distance from its grey by `factor`; 1 changes nothing."""
    return torch.lerp(images_BCHW, _grey(images_BCHW), 1 - factor_B[:, None, None, None]).clamp(0, 1)


def _sharpen(images_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Pixels that differ `factor` times as much from the smoothed photo; the outermost stay, as in Pillow."""
    if min(images_BCHW.shape[2:]) < 3:
        return images_BCHW
    # Pillow weighs the pixel by 5/13 and its neighbours by 1/13: all nine, and four times the pixel.
    # Sums of slices, since a CPU takes several times as long for avg_pool2d.
    three_BCHW = images_BCHW[:, :, :-2] + images_BCHW[:, :, 1:-1] + images_BCHW[:, :, 2:]
    nine_BCHW = three_BCHW[..., :-2] + three_BCHW[..., 1:-1] + three_BCHW[..., 2:]
    to_smooth_BCHW = F.pad((nine_BCHW - 9 * images_BCHW[:, :, 1:-1, 1:-1]) / 13, (1, 1, 1, 1))
    return (images_BCHW + (1 - factor_B[:, None, None, None]) * to_smooth_BCHW).clamp(0, 1)


def _vary_colour(images_BCHW: Tensor, draws: Draws, colour: float) -> Tensor:
    """Brightness, contrast and saturation, in this order, each times a number from 1 - colour to 1 + colour."""
    low, high = 1 - colour, 1 + colour
    images_BCHW = (images_BCHW * draws.uniform("brightness", low, high)[:, None, None, None]).clamp(0, 1)
    mean_B111 = _grey(images_BCHW.mean((2, 3), keepdim=True))
    contrast_B111 = draws.uniform("contrast", low, high)[:, None, None, None]
    images_BCHW = (mean_B111 + contrast_B111 * (images_BCHW - mean_B111)).clamp(0, 1)
    return _saturate(images_BCHW, draws.uniform("saturation", low, high))


def _blur(images_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
    """By a Gaussian of this deviation in pixels, at most a hundredth of the longer side; the border goes on outside."""
    # Three deviations to either side. Sums of slices, as in `_sharpen`.
    radius = math.ceil(0.03 * max(images_BCHW.shape[2:]))
    distance_T = torch.arange(-radius, radius + 1, device=sigma_B.device)
    weight_BT = (-0.5 * (distance_T / sigma_B[:, None]).square()).exp()
    weight_BT = weight_BT / weight_BT.sum(1, keepdim=True)
    for axis, margin in ((2, (0, 0, radius, radius)), (3, (radius, radius, 0, 0))):
        padded_BCHW, length = F.pad(images_BCHW, margin, mode="replicate"), images_BCHW.shape[axis]
        images_BCHW = torch.zeros_like(images_BCHW)
        for place, weight_B in enumerate(weight_BT.unbind(1)):
            images_BCHW = images_BCHW.addcmul(padded_BCHW.narrow(axis, place, length), weight_B[:, None, None, None])
    return images_BCHW


def _erase(images_BCHW: Tensor, draws: Draws, probability: float) -> Tensor:
    """A rectangle filled with the photo's mean colour, which costs less than noise and shows no edge of its own.

    Its area is 2 to 33 % of the photo, its aspect 0.3 to 3.3, cut to the photo's sides.
    """
    height, width = images_BCHW.shape[2:]
    area_B = draws.uniform("erase area", 0.02, 0.33) * (height * width)
    aspect_B = draws.uniform("erase aspect", math.log(0.3), math.log(3.3)).exp()
    width_B = (area_B * aspect_B).sqrt().round().clamp(1, width)
    height_B = (area_B / aspect_B).sqrt().round().clamp(1, height)
    x0_B = (draws.uniform("erase x") * (width - width_B + 1)).floor()
    y0_B = (draws.uniform("erase y") * (height - height_B + 1)).floor()
    box_B4 = torch.stack((x0_B, y0_B, x0_B + width_B, y0_B + height_B), 1)
    erased_BHW = _inside(box_B4, (height, width)) & draws.chance("erase", probability)[:, None, None]
    return torch.where(erased_BHW[:, None], images_BCHW.mean((2, 3), keepdim=True), images_BCHW)


def _inside(box_B4: Tensor, size: Size) -> Tensor:
    """Which pixels lie in the box (x0, y0, x1, y1 in whole pixels): (B, H, W) bool."""
    x0_B1, y0_B1, x1_B1, y1_B1 = box_B4.split(1, 1)
    row_H, column_W = torch.arange(size[0], device=box_B4.device), torch.arange(size[1], device=box_B4.device)
    rows_BH, columns_BW = (row_H >= y0_B1) & (row_H < y1_B1), (column_W >= x0_B1) & (column_W < x1_B1)
    return rows_BH[:, :, None] & columns_BW[:, None]


def _cutmix_box(draws: Draws, beta: float, size: Size) -> Tensor:
    """A rectangle of the photo's shape about any point of it, cut to the photo: box_B4 in whole pixels."""
    height, width = size
    half_B = _beta_quantiles(draws.uniform("cutmix area"), beta).sqrt() / 2
    x_B, y_B = draws.uniform("cutmix x"), draws.uniform("cutmix y")
    x0_B, x1_B = ((x * width).round().clamp(0, width) for x in (x_B - half_B, x_B + half_B))
    y0_B, y1_B = ((y * height).round().clamp(0, height) for y in (y_B - half_B, y_B + half_B))
    return torch.stack((x0_B, y0_B, x1_B, y1_B), 1)


def _beta_quantiles(uniform_B: Tensor, alpha: float) -> Tensor:
    """Numbers distributed as Beta(alpha, alpha), from uniform ones: the inverse of its CDF, to a thousandth."""
    if alpha == 1:
        return uniform_B
    cdf_T = _beta_cdf(alpha, uniform_B.device)
    after_B = torch.searchsorted(cdf_T, uniform_B, right=True).clamp(1, len(cdf_T) - 1)
    low_B, high_B = cdf_T[after_B - 1], cdf_T[after_B]
    return (after_B - 1 + (uniform_B - low_B) / (high_B - low_B)) / (len(cdf_T) - 1)


def _beta_cdf(alpha: float, device: torch.device) -> Tensor:
    """The CDF of Beta(alpha, alpha) at 0, 0.001, ..., 1.

    Computed on the device each time: it is nothing beside the photos, and a copy kept from the host could not be made
    in a CUDA graph.
    """
    # The density x^(alpha - 1) (1 - x)^(alpha - 1), which is symmetric, is integrated from 0 to 1/2 by four points in
    # each interval; over t = x^power, which takes the pole at 0 away where there is one.
    power = min(alpha, 1.0)
    edges_T = torch.linspace(0, 0.5, 501, dtype=torch.float64, device=device) ** power
    length_T1 = edges_T.diff()[:, None]
    middle_4 = (torch.arange(4, device=device) + 0.5) / 4
    x_T4 = (edges_T[:-1, None] + length_T1 * middle_4) ** (1 / power)
    density_T4 = (4 * x_T4 * (1 - x_T4)) ** (alpha - power) * (1 - x_T4) ** (power - 1)
    piece_T = (density_T4 * length_T1).sum(1)
    # In whole numbers, since torch has no sum of floats along the way on a GPU that is the same every time.
    sum_T = (piece_T / piece_T.sum() * 2**40).round().long().cumsum(0)
    half_T = F.pad(sum_T / (2 * sum_T[-1]), (1, 0))
    return torch.cat((half_T, 1 - half_T[:-1].flip(0))).float()
