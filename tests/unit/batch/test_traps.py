"""Camera traps in the folder runner: what never moves is no animal, whatever happens to the run."""

import csv
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from bright_subjects import sees_what_is_bright
from camera_traps import ANIMAL, BRIGHT, DARK, STUMP, WALK, Walk, save_bright, scene, write_frames
from crop_runs import everything_in, rows_of, run_crop
from patchlight.batch import pipeline, sequences
from patchlight.batch.overrides import add_correction
from patchlight.batch.settings import CropSettings
from patchlight.batch.summary import CropSummary
from patchlight.config import SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.decode import decode
from patchlight.localizing.decide import GENERIC
from patchlight.localizing.detector import Detector, DetectorOptions, Subject
from patchlight.reporting import Progress
from patchlight.weights.load import Loaded, load
from patchlight.weights.save import save

DEMO = Path(__file__).parents[3] / "demo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(save_bright(tmp_path_factory.mktemp("model") / "bright"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_frames(tmp_path / "photos")
    return tmp_path / "photos"


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = Detector.look

    def counting(self: Detector, images_BCHW: Any, views: Any) -> Any:
        calls.append(len(images_BCHW))
        return real(self, images_BCHW, views)

    monkeypatch.setattr(Detector, "look", counting)
    return calls


def crop(photos: Path, out: Path, model: Any, *, workers: int = 0, burst: bool = True, **more: Any) -> CropSummary:
    settings = CropSettings(
        burst=burst,
        **{
            name: more.pop(name)
            for name in ("second_look", "boxes_only", "tiles", "empty_below", "subjects")
            if name in more
        },
    )
    return run_crop([photos], out, settings, model=model, device=None, workers=workers, **more)


def best_box(row: dict[str, Any]) -> Box:
    return Box(*row["boxes"][0]["xyxy"])


def place_of(x: int, y: int) -> Box:
    return Box(x, y, x + ANIMAL[0], y + ANIMAL[1])


# What it is for


def test_the_stump_is_no_animal(photos: Path, tmp_path: Path, model: Loaded) -> None:
    plain = crop(photos, tmp_path / "plain", model, burst=False)
    assert plain.decisions["none"] == 0
    for row, place in zip(rows_of(tmp_path / "plain"), WALK, strict=True):
        if place is None:
            assert best_box(row).iou(Box(*STUMP)) > 0.6
            assert row["crops"]
        assert "burst" not in row
    summary = crop(photos, tmp_path / "out", model)
    for row, place in zip(rows_of(tmp_path / "out"), WALK, strict=True):
        assert (row["decision"] == "none") == (place is None), row["path"]
        assert row["burst"]["unchanged"] == (place is None)
        assert row["burst"]["background"] == len(WALK) - 1
        assert bool(row["crops"]) == (place is not None)
        if place is not None:
            assert best_box(row).iou(place_of(*place)) > 0.6
    assert summary.decisions["none"] == 5
    assert summary.bursts == {"count": 8, "empty": 5, "empty_frames": 5, "by_exif": 8, "by_name": 0, "untimed": 0}


def test_what_moves_while_the_model_looks_at_the_stump_is_given_as_unsure(tmp_path: Path, model: Loaded) -> None:
    write_frames(tmp_path / "photos", animal=DARK)
    crop(tmp_path / "photos", tmp_path / "plain", model, burst=False)
    assert all(best_box(row).iou(Box(*STUMP)) > 0.6 for row in rows_of(tmp_path / "plain"))
    summary = crop(tmp_path / "photos", tmp_path / "out", model)
    for row, place in zip(rows_of(tmp_path / "out"), WALK, strict=True):
        assert row["burst"]["unchanged"] == (place is None)
        if place is None:
            assert (row["decision"], row["crops"]) == ("none", [])
        else:
            assert row["decision"] == "unsure"
            assert GENERIC["subject"].nothing <= row["confidence"] < GENERIC["subject"].sure
            assert best_box(row).iou(place_of(*place)) > 0.6
            assert row["crops"]
    assert summary.bursts == {"count": 8, "empty": 5, "empty_frames": 5, "by_exif": 8, "by_name": 0, "untimed": 0}


def test_what_moves_is_unsure_though_the_model_finds_nothing(tmp_path: Path, model: Loaded) -> None:
    write_frames(tmp_path / "photos", animal=DARK, stump=False)
    crop(tmp_path / "photos", tmp_path / "out", model)
    for row, place in zip(rows_of(tmp_path / "out"), WALK, strict=True):
        assert row["burst"]["unchanged"] == (place is None)
        assert row["decision"] == ("none" if place is None else "unsure")
        if place is not None:
            assert best_box(row).iou(place_of(*place)) > 0.6


def test_an_animal_that_stays_for_the_whole_burst_is_not_background(tmp_path: Path, model: Loaded) -> None:
    """All that is known of the scene is the burst itself: nothing is held against what the model finds."""
    write_frames(tmp_path / "photos", [(90, 40)] * 8, minutes=0.1, stump=False)
    crop(tmp_path / "photos", tmp_path / "out", model)
    crop(tmp_path / "photos", tmp_path / "plain", model, burst=False)
    rows = rows_of(tmp_path / "out")
    assert {row["decision"] for row in rows} == {"subject"}
    for row, plain in zip(rows, rows_of(tmp_path / "plain"), strict=True):
        assert (row["burst"]["background"], row["burst"]["unchanged"]) == (0, False)
        assert row["boxes"] == plain["boxes"]


def test_an_animal_that_stays_keeps_its_box_where_other_bursts_show_the_scene(tmp_path: Path, model: Loaded) -> None:
    stays: Walk = [(90, 40)] * 3
    for number, walk in enumerate([[None] * 3, [None] * 3, stays, [None] * 3, [None] * 3, [None] * 3]):
        paths = write_frames(tmp_path / "burst", walk, minutes=0.1, stump=False)
        (tmp_path / "photos").mkdir(exist_ok=True)
        for frame, path in enumerate(paths):
            shutil.move(path, tmp_path / "photos" / f"20240514_{6 + number:02}000{frame}.png")
    for path in (tmp_path / "photos").iterdir():  # no EXIF: their names are their times
        with Image.open(path) as image:
            image.convert("RGB").save(path, exif=b"")
    crop(tmp_path / "photos", tmp_path / "out", model)
    for number, row in enumerate(rows_of(tmp_path / "out")):
        if number // 3 == 2:
            assert row["decision"] == "subject"
            assert best_box(row).iou(place_of(90, 40)) > 0.6
        else:
            assert (row["decision"], row["burst"]["background"]) == ("none", 5)


@pytest.mark.parametrize("second_look", [False, True])
def test_with_the_default_model(tmp_path: Path, second_look: bool) -> None:
    """A cat of plaster stands in every frame; a cup wanders, with another light in each."""
    if not DEMO.exists():
        pytest.skip("no photos in demo/")

    def cut(name: str, box: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
        with Image.open(DEMO / name) as file:
            picture = file.convert("RGB").crop(box).resize(size)
        mask = Image.new("L", size)
        ImageDraw.Draw(mask).ellipse((3, 3, size[0] - 3, size[1] - 3), fill=255)
        return picture, mask.filter(ImageFilter.GaussianBlur(2))

    chance = np.random.default_rng(0)
    ground_HWC = np.linspace((150, 170, 190), (80, 95, 60), 480)[:, None].repeat(640, 1)
    ground = Image.fromarray((ground_HWC + chance.normal(0, 8, (480, 640, 1))).clip(0, 255).astype(np.uint8))
    cat, cat_mask = cut("chelsea.png", (90, 0, 390, 300), (200, 190))
    cup, cup_mask = cut("coffee.png", (66, 14, 497, 395), (170, 160))
    ground.paste(cat, (20, 250), cat_mask)
    walk: Walk = [None, (420, 40), None, (400, 260), None, (250, 60), None, None]
    (tmp_path / "photos").mkdir()
    for number, place in enumerate(walk):
        frame = ground.copy()
        if place is not None:
            frame.paste(cup, place, cup_mask)
        light = 0.85 + 0.3 * chance.random()
        level_HWC = np.asarray(frame) * light + chance.normal(0, 3, (480, 640, 1))
        image = Image.fromarray(level_HWC.clip(0, 255).astype(np.uint8))
        image.save(tmp_path / "photos" / f"20240514_{6 + number:02}0000.jpg", quality=90)
    crop(tmp_path / "photos", tmp_path / "plain", "default", burst=False)
    plain = [row for row, place in zip(rows_of(tmp_path / "plain"), walk, strict=True) if place is None]
    assert all(row["decision"] != "none" and best_box(row).iou(Box(20, 250, 220, 440)) > 0.4 for row in plain)
    crop(tmp_path / "photos", tmp_path / "out", "default", second_look=second_look)
    for row, place in zip(rows_of(tmp_path / "out"), walk, strict=True):
        if place is None:
            assert row["decision"] == "none"
        else:
            assert row["decision"] != "none"
            assert best_box(row).iou(Box(place[0], place[1], place[0] + 170, place[1] + 160)) > 0.4


def test_bursts_are_told_apart_by_time_and_camera(tmp_path: Path, model: Loaded) -> None:
    write_frames(tmp_path / "photos", [None] * 4, minutes=0.5)
    write_frames(tmp_path / "photos", [(100, 10), None, None], minutes=0.5, serial="B2", seed=5)
    crop(tmp_path / "photos", tmp_path / "out", model)
    rows = rows_of(tmp_path / "out")
    assert len({row["burst"]["id"] for row in rows[:4]}) == len({row["burst"]["id"] for row in rows[4:]}) == 1
    assert rows[0]["burst"]["id"] != rows[4]["burst"]["id"]
    assert [(row["burst"]["frame"], row["burst"]["frames"]) for row in rows] == [
        *[(number, 4) for number in (1, 2, 3, 4)],
        *[(number, 3) for number in (1, 2, 3)],
    ]
    assert rows[1]["burst"]["time"] == "2024-05-14 06:00:30"
    assert {row["burst"]["background"] for row in rows} == {0}, "one burst each: nothing says what their scenes are"


def test_frames_whose_names_hold_no_valid_time_are_counted(tmp_path: Path, model: Loaded) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("20231231_235930", "20231231_235950", "20231345_256199", "20230230_120000"):
        scene().save(photos / f"{name}.jpg")
        os.utime(photos / f"{name}.jpg", (1e9, 1e9))
    summary = crop(photos, tmp_path / "out", model)
    assert summary.bursts is not None
    assert [summary.bursts[name] for name in ("count", "by_exif", "by_name", "untimed")] == [2, 0, 2, 2]
    bursts = {os.path.basename(row["path"]): row["burst"] for row in rows_of(tmp_path / "out")}
    assert [(name, burst["clock"]) for name, burst in bursts.items()] == [
        *[("20230230_120000.jpg", "file"), ("20231231_235930.jpg", "name")],
        *[("20231231_235950.jpg", "name"), ("20231345_256199.jpg", "file")],
    ]
    assert bursts["20231231_235930.jpg"]["id"] == bursts["20231231_235950.jpg"]["id"]
    assert crop(photos, tmp_path / "out", model).bursts == summary.bursts


def test_frames_of_another_size_are_another_sequence(photos: Path, tmp_path: Path, model: Loaded) -> None:
    crop(photos, tmp_path / "before", model)
    with Image.open(photos / "A1_000.jpg") as image:
        exif = image.getexif()
    scene().resize((120, 160)).save(photos / "A1_0005.jpg", exif=exif)
    crop(photos, tmp_path / "out", model)
    rows = {os.path.basename(row["path"]): row for row in rows_of(tmp_path / "out")}
    assert rows.pop("A1_0005.jpg")["burst"]["background"] == 0
    assert list(rows.values()) == rows_of(tmp_path / "before")


def test_where_nothing_can_be_said_rows_are_those_of_single_photos(tmp_path: Path, model: Loaded) -> None:
    write_frames(tmp_path / "photos", [None, (100, 10)])
    crop(tmp_path / "photos", tmp_path / "out", model)
    crop(tmp_path / "photos", tmp_path / "plain", model, burst=False)
    without = [{name: value for name, value in row.items() if name != "burst"} for row in rows_of(tmp_path / "out")]
    assert without == rows_of(tmp_path / "plain")
    for name, content in everything_in(tmp_path / "plain").items():
        if name.startswith(("crops", "thumbs")):
            assert everything_in(tmp_path / "out")[name] == content


def test_what_is_written(photos: Path, tmp_path: Path, model: Loaded) -> None:
    (photos / "A1_0035.jpg").write_bytes(b"no photo")
    crop(photos, tmp_path / "out", model, formats=("megadetector", "coco", "json"))
    rows = rows_of(tmp_path / "out")
    assert (rows[4]["status"], rows[4]["burst"]) == ("error", None)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["bursts"] == {"count": 8, "empty": 5, "empty_frames": 5, "by_exif": 8, "by_name": 0, "untimed": 0}
    assert summary["settings"]["burst"] is True
    images = json.loads((tmp_path / "out" / "megadetector.json").read_text())["images"]
    written = json.loads((tmp_path / "out" / "megadetector.json").read_text())["info"]["detector_metadata"]
    least = written["typical_detection_threshold"]
    assert 0 < written["conservative_detection_threshold"] < least
    assert [image["detections"] is None for image in images] == [number == 4 for number in range(9)]
    highest = [max((each["conf"] for each in image["detections"] or ()), default=0) for image in images]
    assert [conf >= least for conf in highest] == [number in (1, 3, 7) for number in range(9)]
    assert all(image["detections"] for number, image in enumerate(images) if number != 4), "empty ones, too"
    assert images[1]["burst"] == rows[1]["burst"]["id"]
    assert "burst" not in images[4]
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [line["burst"] for line in table] == [row["burst"]["id"] if row["burst"] else "" for row in rows]
    assert (table[1]["time"], table[1]["clock"]) == ("2024-05-14 06:30:00", "exif")
    page = (tmp_path / "out" / "report.html").read_text()
    assert rows[1]["burst"]["id"] in page


def test_a_frame_is_empty_by_a_threshold_that_moves(photos: Path, tmp_path: Path, model: Loaded) -> None:
    crop(photos, tmp_path / "out", model, formats=("megadetector",))
    confidences = [row["confidence"] for row in rows_of(tmp_path / "out")]
    for least in (0.0, 0.5, 1.0):
        out = tmp_path / f"out{least}"
        crop(photos, out, model, empty_below=least, formats=("megadetector",))
        rows = rows_of(out)
        assert [row["confidence"] for row in rows] == confidences
        assert [row["decision"] == "none" for row in rows] == [each < least for each in confidences]
        info = json.loads((out / "megadetector.json").read_text())["info"]
        assert info["detector_metadata"]["typical_detection_threshold"] == least
    with pytest.raises(PatchlightError, match=r"empty_below=1\.5"):
        CropSettings(empty_below=1.5)


@pytest.mark.parametrize("second_look", [False, True])
def test_tiles_and_second_look_go_with_it(photos: Path, tmp_path: Path, model: Loaded, second_look: bool) -> None:
    settings = {"tiles": 2, "second_look": second_look}
    crop(photos, tmp_path / "out", model, **settings)
    for row, place in zip(rows_of(tmp_path / "out"), WALK, strict=True):
        assert (row["decision"] == "none") == (place is None)
        if place is not None:
            assert best_box(row).iou(place_of(*place)) > 0.5
    with pytest.raises(Cut):
        crop(photos, tmp_path / "again", model, **settings, progress=stop_at("photo", 3))
    crop(photos, tmp_path / "again", model, **settings)
    assert everything_in(tmp_path / "again") == everything_in(tmp_path / "out")


def test_a_second_look_at_tiles_is_taken_once(
    photos: Path, tmp_path: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = Detector.look_again

    def counting(self: Detector, photos: Any, found: Any) -> Any:
        looks.append(len(photos))
        return real(self, photos, found)

    monkeypatch.setattr(Detector, "look_again", counting)
    crop(photos, tmp_path / "out", model, tiles=2, second_look=True)
    assert sum(looks) == len(WALK)


def test_all_subjects_of_a_frame_are_counted_and_cut(tmp_path: Path) -> None:
    loaded = sees_what_is_bright()
    own = SubjectHeat(scale=2.8, bias=0.0, calibration=replace(GENERIC["subject"], bias=0.0))
    herd = load(save(loaded.model, tmp_path / "model", preprocess=loaded.preprocess.config, subject=own))
    (tmp_path / "photos").mkdir()
    for number in range(3):
        image = Image.new("RGB", (320, 240), (30, 40, 30))
        for x, y in ((20, 20), (130, 150), (240, 40), (20, 180)):
            image.paste(BRIGHT, (x, y, x + 50, y + 40))
        image.save(tmp_path / "photos" / f"{number}.jpg", quality=95)
    for burst in (False, True):
        out = tmp_path / f"out{burst}"
        crop(tmp_path / "photos", out, herd, burst=burst, subjects=None)
        for row in rows_of(out):
            assert (row["decision"], row["subjects"], len(row["crops"])) == ("several", 4, 4)
    crop(tmp_path / "photos", tmp_path / "two", herd, subjects=2)
    assert [(row["subjects"], len(row["crops"])) for row in rows_of(tmp_path / "two")] == [(4, 2)] * 3


@pytest.mark.parametrize("tiles", [None, 2])
def test_an_animal_beside_the_stump_is_one_subject(
    photos: Path, tmp_path: Path, model: Loaded, tiles: int | None
) -> None:
    crop(photos, tmp_path / "out", model, tiles=tiles, subjects=None)
    for row, place in zip(rows_of(tmp_path / "out"), WALK, strict=True):
        assert (row["decision"], row["subjects"]) == (("none", 0) if place is None else ("subject", 1))


def test_the_scenes_finds_are_not_counted(model: Loaded) -> None:
    detector = Detector.of(model, options=DetectorOptions(subjects=None))
    image = Image.new("RGB", (320, 240))
    boxes = [Box(x, 100, x + 50, 140) for x in (20, 130, 240)]
    found = replace(
        detector([image])[0], subjects=tuple(Subject(box, 1.0, 0.9) for box in boxes), decision="several", count=3
    )
    less = [replace(found.subjects[0], confidence=0.2), *found.subjects[1:]]
    assert sequences._of(found, less, detector).count == 2


@pytest.mark.parametrize("tiles", [None, 2])
def test_what_is_transparent_says_nothing_of_a_frame(tmp_path: Path, model: Loaded, tiles: int | None) -> None:
    for kind in ("clear", "flat"):
        (tmp_path / kind).mkdir()
    for number in range(3):
        image = Image.new("RGBA", (160, 120), (255, 240, 230, 0))
        image.paste((20, 20, 20, 255), (100, 10, 150, 110))
        path = tmp_path / "clear" / f"{number}.png"
        image.save(path)
        decode(str(path)).image.save(tmp_path / "flat" / path.name)
    found = []
    for kind in ("clear", "flat"):
        crop(tmp_path / kind, tmp_path / f"out {kind}", model, tiles=tiles)
        found.append([(row["method"], row["boxes"], row["heat"]) for row in rows_of(tmp_path / f"out {kind}")])
    assert found[0] == found[1]


def test_a_correction_that_is_undone_leaves_the_burst(photos: Path, tmp_path: Path, model: Loaded) -> None:
    out = tmp_path / "out"
    crop(photos, out, model)
    before = rows_of(out)
    add_correction(out, str(photos / "A1_001.jpg"), {"decision": "none", "boxes": []})
    for overwrite in (False, True):  # corrected once it had its row, and before
        crop(photos, out, model, overwrite=overwrite)
        assert rows_of(out)[1]["burst"] == before[1]["burst"]
    add_correction(out, str(photos / "A1_001.jpg"), {"undone": True})
    crop(photos, out, model)
    assert rows_of(out) == before


# Whatever happens


class Cut(Exception):  # noqa: N818
    pass


def stop_at(stage: str, count: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.what == stage and progress.done >= count:
            raise Cut

    return watch


def two_cameras(folder: Path) -> Path:
    write_frames(folder)
    write_frames(folder, [None, None, (90, 40), None, None, (100, 10)], serial="B2", seed=5)
    (folder / "A1_0035.jpg").write_bytes(b"no photo")
    return folder


@pytest.mark.parametrize(
    ("stage", "count"),
    [("looking at photo", 1), ("looking at photo", 9), ("looking at photo", 15), ("photo", 3), ("photo", 10)],
)
@pytest.mark.parametrize("boxes_only", [False, True])
def test_it_goes_on_where_it_was(
    tmp_path: Path, model: Loaded, looked_at: list[int], stage: str, count: int, boxes_only: bool
) -> None:
    photos = two_cameras(tmp_path / "photos")
    crop(photos, tmp_path / "whole", model, boxes_only=boxes_only)
    looked_at.clear()
    with pytest.raises(Cut):
        crop(photos, tmp_path / "out", model, boxes_only=boxes_only, progress=stop_at(stage, count))
    crop(photos, tmp_path / "out", model, boxes_only=boxes_only)
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "whole")
    for name in ("journal.jsonl", "looks.jsonl"):
        assert (tmp_path / "out" / ".run" / name).read_bytes() == (tmp_path / "whole" / ".run" / name).read_bytes()
    assert len(looked_at) <= 14 + 12, "what was looked at is not looked at again, but for what stood in the line"


def test_a_second_run_does_nothing(tmp_path: Path, model: Loaded, looked_at: list[int], monkeypatch: Any) -> None:
    photos = two_cameras(tmp_path / "photos")
    first = crop(photos, tmp_path / "out", model)
    assert (first.computed, len(looked_at)) == (15, 14)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name != "lock"}

    def never(*given: Any, **named: Any) -> Any:
        raise AssertionError("nothing is to be judged")

    monkeypatch.setattr(pipeline, "judged", never)
    again = crop(photos, tmp_path / "out", model)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name != "lock"} == before
    assert len(looked_at) == 14
    assert (again.computed, again.bursts, again.decisions) == (0, first.bursts, first.decisions)


def test_new_changed_and_removed_frames(tmp_path: Path, model: Loaded, looked_at: list[int]) -> None:
    photos = two_cameras(tmp_path / "photos")
    out = tmp_path / "out"
    crop(photos, out, model)
    looked_at.clear()
    other = write_frames(tmp_path / "other", [*WALK, (60, 15), None], seed=0)
    shutil.copy(other[8], photos)
    shutil.copy(other[1], photos / "A1_002.jpg")  # another picture, with the same time as the frame before
    (photos / "A1_005.jpg").unlink()
    summary = crop(photos, out, model)
    assert len(looked_at) == 2
    assert summary.computed == 8, "the other camera's rows stay"
    crop(photos, tmp_path / "fresh", model)
    got, wanted = everything_in(out), everything_in(tmp_path / "fresh")
    assert {name: content for name, content in got.items() if not name.startswith("thumbs")} == {
        name: content for name, content in wanted.items() if not name.startswith("thumbs")
    }


def test_a_crop_is_cut_again_only_where_its_box_is_another(
    photos: Path, tmp_path: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    crop(photos, tmp_path / "out", model)
    before = {row["path"]: row["boxes"][0]["xyxy"] for row in rows_of(tmp_path / "out") if row["crops"]}
    cut: list[str] = []
    real = pipeline.cut_photo
    monkeypatch.setattr(
        pipeline, "cut_photo", lambda file, *rest, **named: cut.append(file) or real(file, *rest, **named)
    )
    shutil.copy(write_frames(tmp_path / "other", [*WALK, None])[8], photos)
    summary = crop(photos, tmp_path / "out", model)
    assert summary.computed == 9
    after = {row["path"]: row["boxes"][0]["xyxy"] for row in rows_of(tmp_path / "out") if row["crops"]}
    assert cut == [path for path in before if after[path] != before[path]]
    assert len(cut) < len(before) == len(after)
    assert [row["burst"]["background"] for row in rows_of(tmp_path / "out")] == [8] * 9


def test_one_bad_file_shifts_nothing(photos: Path, tmp_path: Path, model: Loaded) -> None:
    crop(photos, tmp_path / "good", model)
    whole = (photos / "A1_000.jpg").read_bytes()
    for number, content in enumerate((b"", whole[: len(whole) // 2], b"<html></html>")):
        (photos / f"A1_00{number}5.jpg").write_bytes(content)
    summary = crop(photos, tmp_path / "out", model)
    assert summary.reasons == {"empty": 1, "truncated": 1, "not-an-image": 1}
    assert [row for row in rows_of(tmp_path / "out") if row["status"] == "ok"] == rows_of(tmp_path / "good")


def test_a_second_look_that_fails_costs_its_own_row(
    photos: Path, tmp_path: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Detector.look_again, 0

    def failing_first(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise PatchlightError("a part of 4x3 pixels is no image")
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Detector, "look_again", failing_first)
        assert crop(photos, tmp_path / "out", model, second_look=True).reasons == {"unsupported": 1}
    crop(photos, tmp_path / "good", model, second_look=True)
    rows, good = rows_of(tmp_path / "out"), rows_of(tmp_path / "good")
    (failed,) = [number for number, row in enumerate(rows) if row["status"] != "ok"]
    assert rows[failed]["detail"] == "a part of 4x3 pixels is no image"
    assert [*rows[:failed], *rows[failed + 1 :]] == [*good[:failed], *good[failed + 1 :]]
    assert calls > 1


@pytest.mark.parametrize("name", ["looks.jsonl", "journal.jsonl"])
@pytest.mark.parametrize("left", [0, 700, -1])
def test_a_line_that_was_cut_off_is_done_again(
    photos: Path, tmp_path: Path, model: Loaded, name: str, left: int
) -> None:
    crop(photos, tmp_path / "whole", model)
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    file = tmp_path / "out" / ".run" / name
    file.write_bytes(file.read_bytes()[:left])
    crop(photos, tmp_path / "out", model)
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "whole")


@pytest.mark.parametrize("how", ["deleted", "changed"])
def test_deleted_or_changed_after_the_look(
    photos: Path, tmp_path: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    real = pipeline.judged

    def meanwhile(*given: Any) -> Any:
        if how == "deleted":
            (photos / "A1_003.jpg").unlink()
        else:
            scene().save(photos / "A1_003.jpg")
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "judged", meanwhile)
        assert crop(photos, tmp_path / "out", model).reasons == {"gone" if how == "deleted" else "changed": 1}
    assert [row["burst"] is None for row in rows_of(tmp_path / "out")] == [number == 3 for number in range(8)]
    crop(photos, tmp_path / "out", model)
    crop(photos, tmp_path / "fresh", model)
    for name in ("results.jsonl", "results.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()


def test_crops_of_frames_that_cannot_be_reached_wait_for_them(
    photos: Path, tmp_path: Path, model: Loaded, looked_at: list[int]
) -> None:
    out, links, away = tmp_path / "out", tmp_path / "links", tmp_path / "away"
    links.mkdir()
    for path in [*photos.iterdir()]:
        (links / path.name).symlink_to(path)
    crops = crop(links, out, model).crops
    whole = everything_in(out)
    photos.rename(away)
    summary = crop(links, out, model)
    assert (summary.failed, summary.crops, summary.crops_of_others) == (8, 0, crops)
    assert crops > 0
    away.rename(photos)
    assert crop(links, out, model).computed == 8
    assert everything_in(out) == whole


def test_processes_and_batches_change_nothing(tmp_path: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = two_cameras(tmp_path / "photos")
    crop(photos, tmp_path / "alone", model)
    crop(photos, tmp_path / "workers", model, workers=2)
    assert everything_in(tmp_path / "workers") == everything_in(tmp_path / "alone")


def test_overwrite_forgets_the_looks(photos: Path, tmp_path: Path, model: Loaded, looked_at: list[int]) -> None:
    crop(photos, tmp_path / "out", model)
    with pytest.raises(PatchlightError, match="burst=true, not false"):
        crop(photos, tmp_path / "out", model, burst=False)
    looked_at.clear()
    crop(photos, tmp_path / "out", model, overwrite=True)
    assert len(looked_at) == 8


def test_memory_is_bounded_by_the_sequences(tmp_path: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        write_frames(tmp_path / "photos", [None] * 4, serial=f"C{number}", seed=number)
    held = most = 0
    real, judge = sequences.FrameStore.look, pipeline.judged

    def taken(*given: Any) -> Any:
        nonlocal held, most
        held += 1
        most = max(most, held)
        return real(*given)

    def given_back(looks: Any, *rest: Any) -> Any:
        nonlocal held
        found = judge(looks, *rest)
        held -= len(looks)
        return found

    monkeypatch.setattr(sequences.FrameStore, "look", taken)
    monkeypatch.setattr(pipeline, "judged", given_back)
    crop(tmp_path / "photos", tmp_path / "out", model, boxes_only=True)
    assert 4 <= most <= 12
