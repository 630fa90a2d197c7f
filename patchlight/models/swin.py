"""The Swin Transformer, whole, in one file that reads like the paper (Liu et al. 2021, arXiv:2103.14030).

An image is cut into small patches. Blocks of attention and MLP rewrite them, but a patch attends only to those in its
own window, so that the cost grows with the number of patches and not with its square. Every other block shifts the
windows by half their size, so that what lies on two sides of a border meets. Between stages, four neighbours become one
patch of twice the width. In the end the patches' mean is classified.

Shapes are in the names: B batch, C colour, H W pixels, h w patch grid, D width, W windows of an image, n patches of a
window, A heads, E = D / A, F MLP hidden, K classes, T offsets in a window. Images of any size are welcome: grids are
padded right and below to whole windows, and whose neighbours are none (padding, or the far side of a shifted image) are
masked.

Swin V2 (arXiv:2111.09883) trains steadily at greater sizes: what a branch adds is normed, queries and keys meet by the
angle between them, and positions are told by an MLP that knows every window.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchlight.config import PreprocessConfig, Size
from patchlight.families import SwinConfig
from patchlight.models.attention import attend
from patchlight.models.blocks import Residual, check_config, drop_rates, wanted_blocks
from patchlight.models.fresh import draw, init_weights
from patchlight.models.pooling import check_pooling
from patchlight.models.positions import log_offsets, relative_index
from patchlight.models.stems import check_image


@dataclass(frozen=True)
class Windows:
    """How a grid of patches is cut into windows, and who may look at whom in each."""

    grid: Size
    window: Size
    """(down, across), in patches: the config's, or less where the grid is smaller."""
    shift: Size
    """By how many patches the windows lie further right and below; what that pushes out comes in at the other side."""
    index_nn: Tensor
    """For each pair of patches in a window, its row in the table of relative positions."""
    mask_Wnn: Tensor | None
    """Who may look at whom (row: who looks); None where all may."""

    @property
    def padded(self) -> Size:
        """The grid of whole windows."""
        (h, w), (down, across) = self.grid, self.window
        return -(-h // down) * down, -(-w // across) * across

    def split(self, x_BhwD: Tensor) -> Tensor:
        """The patches of each window: x_BWnD."""
        (h, w), (down, across), (rows, columns) = self.grid, self.window, self.padded
        if (rows, columns) != (h, w):
            x_BhwD = F.pad(x_BhwD, (0, 0, 0, columns - w, 0, rows - h))
        if any(self.shift):
            x_BhwD = x_BhwD.roll((-self.shift[0], -self.shift[1]), (1, 2))
        x = x_BhwD.unflatten(2, (-1, across)).unflatten(1, (-1, down))  # B, windows down, down, across, across, D
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def join(self, x_BWnD: Tensor) -> Tensor:
        """The inverse of `split`: x_BhwD, without the padding."""
        (h, w), (down, across), (rows, columns) = self.grid, self.window, self.padded
        x = x_BWnD.unflatten(2, (down, across)).unflatten(1, (rows // down, columns // across))
        x_BhwD = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            x_BhwD = x_BhwD.roll(self.shift, (1, 2))
        return x_BhwD[:, :h, :w]


def lay_windows(config: SwinConfig, grid: Size, device: torch.device, *, shifted: bool) -> Windows:
    """The windows over a grid; see `SwinConfig.uneven_windows`."""
    size = config.window_size
    # A grid that is smaller than a window is its own window: the same as padding it, with the padding masked.
    window = (min(grid[0], size[0]), min(grid[1], size[1]))
    along = [length > side for length, side in zip(grid, size, strict=True)]
    if config.uneven_windows == "plain":
        along = [all(along)] * 2
    shift = (size[0] // 2 * (shifted and along[0]), size[1] // 2 * (shifted and along[1]))
    windows = Windows(grid, window, shift, relative_index(window, 0, device, largest=size), None)
    masks_padding = config.uneven_windows == "masked" and windows.padded != grid
    if not any(shift) and not masks_padding:
        return windows

    # In the shifted frame, what came in from the far side and what did not are strangers; so is padding to all others.
    far, outside = [], []
    for length, padded, step in zip(grid, windows.padded, shift, strict=True):
        place = torch.arange(padded, device=device) + step
        far.append(place >= padded)
        outside.append(place % padded >= length)
    kind_hw = 2 * far[0][:, None] + far[1].int()
    if masks_padding:
        kind_hw = kind_hw.masked_fill(outside[0][:, None] | outside[1], 4)
    whole = Windows(windows.padded, window, (0, 0), windows.index_nn, None)
    kind_Wn = whole.split(kind_hw[None, :, :, None])[0, :, :, 0]
    return Windows(grid, window, shift, windows.index_nn, kind_Wn[:, :, None] == kind_Wn[:, None])


class WindowHeads(NamedTuple):
    """What the heads of one attention layer worked with: the very tensors of its forward pass."""

    q_BWAnE: Tensor
    k_BWAnE: Tensor
    v_BWAnE: Tensor
    bias_WAnn: Tensor
    """What was added to the scores: the relative positions', and minus infinity for strangers; W is 1 if all alike."""
    out_BWAnE: Tensor

    def rows(self, windows: Tensor) -> Tensor:
        """Recompute the softmax rows of some windows, which fused kernels do not return: attn_BWAnn, float32."""
        with torch.autocast(self.q_BWAnE.device.type, enabled=False):
            q_BWAnE, k_BWAnE = self.q_BWAnE[:, windows].float(), self.k_BWAnE[:, windows].float()
            bias_WAnn = self.bias_WAnn if len(self.bias_WAnn) == 1 else self.bias_WAnn[windows]
            scores_BWAnn = q_BWAnE @ k_BWAnE.mT * q_BWAnE.shape[-1] ** -0.5 + bias_WAnn
            return scores_BWAnn.softmax(-1)


Visit = Callable[[int, WindowHeads, Windows, Tensor], None]
"""Is told a block's index, what its heads did, in which windows, and the patches x_BhwD after it."""


class RelativeBias(nn.Module):
    """A learned number for each head and each offset between two patches of a window."""

    def __init__(self, window: Size, num_heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty((2 * window[0] - 1) * (2 * window[1] - 1), num_heads))

    def reset_parameters(self) -> None:
        draw(self.table)

    def forward(self, index_nn: Tensor) -> Tensor:
        """bias_Ann"""
        return self.table[index_nn].permute(2, 0, 1)


class ContinuousBias(nn.Module):
    """The same as an MLP over the logarithms of the offsets, between 0 and 16 (Swin V2)."""

    HIDDEN = 512

    def __init__(self, window: Size, measure: Size, num_heads: int) -> None:
        super().__init__()
        self.window, self.measure = window, measure
        self.hidden = nn.Linear(2, self.HIDDEN)
        self.out = nn.Linear(self.HIDDEN, num_heads, bias=False)

    def forward(self, index_nn: Tensor) -> Tensor:
        """bias_Ann"""
        offsets_T2 = log_offsets(self.window, index_nn.device, measure=self.measure).to(self.hidden.weight.dtype)
        table_TA = self.out(self.hidden(offsets_T2).relu())
        return 16 * table_TA[index_nn].permute(2, 0, 1).sigmoid()


class CosineScale(nn.Module):
    """A learned factor for each head on the cosines of queries and keys, at most 100 (Swin V2)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.logarithm, math.log(10))

    def forward(self, q_BWAnE: Tensor, k_BWAnE: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys whose products, divided by sqrt(E) as in all attention, are the scaled cosines."""
        scale_A11 = self.logarithm.float().clamp(max=math.log(100)).exp()[:, None, None] * q_BWAnE.shape[-1] ** 0.5
        return F.normalize(q_BWAnE, dim=-1) * scale_A11.to(q_BWAnE.dtype), F.normalize(k_BWAnE, dim=-1)


class WindowAttention(nn.Module):
    """Multi-head self-attention inside each window, on fused kernels; `heads` shows what it did."""

    def __init__(self, config: SwinConfig, stage: int) -> None:
        super().__init__()
        width, self.num_heads = config.widths[stage], config.num_heads[stage]
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.cosine_scale = CosineScale(self.num_heads) if config.v2 else None
        self.relative_bias = (
            ContinuousBias(config.window_size, config.measuring_window(stage), self.num_heads)
            if config.v2
            else RelativeBias(config.window_size, self.num_heads)
        )
        self.out = nn.Linear(width, width)

    def forward(self, x_BWnD: Tensor, windows: Windows, heads: list[WindowHeads] | None = None) -> Tensor:
        """x_BWnD -> x_BWnD; the heads' tensors are appended to the list, if one is given."""
        qkv_BWn3AE = self.qkv(x_BWnD).unflatten(3, (3, self.num_heads, -1))
        q_BWAnE, k_BWAnE, v_BWAnE = qkv_BWn3AE.permute(3, 0, 1, 4, 2, 5).unbind(0)
        if self.cosine_scale is not None:
            q_BWAnE, k_BWAnE = self.cosine_scale(q_BWAnE, k_BWAnE)
        bias_WAnn = self.relative_bias(windows.index_nn).to(q_BWAnE.dtype)[None]
        if windows.mask_Wnn is None:
            # All windows are alike, as so many images: the bias is the same for all.
            parts, folded_bias = (0, 1), bias_WAnn
        else:
            # Each window has a mask of its own, the same in every image: as so many heads, no image needs a copy.
            bias_WAnn = bias_WAnn.masked_fill(~windows.mask_Wnn[:, None], -torch.inf)
            parts, folded_bias = (1, 2), bias_WAnn.flatten(0, 1)[None]
        folded = [part.flatten(*parts) for part in (q_BWAnE, k_BWAnE, v_BWAnE)]
        out = attend(folded[0], folded[1], folded[2], folded_bias)
        out_BWAnE = out.unflatten(parts[0], q_BWAnE.shape[parts[0] : parts[1] + 1])
        if heads is not None:
            heads.append(WindowHeads(q_BWAnE, k_BWAnE, v_BWAnE, bias_WAnn, out_BWAnE))
        return self.out(out_BWAnE.transpose(2, 3).flatten(3))


class MLP(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_BhwD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BhwD)))


class SwinBlock(nn.Module):
    """Attention in windows, then MLP, each on the normed patches (or normed itself) and added to what came in."""

    def __init__(self, config: SwinConfig, stage: int, drop_path: float) -> None:
        super().__init__()
        width = config.widths[stage]
        self.norms_after = config.v2
        self.norm1 = nn.LayerNorm(width, config.norm_eps)
        self.attn = WindowAttention(config, stage)
        self.residual1 = Residual(drop_path, drops=config.drop_path > 0)
        self.norm2 = nn.LayerNorm(width, config.norm_eps)
        self.mlp = MLP(width, config.mlp_widths[stage])
        self.residual2 = Residual(drop_path, drops=config.drop_path > 0)

    def forward(self, x_BhwD: Tensor, windows: Windows, heads: list[WindowHeads] | None = None) -> Tensor:
        if self.norms_after:
            attended_BWnD = self.attn(windows.split(x_BhwD), windows, heads)
            x_BhwD = self.residual1(x_BhwD, self.norm1(windows.join(attended_BWnD)))
            return self.residual2(x_BhwD, self.norm2(self.mlp(x_BhwD)))
        attended_BWnD = self.attn(windows.split(self.norm1(x_BhwD)), windows, heads)
        x_BhwD = self.residual1(x_BhwD, windows.join(attended_BWnD))
        return self.residual2(x_BhwD, self.mlp(self.norm2(x_BhwD)))


class PatchMerge(nn.Module):
    """Four neighbours become one patch of twice the width: x_BhwD -> half as many rows and columns."""

    def __init__(self, config: SwinConfig, width: int) -> None:
        super().__init__()
        self.norms_after = config.v2
        self.norm = nn.LayerNorm(2 * width if config.v2 else 4 * width, config.norm_eps)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x_BhwD: Tensor) -> Tensor:
        x_BhwD = F.pad(x_BhwD, (0, 0, 0, x_BhwD.shape[2] % 2, 0, x_BhwD.shape[1] % 2))
        x = x_BhwD.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # B, h / 2, down, w / 2, across, D
        x_hwD = x.permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.norm(self.reduction(x_hwD)) if self.norms_after else self.reduction(self.norm(x_hwD))


class PatchEmbed(nn.Module):
    """Patches to normed tokens, by a convolution with stride = kernel = patch: image_BCHW -> x_BhwD."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.width, config.patch_size, stride=config.patch_size)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        (down, across), (height, width) = self.proj.kernel_size, image_BCHW.shape[2:]
        image_BCHW = F.pad(image_BCHW, (0, -width % across, 0, -height % down))
        return self.norm(self.proj(image_BCHW).permute(0, 2, 3, 1))


class Swin(nn.Module):
    """image_BCHW of any size -> logits_BK, or pooled features_BD if the config has no classes."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        check_config(config, SwinConfig, "swin-T")
        self.config = config
        self.checkpoint_blocks = False
        """Recompute each block in the backward pass instead of keeping its activations: less memory, more time."""
        self.preprocess: PreprocessConfig | None = None
        """How photos are prepared for its weights, if they were loaded; `save` writes it."""
        rates = drop_rates(config.drop_path, config.depth)
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(SwinBlock(config, config.stage_of(i), rate) for i, rate in enumerate(rates))
        """Of all stages, one after the other."""
        self.merges = nn.ModuleList(PatchMerge(config, width) for width in config.widths[:-1])
        """Before the second stage, the third, ..."""
        self.norm = nn.LayerNorm(config.feature_width, config.norm_eps)
        self.head = nn.Linear(config.feature_width, config.num_classes) if config.num_classes else None
        self.init_weights()

    def forward(self, image_BCHW: Tensor) -> Tensor:
        features_BD = self.features(image_BCHW)
        return features_BD if self.head is None else self.head(features_BD)

    def features(self, image_BCHW: Tensor, *, pooling: str | None = None) -> Tensor:
        """One vector an image, before the head: features_BD, the mean of the last stage's patches."""
        check_pooling(pooling)
        return self.pooled(self.encode(image_BCHW))

    def pooled(self, x_BhwD: Tensor) -> Tensor:
        """What `encode` gave, as one vector an image: features_BD."""
        return x_BhwD.mean((1, 2))

    def tokens(self, image_BCHW: Tensor) -> Tensor:
        """The last stage's patches, normed, in reading order: x_BND."""
        return self.encode(image_BCHW).flatten(1, 2)

    def intermediates(self, image_BCHW: Tensor, blocks: int | Sequence[int], *, dense: bool = False) -> list[Tensor]:
        """The patches after each of `blocks`, counted over all stages (0 is the first, -1 the last), as asked for.

        Each is x_BND, or with `dense` a picture (B, D, h, w): of `config.stage_ends` they are a feature pyramid.
        """
        wanted = wanted_blocks(blocks, self.config.depth)
        after: dict[int, Tensor] = dict.fromkeys(wanted, image_BCHW)
        self.encode(image_BCHW, keep=after)
        return [after[index].permute(0, 3, 1, 2) if dense else after[index].flatten(1, 2) for index in wanted]

    def encode(self, image_BCHW: Tensor, visit: Visit | None = None, keep: dict[int, Tensor] | None = None) -> Tensor:
        """The last stage's patches, normed, where they lie: x_BhwD. `visit` is shown each block as it is passed, and
        `keep` gets what comes out of the blocks that it has a place for."""
        check_image(image_BCHW, self.config.in_channels)
        x_BhwD = self.patch_embed(image_BCHW.to(self.patch_embed.proj.weight.dtype))
        index = 0
        for stage, depth in enumerate(self.config.depths):
            if stage:
                x_BhwD = self.merges[stage - 1](x_BhwD)
            grid = (x_BhwD.shape[1], x_BhwD.shape[2])
            plain, shifted = (
                lay_windows(self.config, grid, x_BhwD.device, shifted=shifted) for shifted in (False, True)
            )
            for place in range(depth):
                windows = shifted if place % 2 else plain
                if visit is None:
                    x_BhwD = self._run(self.blocks[index], x_BhwD, windows)
                else:
                    heads: list[WindowHeads] = []
                    x_BhwD = self.blocks[index](x_BhwD, windows, heads)
                    visit(index, heads[0], windows, x_BhwD)
                if keep is not None and index in keep:
                    keep[index] = x_BhwD
                index += 1
        return self.norm(x_BhwD)

    def attention_entries(self) -> tuple[int, ...]:
        """Numbers in each block's attention matrices, over all windows and heads, for an image of the config's size."""
        config, entries = self.config, []
        for grid, depth, heads in zip(
            config.stage_grids(config.image_size), config.depths, config.num_heads, strict=True
        ):
            windows = lay_windows(config, grid, torch.device("meta"), shifted=False)
            entries += [heads * math.prod(windows.padded) * math.prod(windows.window)] * depth
        return tuple(entries)

    def _run(self, block: nn.Module, x_BhwD: Tensor, windows: Windows) -> Tensor:
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return checkpoint(block, x_BhwD, windows, use_reentrant=False)
        return block(x_BhwD, windows)

    def init_weights(self) -> None:
        """Draw fresh weights, see `fresh.init_weights`; in Swin V2 branches start by adding nothing."""
        init_weights(self)
        for name, parameter in self.blocks.named_parameters():
            if self.config.v2 and name.endswith((".norm1.weight", ".norm2.weight")):
                nn.init.zeros_(parameter)
