"""A tiny model that finds something in every photo, photos for it, and what a run has left behind."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models_at_random import randomize, tiny_vit
from patchlight.batch.runner import crop_photos
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.summary import CropSummary
from patchlight.config import Calibration, PreprocessConfig, SubjectHeat
from patchlight.reporting import Progress, Reporter
from patchlight.weights.groups import Groups
from patchlight.weights.save import save


def save_model(folder: Path, seed: int = 0, groups: Sequence[str] | None = None, **preprocess: Any) -> Path:
    vit = tiny_vit()
    randomize(vit, seed)
    config = PreprocessConfig(**{"image_size": (32, 32), "resize": "squash", "crop_pct": 1.0, **preprocess})
    labels = None if groups is None else tuple(f"class {number}" for number in range(len(groups)))
    return save(
        vit,
        folder,
        preprocess=config,
        labels=labels,
        groups=None if labels is None or groups is None else Groups(labels, tuple(groups)),
        subject=SubjectHeat(scale=1.0, bias=0.0, calibration=Calibration(bias=2.0)),
    )


def photo(seed: int, width: int = 160, height: int = 120) -> Image.Image:
    """A bright spot on noise that is smooth enough for JPEG."""
    random = np.random.default_rng(seed)
    small_HWC = random.integers(0, 120, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(small_HWC).resize((width, height), Image.Resampling.BICUBIC)
    x, y = (int(random.integers(0, side // 2 + 1)) for side in (width, height))
    image.paste((250, 240, 200), (x, y, x + width // 3 + 1, y + height // 3 + 1))
    return image


def make_photos(folder: Path, count: int, first: int = 0) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03}.jpg" for number in range(first, first + count)]
    for number, path in enumerate(paths, first):
        photo(number).save(path, quality=90)
    return paths


def run_crop(
    photos: Any,
    out: Any,
    settings: CropSettings | None = None,
    *,
    model: Any,
    progress: Callable[[Progress], None] = lambda now: None,
    tell: Callable[[str], None] = lambda line: None,
    **how: Any,
) -> CropSummary:
    """`crop_photos`, with what `CropRunSettings` takes."""
    reporter = Reporter(progress=progress, tell=tell)
    return crop_photos(photos, out, settings, CropRunSettings(**how), model=model, reporter=reporter)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def everything_in(folder: Path) -> dict[str, bytes]:
    """What two runs must have alike: all but their own notes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".run" not in path.parts
    }
