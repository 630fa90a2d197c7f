"""Off-centre photos are what DATA.md says they are, and boxes that look at nothing have the known figures."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchlight.geometry import Box
from patchlight.weights.groups import Groups, Named

ROOT = Path(__file__).parents[3]
PHOTOS = ROOT.parent / "shared" / "data" / "localize"


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("default_model", ROOT / "benchmarks" / "default_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["default_model"] = module
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()


@given(
    st.tuples(st.integers(40, 300), st.integers(40, 300)),
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from(benchmark.CORNERS),
)
def test_the_subject_lies_in_its_corner(
    size: tuple[int, int], place: tuple[float, float, float, float], corner: str
) -> None:
    (width, height), least = size, 26  # of which 4 % are more than a pixel
    left, top = place[0] * (width - least), place[1] * (height - least)
    box = Box(
        left, top, left + least + place[2] * (width - least - left), top + least + place[3] * (height - least - top)
    )
    down, across = np.indices((height, width))
    photo = Image.fromarray(np.stack([across % 256, across // 256 * 16 + down // 256, down % 256], 2).astype(np.uint8))
    cut, moved = benchmark.off_centre(photo, box, corner)

    tiny = 1e-6
    assert moved.left >= -tiny
    assert moved.top >= -tiny
    assert moved.right <= cut.width + tiny
    assert moved.bottom <= cut.height + tiny
    assert (moved.width, moved.height) == pytest.approx((box.width, box.height))
    beside = moved.left if "left" in corner else cut.width - moved.right
    above = moved.top if "top" in corner else cut.height - moved.bottom
    assert beside <= 0.04 * cut.width + tiny
    assert above <= 0.04 * cut.height + tiny
    # The other two sides are where they were, and the pixels under the box are the same.
    assert (cut.width - moved.left if "left" in corner else moved.right) == pytest.approx(
        width - box.left if "left" in corner else box.right
    )
    assert (cut.height - moved.top if "top" in corner else moved.bottom) == pytest.approx(
        height - box.top if "top" in corner else box.bottom
    )
    assert cut.getpixel((int(moved.left + 1), int(moved.top + 1))) == photo.getpixel(
        (round(box.left - moved.left) + int(moved.left + 1), round(box.top - moved.top) + int(moved.top + 1))
    )


def test_a_subject_in_its_corner_stays_where_it_is() -> None:
    cut, moved = benchmark.off_centre(Image.new("RGB", (100, 50)), Box(3, 1, 60, 40), "top left")
    assert (cut.size, moved) == ((100, 50), Box(3, 1, 60, 40))


@pytest.mark.skipif(not PHOTOS.is_dir(), reason="needs ../shared/data")
def test_boxes_that_look_at_nothing_have_the_known_figures() -> None:
    overlaps = benchmark.Overlaps()
    rows = benchmark.rows_of(PHOTOS, None)
    assert len(rows) == len(json.loads((PHOTOS / "boxes.json").read_text()))
    for row in rows:
        with Image.open(PHOTOS / row["file"]) as photo:
            item = benchmark.Shown(photo, Box(*row["box"]), benchmark.SOURCES[row["source"].split("/")[0]], "centred")
            for name, box in benchmark.boxes_that_look_at_nothing(photo.size).items():
                overlaps.add(item, name, box)
    # PEERS.md, section 2; five of its 300 pets have since been left out as duplicates, hence the tolerance.
    for name, half in {"whole photo": (74.0, 17.0, 17.0), "centre 0.7": (76.7, 58.0, 38.0)}.items():
        found = [100 * overlaps.figures("centred", name, kind)[0] for kind in ("pets", "birds", "deer")]
        assert found == pytest.approx(half, abs=0.5)
    found = [overlaps.figures("centred", "centre 0.7", kind)[2] for kind in ("pets", "birds", "deer")]
    assert found == pytest.approx((0.565, 0.514, 0.382), abs=0.0015)
    assert overlaps.figures("centred", "whole photo", "all")[0] == pytest.approx(0.412, abs=0.001)


def test_photos_are_taken_evenly(tmp_path: Path) -> None:
    rows = [{"file": f"{kind}{index}", "box": [0, 0, 1, 1], "source": f"{kind}/x"} for kind in ("cub", "pets", "deer")
            for index in range(10)]  # fmt: skip
    (tmp_path / "boxes.json").write_text(json.dumps(rows))
    assert len(benchmark.rows_of(tmp_path, None)) == 30
    assert [row["file"] for row in benchmark.rows_of(tmp_path, 2)] == [
        "pets0",
        "pets5",
        "cub0",
        "cub5",
        "deer0",
        "deer5",
    ]


def test_triage_is_counted_right() -> None:
    answers = [
        ("animal", "bird", "animal/bird"),  # right, with a coarser name
        ("animal", "crow (bird)", "animal/bird"),  # right, with the right class
        ("thing", None, "animal"),  # missed
        ("animal", None, "thing"),  # called one
        ("vehicle", "jay (bird)", "thing"),  # no animal either way, with a wrong class
        ("unknown", None, "thing"),
        ("animal", None, "unknown"),  # mixed: neither right nor wrong
    ]
    pairs = [
        (benchmark.Asked(b"", "held out", "birds/crow", path), Named(group, None, label, None))
        for group, label, path in answers
    ]
    words = Groups(("birds/crow", "birds/jay"), ("animal/bird", "animal/bird")).words
    assert words == ("crow (bird)", "jay (bird)")
    first, second = benchmark._how_often_right(
        "these", pairs, dict(zip(("birds/crow", "birds/jay"), words, strict=True))
    )
    assert first == (
        "these: animal or not, 83.3% of 6 answered, 60.0% of those right; animals called something else 33.3%, "
        "others called animal 50.0%"
    )
    assert second == (
        "these: 28.6% get the name of a class, 50.0% of those right; 14.3% a coarser one, 100.0% of those right"
    )
