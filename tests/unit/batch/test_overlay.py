"""Pictures of what was found."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from crop_runs import make_photos, rows_of, save_model
from patchlight.batch.overlay import draw_found, write_overlays
from patchlight.batch.runner import crop_photos
from patchlight.errors import PatchlightError


def row(path: Path, size: tuple[int, int], box: list[float]) -> dict[str, Any]:
    levels = np.zeros((4, 4), np.uint8)
    levels[1:3, 2:4] = 255
    heat = {"size": [4, 4], "levels": base64.b64encode(levels.tobytes()).decode()}
    found = {"decision": "subject", "confidence": 0.9, "boxes": [{"xyxy": box, "score": 0.9}], "heat": heat}
    return {"version": 3, "path": str(path), "status": "ok", "size": list(size), "crops": []} | found


def test_heat_and_box_lie_where_the_row_says() -> None:
    photo = Image.new("RGB", (2000, 1000), (0, 0, 200))
    picture = draw_found(photo, row(Path("x"), (2000, 1000), [1000, 250, 2000, 750]))
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
    photo, found = Image.new("RGB", (200, 100), (0, 0, 200)), row(Path("x"), (200, 100), [100, 25, 200, 75])
    drawn, without = (np.asarray(draw_found(photo, found | {"decision": each})) for each in ("unsure", "none"))
    assert (drawn > 230).all(2).any()
    assert not (without > 230).all(2).any()
    assert (without[50, 150] != without[50, 20]).any(), "the heat is there"


def test_every_row_that_is_in_order_gets_a_picture_and_photos_that_are_gone_none(tmp_path: Path) -> None:
    Image.new("RGB", (60, 40), (9, 9, 9)).save(tmp_path / "a.png")
    rows = [
        row(tmp_path / "gone.png", (60, 40), [0, 0, 10, 10]),
        {"version": 3, "path": "b", "status": "error", "reason": "empty", "size": None, "boxes": [], "heat": None},
        row(tmp_path / "a.png", (60, 40), [5, 5, 50, 30]) | {"heat": None},
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    done: list[int] = []
    assert list(write_overlays(tmp_path, done.append)) == [tmp_path / "overlays" / "2.jpg"]
    with Image.open(tmp_path / "overlays" / "2.jpg") as picture:
        assert picture.size == (60, 40)
    assert done[-1] == 3


def test_pictures_of_rows_that_are_others_now_do_not_stay(tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "out"
    photos = make_photos(tmp_path / "photos", 3)
    own = out / "overlays" / "mine.jpg"

    def drawn() -> set[str]:
        return {path.name for path in (out / "overlays").iterdir()} - {own.name}

    crop_photos(photos, out, model=model, workers=0)
    assert len(list(write_overlays(out))) == 3
    own.write_bytes(b"not of a run")
    crop_photos(photos, out, model=model, workers=0, formats=["coco"])
    assert drawn() == {"0.jpg", "1.jpg", "2.jpg"}, "the rows are the same"
    photos[0].unlink()
    crop_photos(photos[1:], out, model=model, workers=0)
    assert drawn() == set(), "0.jpg would be taken for another photo's"
    (out / "overlays" / "7.jpg").write_bytes(b"of an earlier version, which left them")
    list(write_overlays(out))
    assert len(rows_of(out)) == 2
    assert drawn() == {"0.jpg", "1.jpg"}
    assert own.read_bytes() == b"not of a run"


def test_a_picture_that_cannot_be_removed_is_one_line(tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "out"
    crop_photos(make_photos(tmp_path / "photos", 1), out, model=model, workers=0)
    (out / "overlays" / "0.jpg").mkdir(parents=True)  # whoever may do all that he likes may not unlink a folder
    with pytest.raises(PatchlightError, match=r"0\.jpg: cannot be removed"):
        crop_photos(make_photos(tmp_path / "photos", 2), out, model=model, workers=0)
