"""Pictures of what a model does, on axes of your own or new ones.

Every function takes numpy arrays (torch tensors are welcome) and `ax=None`, and returns the axis that it drew on, so
that it serves in a notebook. A photo is a Pillow image, what `pl.decode` gives, or an array: (H, W, 3) for colours or
(H, W) for greys, uint8 or numbers from 0 to 1. Several maps that
belong together (heads, layers) take `figure=None` and return their axes, the photo's first: one scale, one colour bar.
pyplot and its global state stay out, so that servers, threads and machines without a display can draw, too;
`to_png(ax)` gives the bytes of a file.

Colours run evenly to the eye: magma for attention, viridis for similarity, cividis for sizes.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from patchlight.errors import PatchlightError
from patchlight.geometry import Size, View
from patchlight.images.decode import Decoded, decode

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
OPACITY = 0.4, 0.95
"""Of a map over a photo, where it is lowest and highest: the photo shows through where there is little to see."""
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
    """The bytes of a PNG file of a figure, or of the one that an axis lies in, cut to what is drawn."""
    figure = getattr(figure, "figure", figure)
    if not hasattr(figure, "savefig"):
        raise PatchlightError(f"to_png takes a figure or one of its axes, not a {type(figure).__name__}")
    file = io.BytesIO()
    # Without the version of matplotlib in it, the same picture gives the same bytes.
    figure.savefig(file, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.08, metadata={"Software": None})
    return file.getvalue()


def panels(count: int, aspect: float, figure: "Figure | None" = None, columns: int | None = None) -> "list[Axes]":
    """Axes for `count` pictures of this aspect (width / height), in rows."""
    if columns is None:
        least = round((4 if count <= 16 else 6) / math.sqrt(min(max(aspect, 0.5), 2)))
        columns = min(range(least, least + 3), key=lambda each: -count % each / each)  # which fills the last row best
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    if figure is None:
        width = WIDTH / columns
        figure = new_figure(WIDTH, rows * (min(width / aspect, TALLEST) + 0.3) + 0.6)
    elif not hasattr(figure, "add_subplot"):
        raise PatchlightError(f"figure={figure!r:.60} is not a figure; pass plot.new_figure(), or leave it out")
    return [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def draw_photo(photo: Any, ax: "Axes | None" = None, edges: Edges | None = None, title: str = "") -> "Axes":
    """Draw a photo; if `edges` are given, the part outside the patches is pale."""
    photo = _pixels(photo)
    ax = axis_or_new(ax)
    seen_HW = np.ones(photo.shape[:2], bool) if edges is None else _inside(edges, photo.shape[:2])
    ax.imshow(_paled(photo, seen_HW))
    return _bare(ax, title)


def draw_patches(
    photo: Any, grid: Size, ax: "Axes | None" = None, edges: Edges | None = None, title: str = ""
) -> "Axes":
    """A photo and the patches that it is cut into."""
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
    percent: bool = False,
    even: float | None = None,
) -> "Axes":
    """A heat map over a grey photo: for its pixels (H, W), NaN where there is none, or its patches (h, w).

    `label` adds a colour bar that says it. `even` is what each patch has where all have the same (1 / tokens, for
    attention): it is marked there, and the scale reaches to twice as much at least, so that an even map does not glow.
    """
    photo, heat = _pixels(photo), as_array(heat)
    if heat.ndim != 2:
        raise PatchlightError(f"a heat map is (height, width), not {heat.shape}; pass one of them, such as heat[0]")
    height, width = photo.shape[:2]
    seen = _seen(heat, (height, width))
    ax = axis_or_new(ax)
    ax.imshow(_paled(_greyed(photo), seen))
    place = (-0.5, width - 0.5, height - 0.5, -0.5)
    vmax = _top(heat, even) if vmax is None else vmax
    ax.imshow(heat, cmap=_see_through(cmap), vmin=vmin, vmax=vmax, extent=place, interpolation="nearest")
    if label:
        add_scale([ax], label, percent=percent, marks=_even_mark(even))
    return _bare(ax, title)


def draw_matrix(
    matrix: Any,
    ax: "Axes | None" = None,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    digits: int | None = None,
    cmap: str = "viridis",
    vmin: float | None = None,
    vmax: float | None = None,
    title: str = "",
    label: str = "",
) -> "Axes":
    """A matrix as a picture, a square for each number: attention from each token to each, similarities, weights.

    `rows` and `columns` name its rows and columns. `digits` writes the numbers themselves into the squares, with so
    many after the point. `label` adds a colour bar that says it.
    """
    matrix = as_array(matrix)
    if matrix.ndim != 2:
        raise PatchlightError(f"a matrix has rows and columns, not the shape {matrix.shape}; pass one, such as rows[0]")
    if (rows and len(rows) != matrix.shape[0]) or (columns and len(columns) != matrix.shape[1]):
        raise PatchlightError(
            f"{len(rows)} names of rows and {len(columns)} of columns do not fit a matrix of {matrix.shape}"
        )
    ax = axis_or_new(ax)
    seen = _finite(matrix)
    vmin = float(seen.min()) if vmin is None else vmin
    vmax = float(seen.max()) if vmax is None else vmax
    drawn = ax.imshow(matrix, cmap=cmap, vmin=vmin, vmax=vmax if vmax > vmin else vmin + 1, interpolation="nearest")
    if digits is not None:
        for (row, column), value in np.ndenumerate(matrix):
            if not np.isfinite(value):
                continue
            red, green, blue, _ = drawn.cmap(drawn.norm(value))
            ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"  # read on any colour
            ax.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=SMALL, color=ink)
    _bare(ax, title)
    for axis, names in ((ax.xaxis, columns), (ax.yaxis, rows)):
        if names:
            axis.set_ticks(range(len(names)), names)
    ax.tick_params(labelsize=SMALL, labelcolor=INK, length=0)
    if label:
        add_scale([ax], label, location="right")
    return ax


def draw_similarity(
    photo: Any, similarity: Any, ax: "Axes | None" = None, *, title: str = "", label: str = ""
) -> "Axes":
    """How alike patches are to one of them, over a photo; arrays as in `draw_heat`, 1 is the same."""
    lowest = min(0.0, float(_finite(as_array(similarity)).min()))
    return draw_heat(photo, similarity, ax, vmin=lowest, vmax=1.0, cmap="viridis", title=title, label=label)


def draw_maps(
    photo: Any,
    heats: Any,
    titles: Sequence[str],
    figure: "Figure | None" = None,
    *,
    label: str,
    percent: bool = False,
    even: float | None = None,
) -> "list[Axes]":
    """A photo, and several heat maps (K, H, W) or (K, h, w) over it, on one scale with one colour bar; see draw_heat.

    K + 1 axes come back.
    """
    photo, heats = _pixels(photo), as_array(heats)
    if heats.ndim != 3 or len(heats) != len(titles):
        raise PatchlightError(
            f"{len(titles)} heat maps are ({len(titles)}, height, width), not {heats.shape}; take the other axes off, "
            "as in heat[:, 0]"
        )
    first, *axes = panels(len(heats) + 1, photo.shape[1] / photo.shape[0], figure)
    draw_photo(_paled(photo, _seen(heats[0], photo.shape[:2])), first, title="photo")
    top = _top(heats, even)
    for ax, heat, title in zip(axes, heats, titles, strict=True):
        draw_heat(photo, heat, ax, vmax=top, title=title)
    add_scale([first, *axes], label, percent=percent, marks=_even_mark(even))
    return [first, *axes]


def draw_heads(
    photo: Any, heat_A: Any, objectness_A: Any, figure: "Figure | None" = None, *, even: float | None = None
) -> "list[Axes]":
    """Each head's map (A, ...) over one photo, the highest objectness first; `even` as in draw_heat."""
    heat_A, objectness_A = as_array(heat_A), as_array(objectness_A)
    if objectness_A.shape != heat_A.shape[:1]:
        raise PatchlightError(f"maps {heat_A.shape} need one objectness for each head, not {objectness_A.shape}")
    order = np.argsort(-objectness_A, kind="stable")
    titles = [f"head {head}  ({objectness_A[head]:.2f})" for head in order]
    label = "share of attention (in brackets: objectness)"
    return draw_maps(photo, heat_A[order], titles, figure, label=label, percent=True, even=even)


def draw_layers(
    photo: Any, heat_L: Any, layers: Sequence[int], figure: "Figure | None" = None, *, even: float | None = None
) -> "list[Axes]":
    """Each layer's map (L, ...) over one photo; `even` as in draw_heat."""
    titles = [f"block {layer}" for layer in layers]
    return draw_maps(photo, heat_L, titles, figure, label="share of attention", percent=True, even=even)


def draw_attention_distance(
    distance_LA: Any, ax: "Axes | None" = None, layers: Sequence[int] | None = None, even: float | None = None
) -> "Axes":
    """How far each head of each layer looks, in pixels: a dot a head, a line through the layers' means.

    `even` is how far a head looks that attends to all patches alike.
    """
    distance_LA = as_array(distance_LA)
    ax, places = axis_or_new(ax), np.asarray(range(len(distance_LA)) if layers is None else layers)
    x = np.repeat(places, distance_LA.shape[1])
    ax.plot(places, distance_LA.mean(1), color="#21918c", linewidth=1.4, zorder=1, label="mean of the heads")
    ax.scatter(x, distance_LA.ravel(), s=20, color="#440154", alpha=0.6, linewidths=0, zorder=2, label="a head")
    if even is not None:
        ax.axhline(even, color="#888888", linewidth=0.9, linestyle=(0, (5, 4)), zorder=0, label="even attention")
    ax.set_ylim(0, max(float(distance_LA.max()), even or 0) * 1.12 or 1)
    label_axes(ax, "block", "mean attention distance (pixels)")
    _count_along(ax, places)
    ax.legend(frameon=False, fontsize=TEXT, labelcolor=INK, loc="lower right")
    return ax


def draw_position_similarity(
    similarity_hwhw: Any, ax: "Axes | None" = None, *, most: int = 8, label: str = "cosine similarity"
) -> "Axes":
    """The grid of grids: each small picture compares one patch's position (its place in the grid) with all others.

    A larger grid than `most` is thinned out evenly.
    """
    similarity = as_array(similarity_hwhw)
    grid: tuple[int, int] = similarity.shape[:2]
    ys, xs = (np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) for count in grid)
    gap = max(1, max(grid) // 10)
    step = grid[0] + gap, grid[1] + gap
    montage = np.full((len(ys) * step[0] - gap, len(xs) * step[1] - gap), np.nan)
    for row, y in enumerate(ys):
        for column, x in enumerate(xs):
            top, left = row * step[0], column * step[1]
            montage[top : top + grid[0], left : left + grid[1]] = similarity[y, x]
    ax = axis_or_new(ax, WIDTH * 0.8, WIDTH * 0.7 * montage.shape[0] / montage.shape[1])
    lowest, highest = min(0.0, float(similarity.min())), float(similarity.max())
    ax.imshow(montage, cmap="viridis", vmin=lowest, vmax=highest, interpolation="nearest")
    ax.set_xticks(np.arange(len(xs)) * step[1] + (grid[1] - 1) / 2, [str(x) for x in xs])
    ax.set_yticks(np.arange(len(ys)) * step[0] + (grid[0] - 1) / 2, [str(y) for y in ys])
    label_axes(ax, "column of the patch", "row of the patch")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    add_scale([ax], label, location="right")
    return ax


def draw_norms(
    norms_hw: Any, outliers_hw: Any = None, ax: "Axes | None" = None, edges: Edges | None = None, title: str = ""
) -> "Axes":
    """How long each patch's token is (h, w), on a scale that starts at the shortest; `outliers_hw` are framed."""
    norms = as_array(norms_hw)
    ax, fresh = axis_or_new(ax), edges is None
    edges = edges or even_edges(norms.shape, norms.shape)
    ys, xs = (np.asarray(along) - 0.5 for along in edges)
    lowest, highest = float(_finite(norms).min()), float(_finite(norms).max())
    ax.pcolormesh(xs, ys, norms, cmap="cividis", vmin=lowest, vmax=highest if highest > lowest else lowest + 1)
    if outliers_hw is not None:
        for patch in np.argwhere(as_array(outliers_hw).astype(bool)):
            mark_patch(ax, edges, patch, colour=MARK)
    if fresh:
        ax.set_aspect("equal")
        ax.invert_yaxis()
    return _bare(ax, title)


def draw_shares(shares: Mapping[str, Any], ax: "Axes | None" = None) -> "Axes":
    """Which kinds of tokens each layer's attention goes to, stacked: {kind: (L,)}; kinds without any are left out."""
    ax = axis_or_new(ax)
    drawn = {kind: as_array(share) for kind, share in shares.items()}
    depth = len(next(iter(drawn.values())))
    base, places = np.zeros(depth), np.arange(depth)
    for kind, share_L in drawn.items():
        if share_L.any():
            ax.bar(places, share_L, bottom=base, width=0.8, color=KINDS.get(kind, "#888888"), label=kind)
            base = base + share_L
    ax.set_ylim(0, 1)
    label_axes(ax, "block", "share of attention")
    _count_along(ax, places)
    in_percent(ax.yaxis)
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
    for line, thickness in (("black", 3.0), (colour, 1.8)):  # seen on dark and on bright ground
        frame = Rectangle(corner, width, height, fill=False, edgecolor=line, linewidth=thickness, zorder=3)
        ax.add_patch(frame)  # above the lines between patches


def add_scale(
    axes: "Sequence[Axes]",
    label: str,
    *,
    percent: bool = False,
    location: str = "bottom",
    marks: Mapping[str, float] | None = None,
) -> None:
    """One colour bar for these axes, which share a scale; `marks` are values with names of their own.

    Where values lie beyond it, it ends in a point, and its label says the largest.
    """
    maps = [drawn for ax in axes for drawn in _maps(ax)[-1:]]
    largest = max(float(_finite(each.get_array()).max()) for each in maps)
    beyond = largest > maps[-1].norm.vmax + 1e-4 * abs(maps[-1].norm.vmax)  # and not by a rounding error
    if beyond:
        label = f"{label}, largest {_as_percent(largest) if percent else format(largest, '.3g')}"
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
        in_percent(bar.ax.xaxis if location == "bottom" else bar.ax.yaxis)
    if marks:
        # On the other side of the bar, where no number can be in the way.
        across = location == "bottom"
        other = bar.ax.secondary_xaxis("top") if across else bar.ax.secondary_yaxis("left")
        other.set_ticks(list(marks.values()), labels=list(marks))
        other.tick_params(labelsize=SMALL, labelcolor=INK, color=INK, length=2.5, pad=1)
        other.spines[:].set_visible(False)


def even_edges(grid: Size, size: Size) -> Edges:
    """The borders of a grid that fills a photo of this (height, width)."""
    return np.linspace(0, size[0], grid[0] + 1), np.linspace(0, size[1], grid[1] + 1)


def view_edges(view: View, grid: Size, patch_size: tuple[float, float], drawn_size: Size) -> Edges:
    """The borders of the patches in a photo that is drawn at this (height, width), by the view that the model had.

    `patch_size` is in pixels of the model's image, as in AttentionMaps. A patch that holds none of the photo, because
    it lies in the padding, has no extent.
    """
    ys, xs = (
        np.clip((np.minimum(np.arange(count + 1) * patch, model) - offset) / scale, 0, source) * (drawn / source)
        for count, patch, model, offset, scale, source, drawn in zip(
            grid, patch_size, view.model_size, view.offset, view.scale, view.source_size, drawn_size, strict=True
        )
    )
    return ys, xs


def as_array(values: Any) -> Array:
    if hasattr(values, "heat"):
        raise PatchlightError("these are whole AttentionMaps; pass their heat(), or one of its maps")
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values  # numpy knows no bfloat16
    return np.asarray(values)


def _pixels(photo: Any) -> Array:
    if isinstance(photo, Image.Image):
        photo = decode(photo)  # upright, and in RGB
    photo = np.asarray(photo.image) if isinstance(photo, Decoded) else as_array(photo)
    if photo.ndim == 2:
        photo = np.repeat(photo[..., None], 3, -1)
    if np.issubdtype(photo.dtype, np.floating) and photo.size and photo.min() >= 0 and photo.max() <= 1:
        photo = (photo * 255).round().astype(np.uint8)
    if photo.ndim != 3 or photo.shape[2] != 3 or photo.dtype != np.uint8:
        raise PatchlightError(
            f"a photo to draw on is (height, width, 3) uint8, or numbers from 0 to 1, not {photo.shape} {photo.dtype}; "
            "convert it, or pass a Pillow image"
        )
    return photo


def _seen(heat: Array, size: Size) -> Array:
    """Which pixels of a photo of this size a heat map covers, a map of its pixels or of its patches."""
    if heat.shape == size:
        return np.isfinite(heat)
    if 2 * heat.shape[0] > size[0] or 2 * heat.shape[1] > size[1]:
        raise PatchlightError(
            f"heat of {heat.shape[0]} x {heat.shape[1]} does not fit a photo of {size[0]} x {size[1]} pixels; pass "
            "patches, or heat_on_photo(..., photo_size=) at the size of the photo that is drawn"
        )
    return np.ones(size, bool)


def axis_or_new(ax: "Axes | None", width: float = WIDTH, height: float = 3.6) -> "Axes":
    if ax is not None and not hasattr(ax, "imshow"):
        raise PatchlightError(
            f"ax={ax!r:.60} is not an axis; pass figure.add_subplot(), one of your axes, or leave it out"
        )
    return new_figure(width, height).add_subplot() if ax is None else ax


def _maps(ax: "Axes") -> list[Any]:
    """The images on these axes that were drawn with a colour map."""
    drawn = [(each, each.get_array()) for each in (*ax.images, *ax.collections)]
    return [each for each, array in drawn if array is not None and array.ndim == 2]


def _as_seen(drawn: Any) -> Any:
    """A colour map with the colours that the see-through map has over mid grey, for the colour bar."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    colours, opacity = np.split(drawn.get_cmap()(np.arange(256)), [3], axis=1)
    return ScalarMappable(drawn.norm, ListedColormap(opacity * colours + (1 - opacity) * 0.5))


def _see_through(cmap: str) -> Any:
    """The colour map with an opacity that rises with the value."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    colours = colormaps[cmap](np.arange(256))
    colours[:, 3] = np.linspace(*OPACITY, 256)
    return ListedColormap(colours)


def _top(heats: Array, even: float | None) -> float:
    """Upper end of the scale: the largest value, or less if a few outliers would darken everything else."""
    seen = _finite(heats)
    largest, common = float(seen.max()), 3 * float(np.quantile(seen, 0.99))
    top = max(min(largest, common) if common > 0 else largest, 2 * (even or 0))
    return top if top > 0 else 1.0


def _even_mark(even: float | None) -> dict[str, float]:
    return {} if even is None else {"even": even}


def _finite(values: Any) -> Array:
    """The numbers alone; a zero where there are none, as in a photo so long that none of its drawn pixels was seen."""
    values = np.ma.getdata(values)
    return values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)


def _greyed(photo_HWC: Array) -> Array:
    """The photo in grey with reduced contrast, so that brightness shows the heat alone."""
    grey_HW = 40 + 0.65 * (photo_HWC @ np.array([0.299, 0.587, 0.114]))
    return np.repeat(grey_HW[..., None], 3, -1).astype(np.uint8)


def _paled(photo_HWC: Array, seen_HW: Array) -> Array:
    """The photo, paler where the model did not see it."""
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


def label_axes(ax: "Axes", across: str, up: str) -> None:
    ax.set_xlabel(across, fontsize=TEXT, color=INK)
    ax.set_ylabel(up, fontsize=TEXT, color=INK)
    ax.tick_params(labelsize=SMALL, labelcolor=INK, color=INK, length=2.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["bottom", "left"]].set_color("#999999")


def _count_along(ax: "Axes", places: Array) -> None:
    """Whole numbers below the axis, as many as there is room for."""
    ax.set_xticks(places[:: math.ceil(len(places) / 16)])
    ax.set_xlim(places[0] - 0.6, places[-1] + 0.6)


def in_percent(axis: Any) -> None:
    axis.set_major_formatter(lambda share, _: _as_percent(share))


def _as_percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def draw_growth(
    costs: Mapping[str, Mapping[int, float]], ax: "Axes | None" = None, label: str = "GMACs for one image"
) -> "Axes":
    """How a cost of several models grows with the image: for each, {pixels a side: cost}. Both axes are logarithmic, so
    that a straight line is a power: a grey one shows growth in proportion to the pixels."""
    ax = axis_or_new(ax)
    ax.set_xscale("log")
    ax.set_yscale("log")
    colours = ["#440154", "#3b528b", "#21918c", "#7ad151", MARK, "#f89540", "#888888"]
    drawn = {name: sorted(each.items()) for name, each in costs.items() if each}
    for number, (name, points) in enumerate(drawn.items()):
        sides, values = zip(*points, strict=True)
        style = ("-", "--", ":")[number // len(colours) % 3] if len(drawn) > len(colours) else "-"
        colour, marker = colours[number % len(colours)], "osD^vP*"[number % 7]
        ax.plot(sides, values, style, color=colour, linewidth=1.4, marker=marker, markersize=3.5, label=name)
    if drawn:
        ticks = sorted({side for points in drawn.values() for side, _ in points})
        least = 0.75 * min(points[0][1] for points in drawn.values() if points[0][0] == ticks[0])
        line = [least * (side / ticks[0]) ** 2 for side in ticks]
        ax.plot(ticks, line, color="#aaaaaa", linewidth=0.9, linestyle=(0, (5, 4)), label="like the pixels")
        ax.set_xticks(ticks, labels=[str(side) for side in ticks])
        ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK)
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    label_axes(ax, "image (pixels a side)", label)
    return ax
