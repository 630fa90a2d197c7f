"""Every command with a Swin and a ConvNeXt: what a user types."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from PIL import Image

import command_line
from patchlight.families import ConvNeXtConfig, SwinConfig, variant
from patchlight.weights.save import save
from staged_models import TINY_CONVNEXT, TINY_SWIN, tiny_convnext, tiny_swin


@pytest.fixture
def patchlight(folder: Path) -> Callable[..., CompletedProcess[str]]:
    return functools.partial(command_line.patchlight, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    save(tiny_swin(num_classes=2), path / "swin", labels=["dark", "light"])
    save(tiny_convnext(num_classes=2), path / "convnext", labels=["dark", "light"])
    generator = np.random.default_rng(0)
    for name, level in {"dark": 0, "light": 120}.items():
        (path / "photos" / name).mkdir(parents=True)
        for index in range(6):
            pixels = generator.integers(level, level + 120, (60, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path / "photos" / name / f"{index}.png")
    return path


def test_costs(folder: Path, patchlight: Callable[..., CompletedProcess[str]]) -> None:
    (folder / "mine.json").write_text(SwinConfig(**TINY_SWIN).to_json())
    answer = patchlight("costs", "swin-T", "convnext-T", "mine.json", "--image-size", "224")
    assert (answer.returncode, answer.stderr) == (0, "")
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert ["swin-T", "224x224", "3,136", "28.3"] in [row[:4] for row in rows]
    assert ["convnext-T", "224x224", "3,136", "28.6", "4.46", "0%"] in [row[:6] for row in rows]
    assert max(map(len, answer.stdout.splitlines())) <= 80
    changed = patchlight("costs", "swin-T", "--set", "window_size=[12,12]", "--json")
    assert json.loads(changed.stdout)[0]["parameters"] > 28_288_354
    wrong = patchlight("costs", "swin-T", "--set", "num_registers=4")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("patchlight: unknown setting 'num_registers' for SwinConfig")


@pytest.mark.parametrize("model", ["swin", "convnext"])
def test_inspect_classify_crop_and_evaluate(model: str, patchlight: Callable[..., CompletedProcess[str]]) -> None:
    seen = patchlight("inspect", model, "--json")
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout)["config"]["architecture"] == model
    shown = patchlight("inspect", model, "--set", "num_classes=7")
    assert "a fresh head of 7 classes in place of its 2 classes" in shown.stdout
    answer = patchlight("classify", "photos/dark/0.png", "--model", model)
    assert answer.returncode == 0, answer.stderr
    assert "light" in answer.stdout
    cropped = patchlight("crop", "photos/dark", "--model", model, "--out", f"{model}-crops", "--workers", "0")
    assert cropped.returncode == 0, cropped.stderr
    refused = patchlight("crop", "photos/dark", "--model", model, "--method", "cls", "--out", "no")
    assert refused.returncode == 2
    assert "is for a ViT" in refused.stderr
    judged = patchlight("evaluate", model, "photos", "--knn", "--linear", "--json", "--workers", "0")
    assert judged.returncode == 0, judged.stderr
    assert [each["method"] for each in json.loads(judged.stdout)] == ["knn", "linear"]
    assert patchlight("evaluate", model, "photos", "--json", "--workers", "0").returncode == 0


@pytest.mark.parametrize(
    ("model", "words"),
    [("swin", "of a Swin, patchlight.attention(model, image) shows"), ("convnext", "pays no attention")],
)
def test_look_refuses_in_one_line(
    model: str, words: str, folder: Path, patchlight: Callable[..., CompletedProcess[str]]
) -> None:
    answer = patchlight("look", "photos/dark/0.png", "--model", model, "--out", f"{model}-look")
    assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (2, "", 1)
    assert words in answer.stderr
    assert not (folder / f"{model}-look").exists()


@pytest.mark.parametrize("config", [SwinConfig(**TINY_SWIN), ConvNeXtConfig(**TINY_CONVNEXT)])
def test_train_and_finetune(
    config: SwinConfig | ConvNeXtConfig, folder: Path, patchlight: Callable[..., CompletedProcess[str]]
) -> None:
    name = config.architecture
    (folder / f"{name}.py").write_text(
        "from patchlight.config import PreprocessConfig\n"
        f"from patchlight.families import {type(config).__name__}\n"
        "from patchlight.training.config import DataConfig, TrainConfig\n\n\n"
        "def config():\n"
        "    return TrainConfig(\n"
        f"        model={type(config).__name__}.from_dict({config.to_dict() | {'num_classes': 2}!r}),\n"
        "        data=DataConfig(train='photos', workers=0),\n"
        "        preprocess=PreprocessConfig(image_size=48),\n"
        "        epochs=2.0,\n"
        "        batch_size=4,\n"
        "    )\n"
    )
    done = patchlight("train", f"{name}.py", "--out", f"{name}-run", "--set", "model.drop_path=0.1")
    assert done.returncode == 0, done.stderr
    changes = ["--set", "epochs=1", "--set", "data.workers=0"]
    tuned = patchlight("finetune", "photos", "--model", f"{name}-run", "--out", f"{name}-tuned", *changes)
    assert tuned.returncode == 0, tuned.stderr
    assert patchlight("inspect", f"{name}-tuned").returncode == 0


def test_models_lists_them(patchlight: Callable[..., CompletedProcess[str]]) -> None:
    listed = patchlight("models", "swin").stdout
    assert "microsoft" not in listed
    assert "swin-tiny-patch4-window7-224" in listed
    assert "convnext-tiny-224" in patchlight("models", "convnext").stdout
    assert variant("swin-T").depths == (2, 2, 6, 2)
