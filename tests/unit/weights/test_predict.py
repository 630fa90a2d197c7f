"""What a loaded model says of photos, wherever it is, and what PyTorch's loaders make of its preprocessing."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import oracles
import patchlight as pl
from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.weights.load import load
from patchlight.weights.save import save
from staged_models import tiny_convnext, tiny_swin

PHOTOS = list(np.random.default_rng(0).integers(0, 256, (5, 40, 60, 3), dtype=np.uint8))


def loaded_of(folder: Path, model: Any = None, **preprocess: Any) -> pl.Loaded:
    model = tiny_vit() if model is None else model
    config = PreprocessConfig(**{"image_size": model.config.image_size, "crop_pct": 0.9} | preprocess)
    return load(save(model, folder / "model", preprocess=config))


@pytest.mark.parametrize("make", [tiny_vit, tiny_swin, tiny_convnext])
def test_predictions_are_the_models(make: Any, tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, make())
    with torch.inference_mode():
        image_BCHW = torch.stack([loaded.preprocess(photo)[0] for photo in PHOTOS])
        logits_BK, features_BD = loaded.model(image_BCHW), loaded.model.features(image_BCHW)
    torch.testing.assert_close(loaded.predict(PHOTOS), logits_BK)
    torch.testing.assert_close(loaded.predict(PHOTOS, "probabilities"), logits_BK.softmax(1))
    torch.testing.assert_close(loaded.predict(PHOTOS, outputs="features"), features_BD)
    assert torch.equal(loaded.predict(PHOTOS[3]), loaded.predict(PHOTOS)[3])
    assert torch.equal(loaded.predict(photo for photo in PHOTOS), loaded.predict(PHOTOS, batch_size=2))


def test_photos_that_stay_of_different_sizes(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, tiny_vit(uneven_size="resize"), crop="none", crop_pct=1.0)
    photos = [PHOTOS[0], PHOTOS[1][:, :40], PHOTOS[2]]
    assert torch.equal(loaded.predict(photos), torch.stack([loaded.predict(photo) for photo in photos]))


def test_a_model_in_another_precision(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path)
    half = load(tmp_path / "model", dtype=torch.bfloat16).predict(PHOTOS, "probabilities")
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, loaded.predict(PHOTOS, "probabilities"), atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        (
            {"outputs": "subjects"},
            {},
            "outputs='subjects' is not one of logits, probabilities, features; `localize` finds",
        ),
        ({"outputs": ["logits"]}, {}, "is not one of logits"),
        ({"batch_size": 0}, {}, "batch_size=0 must be 1 or more"),
        ({}, {"num_classes": 0}, "has no head, so it gives no logits; ask for 'features'"),
        ({"outputs": "probabilities"}, {"num_classes": 0}, "has no head to classify with"),
    ],
)
def test_what_cannot_be_predicted(arguments: Any, settings: Any, said: str, tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, tiny_vit(**settings))
    with pytest.raises(pl.PatchlightError) as raised:
        loaded.predict(PHOTOS, **arguments)
    assert said in str(raised.value)
    assert loaded.predict(PHOTOS, "features").shape == (5, 24)


def test_to_moves_the_model_and_names_a_device_that_is_not_here(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path)
    assert loaded.to("cpu") is loaded
    assert loaded.device.type == "cpu"
    for device in ("nowhere", "cuda:99", "meta", 3.5):
        with pytest.raises(pl.PatchlightError, match="does not compute here"):
            loaded.to(device)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_predictions_are_the_same_on_a_gpu(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, tiny_vit(position="rope2d"))
    expected = loaded.predict(PHOTOS)
    there = loaded.to("cuda").predict(PHOTOS, batch_size=2)
    assert there.device.type == "cpu"
    torch.testing.assert_close(there, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(loaded.to("cpu").predict(PHOTOS), expected)


class Photos(Dataset[torch.Tensor]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return len(PHOTOS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(PHOTOS[index])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_transform_works_in_a_data_loaders_processes(context: str, tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path)
    loader = DataLoader(Photos(loaded.transform), batch_size=5, num_workers=1, multiprocessing_context=context)
    (image_BCHW,) = loader
    assert torch.equal(image_BCHW, torch.stack([loaded.preprocess(photo)[0] for photo in PHOTOS]))


def test_transform_stands_in_a_compose(tmp_path: Path) -> None:
    oracles.timm()  # which makes torchvision importable
    from torchvision.transforms import CenterCrop, Compose, Normalize

    transform, photo = loaded_of(tmp_path).transform, Image.fromarray(PHOTOS[0])
    made = Compose([CenterCrop(30), transform, Normalize([0.5] * 3, [2.0] * 3)])(photo)
    torch.testing.assert_close(made, (transform(PHOTOS[0][5:35, 15:45]) - 0.5) / 2)


def test_transform_can_be_sent_and_shown(tmp_path: Path) -> None:
    transform = loaded_of(tmp_path).transform
    assert torch.equal(pickle.loads(pickle.dumps(transform))(PHOTOS[0]), transform(PHOTOS[0]))
    assert repr(transform).startswith("Transform(PreprocessConfig(image_size=(32, 32)")


def test_a_loaded_model_is_where_it_is(tmp_path: Path) -> None:
    loaded = pl.load(pl.save(tiny_vit(), tmp_path / "model"))
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert pl.localize(Image.new("RGB", (40, 40)), loaded, device=device).decision
    for device in ("cpu:1", "meta"):
        with pytest.raises(pl.PatchlightError, match=f"device={device}: the model is loaded already; say so to load"):
            pl.localize(Image.new("RGB", (40, 40)), loaded, device=device)
