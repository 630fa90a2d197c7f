"""Patches of another size, given at loading: by the definition, by timm's code, and through `load`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import oracles
from models_at_random import POSITIONS, tiny_vit
from patchlight.errors import PatchlightError
from patchlight.models.resampling import resample
from patchlight.models.stems import embed_with_linear, patchify, resize_projection
from patchlight.weights.load import load
from patchlight.weights.save import save


def patches_resized(image_BCHW: torch.Tensor, old: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Each patch of an image resized for itself, bilinearly, and put back in its place."""
    batch, channels, height, width = image_BCHW.shape
    grid = (height // old[0], width // old[1])
    patches = patchify(image_BCHW, old).reshape(-1, channels, *old)
    patches = F.interpolate(patches, size=new, mode="bilinear").reshape(batch, *grid, channels, *new)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, grid[0] * new[0], grid[1] * new[1])


@pytest.mark.parametrize(("old", "new"), [((4, 4), (8, 8)), ((4, 6), (7, 9)), ((8, 8), (8, 13))])
def test_resized_patches_give_the_tokens_they_gave(old: tuple[int, int], new: tuple[int, int]) -> None:
    weight, bias = torch.randn(12, 3, *old), torch.randn(12)
    image = torch.randn(2, 3, 3 * old[0], 2 * old[1])
    before = embed_with_linear(image, weight, bias)
    after = embed_with_linear(patches_resized(image, old, new), resize_projection(weight, new), bias)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    # and not, where the weights were only stretched like a picture
    stretched = F.interpolate(weight, size=new, mode="bilinear")
    assert (embed_with_linear(patches_resized(image, old, new), stretched, bias) - before).abs().max() > 1


def test_of_smaller_patches_no_weights_come_nearer() -> None:
    """With fewer pixels the tokens cannot all be kept; over white noise the error is the least that there is."""
    weight = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    patches = torch.randn(4000, 1, 8, 8, dtype=torch.float64)
    smaller = F.interpolate(patches, size=(5, 5), mode="bilinear").flatten(1)
    wanted = patches.flatten(1) @ weight.flatten(1).T

    def error(weight: torch.Tensor) -> float:
        return float((smaller @ weight.flatten(1).T - wanted).square().mean())

    ours = resize_projection(weight, (5, 5))
    least = error(torch.linalg.lstsq(smaller, wanted).solution.T)  # the best for these very patches
    assert least <= error(ours) < 1.02 * least
    assert error(F.interpolate(weight, size=(5, 5), mode="bilinear")) > 1.1 * least


@pytest.mark.parametrize(("old", "new"), [((16, 16), (8, 8)), ((8, 8), (12, 20)), ((4, 6), (7, 5))])
def test_equals_timm(old: tuple[int, int], new: tuple[int, int]) -> None:
    timm = oracles.timm()
    weight = torch.randn(12, 3, *old)
    theirs = timm.layers.resample_patch_embed(weight, list(new), interpolation="bilinear", antialias=False)
    torch.testing.assert_close(resize_projection(weight, new), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("patch", [4, (16, 8)])
def test_load_resizes_patches_and_positions(tmp_path: Path, position: Any, patch: Any) -> None:
    vit = tiny_vit(position=position, num_registers=2)
    loaded = load(save(vit, tmp_path / "m"), patch_size=patch)
    size = (patch, patch) if isinstance(patch, int) else patch
    assert loaded.config.patch_size == size
    assert loaded.config.image_size == (32, 32)
    assert "resized the patch projection from 8x8" in loaded.notes[0]
    assert ("resampled positions from 4x4" in " ".join(loaded.notes)) == (position in ("learned", "relative_bias"))
    image = torch.randn(2, 3, 32, 32)
    assert loaded.model.tokens(image).shape == (2, 3 + 1024 // (size[0] * size[1]), 24)
    torch.testing.assert_close(
        loaded.model.patch_embed.proj.weight, resize_projection(vit.patch_embed.proj.weight, size)
    )
    if position == "learned":
        rows = resample(vit.positions.table[3:], (4, 4), (32 // size[0], 32 // size[1]))
        torch.testing.assert_close(loaded.model.positions.table, torch.cat([vit.positions.table[:3], rows]))
    assert load(save(loaded, tmp_path / "again")).config == loaded.config


def test_a_stretched_photo_of_flat_patches_gets_the_same_answer(tmp_path: Path) -> None:
    """With image and patches twice as large, and nothing inside a patch to be seen, all tokens are the same."""
    vit = tiny_vit()
    flat = torch.randn(1, 3, 4, 4)
    loaded = load(save(vit, tmp_path / "m"), patch_size=16, image_size=64)
    small, large = (F.interpolate(flat, scale_factor=scale) for scale in (8, 16))
    torch.testing.assert_close(loaded.model(large), vit(small), atol=1e-4, rtol=1e-4)
    assert loaded.notes == ("resized the patch projection from 8x8 to 16x16", loaded.notes[-1])


def test_behind_a_resnet_the_projection_of_its_pixels_is_resized(tmp_path: Path) -> None:
    vit = tiny_vit(resnet=())  # which leaves a pixel of 4x4
    loaded = load(save(vit, tmp_path / "m"), patch_size=16)
    assert loaded.model.patch_embed.proj.weight.shape[2:] == (4, 4)
    assert loaded.model(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_a_patch_that_does_not_divide_is_named(tmp_path: Path) -> None:
    folder = save(tiny_vit(position="rope2d"), tmp_path / "m")
    with pytest.raises(PatchlightError, match="patches of 5x5 do not divide an image of 32x32; 30x30 would do"):
        load(folder, patch_size=5)
    assert load(folder, patch_size=5, image_size=30).config.grid == (6, 6)
