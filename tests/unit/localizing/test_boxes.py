"""Boxes from heat whose true boxes are known."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.localizing.boxes import label_regions, regions_of

SIDE = 16


def boxes_of(heat_hw: Any, **settings: Any) -> list[tuple[float, float, float, float, float]]:
    """(x0, y0, x1, y1, score) of each region."""
    return [(*region.box, region.score) for region in regions_of(heat_hw, **settings)]


def covered(box: tuple[float, float, float, float], height: int = SIDE, width: int = SIDE) -> npt.NDArray[np.float64]:
    """The share of each patch that a box covers, counted on a fine grid."""
    fine = 50
    down, across = (np.arange(fine * height) + 0.5) / fine, (np.arange(fine * width) + 0.5) / fine
    inside = ((down >= box[1]) & (down < box[3]))[:, None] & ((across >= box[0]) & (across < box[2]))
    return inside.reshape(height, fine, width, fine).mean((1, 3))


def plain_box(heat_hw: npt.NDArray[np.float64], threshold: float = 0.5) -> Box:
    """The box of whole patches around everything above the threshold."""
    rows, columns = (heat_hw >= threshold).nonzero()
    if not len(rows):
        return Box(0, 0, 0, 0)
    return Box(columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


whole_and_a_bit = st.tuples(
    st.floats(0, 10), st.floats(0, 10), st.floats(2.1, 6), st.floats(2.1, 6)
)  # left, top, width, height


@given(whole_and_a_bit)
def test_coverage_gives_the_exact_box(place: tuple[float, float, float, float]) -> None:
    left, top, width, height = place
    truth = (left, top, left + width, top + height)
    ((*box, score),) = boxes_of(covered(truth))
    np.testing.assert_allclose(box, truth, atol=0.05)  # the fine grid's own error
    assert 0.4 < score <= 1


def test_axes_are_not_mixed_up() -> None:
    truth = (10.25, 2.5, 18.75, 5.25)
    ((*box, _),) = boxes_of(torch.from_numpy(covered(truth, height=8, width=20)))
    np.testing.assert_allclose(box, truth, atol=0.05)


def test_fine_edges_find_small_subjects_better() -> None:
    """Blurred and noisy coverage, as a model gives it."""
    rng = np.random.default_rng(0)
    fine, plain = [], []
    for _ in range(150):
        width, height = rng.uniform(1.5, 4, 2)
        left, top = rng.uniform(0, SIDE - width), rng.uniform(0, SIDE - height)
        truth = (left, top, left + width, top + height)
        heat = covered(truth)
        padded = np.pad(heat, 1, mode="edge")
        around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        heat = np.clip(0.8 * heat + 0.05 * around, 0.003, 0.997)
        heat = 1 / (1 + np.exp(-(np.log(heat / (1 - heat)) + 0.3 * rng.standard_normal(heat.shape))))
        ((*box, _),) = boxes_of(heat)
        fine.append(Box(*box).iou(Box(*truth)))
        plain.append(plain_box(heat).iou(Box(*truth)))
    assert np.mean(fine) > np.mean(plain) + 0.1
    assert np.mean(fine) > 0.8


@given(st.integers(0, 10), st.integers(0, 10), st.integers(1, 6), st.integers(1, 6))
def test_a_binary_map_has_plain_edges(left: int, top: int, width: int, height: int) -> None:
    heat = np.zeros((SIDE, SIDE))
    heat[top : top + height, left : left + width] = 1
    boxes = boxes_of(heat, threshold=0.5, edges="crossing")
    assert boxes == [(left, top, left + width, top + height, 1.0)]


def test_crossing_lies_between_the_centres() -> None:
    heat = np.zeros((1, 6))
    heat[0] = [0, 0.2, 0.8, 0.8, 0.4, 0]
    ((x0, y0, x1, y1, score),) = boxes_of(heat, threshold=0.5, edges="crossing")
    assert (x0, x1) == pytest.approx((1.5 + 0.5, 3.5 + 0.75))
    assert (y0, y1, score) == (0, 1, pytest.approx(0.8))


@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False), st.floats(0.1, 0.9))
def test_labels_are_those_of_a_flood(height: int, width: int, random: Any, share: float) -> None:
    mask = np.array([[random.random() < share for _ in range(width)] for _ in range(height)])
    labels, count = label_regions(mask)
    flooded = np.zeros(mask.shape, int)
    number = 0
    for start in zip(*mask.nonzero(), strict=True):
        if flooded[start]:
            continue
        number += 1
        waiting = [start]
        while waiting:
            row, column = waiting.pop()
            if 0 <= row < height and 0 <= column < width and mask[row, column] and not flooded[row, column]:
                flooded[row, column] = number
                waiting += [(row + down, column + across) for down in (-1, 0, 1) for across in (-1, 0, 1)]
    assert count == number
    assert (labels == flooded).all()


def two(gap: float, second: float = 3.0) -> npt.NDArray[np.float64]:
    return covered((2, 4, 5, 9)) + covered((5 + gap, 4, 5 + gap + second, 9))


def test_pieces_of_one_subject_are_joined() -> None:
    ((*box, _),) = boxes_of(two(1))
    np.testing.assert_allclose(box, (2, 4, 9, 9), atol=0.01)
    ((*box, _),) = boxes_of(two(3))
    np.testing.assert_allclose(box, (2, 4, 5, 9), atol=0.01)


def test_a_speck_beside_a_subject_is_no_piece_of_it() -> None:
    heat = covered((2, 4, 8, 9))
    heat[6, 9] = 1
    ((*box, _),) = boxes_of(heat)
    np.testing.assert_allclose(box, (2, 4, 8, 9), atol=0.01)


def test_several_subjects_stay_apart() -> None:
    boxes = [box[:4] for box in boxes_of(two(1, 4.0), most=None)]
    np.testing.assert_allclose(boxes, [(6, 4, 10, 9), (2, 4, 5, 9)], atol=0.01)
    assert len(boxes_of(two(1, 1.0), most=None)) == 1
    assert len(boxes_of(two(3, 1.0), most=None)) == 2
    assert len(boxes_of(two(3, 1.0), most=1)) == 1


def test_small_ones_can_be_left_out() -> None:
    heat = covered((2, 4, 8, 9)) + covered((11, 11, 13, 13))
    assert len(boxes_of(heat, most=None)) == 2
    assert len(boxes_of(heat, most=None, min_area=5 / 256)) == 1
    assert boxes_of(heat, most=None, min_area=0.5) == []


def test_a_neighbours_heat_does_not_move_an_edge() -> None:
    heat = covered((5, 0, 10, 6))
    heat[5, 4] = 1  # a foot
    heat[0:3, 0:4] = heat[0:15, 0:2] = 1  # another subject, in the foot's left neighbour column, and not touching it
    first = next(region for region in regions_of(heat, most=None) if region.mask_hw[0, 5])
    np.testing.assert_allclose(first.box, (4, 0, 10, 6), atol=0.01)


def test_faint_heat_is_measured_by_its_own_level() -> None:
    ((*box, score),) = boxes_of(0.3 * covered((3, 4, 9, 12)))
    assert Box(*box).iou(Box(3, 4, 9, 12)) > 0.6
    assert score == pytest.approx(0.3, abs=0.01)


def test_nothing_is_found_where_there_is_nothing() -> None:
    assert boxes_of(np.zeros((4, 5))) == []
    assert boxes_of(np.full((4, 5), 0.2), threshold=0.5) == []


@pytest.mark.parametrize(
    ("heat", "settings", "words"),
    [
        (np.zeros((2, 3, 3)), {}, "shape"),
        (np.full((3, 3), np.nan), {}, "not numbers"),
        (np.zeros((3, 3)), {"most": 0}, "most=0"),
        (np.zeros((3, 3)), {"edges": "fine"}, "edges='fine'"),
        (np.zeros((3, 3)), {"min_area": 40}, "share"),
    ],
)
def test_mistakes_are_named(heat: npt.NDArray[np.float64], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchlightError, match=words):
        boxes_of(heat, **settings)
