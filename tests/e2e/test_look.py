"""`patchlight look` as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from command_line import patchlight
from models_at_random import tiny_vit
from patchlight.looking.page import TEXTS
from patchlight.weights.save import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a saved model, a photo and a file that is none."""
    save(tiny_vit(), tmp_path / "model")
    Image.linear_gradient("L").resize((60, 40)).save(tmp_path / "grey.png")
    (tmp_path / "page.jpg").write_text("<!doctype html><html></html>")
    return tmp_path


def test_look_writes_the_page_and_says_where(folder: Path) -> None:
    answer = patchlight("look", "grey.png", "--model", "model", "--device", "cpu", cwd=folder)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "look-grey-model/index.html\n", "")
    names = {path.name for path in (folder / "look-grey-model").iterdir()}
    assert names == {"index.html", *(f"{name}.png" for name in TEXTS)}
    for name in TEXTS:
        with Image.open(folder / "look-grey-model" / f"{name}.png") as picture:
            picture.load()
            assert 300 < picture.width < 1400
    assert (folder / "look-grey-model" / "index.html").read_text().count("data:image/") == len(TEXTS)


def test_look_follows_its_options(folder: Path) -> None:
    options = ["--layers", "-1", "--patch", "1,2", "--out", "a/b", "--image-size", "48x32", "--set", "num_classes=0"]
    answer = patchlight("look", "grey.png", "--model", "model", *options, cwd=folder)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "a/b/index.html\n", "")
    page = (folder / "a" / "b" / "index.html").read_text()
    assert "6 x 4 patches" in page
    assert "the patch in row 1, column 2" in page
    assert "names no classes" in page


def test_a_mistake_is_one_line_and_writes_nothing(folder: Path) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "index.html").write_text("mine")
    before = sorted(folder.rglob("*"))
    for arguments, says in (
        (("page.jpg", "--model", "model"), "page.jpg: not-an-image"),
        (("grey.png", "--model", "model", "--layers", "first"), "--layers first: write all, -1, or blocks such as"),
        (("grey.png", "--model", "model", "--patch", "3"), "--patch 3: write a row and a column, such as 3,5"),
        (("grey.png", "--model", "model", "--patch", "1,9"), "patch (1, 9) lies outside the grid of 4 rows"),
        (("grey.png", "--model", "model", "--out", "site"), "site: holds index.html, which is not from a look"),
        (("grey.png", "--model", "model", "--image-size", "big"), "image size 'big' is not a size"),
    ):
        answer = patchlight("look", *arguments, cwd=folder)
        assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1), answer.stderr
        assert says in answer.stderr
    assert sorted(folder.rglob("*")) == before


def test_without_matplotlib_the_extra_is_named(folder: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from patchlight.cli import main; "
        "sys.argv = ['patchlight', 'look', 'grey.png', '--model', 'model']; main()"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr == "patchlight: pictures need matplotlib: pip install 'patchlight[plot]'\n"
