"""The examples in docs/training.md, as they stand there: the recipe, its commands, and what is done from Python."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coloured_photos import write_coloured_photos
from patchlight.weights.load import load
from warm_python import run_warm

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
RECIPE, FROM_PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(COMMANDS,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_recipe.py").write_text(RECIPE)
    (folder / "photos").mkdir()
    photos = write_coloured_photos(folder / "photos", 40, 44)
    for name, given in (("red", "cat"), ("green", "dog"), ("blue", "fox")):
        (photos / name).rename(photos / given)
    (photos / "cat" / "0.png").rename(photos / "cat" / "0.jpg")  # as the page calls it; what is in it counts
    done = []
    for command in COMMANDS.splitlines():
        arguments = shlex.split(command, comments=True)
        assert arguments[0] == "patchlight"
        done.append(run_warm(["-m", *arguments], cwd=folder))
    return folder, done


def test_the_commands_run(said: tuple[Path, list[subprocess.CompletedProcess[str]]]) -> None:
    folder, (trained, evaluated, classified) = said
    for run in (trained, evaluated, classified):
        assert run.returncode == 0, run.stderr
        assert "Traceback" not in run.stderr
    assert "patchlight.load('runs/mine')" in trained.stdout
    assert load(folder / "runs" / "mine").labels == ("cat", "dog", "fox")
    assert (folder / "runs" / "judged" / "per-class.csv").exists()
    assert classified.stdout.startswith("photos/cat/0.jpg: ")


def test_it_says_that_these_photos_were_learnt_from(
    said: tuple[Path, list[subprocess.CompletedProcess[str]]],
) -> None:
    _, (_, evaluated, _) = said
    assert "33 of the 36 photos were trained on" in evaluated.stderr.splitlines()[0]


def test_it_learns(said: tuple[Path, list[subprocess.CompletedProcess[str]]]) -> None:
    _, (_, evaluated, _) = said
    share = re.search(r"accuracy +([\d.]+)%", evaluated.stdout)
    assert share is not None
    assert float(share[1]) > 50  # of three colours, where guessing gets 33


def test_the_same_from_python(
    said: tuple[Path, list[subprocess.CompletedProcess[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = said
    (tmp_path / "photos").symlink_to(folder / "photos")
    monkeypatch.chdir(tmp_path)
    shorter = FROM_PYTHON.replace('epochs": 20', 'epochs": 2').replace("width=128, depth=6", "width=32, depth=2")
    assert shorter.count("num_classes=3),\n") == 1
    names: dict[str, Any] = {}
    exec(
        compile(shorter.replace("num_classes=3),\n", "num_classes=3),\n    epochs=2.0,\n"), "training.md", "exec"),
        names,
    )
    assert capsys.readouterr().out.startswith(f"{names['tuned'].accuracy} 0\n('")
    assert names["trained"].loaded.labels == load(tmp_path / "runs" / "tuned").labels == ("cat", "dog", "fox")


def test_another_number_of_classes_is_one_line(
    said: tuple[Path, list[subprocess.CompletedProcess[str]]], tmp_path: Path
) -> None:
    folder, _ = said
    command = ["train", "my_recipe.py", "--out", str(tmp_path / "run"), "--set", "model.num_classes=10"]
    run = run_warm(["-m", "patchlight", *command], cwd=folder)
    assert run.returncode == 2
    assert "set model.num_classes=3" in run.stderr
