"""Whether a map points at what the model used: take away the patches it calls important, and watch the answer.

Deletion starts from the image and takes the patches away, the most important first: the answer should fall at once.
Insertion starts from nothing and puts them back in the same order: the answer should come at once (Petsiuk et al. 2018,
"RISE", arXiv:1806.07421). The score is the difference of the two areas; a map is worth something if its score beats
`random_baseline` on the same images. It says whether the order of the patches matters to this model, with this
baseline; it does not say that a map is the reason for an answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.explain.attention import as_heat, image_for, plain_vit
from patchlight.explain.rollout import Classes, one_class_each
from patchlight.models.stems import fit_to_patches

Baseline = Literal["blur", "mean"]

BLUR = 1 / 8
"""The blur's deviation as a share of the image's shorter side: shapes are gone, the colours of regions stay."""


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """What taking patches away and putting them back did to the answer, for each of B images."""

    shares: Tensor
    """The share of the patches that was deleted or inserted at each step, from 0 to 1: (steps + 1,)."""
    deletion: Tensor
    """The answer with that share deleted, (B, steps + 1): from the whole image to the baseline."""
    insertion: Tensor
    """The answer with only that share there, (B, steps + 1): from the baseline to the whole image."""

    @property
    def deletion_area(self) -> Tensor:
        """The area under the deletion curve, (B,): lower is better."""
        return torch.trapezoid(self.deletion, self.shares)

    @property
    def insertion_area(self) -> Tensor:
        """The area under the insertion curve, (B,): higher is better."""
        return torch.trapezoid(self.insertion, self.shares)

    @property
    def score(self) -> Tensor:
        """Insertion area minus deletion area, (B,): higher is better, and near 0 if the order means nothing."""
        return self.insertion_area - self.deletion_area


@torch.no_grad()
def faithfulness(
    model: Any,
    image_BCHW: Tensor,
    heat_Bhw: Any,
    classes: Classes | None = None,
    *,
    steps: int = 16,
    baseline: Baseline = "blur",
    batch_size: int = 32,
) -> Faithfulness:
    """Deletion and insertion curves of one map an image.

    The answer is the probability of the class (`classes`: as in `attribution`; None takes the likeliest for
    the whole image), or for a model without a head the cosine similarity of the pooled features with those of the whole
    image. A deleted patch shows the baseline: "blur", the image strongly blurred, or "mean", its mean colour. Patches
    of equal heat go in reading order. An image takes about 2 * steps forward passes, `batch_size` of them at a time.
    """
    vit = plain_vit(model)
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise PatchlightError(f"{name}={value!r} must be 1 or more")
    image_BCHW, (grid,) = fit_to_patches(image_for(vit, image_BCHW), vit.config)
    image_BCHW = image_BCHW.float()
    heat_BP = _checked_heat(as_heat(heat_Bhw), (len(image_BCHW), *grid)).to(image_BCHW.device).flatten(1)
    # Each patch's place in the order, the most important first; stable, so that ties go in reading order.
    rank_BP = heat_BP.argsort(dim=1, descending=True, stable=True).argsort(1)
    num_patches = math.prod(grid)
    counts = [round(step * num_patches / steps) for step in range(steps + 1)]
    # The ranks (from, to) that are shown. Both curves pass through the whole image and through none of it: once each.
    deletion = [(count, num_patches) if count < num_patches else (0, 0) for count in counts]
    insertion = [(0, count) for count in counts]
    shown = sorted({*deletion, *insertion})
    answers_SB = _answers(model, image_BCHW, _baseline(image_BCHW, baseline), rank_BP, shown, classes, batch_size)
    return Faithfulness(
        shares=torch.tensor(counts, device=answers_SB.device) / num_patches,
        deletion=answers_SB[[shown.index(ranks) for ranks in deletion]].T,
        insertion=answers_SB[[shown.index(ranks) for ranks in insertion]].T,
    )


def random_baseline(
    model: Any,
    image_BCHW: Tensor,
    classes: Classes | None = None,
    *,
    maps: int = 8,
    seed: int = 0,
    steps: int = 16,
    baseline: Baseline = "blur",
    batch_size: int = 32,
) -> Tensor:
    """Scores of random maps, (maps, B), as the baseline for a map's own score."""
    if not isinstance(maps, int) or maps < 1:
        raise PatchlightError(f"maps={maps!r} must be 1 or more")
    vit = plain_vit(model)
    image_BCHW = image_for(vit, image_BCHW)
    grid = vit.config.grid_for((image_BCHW.shape[-2], image_BCHW.shape[-1]))
    generator = torch.Generator().manual_seed(seed)
    settings: dict[str, Any] = {"steps": steps, "baseline": baseline, "batch_size": batch_size}
    scores = []
    for _ in range(maps):
        noise_Bhw = torch.rand(len(image_BCHW), *grid, generator=generator)
        scores.append(faithfulness(model, image_BCHW, noise_Bhw, classes, **settings).score)
    return torch.stack(scores)


def _answers(
    model: Any,
    image_BCHW: Tensor,
    blank_BCHW: Tensor,
    rank_BP: Tensor,
    shown: Sequence[tuple[int, int]],
    classes: Classes | None,
    batch_size: int,
) -> Tensor:
    """What the model says of each image when only the patches of these ranks are shown: (S, B)."""
    vit = plain_vit(model)
    batch, (down, across) = len(image_BCHW), vit.config.patch_size
    grid = (image_BCHW.shape[2] // down, image_BCHW.shape[3] // across)
    whole = torch.cat([vit(images).float() for images in image_BCHW.split(batch_size)])
    chosen_B = _classes(model, whole, classes)
    ranks_S2 = torch.tensor(shown, device=image_BCHW.device)
    values = []
    # One image after the other in the inner loop: a job is (which ranks, which image).
    for jobs in torch.arange(len(shown) * batch, device=image_BCHW.device).split(batch_size):
        image = jobs % batch
        first_M1, end_M1 = ranks_S2[jobs // batch].split(1, 1)
        visible_MP = (rank_BP[image] >= first_M1) & (rank_BP[image] < end_M1)
        visible_MHW = visible_MP.unflatten(1, grid).repeat_interleave(down, 1).repeat_interleave(across, 2)
        said = vit(torch.where(visible_MHW[:, None], image_BCHW[image], blank_BCHW[image])).float()
        if chosen_B is None:
            values.append(F.cosine_similarity(said, whole[image], dim=1))
        else:
            values.append(said.softmax(1).gather(1, chosen_B[image, None])[:, 0])
    return torch.cat(values).unflatten(0, (len(shown), batch))


def _classes(model: Any, whole: Tensor, classes: Classes | None) -> Tensor | None:
    """The class to follow in each image, (B,); None for a model without a head."""
    if plain_vit(model).head is None:
        if classes is not None:
            raise PatchlightError(f"classes={classes!r} need a model with a head; without one, leave them out")
        return None
    return whole.argmax(1) if classes is None else one_class_each(classes, whole, model)


def _baseline(image_BCHW: Tensor, baseline: Baseline) -> Tensor:
    """The images with their content removed: blurred, or filled with their mean colour."""
    if baseline == "mean":
        return image_BCHW.mean((2, 3), keepdim=True).expand_as(image_BCHW)
    if baseline != "blur":
        raise PatchlightError(f"baseline={baseline!r} is not known; it is 'blur' or 'mean'")
    height, width = image_BCHW.shape[2:]
    down_HH, across_WW = (_blur(side, BLUR * min(height, width), image_BCHW) for side in (height, width))
    return down_HH @ image_BCHW @ across_WW.T


def _blur(side: int, deviation: float, like: Tensor) -> Tensor:
    """A Gaussian blur along one axis as a matrix; what would lie outside the image is left out, (side, side)."""
    places = torch.arange(side, device=like.device, dtype=like.dtype)
    weights = (-0.5 * ((places[:, None] - places) / deviation) ** 2).exp()
    return weights / weights.sum(1, keepdim=True)


def _checked_heat(heat_Bhw: Tensor, shape: tuple[int, int, int]) -> Tensor:
    if tuple(heat_Bhw.shape) != shape:
        batch, rows, columns = shape
        raise PatchlightError(
            f"heat of shape {tuple(heat_Bhw.shape)} does not fit {batch} images of {rows}x{columns} patches; "
            f"give one map for each image, {shape}"
        )
    if not heat_Bhw.isfinite().all():
        raise PatchlightError("the heat holds NaN or infinity, which have no place in an order; give finite numbers")
    return heat_Bhw
