"""From pixels to patch tokens: two stems, and how an image of any size is fitted to them.

A patch embedding cuts the image into patches, flattens each and multiplies it by one matrix. A convolution whose
stride is its kernel does exactly that, and is what the model runs on a CPU; on a GPU it is a linear layer. NumPy's form
is here to be read; all three are held equal by test. `resize_projection` makes its matrix fit patches of another size
(FlexiViT).

A convolutional tokenizer looks at a few pixels at a time and across the edges of patches, which suits small images and
little data.
"""

import itertools
import operator
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.config import Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.resnet import ResNet


class PatchEmbed(nn.Module):
    """Patches to tokens by a convolution with stride = kernel = patch: image_BCHW -> tokens_BPD.

    In a hybrid the patches are cut from what a ResNet makes of the image, and are as much smaller.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.resnet = None if config.resnet is None else ResNet(config.in_channels, config.resnet)
        channels = config.in_channels if self.resnet is None else self.resnet.channels
        down, across = (side // config.resnet_stride for side in config.patch_size)
        self.proj = nn.Conv2d(channels, config.width, (down, across), stride=(down, across), bias=config.patch_bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.proj.weight.dtype

    def forward(self, image_BCHW: Tensor, grids: Sequence[Size] = ()) -> Tensor:
        """`grids`: as in `fit_to_patches`."""
        if self.resnet is not None:
            image_BCHW = self._through_resnet(image_BCHW, grids)
        if image_BCHW.is_cuda:
            # A GPU's convolution lays the image out anew before and the tokens after; patches are laid out once.
            return embed_with_linear(image_BCHW, self.proj.weight, self.proj.bias)
        return self.proj(image_BCHW).flatten(2).transpose(1, 2)

    def _through_resnet(self, image_BCHW: Tensor, grids: Sequence[Size]) -> Tensor:
        """Images of different sizes one by one, since norms and borders would mix them with their padding."""
        assert self.resnet is not None
        (height, width), (down, across) = image_BCHW.shape[2:], self.patch_size
        if all((h * down, w * across) == (height, width) for h, w in grids):
            return self.resnet(image_BCHW)
        maps = [
            self.resnet(image[None, :, : h * down, : w * across])
            for image, (h, w) in zip(image_BCHW, grids, strict=True)
        ]
        rows, columns = height // self.resnet.stride, width // self.resnet.stride
        padded = [F.pad(each, (0, columns - each.shape[3], 0, rows - each.shape[2])) for each in maps]
        return torch.cat(padded)


class ConvTokenizer(nn.Module):
    """Convolutions of 3x3, each followed by a max pool of 3x3 with stride 2 (CCT, Hassani et al. 2021,
    arXiv:2104.05704), as many as halve the image to a patch_size-th: image_BCHW -> tokens_BPD.

    One of them, of patch_size 2, is the paper's 3x1; two, of patch_size 4, its 3x2.
    """

    HIDDEN = 64
    """Channels between two convolutions."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        halvings = config.patch_size[0].bit_length() - 1
        widths = [config.in_channels, *[self.HIDDEN] * (halvings - 1), config.width]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=config.patch_bias)
            for before, after in itertools.pairwise(widths)
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.convs[0].weight.dtype  # type: ignore[return-value]

    def forward(self, image_BCHW: Tensor, grids: Sequence[Size] = ()) -> Tensor:
        """`grids`: as in `fit_to_patches`."""
        for halving, conv in enumerate(self.convs):
            scale = 2 ** (len(self.convs) - halving)
            sizes = [(h * scale, w * scale) for h, w in grids]
            if halving and any(size != image_BCHW.shape[2:] for size in sizes):
                # What the last convolution left beyond an image's edge is not zero; alone it would have met zeros.
                image_BCHW = blank_outside(image_BCHW, sizes)
            # Pooled before the ReLU: the maximum is the same, of a quarter of the numbers.
            image_BCHW = F.max_pool2d(conv(image_BCHW), 3, stride=2, padding=1).relu()
        return image_BCHW.flatten(2).transpose(1, 2)

    def init_weights(self) -> None:
        """As convolutions before a ReLU are started (He et al. 2015): what comes out varies as what went in."""
        for conv in self.convs:
            assert isinstance(conv, nn.Conv2d)
            nn.init.kaiming_normal_(conv.weight)
            if conv.bias is not None:
                nn.init.zeros_(conv.bias)


STEMS: dict[str, type[PatchEmbed] | type[ConvTokenizer]] = {"patchify": PatchEmbed, "convolutions": ConvTokenizer}


def resize_projection(weight_DCHW: Tensor, patch_size: Size) -> Tensor:
    """A patch embedding's weights for patches of another size, in float64 and back (FlexiViT, Beyer et al. 2022,
    arXiv:2212.08013).

    Let R be the bilinear resizing of a patch from its old size to the new. The new weights v are those for which
    <v, R x> comes nearest to <w, x> over all patches x: v = pinv(R') w. Where patches grow nothing is lost, and a patch
    that was resized gives the very token that it gave before.
    """
    old, new = tuple(weight_DCHW.shape[-2:]), tuple(patch_size)
    if old == new:
        return weight_DCHW
    weight_DCX = weight_DCHW.flatten(2).to(torch.float64)
    each_old_pixel = torch.eye(old[0] * old[1], dtype=torch.float64, device=weight_DCHW.device).reshape(-1, 1, *old)
    resizing_XY = F.interpolate(each_old_pixel, size=new, mode="bilinear").flatten(1)  # R', X old pixels, Y new ones
    return (weight_DCX @ torch.linalg.pinv(resizing_XY).T).unflatten(2, new).to(weight_DCHW.dtype)


def patchify(image_BCHW: Tensor, patch_size: Size) -> Tensor:
    """Cut an image into flattened patches in reading order: patches_BPX, X numbers each."""
    batch, channels, height, width = image_BCHW.shape
    down, across = patch_size
    grid = image_BCHW.reshape(batch, channels, height // down, down, width // across, across)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * down * across)


def embed_with_linear(image_BCHW: Tensor, weight_DCHW: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """The convolution's map as a linear layer on flattened patches: tokens_BPD."""
    down, across = weight_DCHW.shape[-2:]
    return F.linear(patchify(image_BCHW, (down, across)), weight_DCHW.flatten(1), bias_D)


def embed_with_numpy(image_CHW: np.ndarray, weight_DCHW: np.ndarray, bias_D: np.ndarray | float = 0.0) -> np.ndarray:
    """The same map for one image, as reshape, transpose and matrix product: tokens_PD."""
    channels, height, width = image_CHW.shape
    down, across = weight_DCHW.shape[-2:]
    grid = image_CHW.reshape(channels, height // down, down, width // across, across)
    patches_PX = grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels * down * across)
    return patches_PX @ weight_DCHW.reshape(len(weight_DCHW), -1).T + bias_D


def fit_to_patches(
    image_BCHW: Tensor, config: ViTConfig, sizes: Sequence[Size] | None = None
) -> tuple[Tensor, list[Size]]:
    """An image batch whose size the patch divides, and the patch grids: one for all, or with `sizes` one an image.

    `sizes` gives each image's own (height, width) in a batch that was padded right and below to a common size; what
    lies outside is set to zero, so that nothing in the padding can matter.
    """
    check_image(image_BCHW, config.in_channels)
    height, width = image_BCHW.shape[2:]
    grid = config.grid_for((height, width))
    fitted = (grid[0] * config.patch_size[0], grid[1] * config.patch_size[1])
    if sizes is not None:
        image_BCHW, grids = _keep_inside(image_BCHW, config, sizes)
        if all(own == grid for own in grids):
            grids = [grid]
    else:
        grids = [grid]
    if fitted == (height, width):
        return image_BCHW, grids
    if config.uneven_size == "pad":
        return F.pad(image_BCHW, (0, fitted[1] - width, 0, fitted[0] - height)), grids
    return F.interpolate(image_BCHW.float(), size=fitted, mode="bicubic", antialias=True), grids


def check_image(image_BCHW: Tensor, channels: int) -> None:
    """Raise for anything but a batch of images, and say how to make it one."""
    if not isinstance(image_BCHW, Tensor):
        kind = type(image_BCHW).__name__
        raise PatchlightError(
            f"the image is of type {kind}; the model takes a tensor (batch, {channels}, height, width), such as "
            "image[None] of `image, view = loaded.preprocess(photo)`"
        )
    if not image_BCHW.is_floating_point():
        raise PatchlightError(
            f"the image is {image_BCHW.dtype}; the model takes floating-point images, normalised as in its training"
        )
    if image_BCHW.ndim != 4 or image_BCHW.shape[1] != channels or 0 in image_BCHW.shape[2:]:
        shape = tuple(image_BCHW.shape)
        remedy = ""
        if len(shape) == 3 and shape[0] == channels:
            remedy = "; image[None] adds the batch axis"
        elif len(shape) == 4 and shape[3] == channels:
            remedy = "; image.permute(0, 3, 1, 2) puts the channels first"
        raise PatchlightError(f"the image has shape {shape}; expected (batch, {channels}, height, width){remedy}")


def _keep_inside(image_BCHW: Tensor, config: ViTConfig, sizes: Sequence[Size]) -> tuple[Tensor, list[Size]]:
    batch, _, height, width = image_BCHW.shape
    try:
        sizes = [(operator.index(h), operator.index(w)) for h, w in sizes]
    except (TypeError, ValueError):
        raise PatchlightError(f"`sizes` needs a (height, width) of whole numbers for each image; got {sizes}") from None
    if config.uneven_size == "resize":
        raise PatchlightError("`sizes` goes with uneven_size='error' or 'pad'; with 'resize' give images of one size")
    if not sizes or len(sizes) != batch or not all(0 < h <= height and 0 < w <= width for h, w in sizes):
        raise PatchlightError(
            f"`sizes` needs a (height, width) for each of the {batch} images, each within {height}x{width}; got {sizes}"
        )
    return blank_outside(image_BCHW, sizes), [config.grid_for(size) for size in sizes]


def blank_outside(image_BCHW: Tensor, sizes: Sequence[Size]) -> Tensor:
    """The images with zeros right of and below each one's own (height, width)."""
    heights_B11, widths_B11 = torch.tensor(sizes, device=image_BCHW.device)[:, :, None, None].unbind(1)
    down_H1 = torch.arange(image_BCHW.shape[2], device=image_BCHW.device)[:, None]
    across_W = torch.arange(image_BCHW.shape[3], device=image_BCHW.device)
    inside_BHW = (down_H1 < heights_B11) & (across_W < widths_B11)
    return image_BCHW.where(inside_BHW[:, None], 0)
