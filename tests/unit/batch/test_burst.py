import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFilter

from patchlight.batch.burst import Background, evidence, is_night, judge, settle
from patchlight.batch.frames import (
    MOST_FRAMES,
    Frame,
    frame_thumb,
    group_bursts,
    pack_thumb,
    read_frame,
    unpack_thumb,
)
from patchlight.errors import PatchlightError

LOCALIZE = Path(__file__).parents[4] / "shared" / "data" / "localize"

# Which frames belong together


def photo(path: Path, taken: str | None = None, **tags: Any) -> Path:
    exif = Image.Exif()
    for name, tag in (("make", 0x010F), ("model", 0x0110)):
        if name in tags:
            exif[tag] = tags[name]
    details = exif.get_ifd(0x8769)
    if taken:
        details[0x9003] = taken
    for name, tag in (("subsec", 0x9291), ("serial", 0xA431)):
        if name in tags:
            details[tag] = tags[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16)).save(path, exif=exif)
    return path


def test_bursts_by_time_camera_and_folder(tmp_path: Path) -> None:
    files = [
        photo(tmp_path / "a" / "1.jpg", "2024:05:14 06:30:00"),
        photo(tmp_path / "b" / "1.jpg", "2024:05:14 06:30:00"),  # another folder
        photo(tmp_path / "a" / "9.jpg", "2024:05:14 06:30:50"),
        photo(tmp_path / "a" / "3.jpg", "2024:05:14 06:31:50"),  # a minute after the one before
        photo(tmp_path / "a" / "4.jpg", "2024:05:14 06:32:51"),  # more than a minute
        photo(tmp_path / "a" / "5.jpg", "2024:05:14 06:30:20", serial="B7"),  # another camera
    ]
    assert group_bursts(files) == [[0, 2, 3], [1], [4], [5]]
    assert group_bursts(files, gap=10) == [[0], [1], [2], [3], [4], [5]]
    assert group_bursts(files, gap=math.inf) == [[0, 2, 3, 4], [1], [5]]


def test_parts_of_a_second_order_a_burst(tmp_path: Path) -> None:
    files = [
        photo(tmp_path / f"{i}.jpg", "2024:05:14 06:30:00", subsec=part) for i, part in enumerate(["75", "250", "5"])
    ]
    assert [read_frame(file).time for file in files] == [1715668200.75, 1715668200.25, 1715668200.5]
    assert group_bursts(files) == [[1, 2, 0]]


@pytest.mark.parametrize(
    "name",
    [
        "IMG_20240514_063000.jpg",
        "2024-05-14 06.30.00.jpg",
        "cam3-20240514063000-1.png",
        "2024_05_14_06_30_00 (2).jpg",
        "20231345_256199 20240514_063000.jpg",
    ],
)
def test_time_by_the_name(tmp_path: Path, name: str) -> None:
    frame = read_frame(photo(tmp_path / name))
    assert (frame.clock, frame.time) == ("name", 1715668200.0)


@pytest.mark.parametrize("name", ["20231345_256199", "20230229_120000", "20240431_120000", "20240514_240000"])
def test_digits_that_cannot_be_a_time_are_none(tmp_path: Path, name: str) -> None:
    assert read_frame(photo(tmp_path / f"{name}.jpg")).clock == "file"
    assert read_frame(photo(tmp_path / "20240229_120000.jpg")).clock == "name", "there is such a day"


@pytest.mark.parametrize("taken", [None, "0000:00:00 00:00:00", "    :  :     :  :  ", "2024:13:14 06:30:00"])
def test_time_by_the_file(tmp_path: Path, taken: str | None) -> None:
    path = photo(tmp_path / "20249914_996000.jpg", taken)
    os.utime(path, (5, 7))
    frame = read_frame(path)
    assert (frame.clock, frame.time) == ("file", 7.0)


def test_files_that_cannot_be_read_are_alone_or_by_their_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "20240514_063000.jpg").write_bytes(b"\xff\xd8\xff\xe1\x00\x10Exif\x00\x00broken")
    assert read_frame(tmp_path / "20240514_063000.jpg").clock == "name"
    assert read_frame(tmp_path / "pipe.jpg").clock == "file"
    assert group_bursts([tmp_path / "gone.jpg", tmp_path / "gone2.jpg", "zero\0byte.jpg"]) == [[0], [1], [2]]


def test_the_time_of_a_file_is_not_compared_with_exif() -> None:
    camera = ("folder", "", "", "")
    assert group_bursts([Frame(camera, 100.0, "exif"), Frame(camera, 101.0, "file")]) == [[0], [1]]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 500)), max_size=40))
def test_every_file_is_in_one_group(stamps: list[tuple[str, int | None]]) -> None:
    frames = [Frame((camera,), time, "exif") for camera, time in stamps]
    groups = group_bursts(frames, gap=20)
    assert sorted(index for group in groups for index in group) == list(range(len(frames)))
    for group in groups:
        times = [frames[index].time or 0 for index in group]
        assert all(0 <= later - earlier <= 20 for earlier, later in pairwise(times))
        assert len({frames[index].camera for index in group}) == 1
    # Two frames of one camera with at most 20 s between them are never apart, unless the group would be too long.
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    for one, frame in enumerate(frames):
        for other, later in enumerate(frames):
            if frame.time is not None and later.time is not None and frame.camera == later.camera:
                assert abs(frame.time - later.time) > 20 or group_of[one] == group_of[other]


def test_a_long_sequence_is_parted_evenly() -> None:
    groups = group_bursts([Frame(("a",), float(i), "exif") for i in range(MOST_FRAMES + 2)])
    assert [len(group) for group in groups] == [MOST_FRAMES // 2 + 1] * 2


def test_mistakes_are_named() -> None:
    with pytest.raises(PatchlightError, match="gap=-1"):
        group_bursts([], gap=-1)
    with pytest.raises(PatchlightError, match="as many pictures"):
        judge(np.zeros((3, 4, 4)), np.zeros((2, 8, 8, 3)))


# What never moves

SIDE, GRID = 96, 12
PATCH = SIDE // GRID
STUMP = (1, 7, 4, 11)
"""x0, y0, x1, y1 in patches."""

Sequence = tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]


def scene(night: bool = False, seed: int = 0) -> npt.NDArray[np.float64]:
    """A background with edges and colours, 0 to 1: hills, grass and a stump."""
    chance = np.random.default_rng(seed)
    coarse = chance.random((12, 12, 3))
    image = Image.fromarray((coarse * 255).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    levels = 0.25 + 0.4 * np.asarray(image, np.float64) / 255
    x0, y0, x1, y1 = (PATCH * end for end in STUMP)
    levels[y0:y1, x0:x1] = (0.35, 0.25, 0.15)
    return levels.mean(-1, keepdims=True).repeat(3, -1) if night else levels


def sequence(
    animals: list[tuple[int, int] | None],
    *,
    night: bool = False,
    stump_heat: float = 0.9,
    noise: float = 0.01,
    exposures: list[float] | None = None,
    seed: int = 0,
) -> Sequence:
    """Frames with a stump that lights up in all, and an animal of 3 x 2 patches at (x, y) in some."""
    chance = np.random.default_rng(seed + 1)
    heats, thumbs = [], []
    for frame, place in enumerate(animals):
        levels = scene(night, seed)
        heat = 0.05 * chance.random((GRID, GRID))
        x0, y0, x1, y1 = STUMP
        heat[y0:y1, x0:x1] = stump_heat + 0.1 * (chance.random((y1 - y0, x1 - x0)) - 0.5)
        if place:
            x, y = place
            coat = np.array([0.75] * 3 if night else [0.7, 0.55, 0.3])
            hair = 0.1 * chance.random((2 * PATCH, 3 * PATCH, 1))
            levels[y * PATCH : (y + 2) * PATCH, x * PATCH : (x + 3) * PATCH] = coat + hair
            heat[y : y + 2, x : x + 3] = 0.85
        levels = levels * (exposures[frame] if exposures else 1) + noise * chance.standard_normal((SIDE, SIDE, 1))
        if not night:
            levels += noise / 2 * chance.standard_normal(levels.shape)
        heats.append(heat.clip(0, 1))
        thumbs.append(np.rint(levels.clip(0, 1) * 255))
    return np.stack(heats).astype(np.float32), np.stack(thumbs).astype(np.uint8)


def heat_at_stump(heat_hw: npt.NDArray[np.float32]) -> float:
    x0, y0, x1, y1 = STUMP
    return float(heat_hw[y0:y1, x0:x1].max())


def heat_at(heat_hw: npt.NDArray[np.float32], place: tuple[int, int]) -> float:
    x, y = place
    return float(heat_hw[y : y + 2, x : x + 3].min())


WALK: list[tuple[int, int] | None] = [None, (5, 2), (7, 3), (8, 5), None, None, None]


@pytest.mark.parametrize("night", [False, True])
@pytest.mark.parametrize("exposures", [None, [1, 1.3, 0.75, 1.15, 0.9, 1.4, 0.7]])
def test_the_stump_goes_and_the_animal_stays(night: bool, exposures: list[float] | None) -> None:
    heats_Thw, thumbs_THWC = sequence(WALK, night=night, exposures=exposures)
    assert [is_night(thumb) for thumb in thumbs_THWC] == [night] * len(WALK)
    judged = judge(heats_Thw, thumbs_THWC)
    for heat_hw, place in zip(judged.heats_Thw, WALK, strict=True):
        assert heat_at_stump(heat_hw) < 0.2
        if place:
            assert heat_at(heat_hw, place) == pytest.approx(0.85, abs=0.05)
            assert np.unravel_index(heat_hw.argmax(), heat_hw.shape)[1] >= place[0]
    assert judged.unchanged_T.tolist() == [place is None for place in WALK]
    assert judged.heats_Thw.dtype == np.float32
    assert heats_Thw[0].max() > 0.8  # what was given is not written to


def test_an_animal_in_front_of_the_stump_keeps_its_heat() -> None:
    heats_Thw, thumbs_THWC = sequence([None, None, (1, 8), None, None, None])
    left_Thw = judge(heats_Thw, thumbs_THWC).heats_Thw
    assert heat_at(left_Thw[2], (1, 8)) > 0.8
    assert heat_at_stump(left_Thw[0]) < 0.2


def test_an_animal_that_stays_for_most_frames_keeps_its_heat() -> None:
    """The background then shows the animal, but the frames without it show that it is not the scene's."""
    walk: list[tuple[int, int] | None] = [(6, 3)] * 6 + [None] * 3
    heats_Thw, thumbs_THWC = sequence(walk)
    judged = judge(heats_Thw, thumbs_THWC)
    assert all(heat_at(heat_hw, (6, 3)) > 0.75 for heat_hw in judged.heats_Thw[:6])


def test_an_animal_that_moves_a_little_keeps_its_middle() -> None:
    walk: list[tuple[int, int] | None] = [(5 + step % 3, 3) for step in range(9)]
    heats_Thw, thumbs_THWC = sequence(walk)
    left_Thw = judge(heats_Thw, thumbs_THWC).heats_Thw
    for heat_hw, place in zip(left_Thw, walk, strict=True):
        assert place is not None
        assert heat_at(heat_hw, place) > 0.4


def test_swaying_grass_is_no_change_and_does_not_hide_an_animal() -> None:
    chance = np.random.default_rng(3)
    heats_Thw, thumbs_THWC = sequence(WALK)
    swaying = thumbs_THWC.astype(np.float64)
    for frame in swaying:  # the lower left quarter, stump included, is grass that bends
        frame[64:, :48] = np.roll(frame[64:, :48], chance.integers(-3, 4), axis=1) + 25 * chance.standard_normal(
            (32, 48, 1)
        )
    judged = judge(heats_Thw, swaying.clip(0, 255).astype(np.uint8))
    assert all(heat_at_stump(heat_hw) < 0.45 for heat_hw in judged.heats_Thw)
    for heat_hw, place in zip(judged.heats_Thw, WALK, strict=True):
        assert place is None or heat_at(heat_hw, place) > 0.75
    assert judged.unchanged_T.sum() >= 3


def test_a_camera_that_sways_is_put_right() -> None:
    heats_Thw, thumbs_THWC = sequence(WALK, noise=0.005)
    fine = np.pad(thumbs_THWC, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    moved = np.stack([
        frame[2 + y : 2 + y + SIDE, 2 + x : 2 + x + SIDE]
        for frame, (y, x) in zip(fine, [(0, 0), (1, 0), (0, -1), (2, 1), (0, 0), (-1, 2), (0, 0)], strict=True)
    ])  # fmt: skip
    judged = judge(heats_Thw, moved)
    assert all(heat_at_stump(heat_hw) < 0.25 for heat_hw in judged.heats_Thw)
    assert judged.unchanged_T.tolist() == [place is None for place in WALK]


def test_day_and_night_have_each_their_background() -> None:
    """Seven frames by day and four by night: the stump goes from all, though by night it looks like nothing by day."""
    day_heats, day_thumbs = sequence(WALK)
    night_heats, night_thumbs = sequence([None, (6, 3), None, None, None], night=True, seed=9)
    both = np.concatenate([day_heats, night_heats]), np.concatenate([day_thumbs, night_thumbs])
    together = judge(*both).heats_Thw
    np.testing.assert_array_equal(together[:7], judge(day_heats, day_thumbs).heats_Thw)
    np.testing.assert_array_equal(together[7:], judge(night_heats, night_thumbs).heats_Thw)
    # A single night frame among those by day is left as it is.
    one = judge(np.concatenate([day_heats, night_heats[:1]]), np.concatenate([day_thumbs, night_thumbs[:1]])).heats_Thw
    np.testing.assert_array_equal(one[7], night_heats[0])


def test_a_tint_is_no_colour() -> None:
    _, thumbs_THWC = sequence([None], night=True)
    assert is_night((thumbs_THWC[0] * np.array([1.0, 0.95, 0.97]) + np.array([9, 0, 6])).clip(0, 255).astype(np.uint8))
    assert not is_night(sequence([None])[1][0])


@pytest.mark.parametrize("frames", [0, 1, 2])
def test_two_frames_say_nothing(frames: int) -> None:
    heats_Thw, thumbs_THWC = sequence([None] * 3)
    judged = judge(heats_Thw[:frames], thumbs_THWC[:frames])
    np.testing.assert_array_equal(judged.heats_Thw, heats_Thw[:frames])
    assert not judged.unchanged_T.any()


def test_a_short_burst_is_believed_a_little() -> None:
    """A deer that stands still for three frames must not be lost; what is left of its heat is still a find."""
    heats_Thw, thumbs_THWC = sequence([(6, 3)] * 3)
    judged = judge(heats_Thw, thumbs_THWC)
    assert heat_at(judged.heats_Thw[0], (6, 3)) > 0.5
    assert not judged.unchanged_T.any()
    heats_Thw, thumbs_THWC = sequence([(6, 3)] * 10)
    seconds = judge(heats_Thw, thumbs_THWC, times_T=[float(second) for second in range(10)])
    assert heat_at(seconds.heats_Thw[0], (6, 3)) > 0.75
    hours = judge(heats_Thw, thumbs_THWC, times_T=[3600.0 * hour for hour in range(10)])
    assert heat_at(hours.heats_Thw[0], (6, 3)) < 0.2


def test_evidence_grows_with_frames_and_time() -> None:
    assert [round(evidence(frames), 2) for frames in range(7)] == [0, 0, 0, 0.33, 0.67, 1, 1]
    assert evidence(9, [0.0, None, 60.0]) == 0.5
    assert evidence(9, [None, None]) == 1


def test_heat_where_nothing_was_before_is_kept() -> None:
    """A stump that lights up in one frame alone, by a sunbeam that the picture does not show, is nobody's stump."""
    heats_Thw, thumbs_THWC = sequence([None] * 8, stump_heat=0.1)
    heats_Thw[3, 2:4, 6:9] = 0.9
    left_Thw = judge(heats_Thw, thumbs_THWC).heats_Thw
    assert heat_at(left_Thw[3], (6, 2)) > 0.75


def test_unrelated_photos_are_left_as_they_are() -> None:
    chance = np.random.default_rng(5)
    thumbs = [scene(seed=seed) for seed in range(20, 28)]
    thumbs_THWC = (np.stack(thumbs) * 255).astype(np.uint8)
    thumbs_THWC[:, 56:88, 8:32] = chance.integers(0, 255, (8, 32, 24, 3))
    heats_Thw = chance.random((8, GRID, GRID)).astype(np.float32)
    heats_Thw[:, 3:6, 3:6] = 0.9
    judged = judge(heats_Thw, thumbs_THWC)
    assert judged.heats_Thw[:, 3:6, 3:6].mean() > 0.6
    assert not judged.unchanged_T.any()


def test_settle() -> None:
    assert settle("unsure", True) == "none"
    assert settle("unsure", False) == "unsure"
    assert settle("subject", True) == "subject"


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_frame_thumb(kind: type) -> None:
    picture_HWC = np.zeros((128, 64, 3), kind)
    picture_HWC[64:, :] = (200, 100, 50)
    thumb = frame_thumb(picture_HWC)
    assert (thumb.shape, thumb.dtype) == ((96, 48, 3), np.uint8)
    assert thumb[70, 20].tolist() == [200, 100, 50]
    assert thumb[20, 20].tolist() == [0, 0, 0]


def test_a_packed_thumb_is_nearly_the_same() -> None:
    _, thumbs_THWC = sequence([None])
    again = unpack_thumb(pack_thumb(thumbs_THWC[0]))
    assert np.abs(again.astype(int) - thumbs_THWC[0]).mean() < 2


def test_a_patch_grid_that_does_not_divide_the_picture() -> None:
    _, thumbs_THWC = sequence(WALK)
    background = Background.of(np.ones((len(WALK), 7, 5), np.float32), thumbs_THWC)
    changed_hw = background.changed_hw(1)  # the animal covers 40 to 64 across and 16 to 32 down
    assert changed_hw.shape == (7, 5)
    assert changed_hw[2 * 7 // 12, 2] > 0.9
    assert changed_hw[5:].max() == 0


@pytest.mark.skipif(not LOCALIZE.is_dir(), reason="../shared/data/localize is not here")
def test_deer_on_a_real_scene() -> None:
    """Real deer cut out and pasted on one real scene, whose own deer stands in every frame as the stump does."""
    rows = {row["file"]: row["box"] for row in json.loads((LOCALIZE / "boxes.json").read_text())}
    with Image.open(LOCALIZE / "deer0018.jpg") as file:
        plain = file.convert("RGB").resize((384, 288))
    cuts = []
    for name in ("deer0008.jpg", "deer0033.jpg"):
        with Image.open(LOCALIZE / name) as file:
            cuts.append(file.convert("RGB").crop([round(end) for end in rows[name]]).resize((110, 80)))
    oval = Image.new("L", (110, 80), 0)
    ImageDraw.Draw(oval).ellipse((4, 4, 106, 76), fill=255)
    oval = oval.filter(ImageFilter.GaussianBlur(3))
    chance = np.random.default_rng(0)
    places: list[tuple[int, int] | None] = [None, (10, 190), (60, 200), (240, 30), None, (250, 190), None, None]
    heats, thumbs = [], []
    for frame, place in enumerate(places):
        image, heat = plain.copy(), np.full((16, 16), 0.04)
        heat[7:13, 6:12] = 0.8  # the scene's own
        if place:
            image.paste(cuts[frame % 2], place, oval)
            x0, y0, x1, y1 = place[0] / 24, place[1] / 18, (place[0] + 110) / 24, (place[1] + 80) / 18
            heat[round(y0) : round(y1), round(x0) : round(x1)] = 0.8
        light = 0.7 + 0.5 * chance.random()
        noisy = np.asarray(image, np.float64) * light + 4 * chance.standard_normal((288, 384, 3))
        small = Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).resize((96, 96), Image.Resampling.BOX)
        heats.append(heat)
        thumbs.append(np.asarray(small))
    judged = judge(np.stack(heats), np.stack(thumbs))
    assert judged.unchanged_T.tolist() == [place is None for place in places]
    for heat_hw, place in zip(judged.heats_Thw, places, strict=True):
        if place:
            x, y = (place[0] + 55) / 24, (place[1] + 40) / 18
            assert heat_hw[int(y) - 1 : int(y) + 2, int(x) - 1 : int(x) + 2].mean() > 0.6
        else:
            assert heat_hw.max() < 0.2
