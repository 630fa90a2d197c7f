"""Tiny models with nothing at its initial value, so that no term of the computation can hide behind a zero or a one."""

from typing import Any

import torch
from torch import nn

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
