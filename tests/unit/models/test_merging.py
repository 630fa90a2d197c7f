"""Merged tokens: against a plain loop over one image, and as exact where merging loses nothing."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.explain.attention import attention
from patchlight.models.attention import Heads
from patchlight.models.merging import Merged, MergingViT, merge
from patchlight.models.packing import MOVABLE
from patchlight.models.token_geometry import lay_tokens
from patchlight.models.vit import ViT

IMAGE = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("position", MOVABLE)
def test_without_merging_nothing_changes(position: Any) -> None:
    vit = tiny_vit(position=position, num_registers=2)
    assert torch.equal(MergingViT(vit, 0)(IMAGE), vit(IMAGE))
    assert torch.equal(MergingViT(vit, [0, 0]).tokens(IMAGE), vit.tokens(IMAGE))


def by_hand(x_nD: list[torch.Tensor], keys: list[torch.Tensor], counts: list[float], prefix: int, r: int) -> Any:
    """One image's merge, pair by pair, with lists: the tokens, counts and old numbers in each."""
    evens = list(range(prefix, len(x_nD), 2))
    odds = list(range(prefix + 1, len(x_nD), 2))
    best = []
    for a in evens:
        likeness = [float(F.cosine_similarity(keys[a], keys[b], dim=0)) for b in odds]
        best.append((max(likeness), a, odds[likeness.index(max(likeness))]))
    groups = {number: [number] for number in range(len(x_nD))}
    for _, a, b in sorted(best, reverse=True)[:r]:
        groups[b].append(a)
        del groups[a]
    tokens = []
    for members in groups.values():
        weight = sum(counts[member] for member in members)
        tokens.append(sum(counts[member] * x_nD[member] for member in members) / weight)
    return tokens, [sum(counts[member] for member in members) for members in groups.values()], list(groups.values())


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("patches", [7, 12])
@pytest.mark.parametrize("r", [1, 3, 50])
def test_merge_equals_the_loop(prefix: int, patches: int, r: int) -> None:
    torch.manual_seed(prefix + patches)
    count = prefix + patches
    x_BnD, keys_BnE = torch.randn(2, count, 6), torch.randn(2, count, 4)
    counts_Bn = torch.randint(1, 5, (2, count)).float()
    geometry = lay_tokens((1, patches), [(1, patches)], prefix, torch.device("cpu"))
    geometry = type(geometry)(**{**vars(geometry), "counts_BN": counts_Bn})
    merged = merge(Merged(x_BnD, geometry, torch.arange(count).expand(2, -1)), keys_BnE, r)
    assert merged.x_BnD.shape[1] == count - min(r, patches // 2)
    for image in range(2):
        tokens, counts, groups = by_hand(
            list(x_BnD[image]), list(keys_BnE[image]), counts_Bn[image].tolist(), prefix, min(r, patches // 2)
        )
        torch.testing.assert_close(merged.x_BnD[image], torch.stack(tokens))
        assert merged.geometry.counts_BN is not None
        torch.testing.assert_close(merged.geometry.counts_BN[image], torch.tensor(counts))
        for place, group in enumerate(groups):
            assert all(merged.owner_BN[image, member] == place for member in group)


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls_mean", "attention"])
@pytest.mark.parametrize("r", [4, 8, [12, 5]])
def test_equal_tokens_are_merged_without_a_trace(pooling: Any, r: Any) -> None:
    """Where patches are copies of each other nothing is lost, if a token counts for as many as it holds."""
    vit = tiny_vit(position="none", num_registers=2, pooling=pooling)
    image = torch.randn(2, 3, 8, 8).repeat(1, 1, 4, 6)  # one patch, 24 times
    image[:, :, 8:24] += 1  # another in two of the four rows
    with torch.no_grad():
        merging = MergingViT(vit, r)
        torch.testing.assert_close(merging(image), vit(image), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(merging.tokens(image), vit.tokens(image), atol=1e-4, rtol=1e-4)
        assert merging.encode(image).x_BnD.shape[1] < 27


@pytest.mark.parametrize("position", MOVABLE)
def test_tokens_become_fewer_and_none_is_lost(position: Any) -> None:
    vit = tiny_vit(position=position, num_registers=1)
    merging = MergingViT(vit, 5)
    seen: list[tuple[int, int, int]] = []

    def visit(index: int, heads: Heads, merged: Merged) -> None:
        seen.append((index, heads.k_BANE.shape[2], merged.x_BnD.shape[1]))
        if index:
            rows = heads.rows([0])
            torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows.sum(-1)))

    with torch.no_grad():
        merged = merging.encode(IMAGE, visit)
    assert seen == [(0, 26, 26), (1, 21, 21), (2, 16, 16)]
    assert merged.geometry.counts_BN is not None
    assert torch.equal(merged.geometry.counts_BN.sum(1), torch.full((3,), 26.0))
    assert torch.equal(merged.geometry.counts_BN[:, :2], torch.ones(3, 2))
    for image in range(3):
        held = torch.bincount(merged.owner_BN[image], minlength=16)
        assert torch.equal(held.float(), merged.geometry.counts_BN[image])
    assert merging.tokens(IMAGE).shape == (3, 26, 24)


def test_rows_are_what_attention_used_with_counts() -> None:
    """softmax(score + log count): a token that holds three gets what three of it would."""
    vit = tiny_vit()
    used: list[tuple[torch.Tensor, torch.Tensor, Heads]] = []
    with torch.no_grad():
        MergingViT(vit, 4).encode(
            IMAGE, lambda index, heads, merged: used.append((merged.x_BnD, merged.geometry.counts_BN, heads))
        )
        _, counts_Bn, heads = used[2]
        scores = heads.q_BANE @ heads.k_BANE.mT / math.sqrt(12)
        weights = scores.exp() * counts_Bn[:, None, None]
        weights = weights / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(heads.rows(), weights, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(heads.out_BANE, weights @ heads.v_BANE, atol=1e-4, rtol=1e-4)
        assert counts_Bn.max() > 1


def test_the_pooling_query_asks_merged_tokens_by_their_counts() -> None:
    vit = tiny_vit(class_token=False, pooling="attention")
    pool = vit.attention_pool
    with torch.no_grad():
        merged = MergingViT(vit, 4).encode(IMAGE)
        x_BnD, counts_Bn = merged.x_BnD, merged.geometry.counts_BN
        keys_BnAE = pool.kv(x_BnD)[..., :24].unflatten(2, (2, 12))
        scores_BAn = torch.einsum("ae,bnae->ban", pool.q(pool.query).reshape(2, 12), keys_BnAE) / math.sqrt(12)
        weights_BAn = scores_BAn.exp() * counts_Bn[:, None]
        expected_BAn = weights_BAn / weights_BAn.sum(-1, keepdim=True)
        torch.testing.assert_close(pool.rows(x_BnD, merged.geometry), expected_BAn, atol=1e-5, rtol=1e-4)
        assert counts_Bn.max() > 1


def test_nearby_answers_for_a_photo_and_half_precision() -> None:
    vit = ViT(tiny_vit().config).eval()
    smooth = F.interpolate(torch.randn(2, 3, 4, 4), size=(32, 32), mode="bicubic")
    with torch.no_grad():
        assert F.cosine_similarity(MergingViT(vit, 2)(smooth), vit(smooth)).min() > 0.95
        half = MergingViT(vit.bfloat16(), 2)(smooth)
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()


def test_attention_maps_are_refused_and_mistakes_named() -> None:
    vit = tiny_vit()
    with pytest.raises(PatchlightError, match=r"attention is read from a ViT, .* not from a MergingViT"):
        attention(MergingViT(vit, 2), IMAGE)
    for r in (-1, [1], [1, 2, 3], 1.5):
        with pytest.raises(PatchlightError, match="must be 0 or more, or a number for each block but the last, 2"):
            MergingViT(vit, r)  # type: ignore[arg-type]
    for r in (-1, 1.5, "2", [1]):
        with pytest.raises(PatchlightError, match=r"must be 0 or more, or a number for each block but the last, 0"):
            MergingViT(tiny_vit(depth=1), r)  # type: ignore[arg-type]
    assert MergingViT(tiny_vit(depth=1), 2).rates == (0,)
    with pytest.raises(PatchlightError, match="cannot be merged with position='relative_bias'"):
        MergingViT(tiny_vit(position="relative_bias"), 2)
