"""Second looks and tiles lead back to the photo's own pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bright_subjects import bright, sees_what_is_bright
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.decode import decode
from patchlight.localizing.closer import Mosaic, around, cut_off, look_at
from patchlight.localizing.detector import Detector, localize


def test_a_part_of_a_photo_is_seen_where_it_lies() -> None:
    down, across = np.indices((200, 300))
    photo = decode(Image.fromarray(np.stack([across // 2, down, across * 0], 2).astype(np.uint8)))
    loaded = sees_what_is_bright()
    image_CHW, view = look_at(photo, Box(60, 40, 188, 104), loaded.preprocess)
    level_CHW = (image_CHW * 0.5 + 0.5) * 255
    for x, y in ((5, 5), (32, 20), (60, 50)):
        source_x, source_y = view.point_to_source((x + 0.5, y + 0.5))
        assert float(level_CHW[0, y, x]) == pytest.approx((source_x - 0.5) / 2, abs=1.5)
        assert float(level_CHW[1, y, x]) == pytest.approx(source_y - 0.5, abs=1.5)
    assert view.seen == Box(60, 40, 188, 104)


@pytest.mark.parametrize("settings", [{}, {"resize": "shortest", "crop_pct": 0.9}, {"resize_in": "floats"}])
def test_a_second_look_has_finer_edges(settings: dict[str, object], tmp_path: Path) -> None:
    # One patch of the first look is 25 pixels of the photo, and of the second about 3.
    truth = Box(133, 171, 171, 204)
    bright((400, 400), (133, 171, 171, 204)).save(tmp_path / "photo.jpg", quality=95)
    loaded = sees_what_is_bright(**settings)
    first = localize(tmp_path / "photo.jpg", loaded)
    second = localize(tmp_path / "photo.jpg", loaded, second_look=True)
    assert second.subjects[0].box.iou(truth) > max(0.9, first.subjects[0].box.iou(truth))
    assert second.subjects[0].score == pytest.approx(first.subjects[0].score, abs=0.01)
    torch.testing.assert_close(second.heat_hw, first.heat_hw, atol=0.05, rtol=0)


def test_a_second_look_at_each_subject_and_at_none() -> None:
    photo = bright((320, 320), (20, 20, 120, 120))
    photo.paste((255, 255, 255), (200, 180, 300, 300))
    loaded = sees_what_is_bright()
    several, nothing = localize(
        [photo, Image.new("RGB", (64, 64))], loaded, subjects="all", second_look=True, threshold=0.5
    )
    boxes = [Box(200, 180, 300, 300), Box(20, 20, 120, 120)]
    assert [subject.box.iou(box) > 0.9 for subject, box in zip(several.subjects, boxes, strict=True)] == [True, True]
    assert nothing.subjects == ()


def test_a_second_look_that_sees_something_else_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    from patchlight.localizing import detector

    loaded, photo = sees_what_is_bright(), bright((320, 320), (20, 20, 120, 120))
    first = localize(photo, loaded)
    monkeypatch.setattr(detector, "around", lambda box, size: Box(0, 0, 60, 60))  # sees a corner of it only
    assert localize(photo, loaded, second_look=True).subjects == first.subjects


@given(st.floats(0, 90), st.floats(0, 60), st.floats(0, 100), st.floats(0, 70))
def test_what_a_second_look_sees_lies_in_the_photo(left: float, top: float, width: float, height: float) -> None:
    box = Box(left, top, left + width, top + height).clip((61, 91))
    seen = around(box, (61, 91))
    assert seen.width > 1 - 1e-9
    assert seen.height > 1 - 1e-9
    assert seen.intersection(box).area == pytest.approx(box.area)
    assert 0 <= seen.left < seen.right <= 91 + 1e-9
    assert 0 <= seen.top < seen.bottom <= 61 + 1e-9


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_a_mosaic_puts_every_patch_in_its_place(down: int, across: int, height: int, width: int) -> None:
    mosaic = Mosaic((down, across), (height, width), (300, 700))
    rows, columns = mosaic.size
    whole = torch.rand(rows, columns)
    tiles = torch.stack([whole[y : y + height, x : x + width] for y, x in mosaic.corners()])
    torch.testing.assert_close(mosaic.joined(tiles, torch.ones(height, width)), whole / 2 + 0.5)
    first, last = mosaic.boxes((300, 700))[0], mosaic.boxes((300, 700))[-1]
    assert (first.left, first.top, last.right, last.bottom) == pytest.approx((0, 0, 700, 300))


@pytest.mark.parametrize("source_size", [(720, 960), (960, 720), (540, 960), (1000, 1000), (1000, 3000), (997, 1311)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_tiles_are_square_whatever_the_photo(source_size: tuple[int, int], count: int) -> None:
    mosaic = Mosaic(count, (16, 16), source_size)
    assert min(mosaic.tiles) == count
    for box in mosaic.boxes(source_size):
        assert box.width / box.height == pytest.approx(1, abs=0.05)
    assert mosaic.boxes(source_size)[-1].right == pytest.approx(source_size[1])
    assert mosaic.boxes(source_size)[-1].bottom == pytest.approx(source_size[0])
    assert all(0 < step <= 12 for step in mosaic.stride), "they overlap by a quarter at least"


@pytest.mark.parametrize("subjects", [1, "all"])
def test_tiles_find_what_is_small_and_what_lies_across_a_border(subjects: Any) -> None:
    loaded = sees_what_is_bright()
    small, across = Box(500, 40, 530, 62), Box(300, 180, 520, 420)
    photos = [bright((800, 600), box.to_ints()) for box in (small, across)]
    plain = localize(photos, loaded, subjects=subjects)
    found = localize(photos, loaded, subjects=subjects, tiles=(2, 3))
    for box, before, each in zip((small, across), plain, found, strict=True):
        (subject,) = each.subjects
        assert subject.box.iou(box) >= max((other.box.iou(box) for other in before.subjects), default=0)
        assert each.confidence == subject.confidence >= before.confidence
        assert each.view.source_size == (600, 800)
        assert each.heat_hw.shape == each.mask_hw.shape == (28, 40)
        assert each.mask_hw.any()
        assert before.heat_hw.shape == (16, 16)
    assert found[0].subjects[0].box.iou(small) > 1.2 * plain[0].subjects[0].box.iou(small)
    assert found[1].subjects == plain[1].subjects, "each tile shows a part of it"
    closer = localize(photos[0], loaded, tiles=(2, 3), second_look=True)
    assert closer.subjects[0].box.iou(small) > max(0.85, found[0].subjects[0].box.iou(small))


def test_what_the_whole_photo_is_sure_of_is_not_parted_by_tiles() -> None:
    """A tile may be surer of a window than the whole photo is of the house."""
    loaded = sees_what_is_bright()
    photo = bright((640, 640), (40, 40, 560, 560))
    photo.paste((130, 130, 130), (40, 300, 560, 560))
    photo.paste((0, 0, 0), (250, 150, 300, 280))
    plain = localize(photo, loaded, threshold=0.3)
    assert plain.decision == "subject"
    found = localize(photo, loaded, tiles=3, threshold=0.3)
    assert (found.subjects, found.decision) == (plain.subjects, "subject")


@pytest.mark.parametrize("subjects", [2, "all"])
def test_finds_of_tiles_stand_beside_what_the_whole_photo_is_sure_of(subjects: Any) -> None:
    """However much surer they are: of the upper half alone, and of what is small and lies elsewhere."""
    loaded, settings = sees_what_is_bright(), {"subjects": subjects, "threshold": 0.3}
    photo = bright((640, 640), (40, 40, 560, 560))
    photo.paste((130, 130, 130), (40, 300, 560, 560))
    photo.paste((255, 255, 255), (590, 590, 612, 612))
    (large,) = localize(photo, loaded, **settings).subjects
    found = localize(photo, loaded, tiles=3, **settings)
    first, small = found.subjects
    assert first == large
    assert small.box.iou(Box(590, 590, 612, 612)) > 0.6
    assert small.confidence > 0.9
    assert first.confidence == found.confidence
    assert found.decision == "several"


def test_the_first_find_of_the_whole_photo_has_the_photos_confidence() -> None:
    """Against which what is warm beside it speaks, with tiles as without."""
    loaded = sees_what_is_bright()
    photo = bright((640, 640), (40, 40, 300, 300))
    alone = localize(photo, loaded, threshold=0.3).confidence
    photo.paste((130, 130, 130), (400, 400, 600, 600))
    for tiles in (None, 2):
        found = localize(photo, loaded, subjects="all", threshold=0.3, tiles=tiles)
        assert found.decision == "subject"
        assert found.subjects[0].box.iou(Box(40, 40, 300, 300)) > 0.9
        assert found.subjects[0].confidence == found.confidence < alone - 0.01


def test_where_a_tile_s_find_leads_nothing_is_added_that_is_nothing() -> None:
    loaded = sees_what_is_bright()
    photo = bright((640, 640), (100, 100, 130, 130))
    photo.paste((110, 110, 110), (300, 300, 560, 560))
    (grey,) = localize(photo, loaded, subjects="all").subjects
    assert grey.box.iou(Box(300, 300, 560, 560)) > 0.4
    assert grey.confidence < Detector.of(loaded).calibration.nothing
    found = localize(photo, loaded, subjects="all", tiles=3)
    (subject,) = found.subjects
    assert subject.box.iou(Box(100, 100, 130, 130)) > 0.7


def test_several_small_ones_are_found_apart_and_once_each() -> None:
    loaded = sees_what_is_bright()
    boxes = [Box(40, 40, 80, 76), Box(560, 60, 598, 100), Box(300, 480, 344, 520)]
    photo = bright((640, 640), boxes[0].to_ints())
    for box in boxes[1:]:
        photo.paste((255, 255, 255), box.to_ints())
    found = localize(photo, loaded, subjects="all", tiles=3)
    assert len(found.subjects) == 3
    for box in boxes:
        assert max(subject.box.iou(box) for subject in found.subjects) > 0.7
    assert [each.confidence for each in found.subjects] == sorted(each.confidence for each in found.subjects)[::-1]
    assert len(localize(photo, loaded, subjects=2, tiles=3).subjects) == 2


@pytest.mark.parametrize(
    ("box", "cut"),
    [
        ((120, 120, 180, 180), False),
        ((100, 120, 180, 180), True),  # at the left border of the part
        ((120, 120, 199, 180), True),
        ((120, 102, 180, 180), True),
        ((120, 120, 180, 198), True),
    ],
)
def test_what_ends_at_a_tile_s_border_is_left_to_the_next(box: tuple[int, int, int, int], cut: bool) -> None:
    assert cut_off(Box(*box), Box(100, 100, 200, 200), (300, 300)) is cut
    assert not cut_off(Box(0, 0, 300, 300), Box(0, 0, 300, 300), (300, 300)), "the photo's own border cuts nothing off"


def test_one_tile_is_the_whole_photo() -> None:
    loaded, photo = sees_what_is_bright(), bright((240, 240), (100, 60, 180, 150))
    one, plain = localize(photo, loaded, tiles=1), localize(photo, loaded)
    torch.testing.assert_close(one.heat_hw, plain.heat_hw, atol=1e-5, rtol=0)
    assert one.subjects[0].box.iou(plain.subjects[0].box) > 0.999


@pytest.mark.parametrize("tiles", [0, (0, 2), (2,), "2x2", 99, (2.0, 2)])
def test_tiles_are_checked(tiles: object) -> None:
    with pytest.raises(PatchlightError, match="tiles="):
        localize("nowhere.jpg", sees_what_is_bright(), tiles=tiles)  # type: ignore[call-overload]
