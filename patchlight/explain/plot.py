"""Pictures of what a model does, on axes of your own or new ones; the one place that knows matplotlib.

Every function takes numpy arrays (torch tensors are welcome) and `ax=None`, and returns the axis that it drew on, so
that it serves in a notebook. Several maps that belong together (heads, layers) take `figure=None` and return their
axes: one scale, one colour bar. pyplot and its global state stay out, so that servers, threads and machines without a
display can draw, too; `to_png(ax.figure)` gives the bytes of a file.

Colours run evenly to the eye: magma for attention, viridis for similarity, cividis for sizes.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from patchlight.errors import PatchlightError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[Any]
Edges = tuple[Array, Array]
"""Where the patches' borders lie in the drawn photo's pixels: h + 1 numbers down, and w + 1 across."""

WIDTH, TALLEST = 7.0, 5.0
"""Inches: of a figure, and of the tallest picture in one. Shown 800 pixels wide, a point is about 1.6 pixels."""
DPI = 170
TEXT, SMALL = 9.0, 8.0
"""Sizes of letters, in points."""
INK, MARK = "#333333", "#e0245e"
KINDS = {
    "class": "#440154",
    "distill": "#3b528b",
    "registers": "#21918c",
    "artifacts": MARK,
    "patches": "#d8d8d8",
}
"""A colour for each kind of token that attention can go to."""


def new_figure(width: float = WIDTH, height: float = 3.6) -> "Figure":
    """An empty figure of this size in inches, outside pyplot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PatchlightError("pictures need matplotlib: pip install 'patchlight[plot]'") from None
    return Figure(figsize=(width, height), dpi=DPI, layout="compressed", facecolor="white")


def to_png(figure: Any) -> bytes:
    """The bytes of a PNG file, cut to what is drawn."""
    file = io.BytesIO()
    # Without the version of matplotlib in it, the same picture gives the same bytes.
    figure.savefig(file, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.08, metadata={"Software": None})
    return file.getvalue()


def panels(count: int, aspect: float, figure: "Figure | None" = None, columns: int | None = None) -> "list[Axes]":
    """Axes for `count` pictures of this aspect (width / height), in rows."""
    if columns is None:
        columns = round((4 if count <= 16 else 6) / math.sqrt(min(max(aspect, 0.5), 2)))
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    if figure is None:
        width = WIDTH / columns
        figure = new_figure(WIDTH, rows * (min(width / aspect, TALLEST) + 0.3) + 0.6)
    return [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def draw_photo(photo: Any, ax: "Axes | None" = None, edges: Edges | None = None, title: str = "") -> "Axes":
    """A photo (H, W, 3) uint8; pale outside the patches, where `edges` are given."""
    photo = _pixels(photo)
    ax = _axis(ax)
    seen_HW = np.ones(photo.shape[:2], bool) if edges is None else _inside(edges, photo.shape[:2])
    ax.imshow(_paled(photo, seen_HW))
    return _bare(ax, title)


def draw_patches(
    photo: Any, grid: tuple[int, int], ax: "Axes | None" = None, edges: Edges | None = None, title: str = ""
) -> "Axes":
    """A photo (H, W, 3) uint8 and the patches that it is cut into."""
    photo = _pixels(photo)
    edges = edges or even_edges(grid, photo.shape[:2])
    ax = draw_photo(photo, ax, edges, title)
    ys, xs = (np.asarray(along) - 0.5 for along in edges)  # matplotlib counts from the first pixel's centre
    thickness = min(0.6, 16 / max(grid))
    ax.vlines(xs, ys[0], ys[-1], colors="white", linewidth=thickness, alpha=0.75)
    ax.hlines(ys, xs[0], xs[-1], colors="white", linewidth=thickness, alpha=0.75)
    return ax


def draw_heat(
    photo: Any,
    heat: Any,
    ax: "Axes | None" = None,
    *,
    vmin: float = 0.0,
    vmax: float | None = None,
    cmap: str = "magma",
    title: str = "",
    label: str = "",
) -> "Axes":
    """A heat map over a grey photo (H, W, 3): for its pixels (H, W), NaN where there is none, or its patches (h, w).

    `label` adds a colour bar that says it.
    """
    photo, heat = _pixels(photo), _array(heat)
    height, width = photo.shape[:2]
    seen = np.isfinite(heat) if heat.shape == (height, width) else np.ones((height, width), bool)
    ax = _axis(ax)
    ax.imshow(_paled(_greyed(photo), seen))
    place = (-0.5, width - 0.5, height - 0.5, -0.5)
    vmax = _shared_top(heat) if vmax is None else vmax
    ax.imshow(heat, cmap=cmap, vmin=vmin, vmax=vmax, alpha=0.72, extent=place, interpolation="nearest")
    if label:
        add_scale([ax], label)
    return _bare(ax, title)


def draw_similarity(
    photo: Any, similarity: Any, ax: "Axes | None" = None, *, title: str = "", label: str = ""
) -> "Axes":
    """How alike patches are to one of them, over a photo; arrays as in `draw_heat`, 1 is the same."""
    lowest = min(0.0, float(_finite(_array(similarity)).min()))
    return draw_heat(photo, similarity, ax, vmin=lowest, vmax=1.0, cmap="viridis", title=title, label=label)


def draw_maps(
    photo: Any, heats: Any, titles: Sequence[str], figure: "Figure | None" = None, *, label: str = "share of attention"
) -> "list[Axes]":
    """Several heat maps (K, H, W) or (K, h, w) over one photo, on one scale with one colour bar."""
    photo, heats = _pixels(photo), _array(heats)
    axes = panels(len(heats), photo.shape[1] / photo.shape[0], figure)
    top = _shared_top(heats)
    for ax, heat, title in zip(axes, heats, titles, strict=True):
        draw_heat(photo, heat, ax, vmax=top, title=title)
    add_scale(axes, label, percent=True)
    return axes


def draw_heads(photo: Any, heat_A: Any, objectness_A: Any, figure: "Figure | None" = None) -> "list[Axes]":
    """Each head's map (A, ...) over one photo, the highest objectness first."""
    heat_A, objectness_A = _array(heat_A), _array(objectness_A)
    order = np.argsort(-objectness_A, kind="stable")
    titles = [f"head {head}  ({objectness_A[head]:.2f})" for head in order]
    return draw_maps(photo, heat_A[order], titles, figure, label="share of attention (in brackets: objectness)")


def draw_layers(photo: Any, heat_L: Any, layers: Sequence[int], figure: "Figure | None" = None) -> "list[Axes]":
    """Each layer's map (L, ...) over one photo."""
    return draw_maps(photo, heat_L, [f"block {layer}" for layer in layers], figure)


def draw_attention_distance(distance_LA: Any, ax: "Axes | None" = None, layers: Sequence[int] | None = None) -> "Axes":
    """How far each head of each layer looks, in pixels: a dot a head, a line through the layers' means."""
    distance_LA = _array(distance_LA)
    ax, places = _axis(ax), np.asarray(range(len(distance_LA)) if layers is None else layers)
    x = np.repeat(places, distance_LA.shape[1])
    ax.plot(places, distance_LA.mean(1), color="#21918c", linewidth=1.4, zorder=1, label="mean of the heads")
    ax.scatter(x, distance_LA.ravel(), s=20, color="#440154", alpha=0.6, linewidths=0, zorder=2, label="a head")
    ax.set_ylim(0, float(distance_LA.max()) * 1.12 or 1)
    _label(ax, "block", "mean attention distance (pixels)")
    _count_along(ax, places)
    ax.legend(frameon=False, fontsize=TEXT, labelcolor=INK, loc="lower right")
    return ax


def draw_position_similarity(
    similarity_hwhw: Any, ax: "Axes | None" = None, *, most: int = 8, label: str = "cosine similarity"
) -> "Axes":
    """The grid of grids: each small picture compares one patch's position (its place in the grid) with all others.

    A larger grid than `most` is thinned out evenly.
    """
    similarity = _array(similarity_hwhw)
    grid: tuple[int, int] = similarity.shape[:2]
    ys, xs = (np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) for count in grid)
    gap = max(1, max(grid) // 10)
    step = grid[0] + gap, grid[1] + gap
    montage = np.full((len(ys) * step[0] - gap, len(xs) * step[1] - gap), np.nan)
    for row, y in enumerate(ys):
        for column, x in enumerate(xs):
            top, left = row * step[0], column * step[1]
            montage[top : top + grid[0], left : left + grid[1]] = similarity[y, x]
    ax = _axis(ax, WIDTH * 0.8, WIDTH * 0.7 * montage.shape[0] / montage.shape[1])
    lowest, highest = min(0.0, float(similarity.min())), float(similarity.max())
    ax.imshow(montage, cmap="viridis", vmin=lowest, vmax=highest, interpolation="nearest")
    ax.set_xticks(np.arange(len(xs)) * step[1] + (grid[1] - 1) / 2, [str(x) for x in xs])
    ax.set_yticks(np.arange(len(ys)) * step[0] + (grid[0] - 1) / 2, [str(y) for y in ys])
    _label(ax, "column of the patch", "row of the patch")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    add_scale([ax], label, location="right")
    return ax


def draw_norms(
    norms_hw: Any, outliers_hw: Any = None, ax: "Axes | None" = None, edges: Edges | None = None, title: str = ""
) -> "Axes":
    """How long each patch's token is (h, w); those that `outliers_hw` says are framed."""
    norms = _array(norms_hw)
    ax, fresh = _axis(ax), edges is None
    edges = edges or even_edges(norms.shape, norms.shape)
    ys, xs = (np.asarray(along) - 0.5 for along in edges)
    ax.pcolormesh(xs, ys, norms, cmap="cividis", vmin=0.0, vmax=float(_finite(norms).max()) or 1.0)
    if outliers_hw is not None:
        for patch in np.argwhere(_array(outliers_hw).astype(bool)):
            mark_patch(ax, edges, patch, colour=MARK)
    if fresh:
        ax.set_aspect("equal")
        ax.invert_yaxis()
    return _bare(ax, title)


def draw_shares(shares: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Which kinds of tokens each layer's attention goes to, stacked: {kind: (L,)}; kinds without any are left out."""
    ax = _axis(ax)
    drawn = {kind: _array(share) for kind, share in shares.items()}
    depth = len(next(iter(drawn.values())))
    base, places = np.zeros(depth), np.arange(depth)
    for kind, share_L in drawn.items():
        if share_L.any():
            ax.bar(places, share_L, bottom=base, width=0.8, color=KINDS.get(kind, "#888888"), label=kind)
            base = base + share_L
    ax.set_ylim(0, 1)
    _label(ax, "block", "share of attention")
    _count_along(ax, places)
    _in_percent(ax.yaxis)
    ax.legend(
        frameon=False, fontsize=TEXT, labelcolor=INK, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), handlelength=1.2
    )
    return ax


def mark_patch(ax: "Axes", edges: Edges, patch: Sequence[int] | Array, colour: str = "white") -> None:
    """A frame around one patch (row, column)."""
    from matplotlib.patches import Rectangle

    ys, xs = edges
    row, column = int(patch[0]), int(patch[1])
    corner = float(xs[column]) - 0.5, float(ys[row]) - 0.5
    width, height = float(xs[column + 1] - xs[column]), float(ys[row + 1] - ys[row])
    for line, thickness in (("black", 2.6), (colour, 1.3)):  # seen on dark and on bright ground
        ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=line, linewidth=thickness))


def add_scale(axes: "Sequence[Axes]", label: str, *, percent: bool = False, location: str = "bottom") -> None:
    """One colour bar for these axes, which share a scale; it ends in a point where values lie beyond it."""
    maps = [drawn for ax in axes for drawn in _maps(ax)[-1:]]
    beyond = any(_finite(each.get_array()).max() > each.norm.vmax for each in maps)
    size = {"shrink": 0.5, "aspect": 36} if location == "bottom" else {"shrink": 0.85, "aspect": 30}
    figure: Any = axes[0].figure
    pad = 0.1 * figure.dpi / (figure.bbox.height if location == "bottom" else figure.bbox.width)  # a tenth of an inch
    bar = figure.colorbar(
        _as_seen(maps[-1]), ax=list(axes), location=location, pad=pad, extend="max" if beyond else "neither", **size
    )
    bar.set_label(label, fontsize=TEXT, color=INK)
    bar.ax.tick_params(labelsize=SMALL, labelcolor=INK, color=INK, length=2.5)
    bar.outline.set_visible(False)
    bar.ax.locator_params(nbins=5)
    if percent:
        _in_percent(bar.ax.xaxis if location == "bottom" else bar.ax.yaxis)


def even_edges(grid: tuple[int, int], size: tuple[int, int]) -> Edges:
    """The borders of a grid that fills a photo of this (height, width)."""
    return np.linspace(0, size[0], grid[0] + 1), np.linspace(0, size[1], grid[1] + 1)


def _array(values: Any) -> Array:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values  # numpy knows no bfloat16
    return np.asarray(values)


def _pixels(photo: Any) -> Array:
    photo = _array(photo)
    if photo.ndim != 3 or photo.shape[2] != 3 or photo.dtype != np.uint8:
        raise PatchlightError(
            f"a photo to draw on is (height, width, 3) uint8, not {photo.shape} {photo.dtype}; convert it, or pass a "
            "Pillow image in RGB"
        )
    return photo


def _axis(ax: "Axes | None", width: float = WIDTH, height: float = 3.6) -> "Axes":
    return new_figure(width, height).add_subplot() if ax is None else ax


def _maps(ax: "Axes") -> list[Any]:
    """What was drawn with a colour map; a photo has colours of its own, and lines have none."""
    drawn = [(each, each.get_array()) for each in (*ax.images, *ax.collections)]
    return [each for each, array in drawn if array is not None and array.ndim == 2]


def _as_seen(drawn: Any) -> Any:
    """The map's scale with its colours as they look over a grey photo."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    opacity = drawn.get_alpha() or 1.0
    colours = drawn.get_cmap()(np.arange(256))[:, :3]
    return ScalarMappable(drawn.norm, ListedColormap(opacity * colours + (1 - opacity) * 0.5))


def _shared_top(heats: Array) -> float:
    """Where the scale ends: one of a hundred patches may lie above, so that a few do not darken the rest."""
    seen = _finite(heats)
    return float(np.quantile(seen, 0.99)) if seen.any() else 1.0


def _finite(values: Any) -> Array:
    """The numbers alone; a zero where there are none, as in a photo so long that none of its drawn pixels was seen."""
    values = np.ma.getdata(values)
    return values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)


def _greyed(photo_HWC: Array) -> Array:
    """Grey, and flatter than the photo: what lies over it should look bright by its own value alone."""
    grey_HW = 40 + 0.65 * (photo_HWC @ np.array([0.299, 0.587, 0.114]))
    return np.repeat(grey_HW[..., None], 3, -1).astype(np.uint8)


def _paled(photo_HWC: Array, seen_HW: Array) -> Array:
    """The photo, washed out where the model did not see it."""
    return np.where(seen_HW[..., None], photo_HWC, 190 + photo_HWC // 4).astype(np.uint8)


def _inside(edges: Edges, size: tuple[int, int]) -> Array:
    down, across = (
        (np.arange(count) + 0.5 > along[0]) & (np.arange(count) + 0.5 < along[-1])
        for count, along in zip(size, edges, strict=True)
    )
    return np.outer(down, across)


def _bare(ax: "Axes", title: str) -> "Axes":
    """No ticks and no frame: a picture. A title is shown letter by letter, whatever dollars are in it."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    if title:
        ax.set_title(title, fontsize=TEXT, color=INK, pad=4, parse_math=False)
    return ax


def _label(ax: "Axes", across: str, up: str) -> None:
    ax.set_xlabel(across, fontsize=TEXT, color=INK)
    ax.set_ylabel(up, fontsize=TEXT, color=INK)
    ax.tick_params(labelsize=SMALL, labelcolor=INK, color=INK, length=2.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["bottom", "left"]].set_color("#999999")


def _count_along(ax: "Axes", places: Array) -> None:
    """Whole numbers below the axis, as many as there is room for."""
    ax.set_xticks(places[:: math.ceil(len(places) / 16)])
    ax.set_xlim(places[0] - 0.6, places[-1] + 0.6)


def _in_percent(axis: Any) -> None:
    axis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
