import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchlight.errors import PatchlightError
from patchlight.explain.artifacts import artifact_patches, outlier_tokens, suppress


def norms_like_dinov2(spread: float, seed: int = 0) -> torch.Tensor:
    """Two images of one class token and 400 patches: lengths about 40, and 30 artifacts of 5 to 10 times as much."""
    generator = torch.Generator().manual_seed(seed)
    norms_BN = 40 * (1 + spread * torch.randn(2, 401, generator=generator)).clamp(min=0.1)
    norms_BN[0, 11:41] = 40 * torch.linspace(5, 10, 30)
    norms_BN[:, 0] = 1000
    return norms_BN


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.1, 0.2, 0.3])
def test_artifacts_are_found_and_nothing_else(spread: float) -> None:
    found = outlier_tokens(norms_like_dinov2(spread), num_prefix=1)
    assert found.shape == (2, 400)
    assert found[0].nonzero().flatten().tolist() == list(range(10, 40))
    assert not found[1].any()


@pytest.mark.parametrize("seed", range(20))
def test_a_skewed_spread_is_no_artifact(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    norms_BN = (0.25 * torch.randn(4, 256, generator=generator)).exp()
    assert not outlier_tokens(norms_BN, 0).any()


def test_nearly_equal_norms_have_no_outliers() -> None:
    norms_BN = torch.full((1, 50), 7.0)
    norms_BN[0, 3] = 8.4
    assert not outlier_tokens(norms_BN, 0).any()
    norms_BN[0, 3] = 14.1
    assert outlier_tokens(norms_BN, 0).nonzero().tolist() == [[0, 3]]


def test_scale_does_not_matter_and_each_image_is_judged_alone() -> None:
    norms_BN = norms_like_dinov2(0.2)
    alone = torch.cat([outlier_tokens(norms_BN[:1], 1), outlier_tokens(1000 * norms_BN[1:], 1)])
    assert torch.equal(outlier_tokens(norms_BN, 1), alone)


@pytest.mark.parametrize("by", ["valid", "nan"])
def test_padding_does_not_count(by: str) -> None:
    norms_BN = norms_like_dinov2(0.2)[:1]
    alone = outlier_tokens(norms_BN[:, :101], 1)
    valid_BN = torch.arange(401)[None] < 101
    norms_BN[0, 101:] = 1e4  # enough of them to be the median
    padded = (
        outlier_tokens(norms_BN, 1, valid_BN)
        if by == "valid"
        else outlier_tokens(norms_BN.where(valid_BN, torch.nan), 1)
    )
    assert torch.equal(padded[:, :100], alone)
    assert alone.sum() == 30
    assert not padded[:, 100:].any()


def test_artifacts_are_those_after_either_of_the_last_two_blocks() -> None:
    norms_LBN = torch.ones(4, 1, 10)
    norms_LBN[1, 0, 2] = norms_LBN[2, 0, 5] = norms_LBN[3, 0, 7] = norms_LBN[3, 0, 0] = 9
    assert artifact_patches(norms_LBN, 1).nonzero().tolist() == [[0, 4], [0, 6]]
    assert artifact_patches(norms_LBN[3:], 1).nonzero().tolist() == [[0, 6]]
    valid_BN = torch.arange(10)[None] != 5
    assert artifact_patches(norms_LBN, 1, valid_BN).nonzero().tolist() == [[0, 6]]


@pytest.mark.parametrize(("shape", "num_prefix"), [((2, 5), 5), ((2, 5), -1), ((3, 2, 5), 1)])
def test_norms_without_patches_raise(shape: tuple[int, ...], num_prefix: int) -> None:
    with pytest.raises(PatchlightError, match="hold no patches"):
        outlier_tokens(torch.ones(shape), num_prefix)


def suppressed_by_loops(heat_hw: np.ndarray, bad_hw: np.ndarray, valid_hw: np.ndarray) -> np.ndarray:
    height, width = heat_hw.shape
    result = heat_hw.copy()
    for y, x in zip(*bad_hw.nonzero(), strict=True):
        for radius in range(1, max(height, width)):
            good = [
                heat_hw[row, column]
                for row in range(max(0, y - radius), min(height, y + radius + 1))
                for column in range(max(0, x - radius), min(width, x + radius + 1))
                if valid_hw[row, column] and not bad_hw[row, column]
            ]
            if good:
                result[y, x] = np.median(good)
                break
    return result


@given(
    seed=st.integers(0, 10**6),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
)
def test_outliers_get_the_median_around_them(seed: int, height: int, width: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    heat_Bhw = rng.random((3, height, width))
    bad_Bhw = rng.random((3, height, width)) < share
    valid_Bhw = rng.random((3, height, width)) < 0.8
    expected = np.stack(
        [suppressed_by_loops(*each) for each in zip(heat_Bhw.astype(np.float32), bad_Bhw, valid_Bhw, strict=True)]
    )
    heat = torch.from_numpy(heat_Bhw).float()
    kept = heat.clone()
    got = suppress(heat, torch.from_numpy(bad_Bhw), torch.from_numpy(valid_Bhw))
    torch.testing.assert_close(got, torch.from_numpy(expected))
    assert torch.equal(heat, kept)


def test_heat_of_attention_takes_one_mask_an_image() -> None:
    heat = torch.rand(3, 2, 2, 2, 4, 5)  # as many images as heads and queries: a wrong axis would not raise
    outliers_Bhw = torch.rand(2, 4, 5) < 0.2
    got = suppress(heat, outliers_Bhw)
    for layer in range(3):
        for image in range(2):
            for head in range(2):
                for query in range(2):
                    one = (layer, image, head, query)
                    expected = suppressed_by_loops(
                        heat[one].numpy(), outliers_Bhw[image].numpy(), np.ones((4, 5), dtype=bool)
                    )
                    torch.testing.assert_close(got[one], torch.from_numpy(expected))


def test_one_mask_serves_all_maps_and_the_dtype_stays() -> None:
    heat = torch.rand(2, 3, 4, 4, dtype=torch.bfloat16)
    outliers = torch.zeros(4, 4, dtype=torch.bool)
    outliers[1, 1] = True
    got = suppress(heat, outliers)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[..., ~outliers], heat[..., ~outliers])
    assert (got[..., 1, 1] != heat[..., 1, 1]).all()
    assert torch.equal(suppress(heat, outliers.expand(2, 1, 4, 4)), got)


def test_gradients_flow_to_the_neighbours() -> None:
    heat = torch.rand(3, 3, requires_grad=True)
    outliers = torch.zeros(3, 3, dtype=torch.bool)
    outliers[0, 0] = True
    suppress(heat, outliers)[0, 0].backward()
    assert heat.grad is not None
    assert heat.grad[0, 0] == 0
    assert heat.grad.sum() == 1


@pytest.mark.parametrize(
    ("heat", "outliers", "match"),
    [
        (torch.rand(2, 4, 4), torch.zeros(2, 4, 5, dtype=torch.bool), "does not fit"),
        (torch.rand(2, 2, 4, 4), torch.zeros(2, 4, 4, dtype=torch.bool), "any axis"),
        (torch.rand(2, 4, 4), torch.zeros(2, 4, 4), "bool mask"),
    ],
)
def test_a_mask_that_does_not_fit_raises(heat: torch.Tensor, outliers: torch.Tensor, match: str) -> None:
    with pytest.raises(PatchlightError, match=match):
        suppress(heat, outliers)
