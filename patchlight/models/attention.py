"""Multi-head self-attention on fused kernels, and `Heads`: what one layer's heads worked with, to be looked at.

Each token asks with a query q, all tokens answer with their values v by how well their keys k fit it:

    out = softmax(q k^T / sqrt(E)) v

`attend` computes this without ever writing the softmax down; `Heads.rows` writes down those of its rows that are asked
for.

Shapes: B batch, N tokens, D width, A heads, E = D / A, Q queries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchlight.config import ViTConfig
from patchlight.models.mlp import make_dropout
from patchlight.models.positions import MixedRotaryPositions, RelativeBias, RelativeMLP, rotate
from patchlight.models.token_geometry import TokenGeometry

_WITH_RIGHT_GRADIENTS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(E) + mask) v, on a fused kernel.

    Not on cuDNN's where gradients are wanted: torch (2.11, and by its source others) keeps the plan of cuDNN's backward
    pass under the layouts of q, k and v, and not under that of the gradient that comes in. The first gradient of a
    process decides; every later one that lies otherwise in memory is read as if it lay like the first, and silently
    comes out wrong. Eager and compiled code lay it differently. `benchmarks/gpu_check.py` shows it.
    """
    if q.is_cuda and torch.is_grad_enabled():
        with sdpa_kernel(_WITH_RIGHT_GRADIENTS):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Heads(NamedTuple):
    """What the heads of one attention layer worked with: the very tensors of its forward pass."""

    q_BANE: Tensor
    k_BANE: Tensor
    v_BANE: Tensor
    mask: Tensor | None
    """What was added to the scores (1 or B, 1 or A, 1 or N, N), or which keys count (B, 1, 1 or N, N)."""
    out_BANE: Tensor

    def rows(self, queries: Sequence[int] | slice | Tensor | None = None) -> Tensor:
        """Recompute the softmax rows of these queries, which fused kernels do not return: attn_BAQN, float32."""
        queries = slice(None) if queries is None else queries
        with torch.autocast(self.q_BANE.device.type, enabled=False):
            scores_BAQN = _products(self.q_BANE[:, :, queries], self.k_BANE) * self.q_BANE.shape[-1] ** -0.5
            if self.mask is not None:
                mask = self.mask.expand(-1, -1, self.q_BANE.shape[2], -1)[:, :, queries]
                is_bool = mask.dtype == torch.bool
                scores_BAQN = scores_BAQN.masked_fill(~mask, -torch.inf) if is_bool else scores_BAQN + mask
            return scores_BAQN.softmax(-1)


def _products(q_BAQE: Tensor, k_BANE: Tensor) -> Tensor:
    """q . k in float32, whatever the model's dtype."""
    if q_BAQE.shape[2] == 1 and torch.compiler.is_compiling():
        # The compiler makes this one pass over the keys, where a product of matrices would copy them first.
        return (q_BAQE.float() * k_BANE.float()).sum(-1)[:, :, None]
    return q_BAQE.float() @ k_BANE.float().transpose(2, 3)


class Attention(nn.Module):
    """Multi-head self-attention on fused kernels; `heads` shows what it did."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.q_norm = nn.LayerNorm(config.head_width, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(config.head_width, config.norm_eps) if config.qk_norm else nn.Identity()
        relative = {"relative_bias": RelativeBias, "relative_mlp": RelativeMLP}.get(config.position)
        self.relative_bias = None if relative is None else relative(config)
        self.rope = MixedRotaryPositions(config) if config.position == "rope_mixed" else None
        self.norm = nn.LayerNorm(config.width, config.norm_eps) if config.inner_norm == "both" else nn.Identity()
        self.out = nn.Linear(config.width, config.width)
        self.dropout = make_dropout(config)

    def forward(self, x_BND: Tensor, geometry: TokenGeometry, heads: list[Heads] | None = None) -> Tensor:
        """x_BND -> x_BND; the heads' tensors are appended to the list, if one is given."""
        q_BANE, k_BANE, v_BANE = self.project(x_BND, geometry)
        mask = self.mask(geometry, q_BANE.dtype)
        out_BANE = attend(q_BANE, k_BANE, v_BANE, mask)
        if heads is not None:
            heads.append(Heads(q_BANE, k_BANE, v_BANE, mask, out_BANE))
        return self.merged(out_BANE)

    def merged(self, out_BANE: Tensor) -> Tensor:
        """Join the heads' outputs for all or some tokens and apply the output projection: x_BND."""
        return self.dropout(self.out(self.norm(out_BANE.transpose(1, 2).flatten(2))))

    def project(self, x_BND: Tensor, geometry: TokenGeometry) -> tuple[Tensor, Tensor, Tensor]:
        """Each head's queries, keys and values (B, A, N, E), as the attention uses them."""
        q_BNAE, k_BNAE, v_BNAE = self.qkv(x_BND).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        q_BANE, k_BANE = self.q_norm(q_BNAE).transpose(1, 2), self.k_norm(k_BNAE).transpose(1, 2)
        rope = geometry.rope if self.rope is None else self.rope(geometry)
        if rope is not None:
            cos, sin = (table.to(q_BANE.dtype) for table in rope)
            q_BANE, k_BANE = rotate(q_BANE, (cos, sin)), rotate(k_BANE, (cos, sin))
        return q_BANE, k_BANE, v_BNAE.transpose(1, 2)

    def mask(self, geometry: TokenGeometry, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores (1 or B, 1 or A, 1 or N, N), or which keys count (B, 1, 1 or N, N), or None."""
        if self.relative_bias is None:
            return geometry.mask(dtype)
        return self.relative_bias(geometry).to(dtype)
