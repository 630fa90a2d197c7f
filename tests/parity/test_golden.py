"""The model against what the reference implementations computed, stored in tests/golden.

Each file holds a tiny random model's weights under the reference's own keys, an input, and the reference's last
tokens, logits and last-block attention. The configs below say what such a model is in our words.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from patchlight.config import ViTConfig
from patchlight.models.vit import ViT
from patchlight.weights.convert import from_timm, from_transformers

GOLDEN = Path(__file__).parent.parent / "golden"

TINY = {"image_size": 48, "patch_size": 8, "width": 48, "depth": 2, "num_heads": 3, "num_classes": 7}

CONFIGS = {
    "timm_vit": TINY,
    "timm_vit_gray_toy": {
        "image_size": 8,
        "patch_size": 4,
        "in_channels": 1,
        "width": 8,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 4,
    },
    "timm_vit_gap_noclass": TINY | {"class_token": False, "pooling": "mean", "qkv_bias": False, "layer_scale": 1e-6},
    "timm_vit_registers_layerscale": TINY
    | {"image_size": 56, "patch_size": 14, "num_registers": 4, "layer_scale": 1e-5, "prefix_positions": "none"},
    "timm_vit_nonsquare": TINY | {"image_size": (32, 64)},
    "timm_vit_dynamic_48_to_40x64": TINY,
    "timm_vit_clip_prenorm_quickgelu": TINY
    | {"image_size": 64, "patch_size": 16, "patch_bias": False, "embed_norm": True, "mlp": "quick_gelu"}
    | {"norm_eps": 1e-5},
    "timm_vit_relbias": TINY
    | {"image_size": (48, 40), "position": "relative_bias", "class_token": False, "pooling": "mean"}
    | {"qkv_bias": False, "layer_scale": 1e-5, "final_norm": "pooled"},
    "timm_vit_rope": TINY | {"image_size": 64, "position": "rope2d", "layer_scale": 1e-5},
    "timm_deit3": TINY | {"prefix_positions": "none", "layer_scale": 1e-6},
    "timm_deit_distilled": TINY | {"distill_token": True},
    "timm_dinov3_rope": TINY
    | {"image_size": 64, "patch_size": 16, "position": "rope2d", "rope_coordinates": "centred", "num_registers": 4}
    | {"qkv_bias": False, "layer_scale": 1e-5, "norm_eps": 1e-5, "pooling": "mean"},
    "hf_vit": TINY | {"norm_eps": 1e-12},
    "hf_deit_distilled": TINY | {"norm_eps": 1e-12, "distill_token": True},
}


def load_golden(name: str) -> tuple[ViT, dict[str, torch.Tensor]]:
    golden = load_file(GOLDEN / f"{name}.safetensors")
    weights = {key.removeprefix("weights/"): value for key, value in golden.items() if key.startswith("weights/")}
    config = ViTConfig(**CONFIGS[name])
    model = ViT(config).eval()
    model.load_state_dict(from_timm(weights, config) if name.startswith("timm") else from_transformers(weights))
    return model, golden


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> tuple[ViT, dict[str, torch.Tensor]]:
    return load_golden(request.param)


@torch.no_grad()
def test_last_tokens_are_the_reference_tokens(pair: tuple[ViT, dict[str, torch.Tensor]]) -> None:
    model, golden = pair
    torch.testing.assert_close(model.tokens(golden["input"]), golden["features"], atol=1e-5, rtol=0)


@torch.no_grad()
def test_logits_are_the_reference_logits(pair: tuple[ViT, dict[str, torch.Tensor]]) -> None:
    model, golden = pair
    torch.testing.assert_close(model(golden["input"]), golden["logits"], atol=1e-5, rtol=0)


@torch.no_grad()
def test_last_block_attends_as_the_reference_does(pair: tuple[ViT, dict[str, torch.Tensor]]) -> None:
    model, golden = pair
    x_BND, geometry = model.embed(golden["input"])
    *earlier, last = model.blocks
    for block in earlier:
        x_BND = block(x_BND, geometry)
    attention_BANN = last.attn.rows(last.norm1(x_BND), geometry)
    torch.testing.assert_close(attention_BANN, golden["attention"], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("part", ["class_token", "positions.table", "blocks.1.attn.qkv.weight", "norm.bias"])
def test_golden_tests_would_see_a_wrong_weight(part: str) -> None:
    model, golden = load_golden("timm_vit")
    model.get_parameter(part).mul_(1.01)
    assert not torch.allclose(model.tokens(golden["input"]), golden["features"], atol=1e-5, rtol=0)
