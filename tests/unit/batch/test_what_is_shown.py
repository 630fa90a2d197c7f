"""What photos show goes from the model to the rows, whichever way they are looked at."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import patchlight as pl
from bright_subjects import sees_what_is_bright
from crop_runs import make_photos, rows_of, run_crop, save_model
from patchlight.batch.settings import CropSettings
from patchlight.batch.summary import CropSummary
from patchlight.commands.crop import print_summary
from patchlight.config import Calibration
from patchlight.errors import PatchlightError
from patchlight.geometry import View
from patchlight.localizing.detector import Detector, DetectorOptions
from patchlight.weights.groups import Groups, Named
from patchlight.weights.save import save

GROUPS = ("animal/bird", "animal/bird", "thing", "vehicle", "unknown")
NAMED = ("group", "group_confidence", "label", "label_confidence")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "grouped", groups=GROUPS)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder, 6)
    return folder


@pytest.mark.parametrize("how", [{}, {"second_look": True}, {"tiles": 2}, {"burst": True}, {"method": "features"}])
def test_rows_have_what_the_model_says(how: dict[str, Any], photos: Path, tmp_path: Path, model: Path) -> None:
    loaded = pl.load(model)
    summary = run_crop([photos], tmp_path / "out", CropSettings(**how), model=model, workers=0, device="cpu")
    rows = rows_of(tmp_path / "out")
    for row, path in zip(rows, sorted(photos.iterdir()), strict=True):
        with torch.inference_mode():
            shares = loaded.model(loaded.preprocess(pl.decode(path, fast_size=(32, 32)))[0][None])[0].softmax(0)
        sums = {"animal": shares[:2].sum(), "thing": shares[2], "vehicle": shares[3]}
        best = max(sums, key=lambda group: float(sums[group]))
        sure = sums[best] >= 0.5
        assert row["group"] == (best if sure else "unknown")
        assert row["group_confidence"] == (pytest.approx(float(sums[best]), abs=2e-4) if sure else None)
    found = [row["group"] for row in rows if row["decision"] != "none"]
    counted = {group: found.count(group) for group in sorted(set(found))}
    assert summary.groups == counted
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["groups"] == counted
    again = run_crop([photos], tmp_path / "out", CropSettings(**how), model=model, workers=0, device="cpu")
    assert (again.computed, again.groups) == (0, counted)


def test_without_groups_nothing_is_said(photos: Path, tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain")
    summary = run_crop([photos], tmp_path / "out", model=plain, workers=0, device="cpu")
    assert summary.groups is None
    assert all(row[name] is None for row in rows_of(tmp_path / "out") for name in NAMED)
    assert "groups" not in json.loads((tmp_path / "out" / "summary.json").read_text())


@pytest.mark.parametrize("how", [{}, {"tiles": 2}, {"burst": True}])
def test_classes_without_groups_are_named(
    how: dict[str, Any], photos: Path, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grouped = pl.load(model)
    with torch.no_grad():
        grouped.model.head.out.weight *= 20  # which is sure of itself
    about = {"preprocess": grouped.preprocess.config, "labels": grouped.labels, "subject": grouped.subject}
    labelled = save(grouped.model, tmp_path / "labelled", **about)
    with_groups = save(grouped.model, tmp_path / "with groups", **about, groups=grouped.groups)
    out = tmp_path / "out"
    summary = run_crop([photos], out, CropSettings(**how), model=labelled, workers=0, device="cpu")
    rows = rows_of(out)
    other = tmp_path / "other"
    run_crop([photos], other, CropSettings(**how), model=with_groups, workers=0, device="cpu")
    for row, expected in zip(rows, rows_of(other), strict=True):
        assert row["group"] is row["group_confidence"] is None
        if expected["label"] != "bird":  # which is a part of a group, and no class
            assert (row["label"], row["label_confidence"]) == (expected["label"], expected["label_confidence"])
    assert any(row["label"] is not None for row in rows)
    found = [row["label"] for row in rows if row["decision"] != "none"]
    names = [name for name in found if name is not None]
    assert summary.labels == {name: names.count(name) for name in names}
    assert list(summary.labels.values()) == sorted(summary.labels.values(), reverse=True)
    assert summary.groups is None
    assert json.loads((out / "summary.json").read_text())["labels"] == summary.labels
    again = run_crop([photos], out, CropSettings(**how), model=labelled, workers=0, device="cpu")
    assert (again.nothing_to_do, again.labels) == (True, summary.labels)
    print_summary(summary, out)
    shown = [f"{count} {name}" for name, count in summary.labels.items()]
    shown += [f"{found.count(None)} without a name"] if None in found else []
    assert f"shown: {', '.join(shown)}\n" in capsys.readouterr().out


def test_of_many_names_the_commonest_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = {f"{number}\x1b[0m": 20 - number for number in range(12)}
    decisions = {"subject": sum(labels.values()) + 3, "several": 0, "unsure": 0, "none": 7}
    print_summary(CropSummary(tmp_path, photos=500, computed=0, failed=0, decisions=decisions, labels=labels), tmp_path)
    line = next(each for each in capsys.readouterr().out.splitlines() if each.startswith("shown: "))
    assert line.startswith("shown: 20 '0\\x1b[0m', 19 '1\\x1b[0m', ")
    assert line.endswith(", 19 of 2 more, 3 without a name")


def test_confidence_that_was_fitted_to_another_model_is_marked(photos: Path, tmp_path: Path, model: Path) -> None:
    lines: list[str] = []
    for method, calibrated in (("subject", True), ("tokencut", False)):
        out = tmp_path / method
        settings = CropSettings(method=method)
        run_crop([photos], out, settings, model=model, workers=0, device="cpu", tell=lines.append)
        assert json.loads((out / "summary.json").read_text())["calibrated"] is calibrated
    assert [line for line in lines if "uncalibrated" in line] == [
        f"{model}: its confidence by the method 'tokencut' is uncalibrated: rank photos by it, and do not read it as "
        "a probability"
    ]


def test_other_groups_are_refused(photos: Path, tmp_path: Path, model: Path) -> None:
    run_crop([photos], tmp_path / "out", model=model, workers=0, device="cpu")
    loaded = pl.load(model)
    assert loaded.labels is not None
    save(loaded, tmp_path / "other", groups=Groups(loaded.labels, ("thing",) * 5))
    with pytest.raises(PatchlightError, match=r"started with model\.groups="):
        run_crop([photos], tmp_path / "out", model=tmp_path / "other", workers=0, device="cpu")


def decision_about(group: str, empty_below: float | None = None) -> str:
    """Of a photo in which hardly anything stands out, if this is what it is called."""
    heat_1hw = torch.full((1, 8, 8), 0.02)
    heat_1hw[:, 3:5, 3:5] = 0.1
    view = View(source_size=(96, 96), model_size=(32, 32), scale=(32 / 96, 32 / 96))
    loaded = replace(sees_what_is_bright(), groups=Groups(("a/deer", "a/cup"), ("animal", "thing")))
    nothing = 0.1 if empty_below is None else empty_below  # as `Detector.of` has it
    calibration = Calibration(bias=-8.0, mean=10.0, sure=0.7, nothing=nothing)
    detector = Detector(loaded, "subject", calibration, DetectorOptions(empty_below=empty_below))
    (found,) = detector.judge(heat_1hw, [view])
    return detector.with_name(found, Named(group, None if group == "unknown" else 0.9, None, None)).decision


def test_a_photo_that_shows_an_animal_is_not_empty() -> None:
    assert decision_about("thing") == decision_about("unknown") == "none"
    assert decision_about("animal") == "unsure"


def test_what_the_user_calls_empty_is_empty_whatever_it_shows() -> None:
    assert decision_about("animal", empty_below=0.2) == "none"
    assert decision_about("animal", empty_below=0.0) == "unsure"
