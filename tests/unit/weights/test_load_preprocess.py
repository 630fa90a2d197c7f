"""What a loaded model's photos are prepared like: of the size and channels that it takes, or it says why not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from crop_runs import run_crop
from models_at_random import tiny_vit
from patchlight.looking.look import look
from patchlight.training.evaluate import evaluate_photos
from patchlight.training.features import evaluate_features
from patchlight.weights.load import load
from patchlight.weights.save import save

PHOTO = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def edited(folder: Path, name: str, change: dict[str, Any]) -> Path:
    """The folder, with some values of one of its files changed; "pretrained_cfg.mean" is one that lies deeper."""
    values = json.loads((folder / name).read_text())
    for key, value in change.items():
        *outer, last = key.split(".")
        inner = values
        for part in outer:
            inner = inner[part]
        inner[last] = value
    (folder / name).write_text(json.dumps(values))
    return folder


def without_our_part(folder: Path) -> Path:
    values = json.loads((folder / "config.json").read_text())
    values.pop("patchlight", None)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_size_in_model_args_is_what_photos_are_prepared_for(tmp_path: Path) -> None:
    folder = without_our_part(save(tiny_vit(), tmp_path / "m", layout="timm"))
    edited(folder, "config.json", {"pretrained_cfg.input_size": [3, 224, 224], "pretrained_cfg.crop_pct": 0.9})
    loaded = load(folder)
    assert loaded.preprocess.config.image_size == loaded.config.image_size
    assert loaded.preprocess.config.crop_pct == 0.9
    height, width = loaded.config.image_size
    assert f"photos are prepared for {height}x{width}, not for 224x224 as pretrained_cfg says" in loaded.notes
    pl.classify(PHOTO, loaded)


def test_preprocessing_that_cannot_be_followed_can_be_replaced(tmp_path: Path) -> None:
    folder = without_our_part(save(tiny_vit(), tmp_path / "m", layout="transformers"))
    edited(folder, "preprocessor_config.json", {"image_processor_type": "DPTImageProcessor"})
    with pytest.raises(
        pl.PatchlightError, match=r"image_processor_type='DPTImageProcessor'.* preprocess= of load replaces"
    ):
        load(folder)
    own = pl.PreprocessConfig(image_size=32, resize="squash")
    assert load(folder, preprocess=own).preprocess.config == own
    timm = without_our_part(save(tiny_vit(), tmp_path / "t", layout="timm"))
    edited(timm, "config.json", {"pretrained_cfg.input_size": [3, 224, 224]})
    assert not [note for note in load(timm, preprocess=own).notes if "prepared" in note]


def test_a_size_of_transformers_is_kept_and_said(tmp_path: Path) -> None:
    folder = save(tiny_vit(), tmp_path / "m", layout="transformers")
    without_our_part(folder)
    assert not [note for note in load(folder).notes if "prepared" in note]
    edited(folder, "preprocessor_config.json", {"size": 64, "crop_size": 64})
    loaded = load(folder)
    height, width = loaded.config.image_size
    assert loaded.preprocess.config.image_size == (64, 64)
    assert f"photos are prepared for 64x64, and it was made for {height}x{width}; image_size= sets both" in loaded.notes
    loaded = load(folder, image_size=64)  # the remedy
    assert loaded.preprocess.config.image_size == loaded.config.image_size == (64, 64)
    assert not [note for note in loaded.notes if "prepared" in note]


def test_timms_first_form_of_a_config(tmp_path: Path) -> None:
    model = tiny_vit(width=192, num_heads=3)  # timm's own heads of vit_tiny
    folder = without_our_part(save(model, tmp_path / "m", layout="timm", labels=list("abcde")))
    values = json.loads((folder / "config.json").read_text())
    old = values["pretrained_cfg"] | {"architecture": "vit_tiny_patch16_224", "num_features": 192}
    old |= {"interpolation": "bilinear", "labels": list("abcde")}
    (folder / "config.json").write_text(json.dumps(old))
    loaded = load(folder, depth=3)  # it has fewer blocks than timm's
    assert loaded.preprocess.config.interpolation == "bilinear"
    assert loaded.labels == tuple("abcde")
    assert not [note for note in loaded.notes if "ignored" in note or "preprocessing" in note]


@pytest.mark.parametrize("layout", ["timm", "transformers"])
def test_keys_that_are_not_known_are_said(layout: Any, tmp_path: Path) -> None:
    folder = without_our_part(save(tiny_vit(), tmp_path / "m", layout=layout))
    place, key = ("config.json", "pretrained_cfg.shake") if layout == "timm" else ("preprocessor_config.json", "shake")
    before = load(folder)
    edited(folder, place, {key: 3, key.replace("shake", "nothing"): None})
    after = load(folder)
    where = "in pretrained_cfg" if layout == "timm" else "of its image processor"
    assert set(after.notes) - set(before.notes) == {f"ignored shake=3 {where}, which is not known here"}
    assert after.preprocess.config == before.preprocess.config


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("layout", ["patchlight", "timm", "bare"])
def test_models_of_other_channels_load_and_refuse_photos(layout: str, channels: int, tmp_path: Path) -> None:
    model, counted = tiny_vit(num_classes=5, in_channels=channels), {1: "1 channel", 4: "4 channels"}[channels]
    source = tmp_path / "m"
    if layout == "bare":
        source = tmp_path / "m.pt"
        torch.save(model.state_dict(), source)
    else:
        save(model, source, layout=layout)
        if layout == "timm":
            without_our_part(source)
            edited(
                source, "config.json", {"pretrained_cfg.mean": [0.5] * channels, "pretrained_cfg.std": [0.5] * channels}
            )
    loaded = load(source, **({"num_heads": 2} if layout == "bare" else {}))
    assert f"photos cannot be prepared: it takes images of {counted}" in loaded.notes
    image_BCHW = torch.randn(2, channels, *model.config.image_size)
    assert torch.allclose(loaded.model(image_BCHW), model.eval()(image_BCHW), atol=1e-5)
    photo = tmp_path / "photo.png"
    Image.fromarray(PHOTO).save(photo)
    functions = [
        lambda: loaded.preprocess(PHOTO),
        lambda: pl.classify(PHOTO, loaded),
        lambda: pl.localize(PHOTO, loaded),
        lambda: look(PHOTO, loaded),
        lambda: evaluate_photos(loaded, tmp_path),
        lambda: evaluate_features(loaded, tmp_path),
        lambda: run_crop([photo], tmp_path / "out", model=loaded, workers=0),
    ]
    for function in functions:
        with pytest.raises(pl.PatchlightError, match=f"takes images of {counted}, and a photo has 3") as raised:
            function()
        assert "\n" not in str(raised.value)
