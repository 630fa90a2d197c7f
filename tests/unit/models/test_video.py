"""Clips: the tubelet embedding against torch's own 3D convolution, and still clips against the image model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models_at_random import TINY, randomize, tiny_vit
from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.packing import MOVABLE
from patchlight.models.video import VideoViT, inflate
from patchlight.weights.load import load
from patchlight.weights.save import save
from staged_models import tiny_swin


def still(image_BCHW: torch.Tensor, frames: int) -> torch.Tensor:
    return image_BCHW[:, None].repeat(1, frames, 1, 1, 1)


@pytest.mark.parametrize("position", MOVABLE)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_registers": 2},
        {"class_token": False, "pooling": "mean"},
        {"pooling": "cls_mean", "num_classes": 0},
        {"pooling": "mean", "final_norm": "pooled", "qk_norm": True},
        {"distill_token": True},
        {"pooling": "attention", "block_norm": "after"},
    ],
)
def test_a_still_clip_has_the_features_of_its_frame(position: Any, changes: dict[str, Any]) -> None:
    vit = tiny_vit(position=position, **changes)
    video = inflate(vit, num_frames=8)
    image = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        for frames in (2, 8, 12):  # one tubelet, as many as have positions, and more
            torch.testing.assert_close(video(still(image, frames)), vit(image), atol=1e-4, rtol=1e-4)
            tokens = video.tokens(still(image, frames))
            prefix, patches = tokens.tensor_split([vit.config.num_prefix], 1)
            alone_prefix, alone_patches = vit.tokens(image).tensor_split([vit.config.num_prefix], 1)
            torch.testing.assert_close(prefix, alone_prefix, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(patches, alone_patches.repeat(1, frames // 2, 1), atol=1e-4, rtol=1e-4)


def test_tubelets_are_a_convolution_in_three_dimensions() -> None:
    video = VideoViT(ViTConfig(**TINY, position="none", class_token=False, pooling="mean"), num_frames=4)
    randomize(video)
    torch.nn.init.zeros_(video.moments)
    clip = torch.randn(2, 4, 3, 16, 24)
    weight = video.vit.patch_embed.proj.weight.unflatten(1, (2, 3)).transpose(1, 2)  # D C F H W
    expected = F.conv3d(clip.transpose(1, 2), weight, video.vit.patch_embed.proj.bias, stride=(2, 8, 8))
    video.vit.blocks = torch.nn.ModuleList()
    video.vit.norm = torch.nn.Identity()
    torch.testing.assert_close(video.tokens(clip), expected.flatten(2).transpose(1, 2), atol=1e-4, rtol=1e-4)


def test_what_moves_is_seen_and_when_it_moves() -> None:
    video = inflate(tiny_vit(num_registers=2), num_frames=8)
    torch.manual_seed(0)
    clip = torch.randn(1, 8, 3, 32, 32)
    with torch.no_grad():
        backwards = clip.flip(1)
        # Without positions in time, a clip of tubelets in another order is the same set of tokens.
        turned = clip.unflatten(1, (4, 2)).flip(1).flatten(1, 2)
        torch.testing.assert_close(video(turned), video(clip), atol=1e-5, rtol=1e-5)
        assert (video(clip) - video(still(clip[:, 0], 8))).abs().max() > 1e-2
        video.moments.copy_(10 * torch.randn_like(video.moments))
        assert (video(turned) - video(clip)).abs().max() > 1e-3  # 1e-6 before
        assert (video(backwards) - video(clip)).abs().max() > 1e-3


def test_it_learns() -> None:
    video = inflate(tiny_vit(), num_frames=4)
    video(torch.randn(2, 4, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in video.parameters())
    assert video.moments.grad.abs().sum() > 0


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (1, 3, 3, 32, 32), (1, 4, 6, 32, 32), (1, 0, 3, 32, 32)])
def test_what_is_no_clip_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(PatchlightError, match=r"expected \(batch, frames, 3, height, width\), with a multiple of 2"):
        inflate(tiny_vit())(torch.zeros(shape))


def test_what_cannot_be_inflated_is_named(tmp_path: Path) -> None:
    for other in (load(save(tiny_vit(), tmp_path / "x")), tiny_swin(), "S/16"):
        with pytest.raises(PatchlightError, match=f"inflate takes a ViT, not a {type(other).__name__};"):
            inflate(other)  # type: ignore[arg-type]
        with pytest.raises(PatchlightError, match=f"VideoViT takes a ViTConfig, not a {type(other).__name__};"):
            VideoViT(other)  # type: ignore[arg-type]
    with pytest.raises(PatchlightError, match=r"the clip is of type str; the model takes a tensor \(batch, frames, 3,"):
        inflate(tiny_vit())("clip.mp4")
    with pytest.raises(PatchlightError, match="num_frames=5 must be a multiple of tubelet=2"):
        inflate(tiny_vit(), num_frames=5)
    with pytest.raises(PatchlightError, match="position='relative_bias' knows one image's grid"):
        inflate(tiny_vit(position="relative_bias"))
    for stem in ({"stem": "convolutions"}, {"resnet": (), "image_size": 32}):
        with pytest.raises(PatchlightError, match="a convolutional stem cannot be inflated"):
            inflate(tiny_vit(**stem))
