"""The folder runner beside the script that a user writes today: photos per second on large JPEGs, in one run.

    python benchmarks/crop.py                    # 24 photos of 12 to 24 MP, boxes only and with full-size crops
    python benchmarks/crop.py --photos 8 --rounds 1
    python benchmarks/crop.py --memory           # peak memory of each process, at 100 and at 5,000 small photos
    python benchmarks/crop.py --models default OTHER   # two models beside each other, boxes only

The script: timm's S/16, a hook on the last block's attention, Pillow, a heat map as large as the photo, its box, a crop
saved as JPEG; photo after photo. Ours: a model of the same size (S/16 at 224 px, random weights), read by a heat of its
own. Photos are made once from those in demo/, scaled up, with grain so that they weigh what a camera's do. Rounds
are interleaved, so that a machine that slows down slows all alike; the median of the rounds' ratios counts. Rates are
without start-up (the model's loading, processes), which is given beside them, as are seconds of all cores together,
start-up included. Measure on a quiet machine: on a busy one the script's two threads spin while they wait for each
other, which costs it more than twice the time, and makes ours look better than it is.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import patchlight as pl
from patchlight.config import Calibration, PreprocessConfig, SubjectHeat
from patchlight.weights.save import save

DEMO = Path(__file__).parents[1] / "demo"

MEMORY_SECONDS = 1.0
"""Between two looks at the memory of all processes, each of which takes several milliseconds of a core for each."""


def make_photos(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted([*DEMO.glob("*.jpg"), *DEMO.glob("*.png")])
    sizes = [(4000, 3000), (4608, 3456), (5184, 3456), (6000, 4000)]
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number:04}.jpg"
        if path.exists():
            continue
        width, height = sizes[number % len(sizes)]
        with Image.open(sources[number % len(sources)]) as source:
            large = source.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        grain = random.normal(0, 5, (height // 2, width // 2, 1)).repeat(2, 0).repeat(2, 1).astype(np.int16)
        level_HWC = np.asarray(large, np.int16)[: grain.shape[0], : grain.shape[1]] + grain
        Image.fromarray(level_HWC.clip(0, 255).astype(np.uint8)).save(path, quality=92)


def make_small_photos(folder: Path, count: int) -> None:
    """Links to one photo, ten seconds apart by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "0000.jpg"
    with Image.open(DEMO / "rocket.jpg") as source:
        source.convert("RGB").resize((640, 480)).save(first, quality=90)
    for number in range(count):
        hours, minutes, seconds = number // 360, number // 6 % 60, 10 * (number % 6)
        os.link(first, folder / f"20240514_{hours:02}{minutes:02}{seconds:02}.jpg")
    first.unlink()


def make_model(folder: Path, variant: str = "S/16", side: int = 224, **changes: Any) -> None:
    torch.manual_seed(0)
    vit = pl.ViT(pl.variant(variant, image_size=side, num_classes=0, **changes)).eval()
    subject = SubjectHeat(scale=1.0, bias=0.0, calibration=Calibration(bias=2.0))
    save(vit, folder, preprocess=PreprocessConfig(image_size=(side, side), crop_pct=0.875), subject=subject)


def run_ours(photos: Path, out: Path, model: str, how: str, workers: int) -> None:
    begun = time.perf_counter()
    boxes_only = how == "boxes only"
    settings = pl.CropSettings(boxes_only=boxes_only, burst=how == "burst", engine="none")
    how = pl.CropRunSettings(device="cpu", workers=workers)
    summary = pl.crop_photos(photos, out, settings, how, model=model, reporter=pl.Reporter())
    whole = time.perf_counter() - begun
    assert summary.failed == 0
    assert boxes_only or settings.burst or summary.crops == summary.photos
    print(json.dumps({"rate": summary.rate, "start-up": whole - summary.seconds}))


def run_script(photos: Path, out: Path) -> None:
    """What somebody writes today who wants the subject of each photo."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import oracles

    begun = time.perf_counter()
    timm = oracles.timm()
    model = timm.create_model("vit_small_patch16_224", num_classes=0).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    last = model.blocks[-1].attn
    last.fused_attn = False
    rows: list[torch.Tensor] = []
    last.attn_drop.register_forward_hook(lambda module, inputs, output: rows.append(output))
    out.mkdir()
    started = time.perf_counter()
    paths = sorted(photos.iterdir())
    for path in paths:
        image = Image.open(path).convert("RGB")
        rows.clear()
        with torch.no_grad():
            model(transform(image)[None])
            heat_hw = rows[0][0, :, 0, 1:].mean(0).reshape(1, 1, 14, 14)
            heat_HW = torch.nn.functional.interpolate(heat_hw, (image.height, image.width), mode="bilinear")[0, 0]
        mask_HW = (heat_HW > heat_HW.mean() + heat_HW.std()).numpy()
        ys, xs = np.where(mask_HW.any(1))[0], np.where(mask_HW.any(0))[0]
        image.crop((xs[0], ys[0], xs[-1] + 1, ys[-1] + 1)).save(out / path.name, quality=95)
    print(json.dumps({"rate": len(paths) / (time.perf_counter() - started), "start-up": started - begun}))


@dataclass
class Usage:
    """Of a program and of the processes that it starts."""

    first: int = 0
    """Peak resident memory of the program itself, in bytes, and"""
    others: int = 0
    """that of the largest of its processes."""
    together: int = 0
    """The peak of all of them, what they share counted once."""
    cpu: float = 0.0
    """Seconds of all cores."""


def in_a_process(*arguments: str | Path) -> tuple[dict[str, float], Usage]:
    """What a run of this file printed, and what it used."""
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, start_new_session=True
    )
    usage, seconds, looked = Usage(), dict[int, float](), time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        for pid, cpu in processes_of(process.pid):
            seconds[pid] = cpu
        usage.cpu = sum(seconds.values())
        if time.monotonic() - looked < MEMORY_SECONDS:
            continue
        looked, together = time.monotonic(), 0
        for pid in seconds:
            peak, shared_out = memory_of(pid)
            together += shared_out
            if pid == process.pid:
                usage.first = max(usage.first, peak)
            else:
                usage.others = max(usage.others, peak)
        usage.together = max(usage.together, together)
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    if process.returncode:
        raise SystemExit(f"{arguments[0]} failed")
    return json.loads(said), usage


def processes_of(session: int) -> Iterator[tuple[int, float]]:
    """(number, seconds of a core so far) of each."""
    for each in Path("/proc").iterdir():
        if not each.name.isdigit():
            continue
        with contextlib.suppress(OSError, LookupError):
            fields = (each / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield int(each.name), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> tuple[int, int]:
    """(peak of the resident bytes, those of now with what is shared parted among the sharers); 0 once it is gone."""
    with contextlib.suppress(OSError, ValueError):
        peak, shared_out = (
            1024 * int(line.split()[1])
            for name, key in (("status", "VmHWM:"), ("smaps_rollup", "Pss:"))
            for line in (Path("/proc") / str(pid) / name).read_text().splitlines()
            if line.startswith(key)
        )
        return peak, shared_out
    return 0, 0


def compare(count: int, rounds: int, workers: int, folder: Path) -> None:
    photos = folder / f"photos-{count}"
    make_photos(photos, count)
    weight = sum(path.stat().st_size for path in photos.iterdir()) / count / 1e6
    print(f"{count} photos, {weight:.1f} MB each; {os.cpu_count()} cores, {workers} workers")
    names = ("script", "boxes only", "full-size crops")
    rates: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_model(model)
        for round_number in range(rounds):
            for name in names:
                out = Path(scratch) / f"{name} {round_number}"
                how = ["script", photos, out]
                if name != "script":
                    how = ["ours", photos, out, model, name, str(workers)]
                said, usage = in_a_process(*how)
                rates[name].append(said["rate"])
                costs[name].append(usage.cpu / count)
                print(
                    f"{name:16} {said['rate']:6.2f} photos/s   start-up {said['start-up']:4.1f} s   "
                    f"cores {1000 * usage.cpu / count:4.0f} ms a photo   memory {usage.together / 1e6:5.0f} MB",
                    flush=True,
                )
    for name in names[1:]:
        ratios = [ours / theirs for ours, theirs in zip(rates[name], rates["script"], strict=True)]
        each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        cheaper = statistics.median(costs["script"]) / statistics.median(costs[name])
        print(
            f"{name:16} {statistics.median(ratios):.1f} times the script's rate (rounds: {each}), with "
            f"{cheaper:.1f} times fewer seconds of the cores"
        )


def compare_models(models: tuple[str, str], count: int, rounds: int, workers: int, folder: Path) -> None:
    """The first beside the second, boxes only."""
    photos = folder / f"photos-{count}"
    make_photos(photos, count)
    rates: dict[str, list[float]] = {model: [] for model in models}
    costs: dict[str, list[float]] = {model: [] for model in models}
    with tempfile.TemporaryDirectory() as scratch:
        for round_number in range(rounds):
            for number, model in enumerate(models):
                out = Path(scratch) / f"{round_number}-{number}"
                said, usage = in_a_process("ours", photos, out, model, "boxes only", str(workers))
                rates[model].append(said["rate"])
                costs[model].append(usage.cpu / count)
                cost = f"cores {1000 * usage.cpu / count:4.0f} ms a photo, start-up included"
                print(f"{model:24} {said['rate']:6.2f} photos/s   {cost}", flush=True)
    first, second = models
    ratios = [own / other for own, other in zip(rates[first], rates[second], strict=True)]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    seconds = statistics.median(costs[second]) / statistics.median(costs[first])
    print(
        f"{first}: {statistics.median(ratios):.2f} times the rate of {second} (rounds: {each}); by the seconds of the "
        f"cores {seconds:.2f} times"
    )


def compare_memory(workers: int) -> None:
    """With a small model, since neither the model nor the photos' size makes a folder's."""
    print(f"{workers} workers; MB of the program itself, of its largest process, and of all together")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_model(model, width=64, depth=2, num_heads=2)
        for how in ("boxes only", "crops", "burst"):
            for count in (100, 5000):
                photos = Path(scratch) / f"photos-{count}"
                if not photos.exists():
                    make_small_photos(photos, count)
                out = Path(scratch) / f"out-{how}-{count}"
                said, usage = in_a_process("ours", photos, out, model, how, str(workers))
                sizes = "".join(f"{size / 1e6:7.0f}" for size in (usage.first, usage.others, usage.together))
                print(f"{how:12} {count:5} photos {sizes}   {said['rate']:.1f} photos/s", flush=True)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "ours":
        run_ours(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]))
        return
    if len(sys.argv) > 1 and sys.argv[1] == "script":
        run_script(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "patchlight-crop-benchmark")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--models", nargs=2, metavar=("MODEL", "OTHER"))
    arguments = parser.parse_args()
    if not DEMO.exists():
        raise SystemExit(f"the photos are made from those in {DEMO}, which is not here")
    if arguments.memory:
        compare_memory(arguments.workers)
    elif arguments.models:
        compare_models(arguments.models, arguments.photos, arguments.rounds, arguments.workers, arguments.folder)
    else:
        compare(arguments.photos, arguments.rounds, arguments.workers, arguments.folder)


if __name__ == "__main__":
    main()
