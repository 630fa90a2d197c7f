"""Dropout where the paper has it: after every matrix but queries, keys and values, and after positions."""

import pytest
import torch
from torch import Tensor, nn

from models_at_random import tiny_vit
from patchlight.errors import PatchlightError


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_it_is_applied_where_the_paper_has_it(mlp: str) -> None:
    model = tiny_vit(dropout=0.5, mlp=mlp).train()
    met: list[str] = []

    def note(name: str, module: nn.Module) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            met.append(name)
            share = (output == 0).float().mean().item()
            assert 0.35 < share < 0.65, (name, share)

        module.register_forward_hook(hook)

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            note(name, module)
    model(torch.randn(4, 3, 32, 32))
    block = ["attn.dropout", "mlp.dropout", "mlp.dropout"]  # after the heads' matrix, after the GELU, after `down`
    assert met == ["dropout", *(f"blocks.{i}.{place}" for i in range(3) for place in block)]


def test_it_is_off_outside_training_and_costs_nothing_at_zero() -> None:
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(tiny_vit(dropout=0.5)(images), tiny_vit()(images))
    assert not any(isinstance(module, nn.Dropout) for module in tiny_vit().modules())
    with pytest.raises(PatchlightError, match=r"dropout=1.0 must lie in \[0, 1\)"):
        tiny_vit(dropout=1.0)
