"""Swin and ConvNeXt in the references' own naming, written to disk and loaded, against what the references computed."""

from pathlib import Path

import pytest
import torch
from test_golden import write_checkpoint

from patchlight.families import ConvNeXtConfig, SwinConfig
from patchlight.weights.load import Loaded, load

NAMES = ("timm_swin", "hf_swin", "timm_convnext")


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Loaded, dict[str, torch.Tensor]]:
    golden = write_checkpoint(request.param, tmp_path)
    size = {"timm_swin": {"image_size": 56}, "timm_convnext": {"image_size": 64}}.get(request.param, {})
    return request.param, load(tmp_path, **size), golden


@torch.no_grad()
def test_last_patches_and_logits_are_the_references(pair: tuple[str, Loaded, dict[str, torch.Tensor]]) -> None:
    name, loaded, golden = pair
    expected = golden["features"]
    if name == "timm_convnext":
        expected = expected.permute(0, 2, 3, 1)  # channels come last here
    patches_BhwD = loaded.model.encode(golden["input"])
    torch.testing.assert_close(patches_BhwD.reshape(expected.shape), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded.model(golden["input"]), golden["logits"], atol=1e-5, rtol=0)


def test_settings_are_told_by_the_tensors(pair: tuple[str, Loaded, dict[str, torch.Tensor]]) -> None:
    name, loaded, _ = pair
    if name == "timm_convnext":
        expected = ConvNeXtConfig(image_size=64, widths=(16, 24, 32, 48), depths=(1, 1, 2, 1), num_classes=7)
    else:
        fit = "plain" if name == "hf_swin" else "masked"
        expected = SwinConfig(
            image_size=56, width=24, depths=(2, 2), num_heads=(2, 4), num_classes=7, uneven_windows=fit
        )
    assert loaded.config == expected
    assert loaded.provenance.origin == name.split("_")[0].replace("hf", "transformers")


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("timm_swin", "blocks.3.attn.relative_bias.table"),
        ("timm_swin", "merges.0.norm.bias"),
        ("hf_swin", "blocks.1.attn.qkv.weight"),
        ("timm_convnext", "blocks.2.residual.scale"),
    ],
)
def test_golden_tests_would_see_a_wrong_weight(name: str, part: str, tmp_path: Path) -> None:
    golden = write_checkpoint(name, tmp_path)
    model = load(tmp_path).model
    model.get_parameter(part).mul_(1.5)
    assert not torch.allclose(model(golden["input"]), golden["logits"], atol=1e-5, rtol=0)
