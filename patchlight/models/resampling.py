"""A table of positions made for one patch grid, for another: resampled as the models' authors do.

Shapes: P patches in reading order, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.config import Size
from patchlight.errors import PatchlightError
from patchlight.models.token_geometry import is_same_grid

WEIGHTS = ("antialiased", "plain", "linear")


def resample_positions(
    table_TD: Tensor, old: Size, new: Size, how: str = "antialiased", *, num_prefix: int = 0
) -> Tensor:
    """A learned table of positions for images of another size: (num_prefix + P, D) to (num_prefix + new P, D).

    `old` and `new` are grids of patches (down, across). The first `num_prefix` rows belong to the class token and its
    like, which lie nowhere, and stay as they are. `how` is "antialiased" (timm), "plain" (transformers) or "linear".
    """
    if how not in WEIGHTS:
        raise PatchlightError(f"how={how!r} is not known; it is 'antialiased', 'plain' or 'linear'")
    rows = num_prefix + old[0] * old[1]
    if table_TD.ndim != 2 or len(table_TD) != rows:
        raise PatchlightError(
            f"a table of {tuple(table_TD.shape)} does not fit a grid of {old[0]}x{old[1]} with "
            f"num_prefix={num_prefix}, which has {rows} rows; say how many of them belong to prefix tokens"
        )
    prefix_TD, patches_PD = table_TD.split([num_prefix, rows - num_prefix])
    return torch.cat([prefix_TD, resample(patches_PD, old, new, how)])


def resample(table_PD: Tensor, old: Size, new: Size, how: str = "antialiased") -> Tensor:
    """A table made for one grid, for another, bicubically or, if `how` says so, linearly.

    The same numbers as `F.interpolate`, written as two matrix products: those also export, run on every device, have
    deterministic gradients, and are right for a grid of one column, which torch 2.13 gets wrong on the CPU. They are
    taken in float64, which neither autocast nor TF32 touches (in float32 on Apple's GPUs, which have no other).
    """
    if is_same_grid(old, new):  # the grids themselves: 8x2 and 4x4 have as many patches and are not the same
        return table_PD
    exact = torch.float32 if table_PD.device.type == "mps" else torch.float64
    weights = {"antialiased": cubic_weights, "plain": plain_cubic_weights, "linear": linear_weights}[how]
    down, across = (weights(a, b, table_PD.device, exact) for a, b in zip(old, new, strict=True))
    width = table_PD.shape[1]
    columns_ywD = (down @ table_PD.to(exact).reshape(old[0], old[1] * width)).reshape(new[0], old[1], width)
    return (across @ columns_ywD).reshape(new[0] * new[1], width).to(table_PD.dtype)


def cubic_weights(old: int, new: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """How much each of `old` samples counts for each of `new` ones, antialiased: the kernel widens when shrinking."""
    centres = (torch.arange(new, device=device, dtype=dtype) + 0.5) * (old / new)
    samples = torch.arange(old, device=device, dtype=dtype) + 0.5
    weights = keys_kernel((samples[None, :] - centres[:, None]).abs() / torch.sym_max(old / new, 1.0), -0.5)
    return weights / weights.sum(1, keepdim=True)


def plain_cubic_weights(
    old: int, new: int, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The same without antialiasing: four samples each, and the border counts for what lies beyond it."""
    centres = (torch.arange(new, device=device, dtype=dtype) + 0.5) * (old / new)
    samples = torch.arange(-2, old + 2, device=device, dtype=dtype) + 0.5
    weights = keys_kernel((samples[None, :] - centres[:, None]).abs(), -0.75)
    before, inside, after = weights.split([2, old, 2], 1)
    first = F.pad(before.sum(1, keepdim=True), (0, old - 1))
    last = F.pad(after.sum(1, keepdim=True), (old - 1, 0))
    return inside + first + last


def linear_weights(old: int, new: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The two nearest samples each, by distance; beyond the border its own sample counts."""
    centres = ((torch.arange(new, device=device, dtype=dtype) + 0.5) * (old / new)).clamp(0.5, old - 0.5)
    samples = torch.arange(old, device=device, dtype=dtype) + 0.5
    return (1 - (samples[None, :] - centres[:, None]).abs()).clamp(min=0)


def keys_kernel(distance: Tensor, a: float) -> Tensor:
    """Keys' cubic convolution kernel: 1 at distance 0, and 0 from distance 2 on."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
