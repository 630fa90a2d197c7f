"""A head that learns alone learns what it would beside a model that looks at every photo in every epoch."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coloured_photos import write_coloured_photos
from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.models.families import Model
from patchlight.reporting import Reporter
from patchlight.signals import Stopped
from patchlight.training.checkpoint import fingerprint
from patchlight.training.config import TrainConfig
from patchlight.training.data import Dataset
from patchlight.training.finetune import choose_recipe
from patchlight.training.head_alone import HeadAlone
from patchlight.training.loop import train
from patchlight.training.objective import Classification
from patchlight.training.sources import open_dataset
from patchlight.weights.load import load
from patchlight.weights.save import save
from staged_models import tiny_convnext, tiny_swin
from warm_python import run_two

MODELS = {"vit": tiny_vit, "swin": tiny_swin, "convnext": tiny_convnext}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coloured_photos(tmp_path_factory.mktemp("photos"), 40, 36)


def settings(photos: Path, folder: Path, kind: str = "vit", **changes: Any) -> TrainConfig:
    """As `finetune` chooses them for few photos, but short."""
    model: Model = MODELS[kind]()
    start = save(model, folder / "start", preprocess=PreprocessConfig(image_size=model.config.image_size))
    config = choose_recipe(load(start), str(photos), open_dataset(photos))
    assert config.trainable_blocks == 0
    short = {"epochs": 9.0, "augment.variations": 3, "data.workers": 0, "log_every": 1, "optim.lr": 0.05}
    return config.changed(short | changes)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def weights(folder: Path) -> str:
    return fingerprint(load(folder).model.state_dict())


@pytest.mark.parametrize("kind", MODELS)
def test_it_learns_as_beside_a_model_that_looks_every_time(
    kind: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(photos, tmp_path, kind, label_smoothing=0.1)
    monkeypatch.setattr(HeadAlone, "_centre", lambda self, features_MD: None)
    kept = train(config, tmp_path / "kept")
    monkeypatch.setattr(HeadAlone, "suits", lambda *given: False)
    plain = train(config, tmp_path / "plain")
    np.testing.assert_allclose(losses(tmp_path / "kept"), losses(tmp_path / "plain"), rtol=1e-4)
    assert np.mean(losses(tmp_path / "kept")[-9:]) < 0.97 * losses(tmp_path / "kept")[0], "and learns at all"
    assert kept.accuracy == plain.accuracy
    for ours, theirs in zip(*(load(tmp_path / name).model.parameters() for name in ("kept", "plain")), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("hidden", [0, 7])
@pytest.mark.parametrize(("ema", "epochs"), [(None, 9.0), (0.9, 9.0), (0.9, 8 / 30)])
def test_where_features_are_moved_to_changes_no_answer(
    hidden: int, ema: float | None, epochs: float, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardly = {
        "optim.lr": 1e-9,
        "optim.weight_decay": 0.0,
        "model.head_hidden": hidden,
        "ema": ema,
        "epochs": epochs,
        "batch_size": 8,
    }
    config = settings(photos, tmp_path, **hardly)
    kept = train(config, tmp_path / "kept")
    monkeypatch.setattr(HeadAlone, "suits", lambda *given: False)
    plain = train(config, tmp_path / "plain")
    np.testing.assert_allclose(losses(tmp_path / "kept"), losses(tmp_path / "plain"), rtol=1e-4)
    assert kept.accuracy == plain.accuracy
    for ours, theirs in zip(*(load(tmp_path / name).model.parameters() for name in ("kept", "plain")), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_what_all_features_have_in_common_does_not_slow_the_head_down(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(photos, tmp_path, **{"optim.lr": 0.01})
    last = {}
    for name in ("moved", "as they are"):
        train(config, tmp_path / name)
        last[name] = np.mean(losses(tmp_path / name)[-9:])
        monkeypatch.setattr(HeadAlone, "_centre", lambda self, features_MD: None)
    assert last["moved"] < 0.8 * last["as they are"]


def test_every_variation_is_read_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = Dataset.read

    def counted(self: Dataset, index: int, *given: Any, **named: Any) -> Any:
        reads.append(len(self))
        return read(self, index, *given, **named)

    config = settings(photos, tmp_path, batch_size=8)
    told: list[str] = []
    monkeypatch.setattr(Dataset, "read", counted)
    train(config, tmp_path / "run", reporter=Reporter(tell=told.append))
    training, validation = 30, 6
    assert reads.count(validation) == validation, "judged many times, and read once"
    # The last batch is full: 3 * 30 photos fill twelve batches of eight but for six places.
    assert reads.count(training) == 96
    assert "looking once at 30 photos in 3 variations each" in told


def test_no_variation_is_looked_at_that_no_step_takes(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    prepare = Classification.prepare

    def counted(self: Classification, batch: Any, **named: Any) -> Any:
        looks.append(len(batch.samples_B))
        return prepare(self, batch, **named)

    monkeypatch.setattr(Classification, "prepare", counted)
    told: list[str] = []
    train(settings(photos, tmp_path, epochs=1.0, batch_size=8), tmp_path / "run", reporter=Reporter(tell=told.append))
    assert looks == [8, 8, 8, 8]  # 30 photos
    assert "looking once at 30 photos in 2 variations each" in told, "two of them have begun the second epoch"


@pytest.mark.parametrize("where", ["looking", "learning"])
def test_stopped_and_resumed_is_never_stopped(
    where: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(photos, tmp_path)
    train(config, tmp_path / "whole")
    kind: Any = Classification if where == "looking" else HeadAlone
    prepare, calls = kind.prepare, [0]

    def interrupted(self: Any, *given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return prepare(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "prepare", interrupted)
        with pytest.raises(Stopped, match="with resume=True to continue"):
            train(config, tmp_path / "stopped")
    train(config.changed({"data.workers": 1}), tmp_path / "stopped", resume=True)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    told: list[str] = []
    train(config, tmp_path / "stopped", resume=True, reporter=Reporter(tell=told.append))
    assert not any(line.startswith("looking") for line in told), "there is no step left to look for"


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from patchlight.training.config import TrainConfig
from patchlight.training.loop import train
train(TrainConfig.from_json(Path("config.json").read_text()), "two")
"""


def test_two_processes_learn_as_one(photos: Path, tmp_path: Path) -> None:
    config = settings(photos, tmp_path, batch_size=8)
    train(config, tmp_path / "one")
    (tmp_path / "config.json").write_text(config.to_json())
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_two(["script.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"augment.variations": None},
        {"augment.repeats": 2},
        {"augment.mix": 0.5, "augment.mixup": 0.2},
        {"trainable_blocks": 1},
        {"sharded": True},
        {"model.distill_token": True},
    ],
)
def test_where_photos_differ_from_time_to_time_they_are_looked_at_each_time(
    changes: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    config = settings(photos, tmp_path)
    assert HeadAlone.suits(tiny_vit(), config, 29)
    assert not HeadAlone.suits(tiny_vit(), config, 10**9), "more than memory holds"
    other = config.changed(changes)
    model = tiny_vit(distill_token=other.model.distill_token)  # type: ignore[union-attr]
    assert not HeadAlone.suits(model, other, 29)
