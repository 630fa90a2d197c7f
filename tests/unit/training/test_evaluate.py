"""Evaluation against numpy references that are written another way, and against small cases by hand."""

import csv
import errno
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import patchlight as pl
from models_at_random import tiny_vit
from patchlight.cli import main
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.files import replacing
from patchlight.reporting import Progress, Reporter
from patchlight.training import evaluation_folder
from patchlight.training.evaluate import (
    TEMPERATURES,
    Evaluation,
    evaluate,
    match_classes,
)
from patchlight.weights.save import save

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Answers(nn.Module):
    """A model whose images are its answers: (B, K, 1, 1) to logits (B, K)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images_BK11: Tensor) -> Tensor:
        return images_BK11[:, :, 0, 0] * self.scale


def evaluated(logits_NK: np.ndarray, labels_N: np.ndarray, batch: int = 1000) -> Evaluation:
    logits, labels = torch.tensor(logits_NK, dtype=torch.float32), torch.tensor(labels_N, dtype=torch.int64)
    return evaluate(Answers(), cut(logits, labels, batch), LETTERS[: logits.shape[1]])


def cut(logits: Tensor, labels: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for start in range(0, len(labels), batch):
        rows = slice(start, start + batch)
        yield logits[rows, :, None, None], labels[rows], torch.arange(len(labels))[rows]


def at_random(photos: int, classes: int, seed: int = 0, sharp: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, photos)
    logits = random.normal(size=(photos, classes)).astype(np.float32)
    logits[np.arange(photos), labels] += 1.0
    return (logits * sharp).astype(np.float32), labels


def shares(logits_NK: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    exponents = np.exp(logits_NK.astype(np.float64) / temperature)
    return exponents / exponents.sum(1, keepdims=True)


def loss_of(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> float:
    return float(-np.log(shares(logits, temperature)[np.arange(len(labels)), labels]).mean())


def calibration_error(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> float:
    """One photo after another, and one bin after another."""
    found = shares(logits, temperature)
    error = 0.0
    for number in range(15):
        inside = [n for n in range(len(labels)) if number / 15 < found[n].max() <= (number + 1) / 15]
        if inside:
            right = np.mean([found[n].argmax() == labels[n] for n in inside])
            error += len(inside) / len(labels) * abs(right - np.mean([found[n].max() for n in inside]))
    return float(error)


def test_everything_against_numpy() -> None:
    logits, labels = at_random(400, 8)
    result = evaluated(logits, labels)
    order = np.argsort(-logits, axis=1)
    assert result.photos == 400
    assert result.accuracy == np.mean(order[:, 0] == labels)
    assert result.top5_accuracy == np.mean([label in row[:5] for label, row in zip(labels, order, strict=True)])
    assert result.loss == result.calibration.loss == pytest.approx(loss_of(logits, labels), rel=1e-12)
    assert result.calibration.error == pytest.approx(calibration_error(logits, labels), rel=1e-9)

    matrix = np.zeros((8, 8), np.int64)
    for label, row in zip(labels, order, strict=True):
        matrix[label, row[0]] += 1
    assert result.confusion_KK.dtype == torch.int64
    np.testing.assert_array_equal(result.confusion_KK.numpy(), matrix)
    for k, one in enumerate(result.per_class):
        assert (one.name, one.photos, one.predicted) == (LETTERS[k], matrix[k].sum(), matrix[:, k].sum())
        assert one.recall == matrix[k, k] / matrix[k].sum()
        assert one.precision == matrix[k, k] / matrix[:, k].sum()
        others = np.where(np.arange(8) == k, -1, matrix[k])
        assert (one.confused_with, one.confused) == (LETTERS[others.argmax()], others.max())


def test_calibration_by_hand() -> None:
    """Two classes, where logits (log p, log(1 - p)) are a confidence of p."""
    confidences = np.array([0.62, 0.64, 0.91, 0.93, 0.95, 1.0])
    right = np.array([True, False, True, True, False, True])
    other = np.log(np.maximum(1 - confidences, 1e-30))
    result = evaluated(np.stack([np.log(confidences), other], 1), np.where(right, 0, 1))
    # (9/15, 10/15]: 0.62 and 0.64, half right. (13/15, 14/15]: 0.91 and 0.93, all. The last: 0.95 and 1.0, half.
    by_hand = (2 * abs(0.5 - 0.63) + 2 * abs(1.0 - 0.92) + 2 * abs(0.5 - 0.975)) / 6
    assert result.calibration.error == pytest.approx(by_hand, abs=1e-7)
    filled = {number: each for number, each in enumerate(result.calibration.bins) if each.photos}
    assert {number: each.photos for number, each in filled.items()} == {9: 2, 13: 2, 14: 2}
    assert filled[13].confidence == pytest.approx(0.92, abs=1e-7)
    assert (filled[13].accuracy, filled[14].accuracy) == (1.0, 0.5)
    assert (filled[9].low, filled[9].high) == (9 / 15, 10 / 15)
    assert (result.calibration.bins[0].confidence, result.calibration.bins[0].accuracy) == (None, None)
    assert result.top5_accuracy is None


@pytest.mark.parametrize("sharp", [0.2, 1.0, 8.0])
def test_the_temperature_is_the_best_of_a_fine_grid(sharp: float) -> None:
    logits, labels = at_random(300, 5, seed=1, sharp=sharp)
    result = evaluated(logits, labels)
    grid = np.geomspace(*TEMPERATURES, 4000)
    losses = [loss_of(logits, labels, each) for each in grid if each > 0.1]
    assert result.calibrated.loss <= min(losses) + 1e-12
    best = grid[grid > 0.1][int(np.argmin(losses))]
    assert result.temperature == pytest.approx(best, rel=math.log(grid[1] / grid[0]) * 1.01)
    assert result.calibrated.loss == pytest.approx(loss_of(logits, labels, result.temperature), rel=1e-10)
    assert result.calibrated.error == pytest.approx(calibration_error(logits, labels, result.temperature), rel=1e-7)


@pytest.mark.parametrize(
    ("logits", "labels", "temperature"),
    [
        (np.eye(3), [0, 1, 2], 1.0),  # always right: nothing to go by
        (-np.eye(3), [0, 1, 2], TEMPERATURES[1]),  # always wrong: always too sure
        (np.zeros((3, 3)), [0, 1, 2], 1.0),  # says nothing
        (np.full((3, 3), 0.1), [0, 1, 2], 1.0),
        (np.eye(3) * 1e4, [0, 1, 1], 1e4 / math.log(4)),  # two of three right: e^x / (e^x + 2) = 2/3 at ln 4
    ],
)
def test_temperatures_at_the_edges(logits: np.ndarray, labels: list[int], temperature: float) -> None:
    expected = min(max(temperature, TEMPERATURES[0]), TEMPERATURES[1])
    assert evaluated(logits, np.array(labels)).temperature == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 13, 64, 96])
def test_batches_of_any_size_give_the_same(batch: int) -> None:
    logits, labels = at_random(97, 7)
    assert evaluated(logits, labels, batch).to_dict() == evaluated(logits, labels, 97).to_dict()


def test_much_in_little_memory_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """More classes than fit into one chunk with all photos: the chunks join without a seam."""
    logits, labels = at_random(50, 8)
    whole = evaluated(logits, labels).to_dict()
    chunks = [slice(0, 7), slice(7, 31), slice(31, 50)]
    monkeypatch.setattr("patchlight.training.evaluate._chunks", lambda logits_NK: iter(chunks))
    parts = evaluated(logits, labels).to_dict()
    assert parts.pop("temperature") == pytest.approx(whole.pop("temperature"), rel=1e-9)
    for name in ("calibration_with_temperature", "calibration_error_with_temperature"):
        parts.pop(name), whole.pop(name)
    assert parts == whole


def test_equal_logits_go_to_the_first_class() -> None:
    logits = np.zeros((8, 8))
    result = evaluated(logits, np.arange(8))
    assert result.accuracy == 1 / 8
    assert result.top5_accuracy == 5 / 8
    assert result.calibration.error == pytest.approx(0, abs=1e-12)  # an eighth right, and an eighth sure


def test_mistakes_come_with_the_surest_first() -> None:
    logits, labels = at_random(400, 4, seed=2)
    logits[10:13] = [0, 9, 0, 0]  # equally sure
    labels[10:13] = 0
    result = evaluated(logits, labels)
    found = shares(logits)
    wrong = [n for n in range(400) if found[n].argmax() != labels[n]]
    wrong.sort(key=lambda n: (-round(found[n].max(), 12), n))
    assert len(wrong) > 100
    assert [mistake.index for mistake in result.mistakes] == wrong[:100]
    first = result.mistakes[0]
    assert first.label == LETTERS[labels[first.index]]
    assert first.predicted == LETTERS[found[first.index].argmax()]
    assert first.confidence == pytest.approx(found[first.index].max(), rel=1e-12)


def test_a_class_without_photos_or_answers_has_no_share() -> None:
    result = evaluated(np.eye(3)[[0, 0, 1]], np.array([0, 0, 0]))
    a, b, c = result.per_class
    assert (a.recall, a.precision, a.confused_with, a.confused) == (2 / 3, 1.0, "b", 1)
    assert (b.photos, b.recall, b.precision, b.confused_with) == (0, None, 0.0, None)
    assert (c.recall, c.precision) == (None, None)


def test_json_is_plain_and_whole() -> None:
    logits, labels = at_random(60, 6)
    result = evaluated(logits, labels)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    matrix = np.zeros((6, 6), int)
    for label, predicted, photos in values["confusion"]:
        matrix[label, predicted] = photos
    np.testing.assert_array_equal(matrix, result.confusion_KK.numpy())
    assert values["accuracy"] == result.accuracy
    assert values["classes"] == list(LETTERS[:6])
    assert values["per_class"][2]["recall"] == result.per_class[2].recall
    assert len(values["calibration"]["bins"]) == 15
    assert values["calibration_with_temperature"]["fitted_on"] == "the same photos"


def test_the_interval_of_the_accuracy() -> None:
    """Wilson's interval holds the shares p from which the measured one is 1.96 standard errors away or less."""
    result = evaluated(np.eye(2)[[0] * 45 + [1] * 5], np.zeros(50))
    low, high = result.accuracy_interval
    inside = [p for p in np.linspace(0, 1, 200_001) if abs(0.9 - p) <= 1.959964 * math.sqrt(p * (1 - p) / 50)]
    assert (low, high) == pytest.approx((inside[0], inside[-1]), abs=1e-5)


@pytest.mark.parametrize("changes", [{}, {"distill_token": True}, {"drop_path": 0.9}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vit_is_evaluated_as_it_classifies(changes: dict[str, object], dtype: torch.dtype) -> None:
    model = tiny_vit(**changes).to(dtype)
    images, labels = torch.randn(10, 3, 32, 32), torch.arange(10) % 5
    with torch.no_grad():
        expected = model(images.to(dtype)).float().argmax(1)
    model.train()
    frozen = model.norm.eval()
    cut = ((images[n : n + 4], labels[n : n + 4], torch.arange(n, min(n + 4, 10))) for n in (0, 4, 8))
    result = evaluate(model, cut, "abcde")
    assert torch.equal(result.predicted_N, expected)
    assert model.training
    assert model.blocks[0].training
    assert not frozen.training
    model(images[:2].to(dtype)).sum().backward()  # nothing made in inference mode stays behind


def test_under_inference_mode_and_autocast() -> None:
    model, images, labels = tiny_vit(), torch.randn(6, 3, 32, 32), torch.arange(6) % 5
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        logits = model(images).float().numpy()
        result = evaluate(model, [(images, labels, torch.arange(6))], "abcde")
    assert result.loss == pytest.approx(loss_of(logits, labels.numpy()), rel=1e-12)


def test_progress_and_the_photos_numbers() -> None:
    logits, labels = torch.eye(2)[[0, 1, 1]], torch.zeros(3, dtype=torch.int64)
    heard: list[Progress] = []
    images = logits[:, :, None, None]
    batches = [(images[:2], labels[:2], torch.tensor([7, 5])), (images[2:], labels[2:], torch.tensor([3]))]
    result = evaluate(Answers(), batches, "ab", reporter=Reporter(progress=heard.append))
    assert [now.line() for now in heard] == ["evaluating photo 2", "evaluating photo 3"]
    assert [mistake.index for mistake in result.mistakes] == [3, 5]


@pytest.mark.parametrize(
    ("logits", "labels", "classes", "message"),
    [
        (np.eye(3), [0, 1, 2], "ab", r"2 classes are named, but the model has 3"),
        (np.eye(3), [0, 1, 3], "abc", r"label 3 is not one of the model's 3 classes"),
        (np.eye(3), [0, -1, 2], "abc", r"label -1 is not one of the model's 3 classes"),
        (np.diag([1.0, np.nan, 1.0]), [0, 1, 2], "abc", r"not a number for 1 of 3 photos \(the first has index 1\)"),
        (np.zeros((0, 3)), [], "abc", r"^there are no photos to evaluate"),
    ],
)
def test_what_cannot_be_evaluated(logits: np.ndarray, labels: list[int], classes: str, message: str) -> None:
    batches = cut(torch.tensor(logits, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64), 2)
    with pytest.raises(PatchlightError, match=message):
        evaluate(Answers(), batches, classes)


def test_classes_are_matched_by_name() -> None:
    assert match_classes(["dog", "cat"], ["cat", "cow", "dog"], 3) == [2, 0]
    assert match_classes(["dog", "cat"], None, 2) == [0, 1]


@pytest.mark.parametrize(
    ("classes", "labels", "message"),
    [
        (["Dog", "zebra"], ["cat", "dog"], r"no class 'Dog' \('dog'\?\), 'zebra'; rename .* it knows 'cat', 'dog'$"),
        ([f"bird {n}" for n in range(9)], ["elk"] * 9, r"'bird 4' and 4 more; .* it knows 'elk', .* and 4 more$"),
        (["crane"], ["crane", "crane"], r"2 classes named 'crane'; save it with names that differ"),
        (["cat"], None, r"the photos have 1 classes, and the model has 2 without names; save it with names"),
    ],
)
def test_classes_that_do_not_match(classes: list[str], labels: list[str] | None, message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        match_classes(classes, labels, 2 if labels is None else len(labels))


LABELS = ["cat", "dog", "elk", "=cmd|x", "hen", "[red]ox", "yak"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of seven classes, and photos of five of them, each of another brightness, in train/ and test/."""
    monkeypatch.chdir(tmp_path)
    model = tiny_vit(num_classes=7)
    save(model, "model", preprocess=PreprocessConfig(image_size=32), labels=LABELS)
    random = np.random.default_rng(0)
    for place, name in enumerate(reversed(LABELS[1:6])):
        for part, count in (("train", 1), ("test", 4 + place)):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(50 * place, 50 * place + 56, (40, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{number}.png")
    return tmp_path


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["patchlight", "evaluate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_agrees_with_classify(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = pl.load("model")
    files = sorted((folder / "photos" / "test").glob("*/*.png"))
    answers = {file: pl.classify(file, loaded, 5) for file in files}
    right = [file for file, answer in answers.items() if answer.labels[0] == file.parent.name]
    among = [file for file, answer in answers.items() if file.parent.name in answer.labels]

    assert command("model", "photos", "--json", "--workers", "0", "--batch", "7", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    values = json.loads(printed.out)
    assert (values["photos"], values["accuracy"]) == (30, len(right) / 30)
    assert values["top5_accuracy"] == len(among) / 30
    assert values["classes"] == LABELS
    assert {one["name"]: one["photos"] for one in values["per_class"]} == dict(
        zip(LABELS, [0, 8, 7, 6, 5, 4, 0], strict=True)
    )
    assert sorted(mistake["file"] for mistake in values["mistakes"]) == sorted(
        str(file.relative_to(folder / "photos" / "test")) for file in set(files) - set(right)
    )
    for mistake in values["mistakes"]:
        answer = answers[folder / "photos" / "test" / mistake["file"]]
        assert (mistake["predicted"], mistake["confidence"]) == (
            answer.labels[0],
            pytest.approx(answer.probabilities[0], abs=1e-5),
        )


def test_unreadable_photos_are_left_out_named_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "photos/test/dog/empty.jpg").touch()
    (folder / "photos/test/unknown to the model").mkdir()  # without photos
    assert command("model", "photos", "--out", "made/here", "--workers", "0", monkeypatch=monkeypatch) == 3
    printed = capsys.readouterr()
    assert "left out, dog/empty.jpg: empty" in printed.err
    assert printed.err.endswith("photos that cannot be read and were left out: 1\n")
    assert re.search(r"^accuracy +[\d.]+% of 30 photos \(95% interval ", printed.out, re.MULTILINE)
    assert re.search(r"^top-5 accuracy +[\d.]+%$", printed.out, re.MULTILINE)
    assert re.search(
        r"^calibration error +[\d.]+%; [\d.]+% with temperature .*, the best on these",
        printed.out,
        re.MULTILINE,
    )
    values = json.loads((folder / "made/here/evaluation.json").read_text())
    assert values["left_out"] == ["dog/empty.jpg"]
    with (folder / "made/here/per-class.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["cat", "dog", "elk", "'=cmd|x", "hen", "[red]ox", "yak"]
    assert [row["recall"] for row in rows] == [
        "" if one["recall"] is None else str(one["recall"]) for one in values["per_class"]
    ]
    assert rows[0]["recall"] == ""
    for name in ("confusion.png", "calibration.png"):
        with Image.open(folder / "made/here" / name) as picture:
            assert picture.width > 500
    assert not list((folder / "made/here").glob(".*"))


def test_photos_that_are_not_where_a_table_says_count_as_unreadable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f"photos/test/{path.parent.name}/{path.name},{path.parent.name}" for path in Path("photos/test").glob("*/*")
    ]
    Path("labels.csv").write_text("\n".join(["file,label", *rows, "gone.png,dog", ""]))
    assert command("model", "labels.csv", "--out", "made", "--workers", "0", monkeypatch=monkeypatch) == 3
    assert capsys.readouterr().err.endswith("photos that cannot be read and were left out: 1\n")
    assert json.loads(Path("made/evaluation.json").read_text())["left_out"] == ["gone.png"]
    features = ["model", "labels.csv", "--knn", "--workers", "0"]
    assert command(*features, monkeypatch=monkeypatch) == 3
    assert capsys.readouterr().err.endswith("photos that cannot be read and were left out: 1\n")


def test_a_full_disk_costs_neither_the_figures_nor_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path) -> Any:
        if path.name == "calibration.png":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replacing(path)

    arguments = ["model", "photos", "--out", "made", "--workers", "0"]
    for earlier in (False, True):
        before = {path.name: path.stat().st_mtime_ns for path in Path("made").glob("*")}
        assert bool(before) == earlier
        with monkeypatch.context() as patch:
            patch.setattr(evaluation_folder, "replacing", full)
            assert command(*arguments, monkeypatch=patch) == 2
        printed = capsys.readouterr()
        assert printed.out.startswith("accuracy ")
        assert (
            printed.err
            == "patchlight: made: cannot be written (No space left on device); free some space, or name another "
            "folder\n"
        )
        assert Path("made").exists() == earlier
        assert {path.name: path.stat().st_mtime_ns for path in Path("made").glob("*")} == before
        assert command(*arguments, monkeypatch=monkeypatch) == 0
        capsys.readouterr()


def test_the_table_has_the_worst_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("patchlight.commands.evaluate._print_evaluation.__defaults__", (3,))
    command("model", "photos", "--json", "--workers", "0", monkeypatch=monkeypatch)
    seen = [one for one in json.loads(capsys.readouterr().out)["per_class"] if one["photos"]]
    seen.sort(key=lambda one: (one["recall"], -one["photos"]))
    assert command("model", "photos", "--workers", "0", monkeypatch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(place for place, line in enumerate(lines) if line.split()[:2] == ["class", "photos"])
    shown = [line.split() for line in lines[heading + 2 : heading + 5]]
    assert [row[0] for row in shown] == [one["name"] for one in seen[:3]]
    assert [row[2] for row in shown] == [f"{one['recall']:.1%}" for one in seen[:3]]
    assert lines[-1] == "and 2 classes that do better; --json or --out shows all"


def test_without_matplotlib_the_rest_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert command("model", "photos", "--out", "made", "--workers", "0", monkeypatch=monkeypatch) == 0
        assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert command("model", "photos", "--out", "made", "--workers", "0", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().err == (
        "patchlight: not drawn: confusion.png, calibration.png; pictures need matplotlib: "
        "pip install 'patchlight[plot]'\n"
    )
    assert {each.name for each in (folder / "made").iterdir()} == {"evaluation.json", "per-class.csv"}


def test_a_model_without_labels_takes_classes_by_their_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tiny_vit(num_classes=5), "five", preprocess=PreprocessConfig(image_size=32))
    assert command("five", "photos", "--json", "--workers", "0", monkeypatch=monkeypatch) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["classes"] == sorted(LABELS[1:6])
    assert values["top5_accuracy"] is None


@pytest.mark.parametrize(
    ("prepare", "arguments", "message"),
    [
        (
            lambda: Path("photos/test/elk").rename("photos/test/Elk"),
            ["model", "photos"],
            r"patchlight: photos: the model has no class 'Elk' \('elk'\?\); rename .* and 2 more\n",
        ),
        (
            lambda: save(tiny_vit(num_classes=4), "four", preprocess=PreprocessConfig(image_size=32)),
            ["four", "photos"],
            r"patchlight: photos: the photos have 5 classes, and the model has 4 without names; .*\n",
        ),
        (
            lambda: save(tiny_vit(num_classes=0), "none", preprocess=PreprocessConfig(image_size=32)),
            ["none", "photos"],
            r"patchlight: none: has no head that gives classes; .*\n",
        ),
        (
            lambda: [file.write_bytes(b"") for file in Path("photos/test").glob("*/*.png")],
            ["model", "photos"],
            r"patchlight: photos: none of its 30 photos can be read; left out, .*\n",
        ),
        (
            lambda: Path("confusion.png").write_bytes(b"somebody's"),
            ["model", "photos", "--out", "."],
            r"patchlight: \.: holds confusion\.png, which is not from an evaluation; name another folder\n",
        ),
        (
            lambda: Path("taken").touch(),
            ["model", "photos", "--out", "taken"],
            r"patchlight: taken: is a file; name a folder for the evaluation\n",
        ),
        (lambda: None, ["model", "nowhere"], r"patchlight: nowhere: there is no such file or folder; .*\n"),
        (
            lambda: None,
            ["model", "photos", "--out", "/proc/there"],
            r"patchlight: /proc/there: cannot be written \(.*\); free some space, or name another folder\n",
        ),
        (lambda: None, ["model", "photos", "--device", "abacus"], r"patchlight: .*abacus.*\n"),
        (
            lambda: None,
            ["model", "photos", "--device", "meta"],
            r"patchlight: --device meta does not compute here .*\n",
        ),
        (lambda: None, ["model", "photos", "--knn", "--device", "meta"], r"patchlight: --device meta does not .*\n"),
    ],
)
def test_mistakes_of_the_user_are_one_line(
    folder: Path,
    prepare: Callable[[], object],
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare()
    assert command(*arguments, "--workers", "0", monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(message, printed.err), printed.err


def test_of_many_classes_the_picture_shows_those_with_photos() -> None:
    result = evaluated(np.eye(9)[[2, 2, 7, 4, 8]], np.array([2, 4, 7, 4, 2]))
    matrix, names = evaluation_folder._confusion_of_classes_with_photos(result)
    assert names == ["c", "e", "h", "(any other)"]
    assert matrix.tolist() == [[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    same, names = evaluation_folder._confusion_of_classes_with_photos(evaluated(np.eye(2), np.array([0, 1])))
    assert (same.tolist(), names) == ([[1, 0], [0, 1]], ["a", "b"])
