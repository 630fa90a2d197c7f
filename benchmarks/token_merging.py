"""What merging tokens at inference costs and saves: answers beside those of the same model without it, and the speed.

    python benchmarks/token_merging.py                                   # the default model on ../shared/data/localize
    python benchmarks/token_merging.py --photos 30 --rates 0 8 16
    python benchmarks/token_merging.py --device cuda --dtype bfloat16 --batch 256 --speed S/16 B/16 L/16

For each r (pairs of patches that are joined after each block): the tokens that the last block has, the share of photos
whose class is right and whose subject's box is found (CorLoc, an overlap of 0.5 or more), the mean overlap, the cosine
between the class token's features with and without merging (the mean, and the worst photo), and images per second.
Merged maps of the subject are spread back over the patches that each token holds. With `--speed`, models with fresh
weights at 224 pixels are timed, too. Rounds are interleaved, so that a machine that slows down slows all alike; the
median round counts. Classes are those of pets, birds and deer in the photos' names, out of all that the model knows.
"""

import argparse
import json
import math
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import patchlight as pl
from patchlight.images.decode import decode
from patchlight.localizing.detector import Detector
from patchlight.models.attention import Heads
from patchlight.models.merging import Merged, MergingViT

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def label_of(source: str, labels: tuple[str, ...]) -> int | None:
    """The class that a photo's name tells: pets/Abyssinian_21.jpg is pet/Abyssinian."""
    kind, _, name = source.partition("/")
    name = re.sub(r"(_\d+)+\.jpg$", "", name)
    for index, label in enumerate(labels):
        if kind == "pets" and label == f"pet/{name}":
            return index
        if kind == "cub" and label.startswith("bird/") and label.partition(".")[2] == name:
            return index
        if kind == "deer" and label == "wild/deer":
            return index
    return None


def rows_of(folder: Path, a_source: int | None) -> list[dict[str, Any]]:
    """The photos of boxes.json, of each source at most this many."""
    rows = json.loads((folder / "boxes.json").read_text())
    seen: dict[str, int] = {}
    chosen = []
    for row in rows:
        kind = row["source"].split("/")[0]
        seen[kind] = seen.get(kind, 0) + 1
        if a_source is None or seen[kind] <= a_source:
            chosen.append(row)
    return chosen


@torch.inference_mode()
def answers(loaded: pl.Loaded, r: int, images_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """logits_BK, the class token's features_BD, the subject's heat_Bhw, and how many tokens the last block had."""
    merging, vit = MergingViT(loaded.model, r), loaded.model
    prefix, scores = vit.config.num_prefix, []

    def keep(index: int, heads: Heads, merged: Merged) -> None:
        if index == vit.config.depth - 1:
            products_BAn = torch.einsum("bae,bane->ban", heads.q_BANE[:, :, 0].float(), heads.k_BANE.float())
            scores.append((merged.spread(products_BAn.mean(1)), merged.x_BnD.shape[1]))

    merged = merging.encode(images_BCHW, keep)
    (score_BN, tokens), subject = scores[0], loaded.subject
    assert subject is not None
    heat_BN = torch.sigmoid(subject.scale * score_BN / math.sqrt(vit.config.head_width) + subject.bias)
    heat_Bhw = heat_BN[:, prefix:].unflatten(1, merged.geometry.grid)
    return vit.read(merged.x_BnD, merged.geometry).float(), merged.x_BnD[:, 0].float(), heat_Bhw, tokens


def quality(loaded: pl.Loaded, folder: Path, rows: list[dict[str, Any]], rates: list[int], batch: int) -> None:
    print(f"{len(rows)} photos of {folder}")
    print(f"{'r':>3} {'tokens':>6} {'accuracy':>9} {'CorLoc':>7} {'IoU':>6} {'cosine':>7} {'worst':>6}")
    weight = loaded.model.norm.weight
    parts = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        prepared = [loaded.preprocess(decode(folder / row["file"]).image) for row in part]
        images_BCHW = torch.stack([image_CHW for image_CHW, _ in prepared]).to(weight)
        parts.append((part, images_BCHW, [view for _, view in prepared]))
    plain: list[Tensor] = []
    detector = Detector.of(loaded, "subject")
    for r in rates:
        right, overlaps, cosines, tokens = [], [], [], 0
        for number, (part, images_BCHW, views) in enumerate(parts):
            logits_BK, features_BD, heat_Bhw, tokens = answers(loaded, r, images_BCHW)
            if r == rates[0]:
                plain.append(features_BD)
            cosines += F.cosine_similarity(features_BD, plain[number]).tolist()
            found = detector.judge(heat_Bhw, views)
            for row, localization, answer in zip(part, found, logits_BK.argmax(1).tolist(), strict=True):
                box = localization.subjects[0].box if localization.subjects else None
                overlaps.append(0.0 if box is None else box.iou(pl.Box(*row["box"])))
                label = label_of(row["source"], loaded.labels or ())
                if label is not None:
                    right.append(answer == label)
        accuracy = sum(right) / max(1, len(right))
        corloc = sum(overlap >= 0.5 for overlap in overlaps) / len(overlaps)
        print(
            f"{r:3} {tokens:6} {accuracy:9.1%} {corloc:7.1%} {statistics.mean(overlaps):6.3f} "
            f"{statistics.mean(cosines):7.4f} {min(cosines):6.3f}",
            flush=True,
        )


@torch.inference_mode()
def speed(name: str, vit: pl.ViT, rates: list[int], batch: int, rounds: int) -> None:
    weight = vit.norm.weight
    images_BCHW = torch.randn(batch, 3, *vit.config.image_size).to(weight)
    models: dict[str, torch.nn.Module] = {"plain": vit} | {f"r={r}": MergingViT(vit, r) for r in rates if r}
    times: dict[str, list[float]] = {each: [] for each in models}
    for turn in range(rounds + 2):
        for each, model in models.items():
            began = time.perf_counter()
            model(images_BCHW)
            if weight.is_cuda:
                torch.cuda.synchronize()
            if turn >= 2:  # the first ones warm up
                times[each].append(time.perf_counter() - began)
    medians = {each: statistics.median(seconds) for each, seconds in times.items()}
    print(f"{name}: images/s, and times as many as without merging")
    for each, seconds in medians.items():
        print(f"  {each:6} {batch / seconds:9.1f} {medians['plain'] / seconds:5.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="one that was taught to find subjects")
    parser.add_argument("--data", type=Path, default=SHARED / "localize", help="photos with boxes.json")
    parser.add_argument("--photos", type=int, help="of each source at most")
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 4, 8, 12, 16, 20])
    parser.add_argument("--speed", nargs="*", default=[], help="fresh models to time, such as S/16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    rates = sorted({0, *arguments.rates})
    dtype = getattr(torch, arguments.dtype)

    loaded = pl.load(arguments.model, device=arguments.device, dtype=dtype)
    print(
        f"{arguments.model}, torch {torch.__version__}, {arguments.device}, {arguments.dtype}, batch {arguments.batch}"
    )
    if arguments.data.exists():
        quality(loaded, arguments.data, rows_of(arguments.data, arguments.photos), rates, arguments.batch)
    else:
        print(f"{arguments.data} is not here: only the speed is measured")
    speed(arguments.model, loaded.model, rates, arguments.batch, arguments.rounds)
    for name in arguments.speed:
        vit = pl.ViT(pl.variant(name)).to(arguments.device, dtype).eval()
        speed(name, vit, rates, arguments.batch, arguments.rounds)


if __name__ == "__main__":
    main()
