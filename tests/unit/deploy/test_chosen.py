"""The engine that `crop` takes by itself, and what becomes of a folder that was begun with it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import patchlight as pl
from crop_runs import make_photos, rows_of, run_crop
from models_at_random import randomize, tiny_vit
from patchlight.batch import runner
from patchlight.config import Calibration, PreprocessConfig, SubjectHeat
from patchlight.deploy import chosen
from patchlight.deploy import proof as proving
from patchlight.weights.save import save

pytest.importorskip("openvino", reason="needs the extra openvino")


WHOLE, HALF = "openvino in float32, automatic", "openvino in bfloat16, automatic"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chosen")


@pytest.fixture(scope="module")
def taught(folder: Path) -> Path:
    vit = tiny_vit(patch_boxes=True, num_classes=0)
    randomize(vit)
    preprocess = PreprocessConfig(image_size=(32, 32), resize="squash", crop_pct=1.0)
    subject = SubjectHeat(scale=1.0, bias=0.0, calibration=Calibration(bias=2.0))
    return save(vit, folder / "taught", preprocess=preprocess, subject=subject)


@pytest.fixture(scope="module")
def photos(folder: Path) -> Path:
    make_photos(folder / "photos", 3)
    return folder / "photos"


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor can do, and however busy it is, with a cache of the tests' own."""
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(folder / "cache"))
    monkeypatch.setattr(runner, "MANY", 2)
    monkeypatch.setattr(chosen.Kind, "missing", lambda kind: None)
    monkeypatch.setattr(proving, "INPUTS", 2)  # of which test_export.py has more
    monkeypatch.setattr(chosen, "_not_good_enough", lambda proof: None)
    monkeypatch.setattr(chosen, "_not_faster", lambda loaded, engine: None)


def engine_of(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text())["settings"]["engine"]


def test_many_photos_are_computed_by_the_engine_which_is_made_once(
    taught: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    run_crop(photos, tmp_path / "out", model=taught, tell=told.append, workers=0)
    assert engine_of(tmp_path / "out") == WHOLE
    assert f"{taught}: computed by openvino in float32" in "\n".join(told)
    assert "exporting it to openvino in float32, once" in told[0]
    for row, path in zip(rows_of(tmp_path / "out"), sorted(photos.iterdir()), strict=True):
        right = pl.localize(path, taught)
        assert row["decision"] == right.decision
        assert row["confidence"] == pytest.approx(right.confidence, abs=1e-4)
        assert row["boxes"][0]["xyxy"] == pytest.approx(dataclasses.astuple(right.subjects[0].box), abs=0.06)

    monkeypatch.setattr(chosen, "_make", None)  # it is there
    again: list[str] = []
    run_crop(photos, tmp_path / "again", model=taught, tell=again.append, workers=0)
    assert again == told[1:]
    assert rows_of(tmp_path / "again") == rows_of(tmp_path / "out")


def test_a_folder_goes_on_with_what_it_was_begun_with(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_photos(tmp_path / "photos", 1)
    out = tmp_path / "out"
    run_crop(tmp_path / "photos", out, model=taught, workers=0)
    assert engine_of(out) is None, "too few to be worth it"
    make_photos(tmp_path / "photos", 2, first=1)
    run_crop(tmp_path / "photos", out, model=taught, workers=0)
    assert engine_of(out) is None

    run_crop(tmp_path / "photos", out, model=taught, workers=0, overwrite=True)
    assert engine_of(out) == WHOLE
    first = tmp_path / "photos" / "000.jpg"
    assert run_crop([first], out, model=taught, workers=0).computed == 0
    assert engine_of(out) == WHOLE, "though it is one photo"
    with pytest.raises(pl.PatchlightError, match=f"was started with {WHOLE}, not torch; take"):
        run_crop(tmp_path / "photos", out, pl.CropSettings(engine="none"), model=taught)
    with pytest.raises(pl.PatchlightError, match=f"was started with {WHOLE}, not {HALF}; take"):
        run_crop(tmp_path / "photos", out, pl.CropSettings(engine="bfloat16"), model=taught)
    monkeypatch.setattr(chosen.Kind, "missing", lambda kind: "openvino is not installed; pip install it")
    told: list[str] = []
    with pytest.raises(pl.PatchlightError, match=f"was started with {WHOLE}, not torch; take the --engine of then"):
        run_crop(tmp_path / "photos", out, model=taught, tell=told.append)
    assert told == [
        f"{taught}: computed by torch, since {WHOLE} cannot be had: openvino is not installed; pip install it"
    ]


def test_it_can_be_turned_off(taught: Path, photos: Path, tmp_path: Path) -> None:
    run_crop(photos, tmp_path / "out", pl.CropSettings(engine="none"), model=taught, workers=0)
    assert engine_of(tmp_path / "out") is None
    with pytest.raises(pl.PatchlightError, match="engine='openvino' is not known; it is one of auto, none, bfloat16"):
        pl.CropSettings(engine="openvino")


def test_a_model_in_memory_is_left_as_it_is(taught: Path, photos: Path, tmp_path: Path) -> None:
    """It may be another than its file."""
    run_crop(photos, tmp_path / "out", model=pl.load(taught), workers=0)
    assert engine_of(tmp_path / "out") is None
    run_crop(photos, tmp_path / "cls", pl.CropSettings(method="cls"), model=taught, workers=0)
    assert engine_of(tmp_path / "cls") is None


def test_where_its_proof_does_not_hold_torch_computes(
    taught: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    proofs: list[Any] = []
    monkeypatch.setattr(chosen, "_not_good_enough", lambda proof: proofs.append(proof) or "its heat is another")
    for name in ("first", "second"):
        told: list[str] = []
        run_crop(photos, tmp_path / name, model=taught, tell=told.append, workers=0)
        assert engine_of(tmp_path / name) is None
        assert told[-1] == f"{taught}: computed by torch, since {WHOLE} cannot be had: its heat is another"
    assert len(proofs) == 1, "what it came to is kept"
    assert [path.suffix for path in (tmp_path / "cache" / "engines").iterdir()] == [".json"]


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    taught: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "file"))
    told: list[str] = []
    run_crop(photos, tmp_path / "out", model=taught, tell=told.append, workers=0)
    assert engine_of(tmp_path / "out") is None
    assert "cannot be written" in told[-1]


def test_fewer_bits_have_to_be_asked_for(
    taught: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = pl.CropSettings(engine="bfloat16")
    first = sorted(photos.iterdir())[0]
    run_crop([first], tmp_path / "out", half, model=taught, workers=0)
    assert engine_of(tmp_path / "out") == HALF, "of one photo, too"
    assert run_crop([first], tmp_path / "out", model=taught).nothing_to_do, "a folder goes on with it by itself"
    with pytest.raises(pl.PatchlightError, match="engine='bfloat16' is for ViTs that were taught to find subjects"):
        run_crop([first], tmp_path / "new", half, model=save(tiny_vit(), tmp_path / "model"))
    monkeypatch.setattr(chosen.Kind, "missing", lambda kind: "this processor does not compute bfloat16")
    with pytest.raises(pl.PatchlightError, match="engine='bfloat16' cannot be had: this processor does not compute"):
        run_crop([first], tmp_path / "new", half, model=taught)
    assert not (tmp_path / "new" / "results.jsonl").exists()


def test_what_its_proof_has_to_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from patchlight.deploy.proof import LIMITS, Agreement, Proof

    def proof(cosine: float = 1.0, box: float = 1.0, decision: float = 1.0) -> Proof:
        return Proof(
            inputs=1,
            sizes=(),
            outputs={"subject": Agreement(0.0, 0.0, cosine)},
            same_class=None,
            same_box=box,
            same_decision=decision,
            seconds={"exported": 1.0, "torch": 1.0},
            limits=LIMITS["bfloat16"],
            versions={},
            failure=None,
        )

    assert chosen._not_good_enough(proof()) is None
    assert "its heat has a cosine of 0.99000" in str(chosen._not_good_enough(proof(cosine=0.99)))
    assert "its boxes overlap by 0.970" in str(chosen._not_good_enough(proof(box=0.97)))
    assert "96.0% of its decisions" in str(chosen._not_good_enough(proof(decision=0.96)))
