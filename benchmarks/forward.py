"""Forward passes beside the peers': images per second, and the ratio to the best of them, in one run.

    python benchmarks/forward.py                      # ViT-S/16 and B/16 on the CPU, float32, batch 1
    python benchmarks/forward.py --device cuda --dtype bfloat16 --batch 256 --compile max-autotune

Rounds of all contestants are interleaved, so that a machine that slows down slows all alike; the median round counts.
Peers that do not import here are left out by name.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracles


def contestants(name: str) -> dict[str, Callable[[], torch.nn.Module]]:
    config = variant(name)

    def timm_vit() -> torch.nn.Module:
        size = {"Ti": "tiny", "S": "small", "B": "base", "L": "large"}[name.split("/")[0]]
        return oracles.timm().create_model(f"vit_{size}_patch{config.patch_size[0]}_224")

    def transformers_vit() -> torch.nn.Module:
        transformers = oracles.transformers()
        settings = transformers.ViTConfig(
            hidden_size=config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_width,
            patch_size=config.patch_size[0],
            num_labels=config.num_classes,
        )
        return transformers.ViTForImageClassification(settings)

    return {"patchlight": lambda: ViT(config), "timm": timm_vit, "transformers": transformers_vit}


def seconds_per_round(models: dict[str, torch.nn.Module], image: torch.Tensor, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in models}
    for index in range(rounds + 3):
        for name, model in models.items():
            start = time.perf_counter()
            model(image)
            if image.is_cuda:
                torch.cuda.synchronize()
            if index >= 3:  # the first ones warm up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["S/16", "B/16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile", metavar="MODE", help="torch.compile every contestant: default, max-autotune, ...")
    arguments = parser.parse_args()

    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    how = f"compiled ({arguments.compile})" if arguments.compile else "eager"
    print(f"{where}, torch {torch.__version__}, {arguments.dtype}, batch {arguments.batch}, {how}")
    for name in arguments.models:
        models: dict[str, torch.nn.Module] = {}
        for contestant, make in contestants(name).items():
            try:
                model = make().eval().to(arguments.device, getattr(torch, arguments.dtype))
            except oracles.Absent as absent:
                print(f"  {contestant} left out: {absent}")
                continue
            models[contestant] = torch.compile(model, mode=arguments.compile) if arguments.compile else model
        image = torch.randn(
            arguments.batch, 3, 224, 224, device=arguments.device, dtype=getattr(torch, arguments.dtype)
        )
        with torch.inference_mode():
            seconds = seconds_per_round(models, image, arguments.rounds)
        for contestant, each in seconds.items():
            print(f"  {name:5} {contestant:13} {arguments.batch / each:10,.1f} images/s {1000 * each:9.2f} ms")
        peers = [each for contestant, each in seconds.items() if contestant != "patchlight"]
        if peers:
            print(f"  {name:5} patchlight is {min(peers) / seconds['patchlight']:.2f} times the best peer")


if __name__ == "__main__":
    main()
