"""How busy the folder runner keeps a GPU with large photos, and what limits it.

    python benchmarks/busy.py --device cuda --workers 16              # S/16, B/16 and L/16 at 224 px
    python benchmarks/busy.py --device cuda --models L/16 B/14@518 --photos 2048 --batch 64
    python benchmarks/busy.py --device cpu --workers 2 --photos 16 --models S/16

Photos of 12 megapixels are made from those in demo/, 32 of them; the others are links to these. Three rates are
measured: that of the worker processes alone, which read and do nothing else; that of the model alone, batch after batch
of photos that are there; and that of the runner (boxes only, with thumbnails and report data, without crops). The lower
of the first two is what the runner could reach. "busy" is the runner's rate as a share of the model's own, which is the
share of the time in which the device has work at its full speed; "occupied" is the share of the time from a batch's
first kernel to its last, gaps in which the device waits for the program included.

Needs torch, numpy, Pillow and safetensors, and nothing else of what the package installs.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crop import DEMO, make_model
from PIL import Image

import patchlight as pl
from patchlight.batch.finder import images_at_once
from patchlight.batch.pool import Pool
from patchlight.batch.work import Seen, read_photo
from patchlight.localizing import detector
from patchlight.localizing.detector import Detector
from patchlight.localizing.heat import Method
from patchlight.weights.load import Loaded, load

DIFFERENT = 32
"""Photos that are not links."""


def make_one(job: tuple[int, str]) -> None:
    number, path = job
    sources = sorted([*DEMO.glob("*.jpg"), *DEMO.glob("*.png")])
    random = np.random.default_rng(number)
    with Image.open(sources[number % len(sources)]) as source:
        large = source.convert("RGB").resize((4000, 3000), Image.Resampling.BICUBIC)
    # Grain, so that they weigh what a camera's do.
    grain_HW1 = random.normal(0, 5, (1500, 2000, 1)).repeat(2, 0).repeat(2, 1).astype(np.int16)
    level_HWC = (np.asarray(large, np.int16) + grain_HW1).clip(0, 255).astype(np.uint8)
    Image.fromarray(level_HWC).save(path, quality=92)


def make_photos(folder: Path, count: int, workers: int) -> None:
    folder.mkdir(parents=True)
    jobs = [(number, str(folder / f"{number:05}.jpg")) for number in range(min(count, DIFFERENT))]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        list(pool.map(make_one, jobs))
    for number in range(DIFFERENT, count):
        os.link(folder / f"{number % DIFFERENT:05}.jpg", folder / f"{number:05}.jpg")


def reading_rate(photos: list[Path], loaded: Loaded, workers: int) -> float:
    """Photos a second that the processes read, with nothing else to do."""
    with Pool(workers) as pool:
        config = loaded.preprocess.config
        for future in [pool.submit(read_photo, str(path), config, None) for path in photos[: 2 * workers]]:
            future.result()  # they have started
        begun = time.perf_counter()
        futures = [pool.submit(read_photo, str(path), config, None) for path in photos]
        assert all(isinstance(future.result(), Seen) for future in futures)
        return len(photos) / (time.perf_counter() - begun)


def model_rate(loaded: Loaded, device: torch.device, batch: int) -> float:
    """Photos a second that the model looks at, with all of them there."""
    size = loaded.preprocess.config.image_size
    levels = [np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)] * images_at_once(device, batch)
    rounds, finds = 30 if device.type == "cuda" else 3, Detector.of(loaded)

    def look(times: int) -> None:
        for _ in range(times):
            images_BCHW = loaded.preprocess.batch(levels, device)
            finds.heat(images_BCHW)
        if device.type == "cuda":
            torch.cuda.synchronize()

    look(3)
    begun = time.perf_counter()
    look(rounds)
    return rounds * len(levels) / (time.perf_counter() - begun)


@contextmanager
def watched(device: torch.device) -> Iterator[list[tuple[Any, Any]]]:
    """(first, last) of every batch while it is with the model: CUDA events, or times where there are none."""
    seen: list[tuple[Any, Any]] = []

    def now() -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    class Watched(detector.HeatPass):
        def __init__(self, *given: Any, **named: Any) -> None:
            self.begun = now()
            super().__init__(*given, **named)

        def heat(self, method: Method) -> torch.Tensor:
            heat_Bhw = super().heat(method)
            seen.append((self.begun, now()))
            return heat_Bhw

    before = detector.HeatPass
    detector.HeatPass = Watched  # type: ignore[misc]
    try:
        yield seen
    finally:
        detector.HeatPass = before  # type: ignore[misc]


def seconds_in(spans: list[tuple[Any, Any]], device: torch.device) -> float:
    """That at least one of the spans covers."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        zero = spans[0][0]
        spans = [(zero.elapsed_time(first) / 1000, zero.elapsed_time(last) / 1000) for first, last in spans]
    covered, end = 0.0, -float("inf")
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=["S/16", "B/16", "L/16"], help="NAME or NAME@PIXELS")
    parser.add_argument("--photos", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        begun = time.perf_counter()
        make_photos(folder / "photos", arguments.photos, arguments.workers)
        weight = sum(path.stat().st_size for path in (folder / "photos").iterdir()) / arguments.photos / 1e6
        print(
            f"{name}, {os.cpu_count()} cores, {arguments.workers} workers, batches of {arguments.batch}; "
            f"{arguments.photos} photos of 12 MP, {weight:.1f} MB, made in {time.perf_counter() - begun:.0f} s"
        )
        paths = sorted((folder / "photos").iterdir())
        print("model      reading alone   model alone      runner   busy  occupied  of what is possible   limit")
        for number, variant in enumerate(arguments.models):
            plain, _, side = variant.partition("@")
            make_model(folder / f"model{number}", plain, int(side or 224))
            loaded = load(folder / f"model{number}", device=str(device))
            reading = reading_rate(paths, loaded, arguments.workers)
            alone = model_rate(loaded, device, arguments.batch)
            with watched(device) as spans:
                summary = pl.crop_photos(
                    folder / "photos",
                    folder / f"out{number}",
                    pl.CropSettings(boxes_only=True),
                    pl.CropRunSettings(workers=arguments.workers, batch_size=arguments.batch),
                    model=loaded,
                    reporter=pl.Reporter(),
                )
            assert summary.failed == 0
            occupied = seconds_in(spans, device) / summary.seconds
            possible, limit = min((reading, "reading"), (alone, "the model"))
            print(
                f"{variant:8} {reading:9.0f} /s {alone:12.0f} /s {summary.rate:9.0f} /s {summary.rate / alone:5.0%} "
                f"{occupied:8.0%} {summary.rate / possible:14.0%}         {limit}",
                flush=True,
            )


if __name__ == "__main__":
    main()
