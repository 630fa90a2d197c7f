"""A ViT for short clips: tubelets of two frames for patches, every token attending to all, in space and time
(ViViT, Arnab et al. 2021, arXiv:2103.15691, its first model), and the way there from a ViT that was trained on images.

A tubelet is the same patch in the frames of a short moment. Its embedding is one matrix for all its pixels, which is
what the image model's patch embedding does to an image with the frames' colours one after the other as channels. A
token's position is its patch's, as in the image model, plus one that is learned for its moment.

Shapes: B batch, F frames, M moments (F = M * tubelet), C colour, H W pixels, P patches, N = prefix + M * P, D width.
"""

import dataclasses
import math

import torch
from torch import Tensor, nn

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.packing import MOVABLE
from patchlight.models.resampling import resample
from patchlight.models.token_geometry import TokenGeometry
from patchlight.models.vit import ViT, check_vit


class VideoViT(nn.Module):
    """clip_BFCHW of any size and any whole number of tubelets -> logits_BK, or features_BD without classes."""

    def __init__(self, config: ViTConfig, num_frames: int = 16, tubelet: int = 2) -> None:
        """`config` is the image model's; `num_frames` says how many moments have a learned position."""
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise PatchlightError(f"VideoViT takes a ViTConfig, not a {type(config).__name__}; `inflate` takes a ViT")
        if tubelet < 1 or num_frames < 1 or num_frames % tubelet:
            raise PatchlightError(f"num_frames={num_frames} must be a multiple of tubelet={tubelet}, 1 or more")
        if config.position not in MOVABLE:
            raise PatchlightError(
                f"position={config.position!r} knows one image's grid; clips go with {', '.join(MOVABLE)}"
            )
        self.tubelet = tubelet
        self.vit = ViT(dataclasses.replace(config, in_channels=tubelet * config.in_channels))
        self.moments = nn.Parameter(torch.zeros(num_frames // tubelet, config.width))

    def forward(self, clip_BFCHW: Tensor) -> Tensor:
        return self.vit.read(*self.encode(clip_BFCHW))

    def tokens(self, clip_BFCHW: Tensor) -> Tensor:
        """The last block's tokens x_BND: prefix tokens first, then the patches of each moment."""
        return self.encode(clip_BFCHW)[0]

    def encode(self, clip_BFCHW: Tensor) -> tuple[Tensor, TokenGeometry]:
        """As `tokens`, with their geometry."""
        frames, channels = self.tubelet, self.vit.config.in_channels // self.tubelet
        if not isinstance(clip_BFCHW, Tensor):
            raise PatchlightError(
                f"the clip is of type {type(clip_BFCHW).__name__}; the model takes a tensor (batch, frames, "
                f"{channels}, height, width)"
            )
        shape = clip_BFCHW.shape
        if len(shape) != 5 or not shape[1] or shape[1] % frames or shape[2] != channels:
            raise PatchlightError(
                f"the clip has shape {tuple(shape)}; expected (batch, frames, {channels}, height, width), with a "
                f"multiple of {frames} frames"
            )
        batch, moments = clip_BFCHW.shape[0], clip_BFCHW.shape[1] // frames
        # As images with the frames' colours one after the other, each moment meets the image model's own `embed`.
        x_BnD, geometry = self.vit.embed(clip_BFCHW.unflatten(1, (moments, frames)).flatten(2, 3).flatten(0, 1))
        x_BMnD = x_BnD.unflatten(0, (batch, moments))
        prefix = geometry.num_prefix
        times_MD = resample(self.moments, (len(self.moments), 1), (moments, 1)).to(x_BnD.dtype)
        patches_BMPD = x_BMnD[:, :, prefix:] + times_MD[:, None]
        x_BND = torch.cat([x_BMnD[:, 0, :prefix], patches_BMPD.flatten(1, 2)], 1)
        geometry = _over_time(geometry, batch, moments)
        return self.vit.run_blocks(x_BND, geometry), geometry


def _over_time(geometry: TokenGeometry, batch: int, moments: int) -> TokenGeometry:
    """One moment's geometry for all of them: each patch is turned as in an image, whatever its moment.

    A patch counts for a part of one, so that prefix tokens keep the weight against them that they have in an image:
    without this, the attention that a class token pays to itself would fade as clips grow longer.
    """
    prefix, patches = geometry.num_prefix, math.prod(geometry.grid)
    if geometry.rope is not None:
        cos, sin = (
            torch.cat([table[:, :, :prefix], table[:, :, prefix:].repeat(1, 1, moments, 1)], 2)
            for table in geometry.rope
        )
        geometry = dataclasses.replace(geometry, rope=(cos, sin))
    if prefix and moments > 1:
        counts_N = torch.full((prefix + moments * patches,), 1 / moments, device=geometry.device)
        counts_N[:prefix] = 1
        geometry = dataclasses.replace(geometry, counts_BN=counts_N.expand(batch, -1))
    return geometry


@torch.no_grad()
def inflate(vit: ViT, num_frames: int = 16, tubelet: int = 2) -> VideoViT:
    """A video model that says of a still clip what the image model says of its frame: the patch projection is shared
    out evenly over a tubelet's frames (Carreira and Zisserman 2017), and the moments' positions start at zero."""
    check_vit(vit, "inflate")
    if vit.config.stem != "patchify" or vit.config.resnet is not None:
        raise PatchlightError("a convolutional stem cannot be inflated; only patch projections can")
    video = VideoViT(vit.config, num_frames, tubelet).to(vit.norm.weight)
    state = {key: value.clone() for key, value in vit.state_dict().items()}
    state["patch_embed.proj.weight"] = (state["patch_embed.proj.weight"] / tubelet).repeat(1, tubelet, 1, 1)
    video.vit.load_state_dict(state)
    return video.train(vit.training)
