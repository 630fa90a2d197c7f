"""Fast decoding beside exact decoding of a 12 MP JPEG: how many times faster, and how far the model's image moves.

    python benchmarks/decode.py                   # a photo-like image that it makes itself
    python benchmarks/decode.py photo.jpg ...     # yours

Both go from the file's bytes to the normalised 224x224 image; rounds are interleaved, and the median round counts. The
difference is the mean over all pixels and channels, in grey levels of 0 to 255.

The gain is what the transform and the resize cost; reading the bits costs the same either way. So it falls with the
file's size, and a progressive JPEG, whose scans must all be read, gains about half as much as a camera's baseline JPEG.
"""

import argparse
import io
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from patchlight.config import PreprocessConfig
from patchlight.images.decode import decode
from patchlight.images.preprocess import Preprocess


def photo_like(height: int = 3024, width: int = 4032) -> bytes:
    """Clouds at all scales, as in nature, with hard edges and the noise of a sensor on top."""
    rng = np.random.default_rng(0)
    clouds_HWC = np.zeros((height, width, 3), np.float32)
    for octave in range(2, 11):
        coarse = Image.fromarray(rng.integers(0, 256, (3 * 2**octave // 4, 2**octave, 3), dtype=np.uint8))
        layer = coarse.resize((width, height), Image.Resampling.BICUBIC)
        clouds_HWC += np.asarray(layer, np.float32) * 0.6**octave
    clouds_HWC = (clouds_HWC - clouds_HWC.min()) / (clouds_HWC.max() - clouds_HWC.min()) * 255
    image = Image.fromarray(clouds_HWC.astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(60):
        x, y, size = rng.integers(0, width), rng.integers(0, height), rng.integers(10, 600)
        draw.ellipse((x, y, x + size, y + size // 2), fill=tuple(rng.integers(0, 256, 3).tolist()))
    noisy_HWC = np.asarray(image, np.float32) + rng.normal(0, 3, (height, width, 1)).astype(np.float32)
    file = io.BytesIO()
    Image.fromarray(noisy_HWC.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=92)
    return file.getvalue()


def compare(jpeg: bytes, preprocess: Preprocess, rounds: int) -> tuple[dict[str, float], float]:
    """Seconds a round of either way, and the mean difference of what they give."""
    times: dict[str, list[float]] = {"exact": [], "fast": []}
    images: dict[str, torch.Tensor] = {}
    for _ in range(rounds + 1):
        for name, size in (("exact", None), ("fast", preprocess.config.scaled_size)):
            start = time.perf_counter()
            images[name], _ = preprocess(decode(jpeg, fast_size=size))
            times[name].append(time.perf_counter() - start)
    std_C11 = torch.tensor(preprocess.config.std).view(3, 1, 1)
    difference = ((images["exact"] - images["fast"]) * std_C11).abs().mean().item() * 255
    return {name: statistics.median(values[1:]) for name, values in times.items()}, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    preprocess = Preprocess(PreprocessConfig(image_size=224, crop_pct=0.875))
    photos = {str(path): path.read_bytes() for path in arguments.photos} or {"made here": photo_like()}
    for name, jpeg in photos.items():
        seconds, difference = compare(jpeg, preprocess, arguments.rounds)
        height, width = decode(jpeg, fast_size=(1, 1)).source_size
        print(
            f"{name}: {width}x{height}, {len(jpeg) / 1e6:.1f} MB; exact {seconds['exact'] * 1e3:.0f} ms, "
            f"fast {seconds['fast'] * 1e3:.0f} ms, {seconds['exact'] / seconds['fast']:.1f} times faster; "
            f"mean difference {difference:.2f} grey levels"
        )


if __name__ == "__main__":
    main()
