"""Charts of training: its course, what a model confuses, and whether its confidence holds.

As in explain/plot.py they take `ax=None` and return what they drew on.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from patchlight.explain.plot import (
    INK,
    SMALL,
    TEXT,
    WIDTH,
    Array,
    add_scale,
    as_array,
    axis_or_new,
    in_percent,
    label_axes,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_confusion(matrix_KK: Any, classes: Sequence[str], ax: "Axes | None" = None) -> "Axes":
    """What photos of each class (rows) were taken for (columns), as shares of the row; a row without photos is blank.

    Few classes have their numbers written in, in percent, and of many only some have names. The colours grow with the
    root of the share, so that rare confusions are seen beside the diagonal.
    """
    ax = axis_or_new(ax, WIDTH, WIDTH * 0.86)
    from matplotlib.colors import PowerNorm  # if it is missing, a new axis has said so

    matrix = as_array(matrix_KK).astype(np.float64)
    count = len(matrix)
    photos_K = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, photos_K, out=np.full_like(matrix, np.nan), where=photos_K > 0)
    ax.imshow(shares, cmap="BuPu", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    if count <= 12:
        for row, column in np.argwhere(np.round(100 * np.nan_to_num(shares)) >= 1):
            share = shares[row, column]
            colour = "white" if share > 0.3 else INK
            ax.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=SMALL, color=colour)
    named = range(0, count, math.ceil(count / 40))
    names = [_short_name(classes[k]) for k in named]
    size = SMALL if count <= 20 else SMALL - 2
    label_axes(ax, "taken for", "class")
    ax.set_xticks(named, names, rotation=90, fontsize=size, parse_math=False)
    ax.set_yticks(named, names, fontsize=size, parse_math=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0 if count <= 40 else 2.5)
    add_scale([ax], "share of the class's photos", location="right", percent=True)
    return ax


def draw_calibration(
    bins: Sequence[Mapping[str, Any]], ax: "Axes | None" = None, *, scaled: Sequence[Mapping[str, Any]] | None = None
) -> "Axes":
    """How often answers of each confidence are right; on the dashed line confidence can be taken at its word.

    A bin has `low`, `high`, `photos`, `confidence` and `accuracy`, as in evaluation.json; `scaled` are those with a
    temperature, drawn beside them.
    """
    ax = axis_or_new(ax, WIDTH * 0.75, WIDTH * 0.62)
    total = max(1, sum(each["photos"] for each in bins))
    heights = [each["photos"] / total for each in bins]
    widths = [each["high"] - each["low"] for each in bins]
    edges = [each["low"] for each in bins]
    ax.bar(edges, heights, widths, align="edge", color="#dcdcdc", edgecolor="white", label="share of the photos")
    ax.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle=(0, (4, 3)), label="what it should be")
    for table, colour, label in ((bins, "#440154", "accuracy"), (scaled, "#21918c", "accuracy with the temperature")):
        filled = [each for each in table or () if each["photos"]]
        if filled:
            x, y = ([each[key] for each in filled] for key in ("confidence", "accuracy"))
            ax.plot(x, y, color=colour, linewidth=1, label=label)
            # A bin of a few photos is a small dot: its accuracy says little.
            ax.scatter(
                x,
                y,
                [6 + 150 * each["photos"] / total for each in filled],
                color=colour,
                linewidths=0,
                zorder=3,
                clip_on=False,
            )
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
    label_axes(ax, "confidence of the answer", "accuracy")
    for axis in (ax.xaxis, ax.yaxis):
        in_percent(axis)
    ax.legend(
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
        ncols=2,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        handlelength=1.6,
    )
    return ax


def draw_curves(metrics: Sequence[Mapping[str, Any]], figure: "Figure | None" = None) -> "list[Axes]":
    """The course of a training run against its epochs: the loss, and beside it the accuracy on validation photos.

    Each of `metrics` has `step`, `epoch` and some of `loss`, `validation_accuracy` and `accuracy`; where none has a
    `validation_accuracy`, `accuracy` is that, and otherwise that on training photos. Where no line has either, as of
    photos without labels, what else tells of the learning stands in its place (`explained`, `feature_rank`), or
    nothing. Of lines for one step the last counts, as after a run was taken up again.
    """
    figure = new_figure(WIDTH, 2.7) if figure is None else figure
    judged = not metrics or any("accuracy" in row or "validation_accuracy" in row for row in metrics)
    other = next((key for key in _WITHOUT_LABELS if any(key in row for row in metrics)), None)
    panels = 2 if judged or other else 1
    left = figure.add_subplot(1, panels, 1)
    _draw_course(left, metrics, "loss", "#440154")
    label_axes(left, "epoch", "training loss")
    if panels == 1:
        return [left]
    right = figure.add_subplot(1, 2, 2)
    if not judged and other is not None:
        _draw_course(right, metrics, other, "#21918c")
        label_axes(right, "epoch", _WITHOUT_LABELS[other])
        return [left, right]

    both = any(row.get("validation_accuracy") is not None for row in metrics)
    for key, colour, label in (("accuracy", "#999999", "training"), ("validation_accuracy", "#21918c", "validation")):
        if key == "accuracy" and not both:
            continue
        epochs, shares = _course(metrics, key if both else "accuracy")
        marker = "o" if len(shares) <= 30 else None
        right.plot(epochs, shares, color=colour, linewidth=1.4, marker=marker, markersize=3, label=label,
                   clip_on=False)  # fmt: skip
    if len(shares) and np.isfinite(shares).any():
        best, title = int(np.nanargmax(shares)), f"{100 * shares[-1]:.2f}% at the end"
        if shares[best] != shares[-1]:
            title += f", best {100 * shares[best]:.2f}% at epoch {epochs[best]:.4g}"
        right.set_title(title, fontsize=TEXT, color=INK, pad=4)
    label_axes(right, "epoch", "accuracy" if both else "validation accuracy")
    low, high = right.get_ylim()
    right.set_ylim(max(low, 0.0), min(high, 1.0))  # nothing is named right more often than always
    in_percent(right.yaxis)
    if both:
        right.legend(frameon=False, fontsize=SMALL, labelcolor=INK, loc="lower right")
    return [left, right]


_WITHOUT_LABELS = {
    "explained": "share of the hidden pixels' variance explained",
    "feature_rank": "directions that the features use",
}
"""What tells of the learning where there are no labels, the first that there is."""


def _draw_course(ax: "Axes", metrics: Sequence[Mapping[str, Any]], key: str, colour: str) -> None:
    epochs, values = _course(metrics, key)
    smooth = _smoothed(values)
    if smooth is not values:
        ax.plot(epochs, values, color=colour, linewidth=0.8, alpha=0.3)
    ax.plot(epochs, smooth, color=colour, linewidth=1.4)


def _course(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[Array, Array]:
    """The epochs and the values of the lines that have one, in the order of the steps; NaN where it is not a number."""
    rows = {row["step"]: (row["epoch"], row[key]) for row in metrics if key in row}
    points = [rows[step] for step in sorted(rows)]
    return np.array([epoch for epoch, _ in points], float), np.array([value for _, value in points], float)


def _smoothed(values: Array) -> Array:
    """The mean of the neighbours, for curves of so many points that their noise would hide their course."""
    reach = len(values) // 50
    if reach < 2:
        return values
    places, finite = np.arange(len(values)), np.isfinite(values)
    sums, counts = (np.cumsum(np.concatenate([[0], each])) for each in (np.where(finite, values, 0.0), finite))
    ends, starts = np.minimum(places + reach + 1, len(values)), np.maximum(places - reach, 0)
    known = counts[ends] - counts[starts]
    return np.divide(sums[ends] - sums[starts], known, out=np.full(len(values), np.nan), where=known > 0)


def _short_name(name: str, most: int = 22) -> str:
    """A name as it fits beside a picture, a box for each letter that the font does not have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    letters = get_font(findfont(FontProperties())).get_charmap()
    name = " ".join(name.split())
    shown = "".join(letter if ord(letter) in letters and letter.isprintable() else "\u25a1" for letter in name)
    return shown if len(shown) <= most else f"{shown[: most - 1]}\u2026"
