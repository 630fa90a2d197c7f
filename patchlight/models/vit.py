"""The Vision Transformer, in one file that reads like the paper (Dosovitskiy et al. 2020, arXiv:2010.11929).

The same in 60 lines and in the paper's own symbols is lessons/plain_vit.py; start there if this is your first.

An image is cut into patches, each patch becomes a token, a class token is put in front, positions are added; blocks
of attention and MLP read and rewrite the tokens; the class token, or the mean of the patches, is classified. The two
halves of a block are next door: `attention.py` and `mlp.py`.

Shapes are in the names: B batch, C colour, H W pixels, h w patch grid, P = h * w patches, N tokens (prefix + P),
D width, A heads, E = D / A, F MLP hidden, K classes, Q queries.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from patchlight.config import PreprocessConfig, Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.attention import Attention, Heads
from patchlight.models.blocks import Residual, check_config, drop_rates, wanted_blocks
from patchlight.models.fresh import draw, init_as, init_weights
from patchlight.models.mlp import make_dropout, make_mlp
from patchlight.models.patch_boxes import PatchBoxes
from patchlight.models.pooling import AttentionPool, pool
from patchlight.models.positions import LearnedPositions, RotaryPositions, SincosPositions, relative_index
from patchlight.models.stems import STEMS, ConvTokenizer, fit_to_patches
from patchlight.models.token_geometry import TokenGeometry, lay_tokens

Pooling = Literal["cls", "mean", "cls_mean", "attention"]

Visit = Callable[[int, Heads, Tensor], None]
"""Is told a block's index, what its heads did, and the tokens x_BND after it."""


class Block(nn.Module):
    """Attention, then MLP, each on the normed tokens (or normed itself) and added to what came in."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        drops, scale = config.drop_path > 0, config.layer_scale
        self.norms_after = config.block_norm == "after"
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attn = Attention(config)
        self.residual1 = Residual(drop_path, drops=drops, scale=scale, width=config.width)
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = make_mlp(config)
        self.residual2 = Residual(drop_path, drops=drops, scale=scale, width=config.width)

    def forward(self, x_BND: Tensor, geometry: TokenGeometry, heads: list[Heads] | None = None) -> Tensor:
        x_BND = self.residual1(x_BND, self.attention_branch(x_BND, geometry, heads))
        return self.residual2(x_BND, self.mlp_branch(x_BND))

    def attention_branch(self, x_BND: Tensor, geometry: TokenGeometry, heads: list[Heads] | None = None) -> Tensor:
        if self.norms_after:
            return self.norm1(self.attn(x_BND, geometry, heads))
        return self.attn(self.norm1(x_BND), geometry, heads)

    def mlp_branch(self, x_BND: Tensor) -> Tensor:
        """The MLP's branch, which works on each token alone."""
        return self.norm2(self.mlp(x_BND)) if self.norms_after else self.mlp(self.norm2(x_BND))


class Head(nn.Module):
    """features_BD -> logits_BK: a linear layer, after one tanh layer in the original's pre-training head."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.feature_width, config.head_hidden) if config.head_hidden else None
        self.out = nn.Linear(config.head_hidden or config.feature_width, config.num_classes)

    def forward(self, features_BD: Tensor) -> Tensor:
        return self.out(features_BD if self.hidden is None else self.hidden(features_BD).tanh())


def make_positions(config: ViTConfig) -> LearnedPositions | SincosPositions | None:
    """The positions that are added to the patches; None if attention gets them instead, or there are none."""
    if config.has_position_table:
        return LearnedPositions(config)
    return SincosPositions(config) if config.position == "sincos2d" else None


class ViT(nn.Module):
    """image_BCHW of any size -> logits_BK, or pooled features_BD if the config has no classes.

    In a batch of images padded right and below to one size, `sizes` gives each image's own (height, width): the
    padding is then kept out of attention and pooling, and each image is treated as if it were alone. (Tokens that lie
    in the padding still come out of `tokens` and `intermediates`; they mean nothing.)
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        check_config(config, ViTConfig, "B/16")
        self.config = config
        self.checkpoint_blocks = False
        """Recompute each block in the backward pass instead of keeping its activations: less memory, more time."""
        self.preprocess: PreprocessConfig | None = None
        """How photos are prepared for its weights, if they were loaded; `save` writes it."""

        def learned_tokens(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(int(count), config.width)) if count else None

        self.patch_embed = STEMS[config.stem](config)
        self.class_token = learned_tokens(config.class_token)
        self.distill_token = learned_tokens(config.distill_token)
        self.registers = learned_tokens(config.num_registers)
        self.positions = make_positions(config)
        self.rope = RotaryPositions(config) if config.position == "rope2d" else None
        self.dropout = make_dropout(config)
        self.embed_norm = nn.LayerNorm(config.width, config.norm_eps) if config.embed_norm else nn.Identity()

        self.blocks = nn.ModuleList(Block(config, rate) for rate in drop_rates(config.drop_path, config.depth))

        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.norm.requires_grad_(config.final_norm != "none")  # what nothing reads does not learn
        self.attention_pool = AttentionPool(config) if config.pooling == "attention" else None
        self.head = Head(config) if config.num_classes else None
        self.distill_head = Head(config) if config.num_classes and config.distill_token else None
        self.patch_boxes = PatchBoxes(config) if config.patch_boxes else None
        """Read by `localizing` alone: nothing that `forward` gives depends on it."""
        self.init_weights()

    def forward(self, image_BCHW: Tensor, sizes: Sequence[Size] | None = None) -> Tensor:
        return self.read(*self.encode(image_BCHW, sizes))

    def read(self, x_BND: Tensor, geometry: TokenGeometry) -> Tensor:
        """What the encoded tokens say: logits_BK, or pooled features_BD if there are no classes."""
        if self.distill_head is not None:
            logits_BK, distilled_BK = self._read_both(x_BND)
            return (logits_BK + distilled_BK) / 2
        features_BD = self.pooled(x_BND, geometry)
        return features_BD if self.head is None else self.head(features_BD)

    def both_logits(self, image_BCHW: Tensor, sizes: Sequence[Size] | None = None) -> tuple[Tensor, Tensor]:
        """What the class token's and the distillation token's heads say (DeiT); the prediction is their mean."""
        return self._read_both(self.encode(image_BCHW, sizes)[0])

    def _read_both(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        if self.head is None or self.distill_head is None:
            raise PatchlightError("this model has one head at most; make it with distill_token=True and num_classes")
        class_BD, distill_BD = self._norm_pooled(x_BND[:, :2]).unbind(1)
        return self.head(class_BD), self.distill_head(distill_BD)

    def features(
        self, image_BCHW: Tensor, sizes: Sequence[Size] | None = None, pooling: Pooling | None = None
    ) -> Tensor:
        """One vector an image, before the head: features_BD, pooled as the config says or as asked."""
        if pooling in ("cls", "cls_mean") and not self.config.class_token:
            raise PatchlightError(f"pooling={pooling!r} needs a class token, and this model has none; use 'mean'")
        return self.pooled(*self.encode(image_BCHW, sizes), pooling)

    def pooled(self, x_BND: Tensor, geometry: TokenGeometry, pooling: Pooling | None = None) -> Tensor:
        """The encoded tokens as one vector an image: features_BD."""
        return self._norm_pooled(self._pool(x_BND, pooling or self.config.pooling, geometry))

    def _pool(self, x_BND: Tensor, pooling: Pooling, geometry: TokenGeometry) -> Tensor:
        if pooling != "attention":
            return pool(x_BND, pooling, geometry)
        if self.attention_pool is None:
            raise PatchlightError("pooling='attention' has weights, and this model has none; use 'cls' or 'mean'")
        return self.attention_pool(x_BND, geometry)

    def tokens(self, image_BCHW: Tensor, sizes: Sequence[Size] | None = None) -> Tensor:
        """The last block's tokens x_BND, prefix tokens first; normed, unless the config norms after pooling."""
        return self.encode(image_BCHW, sizes)[0]

    def intermediates(
        self,
        image_BCHW: Tensor,
        blocks: int | Sequence[int],
        sizes: Sequence[Size] | None = None,
        *,
        norm: bool = False,
        dense: bool = False,
    ) -> list[Tensor]:
        """The tokens after each of `blocks` (0 is the first, -1 the last), in the order asked for.

        Each is x_BND, through the final norm if `norm`; with `dense` the patches alone, as a picture (B, D, h, w).
        """
        wanted = wanted_blocks(blocks, len(self.blocks))
        x_BND, geometry = self.embed(image_BCHW, sizes)
        after = {}
        for index in range(max(wanted, default=-1) + 1):
            x_BND = self._run(self.blocks[index], x_BND, geometry)
            if index in wanted:
                y_BND = self.norm(x_BND) if norm else x_BND
                after[index] = geometry.picture_BDhw(y_BND) if dense else y_BND
        return [after[index] for index in wanted]

    def embed(self, image_BCHW: Tensor, sizes: Sequence[Size] | None = None) -> tuple[Tensor, TokenGeometry]:
        """The tokens that enter the first block, and how they lie: x_BND and what every block is told with it.

        The paper's z0 = [x_class; x_1 E; ...; x_P E] + E_pos, where E is `patch_embed` and E_pos `positions`.
        """
        image_BCHW, grids = fit_to_patches(image_BCHW, self.config, sizes)
        image_BCHW = image_BCHW.to(self.patch_embed.dtype)  # float32 images are welcome in a bfloat16 model
        geometry = self._lay_tokens(image_BCHW, grids)
        x_BPD = self._with_positions(self.patch_embed(image_BCHW, grids), geometry)
        return self.embed_norm(self.dropout(self._with_prefix(x_BPD))), geometry

    def _with_positions(self, x_BPD: Tensor, geometry: TokenGeometry) -> Tensor:
        """The patches with their rows of E_pos, where positions are added and not told to attention."""
        if self.positions is None:
            return x_BPD
        # In the patches' precision: under autocast that is half the weights', and all blocks pass on half as much.
        return x_BPD + self.positions(geometry).to(x_BPD.dtype)

    def _with_prefix(self, x_BPD: Tensor) -> Tensor:
        """x_BND: class token, distillation token and registers in front, those that there are, with their rows of the
        table."""
        tokens = (self.class_token, self.distill_token, self.registers)
        present: list[Tensor] = [token for token in tokens if token is not None]
        if not present:
            return x_BPD
        prefix_TD = torch.cat(present)
        if isinstance(self.positions, LearnedPositions):
            prefix_TD = self.positions.add_to_prefix(prefix_TD)
        return torch.cat([prefix_TD.to(x_BPD.dtype).expand(x_BPD.shape[0], -1, -1), x_BPD], 1)

    def _lay_tokens(self, image_BCHW: Tensor, grids: Sequence[Size]) -> TokenGeometry:
        """How the image's tokens lie, with what attention is told of it: rotations, or offsets between tokens."""
        grid = (image_BCHW.shape[2] // self.config.patch_size[0], image_BCHW.shape[3] // self.config.patch_size[1])
        geometry = lay_tokens(grid, grids, self.config.num_prefix, image_BCHW.device)
        if self.rope is not None:
            return dataclasses.replace(geometry, rope=self.rope(geometry))
        if self.config.position in ("relative_bias", "relative_mlp"):
            index_NN = relative_index(grid, self.config.num_prefix, image_BCHW.device)
            return dataclasses.replace(geometry, offsets_NN=index_NN)
        return geometry

    def encode(
        self, image_BCHW: Tensor, sizes: Sequence[Size] | None = None, visit: Visit | None = None
    ) -> tuple[Tensor, TokenGeometry]:
        """As `tokens`, and how they lie. `visit` is shown each block as it is passed; all of `explain` rests on it."""
        x_BND, geometry = self.embed(image_BCHW, sizes)
        return self.run_blocks(x_BND, geometry, visit), geometry

    def run_blocks(self, x_BND: Tensor, geometry: TokenGeometry, visit: Visit | None = None) -> Tensor:
        """From the tokens that `embed` gave, or others that lie as `geometry` says, to those that `encode` gives."""
        for index, block in enumerate(self.blocks):
            if visit is None:
                x_BND = self._run(block, x_BND, geometry)
            else:
                heads: list[Heads] = []
                x_BND = block(x_BND, geometry, heads)
                visit(index, heads[0], x_BND)
        return self.norm(x_BND) if self.config.final_norm == "tokens" else x_BND

    def _run(self, block: nn.Module, x_BND: Tensor, geometry: TokenGeometry) -> Tensor:
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return checkpoint(block, x_BND, geometry, use_reentrant=False)
        return block(x_BND, geometry)

    def _norm_pooled(self, features: Tensor) -> Tensor:
        return self.norm(features) if self.config.final_norm == "pooled" else features

    def attention_entries(self) -> tuple[int, ...]:
        """Numbers in each block's attention matrices, over all heads, for an image of the config's size."""
        tokens = self.config.num_prefix + math.prod(self.config.grid)
        return (self.config.num_heads * tokens**2,) * self.config.depth

    def set_pooling(self, pooling: Pooling, head: Literal["keep", "drop"] | None = None) -> None:
        """Change the pooling. A head fits the pooling that it was trained with, so say whether to keep or drop it."""
        if pooling == "attention" and self.attention_pool is None:
            raise PatchlightError("pooling='attention' has weights of its own; make the model with it")
        config = dataclasses.replace(self.config, pooling=pooling)
        if self.head is None or head == "drop":
            self.config = dataclasses.replace(config, num_classes=0, head_hidden=0)
            self.head = None
        elif pooling == self.config.pooling or (head == "keep" and config.feature_width == self.config.feature_width):
            self.config = config
        else:
            raise PatchlightError(
                f"the head was made for pooling={self.config.pooling!r}; to use pooling={pooling!r} pass head='keep' "
                "(same width only; fine-tune it, or expect other answers) or head='drop' (features only)"
            )
        if pooling != "attention":
            self.attention_pool = None

    def init_weights(self, *, zero_head: bool = False) -> None:
        """Draw fresh weights, as the config's `init` says.

        "vit", as ViTs are usually started. Weights, tokens and position tables: normal with deviation 0.02, cut off at
        two deviations. Biases: zero. Norms: scale one, shift zero. A convolutional stem: as it says itself. "timm" and
        "jax": see `fresh.init_as`. `zero_head`: the classifier's last layer starts at zero too, so that the first
        predictions are uniform (the original does this for fine-tuning, and "jax" always).
        """
        init_weights(self)
        if self.norm.weight.is_meta:  # shapes without memory: nothing more to draw
            return
        if isinstance(self.patch_embed, ConvTokenizer):
            self.patch_embed.init_weights()
        for tokens in (self.class_token, self.distill_token, self.registers):
            if tokens is not None:
                draw(tokens)
        if self.config.init != "vit":
            init_as(self.config.init, self)
        for head in (self.head, self.distill_head):
            if (zero_head or self.config.init == "jax") and head is not None:
                nn.init.zeros_(head.out.weight)


def check_vit(vit: ViT, who: str) -> None:
    """Raise if it is not a ViT; `who` is the function that needs one."""
    if not isinstance(vit, ViT):
        raise PatchlightError(f"{who} takes a ViT, not a {type(vit).__name__}; what `load` gives has it as .model")
