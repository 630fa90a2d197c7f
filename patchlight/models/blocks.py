"""What blocks of all architectures share: residual branches, scaled and skipped at times, and their numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchlight.errors import PatchlightError


class Residual(nn.Module):
    """What a branch adds to its input: times a learned scale (LayerScale), or at times nothing (stochastic depth).

    Images come first and channels last, whatever lies between. `drops` says whether any block of the model is skipped
    at times.
    """

    drop_path: Tensor

    def __init__(self, drop_path: float, *, drops: bool, scale: float | None = None, width: int = 0) -> None:
        super().__init__()
        self.initial_scale = scale
        self.scale = None if scale is None else nn.Parameter(torch.empty(width))
        self.drops = drops
        # A tensor, since a number would have every block compiled for a rate of its own. It is no part of a checkpoint,
        # so it has to be there even in a model that is made without memory, to be filled by one.
        rate = torch.tensor(drop_path)
        rate = torch.tensor(drop_path, device="cpu") if rate.is_meta else rate
        self.register_buffer("drop_path", rate, persistent=False)

    def reset_parameters(self) -> None:
        """Set the scale, if there is one, to its initial value."""
        if self.scale is not None and self.initial_scale is not None:
            nn.init.constant_(self.scale, self.initial_scale)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """x_BND or x_BhwD, and a branch of the same shape."""
        if self.scale is not None:
            branch = branch * self.scale
        if self.training and self.drops:
            # Whole images skip the branch; the others are scaled up so that the expectation stays.
            one_an_image = branch[(slice(None), *[slice(1)] * (branch.ndim - 1))]
            keep = torch.rand_like(one_an_image, dtype=torch.float32) >= self.drop_path
            branch = branch * keep / (1 - self.drop_path)
        return x + branch


def check_config(config: object, kind: type, example: str) -> None:
    """Refuse what is not the config of this kind of model; `example` is a name of `variant` that makes one."""
    if not isinstance(config, kind):
        model = kind.__name__.removesuffix("Config")
        raise PatchlightError(
            f"{model} takes a {kind.__name__}, not {config!r:.80}; patchlight.variant({example!r}) makes one"
        )


def drop_rates(most: float, depth: int) -> list[float]:
    """Drop rate of each block: linear from 0 in the first to `most` in the last."""
    return [most * index / max(1, depth - 1) for index in range(depth)]


def wanted_blocks(blocks: int | Sequence[int], depth: int) -> list[int]:
    """Block numbers from 0, with negative ones counted from the end."""
    asked = [blocks] if isinstance(blocks, int) else list(blocks)
    if not all(-depth <= index < depth for index in asked):
        raise PatchlightError(f"blocks={asked} reaches beyond the model's {depth} blocks")
    return [index % depth for index in asked]
