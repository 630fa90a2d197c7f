"""Subjects by features, with models that have no class token."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bright_subjects import as_loaded
from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.preprocess import Preprocess
from patchlight.localizing.detector import localize
from patchlight.localizing.heat import heat_maps, leading_component, resolve_method
from patchlight.weights.load import Loaded
from staged_models import tiny_convnext, tiny_swin


def loaded_of(model: Any, side: int = 128) -> Loaded:
    return as_loaded(model, Preprocess(PreprocessConfig(image_size=side, resize="squash", crop="none")), None)


def test_leading_component_is_numpys() -> None:
    """By the covariance's eigenvectors, where ours are singular vectors."""
    features_BPD = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0))
    features_BPD = features_BPD * torch.tensor([5.0, 2, 1, 1, 1, 1])
    heat_BP = leading_component(features_BPD, (4, 5)).numpy()
    border = np.array([row in (0, 3) or column in (0, 4) for row in range(4) for column in range(5)])
    for features_PD, heat_P in zip(features_BPD.numpy(), heat_BP, strict=True):
        centred = features_PD - features_PD.mean(0)
        _, vectors = np.linalg.eigh(centred.T @ centred)
        score = centred @ vectors[:, -1]
        share = (score > 0)[border].mean()
        score = -score if share > 0.5 or (share == 0.5 and score[np.abs(score).argmax()] < 0) else score
        expected = np.where(score > 0, 0.5 + 0.5 * score / score.max(), 0.5 - 0.5 * score / score.min())
        np.testing.assert_allclose(heat_P, expected, atol=1e-4)


def test_where_all_is_alike_there_is_no_heat() -> None:
    assert leading_component(torch.ones(1, 12, 4) * 3, (3, 4)).abs().max() == 0
    assert leading_component(torch.randn(1, 1, 4), (1, 1)).abs().max() == 0


@pytest.mark.parametrize("model", [tiny_swin(image_size=128), tiny_convnext(image_size=128)])
@pytest.mark.parametrize("box", [(60, 40, 180, 160), (20, 90, 110, 200)])
def test_a_bright_subject_is_found(model: Any, box: tuple[int, int, int, int]) -> None:
    photo = Image.new("RGB", (256, 256), (60, 70, 50))
    photo.paste((230, 210, 220), box)
    found = localize(photo, loaded_of(model))
    assert found.method == "features"
    assert found.heat_hw.shape == (16, 16)
    assert found.subjects[0].box.iou(Box(*box)) > 0.6


def test_methods_that_need_a_class_token_are_refused() -> None:
    for model in (tiny_swin(), tiny_convnext()):
        loaded = loaded_of(model, 48)
        for method in ("subject", "cls", "rollout"):
            with pytest.raises(PatchlightError, match=f"method='{method}' is for a ViT; of a .* use 'features'"):
                resolve_method(loaded, method)
        for method in ("features", "lost", "tokencut"):
            assert heat_maps(loaded, torch.randn(2, 3, 37, 45), method).shape == (2, *model.config.grid_for((37, 45)))


def test_a_vit_can_be_asked_too() -> None:
    loaded = loaded_of(tiny_vit(), 32)
    assert resolve_method(loaded, "auto") == "tokencut"
    heat_Bhw = heat_maps(loaded, torch.randn(2, 3, 32, 32), "features")
    assert heat_Bhw.shape == (2, 4, 4)
    assert heat_Bhw.max() == 1
