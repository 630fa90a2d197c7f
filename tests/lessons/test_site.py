"""The site is built of everything, and a link that leads nowhere stops it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(lessons: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docs" / "make_site.py"), "--lessons", str(lessons), "--site", str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_site_is_whole_or_not_built(tmp_path: Path) -> None:
    """Pages stand in for the lessons, which test_lessons.py runs."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    lessons, site = tmp_path / "lessons", tmp_path / "site"
    lessons.mkdir()
    names = sorted(path.stem for path in (ROOT / "lessons").glob("[01]*.py"))
    (lessons / "index.md").write_text("".join(f"[{name}]({name}.md)\n" for name in names))
    for name in names[1:]:
        (lessons / f"{name}.md").write_text(f"# {name}\n")
    dead = build(lessons, site)
    assert dead.returncode == 1
    assert f"{names[0]}.md' is not found" in dead.stderr
    assert "the site was not built" in dead.stderr

    (lessons / f"{names[0]}.md").write_text("# There\n")
    whole = build(lessons, site)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "patchlight crop" in (site / "cli.html").read_text()
    assert "resample_positions" in (site / "api.html").read_text()
    assert "receptive_field" in (site / "api-explain.html").read_text()
    assert (site / "files" / "patchlight" / "models" / "vit.py.html").is_file()
    for page in site.rglob("*.html"):
        assert not re.search(r"<(script|link|img)[^>]*https?://", page.read_text()), page.name
    assert 'src="search/from_a_folder.js"' in (site / "index.html").read_text()
    assert 'src="../search/from_a_folder.js"' in (site / "lessons" / "index.html").read_text()
