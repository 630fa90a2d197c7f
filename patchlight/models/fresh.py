"""Fresh weights, as all architectures start."""

import math

import torch
from torch import Tensor, nn


def init_weights(model: nn.Module) -> None:
    """Matrices and kernels: see `draw`. Biases: zero. All else, as norms, tables and scales: as `reset_parameters` of
    the module that has it says."""
    if next(model.parameters()).is_meta:  # shapes without memory: nothing to draw
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


@torch.no_grad()
def draw(weight: Tensor) -> None:
    """A normal distribution of deviation 0.02, cut off at two deviations, by inverting its cumulative form: the same
    as `nn.init.trunc_normal_`, which draws again and again what falls outside, and takes several times as long."""
    inside = math.erf(2 / math.sqrt(2))
    weight.uniform_(-inside, inside).erfinv_().mul_(0.02 * math.sqrt(2)).clamp_(-0.04, 0.04)


@torch.no_grad()
def init_as(whose: str, vit: nn.Module) -> None:
    """Draw the weights of a ViT anew as timm does by default, or as the paper's JAX code does; what is named here.

    "timm": matrices normal with deviation 0.02, hardly ever cut off (at 2, not at two deviations), the position table
    too; the patch embedding as torch starts convolutions; class token and registers at 1e-6, which is nearly zero.
    "jax": matrices uniform within sqrt(6 / (inputs + outputs)) (Glorot and Bengio 2010), queries, keys and values each
    on their own; the MLP's biases at 1e-6; the patch embedding normal with a variance of one by its inputs; position
    table normal with deviation 0.02; class token and head at zero.
    """
    for name, module in vit.named_modules():
        if isinstance(module, nn.Linear):
            if whose == "timm":
                nn.init.trunc_normal_(module.weight, std=0.02)
                continue
            for matrix in module.weight.chunk(3 if name.endswith(".qkv") else 1):
                nn.init.xavier_uniform_(matrix)
            if ".mlp." in name and module.bias is not None:
                nn.init.normal_(module.bias, std=1e-6)
    stem = getattr(vit.patch_embed, "proj", None)
    if isinstance(stem, nn.Conv2d) and whose == "timm":
        stem.reset_parameters()
    elif isinstance(stem, nn.Conv2d):
        deviation = stem.weight[0].numel() ** -0.5 / 0.87963  # which the cut takes back
        nn.init.trunc_normal_(stem.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    for tokens in (vit.class_token, vit.distill_token, vit.registers):
        if isinstance(tokens, nn.Parameter):
            nn.init.normal_(tokens, std=1e-6 if whose == "timm" else 0.0)
    table = getattr(vit.positions, "table", None)
    if isinstance(table, nn.Parameter):
        nn.init.normal_(table, std=0.02)
