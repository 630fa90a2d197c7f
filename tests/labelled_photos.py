"""Small photos in files, and what a set makes of them."""

from pathlib import Path

import numpy as np
from PIL import Image

from patchlight.training.data import Dataset


def save_photo(path: Path, seed: int, size: tuple[int, int] = (20, 30)) -> Path:
    """Coarse noise of this (height, width), its own for every seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    Image.fromarray(noise).resize(size[::-1], Image.Resampling.BICUBIC).save(path)
    return path


def everything(dataset: Dataset) -> list[tuple[str, str]]:
    return [
        (name, dataset.classes[label]) for name, label in zip(dataset.names, dataset.labels_N.tolist(), strict=True)
    ]
