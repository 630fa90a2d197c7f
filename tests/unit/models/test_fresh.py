"""Fresh weights of every architecture: nothing is forgotten, and what is drawn is distributed as documented."""

from typing import Any

import pytest
import torch

from models_at_random import tiny_vit
from patchlight.families import variant
from patchlight.models.families import Model, make_model
from staged_models import tiny_convnext, tiny_swin

MODELS: list[tuple[Any, dict[str, Any]]] = [
    (tiny_vit, {"layer_scale": 0.1, "num_registers": 2, "qk_norm": True}),
    (tiny_vit, {"position": "relative_bias"}),
    (tiny_vit, {"position": "relative_mlp"}),
    (tiny_vit, {"position": "rope_mixed"}),
    (tiny_vit, {"class_token": False, "pooling": "attention"}),
    (tiny_swin, {}),
    (tiny_convnext, {"layer_scale": 0.1}),
    (tiny_convnext, {"grn": True, "layer_scale": None}),
]


@pytest.mark.parametrize(("make", "settings"), MODELS)
def test_no_weight_is_forgotten(make: Any, settings: dict[str, Any]) -> None:
    model = make(**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert [name for name, parameter in model.named_parameters() if parameter.isnan().any()] == []


@pytest.mark.parametrize("name", ["Ti/16", "swin-T", "convnext-T"])
def test_drawn_weights_are_normal_and_cut_off(name: str) -> None:
    torch.manual_seed(0)
    model: Model = make_model(variant(name))
    drawn = torch.cat([parameter.flatten() for parameter in model.blocks.parameters() if parameter.ndim > 1])
    assert drawn.abs().max() <= 0.04
    # Of a normal distribution that is cut off at two deviations: its deviation, and the share within one.
    assert drawn.std().item() == pytest.approx(0.02 * 0.8796, rel=0.01)
    assert (drawn.abs() < 0.02).float().mean().item() == pytest.approx(0.6827 / 0.9545, rel=0.01)
