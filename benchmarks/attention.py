"""What it costs to see the class token's attention of every layer: beside the forward alone, and beside the peers.

    python benchmarks/attention.py                                      # S/16 and B/16 on the CPU, batch 1
    python benchmarks/attention.py --device cuda --dtype bfloat16 --batch 64
    python benchmarks/attention.py --memory 1024                        # peak memory at 1024 px instead of time

The peers as their users do it: timm with fused attention switched off and hooks on the attention's dropout,
transformers with `attn_implementation="eager"` and `output_attentions=True`. Each is compared with its own fused
forward; rounds are interleaved, so that a machine that slows down slows all alike, and the median of the rounds'
ratios counts. On a machine shared with others that still swings by several per cent: then look at the best rounds.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import patchlight as pl

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracles

Call = Callable[[torch.Tensor], object]


def patchlight_calls(name: str, size: int) -> tuple[torch.nn.Module, Call, Call]:
    model = pl.ViT(pl.variant(name, image_size=size))
    return model, model, lambda image: pl.attention(model, image, layers="all", queries="cls").weights


def timm_calls(name: str, size: int) -> tuple[torch.nn.Module, Call, Call]:
    timm = oracles.timm()
    full = {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}[name.split("/")[0]]
    make = f"vit_{full}_patch{name.split('/')[1]}_224"
    fused = timm.create_model(make, img_size=size)
    unfused = timm.create_model(make, img_size=size)
    rows: list[torch.Tensor] = []
    for block in unfused.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, inputs, output: rows.append(output[:, :, 0].clone()))

    def with_rows(image: torch.Tensor) -> torch.Tensor:
        rows.clear()
        unfused(image)
        return torch.stack(rows)

    return torch.nn.ModuleList([fused, unfused]), fused, with_rows


def transformers_calls(name: str, size: int) -> tuple[torch.nn.Module, Call, Call]:
    transformers = oracles.transformers()
    config = pl.variant(name, image_size=size)

    def make(how: str) -> torch.nn.Module:
        settings = transformers.ViTConfig(
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_width,
            patch_size=config.patch_size[0],
            image_size=size,
            num_labels=config.num_classes,
            attn_implementation=how,
        )
        return transformers.ViTForImageClassification(settings)

    fused, eager = make("sdpa"), make("eager")

    def with_rows(image: torch.Tensor) -> torch.Tensor:
        attentions = eager(image, output_attentions=True).attentions
        return torch.stack([attention[:, :, 0] for attention in attentions])

    return torch.nn.ModuleList([fused, eager]), fused, with_rows


CONTESTANTS = {"patchlight": patchlight_calls, "timm": timm_calls, "transformers": transformers_calls}


def measure_time(name: str, arguments: argparse.Namespace) -> None:
    image = make_image(arguments, 224)
    calls: dict[str, tuple[Call, Call]] = {}
    for contestant, make in CONTESTANTS.items():
        try:
            model, alone, with_rows = make(name, 224)
        except oracles.Absent as absent:
            print(f"  {contestant} left out: {absent}")
            continue
        model.eval().to(arguments.device, getattr(torch, arguments.dtype))
        if arguments.compile:
            alone = torch.compile(alone)
            with_rows = torch.compile(with_rows)
        calls[contestant] = (alone, with_rows)
    times: dict[str, list[tuple[float, float]]] = {contestant: [] for contestant in calls}
    for index in range(arguments.rounds + 3):
        for contestant, pair in calls.items():
            order = (0, 1) if index % 2 else (1, 0)  # neither always finds the caches warm
            taken = {which: timed(pair[which], image, arguments.repeat) for which in order}
            alone, with_rows = taken[0], taken[1]
            if index >= 3:  # the first ones warm up
                times[contestant].append((alone, with_rows))
    for contestant, pairs in times.items():
        alone = statistics.median(pair[0] for pair in pairs)
        with_rows = statistics.median(pair[1] for pair in pairs)
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        best = min(pair[1] for pair in pairs) / min(pair[0] for pair in pairs)
        own = statistics.median(theirs[1] / ours[1] for theirs, ours in zip(pairs, times["patchlight"], strict=True))
        print(
            f"  {name:5} {contestant:13} forward {1000 * alone:9.2f} ms   with class rows {1000 * with_rows:9.2f} ms"
            f"   x {ratio:.3f} its own forward (best rounds: x {best:.3f})   x {own:.2f} ours"
        )


def timed(call: Call, image: torch.Tensor, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call(image)
    if image.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeat


def make_image(arguments: argparse.Namespace, size: int) -> torch.Tensor:
    dtype = getattr(torch, arguments.dtype)
    return torch.randn(arguments.batch, 3, size, size, device=arguments.device, dtype=dtype)


def measure_memory(name: str, contestant: str, which: str, arguments: argparse.Namespace) -> None:
    """Print the peak in MiB over what the weights and the image take; in a process of its own, on the CPU by RSS."""
    model, alone, with_rows = CONTESTANTS[contestant](name, arguments.memory)
    model.eval().to(arguments.device, getattr(torch, arguments.dtype))
    image, call = make_image(arguments, arguments.memory), alone if which == "alone" else with_rows
    if arguments.device == "cuda":
        before = torch.cuda.memory_allocated()
        call(image)
        print((torch.cuda.max_memory_allocated() - before) / 2**20)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far (Linux)
        before = resident("VmRSS")
        call(image)
        print((resident("VmHWM") - before) / 2**10)


def resident(which: str) -> int:
    """KiB of memory held now (VmRSS), or at the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which))


def compare_memory(name: str, arguments: argparse.Namespace) -> None:
    peaks = {}
    for contestant in CONTESTANTS:
        for which in ("alone", "rows"):
            command = [sys.executable, __file__, name, "--device", arguments.device, "--dtype", arguments.dtype]
            command += ["--memory", str(arguments.memory), "--batch", str(arguments.batch), "--one", contestant, which]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"  {contestant} left out: {done.stderr.strip().splitlines()[-1]}")
                break
            peaks[contestant, which] = float(done.stdout.split()[-1])
    for contestant in CONTESTANTS:
        if (contestant, "rows") in peaks:
            alone, rows = peaks[contestant, "alone"], peaks[contestant, "rows"]
            print(
                f"  {name:5} {contestant:13} peak beyond weights: forward {alone:9,.0f} MiB   with all class rows "
                f"{rows:9,.0f} MiB   x {rows / peaks['patchlight', 'rows']:.1f} ours"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["S/16", "B/16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=1, help="calls in a round")
    parser.add_argument("--compile", action="store_true", help="torch.compile every call")
    parser.add_argument("--memory", type=int, metavar="PIXELS", help="measure peak memory at this image size")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with torch.inference_mode():
        if arguments.one:
            measure_memory(arguments.models[0], *arguments.one, arguments)
            return
        where = (
            torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        )
        how = ", compiled" if arguments.compile else ""
        print(f"{where}, torch {torch.__version__}, {arguments.dtype}, batch {arguments.batch}{how}")
        for name in arguments.models:
            (compare_memory if arguments.memory else measure_time)(name, arguments)


if __name__ == "__main__":
    main()
