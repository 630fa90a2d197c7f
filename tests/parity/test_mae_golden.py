"""One pre-training step of a masked autoencoder against transformers': kept in a golden file, and run live."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import oracles
from models_at_random import randomize
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.vit import ViT
from patchlight.training.config import DataConfig, MaeConfig, TrainConfig
from patchlight.training.mae import Mae, load_hf_mae

GOLDEN = Path(__file__).parent.parent / "golden" / "hf_mae.safetensors"


def make_mae(theirs: dict[str, Any]) -> Mae:
    """Ours for a config of transformers."""
    model = ViTConfig(
        image_size=theirs["image_size"],
        patch_size=theirs["patch_size"],
        width=theirs["hidden_size"],
        depth=theirs["num_hidden_layers"],
        num_heads=theirs["num_attention_heads"],
        norm_eps=theirs["layer_norm_eps"],
        num_classes=0,
    )
    mae = MaeConfig(
        mask_share=theirs["mask_ratio"],
        decoder_width=theirs["decoder_hidden_size"],
        decoder_depth=theirs["decoder_num_hidden_layers"],
        decoder_heads=theirs["decoder_num_attention_heads"],
        normalised_pixels=theirs["norm_pix_loss"],
    )
    config = TrainConfig(
        model=model, data=DataConfig(train="none"), preprocess=PreprocessConfig(image_size=model.image_size), mae=mae
    )
    return Mae(ViT(model), config).eval()


def in_their_order(pixels_BPX: Tensor, patch_size: int) -> Tensor:
    """They keep a patch's three colours together, pixel by pixel."""
    parts = pixels_BPX.unflatten(2, (3, patch_size, patch_size))
    return parts.permute(0, 1, 3, 4, 2).flatten(2)


@pytest.fixture
def golden() -> tuple[Mae, dict[str, Tensor], dict[str, Tensor]]:
    with safe_open(GOLDEN, "pt") as file:
        theirs = json.loads(file.metadata()["meta"])["config"]
    tensors = load_file(GOLDEN)
    weights = {key.removeprefix("weights/"): value for key, value in tensors.items() if key.startswith("weights/")}
    mae = make_mae(theirs)
    load_hf_mae(mae, weights)
    return mae, tensors, weights


@torch.no_grad()
def test_loss_mask_and_pixels_are_the_references(
    golden: tuple[Mae, dict[str, Tensor], dict[str, Tensor]],
) -> None:
    mae, tensors, _ = golden
    pixels_BPX, hidden_BP = mae.draw(tensors["input"], tensors["noise"])
    assert torch.equal(hidden_BP.float(), tensors["mask"])
    torch.testing.assert_close(in_their_order(pixels_BPX, 8), tensors["reconstruction"], atol=1e-5, rtol=0)
    torch.testing.assert_close(mae(tensors["input"], tensors["noise"]), tensors["loss"][0], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "part", ["vit.class_token", "vit.norm.bias", "decoder.mask_token", "decoder.blocks.1.mlp.up.weight"]
)
def test_the_golden_file_would_see_a_wrong_weight(
    part: str, golden: tuple[Mae, dict[str, Tensor], dict[str, Tensor]]
) -> None:
    mae, tensors, _ = golden
    mae.get_parameter(part).view(-1)[0] += 0.1  # not everywhere alike, which a norm would take away
    pixels_BPX, _ = mae.draw(tensors["input"], tensors["noise"])
    assert not torch.allclose(in_their_order(pixels_BPX, 8), tensors["reconstruction"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("normalised", [True, False])
def test_live_with_positions_and_gradients(normalised: bool) -> None:
    """The golden file's positions are all zero; here none is, and gradients are compared, too."""
    transformers = oracles.transformers()
    theirs = transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(
            image_size=48,
            patch_size=8,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=192,
            decoder_hidden_size=32,
            decoder_num_hidden_layers=2,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=128,
            mask_ratio=0.6,
            norm_pix_loss=normalised,
        )
    )
    randomize(theirs)
    mae = make_mae(theirs.config.to_dict())
    load_hf_mae(mae, theirs.state_dict())
    generator = torch.Generator().manual_seed(1)
    images_BCHW, noise_BP = torch.randn(3, 3, 48, 48, generator=generator), torch.rand(3, 36, generator=generator)
    expected = theirs(images_BCHW, noise=noise_BP)
    pixels_BPX, hidden_BP = mae.draw(images_BCHW, noise_BP)
    assert torch.equal(hidden_BP.float(), expected.mask)
    size = expected.logits.abs().max().item()
    torch.testing.assert_close(in_their_order(pixels_BPX, 8), expected.logits, atol=2e-5 * size, rtol=1e-4)
    loss = mae(images_BCHW, noise_BP)
    torch.testing.assert_close(loss, expected.loss, atol=0, rtol=1e-4)
    loss.backward()
    expected.loss.backward()
    for ours, other in (
        (mae.vit.patch_embed.proj.weight, theirs.vit.embeddings.patch_embeddings.projection.weight),
        (mae.decoder.mask_token, theirs.decoder.mask_token.flatten()),
    ):
        gradient = theirs.decoder.mask_token.grad.flatten() if other.grad_fn is not None else other.grad
        torch.testing.assert_close(ours.grad, gradient, atol=1e-4 * gradient.abs().max().item(), rtol=1e-3)


def test_a_state_that_does_not_fit_is_refused(golden: tuple[Mae, dict[str, Tensor], dict[str, Tensor]]) -> None:
    mae, _, weights = golden
    encoder_alone = {key: value for key, value in weights.items() if key.startswith("vit.")}
    with pytest.raises(PatchlightError, match=r"decoder\.mask_token"):
        load_hf_mae(mae, encoder_alone)
    without = {key: value for key, value in weights.items() if key != "vit.layernorm.bias"}
    with pytest.raises(PatchlightError, match=r"does not fit .*norm\.bias"):
        load_hf_mae(mae, without)
    pixels = {**weights, "decoder.decoder_pred.weight": torch.zeros(100, 32)}
    with pytest.raises(PatchlightError, match="100 numbers a patch"):
        load_hf_mae(mae, pixels)
