"""The strip on the page of `patchlight serve`, and links that open the page where a lesson wants it."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import patchlight as pl
from browser_page import Failures, wait_until
from models_at_random import tiny_vit
from patchlight.serve.page import WEB
from served import Served, serving

CAT = WEB / "photos" / "chelsea.jpg"
STRIP = "document.getElementById('strip')"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models") / "rotary"
    pl.save(tiny_vit(num_classes=0, position="rope2d", class_token=False, pooling="mean"), folder)
    with serving("default", str(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def loaded() -> pl.Loaded:
    return pl.load("default")


@pytest.fixture(scope="module")
def cat_BCHW(loaded: pl.Loaded) -> torch.Tensor:
    return loaded.preprocess(pl.decode(CAT))[0][None]


@pytest.fixture
def visit(browser: Any, served: Served) -> Iterator[Any]:
    """Opens the page at a link; without motion, unless it is wanted."""
    failures, pages = Failures(), []

    def go(link: str = "", width: int = 1440, motion: str = "reduce", **settings: Any) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 860}, reduced_motion=motion, **settings)
        pages.append(page)
        failures.watch(page, served)
        page.add_init_script(
            """addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
                const step = document.getElementById("strip")?.dataset.step, seen = window.steps ??= [];
                if (step && seen.at(-1) !== step) seen.push(step);
            }).observe(document.body, {subtree: true, attributes: true, childList: true}))"""
        )
        page.goto(served.url + link)
        page.wait_for_selector("#ready.ok")
        return page

    yield go
    for page in pages:
        page.close()
    assert failures == []


def wait_for(page: Any, state: str = "true null") -> None:
    wait_until(page, f"{STRIP}?.dataset.ended === '{state}'", 60)


def answer(page: Any) -> dict[str, float]:
    """The classes that are shown, with their percents."""
    names, shares = (page.locator(f"#strip-said {part}").all_text_contents() for part in ("span", "b"))
    return {name: float(share.removesuffix(" %")) for name, share in zip(names, shares, strict=True)}


def percents(loaded: pl.Loaded, logits_K: torch.Tensor) -> dict[str, float]:
    shares, classes = logits_K.softmax(0).topk(3)
    assert loaded.names is not None
    return {loaded.names[int(k)]: 100 * float(share) for share, k in zip(shares, classes, strict=True)}


def numbers(page: Any, expression: str) -> np.ndarray[Any, Any]:
    return np.array(page.evaluate(f"[...document.querySelector('.flight').{expression}]"))


def test_it_starts_by_itself_and_shows_the_models_own_numbers(
    visit: Any, served: Served, loaded: pl.Loaded, cat_BCHW: torch.Tensor
) -> None:
    page = visit(motion="no-preference")
    wait_for(page)
    steps = ["Photo", "Patches", "Vectors", "Class token", "Positions", "Attention", "Class"]
    assert page.evaluate("steps") == steps
    assert page.locator("#strip-count").text_content() == "256 patches, 1 class token, 4 registers = 261 tokens"
    with torch.inference_mode():
        logits_BK, tokens_ND = loaded.model(cat_BCHW), loaded.model.embed(cat_BCHW)[0][0]
        patches_PD = loaded.model.patch_embed(cat_BCHW, [(16, 16)])[0]
    assert answer(page) == pytest.approx(percents(loaded, logits_BK[0]), abs=0.051)
    # The colours of the vectors: 24 of 256 numbers, before and after the positions were added.
    shown = [int((i + 0.5) * 256 / 24) for i in range(24)]
    np.testing.assert_allclose(numbers(page, "vectors.placed").reshape(24, 261), tokens_ND[:, shown].T, atol=1e-5)
    bare = numbers(page, "vectors.bare").reshape(24, 261)
    np.testing.assert_allclose(bare[:, 5:], patches_PD[:, shown].T, atol=1e-5)
    # The arcs: what the API and `pl.attention` say, of the class token and of what is pointed at.
    id_ = page.evaluate(
        "performance.getEntriesByType('resource').map((each) => each.name).find(isTokens).split('/')[6]".replace(
            "isTokens", "(name) => name.includes('/tokens')"
        )
    )
    line = page.locator(".line-slot").bounding_box()
    for token, query in ((0, "cls"), (5 + 6 * 16 + 7, "6,7")):
        if token:
            box = page.locator(".photo-slot").bounding_box()
            page.mouse.move(box["x"] + 7.5 / 16 * box["width"], box["y"] + 6.5 / 16 * box["height"])
            wait_until(page, f"{STRIP}.dataset.token === '{token}'")
            assert page.locator("#strip-words").text_content().count("Row 6, column 7") == 1
            assert page.locator(".photo-slot").bounding_box() == box
            assert page.locator(".line-slot").bounding_box() == line, "nothing moves away from the pointer"
        said = served.json(f"/photos/{id_}/attention", query=query, heads="mean")["weights"][0][0]
        maps = pl.attention(loaded, cat_BCHW, -1, [token], "mean")
        np.testing.assert_allclose(numbers(page, "values"), maps.weights[0, 0, 0, 0], atol=1e-6)
        np.testing.assert_allclose(numbers(page, "values"), said, atol=1e-6)
    # It can be looked at step by step, and again.
    page.get_by_role("button", name="Vectors").click()
    assert page.evaluate(f"{STRIP}.dataset.step") == "Class token"  # where the next begins
    wait_until(page, "document.querySelector('#strip-play').textContent === 'Go on'")
    page.click("#strip-play")
    wait_until(page, "document.querySelector('#strip-play').textContent === 'Pause'")
    page.click("#strip-play")
    wait_until(page, "document.querySelector('#strip-play').textContent === 'Go on'")


def test_without_positions_a_shuffle_changes_nothing_and_with_them_it_does(
    visit: Any, loaded: pl.Loaded, cat_BCHW: torch.Tensor
) -> None:
    page = visit()
    wait_for(page)
    assert set(page.evaluate("steps")) <= {"Photo", "Class"}, "reduced motion shows the end at once"
    own, verdict = answer(page), page.locator("#strip-verdict")
    page.click("#strip-positions")
    wait_for(page, "false null")
    blind = answer(page)
    assert blind != own
    page.click("#strip-shuffle")
    wait_for(page, "false 1")
    assert answer(page) == blind
    assert float(page.evaluate(f"{STRIP}.dataset.apart")) < 1e-4
    assert "nothing changes" in verdict.text_content()
    page.click("#strip-positions")
    wait_for(page, "true 1")
    with torch.inference_mode():
        logits_BK = loaded.model(pl.shuffle_patches(cat_BCHW, 8, seed=1))
    assert answer(page) == pytest.approx(percents(loaded, logits_BK[0]), abs=0.051)
    assert next(iter(answer(page))) != next(iter(own)) == "cat"
    assert float(page.evaluate(f"{STRIP}.dataset.apart")) > 0.5
    assert "the order counts" in verdict.text_content()
    page.click("#strip-shuffle")
    wait_for(page)
    assert answer(page) == own


def test_a_link_names_sizes_and_the_slider_dices_anew(visit: Any) -> None:
    page = visit("#learn?size=16&image=224&photo=coffee")
    wait_for(page)
    assert page.locator("#strip-count strong").text_content() == "196 patches, 1 class token, 4 registers"
    other = pl.load("default", patch_size=16, image_size=224)
    said = percents(other, other.predict(WEB / "photos" / "coffee.jpg"))
    assert answer(page) == pytest.approx(said, abs=0.1)
    assert "taught with 8 \u00d7 8" in page.locator("#strip-note").text_content()
    page.evaluate(f"delete {STRIP}.dataset.ended")
    page.fill("#strip-size", "3")
    assert page.locator("#strip-count strong").text_content() == "49 patches, 1 class token, 4 registers"
    wait_for(page)
    assert len(numbers(page, "values")) == 54


def test_links_open_tabs_on_a_photo_of_the_page(visit: Any, loaded: pl.Loaded, cat_BCHW: torch.Tensor) -> None:
    page = visit("#patches?size=32&image=224")
    wait_until(page, "document.querySelector('#costs strong')?.textContent === '54'")
    assert page.locator("#tab-patches").get_attribute("aria-selected") == "true"
    page.click("#shuffle")
    wait_until(page, "document.querySelectorAll('#shuffled .share').length === 12")
    # Seven by seven is said, drawn, and asked of the model.
    assert page.locator("#caption").text_content().startswith("7 \u00d7 7 patches of 32 pixels")
    assert "squeezed to 224 \u00d7 224" in page.locator("#caption").text_content()
    asked = page.evaluate(
        "performance.getEntriesByType('resource').map((each) => each.name).filter((name) => name.includes('/shuffle'))"
    )
    assert "patch_size=32" in asked[0]
    assert "image_size=224" in asked[0]
    pieces = page.evaluate("[...document.querySelector('.pieces').getContext('2d').getImageData(0, 0, 99, 9).data]")
    assert len(set(pieces)) > 20
    # Another link, on the same page: rows, columns, layers and heads count from 0, as in the API.
    page.evaluate("location.hash = '#attention?layer=2&query=3,5&head=1'")
    shown = "document.querySelector('#stage .heat')"
    wait_until(page, f"{shown}.dataset.query === 'patch 3,5 2 1'")
    maps = pl.attention(loaded, cat_BCHW, "all", (3, 5)).heat()[:, 0, :, 0]  # (layer, head, row, column)
    np.testing.assert_allclose(page.evaluate(f"[...{shown}.values]"), maps[2, 1].flatten(), atol=1e-6)
    assert "row 3, column 5" in page.locator("#attention-facts").text_content()
    assert page.locator("#panel-attention output").text_content() == "2 of 0 to 8"

    def scale() -> tuple[float, float]:
        most = page.locator("#panel-attention .scale span").last.text_content().removesuffix(" %")
        return float(most) / 100, page.evaluate("parseFloat(document.querySelector('.scale b').style.left)") / 100

    most, even = scale()
    assert most == pytest.approx(float(maps[2, 1].max()), abs=0.0006)
    assert even == pytest.approx(1 / 261 / float(maps[2, 1].max()), abs=1e-4)
    page.get_by_role("switch", name="Same scale in all layers").click()
    wait_until(page, f"document.querySelectorAll('.scale span')[1].textContent !== '{100 * most:.1f} %'")
    assert scale()[0] == pytest.approx(float(maps.max()), abs=0.0006)
    assert page.locator("#tab-learn").is_visible()
    names = page.locator("[role=tab]").all_text_contents()
    assert names == ["Learn", "Subject", "Attention", "Patches", "Classes", "Compare"]


def test_the_links_in_the_lessons_lead_where_they_say(visit: Any) -> None:
    texts = [path.read_text() for path in sorted((WEB.parents[2] / "lessons").glob("*.*"))]
    links = [link for text in texts for link in re.findall(r"\(http://127.0.0.1:8000/(#[^)]*)\)", text)]
    assert len(links) >= 5
    page = visit("#learn?positions=off&shuffle=1")
    wait_for(page, "false 1")
    wait_until(page, "document.getElementById('strip-verdict').textContent.includes('nothing changes')")
    for link in sorted(set(links) - {"#learn?positions=off&shuffle=1"}, reverse=True):
        name, _, values = link.removeprefix("#").partition("?")
        wanted = dict(each.split("=") for each in values.split("&") if each)
        assert set(wanted) <= {"photo", "size", "image", "query"}, link
        page.evaluate("link => location.hash = link", link)
        wait_until(page, f"document.getElementById('tab-{name}').getAttribute('aria-selected') === 'true'")
        if "size" in wanted:
            slider = {"learn": "strip-size", "patches": "patch-size"}[name]
            told = f"{wanted['size']} \u00d7 {wanted['size']} pixels"
            wait_until(page, f"document.getElementById('{slider}').getAttribute('aria-valuetext') === '{told}'")
        if "query" in wanted:
            wait_until(page, "document.querySelector('#stage .heat').dataset.query?.startsWith('0 ')")


def test_the_keyboard_alone_leads_through_it(visit: Any, loaded: pl.Loaded, cat_BCHW: torch.Tensor) -> None:
    page = visit("#learn?size=abc&photo=../../etc/passwd&layer=99")  # what cannot be is passed over
    wait_for(page)
    names = []
    for _ in range(20):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        if "line-slot" in names[-1]:
            break
    assert {"strip-size", "strip-positions", "strip-shuffle"} <= set(names)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for keys, token in ((["ArrowRight"] * 5, 5), (["ArrowDown", "ArrowRight"], 5 + 17), (["End"], 260), (["Home"], 0)):
        for key in keys:
            page.keyboard.press(key)
        assert page.evaluate(f"{STRIP}.dataset.token") == str(token)
    page.keyboard.press("ArrowRight")
    wanted = pl.attention(loaded, cat_BCHW, -1, [1], "mean").weights[0, 0, 0, 0]
    np.testing.assert_allclose(numbers(page, "values"), wanted, atol=1e-6)
    assert page.locator("#strip-words").text_content().count("Register 1") == 1
    page.focus("#strip-shuffle")
    page.keyboard.press("Space")
    wait_for(page, "true 1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(visit: Any, scheme: str) -> None:
    page = visit(width=390, color_scheme=scheme, has_touch=True)
    wait_for(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    # What shuffles lies beside what is shuffled, here and in the tab.
    line, button = (page.locator(part).bounding_box() for part in (".line-slot", "#strip-shuffle"))
    assert 0 <= button["y"] - line["y"] - line["height"] < 40
    page.click("#strip-shuffle")
    wait_for(page, "true 1")
    page.click("#samples [data-name=coffee]")
    wait_until(page, "document.body.dataset.shown")
    page.click("#tab-learn")
    wait_for(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.click("#tab-patches")
    wait_until(page, "document.querySelector('#costs strong')?.textContent === '261'")
    caption, button = (page.locator(part).bounding_box() for part in ("#caption", "#shuffle"))
    assert button["y"] - caption["y"] - caption["height"] < 160


def test_a_model_without_classes_class_token_or_added_positions(visit: Any) -> None:
    page = visit()
    wait_for(page)
    page.evaluate(f"delete {STRIP}.dataset.ended")
    page.select_option("#model", "1")
    wait_for(page)
    assert page.locator("#strip-count").text_content() == "16 patches"
    assert "names no classes" in page.locator("#strip-said").text_content()
    page.get_by_role("button", name="Class token").click()
    page.evaluate(f"delete {STRIP}.dataset.ended")
    page.click("#strip-positions")
    wait_for(page, "false null")
    page.click("#strip-shuffle")
    wait_for(page, "false 1")
    assert "nothing changes" in page.locator("#strip-verdict").text_content()


def test_a_sample_that_the_server_let_go_of_is_sent_again(visit: Any, served: Served) -> None:
    page = visit()
    wait_for(page)
    for path in {line["path"] for line in served.log if line["path"].endswith("/tokens")}:
        served.ask("DELETE", path.removesuffix("/tokens"))
    page.click("#strip-shuffle")
    wait_for(page, "true 1")
    assert not page.locator("#note").is_visible()
