"""The table of the families, and the picture of how they grow."""

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from patchlight.explain import plot

PATH = Path(__file__).parents[2] / "benchmarks" / "families.py"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_families", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        module, "FAMILIES", {"tiny": ("mu/16", {}), "Swin": ("swin-T", {"width": 24, "depths": (1, 1, 1, 1)})}
    )
    monkeypatch.setattr(module, "SIZES", (64, 128))
    monkeypatch.setattr(module.torch, "set_num_threads", lambda count: None)
    return module


def test_what_is_measured_is_kept_and_shown(
    families: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "x.json"
    stored.write_text(json.dumps({"cuda": {"rows": [], "machine": "a GPU"}}))
    monkeypatch.setattr(sys, "argv", ["families.py", "--device", "cpu", "--rounds", "1", "--write", str(stored)])
    families.main()
    kept = json.loads(stored.read_text())
    assert set(kept) == {"cuda", "cpu"}  # what another machine measured stays
    assert len(kept["cpu"]["rows"]) == 4
    kept["cuda"]["rows"] = [{"family": "Swin", "side": 128, "batch": 32, "median_ms": 8.0, "fastest_ms": 7.0}]
    stored.write_text(json.dumps(kept))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["families.py", "--stored", str(stored)])
    families.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[5].endswith("|  | 4,000 |")
    assert lines[2].startswith("| tiny | 64 |")
    first, second = (float(line.split("|")[5]) for line in lines[4:6])
    assert first == 1.0
    assert second == pytest.approx(4, rel=0.05)  # all but the head


def test_growth_is_drawn_on_logarithmic_axes() -> None:
    ax = plot.draw_growth({"a": {224: 1.0, 448: 4.0}, "b": {224: 2.0, 448: 16.0}, "none": {}})
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert lines["b"] == [[224, 2], [448, 16]]
    assert lines["like the pixels"] == [[224, 0.75], [448, 3]]
    assert "none" not in lines
    assert Image.open(io.BytesIO(plot.to_png(ax.figure))).size[0] > 500
    plot.to_png(plot.draw_growth({}).figure)
