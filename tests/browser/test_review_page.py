"""`patchlight review` in a real browser: corrections by hand, and what becomes of them on the disk."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from crop_runs import make_photos, rows_of, run_crop, save_model
from patchlight.batch.settings import CropSettings

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from patchlight.batch import again  # noqa: E402
from patchlight.batch.again import FinishedRun  # noqa: E402
from patchlight.serve.review import Review, make_review_app  # noqa: E402
from patchlight.serve.running import Address, access_policy, listen  # noqa: E402

SHOTS = os.environ.get("PATCHLIGHT_SHOTS")


@dataclass
class Reviewed:
    url: str
    out: Path
    review: Review


@pytest.fixture
def reviewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reviewed]:
    monkeypatch.chdir(tmp_path)  # and back, as the run's folder is entered
    monkeypatch.setattr(again, "QUIET_SECONDS", 0.3)
    model = save_model(tmp_path / "model", groups=["animal/bird", "vehicle", "thing", "animal", "person"])
    make_photos(tmp_path / "photos", 4)
    run_crop("photos", "out", CropSettings(), model=str(model), workers=0, device="cpu", formats=["megadetector"])
    review = Review(FinishedRun(tmp_path / "out"))
    listening = listen(Address(port=0))
    port = listening.getsockname()[1]
    app = make_review_app(review, access_policy(Address(port=port), port), lambda facts: None)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield Reviewed(f"http://127.0.0.1:{port}/", tmp_path / "out", review)
    server.should_exit = True
    thread.join(30)
    listening.close()


@pytest.fixture
def page(browser: Any, reviewed: Reviewed) -> Iterator[Any]:
    failures: list[str] = []
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    opened.set_default_timeout(20_000)
    opened.on("pageerror", lambda error: failures.append(str(error)))
    opened.on("console", lambda line: failures.append(line.text) if "Content Security Policy" in line.text else None)
    opened.goto(reviewed.url)
    opened.wait_for_selector("html.alive")
    opened.wait_for_selector("#over .box")
    wait_until(opened, lambda: opened.evaluate("document.getElementById('image').naturalWidth") > 0)
    yield opened
    opened.close()
    assert failures == []


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "corrections.jsonl").read_text().splitlines()]


def saved(page: Any, out: Path, count: int) -> list[dict[str, Any]]:
    wait_until(page, lambda: (out / "corrections.jsonl").exists() and len(lines_of(out)) >= count)
    found = lines_of(out)
    assert len(found) == count
    return found


def wait_until(page: Any, holds: Callable[[], bool]) -> None:
    """Not by the browser's own wait, which the page's policy does not let evaluate anything."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        page.wait_for_timeout(30)


def name_of(page: Any) -> str:
    return str(page.inner_text("#name"))


def settled(page: Any) -> None:
    page.wait_for_selector("#ready.ok")


def test_keys_decide_and_files_follow(page: Any, reviewed: Reviewed) -> None:
    out, first = reviewed.out, name_of(page)
    page.keyboard.press("3")
    wait_until(page, lambda: name_of(page) != first)
    second = name_of(page)
    page.keyboard.press("1")
    lines = saved(page, out, 2)
    assert [Path(line["file"]).name for line in lines] == [Path(first).name, Path(second).name]
    assert [line["decision"] for line in lines] == ["none", "subject"]
    assert lines[0]["boxes"] == []
    settled(page)
    rows = {row["path"]: row for row in rows_of(out)}
    assert (rows[first]["decision"], rows[first]["crops"], rows[first]["method"]) == ("none", [], "corrected")
    assert rows[second]["confidence"] == 1.0
    assert not (out / "crops" / Path(first).name).exists()
    images = json.loads((out / "megadetector.json").read_text())["images"]
    assert [each["detections"] for each in images if each["file"] == Path(first).name] == [[]]
    assert "corrected" in (out / "results.csv").read_text()
    # Undone, all is as it was.
    page.keyboard.press("u")
    page.keyboard.press("u")
    assert saved(page, out, 4)[-1]["undone"] is True
    page.wait_for_timeout(300)
    settled(page)
    assert {row["method"] for row in rows_of(out)} == {"subject"}
    assert (out / "crops" / Path(first).name).exists()


def test_a_box_is_dragged_and_its_crop_follows(page: Any, reviewed: Reviewed) -> None:
    out, name = reviewed.out, name_of(page)
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/review.png")
    before = [float(end) for end in page.get_attribute("#over .box", "data-box").split()]
    frame = page.locator("#photo").bounding_box()
    scale = frame["width"] / 160
    corner = page.locator("#over .handle.se").bounding_box()
    x, y = corner["x"] + corner["width"] / 2, corner["y"] + corner["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 8 * scale, y - 6 * scale, steps=4)
    page.mouse.up()
    (line,) = saved(page, out, 1)
    assert line["boxes"][0] == pytest.approx([*before[:2], before[2] - 8, before[3] - 6], abs=1)
    settled(page)
    row = next(row for row in rows_of(out) if row["path"] == name)
    assert row["boxes"][0]["xyxy"] == line["boxes"][0]
    with Image.open(out / row["crops"][0]) as crop:
        assert list(crop.size) == row["cuts"][0]["size"]
    # A second one is drawn beside it, and removed again.
    page.mouse.move(frame["x"] + 3, frame["y"] + frame["height"] - 4)
    page.mouse.down()
    page.mouse.move(frame["x"] + 23 * scale, frame["y"] + frame["height"] - 24 * scale, steps=4)
    page.mouse.up()
    line = saved(page, out, 2)[-1]
    assert (len(line["boxes"]), line["decision"]) == (2, "several")
    settled(page)
    assert len(next(row for row in rows_of(out) if row["path"] == name)["crops"]) == 2
    page.keyboard.press("Delete")
    assert len(saved(page, out, 3)[-1]["boxes"]) == 1


def test_labels_are_written_and_arrows_go_through_the_photos(page: Any, reviewed: Reviewed) -> None:
    out, name = reviewed.out, name_of(page)
    page.keyboard.press("l")
    page.keyboard.type("Red fox 13")
    page.keyboard.press("Enter")
    (line,) = saved(page, out, 1)
    assert (Path(line["file"]).name, line["label"]) == (Path(name).name, "Red fox 13")
    assert name_of(page) != name
    page.keyboard.press("ArrowLeft")
    assert name_of(page) == name
    assert page.input_value("#label") == "Red fox 13"
    assert page.locator("#labels option").last.get_attribute("value") == "Red fox 13"
    page.keyboard.press("Enter")  # right as it is
    assert saved(page, out, 2)[-1]["label"] == "Red fox 13"
    # What was saved is there in a page that is opened anew.
    page.goto(reviewed.url)
    page.wait_for_selector("#over .box")
    page.select_option("#show", "corrected")
    assert name_of(page) == name
    assert page.input_value("#label") == "Red fox 13"


def test_what_waits_is_written_when_the_server_ends(page: Any, reviewed: Reviewed) -> None:
    again.QUIET_SECONDS = 60
    name = name_of(page)
    page.keyboard.press("3")
    saved(page, reviewed.out, 1)
    wait_until(page, lambda: reviewed.review.follower.behind == 1)  # the line is there a moment sooner
    assert {row["method"] for row in rows_of(reviewed.out)} == {"subject"}
    reviewed.review.follower.close()
    assert next(row for row in rows_of(reviewed.out) if row["path"] == name)["decision"] == "none"
