import math
from typing import Any

import numpy as np
import pytest
import torch

from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.explain.faithfulness import Faithfulness, faithfulness, random_baseline
from patchlight.models.vit import ViT

CHOSEN = (1, 2)
"""The one patch that `reads_one_patch` reads."""

CHECKS = (-1.0) ** (torch.arange(8)[:, None] + torch.arange(8))


def reads_one_patch() -> ViT:
    """A model whose answer depends on the patch at CHOSEN alone: class 0 if it shows a chequerboard."""
    vit = tiny_vit(class_token=False, pooling="mean", num_classes=2)
    with torch.no_grad():
        for block in vit.blocks:
            for last in (block.attn.out, block.mlp.down):
                last.weight.zero_()
                last.bias.zero_()
        vit.patch_embed.proj.weight.zero_()
        vit.patch_embed.proj.weight[0] = CHECKS / 192
        vit.patch_embed.proj.bias.copy_(torch.linspace(-1, 1, 24))
        vit.patch_embed.proj.bias[0] = 0
        # Elsewhere the position drowns what the patch shows, once the token is normed.
        vit.positions.table.mul_(1e6)
        vit.positions.table[CHOSEN[0] * 4 + CHOSEN[1]] = 0
        vit.norm.reset_parameters()
        vit.head.out.weight.zero_()
        vit.head.out.weight[0, 0] = 30
        vit.head.out.bias.zero_()
        vit.head.out.bias[0] = -vit(torch.zeros(1, 3, 32, 32))[0, 0]  # without a chequerboard: one half
    return vit


def chequered(batch: int = 2) -> torch.Tensor:
    return 2 * CHECKS.repeat(4, 4).expand(batch, 3, 32, 32) + 0.1 * torch.randn(batch, 3, 32, 32)


def true_map(batch: int = 2) -> torch.Tensor:
    heat_Bhw = torch.zeros(batch, 4, 4)
    heat_Bhw[:, CHOSEN[0], CHOSEN[1]] = 1
    return heat_Bhw


@pytest.mark.parametrize("baseline", ["blur", "mean"])
def test_the_true_map_has_the_best_score_there_is(baseline: Any) -> None:
    vit, image_BCHW = reads_one_patch(), chequered()
    with torch.no_grad():
        seen = vit(image_BCHW).softmax(1)[:, 0]
        unseen = vit(torch.zeros_like(image_BCHW)).softmax(1)[:, 0]
    assert (seen - unseen > 0.1).all()

    true = faithfulness(vit, image_BCHW, true_map(), 0, baseline=baseline)
    assert true.deletion.shape == true.insertion.shape == (2, 17)
    torch.testing.assert_close(true.deletion[:, 0], seen)
    # One patch in sixteen at each step, and the first decides.
    torch.testing.assert_close(true.score, (seen - unseen) * 15 / 16, rtol=0.05, atol=0.01)
    inverted = faithfulness(vit, image_BCHW, 1 - true_map(), 0, baseline=baseline)
    torch.testing.assert_close(inverted.score, -true.score)
    chance = random_baseline(vit, image_BCHW, 0, maps=12, baseline=baseline)
    assert chance.shape == (12, 2)
    assert (true.score >= chance.amax(0)).all()
    assert (inverted.score <= chance.amin(0)).all()
    assert chance.std(0).min() > 0.05
    assert torch.equal(chance, random_baseline(vit, image_BCHW, 0, maps=12, baseline=baseline))


def blurred(image_HW: np.ndarray) -> np.ndarray:
    """A Gaussian blur of an eighth of the shorter side, pixel by pixel."""
    height, width = image_HW.shape
    deviation = min(height, width) / 8
    rows, columns = np.mgrid[:height, :width]
    result = np.empty_like(image_HW)
    for y, x in np.ndindex(height, width):
        weights = np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / (2 * deviation**2))
        result[y, x] = (weights * image_HW).sum() / weights.sum()
    return result


def curves_by_loops(
    vit: ViT, image_CHW: torch.Tensor, heat_hw: torch.Tensor, wanted: int | None, steps: int, baseline: str
) -> tuple[list[float], list[float], list[float]]:
    down, across = vit.config.patch_size
    image = image_CHW.double().numpy()
    if baseline == "blur":
        blank = np.stack([blurred(channel) for channel in image])
    else:
        blank = np.broadcast_to(image.mean((1, 2), keepdims=True), image.shape)
    places = list(np.ndindex(*heat_hw.shape))
    order = sorted(places, key=lambda place: -heat_hw[place].item())  # stable, as Python's sort is

    def answer(picture: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            out = vit(torch.from_numpy(picture).float()[None])[0].double().numpy()
        return np.exp(out) / np.exp(out).sum() if vit.head is not None else out

    whole = answer(image)
    shares, deletion, insertion = [], [], []
    for step in range(steps + 1):
        count = round(step * len(places) / steps)
        deleted, inserted = image.copy(), blank.copy()
        for row, column in order[:count]:
            patch = np.s_[:, row * down : (row + 1) * down, column * across : (column + 1) * across]
            deleted[patch] = blank[patch]
            inserted[patch] = image[patch]
        for curve, picture in ((deletion, deleted), (insertion, inserted)):
            said = answer(picture)
            if vit.head is not None:
                curve.append(said[whole.argmax() if wanted is None else wanted])
            else:
                curve.append(said @ whole / math.sqrt((said @ said) * (whole @ whole)))
        shares.append(count / len(places))
    return shares, deletion, insertion


@pytest.mark.parametrize("baseline", ["blur", "mean"])
@pytest.mark.parametrize("num_classes", [0, 5])
@pytest.mark.parametrize(("steps", "batch_size"), [(1, 32), (5, 3), (16, 7), (30, 100)])
def test_curves_are_what_loops_give(baseline: Any, num_classes: int, steps: int, batch_size: int) -> None:
    vit = tiny_vit(num_classes=num_classes, patch_size=(8, 4))
    image_BCHW, heat_Bhw = torch.randn(3, 3, 24, 16), torch.rand(3, 3, 4)
    got = faithfulness(vit, image_BCHW, heat_Bhw, steps=steps, baseline=baseline, batch_size=batch_size)
    for image in range(3):
        shares, deletion, insertion = curves_by_loops(vit, image_BCHW[image], heat_Bhw[image], None, steps, baseline)
        np.testing.assert_allclose(got.shares, shares, atol=1e-6)
        np.testing.assert_allclose(got.deletion[image], deletion, atol=1e-4)
        np.testing.assert_allclose(got.insertion[image], insertion, atol=1e-4)
        areas = [
            sum((shares[i + 1] - shares[i]) * (curve[i] + curve[i + 1]) / 2 for i in range(steps))
            for curve in (deletion, insertion)
        ]
        assert got.deletion_area[image].item() == pytest.approx(areas[0], abs=1e-4)
        assert got.insertion_area[image].item() == pytest.approx(areas[1], abs=1e-4)
        assert got.score[image].item() == pytest.approx(areas[1] - areas[0], abs=1e-4)


def test_classes_are_followed_one_for_all_or_one_each() -> None:
    vit, image_BCHW, heat_Bhw = tiny_vit(), torch.randn(2, 3, 32, 32), torch.rand(2, 4, 4)
    each = faithfulness(vit, image_BCHW, heat_Bhw, [4, 1], steps=4)
    for image, wanted in enumerate([4, 1]):
        _, deletion, _ = curves_by_loops(vit, image_BCHW[image], heat_Bhw[image], wanted, 4, "blur")
        np.testing.assert_allclose(each.deletion[image], deletion, atol=1e-4)
        all_one = faithfulness(vit, image_BCHW, heat_Bhw, wanted, steps=4)
        torch.testing.assert_close(all_one.deletion[image], each.deletion[image])


def test_equal_heat_goes_in_reading_order() -> None:
    vit, image_BCHW = tiny_vit(), torch.randn(1, 3, 32, 32)
    falling = torch.arange(16.0).flip(0).view(1, 4, 4)
    even = faithfulness(vit, image_BCHW, torch.full((1, 4, 4), 0.3))
    expected = faithfulness(vit, image_BCHW, falling)
    assert torch.equal(even.deletion, expected.deletion)
    assert torch.equal(even.insertion, expected.insertion)


@pytest.mark.parametrize("uneven_size", ["pad", "resize"])
def test_uneven_images_are_judged_on_the_models_own_grid(uneven_size: Any) -> None:
    vit, image_BCHW = tiny_vit(uneven_size=uneven_size), torch.randn(2, 3, 30, 37)
    got = faithfulness(vit, image_BCHW, torch.rand(2, 4, 5), steps=4)
    with torch.no_grad():
        probability = vit(image_BCHW).softmax(1).amax(1)
    torch.testing.assert_close(got.deletion[:, 0], probability, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.insertion[:, -1], probability, rtol=1e-4, atol=1e-5)


def test_bfloat16() -> None:
    got = faithfulness(tiny_vit().bfloat16(), torch.randn(2, 3, 32, 32), torch.rand(2, 4, 4).bfloat16(), steps=2)
    assert isinstance(got, Faithfulness)
    assert got.score.dtype == torch.float32
    assert got.score.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"heat_Bhw": torch.rand(2, 4, 5)}, r"\(2, 4, 5\) does not fit 2 images of 4x4 patches"),
        ({"heat_Bhw": torch.rand(4, 4)}, "does not fit"),
        ({"heat_Bhw": torch.full((2, 4, 4), torch.nan)}, "NaN"),
        ({"steps": 0}, "steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"baseline": "black"}, "baseline='black'"),
        ({"classes": 5}, "classes=5"),
        ({"classes": [1, 2, 3]}, "classes"),
        ({"model": tiny_vit(num_classes=0), "classes": 1}, "need a model with a head"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], match: str) -> None:
    settings: dict[str, Any] = {
        "model": tiny_vit(),
        "image_BCHW": torch.randn(2, 3, 32, 32),
        "heat_Bhw": torch.rand(2, 4, 4),
    }
    with pytest.raises(PatchlightError, match=match):
        faithfulness(**settings | changes)


def test_no_random_maps_raise() -> None:
    with pytest.raises(PatchlightError, match="maps=0"):
        random_baseline(tiny_vit(), torch.randn(1, 3, 32, 32), maps=0)
