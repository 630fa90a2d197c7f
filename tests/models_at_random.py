"""Tiny models with nothing at its initial value, so that no term of the computation can hide behind a zero or a one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.config import ViTConfig
from patchlight.models.vit import ViT

TINY: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "width": 24,
    "depth": 3,
    "num_heads": 2,
    "num_classes": 5,
}

POSITIONS = ("learned", "sincos2d", "rope2d", "rope_mixed", "relative_bias", "relative_mlp", "none")


def tiny_vit(**changes: Any) -> ViT:
    model = ViT(ViTConfig(**{**TINY, **changes})).eval()
    randomize(model)
    return model


def randomize(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@torch.no_grad()
def redraw(model: nn.Module, seed: int = 0) -> None:
    """Every parameter at random, of such sizes that no term of the computation is lost beside the others.

    What enters the blocks is small, so that the eps of norms counts, too.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        drawn = torch.randn(parameter.shape, generator=generator)
        last = name.rpartition(".")[2]
        if parameter.ndim <= 1 and "bias" not in last:  # norms' weights, layer scales
            drawn = 0.6 + 0.3 * drawn
        elif parameter.ndim <= 1:
            drawn = 0.1 * drawn
        elif last == "weight" and "table" not in last:
            drawn = drawn / math.sqrt(max(1, parameter[0].numel()))
        else:  # tokens, tables of positions, queries of poolings
            drawn = 0.02 * drawn if parameter.shape[0] == 1 else 0.3 * drawn
        parameter.copy_(drawn)


def some_image(size: Sequence[int]) -> Tensor:
    """As it comes to a model, and darker, so that the eps of the first norms counts."""
    return 0.02 * torch.randn(1, *size, generator=torch.Generator().manual_seed(1))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    if ours.shape != theirs.shape or not ours.isfinite().all():
        return math.inf
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
