"""Learning where the subject is, beside what it is: the class token is taught to look at it.

In the last block the class token asks (q), every patch answers (k), and the product says how much it looks there. That
score, the mean over the heads, is taught to say how much of each patch the subject's box covers. So what lights up is
the model's own attention, and every tool that shows attention shows it.

Photos lie in memory, each on a square canvas, and random parts of them are cut on the device: mostly parts that hold
the whole subject, anywhere in them, so that nothing is learnt from its usually being in the middle.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from patchlight.config import JsonConfig, PreprocessConfig, Size, SubjectHeat, check_types, require, require_within
from patchlight.errors import PatchlightError
from patchlight.explain.probes import largest_region
from patchlight.images.augment import cut_parts, normalise, vary_colours
from patchlight.images.decode import ImageError
from patchlight.images.draws import Draws
from patchlight.models.attention import Heads
from patchlight.models.families import Model
from patchlight.models.vit import ViT
from patchlight.train.data import Batch, Dataset, in_workers
from patchlight.train.learner import Learner, as_squares

if TYPE_CHECKING:  # it holds a SubjectConfig
    from patchlight.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectConfig(JsonConfig):
    """How a ViT learns where subjects are. `augment` is not used; the parts are cut as said here."""

    # What the place counts for in the loss, beside the label.
    weight: float = 3.0
    # Pixels a side of the canvas that a photo is kept on; larger photos are made smaller.
    canvas: int = 192
    # The share of photos with a box of which a part is cut that holds the whole subject; of the others any part is.
    whole: float = 0.75
    # Of the sides of such a part, the share that is the photo's own: subjects are mostly small in whole photos.
    to_the_edge: float = 0.5
    # The share of the photo's area that any part has, and its aspect.
    area: tuple[float, float] = (0.2, 1.0)
    aspect: tuple[float, float] = (0.5, 2.0)
    # A subject of which less than this share is in the part is not to be named, nor found unless none of it is there.
    visible: float = 0.35
    colour: float = 0.4
    grey: float = 0.1

    def __post_init__(self) -> None:
        check_types(self)
        require(self.weight > 0, f"weight={self.weight} must be more than 0")
        require_within(self, "canvas", 16, 4096)
        for name in ("whole", "to_the_edge", "visible", "colour", "grey"):
            require_within(self, name, 0, 1)
        for name in ("area", "aspect"):
            low, high = getattr(self, name)
            require(0 < low <= high, f"{name}={(low, high)} must rise, from more than 0")


class FindSubject(Learner):
    """A ViT whose class token names the subject and looks at it."""

    vit: ViT
    boxes_N4: Tensor
    extents_N2: Tensor

    def __init__(self, vit: ViT, config: "TrainConfig", training: Dataset) -> None:
        super().__init__()
        if config.subject is None:
            raise PatchlightError("finding subjects needs its settings: TrainConfig(subject=SubjectConfig(), ...)")
        if not vit.config.class_token:
            raise PatchlightError("the class token is what looks at the subject; set model.class_token=True")
        if training.boxes_N4 is None or not training.boxes_N4.isfinite().any():
            raise PatchlightError(
                f"{config.data.train}: has no boxes; give a CSV with the columns file,label,x0,y0,x1,y1"
            )
        assert training.extents_N2 is not None
        self.vit, self.config, self.subject = vit, config, config.subject
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.full((), -1.0))
        # Not part of what is kept: they come with the photos.
        self.register_buffer("boxes_N4", training.boxes_N4, persistent=False)
        self.register_buffer("extents_N2", training.extents_N2.float(), persistent=False)

    def reading(self) -> PreprocessConfig:
        return as_squares(self.config.preprocess, self.subject.canvas)

    def subject_heat(self) -> SubjectHeat:
        return SubjectHeat(scale=self.log_scale.exp().item(), bias=self.bias.item())

    def published_with(self) -> dict[str, Any]:
        return {"subject": self.subject_heat()}

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        """Parts of the photos, their labels, what of each patch the subject covers, and which of both count."""
        draws = Draws(self.config.seed, batch.epochs_B, batch.samples_B, batch.repeats_B)
        box_B4, extent_B2 = self.boxes_N4[batch.samples_B], self.extents_N2[batch.samples_B]
        part_B4 = choose_parts(box_B4, extent_B2, draws, self.subject)
        flip_B = draws.chance("flip", 0.5)
        images_BCHW = cut_parts(batch.images_BCHW, part_B4, flip_B, self.vit.config.image_size)
        images_BCHW = vary_colours(images_BCHW, draws, colour=self.subject.colour, grey=self.subject.grey)

        boxed_B = box_B4.isfinite().all(1)
        within_B4 = box_within(box_B4, part_B4, flip_B)
        visible_B = _area(within_B4.clamp(0, 1)) / _area(within_B4).clamp(min=1e-6)
        named_B = ~boxed_B | (visible_B >= self.subject.visible)
        placed_B = boxed_B & ((visible_B >= self.subject.visible) | (visible_B == 0))
        covered_Bhw = coverage(torch.where(placed_B[:, None], within_B4, 0), self.vit.config.grid)
        return normalise(images_BCHW, self.config.preprocess), batch.labels_B, covered_Bhw, named_B, placed_B

    def forward(self, *inputs: Tensor) -> Tensor:
        images_BCHW, labels_B, covered_Bhw, named_B, placed_B = inputs
        logits_BK, score_Bhw = look(self.vit, images_BCHW)
        naming_B = F.cross_entropy(
            logits_BK.float(), labels_B, reduction="none", label_smoothing=self.config.label_smoothing
        )
        heat_Bhw = self.log_scale.exp() * score_Bhw.float() + self.bias
        placing_B = place_loss(heat_Bhw, covered_Bhw)
        named_B, placed_B = named_B.float(), placed_B.float()
        naming = (naming_B * named_B).sum() / named_B.sum().clamp(min=1)
        placing = (placing_B * placed_B).sum() / placed_B.sum().clamp(min=1)
        return naming + self.subject.weight * placing

    def judge(self, shown: Model, training: Dataset, validation: Dataset, device: torch.device) -> "SubjectEvaluation":
        assert isinstance(shown, ViT)
        return evaluate_subjects(shown, self.subject_heat(), validation, self.config, device)


def look(vit: ViT, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """What the model says, logits_BK, and how much the last block's class token looks at each patch, score_Bhw."""
    x_BND, geometry = vit.embed(images_BCHW)
    *blocks, last = vit.blocks
    for block in blocks:
        x_BND = block(x_BND, geometry)
    heads: list[Heads] = []
    x_BND = last(x_BND, geometry, heads)
    if vit.config.final_norm == "tokens":
        x_BND = vit.norm(x_BND)
    q_BAE, k_BAPE = heads[0].q_BANE[:, :, 0], heads[0].k_BANE[:, :, geometry.num_prefix :]
    score_BP = (q_BAE[:, :, None] * k_BAPE).sum(-1).mean(1) / math.sqrt(q_BAE.shape[-1])
    return vit.read(x_BND, geometry), score_BP.unflatten(1, geometry.grid)


def place_loss(heat_Bhw: Tensor, covered_Bhw: Tensor) -> Tensor:
    """How far sigmoid(heat) is from what is covered, (B,): patch by patch, and as a whole (Dice)."""
    apart_B = F.binary_cross_entropy_with_logits(heat_Bhw, covered_Bhw, reduction="none").mean((1, 2))
    share_Bhw = heat_Bhw.sigmoid()
    both_B, sum_B = (share_Bhw * covered_Bhw).sum((1, 2)), (share_Bhw + covered_Bhw).sum((1, 2))
    return apart_B + 1 - (2 * both_B + 1) / (sum_B + 1)


# Where subjects are: boxes are x0, y0, x1, y1


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


def _area(box_B4: Tensor) -> Tensor:
    return (box_B4[:, 2] - box_B4[:, 0]).clamp(min=0) * (box_B4[:, 3] - box_B4[:, 1]).clamp(min=0)


# Photos on canvases


def on_canvases(dataset: Dataset, side: int, workers: int) -> Dataset:
    """The photos in memory, each in the top left of a canvas of side x side pixels, which its border goes on into.

    Those that do not fit are made smaller, and their boxes with them. What cannot be read any more is refused.
    """
    step = 64
    chunks = [list(range(i, min(i + step, len(dataset)))) for i in range(0, len(dataset), step)]
    images_NCHW = torch.empty((len(dataset), 3, side, side), dtype=torch.uint8)
    extents_N2, scale_N = torch.empty((len(dataset), 2)), torch.empty(len(dataset))
    for chunk, found in zip(chunks, in_workers(_Canvases(dataset, side), chunks, workers), strict=True):
        rows = slice(chunk[0], chunk[-1] + 1)
        images_NCHW[rows], extents_N2[rows], scale_N[rows] = found
    kept = Dataset(dataset.classes, dataset.labels_N, dataset.names, images_NCHW=images_NCHW, notes=dataset.notes)
    kept.extents_N2 = extents_N2
    kept._hashes = dataset._hashes
    kept._fingerprint = dataset.fingerprint()  # of the files; hashing all these pixels would take as long as reading
    if dataset.boxes_N4 is not None:
        kept.boxes_N4 = dataset.boxes_N4 * scale_N[:, None]
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
                raise PatchlightError(f"{error}; put the photo back, or start anew") from None
            scale = min(1.0, self.side / max(photo.source_size))
            height, width = (max(1, round(scale * length)) for length in photo.source_size)
            small = photo.image.resize((width, height), Image.Resampling.BICUBIC, box=dataclasses.astuple(photo.region))
            pixels_CHW = torch.from_numpy(np.array(small)).permute(2, 0, 1)
            below, right = self.side - height, self.side - width
            padded_CHW = F.pad(pixels_CHW[None].float(), (0, right, 0, below), mode="replicate")[0]
            canvases.append(padded_CHW.to(torch.uint8))
            extents.append((height, width))
            scales.append(scale)
        return torch.stack(canvases), torch.tensor(extents), torch.tensor(scales)


# How good it is


@dataclass(frozen=True)
class SubjectEvaluation:
    """How often the subject was named, and found."""

    photos: int
    accuracy: float
    boxed: int
    """Photos whose subject's box is known."""
    found: float | None
    """The share of them where the box that was found overlaps the true one by half or more (CorLoc); None where there
    are none."""
    overlap: float | None
    """Intersection over union, in the mean over all of them."""

    def course(self) -> dict[str, float]:
        known = {"accuracy": self.accuracy, "found": self.found, "overlap": self.overlap}
        return {name: value for name, value in known.items() if value is not None}

    def summary(self) -> dict[str, Any]:
        return {"photos": self.photos, "accuracy": self.accuracy, "subject_found": self.found, "overlap": self.overlap}


def evaluate_subjects(
    model: ViT, heat: SubjectHeat, photos: Dataset, config: "TrainConfig", device: torch.device, batch_size: int = 256
) -> SubjectEvaluation:
    """How well the model names and finds what is on whole photos (on canvases)."""
    assert photos.images_NCHW is not None
    assert photos.extents_N2 is not None
    assert photos.boxes_N4 is not None
    right, overlaps = 0, []
    for start in range(0, len(photos), batch_size):
        rows = slice(start, start + batch_size)
        box_B4, extent_B2 = photos.boxes_N4[rows].to(device), photos.extents_N2[rows].to(device)
        part_B4 = torch.cat((torch.zeros_like(extent_B2), extent_B2.flip(1)), 1)
        as_it_is_B = torch.zeros(len(part_B4), dtype=torch.bool, device=device)
        images_BCHW = cut_parts(photos.images_NCHW[rows].to(device), part_B4, as_it_is_B, model.config.image_size)
        logits_BK, score_Bhw = look(model, normalise(images_BCHW, config.preprocess))
        right += int((logits_BK.argmax(1).cpu() == photos.labels_N[rows]).sum())
        share_Bhw = (heat.scale * score_Bhw.float() + heat.bias).sigmoid()
        within_B4 = box_within(box_B4, part_B4, as_it_is_B)
        overlap_B = overlap(box_around(largest_region(share_Bhw >= 0.5, share_Bhw)), within_B4)
        overlaps.append(overlap_B[within_B4.isfinite().all(1)].cpu())
    overlap_M = torch.cat(overlaps).double()
    return SubjectEvaluation(
        photos=len(photos),
        accuracy=right / len(photos),
        boxed=len(overlap_M),
        found=(overlap_M >= 0.5).double().mean().item() if len(overlap_M) else None,
        overlap=overlap_M.mean().item() if len(overlap_M) else None,
    )


def box_around(mask_Bhw: Tensor) -> Tensor:
    """The boxes of bool masks, in shares of their sides; all 0 where a mask is empty."""
    h, w = mask_Bhw.shape[1:]
    across_Bw, down_Bh = mask_Bhw.any(1).int(), mask_Bhw.any(2).int()
    x0_B, y0_B = across_Bw.argmax(1) / w, down_Bh.argmax(1) / h
    x1_B, y1_B = 1 - across_Bw.flip(1).argmax(1) / w, 1 - down_Bh.flip(1).argmax(1) / h
    return torch.stack((x0_B, y0_B, x1_B, y1_B), 1) * mask_Bhw.any(2).any(1)[:, None]


def overlap(a_B4: Tensor, b_B4: Tensor) -> Tensor:
    """Intersection over union, (B,)."""
    shared_B = _area(torch.cat((torch.maximum(a_B4[:, :2], b_B4[:, :2]), torch.minimum(a_B4[:, 2:], b_B4[:, 2:])), 1))
    return shared_B / (_area(a_B4) + _area(b_B4) - shared_B).clamp(min=1e-9)
