"""Loading a ViT-L checkpoint beside the peers' loaders: seconds and peak memory, and the ratios, in one run.

    python benchmarks/load.py            # makes the checkpoints itself, in a temporary folder

Each load runs in a process of its own, several rounds of all in turn; what importing the library takes and holds is
measured without a load and taken off. A load ends when every parameter can be read: its numbers are summed up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

PROLOGUE = """
import json, re, sys, time
sys.path[:0] = {paths!r}
import torch
{imports}
def peak():  # of this process alone: getrusage would tell the parent's too
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before, start = peak(), time.perf_counter()
{load}
total = sum(parameter.sum().item() for parameter in model.parameters())
print(json.dumps(dict(seconds=time.perf_counter() - start, peak=peak() - before, total=total)))
"""

CONTESTANTS = {
    "patchlight, timm's file": ("from patchlight.weights.load import load", "model = load({timm!r}).model"),
    "timm": (
        "import oracles; timm = oracles.timm()",
        "model = timm.create_model('local-dir:' + {timm!r}, pretrained=True).eval()",
    ),
    "patchlight, transformers' file": (
        "from patchlight.weights.load import load",
        "model = load({transformers!r}).model",
    ),
    "transformers": (
        "import oracles; transformers = oracles.transformers(); from transformers import ViTForImageClassification",
        "model = ViTForImageClassification.from_pretrained({transformers!r}).eval()",
    ),
}


def measure(imports: str, load: str) -> dict[str, float]:
    code = PROLOGUE.format(paths=[str(ROOT / "tests"), str(ROOT)], imports=imports, load=load)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="L/16")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    from patchlight import ViT, save, variant

    with tempfile.TemporaryDirectory() as folder:
        model = ViT(variant(arguments.variant))
        folders = {
            layout: str(save(model, Path(folder) / layout, layout=layout)) for layout in ("timm", "transformers")
        }
        for layout in folders.values():  # as the peers would have written it, without our own settings
            config = json.loads((Path(layout) / "config.json").read_text())
            del config["patchlight"]
            (Path(layout) / "config.json").write_text(json.dumps(config))
        size = (Path(folders["timm"]) / "model.safetensors").stat().st_size
        print(f"{arguments.variant}, {size / 1e6:,.0f} MB, {arguments.rounds} rounds, the median")
        results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(arguments.rounds):
            for name, (imports, load) in CONTESTANTS.items():
                results[name].append(measure(imports, load.format(**folders)))
    seconds = {name: statistics.median(run["seconds"] for run in runs) for name, runs in results.items()}
    peaks = {name: statistics.median(run["peak"] for run in runs) for name, runs in results.items()}
    for name in CONTESTANTS:
        print(f"  {name:31} {seconds[name]:6.2f} s   peak {peaks[name] / size:5.2f} times the file")
    totals = {run["total"] for runs in results.values() for run in runs}
    print(f"  the sums of all weights agree to {max(totals) - min(totals):.1e}")
    for peer, ours in (("timm", "patchlight, timm's file"), ("transformers", "patchlight, transformers' file")):
        time, memory = seconds[ours] / seconds[peer], peaks[ours] / peaks[peer]
        print(f"  patchlight takes {time:.2f} of {peer}'s time and {memory:.2f} of its memory")


if __name__ == "__main__":
    main()
