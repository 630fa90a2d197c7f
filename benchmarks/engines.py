"""Every engine on this CPU: a model as Patchlight exports it, beside timm's model as a user would run it, in one run.

    python benchmarks/engines.py                       # S/16 and the default model, batch 1 and 8
    python benchmarks/engines.py --models default --batches 1 --rounds 40
    python benchmarks/engines.py --beside 2            # while two other processes keep two cores busy
    python benchmarks/engines.py --crop                # the default model as `crop` runs it, a photo for each core
    python benchmarks/engines.py --photos ../shared/data/localize     # decisions of the default model, photo by photo

The peers have timm's model: torch eager, torch.compile, onnxruntime (float32, and int8 by its dynamic quantiser) and
OpenVINO, each as its own documentation says. Ours are the folders that `patchlight export` writes, run by
`load_engine`. All give the logits, have the same number of threads, and take their turns round by round, so that a
machine that slows down slows all alike. A third of the rounds choose the fastest of ours for each precision, and the
others measure it: a ratio is the median over rounds of a peer's time and ours in that round. The cosine is that of the
logits with torch's in float32, the least over 8 images; reduced precision counts from 0.999 on.

Cores: seconds that all threads computed (or spun) for a forward pass. Where others use the machine, take --threads 1
and read the ratios by cores: with more, torch's threads spin while they wait for one that has lost its core. The
default model is the package's own, written as timm reads it.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import patchlight as pl
from patchlight.deploy import proof
from patchlight.localizing.detector import Detector
from patchlight.localizing.heat import HeatPass
from patchlight.models.prepack import prepack_linears

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracles

LEAST_COSINE = 0.999
WARM_UP = 2

proof.INPUTS = proof.TIMED = 1  # what an export proves is measured here anyway, and these exports are for nobody

Run = Callable[[np.ndarray], np.ndarray]


@dataclass
class Contestant:
    name: str
    reduced: bool
    """In fewer bits than float32."""
    ours: bool
    run: Run
    cosine: float = 0.0
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """By batch, round by round; and of all cores together:"""
    cores: dict[int, list[float]] = field(default_factory=dict)


def load_both(name: str, folder: Path) -> tuple[torch.nn.Module, pl.Loaded]:
    """timm's model, and ours with the same weights."""
    timm = oracles.timm()
    if name == "default":
        loaded = pl.load("default")
        pl.save(loaded, folder / "timm", layout="timm", overwrite=True)
        return timm.create_model(f"local-dir:{folder / 'timm'}", pretrained=True).eval(), loaded
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224").eval()
    path = folder / "vit_small_patch16_224.pth"
    torch.save(model.state_dict(), path)
    return model, pl.load(path, like="vit_small_patch16_224")


def by_torch(model: Any, dtype: torch.dtype = torch.float32) -> Run:
    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.from_numpy(images).to(dtype)).float().numpy()

    return run


def by_onnxruntime(path: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: session.run(None, {name: images})[0]


def by_openvino(model: Any, hint: str, threads: int) -> Run:
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    return lambda images: compiled([images])[0]


def peers(model: torch.nn.Module, side: int, folder: Path, threads: int) -> dict[tuple[str, bool], Callable[[], Run]]:
    """By name and whether they are reduced; made when called."""
    example = torch.randn(2, 3, side, side)
    path = folder / "timm.onnx"

    def onnx_path() -> Path:
        if not path.exists():
            program = torch.onnx.export(
                model, (example,), dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
            program.save(path)
        return path

    def quantized() -> Run:
        import onnx
        from onnxruntime.quantization import quantize_dynamic

        plain = onnx.load(onnx_path())
        del plain.graph.value_info[:]  # which the quantiser would stumble over
        onnx.save(plain, folder / "plain.onnx")
        quantize_dynamic(folder / "plain.onnx", folder / "int8.onnx")
        return by_onnxruntime(folder / "int8.onnx", threads)

    def openvino(hint: str) -> Run:
        import openvino

        return by_openvino(openvino.convert_model(model, example_input=example), hint, threads)

    def half() -> torch.nn.Module:
        import copy

        return copy.deepcopy(model).bfloat16()

    return {
        ("torch eager", False): lambda: by_torch(model),
        ("torch.compile", False): lambda: by_torch(torch.compile(model)),
        ("onnxruntime", False): lambda: by_onnxruntime(onnx_path(), threads),
        ("openvino", False): lambda: openvino("f32"),
        ("torch eager bfloat16", True): lambda: by_torch(half(), torch.bfloat16),
        ("torch.compile bfloat16", True): lambda: by_torch(torch.compile(half()), torch.bfloat16),
        ("onnxruntime int8 dynamic", True): quantized,
        ("openvino bfloat16", True): lambda: openvino("bf16"),
    }


FORMS: tuple[tuple[str, str, str], ...] = (
    ("torch", "safetensors", "float32"),
    ("onnxruntime", "onnx", "float32"),
    ("openvino", "openvino", "float32"),
    ("openvino", "openvino", "bfloat16"),
)


def ours(loaded: pl.Loaded, folder: Path, threads: int) -> dict[tuple[str, bool], Callable[[], Run]]:
    def make(to: Any, precision: Any) -> Run:
        torch.set_num_threads(1)  # for the proof, which threads that wait for each other would slow down
        out = pl.export(
            loaded,
            folder / f"{to}-{precision}",
            to=to,
            precision=precision,
            outputs=["logits"],
            overwrite=True,
            reporter=pl.Reporter(),
        )
        torch.set_num_threads(threads)
        engine = pl.load_engine(out.folder, threads=None if to == "safetensors" else threads)
        return lambda images: engine(images)["logits"]

    return {
        (f"patchlight: {name} {precision}", precision != "float32"): lambda to=to, precision=precision: make(
            to, precision
        )
        for name, to, precision in FORMS
    }


def contestants(name: str, folder: Path, threads: int, skip: list[str]) -> tuple[list[Contestant], int]:
    model, loaded = load_both(name, folder)
    side = loaded.config.image_size[0]
    each = {key: (make, False) for key, make in peers(model, side, folder, threads).items()}
    each |= {key: (make, True) for key, make in ours(loaded, folder, threads).items()}
    images = np.random.default_rng(0).standard_normal((8, 3, side, side)).astype(np.float32)
    expected = by_torch(model)(images)
    found = []
    for (label, reduced), (make, mine) in each.items():
        if any(word in label for word in skip):
            continue
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                contestant = Contestant(label, reduced, mine, make())
                said = contestant.run(images)
        except (pl.PatchlightError, ImportError, RuntimeError) as error:
            print(f"  {label} left out: {' '.join(str(error).split())[:160]}", flush=True)
            continue
        products = (said * expected).sum(1) / np.linalg.norm(said, axis=1) / np.linalg.norm(expected, axis=1)
        contestant.cosine = float(products.min())
        print(f"  {label} made in {time.perf_counter() - begun:.0f} s, cosine {contestant.cosine:.5f}", flush=True)
        found.append(contestant)
    return found, side


def measure(each: list[Contestant], side: int, batch: int, rounds: int) -> None:
    images = np.random.default_rng(1).standard_normal((batch, 3, side, side)).astype(np.float32)
    for contestant in each:
        contestant.seconds[batch], contestant.cores[batch] = [], []
    for number in range(rounds + WARM_UP):
        for contestant in each:
            begun, cores = time.perf_counter(), time.process_time()
            contestant.run(images)
            if number >= WARM_UP:
                contestant.seconds[batch].append(time.perf_counter() - begun)
                contestant.cores[batch].append(time.process_time() - cores)


def report(name: str, each: list[Contestant], batch: int) -> None:
    eager = each[0]
    choosing = max(1, len(eager.seconds[batch]) // 3)
    print(f"{name}, batch {batch}: median ms, ms of all cores; times torch eager in float32, by the clock and by cores")
    for contestant in each:
        took, cores = (statistics.median(of[batch][choosing:]) for of in (contestant.seconds, contestant.cores))
        times = "".join(f"{each:7.2f}" for each in ratios(eager, contestant, batch, choosing))
        print(f"  {contestant.name:32} {1000 * took:8.1f} {1000 * cores:8.1f} {times}   {contestant.cosine:.5f}")
    for reduced in (False, True):
        group = [one for one in each if one.reduced == reduced and (not reduced or one.cosine >= LEAST_COSINE)]
        mine = [one for one in group if one.ours]
        others = [one for one in group if not one.ours]
        if not mine or not others:
            continue
        chosen = min(mine, key=lambda one: statistics.median(one.seconds[batch][:choosing]))
        best = min(others, key=lambda one: statistics.median(one.seconds[batch][choosing:]))
        precision = "reduced" if reduced else "float32"
        to_best, to_eager = (ratios(other, chosen, batch, choosing) for other in (best, eager))
        print(
            f"  {precision}: chosen {chosen.name}; {to_best[0]:.2f} times the best peer ({best.name}; {to_best[1]:.2f} "
            f"by cores), {to_eager[0]:.2f} times torch eager ({to_eager[1]:.2f} by cores)",
            flush=True,
        )


def ratios(other: Contestant, one: Contestant, batch: int, choosing: int) -> tuple[float, float]:
    """How often the other's time, and its cores' time, is ours, in the median of the rounds."""
    by_clock, by_cores = (
        [theirs / mine for theirs, mine in zip(first[batch][choosing:], second[batch][choosing:], strict=True)]
        for first, second in ((other.seconds, one.seconds), (other.cores, one.cores))
    )
    return statistics.median(by_clock), statistics.median(by_cores)


def as_crop_runs(folder: Path, threads: int, rounds: int) -> None:
    """Heat, boxes and names of the default model, for a photo in each thread, whichever engine computes."""
    loaded = pl.load("default")
    packed = dataclasses.replace(loaded, model=prepack_linears(loaded.model))
    each = {"torch as it was loaded": loaded, "torch, weights laid out": packed}
    torch.set_num_threads(1)
    for name, to, precision in FORMS[1:]:
        out = pl.export(
            loaded,
            folder / f"{name}-{precision}",
            to=to,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            outputs=["subject", "logits"],
            reporter=pl.Reporter(),
        )
        own = pl.load_engine(out.folder)
        each[f"{name} {precision}"] = dataclasses.replace(own.loaded, engine=own.shared_by(threads))
    image_BCHW = torch.randn(1, 3, *loaded.preprocess.config.image_size)

    def look(by: pl.Loaded) -> None:
        seen = HeatPass(by, image_BCHW, ["subject"])
        seen.heat("subject"), seen.patch_boxes("subject"), seen.logits()

    seconds: dict[str, list[float]] = {name: [] for name in each}
    cores: dict[str, list[float]] = {name: [] for name in each}
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for number in range(rounds + WARM_UP):
            for name, by in each.items():
                begun, computed = time.perf_counter(), time.process_time()
                list(pool.map(look, [by] * (2 * threads)))
                if number >= WARM_UP:
                    seconds[name].append((time.perf_counter() - begun) / (2 * threads))
                    cores[name].append((time.process_time() - computed) / (2 * threads))
    print(f"ms a photo, ms of all cores a photo, times {list(each)[1]} by the clock and by cores")
    first = list(each)[1]
    for name in each:
        times = [statistics.median(a / b for a, b in zip(of[first], of[name], strict=True)) for of in (seconds, cores)]
        took, computed = (1000 * statistics.median(of[name]) for of in (seconds, cores))
        print(f"  {name:32} {took:8.1f} {computed:8.1f} {times[0]:7.2f}{times[1]:7.2f}")


def compare_decisions(photos: Path, folder: Path) -> None:
    """The default model by OpenVINO in bfloat16, and by torch in float32, as `crop` uses them."""
    torch.set_num_threads(1)
    detector = Detector.of(pl.load("default"))
    made = pl.export(
        "default", folder / "decisions", to="openvino", precision="bfloat16", outputs=["subject", "logits"]
    )
    print("\n".join(made.proof.lines()))
    other = Detector.of(pl.load_engine(made.folder).loaded)
    names = sorted(row["file"] for row in json.loads((photos / "boxes.json").read_text()))
    same, labels, overlaps, apart = 0, 0, [], []
    for name in names:
        found, reduced = detector([photos / name])[0], other([photos / name])[0]
        same += found.decision == reduced.decision
        assert found.named is not None
        assert reduced.named is not None
        labels += (found.named.group, found.named.label) == (reduced.named.group, reduced.named.label)
        apart.append(abs(found.confidence - reduced.confidence))
        if found.subjects and reduced.subjects:
            overlaps.append(found.subjects[0].box.iou(reduced.subjects[0].box))
    print(
        f"{len(names)} photos: same decision {same / len(names):.2%}, same name {labels / len(names):.2%}; boxes "
        f"overlap by {np.mean(overlaps):.4f} in the mean, {np.quantile(overlaps, 0.01):.3f} or more for 99 %, "
        f"{min(overlaps):.3f} at least; confidences differ by {np.mean(apart):.4f} in the mean, "
        f"{max(apart):.3f} at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["S/16", "default"], choices=["S/16", "default"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="processes that keep cores busy meanwhile")
    parser.add_argument("--skip", nargs="*", default=[], help="words of names to leave out, such as compile")
    parser.add_argument("--crop", action="store_true", help="time the default model as `crop` runs it")
    parser.add_argument("--photos", type=Path, help="compare decisions on the photos of its boxes.json, and no times")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.photos is not None:
            compare_decisions(arguments.photos, Path(scratch))
            return
        if arguments.crop:
            as_crop_runs(Path(scratch), arguments.threads, arguments.rounds)
            return
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        print(f"{os.cpu_count()} cores, {arguments.threads} threads, load {load}, torch {torch.__version__}")
        for name in arguments.models:
            folder = Path(scratch) / name.replace("/", "")
            folder.mkdir()
            each, side = contestants(name, folder, arguments.threads, arguments.skip)
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.beside)]
            try:
                for batch in arguments.batches:
                    measure(each, side, batch, arguments.rounds)
                    report(name, each, batch)
            finally:
                for process in busy:
                    process.kill()
                    process.wait()


if __name__ == "__main__":
    main()
