"""The same model for a CPU, with the weights of its linear layers laid out as the processor multiplies them.

torch's own layer lays a weight out anew for every image. Where a model looks at one photo after another, doing it once
takes a tenth or more off the time. The operators are oneDNN's as torch has them for its compiler, and may change with
torch; so they are tried first, and where they fail or give anything else, the model stays as it is.
"""

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)

TOKENS = 256
"""That a weight is laid out for; any number is multiplied right, and those near it fast."""


class PackedLinear(nn.Module):
    """Computes what `linear` does, to within rounding, and cannot be trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TOKENS)
        self.weight, self.bias = linear.weight, linear.bias  # the weight for whoever asks for its dtype or device

    def forward(self, x_BND: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_BND, self.packed, self.bias, "none", [], "")
        return out


def prepack_linears(model: Module) -> Module:
    """A copy whose linear layers are packed; all other weights are the model's own.

    The model itself, where this machine, its torch or the model's dtype do not allow it, or where somebody has hooked
    into it: a copy would lose that.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not linears or any(map(_hooked, model.modules())):
        return model
    copies: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for linear in linears:
        copies[id(linear)] = _packed(linear)
        if copies[id(linear)] is None:
            return model
    return copy.deepcopy(model, copies)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _packed(linear: nn.Linear) -> PackedLinear | None:
    """The packed layer, or None if packing fails or changes the result."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    x_ND = torch.linspace(-1, 1, 2 * linear.in_features).view(2, -1)
    try:
        with torch.no_grad():
            packed_linear = PackedLinear(linear)
            got, expected = packed_linear(x_ND), F.linear(x_ND, weight, linear.bias)
    except (RuntimeError, AttributeError):  # short memory; an operator that is not there, or takes other arguments
        return None
    same = torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    return packed_linear if same else None
