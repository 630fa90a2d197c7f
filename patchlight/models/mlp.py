"""What each block does to every token by itself: two layers with a GELU between, or a gated form of them.

Shapes: B batch, N tokens, D width, F MLP hidden.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.config import ViTConfig


class MLP(nn.Module):
    """Two layers with a GELU between: exact, by tanh, or CLIP's sigmoid form."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.up = nn.Linear(config.width, config.mlp_width)
        self.down = nn.Linear(config.mlp_width, config.width)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BND)))


class SwiGLU(nn.Module):
    """The gated MLP: one half of the hidden layer, through SiLU, scales the other."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(config.width, 2 * config.mlp_width)
        self.down = nn.Linear(config.mlp_width, config.width)

    def forward(self, x_BND: Tensor) -> Tensor:
        gate_BNF, up_BNF = self.gate_and_up(x_BND).chunk(2, -1)
        return self.down(F.silu(gate_BNF) * up_BNF)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}
