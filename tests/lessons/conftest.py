from pathlib import Path

import pytest

LESSONS = Path(__file__).parents[2] / "lessons"


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_lessons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lessons import what lies beside them, and write their pictures where they are told."""
    monkeypatch.syspath_prepend(str(LESSONS))
    monkeypatch.setenv("PATCHLIGHT_LESSONS_OUT", str(tmp_path))
    monkeypatch.setenv("PATCHLIGHT_LESSONS_SMALL", "1")
