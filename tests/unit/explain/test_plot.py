"""The figures, by the numbers that they draw and not by their pixels."""

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from patchlight.errors import PatchlightError
from patchlight.explain import plot
from patchlight.explain.attention import AttentionMaps
from patchlight.geometry import View
from patchlight.images.decode import decode

RANDOM = np.random.default_rng(0)
PHOTO = RANDOM.integers(0, 256, (30, 40, 3), dtype=np.uint8)


def shown(ax):
    """The numbers of the map on an axis, over the photo."""
    return np.ma.getdata(ax.images[1].get_array())


def bars(figure):
    """The colour bars' labels."""
    return [ax.get_xlabel() or ax.get_ylabel() for ax in figure.axes if ax.get_label() == "<colorbar>"]


def marks(figure):
    """What stands on the other side of the colour bar: values by their names."""
    (bar,) = (ax for ax in figure.axes if ax.get_label() == "<colorbar>")
    return {
        text.get_text(): tick
        for other in bar.child_axes
        for tick, text in zip(other.get_xticks(), other.get_xticklabels(), strict=True)
    }


def numbers(figure):
    """The numbers below the colour bar."""
    (bar,) = (ax for ax in figure.axes if ax.get_label() == "<colorbar>")
    figure.draw_without_rendering()
    return [text.get_text() for text in bar.get_xticklabels()]


def test_a_missing_matplotlib_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PatchlightError, match=r"^pictures need matplotlib: pip install 'patchlight\[plot\]'$"):
        plot.draw_photo(PHOTO)


def test_pyplot_and_its_state_stay_out() -> None:
    code = """
import sys, numpy as np
from patchlight.explain import plot
assert "matplotlib" not in sys.modules, "importing the module imports matplotlib"
photo = np.zeros((8, 8, 3), np.uint8)
plot.to_png(plot.draw_heads(photo, np.ones((2, 4, 4)), np.ones(2))[0].figure)
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_axes_of_your_own_are_used_and_given_back() -> None:
    mine = plot.new_figure().subplots(2, 4).ravel()
    square = np.ones((2, 3))
    drawn = [
        plot.draw_photo(PHOTO, mine[0]),
        plot.draw_patches(PHOTO, (3, 4), mine[1]),
        plot.draw_heat(PHOTO, square, mine[2]),
        plot.draw_similarity(PHOTO, square, mine[3]),
        plot.draw_attention_distance(square, mine[4]),
        plot.draw_position_similarity(np.ones((2, 3, 2, 3)), mine[5]),
        plot.draw_norms(square, ax=mine[6]),
        plot.draw_shares({"patches": np.ones(3)}, mine[7]),
    ]
    assert drawn == list(mine)
    figure = plot.new_figure()
    assert {ax.figure for ax in plot.draw_layers(PHOTO, np.ones((2, 2, 3)), [0, 5], figure)} == {figure}


def test_tensors_and_pillow_images_are_welcome() -> None:
    heat_hw = torch.rand(3, 4).requires_grad_()
    ax = plot.draw_heat(Image.fromarray(PHOTO), heat_hw)
    np.testing.assert_array_equal(shown(ax), heat_hw.detach().numpy())
    ax = plot.draw_heat(torch.from_numpy(PHOTO), heat_hw.bfloat16())
    np.testing.assert_array_equal(shown(ax), heat_hw.detach().bfloat16().float().numpy())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_drawn_upright(orientation: int) -> None:
    """A turned Pillow image, and what `decode` makes of it, look as a viewer shows them."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(PHOTO).save(file, "PNG", exif=exif)
    upright = {
        1: PHOTO,
        2: PHOTO[:, ::-1],
        3: PHOTO[::-1, ::-1],
        4: PHOTO[::-1],
        5: PHOTO.transpose(1, 0, 2),
        6: np.rot90(PHOTO, -1),
        7: PHOTO[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(PHOTO),
    }[orientation]
    for photo in (Image.open(file), decode(file.getvalue())):
        np.testing.assert_array_equal(plot.draw_photo(photo).images[0].get_array(), upright)


def test_a_grey_pillow_image_is_a_photo() -> None:
    grey = Image.fromarray(PHOTO[..., 0])
    np.testing.assert_array_equal(plot.draw_photo(grey).images[0].get_array(), PHOTO[..., :1].repeat(3, 2))


def test_arrays_of_greys_and_of_numbers_from_0_to_1_are_photos() -> None:
    np.testing.assert_array_equal(plot.draw_photo(PHOTO / 255).images[0].get_array(), PHOTO)
    ax = plot.draw_patches(PHOTO[..., 0] / 255, (3, 4))
    np.testing.assert_array_equal(ax.images[0].get_array(), PHOTO[..., :1].repeat(3, 2))


@pytest.mark.parametrize("photo", [PHOTO / 254, PHOTO.astype(float) - 0.1, PHOTO.transpose(2, 0, 1)])
def test_what_is_no_photo_is_refused(photo: np.ndarray) -> None:
    with pytest.raises(PatchlightError, match=r"\(height, width, 3\) uint8, or numbers from 0 to 1, not \("):
        plot.draw_photo(photo)


def test_heat_lies_over_the_photo_and_what_was_not_seen_is_pale() -> None:
    heat_HW = RANDOM.random((30, 40))
    heat_HW[:, :10] = np.nan
    ax = plot.draw_heat(PHOTO, heat_HW, vmax=1.5, title="$not math", label="share")
    np.testing.assert_array_equal(shown(ax), heat_HW)
    assert ax.images[1].get_clim() == (0, 1.5)
    assert ax.images[1].get_extent() == [-0.5, 39.5, 29.5, -0.5]
    assert bars(ax.figure) == ["share"]
    grey = ax.images[0].get_array()
    assert (grey[..., 0] == grey[..., 1]).all()
    assert grey[:, :10].min() > grey[:, 10:].mean()
    plot.to_png(ax.figure)  # a title with a dollar is text


def test_what_does_not_fit_the_photo_is_refused() -> None:
    whole = AttentionMaps(
        weights=torch.ones(1, 1, 1, 1, 5),
        grid=(2, 2),
        num_prefix=1,
        layers=(0,),
        queries=(0,),
        tokens=torch.ones(1, 5, 8),
        patch_size=(8.0, 8.0),
    )
    figure = plot.new_figure()
    for attempt, says in (
        (lambda: plot.draw_heat(PHOTO, np.ones((1, 3, 4))), r"a heat map is .*, not \(1, 3, 4\); .* such as heat\[0\]"),
        (lambda: plot.draw_heat(PHOTO, whole), r"whole AttentionMaps; pass their heat\(\)"),
        (lambda: plot.draw_heat(PHOTO, np.ones((40, 30))), "heat of 40 x 30 does not fit a photo of 30 x 40 pixels"),
        (lambda: plot.draw_heat(PHOTO, np.ones((16, 20))), "heat of 16 x 20 does not fit"),
        (lambda: plot.draw_layers(PHOTO, np.ones((2, 1, 3, 4)), [0, 1]), r"2 heat maps are \(2, .*not \(2, 1, 3, 4\)"),
        (lambda: plot.draw_layers(PHOTO, np.ones((2, 3, 4)), [0]), r"1 heat maps are \(1, .*not \(2, 3, 4\)"),
        (lambda: plot.draw_heads(PHOTO, np.ones((2, 3, 4)), [1.0]), r"one objectness for each head, not \(1,\)"),
        (lambda: plot.draw_photo(PHOTO, figure), r"^ax=<Figure .*is not an axis; pass figure.add_subplot\(\)"),
        (lambda: plot.draw_shares({"patches": np.ones(2)}, [figure.add_subplot()]), r"^ax=\[.*is not an axis"),
        (lambda: plot.draw_layers(PHOTO, np.ones((2, 3, 4)), [0, 1], figure.add_subplot()), "is not a figure"),
        (lambda: plot.to_png([figure]), "to_png takes a figure or one of its axes, not a list"),
    ):
        with pytest.raises(PatchlightError, match=says) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    plot.draw_heat(PHOTO, np.ones((15, 20)))  # two pixels a patch


def test_heat_of_patches_covers_the_photo() -> None:
    ax = plot.draw_heat(PHOTO, np.arange(6).reshape(2, 3))
    assert shown(ax).shape == (2, 3)
    assert ax.images[1].get_extent() == [-0.5, 39.5, 29.5, -0.5]


def test_a_map_that_is_seen_nowhere_leaves_the_pale_photo() -> None:
    for draw in (plot.draw_heat, plot.draw_similarity):
        ax = draw(PHOTO, np.full((30, 40), np.nan), label="share")
        assert np.isnan(shown(ax)).all()
        assert ax.images[0].get_array().min() >= 190
        assert plot.to_png(ax.figure).startswith(b"\x89PNG")


def test_heads_are_ordered_by_objectness_on_one_scale() -> None:
    heat_Ahw = RANDOM.random((5, 3, 4)) * np.array([1, 5, 2, 4, 3]).reshape(5, 1, 1)
    objectness = [0.1, 0.5, 0.3, 0.5, 0.2]
    axes = plot.draw_heads(PHOTO, heat_Ahw, objectness)
    titles = ["head 1  (0.50)", "head 3  (0.50)", "head 2  (0.30)", "head 4  (0.20)", "head 0  (0.10)"]
    photo, *axes = axes
    assert photo.get_title() == "photo"
    np.testing.assert_array_equal(photo.images[0].get_array(), PHOTO)
    assert [ax.get_title() for ax in axes] == titles
    for ax, head in zip(axes, [1, 3, 2, 4, 0], strict=True):
        np.testing.assert_array_equal(shown(ax), heat_Ahw[head])
    assert len({ax.images[1].get_clim() for ax in axes}) == 1
    assert len(photo.figure.axes) == 1 + 5 + 1, "one colour bar"
    assert bars(photo.figure) == ["share of attention (in brackets: objectness)"]


def test_layers_keep_their_order_and_share_a_scale() -> None:
    heat_Lhw = np.linspace(0, 1, 3 * 100).reshape(3, 10, 10)
    photo, *axes = plot.draw_layers(PHOTO, heat_Lhw, [0, 7, 11])
    assert [ax.get_title() for ax in axes] == ["block 0", "block 7", "block 11"]
    for ax, heat_hw in zip(axes, heat_Lhw, strict=True):
        np.testing.assert_array_equal(shown(ax), heat_hw)
    assert {ax.images[1].get_clim() for ax in axes} == {(0, 1)}, "the scale ends at the largest of all"
    assert bars(photo.figure) == ["share of attention"]
    assert marks(photo.figure) == {}
    assert "50%" in numbers(photo.figure) or "40%" in numbers(photo.figure)


def test_the_photo_beside_the_maps_is_pale_where_they_have_nothing() -> None:
    heat_LHW = np.ones((2, 30, 40))
    heat_LHW[:, :, 30:] = np.nan
    photo = plot.draw_layers(PHOTO, heat_LHW, [0, 1])[0].images[0].get_array()
    np.testing.assert_array_equal(photo[:, :30], PHOTO[:, :30])
    assert (photo[:, 30:] >= 190).all()


def test_other_maps_are_named_by_who_draws_them() -> None:
    axes = plot.draw_maps(PHOTO, np.ones((2, 3, 4)), ["a", "b"], label="gradient")
    assert bars(axes[0].figure) == ["gradient"]
    assert not any("%" in number for number in numbers(axes[0].figure))


def test_a_spot_far_brighter_than_the_rest_is_cut_off_and_named() -> None:
    heat_hw = np.full((15, 20), 0.01)
    heat_hw[3, 4] = 0.03
    figure = plot.draw_heat(PHOTO, heat_hw, label="share", percent=True).figure
    assert (figure.axes[0].images[1].get_clim(), bars(figure)) == ((0, 0.03), ["share"])
    heat_hw[3, 4] = 0.0712
    figure = plot.draw_heat(PHOTO, heat_hw, label="share", percent=True).figure
    assert figure.axes[0].images[1].get_clim() == (0, pytest.approx(0.03)), "three times what 99 of 100 stay below"
    assert bars(figure) == ["share, largest 7.12%"]
    figure = plot.draw_heat(PHOTO, heat_hw, label="relevance").figure
    assert bars(figure) == ["relevance, largest 0.0712"]
    lonely_hw = np.zeros((15, 20))
    lonely_hw[3, 4] = 0.5
    assert plot.draw_heat(PHOTO, lonely_hw).images[1].get_clim() == (0, 0.5)


def test_an_even_map_is_half_lit_and_even_is_marked() -> None:
    even = 1 / 12
    photo, *axes = plot.draw_layers(PHOTO, np.full((2, 3, 4), even), [0, 1], even=even)
    assert {ax.images[1].get_clim() for ax in axes} == {(0, 2 * even)}
    assert marks(photo.figure) == {"even": even}
    peaked_hw = np.full((3, 4), even / 2)
    peaked_hw[1, 1] = 5 * even
    ax = plot.draw_heat(PHOTO, peaked_hw, even=even, label="share")
    assert ax.images[1].get_clim() == (0, 5 * even)
    assert marks(ax.figure) == {"even": even}


@pytest.mark.parametrize("cmap", ["magma", "viridis"])
def test_the_photo_shows_through_where_there_is_little_heat(cmap: str) -> None:
    ax = plot.draw_heat(PHOTO, np.array([[0.0, 0.5, 1.0]]), cmap=cmap, label="share")
    drawn = ax.images[1]
    colours = drawn.to_rgba(np.linspace(0, 1, 11))
    assert (np.diff(colours[:, 3]) > 0).all()
    assert 0.3 < colours[0, 3] < 0.45
    assert colours[-1, 3] == pytest.approx(0.95)
    (bar,) = (each for each in ax.figure.axes if each.get_label() == "<colorbar>")
    looks = bar._colorbar.cmap(np.linspace(0, 1, 11))
    for look, (*colour, opacity) in zip(looks, colours, strict=True):
        expected = [opacity * channel + (1 - opacity) * 0.5 for channel in colour]
        np.testing.assert_allclose(look, [*expected, 1], atol=1e-6)
    brightness = looks[:, :3] ** 2.2 @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(brightness) > 0).all(), "more always looks brighter"


def test_similarity_ends_at_one_and_shows_opposites() -> None:
    assert plot.draw_similarity(PHOTO, np.array([[1, 0.4]])).images[1].get_clim() == (0, 1)
    assert plot.draw_similarity(PHOTO, np.array([[1, -0.4]])).images[1].get_clim() == (-0.4, 1)
    rounded = plot.draw_similarity(PHOTO, np.array([[1.0000001, 0.4]]), label="cosine")
    assert bars(rounded.figure) == ["cosine"], "a rounding error lies not beyond the scale"


def test_patches_are_cut_at_their_edges() -> None:
    ax = plot.draw_patches(PHOTO, (3, 5))
    down, across = (collection.get_segments() for collection in ax.collections)
    assert [segment[0, 0] + 0.5 for segment in down] == [0, 8, 16, 24, 32, 40]
    assert [segment[0, 1] + 0.5 for segment in across] == [0, 10, 20, 30]
    np.testing.assert_array_equal(ax.images[0].get_array(), PHOTO)

    ax = plot.draw_patches(PHOTO, (1, 2), edges=(np.array([0, 30]), np.array([5, 15, 25])))
    assert [segment[0, 0] + 0.5 for segment in ax.collections[0].get_segments()] == [5, 15, 25]
    np.testing.assert_array_equal(ax.images[0].get_array()[:, 5:25], PHOTO[:, 5:25])
    assert (ax.images[0].get_array()[:, :5] >= 190).all()
    assert (ax.images[0].get_array()[:, 25:] >= 190).all()


def test_a_marked_patch_is_framed_where_it_lies() -> None:
    ax = plot.draw_photo(PHOTO)
    plot.mark_patch(ax, plot.even_edges((3, 5), (30, 40)), (2, 1))
    for frame in ax.patches:
        assert (frame.get_x() + 0.5, frame.get_y() + 0.5, frame.get_width(), frame.get_height()) == (8, 20, 8, 10)
    ax = plot.draw_patches(PHOTO, (3, 5))
    plot.mark_patch(ax, plot.even_edges((3, 5), (30, 40)), (2, 1))
    lines = max(collection.get_zorder() for collection in ax.collections)
    assert min(frame.get_zorder() for frame in ax.patches) > lines, "not hidden by the grid"


@pytest.mark.parametrize(
    "view",
    [
        View.centred((480, 640), (64, 85), (64, 64), half="round"),  # cropped left and right
        View.centred((480, 640), (48, 64), (64, 64), half="round"),  # padded above and below
        View.centred((480, 640), (64, 64), (64, 64), half="round"),  # squashed
    ],
)
@pytest.mark.parametrize("patch", [(16.0, 16.0), (12.8, 25.0)])
def test_view_edges_are_the_corners_of_the_patches(view: View, patch: tuple[float, float]) -> None:
    grid = (-int(-64 // patch[0]), -int(-64 // patch[1]))
    ys, xs = plot.view_edges(view, grid, patch, (240, 160))
    expected_y = [view.point_to_source((0, min(row * patch[0], 64)))[1] / 2 for row in range(grid[0] + 1)]
    expected_x = [view.point_to_source((min(column * patch[1], 64), 0))[0] / 4 for column in range(grid[1] + 1)]
    np.testing.assert_allclose(ys, expected_y)
    np.testing.assert_allclose(xs, expected_x)


def test_attention_distance_has_a_dot_for_each_head() -> None:
    distance_LA = RANDOM.random((4, 3)) * 100
    ax = plot.draw_attention_distance(distance_LA)
    dots = [(layer, distance_LA[layer, head]) for layer in range(4) for head in range(3)]
    np.testing.assert_allclose(ax.collections[0].get_offsets(), dots)
    (line,) = ax.lines
    np.testing.assert_allclose(line.get_xydata(), [(layer, sum(distance_LA[layer]) / 3) for layer in range(4)])
    assert ax.get_ylim()[0] == 0
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("block", "mean attention distance (pixels)")

    ax = plot.draw_attention_distance(distance_LA, even=150.0)
    (even,) = (line for line in ax.lines if line.get_label() == "even attention")
    assert set(even.get_ydata()) == {150.0}
    assert even.get_linestyle() == "--"
    assert ax.get_ylim()[1] > 150, "the line can be seen"


@pytest.mark.parametrize(
    ("grid", "most", "rows", "columns"), [((2, 3), 8, [0, 1], [0, 1, 2]), ((5, 4), 3, [0, 2, 4], [0, 2, 3])]
)
def test_position_similarity_is_a_grid_of_grids(grid, most, rows, columns) -> None:
    similarity = RANDOM.random((*grid, *grid))
    ax = plot.draw_position_similarity(similarity, most=most)
    montage = np.ma.getdata(ax.images[0].get_array())
    step_y, step_x = ((montage.shape[axis] + 1) // count for axis, count in ((0, len(rows)), (1, len(columns))))
    for down, row in enumerate(rows):
        for across, column in enumerate(columns):
            part = montage[down * step_y :, across * step_x :][: grid[0], : grid[1]]
            np.testing.assert_array_equal(part, similarity[row, column])
    assert np.isfinite(montage).sum() == len(rows) * len(columns) * grid[0] * grid[1], "gaps between"
    assert [label.get_text() for label in ax.get_yticklabels()] == [str(row) for row in rows]
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(column) for column in columns]
    assert bars(ax.figure) == ["cosine similarity"]


def test_norms_frame_the_outliers() -> None:
    norms_hw = RANDOM.random((3, 4))
    outliers_hw = np.zeros((3, 4), bool)
    outliers_hw[1, 2] = True
    ax = plot.draw_norms(norms_hw, outliers_hw)
    np.testing.assert_array_equal(np.ma.getdata(ax.collections[0].get_array()), norms_hw)
    assert ax.collections[0].get_clim() == (norms_hw.min(), norms_hw.max())
    assert {(frame.get_x() + 0.5, frame.get_y() + 0.5) for frame in ax.patches} == {(2, 1)}
    assert ax.yaxis_inverted(), "the first row is on top"
    plot.draw_photo(PHOTO, ax := plot.new_figure().add_subplot())
    plot.draw_norms(norms_hw, outliers_hw, ax, plot.even_edges((3, 4), (30, 40)))
    assert ax.get_xlim() == (-0.5, 39.5)
    assert ax.get_ylim() == (29.5, -0.5)
    plot.add_scale([ax], "norm", marks={"smallest": 0.5})
    assert marks(ax.figure) == {"smallest": 0.5}
    ax = plot.draw_norms(np.full((3, 4), 7.0))
    plot.add_scale([ax], "norm", location="right", marks={"all": 7.0})
    plot.to_png(ax)


def test_shares_are_stacked_and_empty_kinds_left_out() -> None:
    shares = {"class": torch.tensor([0.2, 0.1]), "distill": torch.zeros(2), "patches": torch.tensor([0.8, 0.9])}
    ax = plot.draw_shares(shares)
    drawn = [(bar.get_y(), bar.get_height()) for bar in ax.patches]
    np.testing.assert_allclose(drawn, [(0, 0.2), (0, 0.1), (0.2, 0.8), (0.1, 0.9)], rtol=1e-6)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["class", "patches"]


@pytest.mark.parametrize(
    ("count", "aspect", "columns"), [(13, 1.33, 5), (13, 1, 5), (4, 1.33, 4), (7, 1.5, 4), (6, 1.33, 3)]
)
def test_the_last_row_is_not_left_to_one_picture(count: int, aspect: float, columns: int) -> None:
    axes = plot.panels(count, aspect)
    assert {ax.get_subplotspec().get_gridspec().ncols for ax in axes} == {columns}


@pytest.mark.parametrize(("aspect", "count"), [(1, 1), (0.01, 3), (100, 3), (1.5, 12), (0.3, 40)])
def test_pngs_are_as_wide_as_a_page_and_not_endless(aspect: float, count: int) -> None:
    axes = plot.panels(count, aspect)
    assert len(axes) == count
    width, height = axes[0].figure.get_size_inches()
    assert width == plot.WIDTH
    assert height < 40


def test_the_same_picture_gives_the_same_bytes() -> None:
    axes = [plot.draw_heat(PHOTO, np.eye(4), label="share") for _ in range(2)]
    first, second = plot.to_png(axes[0].figure), plot.to_png(axes[1])  # an axis is as good as its figure
    assert first == second
    assert Image.open(io.BytesIO(first)).format == "PNG"


def test_a_matrix_is_a_square_for_each_number() -> None:
    matrix = np.array([[0.0, 0.25], [1.0, 0.5], [0.1, 0.2]])
    ax = plot.draw_matrix(matrix, rows=["a", "b", "c"], columns=["x", "y"], digits=2, label="share")
    np.testing.assert_array_equal(ax.images[0].get_array(), matrix)
    assert ax.images[0].get_clim() == (0, 1)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "b", "c"]
    written = {(*text.get_position(), text.get_text()) for text in ax.texts}
    assert written == {(c, r, f"{matrix[r, c]:.2f}") for r in range(3) for c in range(2)}
    dark, bright = (next(text for text in ax.texts if text.get_text() == each) for each in ("0.00", "1.00"))
    assert (dark.get_color(), bright.get_color()) == ("white", "black")  # viridis is dark at the bottom
    plot.draw_matrix(np.zeros((2, 2)))  # all the same
    with pytest.raises(PatchlightError, match="rows and columns, not the shape"):
        plot.draw_matrix(matrix[0])
    with pytest.raises(PatchlightError, match="2 names of rows and 0 of columns do not fit"):
        plot.draw_matrix(matrix, rows=["a", "b"])
