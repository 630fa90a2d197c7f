"""Frames of a camera trap: a bright stump in every one, and a bright animal in some."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from bright_subjects import sees_what_is_bright
from patchlight.weights.save import save

STUMP = (20, 70, 70, 110)
"""x0, y0, x1, y1 in pixels of a frame, which is 160 wide and 120 high."""

ANIMAL = (48, 32)
"""Its width and height."""

Walk = Sequence[tuple[int, int] | None]
"""Where the animal is in each frame, left and top; None where it is not."""

WALK: Walk = [None, (100, 10), None, (90, 40), None, None, (70, 20), None]


def save_bright(folder: Path) -> Path:
    """A model that sees what is bright."""
    loaded = sees_what_is_bright()
    return save(loaded.model, folder, preprocess=loaded.preprocess.config, subject=loaded.subject)


BRIGHT, DARK = (255, 240, 230), (0, 0, 0)
"""Animals; the model sees the first."""


def scene(seed: int = 0, *, stump: bool = True) -> Image.Image:
    """Hills and grass, none of it bright, and the stump."""
    coarse_HWC = np.random.default_rng(seed).integers(20, 90, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(coarse_HWC).resize((160, 120), Image.Resampling.BICUBIC)
    if stump:
        image.paste((235, 225, 200), STUMP)
    return image


def write_frames(
    folder: Path,
    walk: Walk = WALK,
    *,
    minutes: float = 30,
    serial: str = "A1",
    seed: int = 0,
    animal: tuple[int, int, int] = BRIGHT,
    stump: bool = True,
) -> list[Path]:
    """The frames in their order, `minutes` apart by the camera's clock, a little noise in each."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, place in enumerate(walk):
        image = scene(seed, stump=stump)
        if place is not None:
            x, y = place
            image.paste(animal, (x, y, x + ANIMAL[0], y + ANIMAL[1]))
        noise_HW1 = np.random.default_rng(100 * seed + number).normal(0, 2, (120, 160, 1))
        image = Image.fromarray((np.asarray(image) + noise_HW1).clip(0, 255).astype(np.uint8))
        exif = Image.Exif()
        exif[0x010F], exif[0x0110] = "Trail", "Cam 3"
        seconds = round(60 * minutes * number)
        details = exif.get_ifd(0x8769)
        details[0x9003] = f"2024:05:14 {6 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        details[0xA431] = serial
        path = folder / f"{serial}_{number:03}.jpg"
        image.save(path, quality=92, exif=exif)
        paths.append(path)
    return paths
