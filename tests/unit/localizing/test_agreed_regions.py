"""Boxes that patches agree on: two subjects side by side, one behind a trunk, and what a model finds by them."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from bright_subjects import as_loaded
from models_at_random import tiny_vit
from patchlight.config import Calibration, PreprocessConfig, SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.images.preprocess import Preprocess
from patchlight.localizing.boxes import agreed_regions, regions_of
from patchlight.localizing.detector import Detector, DetectorOptions, localize, read, regions_by
from patchlight.localizing.heat import HeatPass
from patchlight.training.subject import look

Corners = tuple[float, float, float, float]

SIDE = 16


def said_of(*boxes: Corners, fit: float = 0.9) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Heat 1 in the boxes (in patches), and of every patch in one the box, of others a speck of their own."""
    heat_hw, patches_hw5 = np.zeros((SIDE, SIDE)), np.zeros((SIDE, SIDE, 5))
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    patches_hw5[..., :4] = np.stack((columns, rows, columns + 1, rows + 1), 2) / SIDE
    patches_hw5[..., 4] = 0.1
    for x0, y0, x1, y1 in boxes:
        inside = slice(int(y0), int(y1)), slice(int(x0), int(x1))
        heat_hw[inside], patches_hw5[inside] = 1.0, (x0 / SIDE, y0 / SIDE, x1 / SIDE, y1 / SIDE, fit)
    return heat_hw, patches_hw5


def test_two_subjects_side_by_side_are_two() -> None:
    left, right = (1.0, 3.0, 8.0, 13.0), (8.0, 3.0, 14.0, 13.0)
    heat_hw, patches_hw5 = said_of(left, right)
    assert len(regions_of(heat_hw, most=None)) == 1  # one warm region
    found = agreed_regions(heat_hw, patches_hw5)
    assert [region.box for region in found] == [
        pytest.approx(left),
        pytest.approx(right),
    ]  # the one with more votes first
    assert [int(region.mask_hw.sum()) for region in found] == [70, 60]
    assert not (found[0].mask_hw & found[1].mask_hw).any()
    assert [region.fit for region in found] == pytest.approx([0.9, 0.9])


def test_one_subject_in_two_pieces_is_one() -> None:
    whole = (2.0, 4.0, 14.0, 12.0)
    heat_hw, patches_hw5 = said_of(whole)
    heat_hw[:, 7:9] = 0  # a trunk in front of it
    assert len(regions_of(heat_hw, most=None)) == 2
    (found,) = agreed_regions(heat_hw, patches_hw5)
    assert found.box == pytest.approx(whole)
    assert found.mask_hw.sum() == 8 * 10


def test_boxes_are_the_mean_of_those_that_agree_by_heat_and_fit() -> None:
    heat_hw, patches_hw5 = said_of((4.0, 4.0, 12.0, 12.0), fit=0.5)
    patches_hw5[4:8, 4:12, :5] = (4 / SIDE, 4 / SIDE, 13 / SIDE, 12 / SIDE, 1.0)
    (found,) = agreed_regions(heat_hw, patches_hw5)
    assert found.box == pytest.approx((4, 4, (13 * 1.0 + 12 * 0.5) / 1.5, 12))
    assert found.fit == pytest.approx((1.0 * 1.0 + 0.5 * 0.5) / 1.5)


def test_cold_patches_have_no_say_and_nothing_is_found_where_nothing_is_warm() -> None:
    heat_hw, patches_hw5 = said_of((4.0, 4.0, 12.0, 12.0))
    patches_hw5[:4] = (0, 0, 1, 1, 1.0)
    (found,) = agreed_regions(heat_hw, patches_hw5)
    assert found.box == pytest.approx((4, 4, 12, 12))
    assert agreed_regions(np.zeros((SIDE, SIDE)), patches_hw5) == []
    assert agreed_regions(0.3 * heat_hw, patches_hw5, threshold=0.5) == []
    assert agreed_regions(heat_hw, patches_hw5, min_area=0.3) == []


def test_patches_without_any_trust_leave_no_box() -> None:
    heat_hw, patches_hw5 = said_of((4.0, 4.0, 12.0, 12.0), fit=0.0)
    patches_hw5[..., 4] = 0
    assert agreed_regions(heat_hw, patches_hw5) == []


def test_as_many_are_answered_as_are_wanted() -> None:
    heat_hw, patches_hw5 = said_of((0.0, 0.0, 5.0, 5.0), (8.0, 8.0, 12.0, 12.0), (0.0, 12.0, 3.0, 15.0))
    for most, count in ((1, 1), (2, 2), (None, 3)):
        answered, apart = regions_by("subject", heat_hw, most, patches_hw5=patches_hw5)
        assert (len(answered), len(apart)) == (count, 3)


# By a model


def with_patch_boxes() -> Any:
    torch.manual_seed(0)
    model = tiny_vit(depth=3, patch_boxes=True).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    size = model.config.image_size
    loaded = as_loaded(model, Preprocess(PreprocessConfig(image_size=size)), None)
    calibration = Calibration(bias=0.0, fit=1.0, sure=0.5)
    return replace(loaded, subject=SubjectHeat(scale=0.7, bias=-0.4, calibration=calibration))


def test_a_pass_gives_what_training_taught() -> None:
    loaded = with_patch_boxes()
    images = torch.randn(2, 3, *loaded.config.image_size)
    _, score_Bhw, said = look(loaded.model, images)
    assert said is not None
    expected = torch.cat((said[0].clamp(0, 1), said[1].sigmoid()[..., None]), 3)
    for visit in (None, lambda index, heads, x_BND: None):
        seen = HeatPass(loaded, images, ["subject"], visit)
        torch.testing.assert_close(seen.patch_boxes("subject"), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen.heat("subject"), (0.7 * score_Bhw - 0.4).sigmoid(), atol=1e-5, rtol=1e-4)
    assert HeatPass(loaded, images, ["cls"]).patch_boxes("cls") is None
    plain = as_loaded(tiny_vit(), loaded.preprocess, SubjectHeat(scale=1.0, bias=0.0))
    assert HeatPass(plain, images, ["subject"]).patch_boxes("subject") is None


@pytest.mark.parametrize("options", [{}, {"second_look": True}, {"tiles": 2}, {"subjects": "all"}])
def test_photos_get_the_boxes_that_patches_agree_on(options: dict[str, Any]) -> None:
    loaded = with_patch_boxes()
    noise = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    found = localize(noise, loaded, **options)
    image_CHW, view = loaded.preprocess(read(Image.fromarray(noise), loaded.preprocess))
    seen = HeatPass(loaded, image_CHW[None], ["subject"])
    patches_Bhw5 = seen.patch_boxes("subject")
    assert patches_Bhw5 is not None
    if "tiles" in options:
        assert found.patches_hw5 is None
        return
    assert torch.equal(found.patches_hw5, patches_Bhw5[0])
    apart = agreed_regions(seen.heat("subject")[0].numpy(), patches_Bhw5[0].numpy())
    assert len(found.subjects) == (len(apart) if options.get("subjects") == "all" else 1)
    if not options:
        down, across = found.patch_size
        x0, y0, x1, y1 = apart[0].box
        box = view.to_source(type(found.subjects[0].box)(x0 * across, y0 * down, x1 * across, y1 * down))
        assert found.subjects[0].box.iou(box) > 1 - 1e-6
        (again,) = Detector.of(loaded, options=DetectorOptions()).judge(
            found.heat_hw[None], [found.view], None, found.patches_hw5[None]
        )
        assert again.subjects == found.subjects


def test_a_model_of_one_block_has_no_patch_boxes() -> None:
    with pytest.raises(PatchlightError, match="depth must be 2 or more"):
        tiny_vit(depth=1, patch_boxes=True)
