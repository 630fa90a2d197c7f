"""Training as a user runs it: the command, stopped and resumed, mistakes in one line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import patchlight
from models_at_random import tiny_vit
from patchlight import reporting
from patchlight.commands import train as train_command
from patchlight.training.checkpoint import fingerprint
from patchlight.weights.load import load
from patchlight.weights.save import save
from warm_python import WarmPython, run_two

RECIPE = """
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.training.config import DataConfig, TrainConfig


def config():
    return TrainConfig(
        model=ViTConfig(image_size=16, patch_size=8, width=16, depth=1, num_heads=2, num_classes=2),
        data=DataConfig(train="photos", workers=0),
        preprocess=PreprocessConfig(image_size=16),
        epochs=20.0,
        batch_size=4,
        log_every=5,
    )
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name, level in {"dark": 0, "light": 120}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(10):
            pixels = generator.integers(level, level + 120, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.png")
    (tmp_path / "recipe.py").write_text(RECIPE)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return patchlight(*arguments, cwd=folder)


def test_train_evaluate_and_load(folder: Path) -> None:
    done = run(folder, "train", "recipe.py", "--set", "optim.lr=3e-3", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run: accuracy ")
    assert "18 photos to learn from, 2 to judge by, 2 classes" in done.stderr
    assert load(folder / "run").labels == ("dark", "light")
    judged = run(folder, "evaluate", "run", "photos", "--json")
    assert judged.returncode == 0, judged.stderr
    assert json.loads(judged.stdout)["accuracy"] >= 0.9
    assert "there is no run to resume" not in done.stderr
    again = run(folder, "train", "recipe.py", "--out", "run")
    assert again.returncode == 2
    assert again.stderr == "patchlight: run: holds a run already; go on with --resume, or name another folder\n"


def test_stopped_by_a_signal_it_says_how_to_go_on(folder: Path) -> None:
    long = ["train", "recipe.py", "--set", "epochs=60", "--set", "checkpoint_every=20"]
    with WarmPython(["-m", "patchlight", *long, "--out", "stopped"], cwd=folder) as process:
        metrics = folder / "stopped" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "\npatchlight: stopping as soon as all is saved; a second time stops at once\n" in error
    assert error.endswith("; run it again with --resume to continue\n")
    judged = run(folder, "evaluate", "stopped", "photos")
    assert (judged.returncode, judged.stderr.count("\n")) == (2, 1)
    assert "stopped: this run is not finished; resume the training first" in judged.stderr
    assert run(folder, *long, "--out", "stopped", "--resume").returncode == 0
    assert run(folder, *long, "--out", "whole").returncode == 0
    ended = [fingerprint(load(folder / name).model.state_dict()) for name in ("stopped", "whole")]
    assert ended[0] == ended[1]


def test_a_run_that_is_not_there_is_begun_aloud(folder: Path) -> None:
    done = run(folder, "train", "recipe.py", "--out", "rum", "--resume", "--set", "epochs=1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("rum: there is no run to resume; starting one\n")


def test_without_a_terminal_progress_is_told_in_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(reporting, "SECONDS_BETWEEN_LINES", 0.0)
    train_command.train("recipe.py", folder / "told", ["log_every=1", "epochs=1"])
    assert re.search(
        r"^epoch 0\.9, step (\d) of \1: loss \d\.\d{3}  lr [\de.-]+  [\d,]+ images/s", capsys.readouterr().err, re.M
    )


def test_finetune_says_what_it_chose(folder: Path) -> None:
    save(tiny_vit(image_size=16, num_classes=0), folder / "start")
    done = run(folder, "finetune", "photos", "--model", "start", "--out", "mine", "--set", "epochs=30")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("20 photos in 2 classes: the head alone learns, on frozen features")
    mine = load(folder / "mine").model
    assert fingerprint(mine.blocks.state_dict()) == fingerprint(load(folder / "start").model.blocks.state_dict())


def test_folders_that_are_called_like_groups_make_a_detector_of_ones_own(folder: Path) -> None:
    """`patchlight finetune labelled/` and `patchlight crop --model`, and nothing else: no empty photo gets a box that
    counts, and none is `unsure` because of what it is called."""
    (folder / "photos" / "dark").rename(folder / "photos" / "empty")
    (folder / "photos" / "light").rename(folder / "photos" / "animal")
    done = run(folder, "finetune", "photos", "--out", "mine", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "groups by the names of the classes: animal and empty" in done.stderr
    groups = load(folder / "mine").groups
    assert groups is not None
    assert groups.paths == ("animal", "empty")
    command = ["photos", "--out", "found", "--model", "mine", "--boxes-only", "--format", "megadetector"]
    done = run(folder, "crop", *command, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "found" / "results.jsonl").read_text().splitlines()]
    assert {(Path(row["path"]).parent.name, row["group"]) for row in rows} == {("animal", "animal"), ("empty", "empty")}
    assert {row["decision"] for row in rows if row["group"] == "empty"} == {"none"}
    categories = json.loads((folder / "found" / "megadetector.json").read_text())["detection_categories"]
    assert list(categories.values()) == ["animal", "person", "vehicle"]


def test_finetune_is_resumed_as_it_was_begun(folder: Path) -> None:
    save(tiny_vit(image_size=16, num_classes=0), folder / "start")
    command = ["finetune", "photos", "--model", "start", "--out", "mine"]
    first = run(folder, *command, "--set", "epochs=3", "--set", "trainable_blocks=1")
    assert first.returncode == 0, first.stderr
    assert first.stderr.startswith("20 photos in 2 classes: the last 1 of 3 blocks learn, ")
    assert "; 3 epochs, batches of 8\n" in first.stderr
    again = run(folder, *command, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stderr.splitlines()[0] == first.stderr.splitlines()[0]
    for name in ("dark", "light"):
        for number in range(5):
            Image.new("RGB", (24, 20), (number, 0, len(name))).save(folder / "photos" / name / f"more {number}.png")
    more = run(folder, *command, "--resume")
    assert more.returncode == 2
    line = "patchlight: photos: the training photos have changed since mine was started; restore them"
    assert line in more.stderr


TEACHER = """

def teacher(out, device, config):
    from pathlib import Path

    import torch

    file = Path(out).absolute().with_suffix(".teacher")
    if not file.exists():
        with Path("trained.txt").open("a") as times:
            times.write("once ")
        file.touch()
    return lambda images: torch.zeros(len(images), 2)
"""


@pytest.fixture
def taught(folder: Path) -> Path:
    distilled = RECIPE.replace("num_classes=2", "num_classes=2, distill_token=True, class_token=True").replace(
        "epochs=20.0", 'epochs=2.0,\n        distill=DistillConfig(teacher="its own")'
    )
    (folder / "taught.py").write_text(
        distilled.replace("import DataConfig", "import DataConfig, DistillConfig") + TEACHER
    )
    return folder


def test_a_recipes_own_teacher_is_asked_for_once_the_run_can_begin(taught: Path) -> None:
    (taught / "taken").mkdir()
    (taught / "taken" / "thesis.txt").touch()
    done = run(taught, "train", "taught.py", "--out", "taken")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not (taught / "trained.txt").exists()
    named = run(taught, "train", "taught.py", "--out", "named", "--set", "distill.teacher=nowhere")
    assert named.returncode == 2
    assert "nowhere" in named.stderr
    alone = ["--set", "distill=null", "--set", "epochs=1"]
    assert run(taught, "train", "taught.py", "--out", "alone", *alone).returncode == 0
    assert not (taught / "trained.txt").exists()
    (taught / "taught.py").write_text((taught / "taught.py").read_text().replace("images), 2)", "images), 3)"))
    other = run(taught, "train", "taught.py", "--out", "other")
    assert "the teacher answers 2 images with [2, 3], not with logits [2, 2]" in other.stderr
    assert not (taught / "other").exists()


def test_several_processes_say_everything_once(taught: Path) -> None:
    def several(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, "patchlight", *arguments], cwd=taught, capture_output=True, text=True, env=environment
        )

    done = several("train", "taught.py", "--out", "two")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert (taught / "trained.txt").read_text() == "once "
    again = several("train", "taught.py", "--out", "two")
    assert again.stderr.count("two: holds a run already") == 1
    assert "[rank" not in again.stderr
    assert "exitcode  : 2 " in again.stderr
    save(tiny_vit(image_size=16, num_classes=0), taught / "start")
    tune = ["finetune", "photos", "--model", "start", "--out", "mine", "--set", "epochs=1"]
    tuned = run_two(["-m", "patchlight", *tune], cwd=taught)
    assert tuned.returncode == 0, tuned.stderr
    assert tuned.stderr.count("20 photos in 2 classes") == 1


def test_classes_are_printed_whatever_the_terminal_takes(folder: Path) -> None:
    (folder / "photos" / "dark").rename(folder / "photos" / "größer")
    assert run(folder, "train", "recipe.py", "--out", "run", "--set", "epochs=1").returncode == 0
    command = [sys.executable, "-m", "patchlight", "evaluate", "run", "photos"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfer" in done.stdout


def test_a_table_of_which_one_class_is_left_says_so(folder: Path) -> None:
    (folder / "lost.csv").write_text("file,label\nphotos/dark/0.png,dark\ngone.png,light\n")
    done = run(folder, "finetune", "lost.csv", "--out", "run")
    assert done.returncode == 2
    assert "one class, 'dark' (lost.csv: no photo of the class 'light' is there (1 rows)" in done.stderr


def test_one_class_is_refused_before_anything_is_chosen(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "photos" / "dark", tmp_path / "one" / "dark")
    done = run(tmp_path, "finetune", "one", "--out", "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("patchlight: one: all photos are of one class, 'dark'; add photos of another class\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "no.py", "--out", "run"], "no.py: there is no such recipe"),
        (["train", "recipe.py", "--set", "optim.rate=1", "--out", "run"], "unknown setting 'rate' for OptimConfig"),
        (["train", "recipe.py", "--set", "lr=1", "--out", "run"], "unknown setting 'lr' of a run; did you mean"),
        (
            ["train", "recipe.py", "--set", "data.train=nowhere", "--out", "run"],
            "; set data.train to the photos to learn from",
        ),
        (["train", "recipe.py", "--set", "data.train=", "--out", "run"], "data.train is empty; give a path"),
        (["train", "recipe.py", "--device", "meta", "--out", "run"], "--device meta does not compute here"),
        (["train", "recipe.py", "--set", "data.train=a/cifar10", "--out", "run"], "recipes/fetch_cifar10.py a/cifar10"),
        (["evaluate", "default", "photos", "--device", "gpu"], "--device gpu does not compute here"),
        (["train", "recipe.py", "--device", "abacus", "--out", "run"], "--device abacus does not compute here"),
        (["train", "recipe.py", "--out", "recipe.py"], "recipe.py: "),
        (["finetune", "photos", "--model", "nowhere", "--out", "run"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(folder: Path, arguments: list[str], message: str) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (folder / "run").exists()
