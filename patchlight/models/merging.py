"""Fewer tokens from block to block: those that are most alike become one (ToMe, Bolya et al. 2022, arXiv:2210.09461).

After each block the patches are split into two sets by turns, each of the first set finds the patch of the second
whose key is most like its own, and the r pairs that are most alike are joined into their mean. A token remembers how
many patches it holds and counts for as many in attention. Nothing is learned, so any trained ViT can do it; prefix
tokens are left alone. (The paper joins between a block's attention and its MLP. After the MLP, blocks stay whole,
whatever they are made of and whether they are compiled; that MLP runs on r more tokens.)

Shapes: N tokens of the image, n of them now, T prefix tokens, p = n - T patches now, r pairs, as in `vit.py` else.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.errors import PatchlightError
from patchlight.models.attention import Heads
from patchlight.models.packing import MOVABLE
from patchlight.models.token_geometry import TokenGeometry
from patchlight.models.vit import ViT, check_vit


@dataclass(frozen=True)
class Merged:
    """Tokens after merging; some stand for several patches."""

    x_BnD: Tensor
    geometry: TokenGeometry
    """Of the n tokens; its grid is still that of all patches."""
    owner_BN: Tensor
    """For each original token the index of the token that it was merged into."""

    def spread(self, values_Bn: Tensor | None = None) -> Tensor:
        """What the n tokens are, or have as `values_Bn...`, given to every token that they hold: (B, N, ...)."""
        values = self.x_BnD if values_Bn is None else values_Bn
        return values[torch.arange(len(values), device=values.device)[:, None], self.owner_BN]


MergedVisit = Callable[[int, Heads, Merged], None]
"""Is told a block's index, what its heads did, and the tokens that they did it with."""


class MergingViT(nn.Module):
    """A trained ViT, its weights shared, that joins `r` pairs of patches after each block but the last.

    `r` is one number, or one for each of those blocks. Where fewer than 2 r patches are left, half of them are joined.
    """

    def __init__(self, vit: ViT, r: int | Sequence[int]) -> None:
        super().__init__()
        check_vit(vit, "MergingViT")
        if vit.config.position not in MOVABLE:
            raise PatchlightError(
                f"tokens cannot be merged with position={vit.config.position!r}; use {', '.join(MOVABLE)}"
            )
        between = vit.config.depth - 1
        given: list[int] = list(r) if isinstance(r, list | tuple) else [r]  # type: ignore[list-item]
        rates = given if isinstance(r, list | tuple) else given * between
        if len(rates) != between or any(not isinstance(rate, int) or rate < 0 for rate in given):
            raise PatchlightError(f"r={r!r} must be 0 or more, or a number for each block but the last, {between}")
        self.vit, self.rates = vit, (*rates, 0)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """logits_BK, or pooled features_BD without classes: what `vit` says, from fewer tokens."""
        merged = self.encode(image_BCHW)
        return self.vit.read(merged.x_BnD, merged.geometry)

    def tokens(self, image_BCHW: Tensor) -> Tensor:
        """The last block's tokens x_BND, as `vit.tokens`: patches that were merged have one and the same."""
        return self.encode(image_BCHW).spread()

    def encode(self, image_BCHW: Tensor, visit: MergedVisit | None = None) -> Merged:
        """The tokens after the last block, normed as `vit.tokens`, and where each patch went."""
        vit = self.vit
        x_BnD, geometry = vit.embed(image_BCHW)
        owner_BN = torch.arange(x_BnD.shape[1], device=x_BnD.device).expand(len(x_BnD), -1)
        merged = Merged(x_BnD, geometry, owner_BN)
        for index, (block, r) in enumerate(zip(vit.blocks, self.rates, strict=True)):
            heads: list[Heads] = []
            x_BnD = block(merged.x_BnD, merged.geometry, heads)
            if visit is not None:
                visit(index, heads[0], merged)
            merged = dataclasses.replace(merged, x_BnD=x_BnD)
            if r:
                merged = merge(merged, heads[0].k_BANE.mean(1), r)
        if vit.config.final_norm == "tokens":
            merged = dataclasses.replace(merged, x_BnD=vit.norm(merged.x_BnD))
        return merged


def merge(merged: Merged, keys_BnE: Tensor, r: int) -> Merged:
    """Join the r pairs of patches whose keys are most alike, weighted by how many patches each of them holds."""
    x_BnD, geometry, prefix = merged.x_BnD, merged.geometry, merged.geometry.num_prefix
    batch, count = x_BnD.shape[0], x_BnD.shape[1]
    r = min(r, (count - prefix) // 2)
    if not r:
        return merged
    gone_Br, into_Br = _pairs(keys_BnE[:, prefix:], r)
    gone_Br, into_Br = gone_Br + prefix, into_Br + prefix

    stays_Bn = torch.ones(batch, count, dtype=torch.bool, device=x_BnD.device).scatter(1, gone_Br, False)
    place_Bn = stays_Bn.cumsum(1) - 1  # of those that stay, in their old order
    place_Bn = place_Bn.scatter(1, gone_Br, place_Bn.gather(1, into_Br))
    stay_Bm = stays_Bn.byte().argsort(dim=1, descending=True, stable=True)[:, : count - r]
    images_B1 = torch.arange(batch, device=x_BnD.device)[:, None]

    counts_Bn = geometry.counts_BN
    if counts_Bn is None:
        counts_Bn = torch.ones(batch, count, device=x_BnD.device)
    target_Br = place_Bn.gather(1, gone_Br)
    sums_BnD = x_BnD.float() * counts_Bn[..., None]
    sums_BmD = sums_BnD[images_B1, stay_Bm].scatter_add(
        1, target_Br[..., None].expand(-1, -1, x_BnD.shape[2]), sums_BnD[images_B1, gone_Br]
    )
    counts_Bm = counts_Bn.gather(1, stay_Bm).scatter_add(1, target_Br, counts_Bn.gather(1, gone_Br))
    rope = geometry.rope
    if rope is not None:  # a joined token lies where its partner of the second set lay
        cos, sin = (table.expand(batch, -1, -1, -1)[images_B1, 0, stay_Bm][:, None] for table in rope)
        rope = (cos, sin)
    return Merged(
        (sums_BmD / counts_Bm[..., None]).to(x_BnD.dtype),
        dataclasses.replace(geometry, counts_BN=counts_Bm, rope=rope),
        place_Bn.gather(1, merged.owner_BN),
    )


def _pairs(keys_BpE: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Of the patches, the r that go, of even number, and into which of odd number each goes: gone_Br, into_Br."""
    keys_BpE = F.normalize(keys_BpE.float(), dim=2)
    first, second = keys_BpE[:, ::2], keys_BpE[:, 1::2]
    likeness_Ba, partner_Ba = (first @ second.mT).max(2)
    most_Br = likeness_Ba.topk(r, 1).indices
    return 2 * most_Br, 2 * partner_Ba.gather(1, most_Br) + 1
