"""The recipes that measure, on a CIFAR-10 of a few photos and with models that learn in seconds."""

import functools
import importlib
import json
import os
import re
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from labelled_photos import save_photo
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig
from patchlight.reporting import Reporter
from patchlight.training import sources
from patchlight.training.loop import StepProgress, train
from patchlight.training.recipe import read_recipe
from patchlight.training.setup import check_photos, open_sets
from patchlight.training.sources import open_dataset

RECIPES = Path(__file__).parents[3] / "recipes"
TINY_VIT = [
    part
    for setting in ("model.width=16", "model.depth=1", "model.num_heads=1", "batch_size=20", "log_every=1")
    for part in ("--set", setting)
]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """The modules of recipes/, as they are when one of them is run."""
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """100 photos to learn from and 20 to test with, each class a bright square in a place of its own."""
    monkeypatch.setattr(sources, "_CIFAR10_IMAGES", 20)
    generator = np.random.default_rng(0)
    labels = np.concatenate([generator.permutation(np.arange(20) % 10) for _ in range(6)])
    images_NCHW = generator.uniform(-20, 20, (120, 3, 32, 32))
    for image_CHW, label in zip(images_NCHW, labels, strict=True):
        row, column = divmod(int(label), 5)
        image_CHW[:, 12 * row + 4 : 12 * row + 12, 6 * column + 1 : 6 * column + 6] += 100
    for part, means in ((slice(0, 100), (0.4914, 0.4822, 0.4465)), (slice(100, 120), (0.4942, 0.4851, 0.4504))):
        images_NCHW[part] += 255 * np.array(means).reshape(3, 1, 1) - images_NCHW[part].mean((0, 2, 3), keepdims=True)
    levels_NCHW = images_NCHW.round().astype(np.uint8)
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for place, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        records = [bytes([labels[i]]) + levels_NCHW[i].tobytes() for i in range(20 * place, 20 * place + 20)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    return str(folder)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def cells(text: str, first: str) -> list[list[str]]:
    """The cells of the table's lines that begin with this one."""
    found = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "|" in line]
    return [row for row in found if row[0] == first]


def in_percent(shares: list[float]) -> str:
    mean = statistics.mean(shares) * 100
    if len(shares) == 1:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {(sum((100 * x - mean) ** 2 for x in shares) / (len(shares) - 1)) ** 0.5:.2f}"


# The small ConvNet


def test_the_convnet_learns_and_a_seed_gives_the_same_again(recipe: Any, cifar10: str) -> None:
    small_cnn = recipe("small_cnn")
    training, test = open_dataset(cifar10), open_dataset(cifar10, "test")
    drawn_before = torch.random.get_rng_state()

    def weights(seed: int, epochs: float) -> tuple[list[torch.Tensor], float]:
        model, accuracy = small_cnn.train_cnn(
            training,
            test,
            epochs=epochs,
            device="cpu",
            seed=seed,
            width=4,
            batch_size=20,
            variations=AugmentConfig(crop="pad", pad=1, flip=False),
        )
        assert not model.training
        return list(model.state_dict().values()), accuracy

    _, accuracy = weights(0, 12)
    assert accuracy >= 0.9  # squares in ten places
    once, again, other = weights(0, 1)[0], weights(0, 1)[0], weights(1, 1)[0]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(once, other, strict=True))
    assert torch.equal(torch.random.get_rng_state(), drawn_before)


def test_the_convnets_accuracy_is_the_share_of_right_answers(recipe: Any, cifar10: str) -> None:
    small_cnn = recipe("small_cnn")
    test = open_dataset(cifar10, "test")
    model = small_cnn.SmallCNN(10, 4).eval()
    right = 0
    for image_CHW, label in zip(test.images_NCHW, test.labels_N, strict=True):
        right += int(model(image_CHW[None] / 255)[0].argmax() == label)
    assert small_cnn.accuracy(model, test, batch_size=7) == right / 20


def test_the_convnet_refuses_photos_in_files(recipe: Any, tmp_path: Path) -> None:
    for name in ("a/1.png", "b/1.png"):
        save_photo(tmp_path / name, 0)
    dataset = open_dataset(tmp_path)
    with pytest.raises(PatchlightError, match="lie in memory"):
        recipe("small_cnn").train_cnn(dataset, dataset, epochs=1, device="cpu", width=4)


def test_the_convnets_command(recipe: Any, cifar10: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [cifar10, "--device", "cpu", "--epochs", "1", "--seeds", "2", "--width", "4"]
    assert recipe("small_cnn").main(arguments) == 0
    assert re.findall(r"seed (\d): +\d+\.\d\d%", capsys.readouterr().out) == ["0", "1"]
    assert recipe("small_cnn").main([f"{cifar10}/nowhere"]) == 2


# Rows, kept as they finish

MEASURED = """
import os
from patchlight.errors import PatchlightError

def measure(task, *, fail=""):
    if task.row == fail:
        raise PatchlightError(f"{fail}: cannot be measured")
    return {"accuracy": 0.5, "seconds": 1.0, "process": os.getpid()}
"""


def test_rows_in_processes_are_kept_and_a_failure_costs_only_its_own(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measured_elsewhere.py").write_text(MEASURED)
    monkeypatch.syspath_prepend(tmp_path)
    measuring, measure = recipe("measuring"), recipe("measured_elsewhere").measure
    tasks = [measuring.Task(row, seed, {"epochs": 1.0}) for row in ("a", "b") for seed in (0, 1)]
    out = tmp_path / "out"
    with pytest.raises(PatchlightError, match="b: cannot be measured"):
        measuring.measure_all(out, tasks, functools.partial(measure, fail="b"), jobs=2)
    assert sorted((line["row"], line["seed"]) for line in lines(out)) == [("a", 0), ("a", 1)]
    assert all(line["process"] != os.getpid() and line["jobs"] == 2 for line in lines(out))

    kept = (out / "results.jsonl").read_text()
    (out / "results.jsonl").write_text(kept + '{"row": "b", "se')  # a kill in the middle of a line
    told: list[str] = []
    measuring.measure_all(out, tasks, measure, tell=told.append)
    assert (out / "results.jsonl").read_text().startswith(kept)
    assert [(line["row"], line["seed"]) for line in lines(out)[2:]] == [("b", 0), ("b", 1)]
    assert told[0] == "2 of 4 rows are measured already"

    with pytest.raises(PatchlightError, match=r"a was measured with epochs=1\.0, not 2\.0"):
        measuring.measure_all(out, [measuring.Task("a", 0, {"epochs": 2.0})], measure)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("ab", "one seed."),
        ("aabb", "mean ± standard deviation of 2 seeds."),
        ("aab", "mean ± standard deviation of 2 seeds, or of one seed where no deviation stands."),
    ],
)
def test_a_table_says_how_many_seeds_it_rests_on(recipe: Any, rows: str, said: str) -> None:
    assert recipe("measuring").accuracies_of([{"row": row} for row in rows]) == f"Accuracy in percent, {said}\n\n"


@pytest.mark.parametrize("name", ["ablations", "data_efficiency"])
def test_what_was_measured_is_what_the_page_says(recipe: Any, name: str) -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "training.md").read_text()
    results = recipe("measuring").read_results(root / "recipes" / "measured" / name)
    numbers = re.findall(r"\d\d\.\d\d", recipe(name).table(results))
    assert numbers
    for number in numbers:
        assert number in page or f"{float(number):.1f}" in page


# Ablations


def test_ablations_measure_every_row_once(
    recipe: Any, cifar10: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ablations, measuring, out = recipe("ablations"), recipe("measuring"), tmp_path / "out"
    command = [str(out), "--data", cifar10, "--device", "cpu", "--epochs", "2", *TINY_VIT]
    assert ablations.main([*command, "--rows", "baseline,position=none,registers=4"]) == 0
    results = {(line["row"], line["seed"]): line for line in lines(out)}
    assert set(results) == {(row, seed) for row in ("baseline", "position=none", "registers=4") for seed in (0, 1)}
    assert all(line["epochs"] == 2 and line["changes"]["model.width"] == 16 for line in results.values())
    # The table of positions has a row for each of 64 patches and the class token; registers have one more each, too.
    sizes = {row: results[row, 0]["parameters"] for row in ("baseline", "position=none", "registers=4")}
    assert sizes["baseline"] - sizes["position=none"] == 65 * 16
    assert sizes["registers=4"] - sizes["baseline"] == 2 * 4 * 16
    assert not any((out / "runs").iterdir())

    for seed in (0, 1):
        for row in ("baseline", "position=none"):
            assert list(results[row, seed]["sizes"]) == ["24", "32", "40", "48"]
            assert results[row, seed]["sizes"]["32"] == results[row, seed]["accuracy"]
        # Who is told no positions cannot tell the order.
        assert results["position=none", seed]["shuffled"] == results["position=none", seed]["accuracy"]
        assert "sizes" not in results["registers=4", seed]

    shown = capsys.readouterr().out
    shares = [results["registers=4", seed]["accuracy"] for seed in (0, 1)]
    assert [row[1:3] for row in cells(shown, "Registers")] == [
        ["0", in_percent([results["baseline", seed]["accuracy"] for seed in (0, 1)])],
        ["4", in_percent(shares)],
    ]
    learned = [results["baseline", seed] for seed in (0, 1)]
    expected = [in_percent([each["sizes"][size] for each in learned]) for size in ("24", "32", "40", "48")]
    assert cells(shown, "learned table") == [
        ["learned table", *expected, in_percent([each["shuffled"] for each in learned])]
    ]
    with Image.open(out / "ablations.png") as picture:
        assert picture.width > 1000

    # A second start trains nothing that is there, and another budget does not mix with it.
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("was measured already")

    monkeypatch.setattr(measuring, "train", refuse)
    assert ablations.main([*command, "--rows", "baseline,position=none"]) == 0
    assert len(lines(out)) == 6
    capsys.readouterr()
    (out / "ablations.png").unlink()
    assert ablations.main([str(out), "--table"]) == 0
    assert capsys.readouterr().out == shown[shown.index("Accuracy in percent") :]
    assert (out / "ablations.png").exists()
    command[command.index("2")] = "3"
    assert ablations.main([*command, "--rows", "baseline"]) == 2
    assert "baseline was measured with epochs=2.0, not 3.0" in capsys.readouterr().err


def test_a_row_that_was_cut_goes_on(
    recipe: Any, cifar10: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ablations, measuring, out = recipe("ablations"), recipe("measuring"), tmp_path / "out"
    command = [str(out), "--data", cifar10, "--device", "cpu", "--epochs", "2", "--seeds", "1", *TINY_VIT]
    steps: list[int] = []

    def stopping(config: Any, run: Path, **settings: Any) -> Any:
        def watch(now: Any) -> None:
            if isinstance(now, StepProgress):
                steps.append(now.done)
                if len(steps) == 4:
                    os.kill(os.getpid(), signal.SIGTERM)

        return train(config, run, reporter=Reporter(progress=watch), **settings)

    monkeypatch.setattr(measuring, "train", stopping)
    assert ablations.main([*command, "--rows", "pooling=mean"]) == 130
    assert lines(out) == []
    assert "run the same command again to continue" in capsys.readouterr().err
    assert ablations.main([*command, "--rows", "pooling=mean"]) == 0
    assert steps == list(range(1, 11))  # two epochs of five steps, none of them twice
    cut = lines(out)[0]["accuracy"]
    assert ablations.main([str(tmp_path / "whole"), *command[1:], "--rows", "pooling=mean"]) == 0
    assert cut == lines(tmp_path / "whole")[0]["accuracy"]


@pytest.mark.parametrize(("row", "settings"), [
    ("position=rope2d", {"position": "rope2d"}),
    ("pooling=mean", {"class_token": False, "pooling": "mean"}),
    ("patch=2", {"patch_size": (2, 2)}),
    ("layer_scale=1e-4", {"layer_scale": 1e-4}),
])  # fmt: skip
def test_a_row_changes_what_it_says_and_nothing_else(recipe: Any, row: str, settings: dict[str, Any]) -> None:
    ablations = recipe("ablations")
    baseline = ablations.config()
    changed = baseline.changed(ablations.ROWS[row])
    differing = {name for name, value in changed.model.to_dict().items() if value != baseline.model.to_dict()[name]}
    assert differing == set(settings)
    assert all(getattr(changed.model, name) == value for name, value in settings.items())
    assert changed.to_dict() | {"model": None} == baseline.to_dict() | {"model": None}
    assert set(ablations.ROWS) == {row for answers in ablations.QUESTIONS.values() for row in answers.values()}


def test_unknown_rows_and_missing_results_are_said(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recipe("ablations").main([str(tmp_path), "--rows", "baseline,postion=none"]) == 2
    assert "--rows postion=none: there is no such row" in capsys.readouterr().err
    assert recipe("ablations").main([str(tmp_path / "none"), "--table"]) == 2
    assert "holds no results" in capsys.readouterr().err


def test_shuffling_moves_whole_patches_each_image_in_its_own_way(recipe: Any) -> None:
    images_NCHW = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    shuffled_NCHW = recipe("ablations").shuffled(images_NCHW, 4, seed=0)

    def patches(image_CHW: torch.Tensor) -> list[bytes]:
        return [image_CHW[:, y : y + 4, x : x + 4].numpy().tobytes() for y in range(0, 32, 4) for x in range(0, 32, 4)]

    orders = []
    for before_CHW, after_CHW in zip(images_NCHW, shuffled_NCHW, strict=True):
        before = patches(before_CHW)
        orders.append([before.index(patch) for patch in patches(after_CHW)])
        assert sorted(orders[-1]) == list(range(64))
        assert orders[-1] != list(range(64))
    assert len(set(map(tuple, orders))) == 5
    assert torch.equal(shuffled_NCHW, recipe("ablations").shuffled(images_NCHW, 4, seed=0))
    assert not torch.equal(shuffled_NCHW, recipe("ablations").shuffled(images_NCHW, 4, seed=1))


@pytest.mark.parametrize("size", [24, 48])
def test_other_sizes_are_resized_as_pillow_does_it(recipe: Any, size: int) -> None:
    # Far from black and white, where Pillow cuts off what goes beyond after each of its two passes.
    images_NCHW = torch.randint(90, 166, (3, 3, 32, 32), dtype=torch.uint8)
    resized_NCHW = torch.cat(list(recipe("ablations").resized(images_NCHW, size, batch_size=2)))
    for image_CHW, small_CHW in zip(images_NCHW, resized_NCHW, strict=True):
        image = Image.fromarray(image_CHW.permute(1, 2, 0).numpy())
        expected = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        assert np.abs(small_CHW.numpy().astype(int) - expected).max() <= 1


# Shares of the data


def test_both_models_learn_from_the_same_share_for_as_many_steps(
    recipe: Any, cifar10: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_here, measuring, out = recipe("data_efficiency"), recipe("measuring"), tmp_path / "out"
    configs, given, train_cnn = [], [], recipe_here.train_cnn

    def train_and_note(config: Any, *arguments: Any, **settings: Any) -> Any:
        configs.append(config)
        return train(config, *arguments, **settings)

    def train_cnn_and_note(training: Any, *arguments: Any, **settings: Any) -> Any:
        given.append((training, settings))
        return train_cnn(training, *arguments, **settings)

    monkeypatch.setattr(measuring, "train", train_and_note)
    monkeypatch.setattr(recipe_here, "train_cnn", train_cnn_and_note)
    command = [str(out), "--data", cifar10, "--device", "cpu", "--steps", "6", "--cnn-width", "4", *TINY_VIT]
    assert recipe_here.main([*command, "--shares", "1,0.3"]) == 0
    results = {line["row"]: line for line in lines(out)}
    assert list(results) == ["vit/1.0", "cnn/1.0", "vit/0.3", "cnn/0.3"]
    assert [results[row]["photos"] for row in results] == [100, 100, 30, 30]
    for config, (training, settings), count in zip(configs, given, (100, 30), strict=True):
        seen, _, _ = check_photos(config, *open_sets(config))
        assert list(seen.names) == list(training.names)
        assert seen.labels_N.bincount().tolist() == [count // 10] * 10
        assert config.epochs == settings["epochs"] == pytest.approx(6 * 20 / count)
        assert settings["variations"] == config.augment
        assert settings["batch_size"] == config.batch_size

    shown = capsys.readouterr().out
    for share, count in (("30%", "30"), ("100%", "100")):
        model_rows = [results[f"{model}/{int(share[:-1]) / 100}"]["accuracy"] for model in ("vit", "cnn")]
        [row] = cells(shown, share)
        assert row[1] == count
        assert row[3:5] == [in_percent([accuracy]) for accuracy in model_rows]
    assert (out / "data_efficiency.png").exists()

    assert recipe_here.main([*command, "--shares", "0.3,1", "--seeds", "2"]) == 0
    assert len(configs) == len(given) == 4  # the second seed of each alone
    assert recipe_here.main([*command, "--shares", "30"]) == 2
    assert "--shares 30: should be shares" in capsys.readouterr().err


# Distillation


def test_with_and_without_a_teacher(
    recipe: Any, cifar10: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distill, out = recipe("distill_cifar10"), tmp_path / "out"
    trained, train_cnn = [], distill.train_cnn

    def train_cnn_and_note(*arguments: Any, **settings: Any) -> Any:
        trained.append(train_cnn(*arguments, **settings))
        return trained[-1]

    monkeypatch.setattr(distill, "train_cnn", train_cnn_and_note)
    command = [str(out), "--data", cifar10, "--device", "cpu", "--teacher-epochs", "2", "--teacher-width", "4"]
    command += [*TINY_VIT, "--set", "epochs=2"]
    assert distill.main(command) == 0
    assert len(trained) == 1
    results = {line["row"]: line for line in lines(out)}
    assert list(results) == ["with", "without"]
    assert results["with"]["parameters"] == results["without"]["parameters"]
    shown = capsys.readouterr().out
    assert [cells(shown, name)[0][1] for name in ("ConvNet, the teacher", "ViT with the teacher", "ViT without")] == [
        in_percent([accuracy])
        for accuracy in (trained[0][1], results["with"]["accuracy"], results["without"]["accuracy"])
    ]

    # A second seed, and the table, take the teacher that is there.
    assert distill.main([*command, "--seeds", "2"]) == 0
    assert distill.main([str(out), "--table"]) == 0
    assert len(trained) == 1
    assert len(lines(out)) == 4


def test_the_teacher_is_kept_beside_the_run(
    recipe: Any, cifar10: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distill = recipe("distill_cifar10")
    changes = {"data.train": cifar10, "data.validation": cifar10, "epochs": 1, "batch_size": 20, "model.width": 16}
    settings = distill.config().changed(changes | {"model.depth": 1, "model.num_heads": 1, "precision": "float32"})
    trained, train_cnn = [], distill.train_cnn

    def train_cnn_and_note(*arguments: Any, **settings: Any) -> Any:
        trained.append(train_cnn(*arguments, **settings)[0])
        return trained[-1], 0.5

    monkeypatch.setattr(distill, "train_cnn", train_cnn_and_note)
    run = tmp_path / "runs" / "distilled"
    first = distill.teacher(run, "cpu", settings, epochs=1, width=4)
    assert [path.name for path in run.parent.iterdir()] == ["distilled.teacher.safetensors"]
    train(settings, run, device="cpu", teacher=first)  # an empty folder, as a run wants it
    again = distill.teacher(run, "cpu", settings, epochs=1, width=4)
    train(settings, run, device="cpu", teacher=again, resume=True)
    assert len(trained) == 1
    images_BCHW = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        expected_BK = trained[0](images_BCHW)
        assert torch.equal(first(images_BCHW), expected_BK)
        assert torch.equal(again(images_BCHW), expected_BK)

    with pytest.raises(PatchlightError, match=r"was trained for 1 epochs, 4 wide, not 1 and 8"):
        distill.teacher(run, "cpu", settings, epochs=1, width=8)
    file = run.parent / "distilled.teacher.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(PatchlightError, match="is no teacher of this recipe"):
        distill.teacher(run, "cpu", settings, epochs=1, width=4)


def test_the_command_line_finds_the_recipes_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if Path(place) != RECIPES])
    for name in ("measuring", "small_cnn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = read_recipe(str(RECIPES / "distill_cifar10.py"))
    assert callable(module.teacher)
    taught, alone = module.config(), module.without()
    assert taught.distill is not None
    assert taught.to_dict() | {"distill": None} == alone.to_dict()
