"""What patches say of their objects, and that they can learn it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import patchlight as pl
from models_at_random import tiny_vit
from patchlight.models.patch_boxes import PatchBoxes, middles
from patchlight.training.subject import box_loss, objects_of_patches


def test_a_patch_lies_in_its_own_box() -> None:
    """Whatever it says: the box reaches at least to where the patch begins and ends."""
    torch.manual_seed(0)
    head = PatchBoxes(tiny_vit().config)
    torch.nn.init.normal_(head.out.weight, std=2.0)
    boxes_Bhw4, trust_Bhw = head(torch.randn(3, 12, head.hidden.in_features), (3, 4))
    assert (boxes_Bhw4.shape, trust_Bhw.shape) == ((3, 3, 4, 4), (3, 3, 4))
    middle_hw2, half_2 = middles((3, 4), torch.device("cpu")), torch.tensor((1 / 8, 1 / 6))
    assert (boxes_Bhw4[..., :2] <= middle_hw2 + half_2).all()
    assert (boxes_Bhw4[..., 2:] >= middle_hw2 - half_2).all()


def test_a_patch_belongs_to_the_smallest_box_around_it() -> None:
    large, small = (0.0, 0.0, 1.0, 0.75), (0.5, 0.25, 0.75, 0.5)
    within_BM4 = torch.tensor([[large, small, (float("nan"),) * 4]])
    objects_Bhw4, inside_Bhw = objects_of_patches(within_BM4, (4, 4))
    assert inside_Bhw[0].tolist() == [[True] * 4] * 3 + [[False] * 4]
    assert objects_Bhw4[0, 1, 2].tolist() == list(small)
    assert objects_Bhw4[0, 0, 2].tolist() == list(large)


def test_the_loss_is_least_for_the_true_box_and_an_honest_fit() -> None:
    true_14 = torch.tensor((0.2, 0.2, 0.8, 0.6)).expand(1, 2, 2, 4)
    inside = torch.ones(1, 2, 2)
    sure = torch.full((1, 2, 2), 9.0)
    best = box_loss(true_14.clone(), sure, true_14, inside)
    assert best < 0.01
    moved = true_14 + torch.tensor((0.1, 0.0, 0.1, 0.0))
    assert box_loss(moved, sure, true_14, inside) > best + 0.3
    assert box_loss(moved, torch.zeros(1, 2, 2), true_14, inside) < box_loss(moved, sure, true_14, inside)
    assert box_loss(moved, sure, true_14, 0 * inside) == 0


def test_they_are_saved_and_loaded_and_change_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_vit(patch_boxes=True).eval()
    pl.save(model, tmp_path / "own")
    again = pl.load(tmp_path / "own").model
    images = torch.randn(1, 3, *model.config.image_size)
    torch.testing.assert_close(again(images), model(images), atol=1e-6, rtol=1e-5)
    for key, value in model.patch_boxes.state_dict().items():
        assert torch.equal(again.patch_boxes.state_dict()[key], value)
    plain = tiny_vit().eval()
    plain.load_state_dict(
        {key: value for key, value in model.state_dict().items() if not key.startswith("patch_boxes")}
    )
    torch.testing.assert_close(plain(images), model(images), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", ["timm", "transformers"])
def test_other_libraries_get_the_model_without_them(tmp_path: Path, layout: Any) -> None:
    torch.manual_seed(0)
    model = pl.ViT(pl.variant("Ti/16", depth=2, image_size=32, num_classes=3, patch_boxes=True)).eval()
    pl.save(model, tmp_path / "theirs", layout=layout)
    again = pl.load(tmp_path / "theirs").model
    assert not again.config.patch_boxes
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(again(images), model(images), atol=1e-6, rtol=1e-5)
