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
        self.norm = _inner_norm(config)
        self.down = nn.Linear(config.mlp_width, config.width)
        self.dropout = make_dropout(config)

    def forward(self, x_BND: Tensor) -> Tensor:
        hidden_BNF = self.dropout(self.activation(self.up(x_BND)))
        return self.dropout(self.down(self.norm(hidden_BNF)))


class SwiGLU(nn.Module):
    """The gated MLP: one half of the hidden layer, through SiLU, scales the other."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(config.width, 2 * config.mlp_width)
        self.norm = _inner_norm(config)
        self.down = nn.Linear(config.mlp_width, config.width)
        self.dropout = make_dropout(config)

    def forward(self, x_BND: Tensor) -> Tensor:
        gate_BNF, up_BNF = self.gate_and_up(x_BND).chunk(2, -1)
        return self.dropout(self.down(self.norm(self.dropout(F.silu(gate_BNF) * up_BNF))))


def make_mlp(config: ViTConfig) -> MLP | SwiGLU:
    """The MLP that the config asks for."""
    return SwiGLU(config) if config.mlp == "swiglu" else MLP(config)


def make_dropout(config: ViTConfig) -> nn.Module:
    """Nothing at all where the rate is zero, so that it costs nothing."""
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


def _inner_norm(config: ViTConfig) -> nn.Module:
    return nn.Identity() if config.inner_norm == "none" else nn.LayerNorm(config.mlp_width, config.norm_eps)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}
