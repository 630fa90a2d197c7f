"""The page stands on its own files, and on nothing that could be slipped into it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WEB = ROOT / "patchlight" / "serve" / "web"
TEXTS = sorted(path for path in WEB.rglob("*") if path.suffix in (".html", ".js", ".css"))


def test_the_files_that_it_names_are_there() -> None:
    pages = "".join(path.read_text() for path in WEB.glob("*.html"))
    named = re.findall(r'(?:src|href)="/web/([^"]+)"', pages)
    assert {"main.js", "review.js", "style.css", "mark.svg"} <= set(named)
    for script in WEB.glob("*.js"):
        named += re.findall(r'from "\./([^"]+)"', script.read_text())
    photos = re.search(r"SAMPLES = (\[\[.*?\]\]);", (WEB / "main.js").read_text())
    assert photos
    named += [f"photos/{name}.jpg" for name in re.findall(r'\["(\w+)", ', photos[1])]
    assert [name for name in named if not (WEB / name).is_file()] == []
    assert {path.name for path in WEB.glob("*.js")} <= set(named), "a script that nobody uses"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_nothing_from_elsewhere_and_nothing_inline(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"https?://|//cdn|@import|\beval\(|new Function", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setAttribute\(.style", text)
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)


def test_they_are_small_and_in_the_package() -> None:
    assert sum(path.stat().st_size for path in WEB.rglob("*") if path.is_file()) < 1_000_000
    assert 'packages = ["patchlight"]' in (ROOT / "pyproject.toml").read_text()  # hatchling takes all files below it
    named = (WEB / "photos" / "CREDITS.md").read_text()
    assert all(path.name in named for path in (WEB / "photos").glob("*.jpg"))
