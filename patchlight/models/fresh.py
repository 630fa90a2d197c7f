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
