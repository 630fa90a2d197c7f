"""Tiny Swin and ConvNeXt models with nothing at its initial value, and a slow Swin attention to compare with."""

import math
from typing import Any

import torch
from torch import Tensor

from models_at_random import randomize
from patchlight.families import ConvNeXtConfig, SwinConfig
from patchlight.models.convnext import ConvNeXt
from patchlight.models.swin import Swin

TINY_SWIN: dict[str, Any] = {
    "image_size": 48,
    "width": 12,
    "depths": (2, 2),
    "num_heads": (2, 3),
    "window_size": 4,
    "num_classes": 5,
}
TINY_CONVNEXT: dict[str, Any] = {"image_size": 48, "widths": (8, 12), "depths": (1, 2), "num_classes": 5}


def tiny_swin(**changes: Any) -> Swin:
    model = Swin(SwinConfig(**TINY_SWIN | changes)).eval()
    randomize(model)
    return model


def tiny_convnext(**changes: Any) -> ConvNeXt:
    model = ConvNeXt(ConvNeXtConfig(**TINY_CONVNEXT | changes)).eval()
    randomize(model)
    return model


def slow_attention(model: Swin, index: int, x_hwD: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor]:
    """What a block's attention gives, patch by patch, and its weights attn_ANN, from the definition in the paper.

    The borders of the shifted windows lie at shift, shift + window, ...; the strips at the top and left, and what is
    left at the bottom and right, are windows of their own.
    """
    config, block = model.config, model.blocks[index]
    height, width, size = x_hwD.shape[0], x_hwD.shape[1], config.window_size
    steps = [side // 2 if shifted and length > side else 0 for side, length in zip(size, (height, width), strict=True)]

    def window_of(row: int, column: int) -> tuple[int, int]:
        return (math.floor((row - steps[0]) / size[0]), math.floor((column - steps[1]) / size[1]))

    normed = block.norm1(x_hwD)
    heads = config.num_heads[config.stage_of(index)]
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in block.attn.qkv(normed).chunk(3, -1))  # h, w, A, E
    table = block.attn.relative_bias.table.unflatten(0, (2 * size[0] - 1, 2 * size[1] - 1))
    places = [(row, column) for row in range(height) for column in range(width)]
    attn_ANN = torch.zeros(heads, len(places), len(places))
    out = torch.zeros_like(v)
    for asking, (row, column) in enumerate(places):
        friends = [there for there, place in enumerate(places) if window_of(*place) == window_of(row, column)]
        scores = []
        for there in friends:
            other = places[there]
            bias = table[row - other[0] + size[0] - 1, column - other[1] + size[1] - 1]
            scores.append((q[row, column] * k[other]).sum(-1) / math.sqrt(q.shape[-1]) + bias)
        attn_ANN[:, asking, friends] = torch.stack(scores, 1).softmax(1)
        out[row, column] = torch.einsum("ap,pae->ae", attn_ANN[:, asking, friends], v.flatten(0, 1)[friends])
    return block.attn.out(out.flatten(2)), attn_ANN
