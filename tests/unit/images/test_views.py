"""The looks at a photo that self-supervision compares, against Pillow and numpy."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from patchlight.images.augment import AugmentConfig, RandomView, random_part, random_view
from patchlight.images.draws import Draws

PLAIN = {"flip": False, "colour": 0.0, "grey_share": 0.0, "blur_share": 0.0, "solarize_share": 0.0}


def draws(count: int, epoch: int = 0) -> Draws:
    return Draws(0, torch.full((count,), epoch), torch.arange(count))


def photos(count: int, height: int = 40, width: int = 48) -> Tensor:
    """Smooth photos (B, 3, H, W), uint8."""
    rng = np.random.default_rng(0)
    coarse = [Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)) for _ in range(count)]
    large = [np.array(image.resize((width, height), Image.Resampling.BICUBIC)) for image in coarse]
    return torch.from_numpy(np.stack(large)).permute(0, 3, 1, 2).contiguous()


def levels(image_CHW: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (image_CHW * 255).permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("size", "area"), [((24, 24), (0.1, 0.4)), ((40, 48), (0.4, 1.0)), ((16, 32), (0.3, 1.0))])
def test_a_view_is_the_part_resized(size: tuple[int, int], area: tuple[float, float]) -> None:
    images_BCHW = photos(12)
    views_BCHW = random_view(images_BCHW, draws(12), RandomView(size=size, area=area, **PLAIN))
    assert views_BCHW.shape == (12, 3, *size)
    boxes_B4 = random_part(draws(12), (40, 48), AugmentConfig(crop="resized", area=area))
    for image_CHW, view_CHW, box_4 in zip(images_BCHW, views_BCHW, boxes_B4, strict=True):
        image = Image.fromarray(image_CHW.permute(1, 2, 0).numpy())
        expected = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR, box=tuple(box_4.tolist())), float)
        assert np.abs(levels(view_CHW) - expected).mean() < 1.5  # smooth, so that the filters hardly differ
        assert np.abs(levels(view_CHW) - expected).max() < 16


def test_small_views_of_fine_patterns_are_averaged_not_sampled() -> None:
    stripes_W = torch.arange(64) % 2 * 255
    images_BCHW = stripes_W.to(torch.uint8).expand(8, 3, 64, 64).contiguous()
    views_BCHW = random_view(
        images_BCHW, draws(8), RandomView(size=(16, 16), area=(0.99, 1.0), aspect=(1.0, 1.0), **PLAIN)
    )
    assert (views_BCHW - 0.5).abs().max() < 0.2  # samples alone would be black or white


def test_flips_mirror_half_of_the_views() -> None:
    images_BCHW, settings = photos(200), {**PLAIN, "flip": True}
    plain_BCHW = random_view(images_BCHW, draws(200), RandomView(size=(24, 24), area=(0.3, 1.0), **PLAIN))
    views_BCHW = random_view(images_BCHW, draws(200), RandomView(size=(24, 24), area=(0.3, 1.0), **settings))
    same_B = (views_BCHW - plain_BCHW).abs().amax((1, 2, 3)) < 1e-4
    mirrored_B = (views_BCHW - plain_BCHW.flip(3)).abs().amax((1, 2, 3)) < 1e-4
    assert (same_B ^ mirrored_B).all()
    assert 70 < int(mirrored_B.sum()) < 130


def test_grey_and_solarize_are_pillows() -> None:
    images_BCHW = photos(6)
    whole = {"size": (40, 48), "area": (0.9, 0.9)}
    plain_BCHW = random_view(images_BCHW, draws(6), RandomView(**whole, **PLAIN))
    grey_BCHW = random_view(images_BCHW, draws(6), RandomView(**whole, **{**PLAIN, "grey_share": 1.0}))
    solar_BCHW = random_view(images_BCHW, draws(6), RandomView(**whole, **{**PLAIN, "solarize_share": 1.0}))
    for plain_CHW, grey_CHW, solar_CHW in zip(plain_BCHW, grey_BCHW, solar_BCHW, strict=True):
        image = Image.fromarray(levels(plain_CHW).round().astype(np.uint8))
        assert np.abs(levels(grey_CHW)[..., 1] - np.asarray(image.convert("L"), float)).max() < 2
        assert torch.equal(grey_CHW[0], grey_CHW[2])
        expected = np.asarray(ImageOps.solarize(image), float)
        apart = np.abs(levels(solar_CHW) - expected)
        assert np.quantile(apart, 0.98) < 2  # a level at the threshold may fall to either side


def test_blur_is_a_gaussian() -> None:
    images_BCHW = torch.zeros(5, 3, 100, 100)
    images_BCHW[:, :, 50, 50] = 1
    kwargs = {"size": (100, 100), "area": (1.0, 1.0), "aspect": (1.0, 1.0)}
    views_BCHW = random_view(images_BCHW, draws(5), RandomView(**kwargs, **{**PLAIN, "blur_share": 1.0}))
    sigmas = draws(5).uniform("blur width", 0.1, 1.0).tolist()
    place = np.arange(100) - 50
    for view_CHW, sigma in zip(views_BCHW, sigmas, strict=True):
        along = np.exp(-(place**2) / (2 * sigma**2)) * (np.abs(place) <= 3)
        np.testing.assert_allclose(view_CHW[1].numpy(), np.outer(along, along) / along.sum() ** 2, atol=1e-4)


def test_shares_of_photos_are_changed() -> None:
    images_BCHW = photos(400)
    kwargs = {"size": (64, 64), "area": (0.3, 1.0)}
    plain_BCHW = random_view(images_BCHW, draws(400), RandomView(**kwargs, **PLAIN))
    for name in ("grey", "blur", "solarize"):
        views_BCHW = random_view(images_BCHW, draws(400), RandomView(**kwargs, **{**PLAIN, f"{name}_share": 0.25}))
        changed = int(((views_BCHW - plain_BCHW).abs().amax((1, 2, 3)) > 0).sum())
        assert 65 < changed < 135
    coloured_BCHW = random_view(
        images_BCHW, draws(400), RandomView(**kwargs, **{**PLAIN, "colour": 0.5}, colour_share=0.25)
    )
    assert 65 < int(((coloured_BCHW - plain_BCHW).abs().amax((1, 2, 3)) > 0).sum()) < 135
    assert coloured_BCHW.min() >= 0
    assert coloured_BCHW.max() <= 1


def test_a_view_depends_on_its_own_photo_and_draws_alone() -> None:
    images_BCHW, kwargs = photos(9), {"size": (24, 24), "area": (0.1, 0.9), "solarize_share": 0.5}
    views_BCHW = random_view(images_BCHW, draws(9), RandomView(**kwargs))
    for i in range(9):
        alone = Draws(0, torch.zeros(1, dtype=torch.long), torch.tensor([i]))
        assert torch.equal(random_view(images_BCHW[i : i + 1], alone, RandomView(**kwargs))[0], views_BCHW[i])


def test_parts_of_draws_are_unrelated_to_each_other_and_to_the_whole() -> None:
    whole = draws(20_000)
    numbers = [each.uniform("x") for each in (whole, whole.part("a"), whole.part("b"), whole.part("a").part("b"))]
    numbers += [whole.uniform("a"), whole.part("x").uniform("a")]
    correlation = np.corrcoef(torch.stack(numbers).numpy()) - np.eye(len(numbers))
    assert np.abs(correlation).max() < 5 / math.sqrt(20_000)
    assert torch.equal(whole.part("a").uniform("x"), draws(20_000).part("a").uniform("x"))
    assert torch.equal(whole.uniform("x"), draws(20_000).uniform("x"))
