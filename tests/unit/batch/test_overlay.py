"""Pictures of what was found."""

import base64
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from crop_runs import make_photos, photo, run_crop, save_model
from patchlight.batch import summary as summary_module
from patchlight.batch.overlay import draw_found, draw_overlay
from patchlight.batch.summary import CropSummary
from patchlight.batch.work import stamp_of
from patchlight.errors import PatchlightError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The photos over which something was drawn."""
    files: list[str] = []

    def counting(file: str, *rest: Any) -> bool:
        files.append(os.path.basename(file))
        return draw_overlay(file, *rest)

    monkeypatch.setattr(summary_module, "draw_overlay", counting)
    return files


def crop(photos: list[Path], out: Path, model: Path, *, overlay: bool = True, **more: Any) -> CropSummary:
    return run_crop(photos, out, model=model, workers=0, overlay=overlay, **more)


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def row(path: Path, size: tuple[int, int], box: list[float]) -> dict[str, Any]:
    levels = np.zeros((4, 4), np.uint8)
    levels[1:3, 2:4] = 255
    heat = {"size": [4, 4], "levels": base64.b64encode(levels.tobytes()).decode()}
    found = {
        "decision": "subject",
        "confidence": 0.9,
        "boxes": [{"xyxy": box, "score": 0.9, "confidence": 0.9}],
        "heat": heat,
    }
    return {"version": 5, "path": str(path), "status": "ok", "size": list(size), "crops": []} | found


def test_heat_and_box_lie_where_the_row_says() -> None:
    whole = Image.new("RGB", (2000, 1000), (0, 0, 200))
    picture = draw_found(whole, row(Path("x"), (2000, 1000), [1000, 250, 2000, 750]))
    assert picture.size == (1024, 512)
    levels = np.asarray(picture).astype(int)
    hot, cold = levels[256, 768], levels[256, 100]
    assert hot[0] > 150  # the photo has no red
    assert cold[0] < 30
    white = (levels > 230).all(2)
    ys, xs = np.nonzero(white)
    assert abs(xs.min() - 512) <= 6
    assert abs(ys.min() - 128) <= 6
    assert abs(ys.max() - 384) <= 6


def test_where_there_is_nothing_no_box_is_drawn() -> None:
    whole, found = Image.new("RGB", (200, 100), (0, 0, 200)), row(Path("x"), (200, 100), [100, 25, 200, 75])
    boxed, without = (np.asarray(draw_found(whole, found | {"decision": each})) for each in ("unsure", "none"))
    assert (boxed > 230).all(2).any()
    assert not (without > 230).all(2).any()
    assert (without[50, 150] != without[50, 20]).any(), "the heat is there"


def test_a_photo_that_is_gone_or_another_has_no_picture(tmp_path: Path) -> None:
    source = tmp_path / "a.png"
    Image.new("RGB", (60, 40), (9, 9, 9)).save(source)
    found = row(source, (60, 40), [5, 5, 50, 30]) | {"heat": None}
    stamp = stamp_of(str(source))
    assert draw_overlay(str(source), stamp, found, tmp_path / "deep" / "a.jpg")
    with Image.open(tmp_path / "deep" / "a.jpg") as picture:
        assert picture.size == (60, 40)
    assert not draw_overlay(str(source), (1, 1), found, tmp_path / "b.jpg")
    source.write_bytes(b"no photo")
    assert not draw_overlay(str(source), stamp_of(str(source)), found, tmp_path / "b.jpg")
    assert not (tmp_path / "b.jpg").exists()


def test_only_what_is_new_or_other_is_drawn(tmp_path: Path, model: Path, drawn: list[str]) -> None:
    photos, out = make_photos(tmp_path / "photos", 3), tmp_path / "out"
    bad = tmp_path / "photos" / "bad.jpg"
    bad.write_bytes(b"no photo")
    crop([*photos, bad], out, model)
    assert drawn == ["000.jpg", "001.jpg", "002.jpg"]
    assert names_in(out / "overlays") == {"000.jpg.jpg", "001.jpg.jpg", "002.jpg.jpg"}
    assert crop([*photos, bad], out, model).nothing_to_do
    assert crop([*photos, bad], out, model, overlay=False).nothing_to_do
    drawn.clear()
    # One that sorts first, one that is another now, and one whose picture was lost.
    first = tmp_path / "photos" / "0.jpg"
    photo(7).save(first)
    photo(8).save(photos[1])
    (out / "overlays" / "002.jpg.jpg").unlink()
    again = crop([first, *photos, bad], out, model)
    assert (sorted(drawn), again.computed) == (["0.jpg", "001.jpg", "002.jpg"], 2)
    drawn.clear()
    (out / "overlays" / "002.jpg.jpg").unlink()
    crop([first, *photos, bad], out, model)
    assert drawn == ["002.jpg"]


def test_pictures_of_rows_that_are_others_now_do_not_stay(tmp_path: Path, model: Path) -> None:
    out, photos = tmp_path / "out", make_photos(tmp_path / "photos", 3)
    crop(photos, out, model)
    own = ("mine.jpg", "000 the best.jpg")
    (out / "overlays" / own[0]).write_bytes(b"not of a run")
    shutil.copy(out / "overlays" / "000.jpg.jpg", out / "overlays" / own[1])
    photos[0].unlink()
    photo(9).save(photos[1])
    crop(photos[1:], out, model, overlay=False)
    assert names_in(out / "overlays") == {"002.jpg.jpg", *own}
    crop(photos[1:], out, model)
    assert names_in(out / "overlays") == {"001.jpg.jpg", "002.jpg.jpg", *own}


def test_a_photo_without_an_ending_and_a_folder_that_ends_like_one(tmp_path: Path, model: Path) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    files = ("deer", "deer.jpg/x.jpg", "deer.jpg_/x.jpg", "fox.JPG/x.jpg", "fox")
    for number, file in enumerate(files):
        (photos / file).parent.mkdir(parents=True, exist_ok=True)
        photo(number).save(photos / file, "JPEG")
    given = [photos / file for file in files]
    crop(given, out, model)
    below = {"deer.jpg_/x.jpg.jpg", "deer.jpg__/x.jpg.jpg", "fox.JPG_/x.jpg.jpg"}
    assert names_in(out / "overlays") == {"deer.jpg", "fox.jpg", *below}
    assert crop(given, out, model).nothing_to_do


def test_a_folder_where_a_picture_was_is_left_alone(tmp_path: Path, model: Path) -> None:
    out, photos = tmp_path / "out", make_photos(tmp_path / "photos", 2)
    crop(photos, out, model)
    for name in ("000.jpg.jpg", "7.jpg"):
        (out / "overlays" / name).unlink(missing_ok=True)
        (out / "overlays" / name).mkdir()
    (out / "overlays" / "000.jpg.jpg" / "mine.jpg").write_bytes(b"not of a run")
    photo(9).save(photos[1])
    crop(photos, out, model, overlay=False)
    assert names_in(out / "overlays") == {"000.jpg.jpg/mine.jpg"}


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, model: Path) -> None:
    out, photos = tmp_path / "out", make_photos(tmp_path / "photos", 1)
    (out / "overlays" / "000.jpg.jpg").mkdir(parents=True)
    (out / ".run").mkdir()
    with pytest.raises(PatchlightError, match="holds overlays, but no run"):
        crop(photos, out, model)
    shutil.rmtree(out)
    crop(photos, out, model, overlay=False)
    (out / "overlays" / "000.jpg.jpg").mkdir(parents=True)  # whoever may do all that he likes may not unlink a folder
    with pytest.raises(PatchlightError, match=r"000\.jpg\.jpg: cannot be written .*; fix that and run it again"):
        crop(photos, out, model)
