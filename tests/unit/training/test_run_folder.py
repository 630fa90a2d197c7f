"""What a resumed run finds in its folder, whatever has become of the files there."""

from pathlib import Path

import pytest

from patchlight.errors import PatchlightError
from patchlight.training.run_folder import RunFolder


def test_lines_of_metrics_that_are_not_ours_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.rows() == []
    folder.log(step=1, loss=2.5)
    with folder.metrics.open("ab") as file:
        file.write(
            b'5\n[1]\n{"a": 1}\n{"step": "two", "loss": 1}\n{"step": 2, "loss": "low"}\n\xff\n{"step": 2, "lo\n\n'
        )
    folder.log(step=3, loss=float("nan"))
    assert folder.rows() == [{"step": 1, "loss": 2.5}, {"step": 3, "loss": None}]
    folder.forget_after(1)
    assert folder.metrics.read_text() == '{"step": 1, "loss": 2.5}\n'


def test_a_folder_in_the_place_of_the_metrics_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.mkdir()
    with pytest.raises(PatchlightError, match=r"metrics\.jsonl: cannot be read \(Is a directory\); move it away"):
        folder.rows()
