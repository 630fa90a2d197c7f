"""The harness: VOC-style folders, photos without subjects, the tables, and what --write stores."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchlight as pl
from bright_subjects import bright, sees_what_is_bright
from models_at_random import tiny_vit
from patchlight.config import Calibration, PreprocessConfig, SubjectHeat
from patchlight.geometry import Box

ROOT = Path(__file__).parents[3]


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("localize_benchmark", ROOT / "benchmarks" / "localize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["localize_benchmark"] = module
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()


def voc_folder(folder: Path, photos: dict[str, list[tuple[int, int, int, int]]]) -> Path:
    """Photos of 64 x 48 pixels, bright in the first box; the boxes are xyxy of edges, from 0."""
    for name in ("JPEGImages", "Annotations"):
        (folder / name).mkdir()
    for name, boxes in photos.items():
        photo = bright((64, 48), boxes[0]) if boxes else Image.new("RGB", (64, 48))
        photo.save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
        objects = "".join(
            f"<object><name>thing</name><part><bndbox><xmin>1</xmin></bndbox></part><bndbox><xmax>{x1}</xmax>"
            f"<xmin>{x0 + 1}</xmin><ymin>{y0 + 1}</ymin><ymax>{y1}</ymax></bndbox></object>"
            for x0, y0, x1, y1 in boxes
        )
        (folder / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><filename>{name}.jpg</filename><size><width>64</width></size>{objects}</annotation>"
        )
    return folder


def test_voc_counts_the_nearest_of_a_photos_boxes(tmp_path: Path) -> None:
    folder = voc_folder(
        tmp_path, {"000001": [(8, 8, 40, 32), (0, 0, 5, 5)], "000002": [(20, 10, 60, 44)], "000003": [], "000004": []}
    )
    examples = list(benchmark.voc_examples(folder, None))
    assert [example.boxes for example in examples] == [
        (Box(8, 8, 40, 32), Box(0, 0, 5, 5)),
        (Box(20, 10, 60, 44),),
    ]
    assert examples[0].overlap(Box(0, 0, 5, 4)) == pytest.approx(0.8)
    assert examples[0].overlap(None) == 0
    said = list(benchmark.answers(sees_what_is_bright(), examples, ["subject", "cls"], batch=1))
    assert len(said) == 2 * 4
    assert {answer.method: answer.overlap > 0.9 for answer in said if answer.method in ("subject", "whole photo")} == {
        "subject": True,
        "whole photo": False,
    }
    lines = benchmark.box_table(said).splitlines()
    assert lines[0].split() == ["centred", "objects", "(2)"]
    subject = next(line for line in lines if line.startswith("subject")).split()
    assert subject[1:3] == ["100.0", "100.0"]
    whole = next(line for line in lines if line.startswith("whole")).split()
    # 32 x 24 and 40 x 34 of 64 x 48 pixels
    assert float(whole[-1]) == pytest.approx((0.25 + 1360 / 3072) / 2, abs=0.001)


def answer(decision: str, overlap: float, boxes: bool = True, half: int = 1, kind: str = "pets") -> Any:
    example = benchmark.Example(
        Image.new("RGB", (9, 9)), (Box(0, 0, 4, 4),) * boxes, kind, "centred" if boxes else benchmark.EMPTY, half
    )
    found = type("Found", (), {"decision": decision, "confidence": 0.5})()
    return benchmark.Answer(example, "subject", overlap, found)


def test_decisions_are_counted_on_the_second_half() -> None:
    said = [
        *[answer("subject", 0.8)] * 3,
        answer("subject", 0.3),
        answer("unsure", 0.9),
        answer("none", 0.0, boxes=False, kind="noise"),
        *[answer("subject", 0.0, half=0)] * 7,
    ]
    lines = [line.split() for line in benchmark.decision_table(said).splitlines()]
    assert ["subject", "with", "a", "subject", "5", "80.0", "75.0", "0.0", "20.0", "0.0"] in lines
    assert ["subject", "noise", "1", "0.0", "-", "0.0", "0.0", "100.0"] in lines
    assert benchmark.precision(said[:5]) == 0.75
    assert benchmark.precision(said[4:6]) is None


def test_an_emptied_photo_holds_nothing_of_its_subject() -> None:
    photo = bright((300, 200), (180, 60, 260, 150))
    scene = benchmark.beside_the_subject(photo, Box(180, 60, 260, 150))
    assert scene.size == (180, 200)
    assert np.asarray(scene).max() == 0
    assert benchmark.beside_the_subject(photo, Box(5, 5, 290, 195)) is None
    strip = benchmark.beside_the_subject(photo, Box(0, 60, 300, 200))
    assert strip.size == (120, 60)
    made = list(benchmark.made_up(56))
    assert {example.kind for example in made} == {"plain", "gradient", "sky", "noise", "stripes", "checks", "clouds"}
    for kind in {example.kind for example in made}:
        assert {example.half for example in made if example.kind == kind} == {0, 1}
    assert benchmark.tiled(photo).size == (240, 240)


def own_folder(folder: Path) -> Path:
    rng, rows = np.random.default_rng(0), []
    for source in ("pets", "cub", "deer"):
        for index in range(16):
            left, top = (int(value) for value in rng.integers(10, 60, 2))
            width, height = (int(value) for value in rng.integers(4, 60, 2))
            box = (left, top, left + width, top + height)
            bright((140, 120), box).save(folder / f"{source}{index}.png")
            rows.append({"file": f"{source}{index}.png", "box": box, "source": f"{source}/x"})
    (folder / "boxes.json").write_text(json.dumps(rows))
    return folder


def test_calibrate_fits_on_one_half_and_stores_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, known = tmp_path / "photos", sees_what_is_bright()
    photos.mkdir()
    own_folder(photos)
    seen = {(example.half, example.place) for example in benchmark.own_examples(photos, None, empty=True)}
    assert seen == {(half, place) for half in (0, 1) for place in (*benchmark.PLACES, benchmark.EMPTY)}
    halves = [
        {example.boxes[0].area: example.half for example in benchmark.own_examples(photos, count, empty=False)}
        for count in (None, 5)
    ]
    assert halves[1].items() <= halves[0].items()
    assert set(halves[1].values()) == {0, 1}
    pl.save(known, tmp_path / "model")
    before = json.loads((tmp_path / "model" / "config.json").read_text())
    monkeypatch.setattr(
        sys,
        "argv",
        ["localize.py", str(tmp_path / "model"), "--data", str(photos), "--calibrate", "--write", "--device", "cpu"],
    )
    benchmark.main()
    printed = capsys.readouterr().out
    assert "with a subject" in printed
    stored = pl.load(tmp_path / "model").subject
    assert stored is not None
    assert isinstance(stored.calibration, Calibration)
    assert json.dumps(stored.calibration.to_dict(), indent=2) in printed
    after = json.loads((tmp_path / "model" / "config.json").read_text())
    del after["patchlight"]["subject"]["calibration"]
    assert after == before


def test_a_model_that_was_not_taught_cannot_be_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pl.save(tiny_vit(), tmp_path / "model", preprocess=PreprocessConfig(image_size=(32, 32)))
    monkeypatch.setattr(sys, "argv", ["localize.py", str(tmp_path / "model"), "--calibrate", "--device", "cpu"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "not taught" in capsys.readouterr().err.splitlines()[-1]


def test_a_second_look_and_tiles_are_measured_too(tmp_path: Path) -> None:
    photos = own_folder(tmp_path)
    examples = [example for example in benchmark.own_examples(photos, 3, empty=False) if example.boxes[0].area > 900]
    loaded = sees_what_is_bright()
    overlaps = {}
    for name, settings in {"plain": {}, "second": {"second_look": True}, "tiles": {"tiles": (2, 2)}}.items():
        said = benchmark.answers(loaded, examples, ["subject"], **settings)
        overlaps[name] = np.mean([each.overlap for each in said if each.method == "subject"])
    assert overlaps["second"] > overlaps["plain"] > 0.7
    assert overlaps["tiles"] >= overlaps["plain"], "of subjects that are not small"


def test_another_calibration_decides_anew_and_leaves_the_boxes() -> None:
    loaded = sees_what_is_bright()
    example = benchmark.Example(bright((64, 64), (10, 10, 40, 40)), (Box(10, 10, 40, 40),), "pets", "centred", 1)
    (said,) = [each for each in benchmark.answers(loaded, [example], ["subject"]) if each.method == "subject"]
    for bias, decision in ((9.0, "subject"), (-9.0, "unsure")):
        (again,) = benchmark.decided_again([said], loaded, Calibration(bias=bias))
        assert again.found.decision == decision
        assert again.found.subjects == said.found.subjects
    assert isinstance(loaded.subject, SubjectHeat)


def test_small_subjects_lie_where_their_boxes_say(tmp_path: Path) -> None:
    examples = list(benchmark.small_examples(own_folder(tmp_path), 3))
    small = [example for example in examples if example.boxes]
    assert len(small) == len(examples) / 2 > 0
    for empty, example in zip(examples[::2], examples[1::2], strict=True):
        (box,) = example.boxes
        assert 0.09 < max(box.width, box.height) / example.photo.width < 0.18
        changed = np.any(np.asarray(example.photo) != np.asarray(empty.photo), 2)
        rows, columns = np.nonzero(changed)
        around = pl.Box(columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert around.intersection(box).area > 0.8 * box.area
        assert around.area < 2 * box.area
