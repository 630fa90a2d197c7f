"""Masked autoencoders: what is hidden stays hidden, every photo's mask is its own, runs resume exactly."""

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import patchlight as pl
from models_at_random import randomize
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig
from patchlight.models.stems import patchify
from patchlight.models.vit import ViT
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig
from patchlight.training.data import Batch
from patchlight.training.mae import (
    Mae,
    MaeConfig,
    Reconstruction,
    pixel_targets,
    reconstruction_png,
    unpatchify,
)
from patchlight.training.optim import make_optimizer
from patchlight.weights.save import save

MODEL: dict[str, Any] = {
    "image_size": (24, 32),
    "patch_size": (8, 4),
    "width": 24,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 0,
}


def settings(model: dict[str, Any] | None = None, mae: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    config = ViTConfig(**{**MODEL, **(model or {})})
    chosen = MaeConfig(**{"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, **(mae or {})})
    values: dict[str, Any] = {
        "model": config,
        "data": DataConfig(train="none"),
        "preprocess": PreprocessConfig(image_size=config.image_size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3)),
        "augment": AugmentConfig(flip=True, crop="pad"),
        "mae": chosen,
    }
    return TrainConfig(**{**values, **changes})


def made(config: TrainConfig, *, at_random: bool = True) -> Mae:
    torch.manual_seed(0)
    mae = Mae(ViT(config.model), config)
    if at_random:
        randomize(mae)
    return mae


def photos(count: int = 6, size: tuple[int, int] = (24, 32), seed: int = 0) -> Tensor:
    """Soft gradients and edges, uint8."""
    coarse = torch.rand(count, 3, 3, 4, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(coarse, size, mode="bilinear") * 255).to(torch.uint8)


def batch_of(samples: list[int], epoch: int = 0) -> Batch:
    samples_B = torch.tensor(samples)
    everyone = photos()
    return Batch(
        everyone[samples_B],
        torch.zeros_like(samples_B),
        torch.full_like(samples_B, epoch),
        samples_B,
        torch.zeros_like(samples_B),
    )


@pytest.mark.parametrize("position", ["learned", "sincos2d", "rope2d", "none"])
@pytest.mark.parametrize("prefix", [{}, {"num_registers": 2}, {"class_token": False, "pooling": "mean"}])
@torch.no_grad()
def test_hidden_pixels_reach_no_prediction_and_visible_ones_do(position: str, prefix: dict[str, Any]) -> None:
    mae = made(settings({"position": position, **prefix})).eval()
    images_BCHW = torch.randn(2, 3, 24, 32)
    noise_BP = torch.rand(2, 24)
    pixels_BPX, hidden_BP = mae.draw(images_BCHW, noise_BP)
    assert hidden_BP.sum(1).tolist() == [18, 18]

    def changed(where_BP: Tensor) -> Tensor:
        patches_BPX = patchify(images_BCHW, (8, 4))
        other = torch.where(where_BP[:, :, None], patches_BPX + 1.0, patches_BPX)
        return mae.draw(unpatchify(other, (3, 8), (8, 4)), noise_BP)[0]

    assert torch.equal(changed(hidden_BP), pixels_BPX)
    one_visible_BP = torch.zeros_like(hidden_BP)
    one_visible_BP[0, int((~hidden_BP[0]).nonzero()[0])] = True
    moved_BP = (changed(one_visible_BP) != pixels_BPX).any(2)
    assert moved_BP[0].all()
    assert not moved_BP[1].any()


@pytest.mark.parametrize("position", ["learned", "sincos2d", "rope2d"])
@torch.no_grad()
def test_the_encoder_runs_its_visible_tokens_as_if_the_others_were_masked_out(position: str) -> None:
    """Independent: the whole image goes through the blocks, and attention is kept off the hidden patches."""
    mae = made(settings({"position": position, "num_registers": 1})).eval()
    images_BCHW, noise_BP = torch.randn(2, 3, 24, 32), torch.rand(2, 24)
    seen: list[Tensor] = []
    mae.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    _, hidden_BP = mae.draw(images_BCHW, noise_BP)
    valid_BN = torch.cat([torch.ones(2, 2, dtype=torch.bool), ~hidden_BP], 1)
    x_BND, geometry = mae.vit.embed(images_BCHW)
    geometry = dataclasses.replace(geometry, valid_BN=valid_BN)
    for block in mae.vit.blocks:
        x_BND = block(x_BND, geometry)
    x_BND = mae.vit.norm(x_BND)
    for image in range(2):
        order = noise_BP[image].argsort()[:6]
        expected = torch.cat([x_BND[image, :2], x_BND[image, 2:][order]])
        torch.testing.assert_close(seen[0][image], expected, atol=2e-5, rtol=1e-4)


def test_the_loss_is_that_of_the_hidden_patches_alone() -> None:
    mae = made(settings()).eval()
    images_BCHW, noise_BP = torch.randn(2, 3, 24, 32), torch.rand(2, 24)
    loss = mae(images_BCHW, noise_BP)
    pixels_BPX, hidden_BP = mae.draw(images_BCHW, noise_BP)
    errors = []
    for image in range(2):
        for patch in hidden_BP[image].nonzero()[:, 0].tolist():
            row, column = divmod(patch, 8)
            part = images_BCHW[image, :, 8 * row : 8 * row + 8, 4 * column : 4 * column + 4].double().numpy()
            target = (part - part.mean()) / math.sqrt(part.var(ddof=1) + 1e-6)
            drawn = pixels_BPX[image, patch].detach().double().numpy().reshape(3, 8, 4)
            errors.append(((drawn - target) ** 2).mean())
    assert len(errors) == 36
    assert loss.item() == pytest.approx(np.mean(errors), rel=1e-5)


def test_a_patch_of_one_colour_has_a_target_of_zero_and_no_nan() -> None:
    target_BPX = pixel_targets(torch.full((1, 3, 8, 8), 0.3), (4, 4), normalised=True)
    assert target_BPX.abs().max() < 1e-3
    assert torch.equal(
        pixel_targets(torch.full((1, 3, 8, 8), 0.3), (4, 4), normalised=False), torch.full((1, 4, 48), 0.3)
    )


def test_unpatchify_undoes_patchify() -> None:
    images_BCHW = torch.randn(2, 3, 24, 32)
    assert torch.equal(unpatchify(patchify(images_BCHW, (8, 4)), (3, 8), (8, 4)), images_BCHW)


def test_a_photo_is_varied_and_masked_the_same_whatever_it_is_batched_with() -> None:
    mae = made(settings())
    images_BCHW, noise_BP = mae.prepare(batch_of([0, 1, 2, 3]), cropped=False)
    alone_BCHW, alone_BP = mae.prepare(batch_of([2]), cropped=False)
    assert torch.equal(images_BCHW[2:3], alone_BCHW)
    assert torch.equal(noise_BP[2:3], alone_BP)
    assert not torch.equal(noise_BP[0], noise_BP[1])
    assert not torch.equal(mae.prepare(batch_of([2], epoch=1), cropped=False)[1], alone_BP)


def test_prepared_photos_are_normalised_as_the_settings_say() -> None:
    config = settings(augment=AugmentConfig(flip=False))
    images_BCHW, _ = made(config).prepare(batch_of([3]), cropped=False)
    expected = (photos()[3].double() / 255 - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor(
        [0.2, 0.25, 0.3]
    ).view(3, 1, 1)
    torch.testing.assert_close(images_BCHW[0].double(), expected, atol=1e-5, rtol=0)


def take_steps(mae: Mae, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)
        mae.set_progress(step / 8)
        inputs = mae.prepare(batch_of([step % 6, (step + 1) % 6, (step + 2) % 6, (step + 3) % 6], step), cropped=False)
        loss = mae(*inputs)
        loss.backward()
        optimizer.step()
        mae.zero_grad()
        mae.after_move()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_weights(optim: Any) -> None:
    config = settings({"drop_path": 0.2}, optim=OptimConfig(name=optim))
    whole = made(config, at_random=False).train()
    take_steps(whole, make_optimizer(whole, config.optim), 0, 8)

    before = made(config, at_random=False).train()
    optimizer = make_optimizer(before, config.optim)
    take_steps(before, optimizer, 0, 3)
    kept = io.BytesIO()
    torch.save({"model": before.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    kept.seek(0)
    state = torch.load(kept, weights_only=True)

    after = Mae(ViT(config.model), config).train()
    randomize(after, seed=9)
    optimizer = make_optimizer(after, config.optim)
    after.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    take_steps(after, optimizer, 3, 8)
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in after.state_dict().items())
    assert after.state_dict().keys() == expected.keys()
    assert after.measures() == whole.measures()


def test_every_parameter_learns() -> None:
    """Processes that train together wait for the gradient of each."""
    mae = made(settings({"num_registers": 2})).train()
    mae(*mae.prepare(batch_of([0, 1]), cropped=False)).backward()
    assert [name for name, weight in mae.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_learning_explains_what_a_fresh_model_does_not() -> None:
    config = settings(augment=AugmentConfig(flip=False), optim=OptimConfig(lr=1e-2), mae={"normalised_pixels": False})
    mae = made(config, at_random=False).train()
    first, *_, last = take_steps(mae, make_optimizer(mae, config.optim), 0, 150)
    assert mae.measures()["explained"] > 0.4
    assert last < first / 2


def test_measures_give_the_explained_share_of_the_last_batch() -> None:
    mae = made(settings()).train()
    inputs = mae.prepare(batch_of([0, 1, 2]), cropped=False)
    loss = mae(*inputs)
    target = pixel_targets(inputs[0], (8, 4), normalised=True).double().numpy()
    assert mae.measures() == {"explained": pytest.approx(1 - loss.item() / target.var(ddof=1), rel=1e-4)}


def test_a_bad_batch_leaves_the_measures_as_they_were() -> None:
    mae = made(settings()).train()
    inputs = mae.prepare(batch_of([0, 1, 2]), cropped=False)
    mae(*inputs)
    before = mae.measures()
    mae(inputs[0] * torch.nan, inputs[1])
    assert mae.measures() == before


def test_a_run_that_learns_nothing_is_stopped_with_what_to_change() -> None:
    """The rate is so high that the first step ruins the model."""
    config = settings(mae={"patience": 6}, optim=OptimConfig(lr=30.0))
    mae = made(config, at_random=False).train()
    optimizer = make_optimizer(mae, config.optim)
    take_steps(mae, optimizer, 0, 5)
    mae.check()
    take_steps(mae, optimizer, 5, 6)
    with pytest.raises(PatchlightError, match=r"after 6 steps .* lower optim\.lr"):
        mae.check()


def test_what_is_shown_is_a_plain_vit_that_load_takes(tmp_path: Path) -> None:
    config = settings()
    mae = made(config)
    save(mae.shown(), tmp_path / "model", preprocess=config.preprocess)
    loaded = pl.load(tmp_path / "model")
    images_BCHW = torch.randn(2, 3, 24, 32)
    with torch.no_grad():
        assert torch.equal(loaded.model(images_BCHW), mae.shown().eval()(images_BCHW))
    assert loaded.config.num_classes == 0


@pytest.mark.parametrize("normalised", [True, False])
def test_pictures_show_the_photo_the_visible_part_and_the_drawing(normalised: bool) -> None:
    config = settings(mae={"normalised_pixels": normalised})
    mae = made(config).train()
    levels = photos().float() / 255
    mean, std = (torch.tensor(colour).view(3, 1, 1) for colour in (config.preprocess.mean, config.preprocess.std))
    images_BCHW, noise_BP = (levels - mean) / std, torch.rand(6, 24)
    pictures = mae.reconstruct(images_BCHW, noise_BP)
    assert mae.training
    assert mae.vit.blocks[0].training
    drawn_BPX, hidden_BP = mae.eval().draw(images_BCHW, noise_BP)
    torch.testing.assert_close(pictures.original, levels, atol=1e-5, rtol=0)
    for image, patch in ((0, 0), (3, 13), (5, 23), (2, 7), (2, 8)):
        row, column = divmod(patch, 8)
        place = (image, slice(None), slice(8 * row, 8 * row + 8), slice(4 * column, 4 * column + 4))
        original, masked, reconstructed = (each[place] for each in pictures)
        if not hidden_BP[image, patch]:
            torch.testing.assert_close(masked, original)
            torch.testing.assert_close(reconstructed, original)
            continue
        torch.testing.assert_close(masked, torch.full((3, 8, 4), 0.5), atol=1e-5, rtol=0)
        expected = drawn_BPX[image, patch].detach().view(3, 8, 4)
        if normalised:
            part = images_BCHW[place]
            expected = expected * (part.var() + 1e-6).sqrt() + part.mean()
        torch.testing.assert_close(reconstructed, (expected * std + mean).clamp(0, 1), atol=1e-5, rtol=0)
    again = mae.reconstruct(images_BCHW)
    assert all(torch.equal(*pair) for pair in zip(again, mae.reconstruct(images_BCHW), strict=True))
    assert not torch.equal(again.masked, mae.reconstruct(images_BCHW, seed=1).masked)


def test_the_png_has_a_row_a_photo_and_three_columns() -> None:
    parts = [torch.full((2, 3, 5, 7), level) for level in (0.0, 0.5, 1.0)]
    parts[1][1] = 0.2
    pictures = Reconstruction(*parts)
    content = reconstruction_png(pictures, gap=2)
    assert content == reconstruction_png(pictures, gap=2)
    sheet = np.asarray(Image.open(io.BytesIO(content)))
    assert sheet.shape == (12, 25, 3)
    assert sheet[0, 0].tolist() == [0, 0, 0]
    assert sheet[0, 9].tolist() == [128, 128, 128]
    assert sheet[7, 15].tolist() == [51, 51, 51]
    assert sheet[5:7].min() == 255


@pytest.mark.parametrize(
    ("model", "mae", "message"),
    [
        ({"position": "relative_bias"}, {}, "relative_bias"),
        ({"image_size": (24, 30), "uneven_size": "pad"}, {}, "do not divide 24x30"),
        ({}, {"mask_share": 0.99}, "leaves 0 to see"),
    ],
)
def test_models_that_cannot_be_masked_are_refused(model: dict[str, Any], mae: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        made(settings(model, mae))


@pytest.mark.parametrize(
    ("mae", "message"),
    [
        ({"mask_share": 1.0}, "mask_share=1.0"),
        ({"decoder_width": 30}, "decoder_width=30 .* by 4"),
        ({"decoder_heads": 3}, "decoder_heads=3"),
        ({"decoder_depth": 0}, "decoder_depth=0"),
        ({"decoder_widht": 30}, "decoder_width"),
    ],
)
def test_settings_that_cannot_be_are_refused(mae: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        MaeConfig(**mae)


def test_a_tenth_of_ten_patches_is_one() -> None:
    """10 * (1 - 0.9) is a little under 1 in floating point."""
    mae = made(settings({"image_size": (8, 40)}, {"mask_share": 0.9}))
    assert mae.num_visible == 1


def test_settings_survive_json() -> None:
    config = settings(mae={"mask_share": 0.6})
    assert TrainConfig.from_json(config.to_json()) == config
