"""What a model makes of a photo whose patches lie in another order, and of patches that do not know where they lie.

Without positions, attention and pooling see a set: the order of the patches then changes nothing but the last digits.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from patchlight.config import Size
from patchlight.errors import PatchlightError
from patchlight.explain.attention import plain_vit
from patchlight.models.positions import LearnedPositions
from patchlight.models.vit import ViT

Part = TypeVar("Part", bound=nn.Module)


def shuffled_order(num_patches: int, seed: int) -> Tensor:
    """A random permutation of the patches (P,), the same for the same seed."""
    return torch.randperm(num_patches, generator=torch.Generator().manual_seed(seed))


def shuffle_patches(
    image_BCHW: Tensor, patch_size: Size | int, order_P: Tensor | None = None, *, seed: int = 0
) -> Tensor:
    """The images with patch order_P[i] at place i, counted row by row; the patches have to divide the images.

    Without an order one is drawn, the same for the same `seed`. A `patch_size` of one number stands for a square.
    """
    batch, channels, height, width = image_BCHW.shape
    down, across = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    if height % down or width % across:
        raise PatchlightError(f"patches of {down}x{across} do not divide images of {height}x{width}")
    h, w = height // down, width // across
    order_P = shuffled_order(h * w, seed) if order_P is None else order_P
    if sorted(order_P.tolist()) != list(range(h * w)):
        raise PatchlightError(f"the order of {h} x {w} patches is each number from 0 to {h * w - 1} once")
    patches_BPX = image_BCHW.view(batch, channels, h, down, w, across).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    patches_BPX = patches_BPX[:, order_P].unflatten(1, (h, w))
    return patches_BPX.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height, width)


def without_positions(model: Any) -> ViT:
    """The same model, its weights shared, in which no patch knows where it lies; the given one is untouched."""
    vit = _sharing(plain_vit(model))
    if vit.config.position == "none":
        raise PatchlightError("this model has position='none', so there are no positions to leave out")
    if isinstance(vit.positions, LearnedPositions):
        table_TD = vit.positions.table.detach().clone()
        table_TD[vit.config.num_prefix_positions :] = 0  # the prefix tokens keep theirs
        vit.positions = LearnedPositions(vit.config).to(table_TD)
        vit.positions.table = nn.Parameter(table_TD, requires_grad=False)
    else:
        vit.positions = None
    vit.rope = None
    vit.blocks = nn.ModuleList(_without_positions(block) for block in vit.blocks)
    return vit


def _without_positions(block: Any) -> Any:
    """The block with its position information removed."""
    block = _sharing(block)
    block.attn = _sharing(block.attn)
    block.attn.rope = block.attn.relative_bias = None
    return block


def _sharing(module: Part) -> Part:
    """A shallow copy of the module that shares its parameters."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
