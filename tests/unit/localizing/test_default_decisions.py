"""The model that comes with the package does not make up subjects where there are none."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from patchlight.errors import PatchlightError
from patchlight.localizing.detector import localize
from patchlight.weights.load import Loaded, load

DEMO = Path(__file__).parents[4] / "shared" / "data" / "demo"


@pytest.fixture(scope="module")
def default() -> Loaded:
    try:
        loaded = load("default")
    except PatchlightError as error:
        pytest.skip(str(error))
    if loaded.subject is None or loaded.subject.calibration is None:
        pytest.skip("the default model has no calibration")
    return loaded


def empty_images() -> dict[str, Image.Image]:
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:240, 0:320]
    ramp = np.stack([y, 255 - y, x * 0.7], 2)
    sky = np.stack([110 + y / 4, 150 + y / 4, 220 + y / 16], 2) + rng.normal(0, 3, (240, 320, 3))
    stripes = np.where((x // 9 % 2)[..., None], [180, 40, 60], [220, 220, 200])
    checks = np.where(((x // 20 + y // 20) % 2)[..., None], [20, 90, 60], [200, 190, 90])
    gravel = rng.integers(60, 200, (80, 107, 1)).repeat(3, 2)
    arrays = {
        "black": np.zeros((240, 320, 3)),
        "white": np.full((240, 320, 3), 255),
        "gradient": ramp,
        "sky": sky,
        "noise": rng.integers(0, 256, (240, 320, 3)),
        "stripes": stripes,
        "checks": checks,
    }
    images = {name: Image.fromarray(array.clip(0, 255).astype(np.uint8)) for name, array in arrays.items()}
    images["gravel"] = Image.fromarray(gravel.astype(np.uint8)).resize((320, 240)).filter(ImageFilter.GaussianBlur(1))
    return images


@pytest.mark.parametrize("name", empty_images())
def test_nothing_is_made_of_textures_and_gradients(default: Loaded, name: str) -> None:
    found = localize(empty_images()[name], default)
    assert found.decision in ("none", "unsure"), found.confidence


@pytest.mark.skipif(not DEMO.is_dir(), reason="needs ../shared/data")
def test_a_cat_is_not_nothing(default: Loaded) -> None:
    photos = sorted(path for path in DEMO.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    found = dict(zip((path.stem for path in photos), localize(photos, default), strict=True))
    assert found["chelsea"].decision in ("subject", "unsure")
    assert all(each.subjects for each in found.values())
