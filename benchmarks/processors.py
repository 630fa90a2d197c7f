"""How far the images of transformers' default processors (torchvision's) are from Pillow's, and those from ours.

    python benchmarks/processors.py                 # the photos in demo/, and patterns that are as sharp as can be
    python benchmarks/processors.py photos/*.jpg

In steps of 255: the largest difference of any pixel, and the mean over all of them; then how far what `load` makes of
the processor's config is from the Pillow processor.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

import patchlight as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import oracles

ROOT = Path(__file__).resolve().parents[1]

PROCESSORS = ("ViT", "DeiT", "Beit", "CLIP", "Siglip", "Bit", "ConvNext")
SIDES = (150, 333, 800, 2000)
"""Of the photos, the longer one, before they are prepared."""


def patterns() -> list[Image.Image]:
    """Noise, and squares of one pixel at random black or white."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (500, 333, 3))
    squares = np.broadcast_to(random.integers(0, 2, (500, 333, 1)) * 255, noise.shape)
    return [Image.fromarray(each.astype(np.uint8)) for each in (noise, squares)]


def at_sides(photo: Image.Image) -> list[Image.Image]:
    scales = [side / max(photo.size) for side in SIDES]
    return [photo.resize((round(photo.width * scale), round(photo.height * scale))) for scale in scales]


def prepared(processor: Any, photo: Image.Image) -> torch.Tensor:
    return torch.as_tensor(processor(photo, return_tensors="pt")["pixel_values"][0])


def ours_of(processor: Any, side: int) -> Any:
    """What `load` makes of its config, beside a model for images of this size."""
    library = oracles.transformers()
    tiny = library.ViTConfig(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, image_size=side)
    with tempfile.TemporaryDirectory() as folder:
        library.ViTModel(tiny).save_pretrained(folder)
        processor.save_pretrained(folder)
        return pl.load(folder).preprocess


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", nargs="*", type=Path)
    paths = parser.parse_args().photos or sorted([*ROOT.glob("demo/*.jpg"), *ROOT.glob("demo/*.png")])
    library = oracles.transformers()
    import torchvision

    versions = (library.__version__, torchvision.__version__, PIL.__version__)
    print("transformers {}, torchvision {}, Pillow {}".format(*versions))
    photos = [each for path in paths for each in at_sides(Image.open(path).convert("RGB"))]
    print(f"{'':10}{'photos: largest':>18}{'mean':>8}{'patterns: largest':>20}{'ours and Pillow':>18}")
    for name in PROCESSORS:
        default, pillow = (getattr(library, f"{name}ImageProcessor{kind}")() for kind in ("", "Pil"))
        scale = 255 * torch.tensor(default.image_std)[:, None, None]
        apart = [((prepared(default, photo) - prepared(pillow, photo)) * scale).abs() for photo in photos]
        sharp = [((prepared(default, photo) - prepared(pillow, photo)) * scale).abs().max() for photo in patterns()]
        ours = ours_of(pillow, prepared(pillow, photos[0]).shape[-1])
        same = max(float(((ours(photo)[0] - prepared(pillow, photo)) * scale).abs().max()) for photo in photos)
        largest = max(float(each.max()) for each in apart)
        mean = sum(float(each.mean()) for each in apart) / len(apart)
        print(f"{name:10}{largest:18.0f}{mean:8.3f}{float(max(sharp)):20.0f}{same:18.3f}")


if __name__ == "__main__":
    main()
