"""Every family at comparable size: parameters, multiply-adds, tokens and latency, and how they grow with the image.

    python benchmarks/families.py                                        # counts, and what was measured before
    python benchmarks/families.py --device cpu --write benchmarks/families.json
    PYTHONPATH=$PWD python benchmarks/families.py --device cuda --write benchmarks/families.json   # needs torch alone
    python benchmarks/families.py --report                               # the table and the picture in docs/

Counts come from running each model on the meta device, so that they are the same everywhere. Latency is measured where
`--device` says and kept in a file, one entry a device. On the CPU it is the time that one thread spent computing, which
others who work on the machine lengthen far less than the time on the clock. Rounds of all families are interleaved, so
that a machine that slows down slows all alike.
"""

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from patchlight.costing import Costs, costs
from patchlight.families import ModelConfig, variant
from patchlight.models.families import make_model

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "families.md"
PICTURE = ROOT / "docs" / "pictures" / "families.png"
SIZES = (224, 448, 896)
DRAWN = (224, 320, 448, 640, 896)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT-S/16": ("S/16", {}),
    "DeiT-S/16, distilled": ("S/16", {"distill_token": True}),
    "ViT-S/16, RoPE": ("S/16", {"position": "rope2d"}),
    "R26 + ViT-S/32": ("S/32", {"resnet": (2, 2, 2, 2)}),
    "Swin-T": ("swin-T", {}),
    "ConvNeXt-T": ("convnext-T", {}),
    "ConvNeXt V2-T": ("convnextv2-T", {}),
}
"""A family more is a row more."""


def config_of(name: str, side: int) -> ModelConfig:
    base, changes = FAMILIES[name]
    return variant(base, image_size=side, **changes)


def count(sides: tuple[int, ...]) -> dict[str, dict[int, Costs]]:
    return {name: {side: costs(config_of(name, side)) for side in sides} for name in FAMILIES}


@torch.inference_mode()
def measure(device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a forward pass of one image and, on a GPU, images per second in batches; random weights."""
    cuda = device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    clock = time.perf_counter if cuda else time.process_time
    if not cuda:
        torch.set_num_threads(1)
    batches = {224: (1, 64), 448: (1, 32), 896: (1, 8)} if cuda else dict.fromkeys(SIZES, (1,))
    rows: list[dict[str, Any]] = []
    for side in SIZES:
        models = {name: make_model(config_of(name, side)).eval().to(device, dtype) for name in FAMILIES}
        for batch in batches[side]:
            image_BCHW = torch.randn(batch, 3, side, side, device=device, dtype=dtype)
            times: dict[str, list[float]] = {name: [] for name in models}
            warm_up = 3 if cuda else 1
            for index in range(rounds + warm_up):
                for name, model in models.items():
                    start = clock()
                    model(image_BCHW)
                    if cuda:
                        torch.cuda.synchronize()
                    if index >= warm_up:
                        times[name].append(clock() - start)
            for name, each in times.items():
                row = {
                    "family": name,
                    "side": side,
                    "batch": batch,
                    "median_ms": round(1000 * statistics.median(each), 3),
                    "fastest_ms": round(1000 * min(each), 3),
                }
                rows.append(row)
                print(f"{side:4} px  batch {batch:3}  {name:22} {row['median_ms']:10.2f} ms", flush=True)
    where = torch.cuda.get_device_name(device) if cuda else "one thread of the CPU"
    return {"machine": where, "torch": torch.__version__, "dtype": str(dtype).removeprefix("torch."), "rows": rows}


def read_stored(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def found(stored: dict[str, Any], device: str, family: str, side: int, *, batched: bool) -> dict[str, Any] | None:
    rows = [row for row in stored.get(device, {}).get("rows", []) if (row["family"], row["side"]) == (family, side)]
    rows = [row for row in rows if (row["batch"] > 1) == batched]
    return rows[0] if rows else None


def table(counted: dict[str, dict[int, Costs]], stored: dict[str, Any]) -> str:
    """In Markdown. On the CPU the fastest round counts; on the GPU the median."""
    measured = any(
        found(stored, "cuda", name, side, batched=batched)
        for name in counted
        for side in SIZES
        for batched in (False, True)
    )
    titles = ["", "pixels", "M parameters", "GMACs", "times 224 px", "tokens", "CPU, ms"]
    titles += ["GPU, ms", "GPU, images/s"] if measured else []
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, by_side in counted.items():
        for side in SIZES:
            cost, shown = by_side[side], name if side == SIZES[0] else ""
            cpu = found(stored, "cpu", name, side, batched=False)
            gpu = found(stored, "cuda", name, side, batched=False)
            many = found(stored, "cuda", name, side, batched=True)
            cells = [shown, str(side), f"{cost.parameters / 1e6:.1f}", f"{cost.macs / 1e9:.2f}"]
            cells += [f"{cost.macs / by_side[SIZES[0]].macs:.1f}", f"{cost.tokens:,}"]
            cells += ["" if cpu is None else f"{cpu['fastest_ms']:,.0f}"]
            if measured:
                cells += ["" if gpu is None else f"{gpu['median_ms']:.2f}"]
                cells += ["" if many is None else f"{1000 * many['batch'] / many['median_ms']:,.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(stored: dict[str, Any]) -> None:
    """Write the table into the page, between its marks, and draw the picture."""
    from patchlight.explain import plot

    counted = count(DRAWN)
    page = PAGE.read_text()
    machines = "; ".join(
        f"{'GPU' if device == 'cuda' else 'CPU'}: {each['machine']}, {each['dtype']}, torch {each['torch']}"
        for device, each in stored.items()
    )
    inside = f"<!-- table -->\n{table(counted, stored)}\n\n{machines or 'Nothing has been timed yet.'}\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- table -->.*<!-- end -->", lambda _: inside, page, flags=re.DOTALL))
    figure = plot.new_figure(plot.WIDTH, 3.4)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    shown = ("ViT-S/16", "Swin-T", "ConvNeXt-T")  # the others would hide behind these
    macs = {name: {side: cost.macs / 1e9 for side, cost in counted[name].items()} for name in shown}
    plot.draw_growth(macs, left)
    device = "cuda" if "cuda" in stored else "cpu"
    key = "median_ms" if device == "cuda" else "fastest_ms"
    latencies: dict[str, dict[int, float]] = {}
    for name in shown:
        rows = {side: found(stored, device, name, side, batched=device == "cuda") for side in SIZES}
        latencies[name] = {side: row[key] / row["batch"] for side, row in rows.items() if row is not None}
    plot.draw_growth(latencies, right, f"ms for one image ({'GPU, in batches' if device == 'cuda' else 'CPU'})")
    PICTURE.write_bytes(plot.to_png(figure))
    print(f"{PAGE}\n{PICTURE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="measure here: cpu, cuda")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep what was measured in this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stored", type=Path, default=STORED, metavar="FILE", help="what was measured before")
    parser.add_argument("--report", action="store_true", help="write docs/families.md's table and picture")
    arguments = parser.parse_args()
    if arguments.device:
        measured = {arguments.device.partition(":")[0]: measure(arguments.device, arguments.rounds)}
        if arguments.write:
            arguments.write.write_text(json.dumps(read_stored(arguments.write) | measured, indent=1) + "\n")
            print(arguments.write)
        return
    stored = read_stored(arguments.stored)
    if arguments.report:
        report(stored)
    else:
        print(table(count(SIZES), stored))


if __name__ == "__main__":
    main()
