from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models_at_random import POSITIONS, tiny_vit
from patchlight.errors import PatchlightError
from patchlight.explain import probes
from patchlight.explain.probes import (
    attention_distance,
    attention_shares,
    largest_region,
    objectness,
    patch_similarity,
    position_similarity,
    token_norms,
)
from patchlight.models.vit import ViT

PADDED = [(32, 24), (16, 48)]
"""Images of 4x3 and 2x6 patches in a batch of 32x48 pixels."""


def all_rows(vit: ViT, image_BCHW: torch.Tensor) -> np.ndarray:
    """Every softmax row of every layer, by the textbook's formula: (L, B, A, N, N)."""
    x_BND, geometry = vit.embed(image_BCHW)
    layers = []
    with torch.no_grad():
        for block in vit.blocks:
            normed_BND = block.norm1(x_BND)
            q_BANE, k_BANE, _ = block.attn.project(normed_BND, geometry)
            scores = (q_BANE @ k_BANE.mT / q_BANE.shape[-1] ** 0.5).double().numpy()
            mask = block.attn.mask(geometry, torch.float32)
            if mask is not None:
                scores = scores + mask.double().numpy()
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            layers.append(weights / weights.sum(-1, keepdims=True))
            x_BND = block(x_BND, geometry)
    return np.stack(layers)


def distance_by_loops(weights_NN: np.ndarray, grid: tuple[int, int], num_prefix: int, patch: tuple[int, int]) -> float:
    places = [(row * patch[0], column * patch[1]) for row in range(grid[0]) for column in range(grid[1])]
    means = []
    for query, (y, x) in enumerate(places):
        weights = weights_NN[num_prefix + query, num_prefix:]
        far = [((y - row) ** 2 + (x - column) ** 2) ** 0.5 for row, column in places]
        means.append(sum(w * d for w, d in zip(weights, far, strict=True)) / weights.sum())
    return float(np.mean(means))


class TestAttentionDistance:
    @pytest.mark.parametrize("position", POSITIONS)
    @pytest.mark.parametrize("at_once", [1, 500, probes.WEIGHTS_AT_ONCE])
    def test_is_what_loops_give(self, monkeypatch: pytest.MonkeyPatch, position: Any, at_once: int) -> None:
        monkeypatch.setattr(probes, "WEIGHTS_AT_ONCE", at_once)
        vit = tiny_vit(position=position, patch_size=(8, 4), num_registers=2)
        image_BCHW = torch.randn(2, 3, 32, 24)
        rows_LBANN = all_rows(vit, image_BCHW)
        got_LA = attention_distance(vit, image_BCHW)
        assert got_LA.shape == (3, 2)
        for layer in range(3):
            for head in range(2):
                expected = np.mean(
                    [distance_by_loops(rows_LBANN[layer, image, head], (4, 6), 3, (8, 4)) for image in range(2)]
                )
                assert got_LA[layer, head].item() == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("position", POSITIONS)
    def test_padding_is_left_out(self, position: Any) -> None:
        vit = tiny_vit(position=position)
        image_BCHW = torch.randn(2, 3, 32, 48)
        alone = [attention_distance(vit, image_BCHW[i : i + 1, :, :h, :w]) for i, (h, w) in enumerate(PADDED)]
        torch.testing.assert_close(attention_distance(vit, image_BCHW, PADDED), sum(alone) / 2, rtol=1e-4, atol=1e-4)

    def test_pixels_are_those_of_the_image_given(self) -> None:
        vit = tiny_vit(uneven_size="resize", position="none")
        small = torch.randn(1, 3, 30, 30)
        fitted = torch.nn.functional.interpolate(small, size=(32, 32), mode="bicubic", antialias=True)
        torch.testing.assert_close(
            attention_distance(vit, small) * 32 / 30, attention_distance(vit, fitted), rtol=1e-4, atol=1e-4
        )

    def test_attention_to_the_prefix_does_not_count(self) -> None:
        vit = tiny_vit(position="none", num_registers=1)
        with torch.no_grad():
            for block in vit.blocks:
                block.attn.qkv.weight[: 2 * 24] = 0  # one query and one key for all tokens: attention is even
        grid = np.array([(row, column) for row in range(4) for column in range(4)])
        even = 8 * np.mean([np.hypot(*(a - b)) for a in grid for b in grid])
        torch.testing.assert_close(attention_distance(vit, torch.randn(1, 3, 32, 32)), torch.full((3, 2), float(even)))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


class TestPositionSimilarity:
    def test_learned_rows_of_the_config_own_grid(self) -> None:
        vit = tiny_vit(image_size=(16, 24), num_registers=1)
        rows = vit.positions.table.detach().double().numpy()[2:].reshape(2, 3, 24)
        got = position_similarity(vit)
        assert got.shape == (2, 3, 2, 3)
        for y, x, row, column in np.ndindex(2, 3, 2, 3):
            assert got[y, x, row, column].item() == pytest.approx(cosine(rows[y, x], rows[row, column]), abs=1e-5)

    def test_learned_rows_resampled_to_another_grid(self) -> None:
        vit = tiny_vit()
        table = vit.positions.table.detach()[1:].unflatten(0, (4, 4)).permute(2, 0, 1)[None]
        resampled = torch.nn.functional.interpolate(table, size=(6, 3), mode="bicubic", antialias=True)[0]
        rows = resampled.permute(1, 2, 0).double().numpy()
        got = position_similarity(vit, grid=(6, 3))
        for y, x, row, column in np.ndindex(6, 3, 6, 3):
            assert got[y, x, row, column].item() == pytest.approx(cosine(rows[y, x], rows[row, column]), abs=1e-4)

    def test_sines_and_cosines_fall_off_with_distance(self) -> None:
        got = position_similarity(tiny_vit(position="sincos2d"), grid=(5, 7))
        # Two angles' sines and cosines multiply to the cosine of their difference; all rows have one length.
        frequencies = 10000 ** -(np.arange(6) / 6)
        for y, x, row, column in np.ndindex(5, 7, 5, 7):
            angles = np.concatenate([frequencies * (y - row), frequencies * (x - column)])
            assert got[y, x, row, column].item() == pytest.approx(np.cos(angles).mean(), abs=1e-5)

    @pytest.mark.parametrize("coordinates", ["index", "centred"])
    def test_rope_is_what_is_left_of_equal_queries_and_keys(self, coordinates: Any) -> None:
        vit = tiny_vit(position="rope2d", rope_coordinates=coordinates)
        _, geometry = vit.embed(torch.zeros(1, 3, 24, 40))
        # Turned copies of one vector with all pairs of one length; (3, 5) patches after the class token.
        vector = torch.ones(1, 1, 16, 12) / 12**0.5
        turned = probes_rotate(vector, geometry.rope)[0, 0, 1:].double().numpy()
        expected = (turned @ turned.T).reshape(3, 5, 3, 5)
        np.testing.assert_allclose(position_similarity(vit, grid=(3, 5)).numpy(), expected, atol=1e-5)

    def test_relative_bias_is_the_first_blocks(self) -> None:
        vit = tiny_vit(position="relative_bias", image_size=(16, 24))
        table = vit.blocks[0].attn.relative_bias.table.detach().numpy()[:15].reshape(3, 5, 2).mean(2)
        got = position_similarity(vit)
        for y, x, row, column in np.ndindex(2, 3, 2, 3):
            assert got[y, x, row, column].item() == pytest.approx(table[y - row + 1, x - column + 2], abs=1e-6)
        assert position_similarity(vit, grid=(3, 4)).shape == (3, 4, 3, 4)

    def test_no_positions_raise(self) -> None:
        with pytest.raises(PatchlightError, match="position='none'"):
            position_similarity(tiny_vit(position="none"))

    @pytest.mark.parametrize("grid", [(0, 3), (3,), (2.0, 3)])
    def test_a_grid_that_is_none_raises(self, grid: Any) -> None:
        with pytest.raises(PatchlightError, match="is not"):
            position_similarity(tiny_vit(), grid)


def probes_rotate(x_BANE: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The rotation as a product with one matrix a pair, independent of the model's."""
    cos, sin = rope
    half = x_BANE.shape[-1] // 2
    turned = x_BANE.clone()
    for pair in range(half):
        a, b = x_BANE[..., pair], x_BANE[..., pair + half]
        turned[..., pair] = a * cos[..., pair] - b * sin[..., pair + half]
        turned[..., pair + half] = a * sin[..., pair + half] + b * cos[..., pair]
    return turned


class TestTokenNorms:
    def test_are_the_lengths_after_each_block(self) -> None:
        vit = tiny_vit(num_registers=2)
        image_BCHW = torch.randn(2, 3, 32, 32)
        got = token_norms(vit, image_BCHW)
        after = vit.intermediates(image_BCHW, blocks=[0, 1, 2])
        expected = np.stack([np.sqrt((x.detach().double().numpy() ** 2).sum(2)) for x in after])
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)

    def test_padding_has_none(self) -> None:
        vit = tiny_vit()
        image_BCHW = torch.randn(2, 3, 32, 48)
        got = token_norms(vit, image_BCHW, PADDED)
        for i, (h, w) in enumerate(PADDED):
            alone = token_norms(vit, image_BCHW[i : i + 1, :, :h, :w])[:, 0]
            mine = got[:, i, 1:].unflatten(1, (4, 6))
            torch.testing.assert_close(got[:, i, 0], alone[:, 0], rtol=1e-4, atol=1e-4)
            own = mine[:, : h // 8, : w // 8].flatten(1)
            torch.testing.assert_close(own, alone[:, 1:], rtol=1e-4, atol=1e-4)
            assert mine.isnan().sum() == 3 * (24 - h * w // 64)


class TestPatchSimilarity:
    @pytest.mark.parametrize("num_prefix", [0, 3])
    def test_is_the_cosine(self, num_prefix: int) -> None:
        tokens_BND = torch.randn(2, num_prefix + 15, 8)
        got = patch_similarity(tokens_BND, (3, 5), (1, 4))
        patches = tokens_BND[:, num_prefix:].double().numpy().reshape(2, 3, 5, 8)
        for image, row, column in np.ndindex(2, 3, 5):
            expected = cosine(patches[image, 1, 4], patches[image, row, column])
            assert got[image, row, column].item() == pytest.approx(expected, abs=1e-5)

    def test_mistakes_are_named(self) -> None:
        with pytest.raises(PatchlightError, match=r"patch \(3, 0\) lies outside"):
            patch_similarity(torch.randn(1, 16, 8), (3, 5), (3, 0))
        with pytest.raises(PatchlightError, match="too few"):
            patch_similarity(torch.randn(1, 14, 8), (3, 5), (0, 0))


def regions_by_flood(mask_hw: np.ndarray) -> list[set[tuple[int, int]]]:
    left = {(int(y), int(x)) for y, x in zip(*mask_hw.nonzero(), strict=True)}
    regions = []
    while left:
        region, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            region.add((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        regions.append(region)
    return regions


class TestRegions:
    @given(seed=st.integers(0, 10**6), height=st.integers(1, 9), width=st.integers(1, 9), share=st.floats(0, 1))
    def test_the_largest_is_what_flooding_finds(self, seed: int, height: int, width: int, share: float) -> None:
        rng = np.random.default_rng(seed)
        masks = rng.random((2, 2, height, width)) < share
        got = largest_region(torch.from_numpy(masks)).numpy()
        assert got.shape == masks.shape
        for one in np.ndindex(2, 2):
            regions = regions_by_flood(masks[one])
            found = {(int(y), int(x)) for y, x in zip(*got[one].nonzero(), strict=True)}
            if regions:
                assert found in [region for region in regions if len(region) == max(map(len, regions))]
            else:
                assert not found

    def test_a_spiral_is_one_region(self) -> None:
        spiral = np.zeros((11, 11), dtype=bool)
        y, x, dy, dx = 0, 0, 0, 1
        spiral[0, 0] = True
        for length in (10, 10, 10, 8, 8, 6, 6, 4, 4, 2, 2):
            for _ in range(length):
                y, x = y + dy, x + dx
                spiral[y, x] = True
            dy, dx = dx, -dy
        assert torch.equal(largest_region(torch.from_numpy(spiral)), torch.from_numpy(spiral))

    def test_heat_decides_between_equals(self) -> None:
        heat = torch.tensor([[1.0, 1, 0, 2, 2, 0, 1, 1]])
        assert largest_region(heat > 0, heat).tolist() == [[False, False, False, True, True, False, False, False]]


def blob(height: int = 12, width: int = 12, at: tuple[int, int] = (2, 3)) -> torch.Tensor:
    heat = torch.full((height, width), 0.25)
    heat[at[0] : at[0] + 3, at[1] : at[1] + 4] = torch.tensor([[2.0, 3, 3, 2], [3, 9, 9, 3], [2, 3, 4, 2]])
    return heat


class TestObjectness:
    @given(seed=st.integers(0, 10**6), height=st.integers(1, 8), width=st.integers(1, 8))
    def test_is_what_loops_give(self, seed: int, height: int, width: int) -> None:
        heat_Bhw = np.random.default_rng(seed).random((3, height, width)) ** 3
        got = objectness(torch.from_numpy(heat_Bhw))
        for heat_hw, score in zip(heat_Bhw, got.tolist(), strict=True):
            regions = regions_by_flood(heat_hw > heat_hw.mean())
            masses = [sum(heat_hw[place] for place in region) for region in regions]
            best = max(zip(regions, masses, strict=True), key=lambda each: (len(each[0]), each[1]), default=(set(), 0))
            assert score == pytest.approx(best[1] / heat_hw.sum() - len(best[0]) / heat_hw.size, abs=1e-6)

    def test_where_the_blob_lies_does_not_matter(self) -> None:
        scores = [objectness(blob(at=(y, x))).item() for y in range(10) for x in range(9)]
        assert max(scores) - min(scores) < 1e-6
        assert scores[0] > 0.4

    @given(seed=st.integers(0, 10**6))
    def test_flips_and_scaling_do_not_matter(self, seed: int) -> None:
        heat = torch.from_numpy(np.random.default_rng(seed).integers(0, 6, (6, 8, 8)).astype(np.float64))
        score = objectness(heat)
        for same in (heat.flip(-1), heat.flip(-2), heat.mT, 8 * heat, heat / 1024):
            torch.testing.assert_close(objectness(same), score, rtol=0, atol=1e-6)

    def test_ranks_an_object_over_scatter_over_nothing(self) -> None:
        found = blob()
        scattered = found.flatten()[torch.randperm(144)].view(12, 12)
        even = torch.full((12, 12), 0.1)
        scores = objectness(torch.stack([even, found, scattered]))
        assert scores[1] > scores[2] + 0.2 > 0.2
        assert scores[0] == 0
        assert objectness(torch.zeros(4, 4)) == 0

    def test_leading_axes_stay(self) -> None:
        heat = torch.rand(2, 3, 4, 1, 5, 6)
        scores = objectness(heat)
        assert scores.shape == (2, 3, 4, 1)
        assert scores[1, 2, 3, 0] == objectness(heat[1, 2, 3, 0])


class TestAttentionShares:
    @pytest.mark.parametrize(
        ("changes", "names"),
        [
            ({}, ["class", "artifacts", "patches"]),
            ({"num_registers": 2}, ["class", "registers", "artifacts", "patches"]),
            (
                {"distill_token": True, "num_registers": 1, "position": "relative_bias"},
                ["class", "distill", "registers", "artifacts", "patches"],
            ),
        ],
    )
    def test_are_the_rows_summed(self, changes: Any, names: list[str]) -> None:
        vit = tiny_vit(**changes)
        image_BCHW = torch.randn(2, 3, 32, 32)
        with torch.no_grad():  # two patches of the second image become very long in the last block
            vit.blocks[-1].residual2.forward = plant_length(vit, [(1, 3), (1, 7)])
        shares = attention_shares(vit, image_BCHW)
        assert list(shares) == names
        rows_LBN = all_rows(vit, image_BCHW)[:, :, :, 0].mean(2)
        prefix = vit.config.num_prefix
        artifacts = rows_LBN[:, 1, [prefix + 3, prefix + 7]].sum(1) / 2
        expected = {
            "class": rows_LBN[:, :, 0].mean(1),
            "distill": rows_LBN[:, :, 1].mean(1),
            "registers": rows_LBN[:, :, 1 + vit.config.distill_token : prefix].sum(2).mean(1),
            "artifacts": artifacts,
            "patches": rows_LBN[:, :, prefix:].sum(2).mean(1) - artifacts,
        }
        for name in names:
            np.testing.assert_allclose(shares[name].numpy(), expected[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(sum(shares.values()), torch.ones(3))

    def test_padding_is_left_out(self) -> None:
        vit = tiny_vit()
        image_BCHW = torch.randn(2, 3, 32, 48)
        alone = [attention_shares(vit, image_BCHW[i : i + 1, :, :h, :w]) for i, (h, w) in enumerate(PADDED)]
        for name, share in attention_shares(vit, image_BCHW, PADDED).items():
            torch.testing.assert_close(share, (alone[0][name] + alone[1][name]) / 2, rtol=1e-4, atol=1e-5)

    def test_needs_a_class_token(self) -> None:
        with pytest.raises(PatchlightError, match="no class token"):
            attention_shares(tiny_vit(class_token=False, pooling="mean"), torch.randn(1, 3, 32, 32))


def plant_length(vit: ViT, places: list[tuple[int, int]]) -> Any:
    """A residual connection that makes these patches (image, index) a hundred times as long."""
    usual = type(vit.blocks[-1].residual2).forward

    def forward(x_BND: torch.Tensor, branch_BND: torch.Tensor) -> torch.Tensor:
        sum_BND = usual(vit.blocks[-1].residual2, x_BND, branch_BND).clone()
        for image, patch in places:
            sum_BND[image, vit.config.num_prefix + patch] *= 100
        return sum_BND

    return forward


def test_dot_products_know_lengths_and_cosines_do_not() -> None:
    tokens = torch.tensor(
        [[[9.0, 9.0], [1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [1.0, 1.0]]]
    )  # a class token, 2 x 2 patches
    dots = patch_similarity(tokens, (2, 2), (0, 0), measure="dot")
    assert dots.tolist() == [[[1, 3], [0, 1]]]
    cosines = patch_similarity(tokens, (2, 2), (0, 0))
    torch.testing.assert_close(cosines, torch.tensor([[[1, 1], [0, 0.5**0.5]]]))
    with pytest.raises(PatchlightError, match="measure='angle' is not known"):
        patch_similarity(tokens, (2, 2), (0, 0), measure="angle")
