"""Scenes with a small subject: one that was cut out of a photo by its mask, pasted into a photo that shows nothing.

Subjects fill most photos that people mark; a camera in a wood shows them as a few pixels of its frame, or shows none.
All of it is made on the device, for each photo of a batch, in shapes that depend on no draw, so that it can be part of
a CUDA graph.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.config import Size
from patchlight.images.draws import Draws
from patchlight.training.data import Dataset
from patchlight.training.marks import boxes_around

MOST_SCENES = 2000
"""Photos that are kept as backgrounds."""

WIDTHS = 0.02, 0.25
"""How wide a pasted subject is, in shares of the frame."""

HIGHEST = 0.6
"""How high it is at most."""

LARGEST = 1.5
"""Times as large as it is on its canvas: more would show that it has few pixels."""

NAMED_FROM = 0.1
"""The longer side, in shares of the frame, of a pasted subject that can be told by what it is."""

EMPTY = 0.25
"""The share of scenes that nothing is pasted into."""

LEAST_CHANGE = 0.8
"""Of a frame by a pasted subject: the difference of levels from 0 to 1, summed over the pixels. Five pixels of 0.16."""

LEAST_PEAK = 0.6
"""Of the coverage of a subject that is smaller than a patch, so that it is worth finding."""


class Scenes(nn.Module):
    """Photos that show nothing, and which masks have a subject that can be cut out."""

    canvases_GCHW: Tensor
    extents_G2: Tensor
    around_S4: Tensor
    pastable_S: Tensor

    def __init__(self, training: Dataset) -> None:
        super().__init__()
        assert training.images_NCHW is not None
        assert training.extents_N2 is not None
        assert training.marks is not None
        nothing_G = training.marks.nothing_N.nonzero()[:, 0]
        if len(nothing_G) > MOST_SCENES:
            nothing_G = nothing_G[torch.arange(MOST_SCENES) * len(nothing_G) // MOST_SCENES]
        around_S4 = boxes_around(training.marks.masks_SGG)
        size_S2 = around_S4[:, 2:] - around_S4[:, :2]
        # What a side of its photo cuts off would end in the air; but for the lower one, where it may stand in grass.
        uncut_S = (around_S4[:, :2] > 0.01).all(1) & (around_S4[:, 2] < 0.99)
        image_G = nothing_G if training.image_N is None else training.image_N[nothing_G]
        tensors = {
            "canvases_GCHW": training.images_NCHW[image_G],
            "extents_G2": training.extents_N2[nothing_G].float(),
            "around_S4": around_S4,
            "pastable_S": uncut_S & (size_S2.amin(1) > 0.1),
        }
        for name, tensor in tensors.items():  # not part of what is kept: they come with the photos
            self.register_buffer(name, tensor, persistent=False)

    def __len__(self) -> int:
        return len(self.canvases_GCHW)

    def choose(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """A background for each photo: canvases_BCHW and their extents_B2."""
        scene_B = draws.choice("scene", len(self))
        return self.canvases_GCHW[scene_B], self.extents_G2[scene_B]

    def choose_donors(self, mask_B: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """For each photo one of the batch whose subject can be cut out, by its place; and whether there is any."""
        so_far_B = ((mask_B >= 0) & self.pastable_S[mask_B.clamp(min=0)]).cumsum(0)
        wanted_B = (draws.uniform("donor") * so_far_B[-1]).long() + 1
        donor_B = torch.searchsorted(so_far_B, wanted_B.minimum(so_far_B[-1]))
        return donor_B.clamp(max=len(mask_B) - 1), (so_far_B > -1) & (so_far_B[-1] > 0)


def paste_subjects(
    frames_BCHW: Tensor,
    aspect_B: Tensor,
    donors_BCHW: Tensor,
    masks_BGG: Tensor,
    around_B4: Tensor,
    extents_B2: Tensor,
    draws: Draws,
) -> tuple[Tensor, Tensor, Tensor]:
    """What is pasted into each frame: its colours times its opacity (B, C, H, W), its opacity (B, H, W) and its box.

    Frames are floats from 0 to 1, each of a part of a photo that is `aspect` times as wide as high. Of the donors,
    on their canvases, the part under the mask is taken, whose box `around` is in shares of the photo. The box in the
    frame is in shares of its sides.
    """
    size = frames_BCHW.shape[2], frames_BCHW.shape[3]
    canvas = donors_BCHW.shape[2], donors_BCHW.shape[3]
    box_B4 = around_B4 * extents_B2.flip(1).repeat(1, 2)
    target_B4 = _choose_place(box_B4, aspect_B, size, draws)

    # The mask at the canvas's size, then photo and mask at the frame's, each pixel the mean of what it covers.
    start_B, (rows, columns) = torch.zeros_like(aspect_B), masks_BGG.shape[1:]
    columns_BWG = _resampling(start_B, start_B + columns, start_B, extents_B2[:, 1], canvas[1], columns)
    rows_BHG = _resampling(start_B, start_B + rows, start_B, extents_B2[:, 0], canvas[0], rows)
    opacity_BHW = rows_BHG @ masks_BGG @ columns_BWG.transpose(1, 2)
    # A little within the edge, where there is none of what was behind.
    opacity_B1HW = ((opacity_BHW - 0.3) / 0.5).clamp(0, 1)[:, None]
    layers_BCHW = torch.cat((donors_BCHW.float() / 255 * opacity_B1HW, opacity_B1HW), 1)
    mirrored_B = draws.chance("donor flip", 0.5)
    left_B = torch.where(mirrored_B, box_B4[:, 2], box_B4[:, 0])
    right_B = torch.where(mirrored_B, box_B4[:, 0], box_B4[:, 2])
    x0_B, y0_B, x1_B, y1_B = target_B4.unbind(1)
    across_BWX = _resampling(left_B, right_B, x0_B * size[1], x1_B * size[1], size[1], canvas[1])
    down_BHX = _resampling(box_B4[:, 1], box_B4[:, 3], y0_B * size[0], y1_B * size[0], size[0], canvas[0])
    count, channels = layers_BCHW.shape[:2]
    narrow = (layers_BCHW.flatten(1, 2) @ across_BWX.transpose(1, 2)).unflatten(1, (channels, canvas[0]))
    small = down_BHX @ narrow.transpose(1, 2).flatten(2)
    small_BCHW = small.view(count, size[0], channels, size[1]).transpose(1, 2)

    standing_BHW, target_B4 = _behind_grass(target_B4, size, draws)
    small_BCHW = small_BCHW * standing_BHW[:, None]
    colours_BCHW, opacity_B1HW = small_BCHW[:, :-1], small_BCHW[:, -1:]
    return _match_light(colours_BCHW, opacity_B1HW, frames_BCHW, draws), opacity_B1HW[:, 0], target_B4


def stands_out(changed_BCHW: Tensor, opacity_BHW: Tensor) -> Tensor:
    """Whether what is pasted, which changes frames by so much, can be seen there, (B,): nobody finds two grey pixels on
    grey, and to be told to find them teaches to see what is not there."""
    change_B = changed_BCHW.abs().mean(1).sum((1, 2))
    return (change_B >= LEAST_CHANGE) & (change_B >= 0.06 * opacity_BHW.sum((1, 2)))


def vary_scenes(images_BCHW: Tensor, draws: Draws) -> Tensor:
    """As cameras see at dusk, by night and out of focus: darker, blurred, grey, or lit by their own infrared lamp."""

    def for_some(name: str, share: float, changed_BCHW: Tensor, others_BCHW: Tensor) -> Tensor:
        return torch.where(draws.chance(name, share)[:, None, None, None], changed_BCHW, others_BCHW)

    def amount(name: str, low: float, high: float) -> Tensor:
        return draws.uniform(name, low, high)[:, None, None, None]

    smooth_BCHW = F.avg_pool2d(F.pad(images_BCHW, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    blurred_BCHW = torch.lerp(images_BCHW, smooth_BCHW, amount("blurred", 0.3, 1.0))
    images_BCHW = for_some("blur", 0.35, blurred_BCHW, images_BCHW)
    darker_BCHW = images_BCHW.clamp(min=1e-4) ** amount("darkness", 1.0, 2.2)
    bright_B111 = images_BCHW.mean((1, 2, 3), keepdim=True) > 0.3  # others are dark already
    images_BCHW = for_some("dark", 0.4, torch.where(bright_B111, darker_BCHW, images_BCHW), images_BCHW)
    grey_BCHW = images_BCHW.mean(1, keepdim=True).expand_as(images_BCHW)
    images_BCHW = for_some("grey scene", 0.15, grey_BCHW, images_BCHW)

    height, width = images_BCHW.shape[2:]
    y_H1 = (torch.arange(height, device=images_BCHW.device) * (2 / height) - 1)[:, None]
    x_W = torch.arange(width, device=images_BCHW.device) * (2 / width) - 1
    mean_B111 = grey_BCHW.mean((1, 2, 3), keepdim=True)
    flat_BCHW = mean_B111 + amount("infrared contrast", 0.4, 0.9) * (grey_BCHW - mean_B111)
    lamp_BCHW = flat_BCHW * (1 - amount("vignette", 0.1, 0.4) * (x_W**2 + y_H1**2))
    return for_some("infrared", 0.3, lamp_BCHW, images_BCHW)


def _choose_place(box_B4: Tensor, aspect_B: Tensor, size: Size, draws: Draws) -> Tensor:
    """Where in the frame the box goes, in shares of its sides."""
    wide_B, high_B = (box_B4[:, 2:] - box_B4[:, :2]).clamp(min=1e-3).unbind(1)
    across_B = draws.uniform("pasted width", math.log(WIDTHS[0]), math.log(WIDTHS[1])).exp()
    down_B = across_B * high_B / wide_B * aspect_B
    smaller_B = torch.minimum(HIGHEST / down_B, LARGEST * wide_B / (across_B * size[1])).clamp(max=1)
    across_B, down_B = across_B * smaller_B, down_B * smaller_B
    x0_B, y0_B = draws.uniform("pasted x") * (1 - across_B), draws.uniform("pasted y") * (1 - down_B)
    return torch.stack((x0_B, y0_B, x0_B + across_B, y0_B + down_B), 1)


def _resampling(from_B: Tensor, to_B: Tensor, start_B: Tensor, end_B: Tensor, count: int, source: int) -> Tensor:
    """How much each of `source` pixels counts in each of `count`: (B, count, source).

    From `start` to `end` these show what lies there from `from` to `to`; mirrored where that is the wrong way round.
    Each is the mean of what it covers, of a pixel at least; beyond the source there is nothing.
    """
    pixel_T, other_X = torch.arange(count, device=from_B.device), torch.arange(source, device=from_B.device)
    step_B = (to_B - from_B) / (end_B - start_B).clamp(min=1e-3)
    middle_BT = from_B[:, None] + (pixel_T + 0.5 - start_B[:, None]) * step_B[:, None]
    half_B11 = step_B.abs().clamp(min=1)[:, None, None] / 2
    first_BT1, last_BT1 = middle_BT[:, :, None] - half_B11, middle_BT[:, :, None] + half_B11
    return (last_BT1.minimum(other_X + 1) - first_BT1.maximum(other_X)).clamp(min=0) / (2 * half_B11)


def _behind_grass(target_B4: Tensor, size: Size, draws: Draws) -> tuple[Tensor, Tensor]:
    """What of the frame is not behind grass or stones, (B, H, W), for a quarter of the photos; and the box of that."""
    blades = 16
    _, y0_B, _, y1_B = target_B4.unbind(1)
    depth_B = torch.where(draws.chance("grass", 0.25), draws.uniform("grass height", 0.1, 0.5), 0) * (y1_B - y0_B)
    ragged_BT = draws.uniforms("blades", blades, 0.4, 1.0)
    end_BT = y1_B[:, None] - depth_B[:, None] * ragged_BT
    # Blades of a fortieth of the frame; narrower subjects are behind one or two of them.
    blade_W = torch.arange(size[1], device=target_B4.device) * (2.5 * blades) // size[1] % blades
    row_H1 = torch.arange(size[0], device=target_B4.device)[:, None]
    standing_BHW = (end_BT[:, blade_W.long()][:, None] * size[0] - row_H1).clamp(0, 1)
    hidden_B = depth_B > 0
    standing_BHW = torch.where(hidden_B[:, None, None], standing_BHW, 1)
    shown_B4 = torch.cat((target_B4[:, :3], end_BT.amax(1, keepdim=True)), 1)
    return standing_BHW, torch.where(hidden_B[:, None], shown_B4, target_B4)


def _match_light(colours_BCHW: Tensor, opacity_B1HW: Tensor, frames_BCHW: Tensor, draws: Draws) -> Tensor:
    """The colours (times their opacity) brought nearer to what is behind them, in brightness, hue and contrast."""
    mass_B111 = opacity_B1HW.sum((2, 3), keepdim=True).clamp(min=1e-3)

    def moments(weighted_BCHW: Tensor, levels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        mean_BC11 = weighted_BCHW.sum((2, 3), keepdim=True) / mass_B111
        square_BC11 = (weighted_BCHW * levels_BCHW).sum((2, 3), keepdim=True) / mass_B111
        return mean_BC11, (square_BC11 - mean_BC11**2).clamp(min=1e-4).sqrt()

    mean_BC11, spread_BC11 = moments(colours_BCHW, colours_BCHW / opacity_B1HW.clamp(min=1e-3))
    behind_BC11, spread_behind_BC11 = moments(frames_BCHW * opacity_B1HW, frames_BCHW)
    nearer_B111 = draws.uniform("light", 0.1, 0.6)[:, None, None, None]
    contrast_B111 = (spread_behind_BC11 / spread_BC11).clamp(0.5, 1.3).mean(1, keepdim=True)
    contrast_B111 = 1 + nearer_B111 * (contrast_B111 - 1)
    level_BC11 = mean_BC11 + nearer_B111 * (behind_BC11 - mean_BC11)
    changed_BCHW = contrast_B111 * (colours_BCHW - mean_BC11 * opacity_B1HW) + level_BC11 * opacity_B1HW
    return changed_BCHW.clamp(min=0).minimum(opacity_B1HW)
