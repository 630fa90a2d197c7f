"""Fresh weights of every architecture: nothing is forgotten, and what is drawn is distributed as documented."""

from typing import Any

import pytest
import torch

import patchlight as pl
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


def test_weights_are_drawn_as_timm_and_the_papers_code_draw_them() -> None:
    """Deviations of each part, worked out by hand for the sizes of Ti/16."""
    width, patch = 192, 768
    expected = {
        "timm": {
            "blocks.0.attn.qkv.weight": 0.02,
            "blocks.0.mlp.up.weight": 0.02,
            "patch_embed.proj.weight": (3 * patch) ** -0.5,  # uniform within sqrt(1 / inputs)
            "positions.table": 0.02,
            "class_token": 1e-6,
            "head.out.weight": 0.02,
        },
        "jax": {
            "blocks.0.attn.qkv.weight": (2 / (2 * width)) ** 0.5,  # queries, keys and values each on their own
            "blocks.0.attn.out.weight": (2 / (2 * width)) ** 0.5,
            "blocks.0.mlp.up.weight": (2 / (5 * width)) ** 0.5,
            "blocks.0.mlp.up.bias": 1e-6,
            "blocks.0.attn.out.bias": 0.0,
            "patch_embed.proj.weight": patch**-0.5,
            "positions.table": 0.02,
            "class_token": 0.0,
            "head.out.weight": 0.0,
        },
    }
    for init, deviations in expected.items():
        torch.manual_seed(0)
        state = pl.ViT(pl.variant("Ti/16", init=init)).state_dict()
        for name, deviation in deviations.items():
            assert state[name].std().item() == pytest.approx(deviation, rel=0.2 if "token" in name else 0.05), name
    with pytest.raises(pl.PatchlightError, match="init='xavier' should be one of 'vit', 'timm', 'jax'"):
        pl.variant("Ti/16", init="xavier")


def test_how_a_model_was_started_is_no_part_of_what_it_computes(tmp_path: Any) -> None:
    model = tiny_vit(init="jax", dropout=0.3)
    images = torch.randn(2, 3, 32, 32)
    expected = tiny_vit()(images)
    for layout in ("patchlight", "timm", "transformers"):
        pl.save(model, tmp_path / layout, layout=layout)
        assert torch.equal(pl.load(tmp_path / layout).model(images), expected)
