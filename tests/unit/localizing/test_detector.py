"""Boxes in source pixels, from photos of all shapes and orientations, by a model that sees what is bright."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from bright_subjects import as_loaded, bright, sees_what_is_bright
from models_at_random import tiny_vit
from patchlight.config import Calibration, PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.geometry import Box
from patchlight.images.decode import decode
from patchlight.images.preprocess import Preprocess
from patchlight.localizing.decide import GENERIC
from patchlight.localizing.detector import Detector, DetectorOptions, localize, read
from patchlight.weights.groups import Groups, Named
from patchlight.weights.save import save

# How an upright photo is stored for each EXIF orientation.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize(
    ("size", "box"),
    [((320, 240), (100, 60, 180, 150)), ((200, 480), (0, 300, 90, 480)), ((64, 64), (17, 9, 46, 30))],
)
def test_boxes_are_in_the_photos_pixels(size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    found = localize(bright(size, box), sees_what_is_bright())
    (subject,) = found.subjects
    assert subject.box.iou(Box(*box)) > 0.9
    assert subject.score > 0.8
    assert found.view.source_size == size[::-1]
    assert found.heat_hw.shape == found.mask_hw.shape == (16, 16)
    across, down = size[0] / 16, size[1] / 16
    assert found.mask_hw[int((box[1] + box[3]) / 2 / down), int((box[0] + box[2]) / 2 / across)]
    assert found.mask_hw.sum() * across * down == pytest.approx((box[2] - box[0]) * (box[3] - box[1]), rel=0.25)
    assert found.method == "subject"


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["jpg", "tif"])
def test_turned_photos_have_the_upright_photos_boxes(orientation: int, kind: str, tmp_path: Path) -> None:
    upright, box = bright((640, 400), (400, 80, 600, 200)), Box(400, 80, 600, 200)
    turn = STORED[orientation]
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[274] = orientation
    stored.save(tmp_path / f"photo.{kind}", exif=exif)
    loaded = sees_what_is_bright()
    found = localize(tmp_path / f"photo.{kind}", loaded)
    assert found.view.source_size == (400, 640)
    assert found.view.orientation == orientation
    assert found.subjects[0].box.iou(box) > 0.9
    # And back to where it lies in the file.
    left, top, right, bottom = found.view.to_stored(found.subjects[0].box).to_ints()
    pixels = np.asarray(stored)[top + 5 : bottom - 5, left + 5 : right - 5]
    assert pixels.mean() > 235


def test_a_cropped_or_padded_view_leads_back_too() -> None:
    photo, box = bright((400, 200), (150, 50, 220, 130)), Box(150, 50, 220, 130)
    for settings in ({"resize": "shortest", "crop_pct": 0.9}, {"resize": "border"}, {"resize": "none"}):
        loaded = sees_what_is_bright(**settings)
        found = localize(photo, loaded)
        if settings["resize"] == "none":  # it sees the middle of the photo, 168 to 232 and 68 to 132
            assert found.subjects[0].box.iou(Box(168, 68, 220, 130)) > 0.9
        else:
            assert found.subjects[0].box.iou(box) > 0.85, settings


def test_photos_of_different_sizes_keep_their_order() -> None:
    loaded = sees_what_is_bright("resize", resize="shortest", crop="none")
    places = [(300, 200), (200, 300), (300, 200), (200, 300), (200, 300)]
    photos = [bright(size, (20 * index, 30, 20 * index + 90, 130)) for index, size in enumerate(places)]
    found = localize(photos, loaded, batch_size=4)
    for index, (size, each) in enumerate(zip(places, found, strict=True)):
        assert each.view.source_size == size[::-1]
        assert each.subjects[0].box.iou(Box(20 * index, 30, 20 * index + 90, 130)) > 0.8


@pytest.mark.parametrize(
    "options", [DetectorOptions(), DetectorOptions(second_look=True), DetectorOptions(tiles=(2, 1))]
)
def test_in_batches_as_on_a_gpu_photos_are_what_they_are_alone(
    options: DetectorOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector = Detector.of(sees_what_is_bright(), options=options)
    photos = [bright((300 - index, 200), (20 * index, 30, 20 * index + 90, 130)) for index in range(5)]
    alone = detector(photos)
    monkeypatch.setattr(Detector, "device", torch.device("meta"))
    for one, each in zip(alone, detector(photos, batch_size=2), strict=True):
        assert astuple(each.subjects[0].box) == pytest.approx(astuple(one.subjects[0].box), abs=1e-3)
        assert (each.decision, each.confidence) == (one.decision, pytest.approx(one.confidence, abs=1e-5))


def test_every_form_of_a_photo_is_taken(tmp_path: Path) -> None:
    photo = bright((100, 80), (10, 20, 60, 70))
    photo.save(tmp_path / "photo.png")
    forms: list[Any] = [
        photo,
        np.asarray(photo),
        str(tmp_path / "photo.png"),
        tmp_path / "photo.png",
        (tmp_path / "photo.png").read_bytes(),
        decode(photo),
    ]
    loaded = sees_what_is_bright()
    together = localize(forms, loaded, batch_size=4)
    for form, in_batch in zip(forms, together, strict=True):
        alone = localize(form, loaded)
        assert alone.subjects == together[0].subjects
        np.testing.assert_allclose(in_batch.heat_hw, alone.heat_hw, atol=1e-6)


def test_several_subjects_and_none() -> None:
    loaded = sees_what_is_bright()
    photo = bright((320, 320), (20, 20, 120, 120))
    photo.paste((255, 255, 255), (200, 180, 300, 300))
    found = localize(photo, loaded, subjects="all")
    assert [
        round(subject.box.iou(Box(*box)), 1) >= 0.9
        for subject, box in zip(found.subjects, [(200, 180, 300, 300), (20, 20, 120, 120)], strict=True)
    ] == [True, True]
    assert len(localize(photo, loaded).subjects) == 1
    nothing = localize(Image.new("RGB", (50, 50)), loaded, threshold=0.5)
    assert nothing.subjects == ()
    assert not nothing.mask_hw.any()


def test_a_batch_is_what_its_photos_are_alone() -> None:
    loaded = sees_what_is_bright()
    photos = [bright((100, 80), (10 * index, 20, 10 * index + 30, 70)) for index in range(3)]
    images, views = zip(*(loaded.preprocess(read(photo, loaded.preprocess)) for photo in photos), strict=True)
    for photo, found in zip(photos, Detector.of(loaded).look(torch.stack(images), views), strict=True):
        assert found.subjects == localize(photo, loaded).subjects


def test_other_methods_have_thresholds_of_their_own() -> None:
    loaded = sees_what_is_bright()
    heat_Bhw = torch.full((1, 16, 16), 0.1)
    heat_Bhw[:, 4:8, 2:6] = 1
    mean = 0.1 + 0.9 * 16 / 256
    _, view = loaded.preprocess(Image.new("RGB", (64, 64)))
    for method, threshold in {"cls": mean, "rollout": mean, "lost": 0.5, "tokencut": 0.5}.items():
        detector = Detector(loaded, method, GENERIC[method])  # type: ignore[arg-type, index]
        (found,) = detector.judge(heat_Bhw, [view])
        box, out = found.subjects[0].box, 4 * (0.5 - (threshold - 0.1) / 0.9)  # beyond the patches, in pixels
        edges = (box.left, box.top, box.right, box.bottom)
        assert edges == pytest.approx((8 - out, 16 - out, 24 + out, 32 + out), abs=1e-4), method
        assert found.mask_hw.sum() == 16


@pytest.mark.parametrize("method", ["cls", "rollout", "lost", "tokencut", "auto"])
def test_models_that_were_not_taught_answer_too(method: str) -> None:
    preprocess = Preprocess(PreprocessConfig(image_size=(32, 32)))
    loaded = as_loaded(tiny_vit(), preprocess, None)
    noise = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    found = localize(noise, loaded, method)
    assert found.method == ("tokencut" if method == "auto" else method)
    for subject in found.subjects:
        assert 0 <= subject.box.left < subject.box.right <= 90
        assert 0 <= subject.box.top < subject.box.bottom <= 60


def test_mistakes_are_named_before_photos_are_read() -> None:
    loaded = sees_what_is_bright()
    with pytest.raises(PatchlightError, match="method='best'"):
        localize("nowhere.jpg", loaded, "best")
    with pytest.raises(PatchlightError, match="batch_size=0"):
        localize("nowhere.jpg", loaded, batch_size=0)
    with pytest.raises(PatchlightError, match=r"nowhere\.jpg"):
        localize("nowhere.jpg", loaded)
    with pytest.raises(PatchlightError, match="list of photos is empty"):
        localize([], loaded)


def test_decisions_come_with_the_boxes() -> None:
    loaded = sees_what_is_bright()
    one = bright((320, 320), (60, 40, 200, 220))
    two = bright((320, 320), (10, 20, 120, 200))
    two.paste((255, 255, 255), (200, 180, 310, 310))
    dark = Image.new("RGB", (320, 320))
    sure = Calibration(bias=-12.0, mean=20.0, sure=0.5, nothing=0.2)
    assert loaded.subject is not None
    own = replace(loaded, subject=replace(loaded.subject, calibration=sure))
    found = localize([one, two, dark], own)
    assert [each.decision for each in found] == ["subject", "several", "none"]
    assert [len(each.subjects) for each in found[:2]] == [1, 1]
    assert localize(two, own, subjects=2).decision == "several"
    assert found[0].confidence > 0.9 > 0.2 > found[2].confidence
    never = replace(loaded, subject=replace(loaded.subject, calibration=Calibration(bias=-1.0, sure=0.5)))
    assert localize(one, never).decision == "unsure"
    assert localize(one, never).confidence == pytest.approx(1 / (1 + np.e))


def test_the_kinds_of_a_result() -> None:
    found = localize(bright((100, 80), (10, 20, 60, 70)), sees_what_is_bright())
    assert found.heat_hw.dtype == torch.float32
    assert found.mask_hw.dtype == torch.bool
    assert found.heat_hw.device.type == "cpu"
    assert type(found.confidence) is float
    assert type(found.subjects[0].score) is float


def test_models_are_named_or_given(tmp_path: Path) -> None:
    loaded, photo = sees_what_is_bright(), bright((100, 80), (10, 20, 60, 70))
    save(loaded, tmp_path / "model")
    given = localize(photo, loaded)
    for model in (tmp_path / "model", str(tmp_path / "model")):
        assert localize([photo], model, device="cpu")[0].subjects == given.subjects
    with pytest.raises(PatchlightError, match="device=meta"):
        localize(photo, loaded, device="meta")
    with pytest.raises(PatchlightError, match="not int"):
        localize(photo, 3)  # type: ignore[call-overload]


@pytest.mark.parametrize("subjects", [0, -1, "two", 1.5, True, None])
def test_subjects_are_counted_or_all(subjects: object) -> None:
    with pytest.raises(PatchlightError, match="subjects="):
        localize("nowhere.jpg", sees_what_is_bright(), subjects=subjects)  # type: ignore[call-overload]


def test_arrays_are_checked() -> None:
    for array in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(PatchlightError, match="uint8"):
            localize(array, sees_what_is_bright())


@pytest.mark.parametrize(
    ("decision", "subjects", "group", "expected"),
    [
        ("none", 1, "animal", "unsure"),
        ("none", 1, "vehicle", "unsure"),
        ("none", 1, "thing", "none"),
        ("none", 1, "unknown", "none"),
        ("none", 0, "animal", "none"),
        ("subject", 1, "animal", "subject"),
        ("several", 1, "thing", "several"),
    ],
)
def test_a_photo_that_the_model_calls_an_animal_is_not_empty(
    monkeypatch: pytest.MonkeyPatch, decision: Any, subjects: int, group: str, expected: str
) -> None:
    loaded = pl.load("default")
    named = Named(group, 0.9, None, None)
    before = Detector._from_one

    def as_asked(*given: Any) -> pl.Localization:
        found = before(*given)
        return replace(found, decision=decision, subjects=found.subjects[:subjects])

    monkeypatch.setattr(Detector, "_from_one", as_asked)
    monkeypatch.setattr(Groups, "named", lambda self, logits_BK: [named] * len(logits_BK))
    found = pl.localize(Path(__file__).parents[3] / "demo" / "chelsea.png", loaded)
    assert (found.decision, found.named) == (expected, named)


def bright_find(*groups: str) -> tuple[Detector, pl.Localization]:
    """A detector whose model's classes have these groups, and what it finds."""
    loaded = sees_what_is_bright()
    found = Detector.of(loaded)([bright((320, 240), (100, 60, 180, 150))])[0]
    return Detector.of(replace(loaded, labels=groups, groups=Groups(groups, groups))), found


def test_a_photo_that_is_called_empty_is_none() -> None:
    detector, found = bright_find("animal", "empty")
    assert found.decision == "subject"
    for sure, decision in ((0.99, "none"), (0.6, "unsure")):
        named = Named("empty", sure, None, None)
        empty = detector.with_name(found, named)
        assert (empty.decision, empty.named) == (decision, named)
        assert empty.confidence == empty.subjects[0].confidence == pytest.approx((1 - sure) * found.confidence)
        assert empty.subjects[0].box == found.subjects[0].box


@pytest.mark.parametrize(("groups", "decision"), [(("animal", "empty"), "unsure"), (("animal", "person"), "none")])
def test_names_prove_something_where_the_model_may_say_that_nothing_is_there(
    groups: tuple[str, ...], decision: str
) -> None:
    detector, found = bright_find(*groups)
    named = detector.with_name(replace(found, decision="none"), Named("animal", 0.9, None, None))
    assert named.decision == decision
