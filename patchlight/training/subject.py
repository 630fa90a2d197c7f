"""Learning where the subject is, beside what it is: the class token is taught to look at it.

In the last block the class token asks (q), every patch answers (k), and the product says how much it looks there. That
score, the mean over the heads, is taught to say how much of each patch the subject covers: by its mask where there is
one, else by the boxes of the photo's objects. So what lights up is the model's own attention, and every tool that shows
attention shows it.

Photos lie in memory, each on a square canvas, and random parts of them are cut on the device: mostly parts that hold
the whole subject, anywhere in them, so that nothing is learnt from its usually being in the middle. Photos that are
known to show nothing teach that, too, and are what small subjects are pasted into (scenes.py).
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from patchlight.config import PreprocessConfig, Size, SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.explain.probes import largest_region
from patchlight.geometry import fit_inside
from patchlight.images.augment import cut_parts, normalise, vary_colours
from patchlight.images.decode import ImageError
from patchlight.images.draws import Draws
from patchlight.models.attention import Heads
from patchlight.models.families import Model
from patchlight.models.vit import ViT
from patchlight.training.config import SubjectConfig, TrainConfig
from patchlight.training.data import Batch, Dataset
from patchlight.training.learner import Learner, as_squares
from patchlight.training.marks import MASK_SIDE
from patchlight.training.scenes import EMPTY, LEAST_PEAK, NAMED_FROM, Scenes, paste_subjects, stands_out, vary_scenes
from patchlight.training.workers import in_workers

NO_BOXES = "has no boxes; give a CSV with the columns file,label,x0,y0,x1,y1, or file,label,boxes or file,label,mask"


class FindSubject(Learner):
    """A ViT whose class token names the subject and looks at it."""

    vit: ViT
    boxes_NM4: Tensor
    nothing_N: Tensor
    mask_N: Tensor
    masks_SGG: Tensor
    extents_N2: Tensor

    def __init__(self, vit: ViT, config: TrainConfig, training: Dataset) -> None:
        super().__init__()
        if config.subject is None:
            raise PatchlightError("finding subjects needs its settings: TrainConfig(subject=SubjectConfig(), ...)")
        if not vit.config.class_token:
            raise PatchlightError("the class token is what looks at the subject; set model.class_token=True")
        marks = training.marks
        if marks is None or not marks.boxes_NM4.isfinite().any():
            raise PatchlightError(f"{config.data.train}: {NO_BOXES}")
        assert training.extents_N2 is not None
        self.vit, self.config, self.subject = vit, config, config.subject
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.full((), -1.0))
        # Not part of what is kept: they come with the photos.
        self.register_buffer("boxes_NM4", marks.boxes_NM4, persistent=False)
        self.register_buffer("nothing_N", marks.nothing_N, persistent=False)
        self.register_buffer("mask_N", marks.mask_N, persistent=False)
        empty_1GG = marks.masks_SGG.new_zeros(1, MASK_SIDE, MASK_SIDE)  # for the photos that have none
        self.register_buffer("masks_SGG", marks.masks_SGG if len(marks.masks_SGG) else empty_1GG, persistent=False)
        self.register_buffer("extents_N2", training.extents_N2.float(), persistent=False)
        self.scenes = None
        if self.subject.paste:
            self.scenes = Scenes(training)
            if not len(self.scenes) or not self.scenes.pastable_S.any():
                raise PatchlightError(
                    f"{config.data.train}: subject.paste={self.subject.paste} needs photos that show nothing "
                    "(boxes []) and masks of whole subjects; add such rows, or set subject.paste=0"
                )

    def reading(self) -> PreprocessConfig:
        return as_squares(self.config.preprocess, self.subject.canvas)

    def subject_heat(self) -> SubjectHeat:
        return SubjectHeat(scale=self.log_scale.exp().item(), bias=self.bias.item())

    def saved_with(self) -> dict[str, Any]:
        return {"subject": self.subject_heat()}

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        """Parts of the photos, their labels, what of each patch the subject covers, and which of both count."""
        draws, config = Draws(self.config.seed, batch.epochs_B, batch.samples_B, batch.repeats_B), self.subject
        labels_B = batch.labels_B
        boxes_BM4, extent_B2 = self.boxes_NM4[batch.samples_B], self.extents_N2[batch.samples_B]
        part_B4 = choose_parts(choose_objects(boxes_BM4, draws, config), extent_B2, draws, config)
        flip_B = draws.chance("flip", 0.5)
        within_BM4, covered_Bhw, main_B, placed_B = self._found(batch.samples_B, part_B4, flip_B)
        named_B = main_B & (labels_B >= 0)
        if self.scenes is None:
            images_BCHW = cut_parts(batch.images_BCHW, part_B4, flip_B, self.vit.config.image_size)
        else:
            made = self._with_scenes(batch, self.scenes, part_B4, flip_B, draws)
            images_BCHW, scene_B, scene_labels_B, scene_covered_Bhw, scene_box_B4, scene_named_B = made
            pasted_BM4 = torch.full_like(within_BM4, math.nan)
            pasted_BM4[:, 0] = scene_box_B4
            within_BM4 = torch.where(scene_B[:, None, None], pasted_BM4, within_BM4)
            labels_B = torch.where(scene_B, scene_labels_B, labels_B)
            covered_Bhw = torch.where(scene_B[:, None, None], scene_covered_Bhw, covered_Bhw)
            named_B, placed_B = torch.where(scene_B, scene_named_B, named_B), placed_B | scene_B
        images_BCHW = vary_colours(images_BCHW, draws, colour=config.colour, grey=config.grey)
        images_BCHW = normalise(images_BCHW, self.config.preprocess)
        objects_Bhw4, inside_Bhw = objects_of_patches(within_BM4, self.vit.config.grid)
        inside_Bhw = inside_Bhw * placed_B[:, None, None] * covered_Bhw
        return images_BCHW, labels_B, covered_Bhw, named_B, placed_B, objects_Bhw4, inside_Bhw

    def _found(self, samples_B: Tensor, part_B4: Tensor, flip_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In these parts of photos: the objects' boxes in shares of the sides (NaN where there are none), covered_Bhw,
        whether the main object can be named, and whether the place counts."""
        boxes_BM4, mask_B, grid = self.boxes_NM4[samples_B], self.mask_N[samples_B], self.vit.config.grid
        most = boxes_BM4.shape[1]
        within_BM4 = box_within(
            boxes_BM4.flatten(0, 1), part_B4.repeat_interleave(most, 0), flip_B.repeat_interleave(most, 0)
        ).unflatten(0, (-1, most))
        boxes_BM4, known_BM = within_BM4, within_BM4.isfinite().all(2)
        within_BM4 = torch.where(known_BM[:, :, None], within_BM4, 0)
        visible_BM = _area(within_BM4.clamp(0, 1)) / _area(within_BM4).clamp(min=1e-6)
        enough_BM = visible_BM >= self.subject.visible
        # Objects of which little is in the part are covered all the same where another is there.
        seen_B = enough_BM.any(1) | (visible_BM == 0).all(1)
        placed_B = (known_BM.any(1) & seen_B) | self.nothing_N[samples_B]
        covered_Bhw = coverage(within_BM4.flatten(0, 1), grid).unflatten(0, (-1, most)).amax(1)
        masks_BGG = self.masks_SGG[mask_B.clamp(min=0)].float() / 255
        by_mask_Bhw = mask_coverage(masks_BGG, part_B4, flip_B, self.extents_N2[samples_B], grid)
        by_mask_Bhw = mixed_coverage(by_mask_Bhw, covered_Bhw, self.subject.mask_share)
        covered_Bhw = torch.where((mask_B >= 0)[:, None, None], by_mask_Bhw, covered_Bhw)
        return boxes_BM4, covered_Bhw * placed_B[:, None, None], enough_BM[:, 0] | ~known_BM[:, 0], placed_B

    def _with_scenes(
        self, batch: Batch, scenes: Scenes, part_B4: Tensor, flip_B: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Parts of the photos and, in place of some, scenes; which are scenes, and these ones' labels, coverage, box
        and whether they can be named."""
        draws, size, grid = draws.part("scenes"), self.vit.config.image_size, self.vit.config.grid
        mask_B = self.mask_N[batch.samples_B]
        donor_B, any_donor_B = scenes.choose_donors(mask_B, draws)
        scene_B = draws.chance("paste", self.subject.paste) & any_donor_B
        canvases_BCHW, extent_B2 = scenes.choose(draws)
        anywhere_B4 = choose_parts(torch.zeros_like(part_B4), extent_B2, draws, self.subject)
        images_BCHW = cut_parts(
            torch.where(scene_B[:, None, None, None], canvases_BCHW, batch.images_BCHW),
            torch.where(scene_B[:, None], anywhere_B4, part_B4),
            flip_B,
            size,
        )
        size_B2 = anywhere_B4[:, 2:] - anywhere_B4[:, :2]
        donor_mask_B = mask_B[donor_B].clamp(min=0)
        colours_BCHW, opacity_BHW, box_B4 = paste_subjects(
            images_BCHW,
            size_B2[:, 0] / size_B2[:, 1],
            batch.images_BCHW[donor_B],
            self.masks_SGG[donor_mask_B].float() / 255,
            scenes.around_S4[donor_mask_B],
            self.extents_N2[batch.samples_B][donor_B],
            draws,
        )
        changed_BCHW = colours_BCHW - images_BCHW * opacity_BHW[:, None]
        pasted_B = scene_B & ~draws.chance("empty", EMPTY) & stands_out(changed_BCHW, opacity_BHW)
        pasted_BCHW = images_BCHW + changed_BCHW * pasted_B[:, None, None, None]
        images_BCHW = torch.where(scene_B[:, None, None, None], vary_scenes(pasted_BCHW, draws), images_BCHW)

        covered_Bhw = F.adaptive_avg_pool2d(opacity_BHW[:, None], grid)[:, 0]
        covered_Bhw = mixed_coverage(covered_Bhw, coverage(box_B4, grid), self.subject.mask_share)
        peak_B11 = covered_Bhw.amax((1, 2), keepdim=True).clamp(min=1e-6)
        covered_Bhw = (covered_Bhw * (LEAST_PEAK / peak_B11).clamp(min=1)).clamp(max=1) * pasted_B[:, None, None]
        labels_B = batch.labels_B[donor_B]
        large_B = (box_B4[:, 2:] - box_B4[:, :2]).amax(1) >= NAMED_FROM
        box_B4 = torch.where(pasted_B[:, None], box_B4, math.nan)
        return images_BCHW, scene_B, labels_B, covered_Bhw, box_B4, pasted_B & large_B & (labels_B >= 0)

    def forward(self, *inputs: Tensor) -> Tensor:
        images_BCHW, labels_B, covered_Bhw, named_B, placed_B, objects_Bhw4, inside_Bhw = inputs
        logits_BK, score_Bhw, said = look(self.vit, images_BCHW)
        naming_B = F.cross_entropy(
            logits_BK.float(), labels_B.clamp(min=0), reduction="none", label_smoothing=self.config.label_smoothing
        )
        heat_Bhw = self.log_scale.exp() * score_Bhw.float() + self.bias
        placing_B = place_loss(heat_Bhw, covered_Bhw)
        named_B, placed_B = named_B.float(), placed_B.float()
        naming = (naming_B * named_B).sum() / named_B.sum().clamp(min=1)
        placing = (placing_B * placed_B).sum() / placed_B.sum().clamp(min=1)
        loss = naming + self.subject.weight * placing
        if said is not None:
            loss = loss + self.subject.box_weight * box_loss(*said, objects_Bhw4, inside_Bhw)
        return loss

    def judge(self, shown: Model, training: Dataset, validation: Dataset, device: torch.device) -> "SubjectEvaluation":
        assert isinstance(shown, ViT)
        return evaluate_subjects(shown, self.subject_heat(), validation, self.config, device)


def look(vit: ViT, images_BCHW: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """What the model says, logits_BK, how much the last block's class token looks at each patch, score_Bhw, and what
    the patches say of their objects' boxes, where they do."""
    x_BND, geometry = vit.embed(images_BCHW)
    *blocks, last = vit.blocks
    for block in blocks:
        x_BND = block(x_BND, geometry)
    said = None if vit.patch_boxes is None else vit.patch_boxes(x_BND[:, geometry.num_prefix :], geometry.grid)
    heads: list[Heads] = []
    x_BND = last(x_BND, geometry, heads)
    if vit.config.final_norm == "tokens":
        x_BND = vit.norm(x_BND)
    q_BAE, k_BAPE = heads[0].q_BANE[:, :, 0], heads[0].k_BANE[:, :, geometry.num_prefix :]
    score_BP = (q_BAE[:, :, None] * k_BAPE).sum(-1).mean(1) / math.sqrt(q_BAE.shape[-1])
    return vit.read(x_BND, geometry), score_BP.unflatten(1, geometry.grid), said


def place_loss(heat_Bhw: Tensor, covered_Bhw: Tensor) -> Tensor:
    """How far sigmoid(heat) is from what is covered, (B,): patch by patch, and as a whole (Dice)."""
    apart_B = F.binary_cross_entropy_with_logits(heat_Bhw, covered_Bhw, reduction="none").mean((1, 2))
    share_Bhw = heat_Bhw.sigmoid()
    both_B, sum_B = (share_Bhw * covered_Bhw).sum((1, 2)), (share_Bhw + covered_Bhw).sum((1, 2))
    return apart_B + 1 - (2 * both_B + 1) / (sum_B + 1)


def box_loss(boxes_Bhw4: Tensor, trust_Bhw: Tensor, objects_Bhw4: Tensor, inside_Bhw: Tensor) -> Tensor:
    """How far the patches' boxes are from those of their objects, and their trust from how near they are.

    Patches of small objects count for more, by the root of the area: else large ones are all that counts.
    """
    overlap_Bhw, bound_Bhw = overlaps(boxes_Bhw4, objects_Bhw4)
    weight_Bhw = inside_Bhw / _area(objects_Bhw4).clamp(min=1e-3).sqrt()
    apart_Bhw = 1 - bound_Bhw + (boxes_Bhw4 - objects_Bhw4).abs().mean(3)
    apart_Bhw = apart_Bhw + F.binary_cross_entropy_with_logits(trust_Bhw, overlap_Bhw.detach(), reduction="none")
    return (apart_Bhw * weight_Bhw).sum() / weight_Bhw.sum().clamp(min=1)


# Where subjects are: boxes are x0, y0, x1, y1


def choose_objects(boxes_BM4: Tensor, draws: Draws, config: SubjectConfig) -> Tensor:
    """What a part is to hold of each photo: all its objects together, or one of them, which mostly is the main one."""
    known_BM = boxes_BM4.isfinite().all(2)
    first_B2 = torch.where(known_BM[:, :, None], boxes_BM4[:, :, :2], math.inf).amin(1)
    last_B2 = torch.where(known_BM[:, :, None], boxes_BM4[:, :, 2:], -math.inf).amax(1)
    count_B = known_BM.sum(1)
    other_B = (draws.uniform("which object") * count_B).long().clamp(max=boxes_BM4.shape[1] - 1)
    one_B = torch.where(draws.chance("main object", 0.7), 0, other_B)
    one_B4 = boxes_BM4.gather(1, one_B[:, None, None].expand(-1, 1, 4))[:, 0]
    together_B = draws.chance("together", config.together) & (count_B > 1)
    return torch.where(together_B[:, None], torch.cat((first_B2, last_B2), 1), one_B4)


def choose_parts(box_B4: Tensor, extent_B2: Tensor, draws: Draws, config: SubjectConfig) -> Tensor:
    """A part of each photo, in its pixels: one with the whole subject at any place in it, or any part."""
    (height_B, width_B), side_B = extent_B2.unbind(1), torch.ones_like(extent_B2[:, 0])
    area_B = draws.uniform("part area", config.area[0], min(1.0, config.area[1]))
    aspect_B = draws.uniform("part aspect", math.log(config.aspect[0]), math.log(config.aspect[1])).exp()
    across_B = (area_B * aspect_B).sqrt().minimum(side_B) * width_B
    down_B = (area_B / aspect_B).sqrt().minimum(side_B) * height_B
    x0_B, y0_B = draws.uniform("part x") * (width_B - across_B), draws.uniform("part y") * (height_B - down_B)
    any_B4 = torch.stack((x0_B, y0_B, x0_B + across_B, y0_B + down_B), 1)

    box_B4 = torch.where(box_B4.isfinite(), box_B4, 0)
    margin_B4 = draws.uniforms("margins", 4)
    # Some margins are small, or a subject would seldom touch a side of the frame; others are all that there is.
    kind_B4 = draws.uniforms("kinds of margins", 4)
    margin_B4 = torch.where(kind_B4 < 0.2, margin_B4 * 0.1, margin_B4)
    margin_B4 = torch.where(kind_B4 >= 1 - config.to_the_edge, 1, margin_B4)
    first_B2 = box_B4[:, :2] * (1 - margin_B4[:, :2])
    last_B2 = box_B4[:, 2:] + (extent_B2.flip(1) - box_B4[:, 2:]).clamp(min=0) * margin_B4[:, 2:]
    with_subject_B4 = _not_too_long(torch.cat((first_B2, last_B2), 1), extent_B2, config.aspect[1])
    whole_B = draws.chance("whole subject", config.whole) & (_area(box_B4) > 0)
    return torch.where(whole_B[:, None], with_subject_B4, any_B4)


def _not_too_long(part_B4: Tensor, extent_B2: Tensor, aspect: float) -> Tensor:
    """The part widened on its short side, as far as the photo goes, where it is longer than the aspect allows."""
    size_B2, whole_B2 = part_B4[:, 2:] - part_B4[:, :2], extent_B2.flip(1)
    wanted_B2 = torch.minimum(torch.maximum(size_B2, size_B2.flip(1) / aspect), whole_B2)
    first_B2 = torch.minimum((part_B4[:, :2] - (wanted_B2 - size_B2) / 2).clamp(min=0), whole_B2 - wanted_B2)
    return torch.cat((first_B2, first_B2 + wanted_B2), 1)


def box_within(box_B4: Tensor, part_B4: Tensor, flip_B: Tensor) -> Tensor:
    """The boxes in their parts, mirrored where those are: shares of the part's sides, outside of 0..1 beyond it."""
    size_B2 = part_B4[:, 2:] - part_B4[:, :2]
    within_B4 = (box_B4 - part_B4[:, :2].repeat(1, 2)) / size_B2.repeat(1, 2)
    x0_B, y0_B, x1_B, y1_B = within_B4.unbind(1)
    mirrored_B4 = torch.stack((1 - x1_B, y0_B, 1 - x0_B, y1_B), 1)
    return torch.where(flip_B[:, None], mirrored_B4, within_B4)


def coverage(box_B4: Tensor, grid: Size) -> Tensor:
    """What share of each patch a box (in shares of the image's sides) covers: (B, h, w)."""
    (h, w), (x0_B1, y0_B1, x1_B1, y1_B1) = grid, box_B4.clamp(0, 1).split(1, 1)
    column_w, row_h = torch.arange(w, device=box_B4.device), torch.arange(h, device=box_B4.device)
    across_Bw = ((x1_B1 * w).minimum(column_w + 1) - (x0_B1 * w).maximum(column_w)).clamp(0, 1)
    down_Bh = ((y1_B1 * h).minimum(row_h + 1) - (y0_B1 * h).maximum(row_h)).clamp(0, 1)
    return down_Bh[:, :, None] * across_Bw[:, None]


def objects_of_patches(within_BM4: Tensor, grid: Size) -> tuple[Tensor, Tensor]:
    """For each patch the smallest of the boxes (in shares of the image's sides, NaN for none) that it lies in: half of
    it, or half of the box. The part of that box within the image, objects_Bhw4, and whether there is one."""
    known_BM = within_BM4.isfinite().all(2)
    boxes_BM4 = torch.where(known_BM[:, :, None], within_BM4, 0).clamp(0, 1)
    covered_BMhw = coverage(boxes_BM4.flatten(0, 1), grid).unflatten(0, boxes_BM4.shape[:2])
    area_BM11 = _area(boxes_BM4)[:, :, None, None]
    lies_in_BMhw = covered_BMhw >= 0.5 * (area_BM11 * math.prod(grid)).clamp(min=1e-3, max=1)
    area_Bhw, which_Bhw = torch.where(lies_in_BMhw, area_BM11, math.inf).min(1)
    objects_Bhw4 = boxes_BM4.gather(1, which_Bhw.flatten(1)[:, :, None].expand(-1, -1, 4)).unflatten(1, grid)
    return objects_Bhw4, area_Bhw.isfinite()


def mask_coverage(masks_BGG: Tensor, part_B4: Tensor, flip_B: Tensor, extent_B2: Tensor, grid: Size) -> Tensor:
    """What share of each patch a mask (over the whole photo, from 0 to 1) covers in a part of the photo: (B, h, w)."""
    points = 6  # a side of a patch, which are averaged
    share_B4 = part_B4 / extent_B2.flip(1).repeat(1, 2)
    first_B2, size_B2 = share_B4[:, :2], share_B4[:, 2:] - share_B4[:, :2]

    def along(axis: int, count: int) -> Tensor:
        at = (torch.arange(points * count, device=part_B4.device) + 0.5) / (points * count)
        at_BT = torch.where(flip_B[:, None], 1 - at, at) if axis == 0 else at.expand(len(part_B4), -1)
        return 2 * (first_B2[:, axis, None] + size_B2[:, axis, None] * at_BT) - 1

    x_BW, y_BH = along(0, grid[1]), along(1, grid[0])
    rows, columns = y_BH.shape[1], x_BW.shape[1]
    at_BHW2 = torch.stack((x_BW[:, None].expand(-1, rows, -1), y_BH[:, :, None].expand(-1, -1, columns)), 3)
    sampled_B1HW = F.grid_sample(masks_BGG[:, None], at_BHW2, padding_mode="border", align_corners=False)
    return F.avg_pool2d(sampled_B1HW, points)[:, 0]


def mixed_coverage(by_mask_Bhw: Tensor, by_box_Bhw: Tensor, mask_share: float) -> Tensor:
    """The share of each patch's side, rather than of its area, that a mask covers, mixed with that of the box.

    The root makes more of a leg that covers a quarter of a patch, and nothing of a patch without any of it.
    """
    return mask_share * by_mask_Bhw.clamp(0, 1).sqrt() + (1 - mask_share) * by_box_Bhw


def _area(box_B4: Tensor) -> Tensor:
    """Of boxes (..., 4)."""
    return (box_B4[..., 2] - box_B4[..., 0]).clamp(min=0) * (box_B4[..., 3] - box_B4[..., 1]).clamp(min=0)


# Photos on canvases


def on_canvases(dataset: Dataset, side: int, workers: int) -> Dataset:
    """The photos in memory, each in the top left of a canvas of side x side pixels, which its border goes on into.

    Those that do not fit are made smaller, and their boxes with them. What cannot be read any more is refused.
    """
    # Photos with more than one row are read, and kept, once.
    place: dict[str, int] = {}
    image_N = torch.tensor([place.setdefault(name, len(place)) for name in dataset.names], dtype=torch.int64)
    _, first_I = np.unique(image_N.numpy(), return_index=True)
    step, count = 64, len(place)
    chunks = [first_I[i : i + step].tolist() for i in range(0, count, step)]
    images_ICHW = torch.empty((count, 3, side, side), dtype=torch.uint8)
    extents_I2, scale_I = torch.empty((count, 2)), torch.empty(count)
    for start, found in zip(range(0, count, step), in_workers(_Canvases(dataset, side), chunks, workers), strict=True):
        rows = slice(start, start + step)
        images_ICHW[rows], extents_I2[rows], scale_I[rows] = found
    extents_N2, scale_N = extents_I2[image_N], scale_I[image_N]
    kept = Dataset(
        dataset.classes,
        dataset.labels_N,
        dataset.names,
        images_NCHW=images_ICHW,
        image_N=None if count == len(dataset) else image_N,
        notes=dataset.notes,
    )
    kept.extents_N2 = extents_N2
    kept._hashes = dataset._hashes
    kept._fingerprint = dataset.fingerprint()  # of the files; hashing all these pixels would take as long as reading
    if dataset.marks is not None:
        kept.marks = dataset.marks.on_canvases(scale_N, extents_N2)
    return kept


class _Canvases:
    """Reads some photos: canvases_BCHW, their extents_B2 (height, width) on them, and how much smaller they became."""

    def __init__(self, dataset: Dataset, side: int) -> None:
        self.dataset, self.side = dataset, side

    def __call__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        canvases, extents, scales = [], [], []
        for index in indices:
            try:
                photo = self.dataset.read(index, fast_size=(self.side, self.side))
            except ImageError as error:
                raise PatchlightError(f"{error}; restore the photo, or start a new run") from None
            height, width = fit_inside(photo.source_size, self.side)
            small = photo.image.resize((width, height), Image.Resampling.BICUBIC, box=dataclasses.astuple(photo.region))
            pixels_CHW = torch.from_numpy(np.array(small)).permute(2, 0, 1)
            below, right = self.side - height, self.side - width
            padded_CHW = F.pad(pixels_CHW[None].float(), (0, right, 0, below), mode="replicate")[0]
            canvases.append(padded_CHW.to(torch.uint8))
            extents.append((height, width))
            scales.append(min(1.0, self.side / max(photo.source_size)))
        return torch.stack(canvases), torch.tensor(extents), torch.tensor(scales)


# How good it is


@dataclass(frozen=True)
class SubjectEvaluation:
    """How often the subject was named, and found."""

    photos: int
    accuracy: float | None
    """Of the photos that have a label; None where none has."""
    boxed: int
    """Photos of which a box is known."""
    found: float | None
    """The share of them where the box that was found overlaps that of any of its objects by half or more (CorLoc); None
    where there are none."""
    overlap: float | None
    """Intersection over union with the object that it overlaps best, in the mean over all of them."""
    nothing: float | None
    """Of the photos that are known to show nothing, the share where nothing was found."""

    def course(self) -> dict[str, float]:
        known = {"accuracy": self.accuracy, "found": self.found, "overlap": self.overlap, "nothing": self.nothing}
        return {name: value for name, value in known.items() if value is not None}

    def summary(self) -> dict[str, Any]:
        given = {"photos": self.photos, "accuracy": self.accuracy, "subject_found": self.found, "overlap": self.overlap}
        return given if self.nothing is None else given | {"nothing_found_where_there_is_none": self.nothing}


def evaluate_subjects(
    model: ViT, heat: SubjectHeat, photos: Dataset, config: TrainConfig, device: torch.device, batch_size: int = 256
) -> SubjectEvaluation:
    """How well the model names and finds what is on whole photos (on canvases)."""
    assert photos.images_NCHW is not None
    assert photos.extents_N2 is not None
    assert photos.marks is not None
    right, overlaps, warm = 0, [], []
    for start in range(0, len(photos), batch_size):
        rows = slice(start, start + batch_size)
        boxes_BM4, extent_B2 = photos.marks.boxes_NM4[rows].to(device), photos.extents_N2[rows].to(device)
        part_B4 = torch.cat((torch.zeros_like(extent_B2), extent_B2.flip(1)), 1)
        as_it_is_B = torch.zeros(len(part_B4), dtype=torch.bool, device=device)
        canvases_BCHW = photos.images_NCHW[rows if photos.image_N is None else photos.image_N[rows]]
        images_BCHW = cut_parts(canvases_BCHW.to(device), part_B4, as_it_is_B, model.config.image_size)
        logits_BK, score_Bhw, said = look(model, normalise(images_BCHW, config.preprocess))
        right += int((logits_BK.argmax(1).cpu() == photos.labels_N[rows]).sum())
        share_Bhw = (heat.scale * score_Bhw.float() + heat.bias).sigmoid()
        warm_Bhw = share_Bhw >= 0.5
        found_B4 = box_around(largest_region(warm_Bhw, share_Bhw))
        if said is not None:
            found_B4 = agreed_box(share_Bhw, *said)
        each_BM = [overlap(found_B4, box_within(box_B4, part_B4, as_it_is_B)) for box_B4 in boxes_BM4.unbind(1)]
        overlaps.append(torch.stack(each_BM, 1).nan_to_num(-1.0).amax(1).cpu())  # -1 where no box is known
        warm.append(warm_Bhw.flatten(1).any(1).cpu())
    overlap_N = torch.cat(overlaps).double()
    overlap_R = overlap_N[photos.marks.boxes_NM4.isfinite().all(2).any(1)]
    empty_R = ~torch.cat(warm)[photos.marks.nothing_N]
    named = int((photos.labels_N >= 0).sum())
    return SubjectEvaluation(
        photos=len(photos),
        accuracy=right / named if named else None,
        boxed=len(overlap_R),
        found=(overlap_R >= 0.5).double().mean().item() if len(overlap_R) else None,
        overlap=overlap_R.mean().item() if len(overlap_R) else None,
        nothing=empty_R.double().mean().item() if len(empty_R) else None,
    )


def box_around(mask_Bhw: Tensor) -> Tensor:
    """The boxes of bool masks, in shares of their sides; all 0 where a mask is empty."""
    h, w = mask_Bhw.shape[1:]
    across_Bw, down_Bh = mask_Bhw.any(1).int(), mask_Bhw.any(2).int()
    x0_B, y0_B = across_Bw.argmax(1) / w, down_Bh.argmax(1) / h
    x1_B, y1_B = 1 - across_Bw.flip(1).argmax(1) / w, 1 - down_Bh.flip(1).argmax(1) / h
    return torch.stack((x0_B, y0_B, x1_B, y1_B), 1) * mask_Bhw.any(2).any(1)[:, None]


def agreed_box(share_Bhw: Tensor, boxes_Bhw4: Tensor, trust_Bhw: Tensor) -> Tensor:
    """The mean of the boxes that most warm patches agree on (overlap by half), in shares of the sides: (B, 4)."""
    boxes_BP4, weight_BP = boxes_Bhw4.flatten(1, 2).clamp(0, 1), (share_Bhw * trust_Bhw.sigmoid()).flatten(1)
    agree_BPP = overlaps(boxes_BP4[:, :, None], boxes_BP4[:, None])[0] >= 0.5
    best_B = (agree_BPP * weight_BP[:, None]).sum(2).argmax(1)
    weight_BP = weight_BP * agree_BPP[torch.arange(len(best_B), device=best_B.device), best_B]
    return (boxes_BP4 * weight_BP[:, :, None]).sum(1) / weight_BP.sum(1, keepdim=True).clamp(min=1e-9)


def overlap(a_B4: Tensor, b_B4: Tensor) -> Tensor:
    """Intersection over union, (B,)."""
    return overlaps(a_B4, b_B4)[0]


def overlaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Of boxes (..., 4): intersection over union; and the same less the share of the box around both that is in
    neither (generalised intersection over union, Rezatofighi et al. 2019, arXiv:1902.09630)."""
    shared = _area(torch.cat((torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])), -1))
    around = _area(torch.cat((torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])), -1))
    either = (_area(a) + _area(b) - shared).clamp(min=1e-9)
    return shared / either, shared / either - (around - either) / around.clamp(min=1e-9)
