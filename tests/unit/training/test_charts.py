"""The figures of training and evaluation, by the numbers that they draw and not by their pixels."""

import io
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from patchlight.errors import PatchlightError
from patchlight.explain import plot
from patchlight.training import charts

BINS = [
    {"low": 0.0, "high": 0.5, "photos": 0, "confidence": None, "accuracy": None},
    {"low": 0.5, "high": 0.75, "photos": 10, "confidence": 0.6, "accuracy": 0.5},
    {"low": 0.75, "high": 1.0, "photos": 30, "confidence": 0.9, "accuracy": 0.8},
]


def ticks(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def size_of(ax) -> tuple[int, int]:
    return Image.open(io.BytesIO(plot.to_png(ax.figure))).size


@pytest.mark.parametrize(
    "draw",
    [
        lambda: charts.draw_confusion(np.eye(2), "ab"),
        lambda: charts.draw_calibration(BINS),
        lambda: charts.draw_curves([]),
    ],
)
def test_a_missing_matplotlib_is_named_with_its_extra(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("figure", "colors", "font_manager"):
        monkeypatch.setitem(sys.modules, f"matplotlib.{name}", None)
    with pytest.raises(PatchlightError, match=r"^pictures need matplotlib: pip install 'patchlight\[plot\]'$"):
        draw()


def test_pyplot_stays_out() -> None:
    code = """
import sys
from patchlight.explain import plot
from patchlight.training import charts
plot.to_png(charts.draw_confusion([[1, 0], [0, 1]], "ab").figure)
plot.to_png(charts.draw_curves([{"step": 1, "epoch": 1, "loss": 1.0}])[0].figure)
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_axes_of_your_own_are_used_and_given_back() -> None:
    mine = plot.new_figure().subplots(1, 2)
    assert charts.draw_confusion(np.eye(2), "ab", mine[0]) is mine[0]
    assert charts.draw_calibration(BINS, mine[1]) is mine[1]
    figure = plot.new_figure()
    assert {ax.figure for ax in charts.draw_curves([], figure)} == {figure}


def test_confusion_shows_shares_of_each_row() -> None:
    matrix = torch.tensor([[3, 1, 0], [0, 0, 0], [199, 0, 1]])
    ax = charts.draw_confusion(matrix, ["cat", "no photos", "dog"])
    shown = np.ma.filled(ax.images[0].get_array(), np.nan)
    np.testing.assert_allclose(shown, [[0.75, 0.25, 0], [np.nan] * 3, [0.995, 0, 0.005]])
    assert ticks(ax.xaxis) == ticks(ax.yaxis) == ["cat", "no photos", "dog"]
    written = {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in ax.texts}
    assert written == {(0, 0): "75", (0, 1): "25", (2, 0): "100"}  # less than one in a hundred is left to the colour
    assert ax.get_xlabel() == "taken for"


@pytest.mark.parametrize(("count", "named"), [(13, 13), (40, 40), (41, 21), (200, 40), (1000, 40)])
def test_of_many_classes_some_are_named(count: int, named: int) -> None:
    names = [f"class {k}" for k in range(count)]
    ax = charts.draw_confusion(np.eye(count, dtype=int), names)
    assert len(ticks(ax.yaxis)) == named
    for place, name in zip(ax.get_yticks(), ticks(ax.yaxis), strict=True):
        assert name == names[int(place)]
    assert not ax.texts


def test_any_name_can_be_drawn() -> None:
    """Warnings are errors here, and a letter that the font does not have would be one."""
    names = ["$x^", "鹿 deer", "two\nlines\x1b", "a name that is longer than the picture allows", "<b>&amp;\udcff"]
    ax = charts.draw_confusion(np.eye(5), names)
    size_of(ax)
    assert ticks(ax.yaxis) == ["$x^", "□ deer", "two lines□", "a name that is longer…", "<b>&amp;□"]


def test_calibration_draws_the_bins_that_have_photos() -> None:
    ax = charts.draw_calibration(BINS, scaled=BINS[:2])
    ideal, accuracy, scaled = ax.lines
    np.testing.assert_allclose(ideal.get_xydata(), [[0, 0], [1, 1]])
    np.testing.assert_allclose(accuracy.get_xydata(), [[0.6, 0.5], [0.9, 0.8]])
    np.testing.assert_allclose(scaled.get_xydata(), [[0.6, 0.5]])
    assert [bar.get_height() for bar in ax.patches] == [0, 0.25, 0.75]
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [(0, 0.5), (0.5, 0.25), (0.75, 0.25)]
    small, large = ax.collections[0].get_sizes()
    assert small < large
    assert len(charts.draw_calibration(BINS).lines) == 2


def test_curves_follow_the_steps() -> None:
    rows = [
        {"step": 20, "epoch": 1.0, "loss": 2.0},
        {"step": 40, "epoch": 2.0, "loss": 9.0},  # before the run was stopped and taken up again
        {"step": 40, "epoch": 2.0, "loss": 1.0, "accuracy": 0.5},
        {"step": 80, "epoch": 4.0, "accuracy": 0.9},
        {"step": 60, "epoch": 3.0, "loss": math.nan, "accuracy": 0.95},
    ]
    left, right = charts.draw_curves(rows)
    np.testing.assert_array_equal(left.lines[0].get_xydata(), [[1, 2], [2, 1], [3, math.nan]])
    np.testing.assert_array_equal(right.lines[0].get_xydata(), [[2, 0.5], [3, 0.95], [4, 0.9]])
    assert right.get_title() == "90.00% at the end, best 95.00% at epoch 3"
    assert (left.get_ylabel(), right.get_ylabel()) == ("training loss", "validation accuracy")
    assert right.get_legend() is None


def test_training_accuracy_is_beside_validation_accuracy() -> None:
    rows = [{"step": s, "epoch": s, "loss": 1.0, "accuracy": 0.9, "validation_accuracy": 0.1 * s} for s in (1, 2, 3)]
    _, right = charts.draw_curves(rows)
    lines = {line.get_label(): line.get_ydata() for line in right.lines}
    np.testing.assert_allclose(lines["training"], [0.9] * 3)
    np.testing.assert_allclose(lines["validation"], [0.1, 0.2, 0.3])
    assert right.get_title() == "30.00% at the end"


def test_a_noisy_loss_is_drawn_smoothed_too() -> None:
    losses = np.random.default_rng(0).random(200)
    losses[50] = np.nan
    (left,) = charts.draw_curves([{"step": s, "epoch": s, "loss": loss} for s, loss in enumerate(losses)])
    raw, smooth = (line.get_ydata() for line in left.lines)
    np.testing.assert_array_equal(raw, losses)
    expected = [np.nanmean(losses[max(0, s - 4) : s + 5]) for s in range(200)]
    np.testing.assert_allclose(smooth, expected)


def test_an_empty_run_and_the_width_of_a_readme() -> None:
    assert size_of(charts.draw_curves([])[0])[0] > 0
    rows = [{"step": s, "epoch": s / 3, "loss": 1 / s, "accuracy": 1 - 1 / s} for s in range(1, 9)]
    width, height = size_of(charts.draw_curves(rows)[0])
    assert 1000 < width < 1300
    assert height < width / 2


def test_no_curve_has_more_than_all_right() -> None:
    _, right = charts.draw_curves([{"step": s, "epoch": s, "loss": 1.0, "accuracy": 1.0} for s in range(3)])
    assert 0 <= right.get_ylim()[0] < right.get_ylim()[1] == 1


@pytest.mark.parametrize(("key", "label"), [("explained", "variance explained"), ("feature_rank", "directions")])
def test_without_labels_another_course_stands_beside_the_loss(key: str, label: str) -> None:
    rows = [{"step": s, "epoch": s / 4, "loss": 2.0 - s / 10, key: s / 20} for s in range(12)]
    left, right = charts.draw_curves(rows)
    assert label in right.get_ylabel()
    assert right.lines[0].get_ydata().tolist() == [row[key] for row in rows]
    left.figure.canvas.draw()
    assert min(ax.get_position().width for ax in (left, right)) > 0.3, "as wide as it is read"
    with_labels = [*rows, {"step": 12, "epoch": 3, "accuracy": 0.5}]
    assert charts.draw_curves(with_labels)[1].get_ylabel() == "validation accuracy"
