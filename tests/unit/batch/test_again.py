"""A run that is made once more, so that its files follow corrections."""

import json
from pathlib import Path
from typing import Any

import pytest

from camera_traps import save_bright
from crop_runs import everything_in, make_photos, rows_of, run_crop
from patchlight.batch import runner
from patchlight.batch.again import FinishedRun
from patchlight.batch.overrides import add_correction
from patchlight.batch.settings import CropSettings
from patchlight.deploy import chosen
from patchlight.deploy.engines import load_engine
from patchlight.deploy.export import export
from patchlight.errors import PatchlightError
from patchlight.reporting import SILENT
from patchlight.weights.load import load


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # and back, as the run's folder is entered
    make_photos(tmp_path / "photos", 6)
    return str(save_bright(tmp_path / "model"))


def crop(model: Any, **how: Any) -> Path:
    run_crop(["photos"], "out", CropSettings(), model=model, workers=0, device="cpu", **how)
    return Path("out").absolute()


def correct_and_follow(out: Path, **more: Any) -> None:
    run = FinishedRun(out, **more)
    corrected = str(Path(rows_of(out)[0]["path"]).absolute())
    for correction in ({"decision": "none", "boxes": []}, {"decision": "unsure", "boxes": []}):
        add_correction(out, corrected, correction)
        run.follow()
        assert rows_of(out)[0]["decision"] == correction["decision"]


def test_it_writes_what_the_run_wrote(model: str) -> None:
    out = crop(model, report=False)
    before = {*everything_in(out)}
    correct_and_follow(out)
    assert {*everything_in(out)} == (before | {"corrections.jsonl"}) - {"crops/000.jpg"}


def test_a_part_stays_one(model: str) -> None:
    out = crop(model, part="3/3")
    before = [row["path"] for row in rows_of(out)]
    assert len(before) < 6
    correct_and_follow(out)
    assert [row["path"] for row in rows_of(out)] == before
    assert (out / "report.html").exists()


def test_it_takes_the_engine_that_a_run_took_by_itself(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MANY", 2)
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    for name in ("_not_faster", "_not_good_enough"):
        monkeypatch.setattr(chosen, name, lambda *given: None)
    out = crop(model)
    assert json.loads((out / ".run" / "run.json").read_text())["engine"].endswith("automatic")
    correct_and_follow(out)


def test_it_takes_the_exported_model_of_the_run(model: str, tmp_path: Path) -> None:
    export(load(model), tmp_path / "exported", to="onnx", outputs=["subject"], reporter=SILENT)
    out = crop(load_engine("exported"))
    correct_and_follow(out)
    (tmp_path / "exported").rename(tmp_path / "elsewhere")
    with pytest.raises(PatchlightError, match="exported: holds no exported model"):
        FinishedRun(out).follow()
    correct_and_follow(out, model=str(tmp_path / "elsewhere"))
