"""DINO and MAE through the whole loop: on photos that lie anywhere, judged where there are labels, resumed exactly."""

import io
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig
from patchlight.models.vit import ViT
from patchlight.reporting import Reporter
from patchlight.signals import Stopped
from patchlight.training.config import DataConfig, DinoConfig, MaeConfig, OptimConfig, TrainConfig
from patchlight.training.dino import Dino
from patchlight.training.loop import train
from patchlight.training.mae import Mae
from patchlight.training.processes import Processes
from patchlight.training.sources import UNLABELLED, open_dataset
from patchlight.weights.load import load


def photo(index: int) -> Image.Image:
    """Stripes: of even photos across, of odd ones down."""
    generator = np.random.default_rng(index)
    pixels = generator.integers(0, 60, (24, 26, 3), dtype=np.uint8)
    stripes = pixels if index % 2 else pixels.transpose(1, 0, 2)
    stripes[:, generator.integers(0, 4) :: 4] += 150
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos at all depths of a folder."""
    folder = tmp_path_factory.mktemp("loose")
    (folder / "a" / "b").mkdir(parents=True)
    for index in range(36):
        photo(index).save(folder / ("", "a", "a/b")[index % 3] / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def in_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in_classes")
    for index in range(36):
        (folder / str(index % 2)).mkdir(exist_ok=True)
        photo(index).save(folder / str(index % 2) / f"{index}.png")
    return folder


def settings(photos: Path, way: str) -> TrainConfig:
    ways: dict[str, Any] = {
        "dino": {"dino": DinoConfig(prototypes=16, head_hidden=16, bottleneck=8, local_views=2, collapse_after=1.0)},
        "mae": {"mae": MaeConfig(decoder_width=16, decoder_depth=1, decoder_heads=2)},
    }
    return TrainConfig(
        model=ViTConfig(image_size=16, patch_size=4, width=16, depth=2, num_heads=2, num_registers=1, num_classes=0),
        data=DataConfig(train=str(photos), workers=0, validation_share=0.25),
        preprocess=PreprocessConfig(image_size=16, crop_pct=1.0),
        augment=AugmentConfig(crop="resized" if way == "mae" else "none", area=(0.5, 1.0)),
        optim=OptimConfig(name="muon", lr=3e-3),
        epochs=3.0,
        batch_size=9,
        checkpoint_every=4,
        log_every=1,
        **ways[way],
    )


def test_photos_without_labels_are_found_wherever_they_lie(loose: Path, in_classes: Path, tmp_path: Path) -> None:
    dataset = open_dataset(loose, labelled=False)
    assert dataset.classes == (UNLABELLED,)
    assert sorted(dataset.names) == sorted(str(path.relative_to(loose)) for path in loose.rglob("*.png"))
    assert open_dataset(in_classes, labelled=False).classes == ("0", "1")
    with pytest.raises(PatchlightError, match="photos"):
        open_dataset(loose / "a" / "b")
    for name, labels in (("some", 3), ("all", 6)):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            for index in range(6):
                content = io.BytesIO()
                photo(index).save(content, "PNG")
                members = [(f"{index}.png", content.getvalue())]
                members += [(f"{index}.cls", str(index % 2).encode())] if index < labels else []
                for member, data in members:
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    some = open_dataset(tmp_path / "some.tar", labelled=False)
    assert (len(some), some.classes) == (6, (UNLABELLED,))
    assert len(open_dataset(tmp_path / "some.tar")) == 3
    assert open_dataset(tmp_path / "all.tar", labelled=False).classes == ("0", "1")


@pytest.mark.parametrize("way", ["dino", "mae"])
def test_a_run_without_labels_leaves_features(way: str, loose: Path, in_classes: Path, tmp_path: Path) -> None:
    result = train(settings(loose, way), tmp_path / "loose")
    assert result.accuracy is None
    loaded = load(tmp_path / "loose")
    assert loaded.labels is None
    assert loaded.model.head is None
    card = (tmp_path / "loose" / "README.md").read_text()
    assert "without labels" in card
    assert "features" in card
    assert (tmp_path / "loose" / "reconstructions.png").exists() == (way == "mae")
    rows = [json.loads(line) for line in (tmp_path / "loose" / "metrics.jsonl").read_text().splitlines()]
    assert ("explained" if way == "mae" else "teacher_entropy") in rows[0]
    assert ("hidden pixels" if way == "mae" else "directions that its features use") in card
    assert "temperature (fitted" not in card

    result = train(settings(in_classes, way), tmp_path / "in_classes")
    assert result.accuracy is not None
    assert 0 <= result.accuracy <= 1
    card = (tmp_path / "in_classes" / "README.md").read_text()
    assert "nearest neighbours" in card
    assert "best temperature" not in card, "which the neighbours' votes have, and nothing was fitted"


@pytest.mark.parametrize(("way", "learner"), [("dino", Dino), ("mae", Mae)])
@pytest.mark.parametrize("step", [2, 5, 7])
def test_stopped_and_resumed_is_never_stopped(
    way: str, learner: Any, step: int, loose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(settings(loose, way), tmp_path / "whole")
    prepare, calls = learner.prepare, [0]

    def interrupted(self: Any, *arguments: Any, **named: Any) -> Any:
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        calls[0] += 1
        return prepare(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(learner, "prepare", interrupted)
        with pytest.raises(Stopped):
            train(settings(loose, way), tmp_path / "parts")
    train(settings(loose, way), tmp_path / "parts", resume=True)
    whole, parts = (load(tmp_path / name).model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    losses = (tmp_path / "parts" / "metrics.jsonl").read_text().count('"loss"')
    assert losses == (9 if way == "mae" else 12), "of loose photos DINO holds none out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.num_classes": 3}, "dino learns without labels; set model.num_classes=0"),
        ({"mae.mask_share": 0.5}, "a run learns in one way; drop one of dino and mae"),
        ({"ema": 0.9}, "dino saves its teacher, an average already; set ema=None"),
        ({"batch_size": 4}, r"'sinkhorn' evens answers out within 4 photos.*raise batch_size to 8 or more"),
        ({"augment.mix": 0.5, "augment.mixup": 0.5, "batch_size": 8}, r"augment\.mix=0\.5 mixes labels"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(change: dict[str, Any], message: str, loose: Path) -> None:
    with pytest.raises(PatchlightError, match=message):
        settings(loose, "dino").changed(change)


def test_batches_of_few_photos_are_centred_by_their_running_mean(loose: Path) -> None:
    few = settings(loose, "dino").changed({"batch_size": 4, "dino.centring": "mean"})
    assert isinstance(few.model, ViTConfig)
    Dino(ViT(few.model), few)


def test_a_folder_without_photos_is_refused_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match=r"holds no photos, no \.tar shards and no tables, it is empty"):
        open_dataset(tmp_path, labelled=False)
    (tmp_path / "photos.zip").touch()
    with pytest.raises(PatchlightError, match=r"its files end in \.zip; unpack archives first"):
        open_dataset(tmp_path, labelled=False)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.png").write_bytes(b"no photo")
    with pytest.raises(PatchlightError, match=r"broken: there are no photos to train on: none of the 1 can be read"):
        train(settings(broken, "dino"), tmp_path / "run")


def test_photos_that_cannot_be_judged_by_are_learnt_from(loose: Path, tmp_path: Path) -> None:
    told: list[str] = []
    train(settings(loose, "dino"), tmp_path / "dino", reporter=Reporter(tell=told.append))
    assert "36 photos to learn from" in told
    config = settings(loose, "mae").changed({"data.validation_share": 0.0})
    train(config, tmp_path / "mae")
    assert (tmp_path / "mae" / "reconstructions.png").exists(), "of photos that it has learnt from"


def test_the_line_that_stops_a_run_is_on_record(loose: Path, tmp_path: Path) -> None:
    changes = {"optim.lr": 1e-9, "optim.muon_lr": 1e-9, "dino.collapse_after": 0.0, "dino.collapse_checks": 3}
    with pytest.raises(PatchlightError, match="DINO has collapsed"):
        train(settings(loose, "dino").changed(changes), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["class_loss"] > 0
    assert rows[-1]["step"] >= 3


def test_views_keep_the_proportions_of_wide_photos(tmp_path: Path) -> None:
    """A disc in a photo that is twice as wide as high: what the reader hands on is a disc."""
    pixels = np.zeros((60, 120, 3), np.uint8)
    y, x = np.mgrid[:60, :120]
    pixels[np.hypot(x - 60, y - 30) < 12] = 255
    for index in range(8):
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    config = settings(tmp_path, "dino").changed({"batch_size": 8})
    learner = Dino(ViT(config.model), config)  # type: ignore[arg-type]
    training = open_dataset(tmp_path, labelled=False)
    alone = Processes(0, 1, torch.device("cpu"))
    batch = next(learner.stream(training, alone, start=0, steps=1))
    assert learner.cropped(training)
    for image_CHW in batch.images_BCHW:
        disc_HW = image_CHW[0] > 127
        across, down = (int(disc_HW.any(axis).sum()) for axis in (0, 1))
        assert abs(across - down) <= 1
        assert across > 6
