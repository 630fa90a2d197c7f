"""The same 60 photos through Python, the command line, the server and the benchmarks: one answer, whoever asks."""

import importlib.util
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

import patchlight as pl
from command_line import patchlight
from crop_runs import rows_of
from patchlight.localizing.detector import Detector
from patchlight.weights.groups import MOVING
from served import serving

ROOT = Path(__file__).parents[2]
DEMO = sorted(path for path in (ROOT / "demo").iterdir() if path.suffix in (".jpg", ".png"))
LOCALIZE = ROOT.parent / "shared" / "data" / "localize"
COUNT = 60

THREADS = 1e-5
"""How far a name's confidence may be off: how a single row is summed up depends on the number of threads, and the
server, which shows all of the last block, passes it whole."""
PACKED = {"pixels": 0.01, "confidence": 1e-5}
"""How far the folder crop may be off: on a CPU its model's weights are laid out otherwise, see models/prepack.py. What
it writes is rounded besides, to tenths of a pixel and to four digits."""


@pytest.fixture(scope="module")
def loaded() -> pl.Loaded:
    return pl.load("default")


@pytest.fixture(scope="module", params=["made", "shared"])
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if request.param == "made":
        return made_photos(tmp_path_factory.mktemp("photos"))
    if not LOCALIZE.is_dir():
        pytest.skip(f"{LOCALIZE} is not here")
    names = sorted(row["file"] for row in json.loads((LOCALIZE / "boxes.json").read_text()))
    return [LOCALIZE / name for name in random.Random(0).sample(names, COUNT)]


def made_photos(folder: Path) -> list[Path]:
    """Parts of the demo photos, turned, squeezed, darkened and blurred, of all sizes, kinds and orientations."""
    paths, draw = [], random.Random(0)
    for number in range(COUNT):
        image = Image.open(DEMO[number % len(DEMO)]).convert("RGB")
        share = draw.uniform(0.15, 1)
        width, height = max(32, int(image.width * share)), max(32, int(image.height * share))
        left, top = draw.randint(0, image.width - width), draw.randint(0, image.height - height)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((draw.randint(90, 900), draw.randint(90, 900)))
        if number % 4 == 1:
            image = image.filter(ImageFilter.GaussianBlur(draw.uniform(1, 12)))
        if number % 4 == 2:
            image = ImageEnhance.Brightness(image).enhance(draw.uniform(0.1, 1.5))
        if number % 4 == 3:
            image = ImageOps.mirror(image)
        exif = Image.Exif()
        exif[274] = draw.randint(1, 8)
        paths.append(folder / f"{number:02}{draw.choice(('.jpg', '.png', '.webp'))}")
        image.save(paths[-1], exif=exif)
    return paths


@pytest.fixture(scope="module")
def expected(photos: list[Path], loaded: pl.Loaded) -> list[pl.Localization]:
    """Each photo alone."""
    return [pl.localize(photo, loaded) for photo in photos]


def test_the_photos_are_of_all_kinds(photos: list[Path], expected: list[pl.Localization], loaded: pl.Loaded) -> None:
    assert len(expected) == COUNT
    assert {"subject", "unsure"} <= {found.decision for found in expected}
    nothing = Detector.of(loaded).calibration.nothing
    saved = [found for found in expected if found.decision == "unsure" and found.confidence < nothing]
    assert saved or photos[0].parent == LOCALIZE, "of none is the decision by what it is called"
    assert all(found.named is not None and found.named.group in MOVING for found in saved)


def load_benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"{name}_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def corners(box: pl.Box) -> list[float]:
    return [box.left, box.top, box.right, box.bottom]


def check_equal(answers: Sequence[pl.Localization], expected: Sequence[pl.Localization]) -> None:
    """Number by number, but for names, see THREADS."""
    for found, right in zip(answers, expected, strict=True):
        assert found.subjects == right.subjects
        assert (found.decision, found.confidence, found.method) == (right.decision, right.confidence, right.method)
        assert found.heat_hw.equal(right.heat_hw)
        assert found.mask_hw.equal(right.mask_hw)
        assert asdict(found.named) == pytest.approx(asdict(right.named), abs=THREADS)


def test_photos_beside_it_change_nothing(
    photos: list[Path], expected: list[pl.Localization], loaded: pl.Loaded
) -> None:
    check_equal(pl.localize(photos[::-1], loaded, batch_size=7)[::-1], expected)


def test_the_server_answers_alike(photos: list[Path], expected: list[pl.Localization]) -> None:
    with serving("default") as served:
        for path, found in zip(photos, expected, strict=True):
            answer = served.json(f"/photos/{served.photo(path.read_bytes(), path.name)}/localize")
            assert answer["subjects"] == [
                {"box": corners(each.box), "score": each.score, "confidence": each.confidence}
                for each in found.subjects
            ]
            assert (answer["decision"], answer["confidence"]) == (found.decision, found.confidence)
            assert answer["heat"]["values"] == found.heat_hw.flatten().tolist()
            assert answer["named"] == pytest.approx(asdict(found.named), abs=THREADS)


def test_the_command_line_answers_alike(photos: list[Path], expected: list[pl.Localization], tmp_path: Path) -> None:
    given = [*map(str, photos), "--out", "out", "--boxes-only", "--device", "cpu", "--workers", "1"]
    assert patchlight("crop", *given, cwd=tmp_path).returncode == 0
    confidence = 0.5e-4 + PACKED["confidence"]
    for row, found in zip(rows_of(tmp_path / "out"), expected, strict=True):
        assert (row["decision"], row["method"]) == (found.decision, found.method)
        assert row["confidence"] == pytest.approx(found.confidence, abs=confidence)
        assert len(row["boxes"]) == len(found.subjects)
        for box, right in zip(row["boxes"], found.subjects, strict=True):
            assert box["xyxy"] == pytest.approx(corners(right.box), abs=0.05 + PACKED["pixels"])
            assert box["score"] == pytest.approx(right.score, abs=confidence)
            assert box["confidence"] == pytest.approx(right.confidence, abs=confidence)
        assert found.named is not None
        for name, right in asdict(found.named).items():
            assert row[name] == (pytest.approx(right, abs=confidence) if isinstance(right, float) else right)


def test_the_benchmarks_answer_alike(
    photos: list[Path], expected: list[pl.Localization], loaded: pl.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    subjects, localize = load_benchmark("subjects"), load_benchmark("localize")
    asked = [subjects.Asked(lambda path=path: path, (), ("made",), 0) for path in photos]
    check_equal([answer.found for answer in subjects.answers(loaded, asked)], expected)
    # That one cuts photos, so that it has them as images, which are not decoded at a part of their size.
    images = [pl.decode(path).image for path in photos]
    examples = [localize.Example(image, (), "made", "centred", 0) for image in images]
    said = [answer.found for answer in localize.answers(loaded, examples, ["auto"]) if answer.found is not None]
    check_equal(said, pl.localize(images, loaded))
