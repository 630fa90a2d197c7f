"""Runs that are stopped anywhere and resumed end with the very weights of those that are not."""

import json
import os
import random
import shutil
import signal
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coloured_photos import write_coloured_photos
from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig, SubjectHeat, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig
from patchlight.models.vit import ViT
from patchlight.reporting import Reporter
from patchlight.signals import Stopped
from patchlight.training import loop
from patchlight.training.checkpoint import fingerprint
from patchlight.training.config import DataConfig, DistillConfig, OptimConfig, TrainConfig
from patchlight.training.evaluate import evaluate_photos
from patchlight.training.features import evaluate_features
from patchlight.training.finished import install_default
from patchlight.training.loop import train
from patchlight.training.objective import Classification, distillation_loss
from patchlight.weights.load import load
from patchlight.weights.save import save
from warm_python import WarmPython, run_two

STEPS = 12


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coloured_photos(tmp_path_factory.mktemp("photos"), 24, 20)


def settings(photos: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=ViTConfig(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, num_classes=3, drop_path=0.2),
        data=DataConfig(train=str(photos), workers=0, validation_share=0.25),
        preprocess=PreprocessConfig(image_size=16, crop_pct=0.9),
        augment=AugmentConfig(crop="resized", area=(0.5, 1.0), colour=0.2, mix=0.5, mixup=0.5, cutmix=1.0, erase=0.2),
        optim=OptimConfig(name="muon", lr=1e-2),
        epochs=STEPS * 8 / 27,
        batch_size=8,
        ema=0.9,
        checkpoint_every=5,
        log_every=1,
    )
    return config.changed(changes)


def weights(folder: Path) -> str:
    return fingerprint(load(folder).model.state_dict())


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = train(settings(photos), folder)
    assert result.photos == 9
    return folder


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody presses Ctrl-C, or the machine is wanted back, while a step is under way."""
    prepare, calls = Classification.prepare, [0]

    def interrupted(self: Classification, *arguments: Any, **named: Any) -> Any:
        if calls[0] == step:
            os.kill(os.getpid(), random.choice([signal.SIGINT, signal.SIGTERM]))
        calls[0] += 1
        return prepare(self, *arguments, **named)

    monkeypatch.setattr(Classification, "prepare", interrupted)


def test_photos_that_lie_apart_are_judged_by(photos: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    for index in range(12):
        for name in ("red", "green", "blue"):
            part = parts / ("val" if index < 3 else "train") / name
            part.mkdir(parents=True, exist_ok=True)
            (part / f"{index}.png").symlink_to(photos / name / f"{index}.png")
    lines: list[str] = []
    config = settings(parts, epochs=0.5)
    assert train(config, tmp_path / "run", reporter=Reporter(tell=lines.append)).photos == 9
    assert "27 photos to learn from, 9 to judge by, 3 classes" in lines
    assert f"On 9 photos of {parts.name}" in (tmp_path / "run" / "README.md").read_text()
    again = train(config, tmp_path / "run", resume=True)
    assert again.photos == 9

    assert train(settings(parts / "train", epochs=0.5), tmp_path / "alone").photos == 6  # a quarter is held out
    for path in (parts / "val").rglob("*.png"):
        path.rename(parts / "val" / f"{path.parent.name}{path.name}")
    for folder in ("red", "green", "blue"):
        (parts / "val" / folder).rmdir()
    with pytest.raises(PatchlightError, match="give the folder of its training part alone, of which some"):
        train(config, tmp_path / "flat")


def test_a_run_leaves_a_model_and_its_story(whole: Path) -> None:
    loaded = load(whole)
    assert loaded.labels == ("blue", "green", "red")
    assert loaded.preprocess.config.crop_pct == 0.9
    assert len(losses(whole)) == STEPS
    assert (whole / "curves.png").stat().st_size > 10_000
    assert "blue" in (whole / "README.md").read_text()
    names = {path.name for path in (whole / "checkpoints").iterdir()}
    assert sum(name.endswith(".safetensors") for name in names) == 2


@pytest.mark.parametrize("seed", range(20))
def test_stopped_and_resumed_is_never_stopped(
    seed: int, whole: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, config = random.Random(seed), settings(photos)
    for _ in range(dice.choice([1, 1, 2])):
        with monkeypatch.context() as patch:
            stop_at(dice.randrange(STEPS - 2), patch)
            workers = {"data.workers": dice.choice([0, 0, 1]), "checkpoint_every": dice.choice([1, 5, 100])}
            try:
                train(config.changed(workers), tmp_path, resume=(tmp_path / "run.json").exists())
            except Stopped as stopped:
                assert stopped.signal in (signal.SIGINT, signal.SIGTERM)  # noqa: PT017
    train(config, tmp_path, resume=True)
    assert weights(tmp_path) == weights(whole)
    assert losses(tmp_path) == losses(whole)


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from patchlight.training.config import TrainConfig
from patchlight.training.loop import train
from pathlib import Path
config = TrainConfig.from_json(Path(sys.argv[1]).read_text())
Path(sys.argv[3]).touch()
train(config, sys.argv[2], resume=True)
"""


def test_killed_without_warning_it_goes_on_too(whole: Path, photos: Path, tmp_path: Path) -> None:
    config = settings(photos, checkpoint_every=1)
    (tmp_path / "config.json").write_text(config.to_json())
    run, started, dice = tmp_path / "run", tmp_path / "started", random.Random(0)
    for _ in range(3):
        started.unlink(missing_ok=True)
        with WarmPython(["-c", SCRIPT, tmp_path / "config.json", run, started]) as process:
            while not started.exists():
                time.sleep(0.01)
            time.sleep(dice.uniform(0.05, 1.2))
            process.kill()
    train(config, run, resume=True)
    assert weights(run) == weights(whole)


def test_a_damaged_checkpoint_is_passed_over_aloud(whole: Path, photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        stop_at(7, patch)
        with pytest.raises(Stopped):
            train(settings(photos, checkpoint_every=3), tmp_path)
    newest = max((tmp_path / "checkpoints").glob("step-*7.safetensors"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    told: list[str] = []
    train(settings(photos, checkpoint_every=3), tmp_path, resume=True, reporter=Reporter(tell=told.append))
    assert any("damaged" in line and "step-00000006" in line for line in told)
    assert weights(tmp_path) == weights(whole)


def test_losses_that_are_no_numbers_are_left_out_and_stop_the_run_if_they_stay(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, bad = Classification.forward, {3, 4, 7}
    calls = [0]

    def poisoned(self: Classification, *inputs: Tensor) -> Tensor:
        calls[0] += 1
        return loss(self, *inputs) * (torch.nan if calls[0] in bad else 1.0)

    monkeypatch.setattr(Classification, "forward", poisoned)
    told: list[str] = []
    train(settings(photos, bad_losses=3), tmp_path / "some", reporter=Reporter(tell=told.append))
    assert [line.split(":")[0] for line in told if "step skipped" in line] == ["step 3", "step 4", "step 7"]
    model = load(tmp_path / "some").model
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    bad |= set(range(1, 1000))
    with pytest.raises(
        PatchlightError, match="3 losses in a row were NaN or infinite, the last at step 3; lower optim\\.lr"
    ):
        train(settings(photos, bad_losses=3), tmp_path / "all")
    assert not (tmp_path / "all" / "model.safetensors").exists()


def test_gradients_that_are_no_numbers_never_reach_the_weights(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, calls = Classification.forward, [0]

    def steep(self: Classification, *inputs: Tensor) -> Tensor:
        calls[0] += 1
        value = loss(self, *inputs)
        if calls[0] == 4:  # finite, with a slope that is not: the root at zero
            value = value + (self.vit.class_token * 0).sum().abs().sqrt()
        return value

    monkeypatch.setattr(Classification, "forward", steep)
    told: list[str] = []
    train(settings(photos, checkpoint_every=1), tmp_path, reporter=Reporter(tell=told.append))
    assert [line.split(":")[0] for line in told if "step skipped" in line] == ["step 4"]
    assert all(parameter.isfinite().all() for parameter in load(tmp_path).model.parameters())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["left_out"] for row in rows if "left_out" in row] == [0] * 3 + [1] * (STEPS - 3)
    assert "1 steps were skipped" in (tmp_path / "README.md").read_text()


def test_a_finished_run_is_judged_again_and_says_so_once(whole: Path, photos: Path) -> None:
    before = (whole / "metrics.jsonl").read_text()
    train(settings(photos), whole, resume=True)
    assert (whole / "metrics.jsonl").read_text() == before


def test_a_group_of_processes_is_stopped_and_nothing_lost(whole: Path, photos: Path, tmp_path: Path) -> None:
    config = settings(photos, **{"data.workers": 2, "checkpoint_every": 1000})
    (tmp_path / "config.json").write_text(config.to_json())
    (tmp_path / "script.py").write_text(f"if __name__ == '__main__':\n{textwrap.indent(SCRIPT, '    ')}")
    run, started = tmp_path / "run", tmp_path / "started"
    command = [tmp_path / "script.py", tmp_path / "config.json", run, started]
    with WarmPython(command, start_new_session=True) as process:
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        _, error = process.communicate()
    if process.returncode:  # it may just have been done
        assert "resume=True" in error
        assert (run / "checkpoints" / "checkpoints.json").exists()
    train(settings(photos), run, resume=True)
    assert weights(run) == weights(whole)


def test_tensorboard_hears_of_it_where_it_is_installed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, path: Path) -> None:
            assert path == tmp_path / "run" / "tensorboard"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            heard.append((name, value, step))

        def flush(self) -> None:
            pass

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    train(settings(photos), tmp_path / "run")
    assert [value for name, value, _ in heard if name == "loss"] == losses(tmp_path / "run")
    assert max(step for name, _, step in heard if name == "accuracy") == STEPS


def test_lines_of_metrics_are_the_same_after_a_stop(photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    config = settings(photos, log_every=5)
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(6, patch)
        with pytest.raises(Stopped):
            train(config, tmp_path / "stopped")
    train(config, tmp_path / "stopped", resume=True)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_folder_is_not_taken_twice(whole: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match="holds a run already; go on with resume=True"):
        train(settings(photos), whole)
    with pytest.raises(PatchlightError, match=r"was started with optim.lr=0.01, not 0.5"):
        train(settings(photos, **{"optim.lr": 0.5}), whole, resume=True)
    longer = settings(photos, epochs=9)
    with pytest.raises(PatchlightError, match=f"epochs=.*, not 9, .*; learn on from its model .* set start={whole}"):
        train(longer, whole, resume=True)
    told: list[str] = []
    train(longer.changed({"start": str(whole), "epochs": 0.3}), tmp_path / "on", reporter=Reporter(tell=told.append))
    assert not any("a fresh head" in line for line in told)
    tmp_path = tmp_path / "other"
    tmp_path.mkdir()
    distilled = settings(photos, **{"distill.teacher": "x", "model.distill_token": True})
    with pytest.raises(PatchlightError, match=r"was started with distill"):
        train(distilled, whole, resume=True)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(PatchlightError, match=r"holds thesis.txt, but no run"):
        train(settings(photos), tmp_path)
    with loop.RunFolder(whole).held(), pytest.raises(PatchlightError, match="another process is working there"):
        train(settings(photos), whole, resume=True)


def test_other_photos_are_noticed(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(Stopped):
            train(settings(copy), tmp_path / "run")
    for path in (copy / "red").glob("*.png"):
        path.write_bytes(path.read_bytes() + b"changed")
    with pytest.raises(
        PatchlightError, match=r"photos: the training photos have changed since .*run was started; restore th"
    ):
        train(settings(copy), tmp_path / "run", resume=True)


def test_unreadable_photos_are_said_and_left_out(photos: Path, tmp_path: Path) -> None:
    copy = tmp_path / "photos"
    shutil.copytree(photos, copy)
    (copy / "red" / "empty.png").touch()
    told: list[str] = []
    result = train(settings(copy), tmp_path / "run", reporter=Reporter(tell=told.append))
    assert any("empty.png" in line for line in told)
    assert any("27 photos to learn from, 9 to judge by, 3 classes" in line for line in told)
    assert result.photos == 9


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_learn_as_one(photos: Path, tmp_path: Path, sharded: bool) -> None:
    changes: dict[str, Any] = {"model.drop_path": 0.0, "sharded": sharded, "accumulate": 2}
    if sharded:
        changes |= {"ema": None, "optim.name": "adamw"}
    config = settings(photos, **changes)
    train(config.changed({"accumulate": 1}), tmp_path / "one")
    (tmp_path / "config.json").write_text(config.to_json())
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["script.py", "config.json", "two", "started"]
    done = run_two(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)
    before = weights(tmp_path / "two")
    index = tmp_path / "two" / "checkpoints" / "checkpoints.json"
    kept = [entry for entry in json.loads(index.read_text()) if entry["step"] == 10]
    index.write_text(json.dumps(kept))
    done = run_two(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "two") == before
    index.write_text(json.dumps(kept[:1]))  # and with fewer processes than it was begun with
    train(config, tmp_path / "two", resume=True)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)
    for ours, theirs in zip(*(load(tmp_path / name).model.parameters() for name in ("one", "two")), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_distillation_teaches_the_second_head(photos: Path, tmp_path: Path) -> None:
    config = settings(photos, epochs=30.0, ema=None, **{"model.distill_token": True, "model.drop_path": 0.0})
    config = config.changed({"distill.teacher": "given", "distill.share": 0.5, "augment.mix": 0.0})

    def always_green(images_BCHW: Tensor) -> Tensor:
        return torch.tensor([0.0, 5.0, 0.0]).expand(len(images_BCHW), 3)

    train(config, tmp_path, teacher=always_green)
    loaded = load(tmp_path)
    red, _ = loaded.preprocess(photos / "red" / "0.png")
    told, taught = loaded.model.both_logits(red[None])
    assert told.argmax() == loaded.labels.index("red")  # type: ignore[union-attr]
    assert taught.argmax() == loaded.labels.index("green")  # type: ignore[union-attr]
    torch.testing.assert_close(loaded.model(red[None]), (told + taught) / 2)


def test_distillation_losses_by_hand() -> None:
    student, teacher = torch.randn(4, 5), torch.randn(4, 5)
    hard = distillation_loss(student, teacher, DistillConfig(teacher="x", kind="hard"))
    p, q = (np.exp(x.double().numpy() / 2.0) for x in (student, teacher))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    soft = distillation_loss(student, teacher, DistillConfig(teacher="x", kind="soft", temperature=2.0))
    assert float(soft) == pytest.approx(4 * (q * np.log(q / p)).sum(1).mean(), rel=1e-5)
    first = np.exp(student.double().numpy())
    chosen = (first / first.sum(1, keepdims=True))[range(4), teacher.argmax(1)]
    assert float(hard) == pytest.approx(-np.log(chosen).mean(), rel=1e-5)


def test_a_checkpoint_is_fine_tuned_from_the_end(photos: Path, tmp_path: Path) -> None:
    start = tiny_vit(image_size=16, num_classes=0)
    save(start, tmp_path / "start")
    model = {f"model.{name}": value for name, value in start.config.to_dict().items() if name != "architecture"}
    changes = model | {"model.num_classes": 3, "start": str(tmp_path / "start"), "trainable_blocks": 1, "ema": None}
    train(settings(photos, **changes), tmp_path / "run")
    ended = load(tmp_path / "run").model
    assert fingerprint(ended.blocks[:2].state_dict()) == fingerprint(start.blocks[:2].state_dict())
    assert torch.equal(ended.patch_embed.proj.weight, start.patch_embed.proj.weight)
    assert fingerprint(ended.blocks[2].state_dict()) != fingerprint(start.blocks[2].state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_classes": 4}, "has 3 classes, the model 4; set model.num_classes=3"),
        ({"data.train": "nowhere"}, "nowhere"),
        ({"start": "nowhere"}, "nowhere"),
        ({"data.validation_share": 0.0}, "leaves no photos to judge by"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    photos: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PatchlightError, match=message):
        train(settings(photos, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_saves_the_groups_of_its_classes(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "groups.csv"
    table.write_text("label,group\nred,warm/fire\n*e*,cold\n")
    config = settings(photos, epochs=0.3, **{"data.groups": str(table)})
    told: list[str] = []
    train(config, tmp_path / "run", reporter=Reporter(tell=told.append))
    assert not [line for line in told if "groups.csv" in line]
    groups = load(tmp_path / "run").groups
    assert groups is not None
    assert dict(zip(groups.labels, groups.paths, strict=True)) == {"blue": "cold", "green": "cold", "red": "warm/fire"}
    table.write_text("label,group\nred,hot\n")
    install_default(tmp_path / "run", tmp_path / "assets", groups=table, reporter=Reporter(tell=told.append))
    assert f"{table}: no row fits 'blue', 'green' of the 3 classes, so they are unknown" in told
    groups = load(tmp_path / "assets" / "default").groups
    assert groups is not None
    assert groups.paths == ("unknown", "unknown", "hot")
    with pytest.raises(PatchlightError, match="cannot be read"):
        train(settings(photos, **{"data.groups": "absent.csv"}), tmp_path / "none")
    assert not (tmp_path / "none" / "run.json").exists()


def test_a_head_alone_leaves_the_model_looking_where_it_did(photos: Path, tmp_path: Path) -> None:
    config = settings(photos, epochs=0.3, start=str(tmp_path / "start"), trainable_blocks=0)
    subject = SubjectHeat(scale=0.7, bias=-0.4)
    save(ViT(config.model), tmp_path / "start", preprocess=config.preprocess, subject=subject)
    train(config, tmp_path / "head")
    assert load(tmp_path / "head").subject == subject
    told: list[str] = []
    train(config.changed({"trainable_blocks": 1}), tmp_path / "block", reporter=Reporter(tell=told.append))
    assert load(tmp_path / "block").subject is None
    assert any("how the checkpoint finds subjects is not kept" in line for line in told)
    told.clear()
    train(config.changed({"preprocess.crop_pct": 0.8}), tmp_path / "otherwise", reporter=Reporter(tell=told.append))
    assert any("how the checkpoint finds subjects is not kept" in line for line in told)
    assert load(tmp_path / "otherwise").subject is None


def test_evaluating_on_training_photos_says_so(photos: Path, tmp_path: Path) -> None:
    train(settings(photos, epochs=0.3), tmp_path / "run")
    loaded = load(tmp_path / "run")
    report = evaluate_photos(loaded, photos, workers=0)
    assert report.problems[0].startswith("27 of the 36 photos were trained on")
    # Known again by content: under other names, and beside photos that it never saw.
    moved = tmp_path / "moved"
    for place, path in enumerate(sorted(photos.rglob("*.png"))):
        copy = moved / path.parent.name / f"copy {place}.png"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "others").mkdir()
    others = write_coloured_photos(tmp_path / "others", 26, 20)
    assert evaluate_photos(loaded, moved, workers=0).problems == report.problems
    assert evaluate_features(loaded, moved, train=others, workers=0).problems[0] == report.problems[0]
    assert evaluate_photos(loaded, others, workers=0).problems == ()
    (tmp_path / "run" / "trained_on.hashes").unlink()  # as of a run of before
    assert evaluate_photos(loaded, photos, workers=0).problems == ()
