"""Questions put to a model: how far its heads look, what its positions and tokens hold, which head found an object."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.config import Size
from patchlight.errors import PatchlightError
from patchlight.explain.artifacts import artifact_patches
from patchlight.explain.attention import image_for, plain_vit, resolve_queries
from patchlight.models.attention import Heads
from patchlight.models.positions import relative_index
from patchlight.models.token_geometry import TokenGeometry, grid_coordinates, lay_tokens
from patchlight.models.vit import Block

WEIGHTS_AT_ONCE = 2**24
"""Attention weights computed at a time (64 MB): bounds the memory, changes nothing."""


@torch.no_grad()
def attention_distance(model: Any, image_BCHW: Tensor, sizes: Sequence[Size] | None = None) -> Tensor:
    """How far each head looks: the mean distance between a patch and what it attends to, (L, A).

    In pixels of the model's image, between patch centres, weighted by the attention among patches (what goes to the
    prefix tokens is left out), averaged over the patches of an image and then over images. Low is a local head, high a
    global one: the figure of Raghu et al. 2021 (arXiv:2108.08810).
    """
    vit = plain_vit(model)
    image_BCHW = image_for(vit, image_BCHW)
    image_size, num_prefix = (image_BCHW.shape[-2], image_BCHW.shape[-1]), vit.config.num_prefix
    rows_P, columns_P = grid_coordinates(vit.config.grid_for(image_size), image_BCHW.device)
    pixels_down, pixels_across = vit.config.patch_pixels(image_size)
    down_P, across_P = rows_P * pixels_down, columns_P * pixels_across
    layers: list[Tensor] = []

    def measure(index: int, heads: Heads, x_BND: Tensor) -> None:
        batch, num_heads, num_tokens, _ = heads.q_BANE.shape
        at_once = max(1, WEIGHTS_AT_ONCE // (batch * num_heads * num_tokens))
        chunks = []
        for start in range(num_prefix, num_tokens, at_once):
            weights_BAQP = heads.rows(slice(start, start + at_once))[..., num_prefix:]
            asking = slice(start - num_prefix, start - num_prefix + at_once)
            distance_QP = torch.hypot(down_P[asking, None] - down_P, across_P[asking, None] - across_P)
            chunks.append(torch.einsum("baqp,qp->baq", weights_BAQP, distance_QP) / _not_zero(weights_BAQP.sum(3)))
        layers.append(torch.cat(chunks, 2))

    _, geometry = vit.encode(image_BCHW, sizes, measure)
    distance_LBAP = torch.stack(layers)
    if geometry.valid_BN is None:
        return distance_LBAP.mean((1, 3))
    valid_B1P = geometry.valid_BN[:, None, num_prefix:]
    return (distance_LBAP.where(valid_B1P, 0).sum(3) / valid_B1P.sum(2)).mean(1)


@torch.no_grad()
def position_similarity(model: Any, grid: Size | None = None) -> Tensor:
    """How alike the model takes the positions of two patches to be: (h, w, h, w), patch by patch.

    For position="learned" and "sincos2d" the cosine of the two rows that are added to the patches (the figure of the
    ViT paper), for "rope2d" the mean cosine of the angles between the two patches' rotations: what is left of q . k,
    relative to its length, where a query equals the key; for "rope_mixed" the same in the first block, averaged over
    heads. For "relative_bias" and "relative_mlp" it is no cosine but the bias that the first block adds to the score of
    the first patch asking the second, averaged over heads. `grid` is the (h, w) to ask for, the config's own if None.
    """
    vit = plain_vit(model)
    grid = vit.config.grid if grid is None else _checked_grid(grid)
    device, num_prefix = vit.norm.weight.device, vit.config.num_prefix
    geometry = lay_tokens(grid, [grid], num_prefix, device)
    match vit.config.position:
        case "learned" | "sincos2d":
            assert vit.positions is not None
            rows_PD = F.normalize(vit.positions(geometry)[0].float(), dim=1)
            similarity_PP = rows_PD @ rows_PD.T
        case "rope2d" | "rope_mixed":
            first = vit.blocks[0]
            assert isinstance(first, Block)
            rope = vit.rope if vit.rope is not None else first.attn.rope
            assert rope is not None
            # cos(a - b) = cos a cos b + sin a sin b
            turned_ANE = torch.cat(rope(geometry), 3)[0].float()
            similarity_NN = (turned_ANE @ turned_ANE.mT).mean(0) / (turned_ANE.shape[2] / 2)
            similarity_PP = similarity_NN[num_prefix:, num_prefix:]
        case "relative_bias" | "relative_mlp":
            similarity_PP = _first_bias(vit.blocks[0], geometry)[num_prefix:, num_prefix:]
        case "none":
            raise PatchlightError("this model has position='none', so there are no positions to compare")
    return similarity_PP.reshape(*grid, *grid)


def _first_bias(block: Any, geometry: TokenGeometry) -> Tensor:
    """The first block's relative position bias, averaged over heads: (N, N)."""
    assert isinstance(block, Block)
    index_NN = relative_index(geometry.grid, geometry.num_prefix, geometry.device)
    bias = block.attn.mask(dataclasses.replace(geometry, offsets_NN=index_NN), torch.float32)
    assert bias is not None
    return bias[0].mean(0)


@torch.no_grad()
def token_norms(model: Any, image_BCHW: Tensor, sizes: Sequence[Size] | None = None) -> Tensor:
    """The length of each token after each block, before the final norm: (L, B, N), prefix tokens first.

    NaN at tokens that lie in the padding. `artifact_patches` says which patches are too long.
    """
    vit = plain_vit(model)
    norms: list[Tensor] = []
    _, geometry = vit.encode(
        image_for(vit, image_BCHW), sizes, lambda _, heads, x_BND: norms.append(x_BND.float().norm(dim=2))
    )
    norms_LBN = torch.stack(norms)
    return norms_LBN if geometry.valid_BN is None else norms_LBN.where(geometry.valid_BN, torch.nan)


def patch_similarity(
    tokens_BND: Tensor, grid: Size, patch: tuple[int, int], *, measure: Literal["cosine", "dot"] = "cosine"
) -> Tensor:
    """How alike the chosen patch's feature and all others' are, as cosines or as dot products: (B, h, w).

    `tokens_BND` is what `model.tokens` gives (or the patches alone), `patch` a (row, column) on the grid (h, w).
    Long features have large dot products with everything; a cosine leaves lengths out.
    """
    if measure not in ("cosine", "dot"):
        raise PatchlightError(f"measure={measure!r} is not known; it is 'cosine' or 'dot'")
    num_prefix = tokens_BND.shape[1] - math.prod(_checked_grid(grid))
    if num_prefix < 0:
        raise PatchlightError(
            f"{tokens_BND.shape[1]} tokens are too few for a grid of {grid[0]} rows, {grid[1]} columns"
        )
    row, column = patch
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise PatchlightError(f"patch {(row, column)} lies outside the grid of {grid[0]} rows and {grid[1]} columns")
    patches_BPD = tokens_BND[:, num_prefix:].float()
    if measure == "cosine":
        patches_BPD = F.normalize(patches_BPD, dim=2)
    chosen_BD1 = patches_BPD[:, row * grid[1] + column, :, None]
    return (patches_BPD @ chosen_BD1)[..., 0].unflatten(1, tuple(grid))


def objectness(heat: Tensor) -> Tensor:
    """How much each heat map (..., h, w) looks as if it had found an object: one score each (...), to rank heads by.

    The share of the map's mass that lies in its largest connected region of patches above the mean, less the share of
    the area which that region takes: 0 for an even map, near 1 for a small, bright spot. Where the region lies, and
    how the map is scaled, does not matter. Negative heat counts as none.
    """
    heat = heat.clamp(min=0)
    region = largest_region(heat > heat.mean((-2, -1), keepdim=True), heat)
    mass = heat.where(region, 0).sum((-2, -1)) / _not_zero(heat.sum((-2, -1)))
    return mass - region.to(heat.dtype).mean((-2, -1))


def largest_region(mask: Tensor, heat: Tensor | None = None) -> Tensor:
    """The largest connected part of each bool mask (..., h, w), diagonal neighbours included: masks of that shape.

    Between parts of the same size the one with more `heat` (..., h, w), where given, is taken.
    """
    height, width = mask.shape[-2:]
    mask_M1hw = mask.reshape(-1, 1, height, width).float()
    # Each patch starts with a number of its own, and takes the highest of its neighbours' until all of a part agree.
    names_hw = torch.arange(1, height * width + 1, device=mask.device, dtype=torch.float32).view(height, width)
    labels_M1hw = names_hw * mask_M1hw
    while True:
        spread_M1hw = F.max_pool2d(labels_M1hw, 3, stride=1, padding=1) * mask_M1hw
        if torch.equal(spread_M1hw, labels_M1hw):
            break
        labels_M1hw = spread_M1hw
    labels_MP = labels_M1hw.flatten(1).long()

    def total(amount_MP: Tensor) -> Tensor:
        """Sum over each part, by label; label 0 is outside all parts."""
        sums = amount_MP.new_zeros(len(labels_MP), height * width + 1).scatter_add(1, labels_MP, amount_MP)
        return sums[:, 1:]

    sizes = total(mask_M1hw.flatten(1))
    largest = sizes == sizes.amax(1, keepdim=True)
    weights = sizes if heat is None else total(heat.expand(mask.shape).reshape(len(labels_MP), -1).float())
    chosen_M1 = weights.where(largest, -torch.inf).argmax(1, keepdim=True) + 1
    return (labels_MP == chosen_M1).reshape(mask.shape)


@torch.no_grad()
def attention_shares(model: Any, image_BCHW: Tensor, sizes: Sequence[Size] | None = None) -> dict[str, Tensor]:
    """Where the class token's attention goes in each layer, averaged over heads and images: shares (L,) by name.

    "class" (the token itself), "distill" and "registers" where the model has them, "artifacts" (the patches that
    `artifact_patches` finds, the same in all layers) and "patches" (all others). They sum to one.
    """
    vit = plain_vit(model)
    config = vit.config
    image_BCHW = image_for(vit, image_BCHW)
    grid = config.grid_for((image_BCHW.shape[-2], image_BCHW.shape[-1]))
    (class_token,) = resolve_queries("cls", config, grid)  # says so, where there is none
    rows: list[Tensor] = []
    norms: list[Tensor] = []

    def keep(index: int, heads: Heads, x_BND: Tensor) -> None:
        rows.append(heads.rows([class_token])[:, :, 0].mean(1))
        norms.append(x_BND.float().norm(dim=2))

    _, geometry = vit.encode(image_BCHW, sizes, keep)
    rows_LBN = torch.stack(rows)
    outliers_BP = artifact_patches(torch.stack(norms), config.num_prefix, geometry.valid_BN)
    patches_LBP = rows_LBN[..., config.num_prefix :]
    shares = {"class": rows_LBN[..., 0]}
    if config.distill_token:
        shares["distill"] = rows_LBN[..., 1]
    if config.num_registers:
        shares["registers"] = rows_LBN[..., config.num_prefix - config.num_registers : config.num_prefix].sum(2)
    shares["artifacts"] = patches_LBP.where(outliers_BP, 0).sum(2)
    shares["patches"] = patches_LBP.where(~outliers_BP, 0).sum(2)
    return {name: share_LB.mean(1) for name, share_LB in shares.items()}


def _not_zero(total: Tensor) -> Tensor:
    """For use as a divisor: zeros become the smallest positive number."""
    return total.clamp(min=torch.finfo(total.dtype).tiny)


def _checked_grid(grid: Size) -> Size:
    if len(grid) != 2 or not all(isinstance(side, int) and side > 0 for side in grid):
        raise PatchlightError(f"grid={grid!r} is not (rows, columns), such as (14, 14)")
    return grid
