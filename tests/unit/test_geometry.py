"""Boxes, and the way between a photo, its file and the model's image."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from patchlight.geometry import Box, View, covering_size, crop_start, fit_inside, fitting_size, upright

Shares = tuple[float, float, float, float]

SIDES = st.integers(1, 5000)
SIZES = st.tuples(SIDES, SIDES)
ORIENTATIONS = st.integers(1, 8)
SHARES = st.tuples(*[st.floats(0, 1)] * 4)


@st.composite
def views(draw: st.DrawFn) -> View:
    return View.centred(
        draw(SIZES),
        draw(st.tuples(st.integers(1, 600), st.integers(1, 600))),
        draw(st.tuples(st.integers(1, 600), st.integers(1, 600))),
        half=draw(st.sampled_from(["round", "floor"])),
        orientation=draw(ORIENTATIONS),
    )


def box_inside(size: tuple[int, int], x0: float, y0: float, x1: float, y1: float) -> Box:
    height, width = size
    (x0, x1), (y0, y1) = sorted((x0, x1)), sorted((y0, y1))
    return Box(x0 * width, y0 * height, x1 * width, y1 * height)


def assert_close(one: Box, other: Box, size: tuple[int, int]) -> None:
    for name in ("left", "top", "right", "bottom"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-7 * max(size))


def test_box_measures() -> None:
    box = Box(1, 2, 4, 8)
    assert (box.width, box.height, box.area) == (3, 6, 18)
    assert box.iou(box) == 1
    assert box.iou(Box(4, 2, 7, 8)) == 0
    assert box.iou(Box(1, 2, 4, 5)) == 0.5
    assert Box(4, 4, 1, 1).area == 0
    assert Box(0, 0, 0, 0).iou(Box(0, 0, 0, 0)) == 0
    assert box.clip((5, 3)) == Box(1, 2, 3, 5)
    assert Box(-9, -9, -5, -5).clip((5, 3)).area == 0
    assert box.expanded(0.5) == Box(-0.5, -1, 5.5, 11)
    assert box.scaled((2, 10)) == Box(10, 4, 40, 16)
    assert Box(0.9, 1.0000000001, 2.1, 2.9999999999).to_ints() == (0, 1, 3, 3)


@given(SIZES, SHARES, SHARES)
def test_iou_is_symmetric_and_a_share(size: tuple[int, int], some: Shares, others: Shares) -> None:
    one, other = box_inside(size, *some), box_inside(size, *others)
    assert 0 <= one.iou(other) <= 1
    assert one.iou(other) == pytest.approx(other.iou(one))


@given(views(), SHARES)
def test_boxes_come_back_from_the_model(view: View, shares: Shares) -> None:
    box = box_inside(view.source_size, *shares)
    assert_close(view.to_source(view.to_model(box)), box, view.source_size)
    x, y = view.point_to_source(view.point_to_model((box.left, box.top)))
    assert_close(Box(x, y, box.right, box.bottom), box, view.source_size)


@given(views(), st.tuples(*[st.floats(-1e4, 1e4)] * 4))
def test_every_box_of_the_model_is_clipped_to_the_photo(view: View, corners: Shares) -> None:
    box = view.to_source(Box(*corners))
    height, width = view.source_size
    assert 0 <= min(box.left, box.right) <= max(box.left, box.right) <= width
    assert 0 <= min(box.top, box.bottom) <= max(box.top, box.bottom) <= height


def test_the_model_sees_the_middle_of_a_wide_photo() -> None:
    view = View.centred((300, 900), (100, 300), (100, 100), half="round")
    assert view.seen == Box(300, 0, 600, 300)
    assert view.to_model(Box(300, 0, 600, 300)) == Box(0, 0, 100, 100)
    padded = View.centred((300, 900), (33, 100), (100, 100), half="round")
    assert padded.to_model(Box(0, 0, 900, 300)) == Box(0, 33, 100, 66)
    assert padded.seen == Box(0, 0, 900, 300)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_stored_boxes_are_where_pillow_finds_them(orientation: int) -> None:
    """One pixel is marked in a stored image, Pillow turns it upright, and the way back finds it again."""
    for x, y in ((0, 0), (2, 1), (6, 3), (6, 0)):
        stored_HW = np.zeros((4, 7), np.uint8)
        stored_HW[y, x] = 255
        stored = Image.fromarray(stored_HW)
        stored.getexif()[274] = orientation
        upright_HW = np.asarray(ImageOps.exif_transpose(stored))
        ((row, column),) = np.argwhere(upright_HW)
        view = View(source_size=upright_HW.shape, model_size=(1, 1), orientation=orientation)
        assert view.stored_size == (4, 7)
        assert view.to_stored(Box(column, row, column + 1, row + 1)) == Box(x, y, x + 1, y + 1)


@given(views(), SHARES)
def test_stored_boxes_keep_their_area_and_come_back(view: View, shares: Shares) -> None:
    box = box_inside(view.source_size, *shares)
    stored = view.to_stored(box)
    assert stored.area == pytest.approx(box.area, abs=1e-6 * math.prod(view.source_size))
    assert_close(stored.clip(view.stored_size), stored, view.source_size)
    assert_close(upright(stored, view.stored_size, view.orientation), box, view.source_size)


@given(SIZES, st.integers(1, 600))
def test_covering_a_square_fixes_the_shortest_side(size: tuple[int, int], side: int) -> None:
    resized = covering_size(size, (side, side))
    assert min(resized) == side
    assert max(resized) == pytest.approx(side * max(size) / min(size), abs=1)


@given(SIZES, st.tuples(st.integers(1, 600), st.integers(1, 600)))
def test_covering_and_fitting(size: tuple[int, int], target: tuple[int, int]) -> None:
    covering, fitting = covering_size(size, target), fitting_size(size, target)
    assert all(have >= asked for have, asked in zip(covering, target, strict=True))
    assert all(1 <= have <= asked for have, asked in zip(fitting, target, strict=True))
    assert any(have == asked for have, asked in zip(fitting, target, strict=True))


def test_halves_of_odd_margins() -> None:
    assert [crop_start(n, 10, "round") for n in (11, 13, 15, 9, 7)] == [0, 2, 2, 0, -1]
    assert [crop_start(n, 10, "floor") for n in (11, 13, 15, 9, 7)] == [0, 1, 2, -1, -2]


def test_inside_a_side_a_size_keeps_its_aspect_and_never_grows() -> None:
    assert fit_inside((3000, 4000), 240) == (180, 240)
    assert fit_inside((30, 40), 240) == (30, 40)
    assert fit_inside((5000, 1), 240) == (240, 1), "no side is nothing"
