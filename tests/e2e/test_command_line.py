"""The command as a user runs it: in a folder of their own, rightly and wrongly."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
from PIL import Image

from command_line import patchlight
from models_at_random import tiny_vit
from patchlight import __version__, variant
from patchlight.weights.save import save

DEMO = Path(__file__).parents[2] / "demo"


def in_a_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "patchlight", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


INTERRUPTED = """import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass  # as some libraries do
"""


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("typer.py", INTERRUPTED),  # before the command line listens
        ("torch.py", INTERRUPTED),
        ("sitecustomize.py", "import atexit\n@atexit.register\ndef end():\n" + indent(INTERRUPTED, " ")),  # all is done
    ],
)
def test_ctrl_c_in_an_import_or_at_the_end_ends_the_process_and_says_nothing(
    tmp_path: Path, where: str, what: str
) -> None:
    (tmp_path / where).write_text(what)
    done = subprocess.run(
        [sys.executable, "-m", "patchlight", "crop", ".", "--out", "out"]
        if where == "torch.py"
        else [sys.executable, "-m", "patchlight", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    printed = "" if where != "sitecustomize.py" else f"patchlight {__version__}\n"
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, printed, "")


def test_help_answers_at_once(tmp_path: Path) -> None:
    in_a_process("--help", cwd=tmp_path)  # byte-compiles
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    answer = in_a_process("--help", cwd=tmp_path)
    assert (
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1
    )  # the processor's time, however busy it is
    assert answer.returncode == 0
    assert "costs" in answer.stdout
    assert in_a_process(cwd=tmp_path).stdout == answer.stdout


def test_a_process_prints_and_ends_as_in_the_tests_that_start_none(pets: Path) -> None:
    for arguments in (("classify", "red.png", "--model", "model"), ("classify", "page.jpg", "--model", "model")):
        alone, here = in_a_process(*arguments, cwd=pets), patchlight(*arguments, cwd=pets)
        assert (alone.returncode, alone.stdout, alone.stderr) == (here.returncode, here.stdout, here.stderr)


def test_version(tmp_path: Path) -> None:
    assert patchlight("--version", cwd=tmp_path).stdout == f"patchlight {__version__}\n"


def test_costs_table(tmp_path: Path) -> None:
    answer = patchlight("costs", "B/16", "B/8", "B/32", "--image-size", "224", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert ["B/16", "224x224", "197", "86.6", "17.56", "36%", "64%", "5.6", "113"] in rows
    assert [row[0] for row in rows if row and "/" in row[0]] == ["B/16", "B/8", "B/32"]
    assert max(map(len, answer.stdout.splitlines())) <= 80, "the table does not fit 80 columns"


def test_timed_costs_table_fits_80_columns(tmp_path: Path) -> None:
    answer = patchlight("costs", "Ti/16", "mu/4", "--image-size", "32x64", "--time", cwd=tmp_path)
    assert answer.returncode == 0
    assert max(map(len, answer.stdout.splitlines())) <= 80
    assert "float32 on cpu" in " ".join(answer.stdout.split())


def test_costs_json(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(variant("Ti/8", image_size=64).to_json())
    answer = patchlight("costs", "mine.json", "--set", "num_registers=4", "--set", "mlp=swiglu", "--json", cwd=tmp_path)
    (row,) = json.loads(answer.stdout)
    assert (row["model"], row["tokens"], row["image_size"]) == ("mine.json", 69, [64, 64])
    assert "latency" not in row
    timed = patchlight("costs", "mu/16", "--image-size", "32", "--json", "--time", "--batch", "2", cwd=tmp_path)
    assert json.loads(timed.stdout)[0]["latency"]["batch"] == 2


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder with a saved model, a photo and a file that is none."""
    save(tiny_vit(num_classes=3), tmp_path / "model", labels=["cat", "dog", "[bold]bird"], licence="MIT")
    Image.new("RGB", (60, 40), (200, 30, 30)).save(tmp_path / "red.png")
    (tmp_path / "page.jpg").write_text("<!doctype html><html></html>")
    return tmp_path


def test_inspect(pets: Path) -> None:
    answer = patchlight("inspect", "model", cwd=pets)
    assert (answer.returncode, answer.stderr) == (0, "")
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert ["licence", "MIT"] in rows
    assert ["num_heads", "2", "config.json"] in rows
    assert ["interpolation", "bicubic"] in rows
    values = json.loads(patchlight("inspect", "model", "--set", "num_classes=7", "--json", cwd=pets).stdout)
    assert values["config"]["num_classes"] == 7
    assert values["notes"] == ["a fresh head of 7 classes in place of its 3 classes"]
    assert len(values["sha256"]) == 64


def test_models(tmp_path: Path) -> None:
    answer = patchlight("models", "dinov2", "registers", cwd=tmp_path)
    assert "dinov2-with-registers-small" in answer.stdout
    assert "clip" not in answer.stdout
    rows = json.loads(patchlight("models", "--json", cwd=tmp_path).stdout)
    assert {"name", "hub", "about", "licence", "settings", "preprocess"} == set(rows[1])
    assert (rows[0]["name"], "inside the package" in rows[0]["about"]) == ("default", True)


def test_classify(pets: Path) -> None:
    one = patchlight("classify", "red.png", "--model", "model", "--device", "cpu", cwd=pets)
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout.startswith("red.png: ")
    assert "[bold]bird" in one.stdout
    several = patchlight("classify", "page.jpg", "red.png", "absent.png", "--model", "model", "--json", cwd=pets)
    assert several.returncode == 3
    rows = [json.loads(line) for line in several.stdout.splitlines()]
    assert [(row["path"], row["status"]) for row in rows] == [
        ("page.jpg", "error"),
        ("red.png", "ok"),
        ("absent.png", "error"),
    ]
    assert rows[0]["reason"] == "not-an-image"
    assert sum(each["probability"] for each in rows[1]["classes"]) == pytest.approx(1, abs=1e-4)
    assert len(rows[1]["preprocess_fingerprint"]) == 12


@pytest.mark.parametrize("command", ["", "crop", "train", "serve", "evaluate"])
def test_flags_read_as_flags(command: str, tmp_path: Path) -> None:
    shown = patchlight(*([command] if command else []), "--help", cwd=tmp_path).stdout
    assert "--help" in shown
    assert "bool" not in shown
    assert "--no-resume" not in shown
    assert "--version" in shown or "<str>" in shown or "TEXT" in shown  # what takes a value says so


def test_classify_says_first_what_is_sure(pets: Path) -> None:
    cat = str(DEMO / "chelsea.png")
    (row,) = map(json.loads, patchlight("classify", cat, "--json", cwd=pets).stdout.splitlines())
    assert row["group"] == "animal"
    one = patchlight("classify", cat, "--top", "1", cwd=pets)
    sure = f"animal {row['group_confidence']:.1%}"
    if row["label"] is not None:
        sure += f", {row['label']} {row['label_confidence']:.1%}"
    best = row["classes"][0]
    assert one.stdout == f"{cat}: {sure}; likeliest: {best['name']} {best['probability']:.1%}\n"
    assert "animal, animal/bird" in patchlight("inspect", "default", cwd=pets).stdout


def test_a_bad_photo_or_model_is_one_line(pets: Path) -> None:
    for arguments, says in (
        (("classify", "page.jpg", "--model", "model"), "page.jpg: not-an-image"),
        (("classify", "red.png", "--model", "model", "--device", "meta"), "--device meta does not compute here"),
        (("classify", "red.png", "--model", "absent"), "absent: no such file, folder or catalogue name"),
        (("classify", "red.png", "--model", "page.jpg"), "page.jpg: an HTML page, not a checkpoint"),
        (("classify", "red.png", "--model", "model", "--set", "num_classes=0"), "has no head to classify with"),
        (("inspect", "model", "--set", "width=3"), "not divisible"),
        (("models", "zebra"), "no checkpoint matches 'zebra'"),
    ):
        answer = patchlight(*arguments, cwd=pets)
        assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1), answer.stderr
        assert says in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["--nonsense"], "No such option: --nonsense"),
        (["costs"], "Missing argument 'MODEL'"),
        (["costs", "X/16"], "unknown variant 'X/16'"),
        (["costs", "B/16", "--image-size", "225"], "224x224 would do"),
        (["costs", "B/16", "--image-size", "big"], "image size 'big' is not a size"),
        (["costs", "B/16", "--image-size", "-3"], "image size '-3' is not a size"),
        (["costs", "B/16", "--image-size", "2x"], "'2x' is not a size"),
        (["costs", "B/16", "--set", "widht=3"], "did you mean 'width'?"),
        (["costs", "B/16", "--set", "width"], "write NAME=VALUE"),
        (["costs", "B/16", "--set", "image_size=[1,2,3]"], "image_size=(1, 2, 3) should be"),
        (["costs", "B/16", "--time", "--device", "nonsense"], "--device nonsense"),
        (["costs", "B/16", "--batch", "0"], "--batch"),
        (["costs", "absent.json"], "absent.json: cannot be read"),
        (["costs", "broken.json"], "broken.json: the config is not valid JSON"),
        (["costs", "folder.json"], "folder.json: cannot be read"),
        (["costs", "binary.json"], "binary.json: cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"width": ')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    answer = patchlight(*arguments, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.count("\n") == 1
    assert answer.stderr.startswith("patchlight: ")
    assert says in answer.stderr


def test_a_usage_mistake_leads_to_the_help_of_its_command(tmp_path: Path) -> None:
    answer = patchlight("crop", "photos", cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.rstrip().endswith("Try 'patchlight crop --help'.")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("def config():\n    return 1 / 0\n", "its config() failed (ZeroDivisionError: division by zero, line 2)"),
        ("x = 1\ny = [][x]\n", "cannot be run (IndexError: list index out of range, line 2)"),
    ],
)
def test_a_recipe_that_fails_is_one_line(tmp_path: Path, recipe: str, said: str) -> None:
    (tmp_path / "bad.py").write_text(recipe)
    answer = patchlight("train", "bad.py", "--out", "run", cwd=tmp_path)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
