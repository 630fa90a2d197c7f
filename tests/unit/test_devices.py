"""How many cores this process may use."""

import os
from pathlib import Path

import pytest

from patchlight.devices import cpu_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("20000 100000", 1),
        ("6400000 100000", 4),
        ("max 100000", 4),
        ("", 4),
    ],
)
def test_no_more_than_the_container_is_given(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert cpu_cores(tmp_path / "cpu.max") == cores
    assert cpu_cores(tmp_path / "nowhere") == 4
