"""ConvNeXt, whole, in one file that reads like the paper (Liu et al. 2022, arXiv:2201.03545): the CNN of our day.

Its plan is a Swin's: patches, stages that halve the grid, blocks that first mix over space and then over channels. Only
what mixes over space is a depthwise convolution, and there is no attention in it.

Shapes are in the names: B batch, C colour, H W pixels, h w patch grid, D width, F MLP hidden, K classes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchlight.config import PreprocessConfig
from patchlight.families import ConvNeXtConfig
from patchlight.models.blocks import Residual, check_config, drop_rates, wanted_blocks
from patchlight.models.fresh import init_weights
from patchlight.models.pooling import check_pooling
from patchlight.models.stems import check_image


class GlobalResponseNorm(nn.Module):
    """Scale each channel by its response to the whole image, relative to the mean over channels (ConvNeXt V2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x_BhwF: Tensor) -> Tensor:
        response_B11F = torch.linalg.vector_norm(x_BhwF, dim=(1, 2), keepdim=True)
        share_B11F = response_B11F / (response_B11F.mean(-1, keepdim=True) + 1e-6)
        return x_BhwF + self.weight * (x_BhwF * share_B11F) + self.bias


class MLP(nn.Module):
    """Two layers over the channels with a GELU between, and in the second version a norm over the whole image."""

    def __init__(self, config: ConvNeXtConfig, width: int) -> None:
        super().__init__()
        self.approximate = "tanh" if config.mlp == "gelu_tanh" else "none"
        self.up = nn.Linear(width, 4 * width)
        self.grn = GlobalResponseNorm(4 * width) if config.grn else None
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BhwD: Tensor) -> Tensor:
        hidden_BhwF = F.gelu(self.up(x_BhwD), approximate=self.approximate)
        return self.down(hidden_BhwF if self.grn is None else self.grn(hidden_BhwF))


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, a norm and an MLP, added to what came in: x_BhwD -> x_BhwD."""

    def __init__(self, config: ConvNeXtConfig, width: int, drop_path: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, config.kernel_size, padding=config.kernel_size // 2, groups=width)
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.mlp = MLP(config, width)
        self.residual = Residual(drop_path, drops=config.drop_path > 0, scale=config.layer_scale, width=width)

    def forward(self, x_BhwD: Tensor) -> Tensor:
        mixed_BhwD = self.conv(x_BhwD.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.residual(x_BhwD, self.mlp(self.norm(mixed_BhwD)))


class Stem(nn.Module):
    """Patches to normed tokens, by a convolution with stride = kernel = patch: image_BCHW -> x_BhwD."""

    def __init__(self, config: ConvNeXtConfig) -> None:
        super().__init__()
        self.conv = nn.Conv2d(config.in_channels, config.widths[0], config.patch_size, stride=config.patch_size)
        self.norm = nn.LayerNorm(config.widths[0], config.norm_eps)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.norm(self.conv(image_BCHW).permute(0, 2, 3, 1))


class Downsample(nn.Module):
    """Four neighbours become one, of the next stage's width: x_BhwD -> half as many rows and columns."""

    def __init__(self, config: ConvNeXtConfig, stage: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.widths[stage], config.norm_eps)
        self.conv = nn.Conv2d(config.widths[stage], config.widths[stage + 1], 2, stride=2)

    def forward(self, x_BhwD: Tensor) -> Tensor:
        return self.conv(self.norm(x_BhwD).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ConvNeXt(nn.Module):
    """image_BCHW of any size -> logits_BK, or pooled features_BD if the config has no classes."""

    def __init__(self, config: ConvNeXtConfig) -> None:
        super().__init__()
        check_config(config, ConvNeXtConfig, "convnext-T")
        self.config = config
        self.checkpoint_blocks = False
        """Recompute each block in the backward pass instead of keeping its activations: less memory, more time."""
        self.preprocess: PreprocessConfig | None = None
        """How photos are prepared for its weights, if they were loaded; `save` writes it."""
        rates = drop_rates(config.drop_path, config.depth)
        self.stem = Stem(config)
        self.blocks = nn.ModuleList(
            ConvNeXtBlock(config, config.widths[config.stage_of(index)], rate) for index, rate in enumerate(rates)
        )
        """Of all stages, one after the other."""
        self.merges = nn.ModuleList(Downsample(config, stage) for stage in range(len(config.depths) - 1))
        """Before the second stage, the third, ..."""
        self.norm = nn.LayerNorm(config.feature_width, config.final_norm_eps)
        self.head = nn.Linear(config.feature_width, config.num_classes) if config.num_classes else None
        self.init_weights()

    def forward(self, image_BCHW: Tensor) -> Tensor:
        features_BD = self.features(image_BCHW)
        return features_BD if self.head is None else self.head(features_BD)

    def features(self, image_BCHW: Tensor, *, pooling: str | None = None) -> Tensor:
        """One vector an image, before the head: features_BD, the normed mean of the last stage's patches."""
        check_pooling(pooling)
        return self.pooled(self.encode(image_BCHW))

    def pooled(self, x_BhwD: Tensor) -> Tensor:
        """What `encode` gave, as one vector an image: features_BD."""
        return self.norm(x_BhwD.mean((1, 2)))

    def tokens(self, image_BCHW: Tensor) -> Tensor:
        """The last stage's patches in reading order: x_BND. (The norm comes after pooling.)"""
        return self.encode(image_BCHW).flatten(1, 2)

    def intermediates(self, image_BCHW: Tensor, blocks: int | Sequence[int], *, dense: bool = False) -> list[Tensor]:
        """The patches after each of `blocks`, counted over all stages (0 is the first, -1 the last), as asked for.

        Each is x_BND, or with `dense` a picture (B, D, h, w): of `config.stage_ends` they are a feature pyramid.
        """
        wanted = wanted_blocks(blocks, self.config.depth)
        after: dict[int, Tensor] = dict.fromkeys(wanted, image_BCHW)
        self.encode(image_BCHW, keep=after)
        return [after[index].permute(0, 3, 1, 2) if dense else after[index].flatten(1, 2) for index in wanted]

    def attention_entries(self) -> tuple[int, ...]:
        """Numbers in each block's attention matrices: none."""
        return (0,) * self.config.depth

    def encode(self, image_BCHW: Tensor, keep: dict[int, Tensor] | None = None) -> Tensor:
        """The last stage's patches where they lie: x_BhwD. `keep` gets what comes out of the blocks that it has a place
        for."""
        check_image(image_BCHW, self.config.in_channels)
        self.config.stage_grids((image_BCHW.shape[2], image_BCHW.shape[3]))  # says so, where it is too small
        x_BhwD = self.stem(image_BCHW.to(self.stem.conv.weight.dtype))
        for index, block in enumerate(self.blocks):
            stage = self.config.stage_of(index)
            if stage and index == self.config.stage_starts[stage]:
                x_BhwD = self.merges[stage - 1](x_BhwD)
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x_BhwD = checkpoint(block, x_BhwD, use_reentrant=False)
            else:
                x_BhwD = block(x_BhwD)
            if keep is not None and index in keep:
                keep[index] = x_BhwD
        return x_BhwD

    def init_weights(self) -> None:
        """Draw fresh weights, see `fresh.init_weights`."""
        init_weights(self)
