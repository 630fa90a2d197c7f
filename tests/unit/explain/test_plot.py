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

RANDOM = np.random.default_rng(0)
PHOTO = RANDOM.integers(0, 256, (30, 40, 3), dtype=np.uint8)


def shown(ax):
    """The numbers of the map on an axis, over the photo."""
    return np.ma.getdata(ax.images[1].get_array())


def bars(figure):
    """The colour bars' labels."""
    return [ax.get_xlabel() or ax.get_ylabel() for ax in figure.axes if ax.get_label() == "<colorbar>"]


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


@pytest.mark.parametrize("photo", [PHOTO / 255, PHOTO[..., 0], PHOTO.transpose(2, 0, 1)])
def test_what_is_no_photo_is_refused(photo: np.ndarray) -> None:
    with pytest.raises(PatchlightError, match=r"a photo to draw on is \(height, width, 3\) uint8, not \("):
        plot.draw_photo(photo)


def test_heat_lies_over_the_photo_and_what_was_not_seen_is_pale() -> None:
    heat_HW = RANDOM.random((30, 40))
    heat_HW[:, :10] = np.nan
    ax = plot.draw_heat(PHOTO, heat_HW, vmax=0.5, title="$not math", label="share")
    np.testing.assert_array_equal(shown(ax), heat_HW)
    assert ax.images[1].get_clim() == (0, 0.5)
    assert ax.images[1].get_extent() == [-0.5, 39.5, 29.5, -0.5]
    assert bars(ax.figure) == ["share"]
    grey = ax.images[0].get_array()
    assert (grey[..., 0] == grey[..., 1]).all()
    assert grey[:, :10].min() > grey[:, 10:].mean()
    plot.to_png(ax.figure)  # a title with a dollar is text


def test_heat_of_patches_covers_the_photo() -> None:
    ax = plot.draw_heat(PHOTO, np.arange(6).reshape(2, 3))
    assert shown(ax).shape == (2, 3)
    assert ax.images[1].get_extent() == [-0.5, 39.5, 29.5, -0.5]


def test_a_map_that_is_seen_nowhere_draws() -> None:
    plot.to_png(plot.draw_heat(PHOTO, np.full((30, 40), np.nan), label="share").figure)
    plot.to_png(plot.draw_similarity(PHOTO, np.full((30, 40), np.nan)).figure)


def test_heads_are_ordered_by_objectness_on_one_scale() -> None:
    heat_Ahw = RANDOM.random((5, 3, 4)) * np.array([1, 5, 2, 4, 3]).reshape(5, 1, 1)
    objectness = [0.1, 0.5, 0.3, 0.5, 0.2]
    axes = plot.draw_heads(PHOTO, heat_Ahw, objectness)
    titles = ["head 1  (0.50)", "head 3  (0.50)", "head 2  (0.30)", "head 4  (0.20)", "head 0  (0.10)"]
    assert [ax.get_title() for ax in axes] == titles
    for ax, head in zip(axes, [1, 3, 2, 4, 0], strict=True):
        np.testing.assert_array_equal(shown(ax), heat_Ahw[head])
    assert len({ax.images[1].get_clim() for ax in axes}) == 1
    assert len(axes[0].figure.axes) == 5 + 1, "one colour bar"
    assert bars(axes[0].figure) == ["share of attention (in brackets: objectness)"]


def test_layers_keep_their_order_and_share_a_scale() -> None:
    heat_Lhw = np.linspace(0, 1, 3 * 100).reshape(3, 10, 10)
    axes = plot.draw_layers(PHOTO, heat_Lhw, [0, 7, 11])
    assert [ax.get_title() for ax in axes] == ["block 0", "block 7", "block 11"]
    for ax, heat_hw in zip(axes, heat_Lhw, strict=True):
        np.testing.assert_array_equal(shown(ax), heat_hw)
    (limits,) = {ax.images[1].get_clim() for ax in axes}
    assert limits == (0, pytest.approx(0.99)), "the brightest of a hundred may lie above"


def test_similarity_ends_at_one_and_shows_opposites() -> None:
    assert plot.draw_similarity(PHOTO, np.array([[1, 0.4]])).images[1].get_clim() == (0, 1)
    assert plot.draw_similarity(PHOTO, np.array([[1, -0.4]])).images[1].get_clim() == (-0.4, 1)


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


def test_attention_distance_has_a_dot_for_each_head() -> None:
    distance_LA = RANDOM.random((4, 3)) * 100
    ax = plot.draw_attention_distance(distance_LA)
    dots = [(layer, distance_LA[layer, head]) for layer in range(4) for head in range(3)]
    np.testing.assert_allclose(ax.collections[0].get_offsets(), dots)
    (line,) = ax.lines
    np.testing.assert_allclose(line.get_xydata(), [(layer, sum(distance_LA[layer]) / 3) for layer in range(4)])
    assert ax.get_ylim()[0] == 0
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("block", "mean attention distance (pixels)")


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
    assert {(frame.get_x() + 0.5, frame.get_y() + 0.5) for frame in ax.patches} == {(2, 1)}
    assert ax.yaxis_inverted(), "the first row is on top"
    plot.draw_photo(PHOTO, ax := plot.new_figure().add_subplot())
    plot.draw_norms(norms_hw, outliers_hw, ax, plot.even_edges((3, 4), (30, 40)))
    assert ax.get_xlim() == (-0.5, 39.5)
    assert ax.get_ylim() == (29.5, -0.5)


def test_shares_are_stacked_and_empty_kinds_left_out() -> None:
    shares = {"class": torch.tensor([0.2, 0.1]), "distill": torch.zeros(2), "patches": torch.tensor([0.8, 0.9])}
    ax = plot.draw_shares(shares)
    drawn = [(bar.get_y(), bar.get_height()) for bar in ax.patches]
    np.testing.assert_allclose(drawn, [(0, 0.2), (0, 0.1), (0.2, 0.8), (0.1, 0.9)], rtol=1e-6)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["class", "patches"]


@pytest.mark.parametrize(("aspect", "count"), [(1, 1), (0.01, 3), (100, 3), (1.5, 12), (0.3, 40)])
def test_pngs_are_as_wide_as_a_page_and_not_endless(aspect: float, count: int) -> None:
    axes = plot.panels(count, aspect)
    assert len(axes) == count
    width, height = axes[0].figure.get_size_inches()
    assert width == plot.WIDTH
    assert height < 40


def test_the_same_picture_gives_the_same_bytes() -> None:
    first, second = (plot.to_png(plot.draw_heat(PHOTO, np.eye(4), label="share").figure) for _ in range(2))
    assert first == second
    assert Image.open(io.BytesIO(first)).format == "PNG"
