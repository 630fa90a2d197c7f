"""What rotary positions cost: images per second of the same ViT with a learned table and with RoPE, and the ratio.

    python benchmarks/rope.py                # ViT-S/16 and B/16, 224 px: compiled bfloat16 at batch 256 on a GPU,
                                             # eager float32 at batch 1 on a CPU
    python benchmarks/rope.py S/16 --compile max-autotune --positions learned rope2d rope_mixed

Needs torch alone; where timm imports, its own pair (a ViT with a table, and with axial RoPE) is timed in the same
rounds. Rounds of all contestants are interleaved, so that a machine that slows down slows all alike; the median round
counts. Exit code 1 on a GPU if ours with rope2d is more than 10 % under ours without.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from patchlight.families import variant
from patchlight.models.vit import ViT

FLOOR = 0.9


def contestants(name: str, positions: list[str]) -> dict[str, Callable[[], torch.nn.Module]]:
    size = {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}.get(name.split("/")[0])
    ours = {position: (lambda position=position: ViT(variant(name, position=position))) for position in positions}
    if size is None or not name.endswith("/16") or size == "tiny":
        return ours
    return ours | {
        "timm learned": lambda: timm_model(f"vit_{size}_patch16_224"),
        "timm rope": lambda: timm_model(f"vit_{size}_patch16_rope_224"),
    }


def timm_model(name: str) -> torch.nn.Module:
    """A model of timm's; raises ImportError where timm, or what it needs, is not here."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    try:
        import oracles

        return oracles.timm().create_model(name)
    except ModuleNotFoundError:  # the tests' oracles need pytest
        import timm

        return timm.create_model(name)
    except BaseException as absent:
        if type(absent).__name__ != "Skipped":
            raise
        raise ImportError(str(absent)) from None


def seconds_per_round(models: dict[str, torch.nn.Module], image: torch.Tensor, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in models}
    for index in range(rounds + 5):
        for name, model in models.items():
            start = time.perf_counter()
            model(image)
            if image.is_cuda:
                torch.cuda.synchronize()
            if index >= 5:  # the first ones compile and warm up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["S/16", "B/16"])
    parser.add_argument("--positions", nargs="+", default=["learned", "rope2d"], help="ours; the first is the measure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="256 on a GPU, 1 on a CPU")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compile", metavar="MODE", help="none, default, max-autotune, ...")
    arguments = parser.parse_args()

    on_gpu = arguments.device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    batch = arguments.batch or (256 if on_gpu else 1)
    mode = arguments.compile or ("default" if on_gpu else "none")
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, {dtype}, batch {batch}, compile: {mode}")

    too_slow = False
    for name in arguments.models:
        models: dict[str, torch.nn.Module] = {}
        for contestant, make in contestants(name, arguments.positions).items():
            try:
                model = make().eval().to(arguments.device, dtype)
            except ImportError as absent:
                print(f"  {contestant} left out: {absent}")
                continue
            models[contestant] = model if mode == "none" else torch.compile(model, mode=mode)
        image = torch.randn(batch, 3, 224, 224, device=arguments.device, dtype=dtype)
        with torch.inference_mode():
            seconds = seconds_per_round(models, image, arguments.rounds)
        for contestant, each in seconds.items():
            print(f"  {name:5} {contestant:13} {batch / each:10,.1f} images/s {1000 * each:9.2f} ms")
        first = arguments.positions[0]
        for position in arguments.positions[1:]:
            ratio = seconds[first] / seconds[position]
            too_slow |= position == "rope2d" and ratio < FLOOR
            print(f"  {name:5} patchlight's {position} runs at {ratio:.3f} of its {first} (floor of rope2d: {FLOOR})")
        if "timm rope" in seconds:
            ratio = seconds["timm learned"] / seconds["timm rope"]
            print(f"  {name:5} timm's rope runs at {ratio:.3f} of its learned")
    if too_slow and on_gpu:
        sys.exit(1)


if __name__ == "__main__":
    main()
