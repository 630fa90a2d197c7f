"""What a run may read and write: never the photos themselves, never somebody else's files, never its own output."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from crop_runs import make_photos, rows_of, run_crop, save_model
from patchlight.batch.results import WRITTEN
from patchlight.batch.settings import CropSettings
from patchlight.errors import PatchlightError
from patchlight.localizing.boxes import regions_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


def test_photos_that_lie_where_crops_go_are_never_written_over(tmp_path: Path, model: Path) -> None:
    photos = make_photos(tmp_path / "own" / "crops", 2)
    before = [path.read_bytes() for path in photos]
    for overwrite in (False, True):
        with pytest.raises(PatchlightError, match="is in the folder that this run writes its crops to"):
            run_crop(photos, tmp_path / "own", model=model, workers=0, overwrite=overwrite)
    assert [path.read_bytes() for path in photos] == before


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_somebody_elses_files_is_refused(name: str, overwrite: bool, tmp_path: Path, model: Path) -> None:
    photos = make_photos(tmp_path / "photos", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(PatchlightError, match=f"holds {name}, but no run of this command"):
        run_crop(photos, tmp_path / "out", model=model, workers=0, overwrite=overwrite)
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_patterns_and_pictures_do_not_feed_a_run_with_itself(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_photos(tmp_path / "photos", 2)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run_crop(["**/*.jpg"], "photos/out", model=model, workers=0, overlay=True).photos == 2
        assert len(list(Path("photos/out/overlays").iterdir())) == 2
    assert run_crop(["photos"], "photos/out", model=model, workers=0).photos == 2


def test_beginning_anew_leaves_nothing_of_the_old_run(tmp_path: Path, model: Path) -> None:
    make_photos(tmp_path / "photos", 2)
    out = tmp_path / "out"
    run_crop([tmp_path / "photos"], out, model=model, workers=0, formats=["coco"], overlay=True)
    settings = CropSettings(margin=0.5)
    run_crop([tmp_path / "photos"], out, settings, model=model, workers=0, overwrite=True, report=False)
    assert not (out / "coco.json").exists()
    assert not (out / "report.html").exists()
    assert not (out / "overlays").exists()
    assert not (out / "thumbs").exists()


def test_heat_of_a_model_that_sees_the_middle_alone_is_drawn_there(tmp_path: Path) -> None:
    model = save_model(tmp_path / "central", resize="shortest", crop_pct=0.8)
    Image.new("RGB", (300, 100), (0, 0, 150)).save(tmp_path / "wide.png")
    run_crop([tmp_path / "wide.png"], tmp_path / "out", model=model, workers=0, overlay=True)
    (row,) = rows_of(tmp_path / "out")
    x0, y0, x1, y1 = row["heat"]["region"]
    assert (x0, y0, x1, y1) == pytest.approx((110, 10, 190, 90), abs=4)
    with Image.open(tmp_path / "out" / "overlays" / "wide.png.jpg") as image:
        red_W = np.asarray(image)[20:80, :, 0].mean(0)
    assert red_W[:90].max() < 40
    assert red_W[:90].mean() < red_W[120:180].mean() - 5


def test_tiles_beyond_reason_are_refused_at_once() -> None:
    with pytest.raises(PatchlightError, match="tiles=20 must be from 1 to 16"):
        CropSettings(tiles=20)


def test_a_faint_narrow_region_keeps_its_box() -> None:
    heat = np.zeros((16, 16))
    heat[4:8, 3] = 0.45
    heat[10:12, 10:12] = 0.3
    ((x0, y0, x1, y1),) = (region.box for region in regions_of(heat, threshold=0.25, most=1))
    assert (x0, x1) == (3, 4)
    assert 3.5 < y0 < 5 < 7 < y1 < 8.5
    single = np.zeros((16, 16))
    single[3, 3] = 0.45
    assert [region.box for region in regions_of(single, threshold=0.25)] == [(3, 3, 4, 4)]


def test_two_dots_after_a_link_lead_where_the_system_says(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photo,) = make_photos(tmp_path / "real", 1)
    (tmp_path / "real" / "deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    monkeypatch.chdir(tmp_path)
    for given in (f"link/../{photo.name}", "link/.."):
        assert run_crop([given], given.replace("/", "_"), model=model, workers=0).failed == 0


def test_exports_follow_the_results_and_a_second_run_does_nothing(tmp_path: Path, model: Path) -> None:
    make_photos(tmp_path / "photos", 2)
    out = tmp_path / "out"
    run_crop([tmp_path / "photos"], out, model=model, workers=0, formats=["coco", "json"])
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != "lock"}
    again = run_crop([tmp_path / "photos"], out, model=model, workers=0, formats=["coco"])
    assert again.exports == (out / "coco.json",)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    for count, lost in ((3, []), (4, ["summary.json"]), (5, ["summary.json", ".run/finished.json"])):
        make_photos(tmp_path / "photos", 1, first=count - 1)
        for name in lost:
            (out / name).unlink()
        run_crop([tmp_path / "photos"], out, model=model, workers=0)
        assert len(json.loads((out / "coco.json").read_text())["images"]) == count
        assert len(json.loads((out / "results.json").read_text())) == count
    (out / "results.json").unlink()
    run_crop([tmp_path / "photos"], out, model=model, workers=0)
    assert json.loads((out / "summary.json").read_text())["exports"] == ["coco"]
    assert not (out / "results.json").exists(), "what was taken away is not wanted"
