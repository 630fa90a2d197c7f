"""Photos that a small model learns to tell apart in a few steps."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_coloured_photos(folder: Path, height: int, width: int) -> Path:
    """Three classes of twelve small photos that differ in colour, of three widths from this one on."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(["red", "green", "blue"]):
        (folder / name).mkdir()
        for index in range(12):
            pixels_HWC = generator.integers(0, 100, (height, width + index % 3, 3), dtype=np.uint8)
            pixels_HWC[..., number] += 120
            Image.fromarray(pixels_HWC).save(folder / name / f"{index}.png")
    return folder
