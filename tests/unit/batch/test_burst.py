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

from patchlight.batch.burst import MOVED_FROM, Judged, evidence, judge
from patchlight.batch.frames import (
    MOST_FRAMES,
    Frame,
    frame_picture,
    group_bursts,
    is_night,
    name_pattern,
    pack_picture,
    picture_config,
    read_frame,
    unpack_picture,
)
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.decode import decode

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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("IMG_0001.JPG", "IMG_0123.jpg", True),
        ("DSCF9.jpg", "DSCF10.jpg", True),
        ("cam3_IMG_0001.jpg", "cam4_IMG_0001.jpg", False),
        ("0001_cam2.jpg", "0002_cam2.jpg", True),
        ("0001_cam2.jpg", "0001_cam3.jpg", False),
        ("cam3-20240514063000-1.png", "cam3-20240515073000-2.png", True),
        ("cam3-20240514063000-1.png", "cam4-20240514063000-1.png", False),
        ("IMG0012_20240514_063012.jpg", "IMG0013_20240514_063019.jpg", True),
        ("north_20240514_063012.jpg", "south_20240514_063012.jpg", False),
        ("12-1.jpg", "12-2.jpg", True),
        ("12-1.jpg", "13-1.jpg", False),
        ("20240514_063012.jpg", "20240231_256199.jpg", True),
    ],
)
def test_cameras_without_exif_are_told_apart_by_the_pattern_of_their_names(one: str, other: str, same: bool) -> None:
    assert (name_pattern(one) == name_pattern(other)) == same


def test_frames_of_two_cameras_in_one_folder_are_never_merged(tmp_path: Path) -> None:
    files = [photo(tmp_path / f"{camera}_IMG_{number:04}.jpg") for camera in ("cam3", "cam4") for number in range(3)]
    for number, file in enumerate(files):
        os.utime(file, (100 + number, 100 + number))
    assert group_bursts(files) == [[0, 1, 2], [3, 4, 5]]


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
    with pytest.raises(PatchlightError, match="as many grey pictures"):
        judge(np.zeros((3, 4, 4)), np.zeros((2, 8, 8)), bursts=range(3))


# What is the scene

SIDE, GRID = 192, 12
PATCH = SIDE // GRID
STUMP = (1, 7, 4, 11)
"""x0, y0, x1, y1 in patches."""

Sequence = tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]


def scene(seed: int = 0) -> npt.NDArray[np.float64]:
    """A background with edges, 0 to 1: hills, grass and a stump."""
    chance = np.random.default_rng(seed)
    hills = Image.fromarray((chance.random((12, 12)) * 255).astype(np.uint8)).resize((SIDE, SIDE))
    grass = Image.fromarray((chance.random((64, 64)) * 255).astype(np.uint8)).resize((SIDE, SIDE))
    levels = 0.25 + 0.3 * np.asarray(hills, np.float64) / 255 + 0.2 * np.asarray(grass, np.float64) / 255
    x0, y0, x1, y1 = (PATCH * end for end in STUMP)
    levels[y0:y1, x0:x1] *= 0.5
    return levels


def sequence(
    animals: list[tuple[int, int] | None],
    *,
    stump_heat: float = 0.9,
    noise: float = 0.01,
    exposures: list[float] | None = None,
    sway: int = 0,
    seed: int = 0,
) -> Sequence:
    """Frames with a stump that lights up in all, and an animal of 3 x 2 patches at (x, y) in some."""
    chance = np.random.default_rng(seed + 1)
    coat = 0.1 + 0.8 * chance.random((2 * PATCH, 3 * PATCH))
    heats, pictures = [], []
    for frame, place in enumerate(animals):
        levels = scene(seed)
        heat = 0.05 * chance.random((GRID, GRID))
        x0, y0, x1, y1 = STUMP
        heat[y0:y1, x0:x1] = stump_heat + 0.1 * (chance.random((y1 - y0, x1 - x0)) - 0.5)
        if place:
            x, y = place
            levels[y * PATCH : (y + 2) * PATCH, x * PATCH : (x + 3) * PATCH] = coat
            heat[y : y + 2, x : x + 3] = 0.85
        if sway:
            levels = np.roll(levels, chance.integers(-sway, sway + 1, 2), (0, 1))
        levels = levels * (exposures[frame] if exposures else 1) + noise * chance.standard_normal((SIDE, SIDE))
        heats.append(heat.clip(0, 1))
        pictures.append(np.rint(levels.clip(0, 1) * 255))
    return np.stack(heats).astype(np.float32), np.stack(pictures).astype(np.uint8)


def judge_hourly(frames: Sequence, **more: Any) -> Judged:
    """As bursts of one frame, an hour between two."""
    count = len(frames[0])
    return judge(*frames, **{"bursts": range(count), "times": [3600.0 * hour for hour in range(count)], **more})


def at_stump(values_hw: npt.NDArray[np.float32]) -> float:
    x0, y0, x1, y1 = STUMP
    return float(values_hw[y0:y1, x0:x1].mean())


def at(values_hw: npt.NDArray[np.float32], place: tuple[int, int]) -> float:
    x, y = place
    return float(values_hw[y : y + 2, x : x + 3].mean())


def overlap_of_moved(judged: Judged, frame: int, place: tuple[int, int]) -> float:
    moved = judged.moved_T[frame]
    assert moved is not None
    x, y = place
    return Box(*(GRID * end for end in moved.box)).iou(Box(x, y, x + 3, y + 2))


WALK: list[tuple[int, int] | None] = [None, (5, 2), (7, 3), (8, 5), None, None, None]


@pytest.mark.parametrize("exposures", [None, [1, 1.3, 0.75, 1.15, 0.9, 1.4, 0.7]])
@pytest.mark.parametrize("sway", [0, 1])
def test_the_stump_is_the_scenes_and_the_animal_is_new(exposures: list[float] | None, sway: int) -> None:
    frames = sequence(WALK, exposures=exposures, sway=sway)
    judged = judge_hourly(frames)
    assert judged.strength_T.tolist() == [1] * len(WALK)
    for number, place in enumerate(WALK):
        assert at_stump(judged.static_Thw[number]) > 0.9
        assert judged.unchanged_T[number] == (place is None)
        if place:
            assert at(judged.static_Thw[number], place) < 0.1
            assert overlap_of_moved(judged, number, place) > 0.7
    assert judged.bursts_T.tolist() == [6] * 7


def test_an_animal_in_front_of_the_stump_is_new() -> None:
    judged = judge_hourly(sequence([None, None, (1, 8), None, None, None]))
    assert at(judged.static_Thw[2], (1, 8)) < 0.2
    assert at_stump(judged.static_Thw[0]) > 0.9


def test_frames_of_one_burst_say_nothing_of_the_scene() -> None:
    """A deer that stands still for ten frames looks as a stump does; what moves counts all the same."""
    still = judge(*sequence([(6, 3)] * 10), bursts=[0] * 10, times=[float(second) for second in range(10)])
    assert not still.static_Thw.any()
    assert not still.unchanged_T.any()
    assert not still.strength_T.any()
    assert all(moved is not None and moved.level < MOVED_FROM for moved in still.moved_T)
    walking = judge(*sequence(WALK), bursts=[0] * 7, times=[float(second) for second in range(7)])
    assert not walking.static_Thw.any()
    for number, place in enumerate(WALK):
        moved = walking.moved_T[number]
        assert moved is not None
        assert (moved.level >= MOVED_FROM) == (place is not None)


def test_an_animal_that_stays_for_a_burst_is_new_against_the_others() -> None:
    bursts: list[list[tuple[int, int] | None]] = [[None] * 3, [None] * 3, [(6, 3)] * 3, [None] * 3, [None] * 3]
    frames = sequence([place for burst in bursts for place in burst])
    times = [3600.0 * burst + frame for burst in range(5) for frame in range(3)]
    judged = judge(*frames, bursts=[burst for burst in range(5) for _ in range(3)], times=times)
    assert judged.unchanged_T.tolist() == [burst != 2 for burst in range(5) for _ in range(3)]
    assert all(at(judged.static_Thw[frame], (6, 3)) < 0.1 for frame in (6, 7, 8))
    assert all(overlap_of_moved(judged, frame, (6, 3)) > 0.7 for frame in (6, 7, 8))


def test_another_picture_altogether_is_new() -> None:
    """An elephant that fills the frame."""
    heats_Thw, pictures_THW = sequence([None] * 7)
    pictures_THW[3] = (255 * scene(seed=99)).astype(np.uint8)
    judged = judge_hourly((heats_Thw, pictures_THW))
    assert judged.unchanged_T.tolist() == [frame != 3 for frame in range(7)]
    assert judged.static_Thw[3].max() < 0.2


def test_day_and_night_have_each_their_scene() -> None:
    day, night = sequence(WALK), sequence([None, (6, 3), None, None, None], seed=9)
    both = np.concatenate([day[0], night[0]]), np.concatenate([day[1], night[1]])
    together = judge_hourly(both, night=[False] * 7 + [True] * 5)
    np.testing.assert_array_equal(together.static_Thw[:7], judge_hourly(day).static_Thw)
    np.testing.assert_array_equal(together.static_Thw[7:], judge_hourly(night).static_Thw)
    # A single night frame among those by day has nothing to be compared with.
    one = judge_hourly((both[0][:8], both[1][:8]), night=[False] * 7 + [True])
    assert one.moved_T[7] is None
    assert not one.static_Thw[7].any()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_three_frames_say_nothing(count: int) -> None:
    heats_Thw, pictures_THW = sequence([None] * 4)
    judged = judge_hourly((heats_Thw[:count], pictures_THW[:count]))
    assert not judged.static_Thw.any()
    assert not judged.unchanged_T.any()
    assert judged.moved_T == (None,) * count


def test_evidence_grows_with_bursts_and_time() -> None:
    assert [round(evidence(others, [0.0, 86400.0]), 2) for others in range(6)] == [0, 0, 0, 0.75, 1, 1]
    assert evidence(9, [0.0, None, 3600.0]) == 0.5
    assert evidence(9, [None, None]) == 0


def test_heat_where_nothing_was_before_is_not_the_scenes() -> None:
    """What lights up in one frame alone, though the picture shows no difference, is nobody's stump."""
    heats_Thw, pictures_THW = sequence([None] * 8, stump_heat=0.1)
    heats_Thw[3, 2:4, 6:9] = 0.9
    judged = judge_hourly((heats_Thw, pictures_THW))
    assert at(judged.static_Thw[3], (6, 2)) < 0.2
    assert at(judged.same_Thw[3], (6, 2)) == 1


def test_unrelated_photos_have_no_scene() -> None:
    pictures_THW = (np.stack([scene(seed=seed) for seed in range(20, 28)]) * 255).astype(np.uint8)
    heats_Thw = np.random.default_rng(5).random((8, GRID, GRID)).astype(np.float32)
    heats_Thw[:, 3:6, 3:6] = 0.9
    judged = judge_hourly((heats_Thw, pictures_THW))
    assert not judged.unchanged_T.any()
    assert judged.static_Thw[:, 3:6, 3:6].mean() < 0.2


# Pictures


def test_night_has_no_colours_and_a_tint_is_none() -> None:
    grey_HW1 = 255 * scene()[..., None]
    assert is_night(grey_HW1 * np.array([1.0, 0.95, 0.97]) + np.array([9, 0, 6]))
    assert not is_night(grey_HW1 + 25 * np.random.default_rng(0).standard_normal((SIDE, SIDE, 3)))


def test_a_frames_picture_lies_under_its_heat_map() -> None:
    """With a whole number of pixels for each of the model's, of the part that the model sees."""
    photo = Image.new("RGB", (640, 320))
    photo.paste((255, 255, 255), (320, 0, 640, 320))
    for config, middle in (
        (PreprocessConfig(image_size=(128, 128), resize="squash"), 192),
        (PreprocessConfig(image_size=(224, 224), resize="shortest"), 224),
    ):
        picture_HW = frame_picture(decode(photo), config)
        assert picture_HW.shape == picture_config(config).image_size
        assert picture_HW[:, : middle - 4].max() < 10
        assert picture_HW[:, middle + 4 :].min() > 245


def test_a_packed_picture_is_nearly_the_same() -> None:
    _, pictures_THW = sequence([None])
    again = unpack_picture(pack_picture(pictures_THW[0]))
    assert np.abs(again.astype(int) - pictures_THW[0]).mean() < 4


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
        small = (
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
            .resize((256, 256), Image.Resampling.BICUBIC)
            .convert("L")
        )
        heats.append(heat)
        thumbs.append(np.asarray(small))
    judged = judge_hourly((np.stack(heats).astype(np.float32), np.stack(thumbs)))
    assert judged.unchanged_T.tolist() == [place is None for place in places]
    for static_hw, place in zip(judged.static_Thw, places, strict=True):
        if place:
            x, y = (place[0] + 55) / 24, (place[1] + 40) / 18
            assert static_hw[int(y) - 1 : int(y) + 2, int(x) - 1 : int(x) + 2].mean() < 0.3
        else:
            assert static_hw[7:13, 6:12].mean() > 0.8
