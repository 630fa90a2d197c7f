"""What packing images of different sizes saves beside padding them: tokens, seconds, and the same answers.

    python benchmarks/packing.py                                              # Ti/16 on the CPU, 32 images
    python benchmarks/packing.py --device cuda --dtype bfloat16 --model B/16 --images 256

Images are photos of the usual aspect ratios (3:2, 2:3, 4:3, 3:4, 16:9, 1:1) of at most `--side` pixels, either all as
large as that allows, or from half that size up. `tokens` counts all that the blocks compute on, `filled` the share of
them that are of an image. Contestants: one by one; padded to the largest, with `sizes`; packed into rows as long as the
largest image, and 2 and 4 times as long. Rounds are interleaved and the median counts.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import patchlight as pl
from patchlight.models.packing import packed, plan_rows

ASPECTS = ((3, 2), (2, 3), (4, 3), (3, 4), (16, 9), (1, 1))


def sizes_of(count: int, side: int, patch: int, smallest: float) -> list[tuple[int, int]]:
    """(height, width) of photos, in whole patches; their longer side is from `smallest` times `side` to `side`."""
    draw = random.Random(0)
    sizes = []
    for _ in range(count):
        wide, high = draw.choice(ASPECTS)
        longer = side * draw.uniform(smallest, 1)
        height, width = (longer * part / max(wide, high) for part in (high, wide))
        sizes.append((max(1, round(height / patch)) * patch, max(1, round(width / patch)) * patch))
    return sizes


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Ti/16")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    vit = pl.ViT(pl.variant(arguments.model)).to(arguments.device, dtype).eval()
    patch, prefix = vit.config.patch_size[0], vit.config.num_prefix
    print(f"{arguments.model}, {arguments.images} images, torch {torch.__version__}, {arguments.device}, {dtype}")

    for title, smallest in (("all of one longer side", 1.0), ("from half the side up", 0.5)):
        sizes = sizes_of(arguments.images, arguments.side, patch, smallest)
        images = [torch.randn(3, *size).to(vit.norm.weight) for size in sizes]
        height, width = max(h for h, _ in sizes), max(w for _, w in sizes)
        together = torch.zeros(len(images), 3, height, width).to(vit.norm.weight)
        for place, image in zip(together, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
        lengths = [prefix + h * w // patch**2 for h, w in sizes]
        longest, needed = max(lengths), sum(lengths)
        padded = len(images) * (prefix + height * width // patch**2)

        def one_by_one(images: list[Tensor] = images) -> Tensor:
            return torch.cat([vit(image[None]) for image in images])

        def with_padding(together: Tensor = together, sizes: list[tuple[int, int]] = sizes) -> Tensor:
            return vit(together, sizes=sizes)

        contestants: dict[str, tuple[int, Callable[[], Tensor]]] = {
            "one by one": (needed, one_by_one),
            "padded": (padded, with_padding),
        }
        for times in (1, 2, 4):
            rows = plan_rows(lengths, times * longest)
            tokens = len(rows) * max(row.tokens for row in rows)

            def in_rows(images: list[Tensor] = images, most: int = times * longest) -> Tensor:
                return packed(vit, images, most)

            contestants[f"packed x{times}"] = (tokens, in_rows)

        expected, seconds = one_by_one(), {name: list[float]() for name in contestants}
        for turn in range(arguments.rounds + 1):
            for name, (_, run) in contestants.items():
                began = time.perf_counter()
                result = run()
                if result.is_cuda:
                    torch.cuda.synchronize()
                if turn:  # the first one warms up
                    seconds[name].append(time.perf_counter() - began)
                difference = float((result - expected).abs().max() / expected.abs().max())
                assert difference < (1e-3 if dtype == torch.float32 else 0.1), (name, difference)
        print(f"{title}: {needed:,} tokens of images")
        for name, (tokens, _) in contestants.items():
            median = statistics.median(seconds[name])
            rate, ratio = len(images) / median, statistics.median(seconds["padded"]) / median
            print(f"  {name:10} {tokens:7,} tokens  filled {needed / tokens:4.0%}  {rate:8.1f} images/s  {ratio:5.2f}x")


if __name__ == "__main__":
    main()
