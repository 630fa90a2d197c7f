"""Recipes, read: what is wrong with one is said in a line, with its own line's number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from patchlight.cli import app
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.training.config import DataConfig, TrainConfig
from patchlight.training.objective import check_teacher
from patchlight.training.recipe import bundled_recipes, find_recipe, read_recipe, recipe_config, recipe_teacher


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


def test_the_line_is_the_recipes_own_where_a_library_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PatchlightError, match=r"mine\.py: cannot be run \(JSONDecodeError: .*, line 3\)$"):
        read_recipe(written(tmp_path, "import json\n\njson.loads('{')\n"))
    module = read_recipe(written(tmp_path, "import json\n\ndef config():\n    return json.loads('[')\n"))
    with pytest.raises(PatchlightError, match=r"mine\.py: its config\(\) failed \(JSONDecodeError: .*, line 4\)$"):
        recipe_config(module, {})
    written(tmp_path, "import json\njson.loads('{')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PatchlightError, match=r"^mine\.py: cannot be run \(JSONDecodeError: .*, line 2\)$"):
        read_recipe("mine.py")


def test_a_mistake_in_its_spelling_says_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match=r"cannot be run \(SyntaxError: .*mine\.py, line 2\)\)$"):
        read_recipe(written(tmp_path, "x = 1\ny = = 2\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("int('x')", r"mine\.py: its teacher\(\) failed \(ValueError: .*, line 2\)$"),
        ("return 3", r"mine\.py: teacher\(\) gave 3, which cannot be called; give logits_BK for images_BCHW"),
    ],
)
def test_a_teacher_that_is_none_is_refused(line: str, message: str, tmp_path: Path) -> None:
    module = read_recipe(written(tmp_path, f"def teacher(out, device, config):\n    {line}\n\nconfig = teacher\n"))
    with pytest.raises(PatchlightError, match=message):
        recipe_teacher(module, tmp_path / "run", None, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda images: torch.zeros(len(images), 5), r"answers 2 images with \[2, 5\], not with logits \[2, 10\]"),
        (lambda images: [0], r"answers 2 images with list, not with logits \[2, 10\]"),
        (lambda images: images[:, 3], r"fails on images \[2, 3, 32, 32\] with values from 0 to 1 \(IndexError"),
    ],
)
def test_a_teacher_of_other_classes_is_refused(teacher: Any, message: str) -> None:
    model = ViTConfig(image_size=32, patch_size=8, width=8, depth=1, num_heads=1, num_classes=10)
    config = TrainConfig(model=model, data=DataConfig(train="x"), preprocess=PreprocessConfig(image_size=32))
    with pytest.raises(PatchlightError, match=message):
        check_teacher(teacher, config, torch.device("cpu"))
    check_teacher(lambda images: torch.zeros(len(images), 10), config, torch.device("cpu"))


def test_bundled_recipes_are_found_by_name_and_all_can_be_read() -> None:
    bundled = bundled_recipes()
    names = [each.path.stem for each in bundled if each.is_recipe]
    assert {"cifar10", "cifar10_cpu", "default", "dino_photos", "mae_photos"} <= set(names)
    assert "fetch_cifar10" in {each.path.stem for each in bundled if not each.is_recipe}
    assert all(each.summary and not each.summary.endswith(".") for each in bundled)
    for name in names:
        assert isinstance(recipe_config(read_recipe(name), {}), TrainConfig)


def test_a_recipe_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PatchlightError, match=r"^cifar: there is no such recipe; .*one of .*cifar10_cpu.*"):
        read_recipe("cifar")
    written(tmp_path, "x = 1\n")
    (tmp_path / "cifar10").mkdir()  # a folder of that name does not stand in for the recipe
    assert find_recipe("cifar10").is_file()


def test_recipes_command_lists_and_copies_what_runs_from_the_copy(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["recipes"])
    assert listed.exit_code == 0
    assert "patchlight train cifar10 " in listed.output
    assert "python fetch_cifar10.py" in listed.output
    copy = tmp_path / "copy"
    assert runner.invoke(app, ["recipes", "--copy", str(copy)]).exit_code == 0
    assert recipe_config(read_recipe(str(copy / "cifar10_hybrid.py")), {}).model.stem == "convolutions"
    again = runner.invoke(app, ["recipes", "--copy", str(copy)])
    assert isinstance(again.exception, PatchlightError)
    assert "is there already" in str(again.exception)
