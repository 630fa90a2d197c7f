"""The report page in a real browser, opened from disk. Skipped where there is no Playwright or no Chromium."""

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from busy import times_slower
from patchlight.batch.report import thumbnail, write_report

BOX = {"xyxy": [100.0, 75.0, 300.0, 225.0], "score": 0.8}
DECISIONS = ["subject", "several", "unsure", "none"]
HOSTILE = [
    "</script><script>document.title='broken'</script>.jpg",
    '"><img src=x onerror="document.title=\'broken\'">.jpg',
    "two\nlines.jpg",
    "caf\udce9.jpg",  # the byte E9, which is not UTF-8
    "\u202egpj.exe.jpg",
    "<!--<script>.jpg",
    "per%20cent #1?.jpg",
]


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that may load nothing from the network, and in which no script fails."""
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    opened.set_default_timeout(10_000)
    failures: list[str] = []
    opened.on("pageerror", lambda error: failures.append(str(error)))
    opened.on("console", lambda line: failures.append(line.text) if "Content Security Policy" in line.text else None)
    opened.on("request", lambda request: failures.append(request.url) if request.url.startswith("http") else None)
    yield opened
    opened.close()
    assert not failures


def ok_row(path: str, decision: str, confidence: float, *, size: tuple[int, int] = (400, 300)) -> dict[str, Any]:
    levels = np.arange(256, dtype=np.uint8)
    return {
        "version": 5,
        "path": path,
        "status": "ok",
        "reason": None,
        "detail": None,
        "size": list(size),
        "decision": decision,
        "confidence": confidence,
        "method": "subject",
        "boxes": [BOX | {"confidence": confidence}] if decision != "none" else [],
        "crops": [],
        "heat": {"size": [16, 16], "levels": base64.b64encode(levels.tobytes()).decode()},
    }


def error_row(path: str) -> dict[str, Any]:
    row = ok_row(path, "none", 0.0)
    row |= {"status": "error", "reason": "empty", "detail": "the file has no <b>bytes</b>", "size": None}
    return row | {"decision": None, "confidence": None, "method": None, "boxes": [], "heat": None}


def report(folder: Path, rows: list[dict[str, Any]], thumbs: bool = True) -> str:
    (folder / "thumbs").mkdir(parents=True)
    picture = thumbnail(Image.new("RGB", (400, 300), (60, 120, 60)))
    names = [f"{number:04x}.jpg" if row["status"] == "ok" and thumbs else "" for number, row in enumerate(rows)]
    for name in filter(None, names):
        (folder / "thumbs" / name).write_bytes(picture)
    return write_report(folder, rows, names, title="<b>Title</b>", root=folder).as_uri()


def wait_until(page: Any, expression: str) -> None:
    """As Playwright's `wait_for_function`, which the page's own policy forbids."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        time.sleep(0.05)
    raise AssertionError(f"did not come about in 10 s: {expression}")


def shown_names(page: Any) -> list[str]:
    names: list[str] = page.locator(".card .name").all_text_contents()
    return names


def test_least_confident_first_with_box_and_heat(page: Any, tmp_path: Path) -> None:
    rows = [ok_row("sure.jpg", "subject", 0.9), ok_row("lost.jpg", "unsure", 0.2), error_row("bad.jpg")]
    page.goto(report(tmp_path / "run", rows))
    assert shown_names(page) == ["lost.jpg", "sure.jpg"]
    assert page.locator("h1").text_content() == "<b>Title</b>"
    # The box lies over the thumbnail where it lies in the photo: from a quarter to three quarters of each side.
    photo = page.locator(".card .photo").first.bounding_box()
    box = page.locator(".card .line").first.bounding_box()
    assert box["x"] - photo["x"] == pytest.approx(photo["width"] / 4, abs=2)
    assert box["width"] == pytest.approx(photo["width"] / 2, abs=4)
    assert photo["width"] / photo["height"] == pytest.approx(4 / 3, rel=0.02)
    assert page.locator(".card img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 240
    # Warmer is brighter, over the whole range of levels.
    pixels = page.locator(".card canvas").first.evaluate("c => [...c.getContext('2d').getImageData(0, 0, 16, 16).data]")
    light = np.array(pixels).reshape(256, 4)[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light[::8]) > 0).all()
    assert light[-1] - light[0] > 200
    # Errors have a section of their own.
    assert page.locator(".fault").count() == 1
    assert "the file has no <b>bytes</b>" in page.locator(".fault").text_content()


def test_the_confidence_of_a_photo_without_a_subject_is_that_of_its_best_box(page: Any, tmp_path: Path) -> None:
    """ "No subject, 3 % confident" would read as its opposite."""
    rows = [ok_row("empty.jpg", "none", 0.03), ok_row("sure.jpg", "subject", 0.9)]
    page.goto(report(tmp_path / "run", rows))
    assert page.locator(".card .sure").all_text_contents() == ["best box 3 %", "90 %"]
    assert "No subject, best box 3 % likely" in page.locator(".open").first.get_attribute("aria-label")
    page.locator(".open").first.click()
    assert page.locator("#verdict .sure").text_content() == "best box 3 % likely"
    page.keyboard.press("ArrowRight")
    assert page.locator("#verdict .sure").text_content() == "90 % confident"


def test_each_of_several_boxes_has_its_confidence(page: Any, tmp_path: Path) -> None:
    boxes = [BOX | {"confidence": 0.92}, BOX | {"confidence": 0.0005}]
    rows = [ok_row("two.jpg", "subject", 0.92) | {"boxes": boxes}, ok_row("one.jpg", "subject", 0.95)]
    page.goto(report(tmp_path / "run", rows))
    page.locator(".open").first.click()
    said = page.locator("#values").text_content()
    assert "score 0.80, 92 % confident" in said
    assert "score 0.80, 0 % confident" in said
    page.keyboard.press("ArrowRight")
    assert "confident" not in page.locator("#values").text_content(), "the photo's own says it"


def test_a_box_that_was_decided_against_is_faint(page: Any, tmp_path: Path) -> None:
    boxes = [BOX | {"score": 0.1, "confidence": 0.05}]
    rows = [ok_row("empty.jpg", "none", 0.05) | {"boxes": boxes}, ok_row("lost.jpg", "unsure", 0.2)]
    page.goto(report(tmp_path / "run", rows))
    assert shown_names(page) == ["empty.jpg", "lost.jpg"]

    def drawn(place: int) -> tuple[str, float, float]:
        names = ["strokeDasharray", "strokeWidth", "strokeOpacity"]
        look = "(each, names) => names.map(name => getComputedStyle(each)[name])"
        dashes, width, opacity = page.locator(".card .line").nth(place).evaluate(look, names)
        return dashes, float(width.removesuffix("px")), float(opacity)

    (dashes, width, opacity), (whole, wide, opaque) = drawn(0), drawn(1)
    assert (whole, opaque) == ("none", 1)
    assert dashes != "none"
    assert width < wide
    assert opacity < 0.7
    page.locator(".card .open").first.click()
    assert "Rejected" in page.locator("dialog dl").text_content()


def test_heat_lies_where_the_model_looked(page: Any, tmp_path: Path) -> None:
    row = ok_row("a.jpg", "subject", 0.9)
    row["heat"]["region"] = [50, 0, 350, 300]  # a centred square
    page.goto(report(tmp_path / "run", [row]))
    photo, canvas = (page.locator(f".card {part}").bounding_box() for part in (".photo", "canvas"))
    assert canvas["x"] - photo["x"] == pytest.approx(photo["width"] / 8, abs=1)
    assert canvas["width"] == pytest.approx(photo["height"], abs=2)


def test_filters(page: Any, tmp_path: Path) -> None:
    rows = [ok_row(f"{kind}{i}.jpg", kind, i / 10) for kind in DECISIONS for i in range(1, 6)] + [error_row("bad.jpg")]
    page.goto(report(tmp_path / "run", rows))
    choices = page.locator("#choices button")
    assert [text.strip() for text in choices.all_text_contents()] == [
        "All21", "Subject5", "Several5", "Unsure5", "No subject5", "Errors1",
    ]  # fmt: skip
    choices.nth(3).click()
    assert shown_names(page) == [f"unsure{i}.jpg" for i in range(1, 6)]
    assert choices.nth(3).get_attribute("aria-pressed") == "true"
    page.select_option("#order", "most")
    assert shown_names(page) == [f"unsure{i}.jpg" for i in range(5, 0, -1)]
    page.fill("#search", "SURE4")
    assert shown_names(page) == ["unsure4.jpg"]
    assert choices.nth(0).text_content() == "All1"
    page.fill("#search", "")
    page.locator("#most").fill("20")
    assert shown_names(page) == ["unsure2.jpg", "unsure1.jpg"]
    page.fill("#search", "nothing like it")
    assert page.locator("#nothing").is_visible()
    page.click("#reset")
    assert page.locator(".card").count() == 20
    page.locator("#choices button").nth(5).click()
    assert page.locator(".card").count() == 0
    assert page.locator(".fault .name").text_content() == "bad.jpg"


def test_layers_can_be_switched_off(page: Any, tmp_path: Path) -> None:
    page.goto(report(tmp_path / "run", [ok_row("a.jpg", "subject", 0.9)]))
    for name, part in (("Heat map", "canvas"), ("Boxes", "svg")):
        drawn = page.locator(f".card .photo {part}")
        assert drawn.is_visible()
        page.get_by_role("switch", name=name).click()
        assert not drawn.is_visible()


def test_keyboard(page: Any, tmp_path: Path) -> None:
    rows = [ok_row(f"{i:03}.jpg", "subject", i / 200) for i in range(200)]
    page.goto(report(tmp_path / "run", rows))
    focused = "document.activeElement.querySelector('.name')?.textContent"
    page.locator(".open").first.focus()
    wait_until(page, f"{focused} === '000.jpg'")
    page.keyboard.press("ArrowRight")
    wait_until(page, f"{focused} === '001.jpg'")
    page.keyboard.press("End")
    wait_until(page, f"{focused} === '199.jpg'")
    assert page.locator(".open:focus").is_visible()
    page.keyboard.press("Home")
    wait_until(page, f"{focused} === '000.jpg'")
    page.keyboard.press("Enter")
    assert page.locator("dialog[open] h2").text_content() == "000.jpg"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("dialog[open] h2").text_content() == "002.jpg"
    facts = page.locator("#values").text_content()
    assert "400 \u00d7 300 pixels" in facts
    assert "100, 75 to 300, 225" in facts
    page.keyboard.press("Escape")
    wait_until(page, f"!document.querySelector('dialog[open]') && {focused} === '002.jpg'")


def test_enlarging_shows_the_original_and_its_crops(page: Any, tmp_path: Path) -> None:
    name = os.fsdecode(b"a #1?%20 caf\xe9.png")  # a name that no careless address leads to
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (640, 480), (200, 30, 30)).save(tmp_path / "photos" / name)
    row = ok_row(f"../photos/{name}", "subject", 0.9, size=(640, 480))
    row["crops"] = ["crops/x #1.jpg"]
    (tmp_path / "run" / "crops").mkdir(parents=True)
    Image.new("RGB", (50, 40)).save(tmp_path / "run" / "crops" / "x #1.jpg")
    page.goto(write_report(tmp_path / "run", [row], [""], root=tmp_path / "run").as_uri())
    page.locator(".open").click()
    wait_until(page, "document.querySelector('#stage img')?.naturalWidth === 640")
    wait_until(page, "document.querySelector('.crops img')?.naturalWidth === 50")
    assert page.locator("dialog[open] .crops img").count() == 1
    assert page.locator("dialog[open] h2").text_content() == "a #1?%20 caf\\xe9.png"


def test_names_are_text_and_nothing_else(page: Any, tmp_path: Path) -> None:
    rows = [ok_row(name, "subject", 0.5) for name in HOSTILE] + [error_row(name) for name in HOSTILE]
    rows[0]["method"] = rows[0]["detail"] = HOSTILE[0]
    page.goto(report(tmp_path / "run", rows))
    page.locator(".open").first.click()
    page.wait_for_timeout(100)
    page.keyboard.press("Escape")
    assert page.title() == "<b>Title</b>"
    assert page.locator(".card").count() == page.locator(".fault").count() == len(HOSTILE)
    assert page.locator("script").count() == 2
    names = page.locator(".fault .name").all_text_contents()
    assert names[0] == HOSTILE[0]
    assert names[2:5] == ["two\\nlines.jpg", "caf\\xe9.jpg", "\\u202egpj.exe.jpg"]


def test_a_lost_thumbnail_is_a_grey_card(page: Any, tmp_path: Path) -> None:
    url = report(tmp_path / "run", [ok_row("a.jpg", "subject", 0.1), ok_row("b.jpg", "subject", 0.2)])
    (tmp_path / "run" / "thumbs" / "0000.jpg").unlink()
    page.goto(url)
    page.wait_for_selector(".gone")
    assert page.locator(".gone").count() == 1


def test_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    rows = [ok_row("a very long name " * 20 + f"{i}.jpg", "subject", 0.5) for i in range(30)] + [error_row("x" * 300)]
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(report(tmp_path / "run", rows))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".open").first.click()
    assert page.evaluate("document.getElementById('facts').scrollWidth <= document.getElementById('facts').clientWidth")
    page.close()


def test_ten_thousand_photos(page: Any, tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    rows = [ok_row(f"site{i % 40}/IMG_{i:05}.jpg", DECISIONS[i % 4], float(chance.random())) for i in range(10_000)]
    url = report(tmp_path / "run", rows, thumbs=False)
    assert (tmp_path / "run" / "report.html").stat().st_size < 8e6
    before = times_slower()
    page.goto(url)
    # The limits are several times what a quiet machine needs.
    first = page.evaluate("performance.getEntriesByName('rendered')[0].startTime")
    assert first < 1500 * max(before, times_slower())
    change = """kind => { const start = performance.now(); document.querySelector(`[data-kind=${kind}]`).click();
        document.body.offsetHeight; return performance.now() - start; }"""
    took = [page.evaluate(change, kind) for kind in ("unsure", "none", "all")]
    assert min(took) < 150 * times_slower()
    assert page.locator(".card").count() < 100
    assert page.locator("#choices button").first.text_content() == "All10,000"
    least = sorted(row["confidence"] for row in rows)[-1]
    page.evaluate("window.scrollTo(0, 1e9)")
    wait_until(page, "document.querySelector('[aria-posinset=\"10000\"]')")
    assert f"{round(100 * least)} %" in page.locator('[aria-posinset="10000"]').text_content()
    assert page.locator(".card").count() < 100
    start = time.monotonic()
    page.fill("#search", "img_04999")
    assert shown_names(page) == ["IMG_04999.jpg"]
    assert time.monotonic() - start < 5 * times_slower()


def test_bursts_stand_together_and_can_be_shown_alone(page: Any, tmp_path: Path) -> None:
    rows = []
    for number, (burst, frame) in enumerate([("a", 2), ("b", 1), ("a", 1), ("b", 2), ("c", 1)]):
        row = ok_row(f"{number}{burst}{frame}.jpg", "none" if burst == "b" else "subject", 0.9 - 0.1 * number)
        of = 1 if burst == "c" else 2
        time_of = f"2024-05-14 06:0{number}:00"
        rows.append(row | {"burst": {"id": burst, "frame": frame, "frames": of, "time": time_of}})
    rows.append(error_row("bad.jpg") | {"burst": None})
    page.goto(report(tmp_path / "run", rows))
    assert "5 photos in 3 bursts" in page.locator("#summary").text_content()
    page.locator("#order").select_option("burst")
    assert shown_names(page) == ["2a1.jpg", "0a2.jpg", "1b1.jpg", "3b2.jpg", "4c1.jpg"]
    assert page.locator(".card .of").all_text_contents() == ["1/2", "2/2", "1/2", "2/2"]
    page.locator(".card").nth(2).click()
    assert "frame 1 of 2, 2024-05-14 06:01:00" in page.locator("#values").text_content()
    page.locator("#values button").click()
    assert shown_names(page) == ["1b1.jpg", "3b2.jpg"]
    assert page.locator(".fault").count() == 0
    page.locator("#all-bursts").click()
    assert len(shown_names(page)) == 5


def test_photos_are_chosen_by_what_they_show(page: Any, tmp_path: Path) -> None:
    rows = []
    for number, group in enumerate(["animal", "thing", "animal", "unknown", "<b>odd</b>"]):
        said = {"group": group, "group_confidence": None if group == "unknown" else 0.9}
        said |= {"label": "bird/crow" if number == 2 else None, "label_confidence": 0.7 if number == 2 else None}
        rows.append(ok_row(f"{number}.jpg", "subject", 0.9 - 0.1 * number) | said)
    page.goto(report(tmp_path, [*rows, error_row("bad.jpg")]))
    assert page.locator("#group option").all_text_contents() == [
        *("Shows anything", "Shows: <b>odd</b> (1)", "Shows: animal (2)", "Shows: thing (1)", "Shows: unknown (1)")
    ]
    for width in (1100, 1280):  # what narrows the photos down lies side by side
        page.set_viewport_size({"width": width, "height": 800})
        tops = {round(page.locator(each).bounding_box()["y"]) for each in ("#search", "#group", "#order")}
        assert len(tops) == 1
    page.locator("#group").select_option("animal")
    assert page.locator(".card .name").all_text_contents() == ["2.jpg", "0.jpg"]
    assert page.locator(".card .of").all_text_contents() == ["animal", "animal"]
    assert page.locator(".fault").count() == 0
    page.locator(".card").first.click()
    assert "animal, 90 %" in page.locator("#values").text_content()
    assert "bird/crow, 70 %" in page.locator("#values").text_content()


def test_photos_of_one_name_are_told_apart_by_their_folders(page: Any, tmp_path: Path) -> None:
    paths = ["cam1/a/IMG_1.jpg", "cam2/a/IMG_1.jpg", "cam1/IMG_2.jpg", "cam2/IMG_2.jpg", "cam1/IMG_3.jpg"]
    page.goto(report(tmp_path, [ok_row(path, "subject", 0.5 + 0.1 * n) for n, path in enumerate(paths)]))
    assert page.locator(".card .name").all_text_contents() == [*paths[:4], "IMG_3.jpg"]


def test_photos_of_classes_without_groups_are_chosen_by_class(page: Any, tmp_path: Path) -> None:
    rows = []
    for number, label in enumerate(["lynx", "boar", "lynx", None]):
        said = {"group": None, "group_confidence": None, "label": label, "label_confidence": 0.8 if label else None}
        rows.append(ok_row(f"{number}.jpg", "subject", 0.9 - 0.1 * number) | said)
    page.goto(report(tmp_path, rows))
    assert page.locator("#group option").all_text_contents() == ["Shows anything", "Shows: boar (1)", "Shows: lynx (2)"]
    page.locator("#group").select_option("lynx")
    assert page.locator(".card .name").all_text_contents() == ["2.jpg", "0.jpg"]
    page.locator(".card").first.click()
    assert "lynx, 80 %" in page.locator("#values").text_content()


def test_without_bursts_nothing_speaks_of_them(page: Any, tmp_path: Path) -> None:
    page.goto(report(tmp_path / "run", [ok_row("a.jpg", "subject", 0.9)]))
    assert "burst" not in page.locator("#summary").text_content()
    assert page.locator("#order option:not([hidden])").count() == 4
