"""From tokens to one vector an image."""

import torch
from torch import Tensor, nn

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.attention import Heads, attend
from patchlight.models.fresh import draw
from patchlight.models.mlp import make_mlp
from patchlight.models.token_geometry import TokenGeometry


def pool(x_BND: Tensor, how: str, geometry: TokenGeometry) -> Tensor:
    """features_BD: the class token ("cls"), the mean over the patches that hold a part of the image ("mean"), or
    both, one after the other ("cls_mean")."""
    if how == "cls":
        return x_BND[:, 0]
    if how == "cls_mean":
        return torch.cat([pool(x_BND, "cls", geometry), pool(x_BND, "mean", geometry)], 1)
    if how != "mean":
        raise PatchlightError(f"unknown pooling {how!r}; use 'cls', 'mean', 'cls_mean' or 'attention'")
    patches_BPD = x_BND[:, geometry.num_prefix :]
    if geometry.counts_BN is not None:
        counts_BP1 = geometry.counts_BN[:, geometry.num_prefix :, None].to(x_BND.dtype)
        return (patches_BPD * counts_BP1).sum(1) / counts_BP1.sum(1)
    if geometry.valid_BN is None:
        return patches_BPD.mean(1)
    valid_BP1 = geometry.valid_BN[:, geometry.num_prefix :, None]
    return patches_BPD.where(valid_BP1, 0).sum(1) / valid_BP1.sum(1)


def check_pooling(pooling: str | None) -> None:
    """Refuse another pooling than the mean, which is all that a model without a class token has."""
    if pooling not in (None, "mean"):
        raise PatchlightError(f"pooling={pooling!r} needs a class token, and this model has none; use 'mean'")


class AttentionPool(nn.Module):
    """One more attention, in which a learned query asks all tokens, and an MLP (Lee et al. 2019, arXiv:1810.00825)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Parameter(torch.zeros(1, config.width))
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = make_mlp(config)

    def reset_parameters(self) -> None:
        """Of the query; the layers have their own."""
        draw(self.query)

    def forward(self, x_BND: Tensor, geometry: TokenGeometry) -> Tensor:
        """features_BD"""
        features_BD = self.out(self._ask(x_BND, geometry).out_BANE.flatten(1))
        return features_BD + self.mlp(self.norm(features_BD))

    def rows(self, x_BND: Tensor, geometry: TokenGeometry) -> Tensor:
        """How much each token counts for each head of the query: attn_BAN, in float32."""
        return self._ask(x_BND, geometry).rows()[:, :, 0]

    def _ask(self, x_BND: Tensor, geometry: TokenGeometry) -> Heads:
        """What the heads of the one query did."""
        q_A1E = self.q(self.query).unflatten(1, (self.num_heads, -1)).transpose(0, 1)
        k_BANE, v_BANE = self.kv(x_BND).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q_BA1E = q_A1E.expand(x_BND.shape[0], -1, -1, -1).to(k_BANE.dtype)
        mask = geometry.mask(k_BANE.dtype)
        asked_BA1E = attend(q_BA1E, k_BANE, v_BANE, mask)
        return Heads(q_BA1E, k_BANE, v_BANE, mask, asked_BA1E)
