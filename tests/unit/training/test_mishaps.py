"""What goes wrong in a run is one line that names the remedy, and the run goes on from there."""

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from coloured_photos import write_coloured_photos
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.files import replacing
from patchlight.images import decode
from patchlight.models.vit import ViT
from patchlight.reporting import Progress, Reporter
from patchlight.signals import STOPPING, Stopped
from patchlight.training import loop, run_folder, setup
from patchlight.training.checkpoint import fingerprint
from patchlight.training.config import DataConfig, TrainConfig
from patchlight.training.loop import StepProgress, train
from patchlight.training.objective import Classification
from patchlight.training.optim import learning_rate
from patchlight.training.scan import CHECKING
from patchlight.training.step import Step
from patchlight.weights import save
from patchlight.weights.load import load

STEPS = 6


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coloured_photos(tmp_path_factory.mktemp("photos"), 24, 20)


def settings(photos: Path, **changes: Any) -> TrainConfig:
    """Six steps of a model that is as small as can be."""
    config = TrainConfig(
        model=ViTConfig(image_size=16, patch_size=8, width=8, depth=1, num_heads=1, num_classes=3),
        data=DataConfig(train=str(photos), workers=0, validation_share=0.25),
        preprocess=PreprocessConfig(image_size=16),
        epochs=STEPS * 9 / 27,
        batch_size=9,
        checkpoint_every=3,
        log_every=1,
    )
    return config.changed(changes)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def stop_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does after this many steps."""
    forward, calls = Classification.forward, [0]

    def interrupted(self: Classification, *inputs: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, *inputs)

    patch.setattr(Classification, "forward", interrupted)


# Before the first step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_classes": 4}, r"has 3 classes, the model 4; set model\.num_classes=3"),
        ({"start": "nowhere"}, "nowhere"),
        ({"data.groups": "absent.csv"}, r"absent\.csv: cannot be read"),
        ({"sharded": True, "ema": 0.9}, "sharded=True goes with"),
        ({"model.distill_token": True, "distill.teacher": "nowhere"}, "nowhere"),
        ({"subject.canvas": 24}, "has no boxes; give a CSV with the columns file,label,x0,y0,x1,y1"),
    ],
)
def test_what_can_be_known_at_once_is_said_before_photos_are_read(
    changes: dict[str, Any], message: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "scan", lambda *given, **named: pytest.fail("all photos were read first"))
    with pytest.raises(PatchlightError, match=message):
        train(settings(photos, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_table_whose_photos_are_not_there_says_the_first(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    for rows, message in [
        ("a.jpg,x\nb.jpg,y\n", r"table\.csv: has no photos \(table\.csv line 2: a\.jpg .*\); a CSV's paths go from"),
        ("", r"table\.csv: has no photos; add some, or name another set$"),
    ]:
        table.write_text(f"file,label\n{rows}")
        with pytest.raises(PatchlightError, match=message):
            train(settings(table), tmp_path / "run")


def test_it_is_heard_how_many_photos_were_checked(photos: Path, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    reporter = Reporter(progress=lambda now: heard.append((now.done, now.total)) if now.what == CHECKING else None)
    train(settings(photos), tmp_path, reporter=reporter)
    assert heard[-1] == (36, 36)
    assert len(heard) > 1


def test_what_was_wrong_with_the_photos_stays_on_the_card(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    for name in ("a", "b"):
        (tmp_path / "photos" / "red" / f"{name}.png").write_bytes(b"no photo")
    shutil.copytree(photos / "red", tmp_path / "others" / "red")
    Image.new("RGB", (20, 20)).save(tmp_path / "others" / "red" / "new.png")
    told: list[str] = []
    config = settings(tmp_path / "photos", **{"data.validation": str(tmp_path / "others")})
    train(config, tmp_path / "run", reporter=Reporter(tell=told.append))
    assert "photos that cannot be read and were left out: 2" in told
    card = (tmp_path / "run" / "README.md").read_text()
    assert "photos that cannot be read and were left out\\: 2" in card
    assert "validation photos that are also among the training photos, which flatters the results\\: 12" in card


def test_a_checkpoint_of_other_classes_gets_a_fresh_head(photos: Path, tmp_path: Path) -> None:
    model = settings(photos).model
    assert isinstance(model, ViTConfig)
    start = ViT(model)
    assert start.head is not None
    torch.nn.init.normal_(start.head.out.weight)
    config = settings(photos, start=str(tmp_path / "start"))
    told: list[str] = []
    for names, fresh in ((["blue", "green", "red"], False), (["a", "green", "red"], True), (None, False)):
        save.save(start, tmp_path / "start", labels=names, overwrite=True)
        told.clear()
        vit, _ = setup.make_model(config, ("blue", "green", "red"), Reporter(tell=told.append))
        assert vit.head is not None
        assert (fingerprint(vit.head.state_dict()) != fingerprint(start.head.state_dict())) == fresh
        line = f"a fresh head in place of its own, for other classes: 'blue' where {tmp_path / 'start'} has 'a'"
        assert (line in told) == fresh
        assert fingerprint(vit.blocks.state_dict()) == fingerprint(start.blocks.state_dict())


# Metrics


def test_metrics_have_the_rate_and_the_speed_without_evaluations(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Classification.judge

    def slow(*given: Any) -> Any:
        time.sleep(3)
        return judge(*given)

    monkeypatch.setattr(Classification, "judge", slow)
    heard: list[Progress] = []
    config = settings(photos, evaluate_every=1.0)
    train(config, tmp_path, reporter=Reporter(progress=heard.append))
    assert sum("accuracy" in row for row in rows(tmp_path)) == 2
    losses = [row for row in rows(tmp_path) if "loss" in row]
    rates = [config.optim.lr * learning_rate(step, STEPS, config.optim) for step in range(STEPS)]
    assert [row["lr"] for row in losses] == pytest.approx(rates)
    assert [now.lr for now in heard if isinstance(now, StepProgress)] == pytest.approx(rates)
    assert min(row["images_per_second"] for row in losses) > 1.5 * 9 / 3


def test_metrics_that_somebody_damaged_do_not_keep_a_run_from_going_on(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        with pytest.raises(Stopped):
            train(settings(photos), tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('5\n{"a": 1}\n{"step": 3, "lo')
    train(settings(photos), tmp_path, resume=True)
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == list(range(1, STEPS + 1))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(PatchlightError, match=r"metrics\.jsonl: cannot be read \(Is a directory\); move it away"):
        train(settings(photos), tmp_path, resume=True)


# Checkpoints


def test_the_last_step_is_saved_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, steps = loop.write_checkpoint, []

    def noted(folder: Path, step: int, state: Any) -> Any:
        steps.append(step)
        return write(folder, step, state)

    monkeypatch.setattr(loop, "write_checkpoint", noted)
    train(settings(photos), tmp_path / "divided")
    train(settings(photos, checkpoint_every=4), tmp_path / "not")
    assert steps == [3, 6, 4, 6]


def test_checkpoints_without_their_index_are_not_thrown_away(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        with pytest.raises(Stopped):
            train(settings(photos), tmp_path)
    (tmp_path / "checkpoints" / "checkpoints.json").unlink()
    monkeypatch.setattr(setup, "scan", lambda *given, **named: pytest.fail("all photos were read first"))
    with pytest.raises(PatchlightError, match=r"checkpoints\.json: is missing.*; restore it, or start a new run"):
        train(settings(photos), tmp_path, resume=True)
    assert list((tmp_path / "checkpoints").glob("*.safetensors"))


def test_a_run_that_came_to_no_checkpoint_says_that_it_begins_anew(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Any:
        raise PatchlightError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_checkpoint", full)
        with pytest.raises(PatchlightError, match="the disk is full"):
            train(settings(photos), tmp_path)
    told: list[str] = []
    train(settings(photos), tmp_path, resume=True, reporter=Reporter(tell=told.append))
    assert f"{tmp_path}: had no checkpoint yet; starting from step 0" in told
    told.clear()
    train(settings(photos), tmp_path, resume=True, reporter=Reporter(tell=told.append))
    assert not any("step 0" in line for line in told)


def test_a_stop_before_the_first_step_leaves_nothing(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.check_photos

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "check_photos", interrupted)
        with pytest.raises(Stopped, match="run: stopped before its first step; run the same command again"):
            train(settings(photos), tmp_path / "run")
    train(settings(photos), tmp_path / "run")
    assert load(tmp_path / "run").labels == ("blue", "green", "red")


def test_a_stop_before_a_run_goes_on_does_not_speak_of_its_beginning(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(4, patch)
        with pytest.raises(Stopped):
            train(settings(photos), tmp_path)
    real = loop.check_photos

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "check_photos", interrupted)
        with pytest.raises(Stopped, match="stopped before it continued; run the same command again"):
            train(settings(photos), tmp_path, resume=True)
    told: list[str] = []
    train(settings(photos), tmp_path, resume=True, reporter=Reporter(tell=told.append))
    assert "continuing after step 4 of 6" in told


def test_a_stop_while_a_photo_is_read_is_not_the_photo_s_fault(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it was asked to stop")

    told: list[str] = []
    monkeypatch.setattr(decode, "_decode_open", interrupted)
    with pytest.raises(Stopped, match="stopped before its first step"):
        train(settings(photos), tmp_path / "run", reporter=Reporter(tell=told.append))
    assert told == []


def test_classes_that_have_lost_their_photos_are_named_where_they_are_missed(photos: Path, tmp_path: Path) -> None:
    rows = [f"{each.relative_to(photos)},{each.parent.name}" for each in sorted(photos.glob("*/*.png"))]
    table = photos / "lost.csv"
    table.write_text("\n".join(["file,label", *rows]).replace("blue/", "elsewhere/"))
    try:
        with pytest.raises(PatchlightError, match=r"has 2 classes, the model 3; bring photos back \(.*'blue' is there"):
            train(settings(table), tmp_path / "run")
    finally:
        table.unlink()


@pytest.mark.parametrize("compiled", [True, False])
def test_what_compiles_does_not_hear_ctrl_c(
    compiled: bool, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = []

    def learn(self: Step, inputs: Any, *, last: bool) -> float:
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, []) >= set(STOPPING))
        return real(self, inputs, last=last)

    real = Step.learn
    monkeypatch.setattr(Step, "learn", learn)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: None)
    train(settings(photos, compile=compiled), tmp_path / "run")
    assert blocked == [compiled] * STEPS


# The end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("where", "line"),
    [
        (where, "stopped after the last step; run it again with resume=True to evaluate and save the model")
        for where in ("write_checkpoint", "_judge", "save_finished")
    ],
)
def test_a_stop_after_the_last_step_says_how_to_go_on(
    number: signal.Signals, where: str, line: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(loop, where)

    def stopped(*given: Any) -> Any:
        if where != "write_checkpoint" or given[1] == STEPS:
            os.kill(os.getpid(), number)
        return real(*given)

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(loop, where, stopped)
        with pytest.raises(Stopped) as caught:
            train(settings(photos, evaluate_every=100.0), tmp_path)
    assert caught.value.signal == number
    assert str(caught.value) == f"{tmp_path}: {line}"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    train(settings(photos, evaluate_every=100.0), tmp_path, resume=True)
    assert load(tmp_path).labels == ("blue", "green", "red")


def test_answers_that_are_no_numbers_name_the_run_and_the_rate(photos: Path, tmp_path: Path) -> None:
    config = settings(photos, bad_losses=100, **{"optim.lr": 1e38, "optim.warmup": 0.0})
    with pytest.raises(
        PatchlightError, match=r"run: the model's output after step \d is NaN or infinite; lower optim\.lr"
    ):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("curves.png", run_folder, r"curves\.png: could not be written \(No space left on device\); free some space"),
        ("README.md", run_folder, r"README\.md: could not be written \(No space left on device\); free some space"),
        (
            "model.safetensors",
            save,
            r"model\.safetensors: could not be written .*; free some space and resume: no training",
        ),
    ],
)
def test_a_disk_that_is_full_at_the_end_is_said_and_the_run_resumed(
    name: str, module: Any, message: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> Any:
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replacing(path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "replacing", full)
        with pytest.raises(PatchlightError, match=message):
            train(settings(photos), tmp_path)
    train(settings(photos), tmp_path, resume=True)
    assert (tmp_path / name).exists()
