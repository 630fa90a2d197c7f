"""Checkpoints in the references' own naming, written to disk and loaded, against what the references computed.

Each file of tests/golden holds a tiny random model's weights under the reference's own keys, an input, and the
reference's last tokens, logits and last-block attention. The settings below are those that shapes cannot tell.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from patchlight.explain.attention import attention
from patchlight.weights.load import Loaded, load

GOLDEN = Path(__file__).parent.parent / "golden"

# Every tiny model has three heads, except the toy; real checkpoints have 64 numbers a head, or a config file.
TOLD: dict[str, dict[str, Any]] = {
    "timm_vit": {"num_heads": 3},
    "timm_vit_gray_toy": {"num_heads": 2},
    "timm_vit_gap_noclass": {"num_heads": 3},
    "timm_vit_registers_layerscale": {"num_heads": 3},
    "timm_vit_nonsquare": {"num_heads": 3, "image_size": (32, 64)},
    "timm_vit_dynamic_48_to_40x64": {"num_heads": 3},
    "timm_vit_clip_prenorm_quickgelu": {"num_heads": 3, "mlp": "quick_gelu", "norm_eps": 1e-5},
    "timm_vit_relbias": {"image_size": (48, 40)},
    "timm_vit_relpos_mlp": {},
    "timm_vit_respostnorm": {"num_heads": 3, "block_norm": "after"},
    "timm_vit_hybrid_r26": {"num_heads": 3},
    "timm_vit_rope": {"num_heads": 3},
    "timm_deit3": {"num_heads": 3},
    "timm_deit_distilled": {"num_heads": 3},
    "timm_dinov3_rope": {"num_heads": 3, "pooling": "mean"},
    # These come with the config.json that transformers writes.
    "hf_vit": {},
    "hf_deit_distilled": {},
    "hf_dinov2": {},
    "hf_dinov2_registers": {},
    "hf_dinov3": {},
    "hf_clip_vision": {},
}

# transformers norms the class token of CLIP alone, and hands out the other tokens as they are.
UNNORMED = {"hf_clip_vision"}


def write_checkpoint(name: str, folder: Path) -> dict[str, torch.Tensor]:
    golden = load_file(GOLDEN / f"{name}.safetensors")
    weights = {key.removeprefix("weights/"): value for key, value in golden.items() if key.startswith("weights/")}
    save_file(weights, folder / "model.safetensors")
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        meta = json.loads(file.metadata()["meta"])
    if "config" in meta:
        (folder / "config.json").write_text(json.dumps(meta["config"]))
    return golden


@pytest.fixture(params=TOLD)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Loaded, dict[str, torch.Tensor]]:
    golden = write_checkpoint(request.param, tmp_path)
    return request.param, load(tmp_path, **TOLD[request.param]), golden


@torch.no_grad()
def test_last_tokens_are_the_reference_tokens(pair: tuple[str, Loaded, dict[str, torch.Tensor]]) -> None:
    name, loaded, golden = pair
    (tokens_BND,) = loaded.model.intermediates(golden["input"], [-1])
    if name not in UNNORMED:
        tokens_BND = loaded.model.tokens(golden["input"])
    torch.testing.assert_close(tokens_BND, golden["features"], atol=1e-5, rtol=0)


@torch.no_grad()
def test_logits_are_the_reference_logits(pair: tuple[str, Loaded, dict[str, torch.Tensor]]) -> None:
    _, loaded, golden = pair
    if "logits" not in golden:
        pytest.skip("the reference has no head")
    torch.testing.assert_close(loaded.model(golden["input"]), golden["logits"], atol=1e-5, rtol=0)


@torch.no_grad()
def test_last_block_attends_as_the_reference_does(pair: tuple[str, Loaded, dict[str, torch.Tensor]]) -> None:
    _, loaded, golden = pair
    maps = attention(loaded, golden["input"], queries="all")
    torch.testing.assert_close(maps.weights[0], golden["attention"], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("part", ["class_token", "positions.table", "blocks.1.attn.qkv.weight", "norm.bias"])
def test_golden_tests_would_see_a_wrong_weight(part: str, tmp_path: Path) -> None:
    golden = write_checkpoint("timm_vit", tmp_path)
    model = load(tmp_path, num_heads=3).model
    model.get_parameter(part).mul_(1.01)
    assert not torch.allclose(model.tokens(golden["input"]), golden["features"], atol=1e-5, rtol=0)
