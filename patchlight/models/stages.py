"""What models with stages (Swin, ConvNeXt) share: residual branches that are skipped at times, and fresh weights."""

import torch
from torch import Tensor, nn

from patchlight.errors import PatchlightError


class Residual(nn.Module):
    """What a branch adds to its input: times a learned scale (LayerScale), or at times nothing (stochastic depth).

    Channels come last. `drops` says whether any block of the model is skipped at times.
    """

    drop_path: Tensor

    def __init__(self, drop_path: float, *, drops: bool, scale: float | None = None, width: int = 0) -> None:
        super().__init__()
        self.initial_scale = scale
        self.scale = None if scale is None else nn.Parameter(torch.empty(width))
        self.drops = drops
        # A tensor, since a number would have every block compiled for a rate of its own; a real one even where `load`
        # makes the model without memory, since no file holds it.
        self.register_buffer("drop_path", torch.tensor(drop_path, device="cpu"), persistent=False)

    def forward(self, x_BhwD: Tensor, branch_BhwD: Tensor) -> Tensor:
        if self.scale is not None:
            branch_BhwD = branch_BhwD * self.scale
        if self.training and self.drops:
            # Whole images skip the branch; the others are scaled up so that the expectation stays.
            keep_B111 = torch.rand_like(branch_BhwD[:, :1, :1, :1], dtype=torch.float32) >= self.drop_path
            branch_BhwD = branch_BhwD * keep_B111 / (1 - self.drop_path)
        return x_BhwD + branch_BhwD


def drop_rates(most: float, depth: int) -> list[float]:
    """Of each block: from 0 in the first, growing linearly to `most` in the last."""
    return [most * index / max(1, depth - 1) for index in range(depth)]


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """Draw fresh weights, as these models are usually started: matrices, kernels and tables from a normal distribution
    of deviation 0.02, cut off at two deviations; biases zero; norms one and zero; scales at their first value."""
    if next(model.parameters()).is_meta:  # shapes without memory: nothing to draw
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            _draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, Residual) and module.scale is not None and module.initial_scale is not None:
            nn.init.constant_(module.scale, module.initial_scale)
    for name, parameter in model.named_parameters():
        if name.endswith("relative_bias.table"):
            _draw(parameter)


def _draw(weight: Tensor) -> None:
    nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)


def check_pooling(pooling: str | None) -> None:
    """Refuse another pooling than the mean, which is all that a model without a class token has."""
    if pooling not in (None, "mean"):
        raise PatchlightError(f"pooling={pooling!r} needs a class token, and this model has none; use 'mean'")
