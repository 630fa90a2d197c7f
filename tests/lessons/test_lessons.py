"""Every lesson runs and shows its pictures; every check knows its solution from nothing and from common mistakes."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from warm_python import run_warm

LESSONS = Path(__file__).parents[2] / "lessons"
ALL = sorted(LESSONS.glob("[01]*.py"))


@pytest.mark.parametrize("lesson", ALL, ids=lambda path: path.stem)
def test_a_lesson_runs_and_shows_its_pictures(lesson: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    import course

    monkeypatch.setattr(course, "OUT", tmp_path)
    runpy.run_path(str(lesson), run_name="__main__")
    named = re.findall(r'"(\d\d_\w+)",?\s*\)', lesson.read_text())
    assert named
    assert {path.stem for path in tmp_path.glob("*.png")} == set(named)
    for path in tmp_path.glob("*.png"):
        assert np.asarray(Image.open(path)).std() > 5, "an empty picture"
    said = capsys.readouterr().out
    asked = re.findall(r"^check\.(\w+)\(", lesson.read_text(), re.MULTILINE)
    assert 2 <= len(asked) <= 4
    assert re.findall(r"not yet: (\w+): there is nothing yet", said) == asked


@pytest.mark.parametrize("lesson", ALL, ids=lambda path: path.stem)
def test_the_solutions_are_right(lesson: Path) -> None:
    import check

    solutions = runpy.run_path(str(LESSONS / "solutions" / lesson.name))
    for name in re.findall(r"^check\.(\w+)\(", lesson.read_text(), re.MULTILINE):
        assert check.CHECKS[name](solutions[name]), name


def test_every_check_belongs_to_a_lesson() -> None:
    import check

    asked = [name for lesson in ALL for name in re.findall(r"^check\.(\w+)\(", lesson.read_text(), re.MULTILINE)]
    assert sorted(asked) == sorted(check.CHECKS)


def test_a_lesson_runs_as_a_script_in_an_empty_folder(tmp_path: Path) -> None:
    run = run_warm([ALL[0]], cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "not yet: patchify" in run.stdout


MISTAKES = {
    "patchify": [
        (lambda image, side: image.reshape(6, -1), "not squares"),
        (lambda image, side: image, "its shape is"),
        (lambda image: image, "take 2 arguments"),
        (lambda image, side: image.nothing, "AttributeError"),
    ],
    "words_in_a_photo": [(12288, "16 pixels high"), (700, "too small"), ("768", "a number is wanted")],
    "patch_embed": [
        (lambda image, weight, bias: torch.zeros(2, 6, 5), "at ["),
        (lambda image, weight, bias: torch.conv2d(image, weight, stride=4).flatten(2).mT, "bias is missing"),
    ],
    "where_attention_overtakes": [(2304, "two N x N products")],
    "parameters": [
        (lambda width, depth, patch, side, classes: 5_717_415, "too small"),
        (lambda width, depth, patch, side, classes: 5_717_416 - 192, "class token is a weight"),
    ],
    "shuffle": [(lambda image, side, order: image, "nothing has moved")],
    "attention": [
        (lambda q, k, v: (q @ k.T).softmax(1) @ v, "not divided"),
        (lambda q, k, v: (q @ k.T / 8**0.5).softmax(0) @ v, "over the keys"),
    ],
    "block": [(lambda z, attend, mlp, n1, n2: mlp(n2(attend(n1(z)))), "takes their place")],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_check_says_what_is_off(name: str, capsys) -> None:
    import check

    for mistake, hint in MISTAKES[name]:
        assert not check.CHECKS[name](mistake)
        assert hint in capsys.readouterr().out


def test_the_list_of_lessons_is_whole() -> None:
    listed = re.findall(r"^\| \[(.*?)\]\((.*?)\) \| (\d+) min", (LESSONS / "README.md").read_text(), re.MULTILINE)
    told = []
    for path in ALL:
        title = re.search(r"^# # (.*)$", path.read_text(), re.MULTILINE)
        minutes = re.search(r"^# \*(\d+) minutes", path.read_text(), re.MULTILINE)
        assert title
        assert minutes
        told.append((title[1], path.name, minutes[1]))
    assert listed == told
    assert len(ALL) == 14


def test_a_lesson_becomes_a_page_and_a_notebook(tmp_path: Path) -> None:
    """With what its cells printed and drew."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("jupytext")
    command = ["-m", "lessons", "--out", tmp_path, "--only"]
    run = run_warm([*command, "01"], cwd=LESSONS.parent)
    assert (run.returncode, run.stderr) == (0, "")
    page = (tmp_path / "01_an_image_is_a_sentence.md").read_text()
    assert "# 1 An image is a sentence" in page
    assert "![toy](01_toy.png)" in page
    assert "[[ 0  1  2  3  4  5  6  7]" in page
    assert (tmp_path / "01_toy.png").stat().st_size > 10_000
    assert "](01_an_image_is_a_sentence.md)" in (tmp_path / "index.md").read_text()
    notebook = nbformat.read(tmp_path / "01_an_image_is_a_sentence.ipynb", as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("data" in output for output in outputs) == 3
    wrong = run_warm([*command, "77"], cwd=LESSONS.parent)
    assert wrong.returncode == 1
    assert "no lesson starts with '77'" in wrong.stderr
