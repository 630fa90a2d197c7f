"""Which maps of a model can be trusted: faithfulness and localisation of each kind, in one table.

    python benchmarks/explain.py MODEL                # a folder, a checkpoint file, or a name that `load` takes
    python benchmarks/explain.py MODEL --photos ../shared/data/localize --limit 100 --device cuda

Faithfulness is measured on the photos as the model sees them: the areas under the deletion curve (lower is better) and
the insertion curve (higher is better), their difference, and its standard error over the photos. All maps are judged by
the model itself, that with test-time registers too.

Localisation is one simple rule for all maps: the box around the largest region of patches above the map's mean, against
the box in boxes.json. CorLoc is the share of photos where they overlap by half or more (intersection over union), IoU
the mean overlap. Off-centre photos are the same, cropped on two sides so that the subject lies in a corner, the four
corners in turn: a map that owes its boxes to subjects being in the middle falls there, as the blob in the centre does.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

import patchlight as pl
from patchlight.explain.artifacts import artifact_patches, suppress
from patchlight.explain.attention import AttentionMaps, attention
from patchlight.explain.faithfulness import faithfulness
from patchlight.explain.probes import largest_region, objectness, token_norms
from patchlight.explain.registers import add_registers, register_neurons
from patchlight.explain.rollout import attribution, rollout
from patchlight.images.preprocess import Preprocess

CORNERS = ("top left", "top right", "bottom left", "bottom right")
MARGIN = 0.04
"""How far from the corner an off-centre subject may lie, as a share of the frame."""

PHOTOS_FOR_NEURONS = 16

Map = Callable[[Tensor], Tensor]
"""image_BCHW of one photo to heat_Bhw."""


def kinds_of_maps(model: pl.ViT, few_BCHW: Tensor) -> tuple[dict[str, Map], list[str]]:
    """Each kind by name, and what was left out and why."""
    kinds: dict[str, Map] = {}
    left_out: list[str] = []
    if model.config.class_token:
        kinds["class token, mean of heads"] = lambda image: class_heat(model, image).mean(1)
        kinds["class token, best head by objectness"] = lambda image: best_head(class_heat(model, image))
        kinds["class token, outliers suppressed"] = lambda image: suppressed(model, image)
        try:
            with_registers = add_registers(model, few_BCHW)
        except pl.PatchlightError as error:
            left_out.append(f"test-time registers: {error}")
        else:
            moved = len(register_neurons(with_registers))
            kinds[f"class token, test-time register ({moved} neurons)"] = lambda image: class_heat(
                with_registers, image
            ).mean(1)
    else:
        left_out.append("maps of the class token: the model has none")
    for fusion in ("mean", "max"):
        for discard in (0.0, 0.9):
            kinds[f"rollout, {fusion} of heads" + (f", {discard:.0%} discarded" if discard else "")] = (
                lambda image, fusion=fusion, discard=discard: rollout(model, image, fusion=fusion, discard=discard)
            )
    if model.head is not None:
        kinds["attribution by gradients"] = lambda image: attribution(model, image)
    else:
        left_out.append("attribution by gradients: the model has no head")
    noise = torch.Generator().manual_seed(0)
    kinds["random"] = lambda image: torch.rand(1, *model.config.grid_for(size_of(image)), generator=noise)
    kinds["blob in the centre"] = lambda image: centre_blob(*model.config.grid_for(size_of(image)))
    return kinds, left_out


def class_heat(model: pl.ViT, image_BCHW: Tensor) -> Tensor:
    """What the class token attends to in the last block, head by head: (B, A, h, w)."""
    maps: AttentionMaps = attention(model, image_BCHW, layers=-1, queries="cls")
    return maps.heat()[0, :, :, 0]


def best_head(heat_BAhw: Tensor) -> Tensor:
    best_B = objectness(heat_BAhw).argmax(1)
    return heat_BAhw[torch.arange(len(heat_BAhw), device=heat_BAhw.device), best_B]


def suppressed(model: pl.ViT, image_BCHW: Tensor) -> Tensor:
    heat_Bhw = class_heat(model, image_BCHW).mean(1)
    outliers_BP = artifact_patches(token_norms(model, image_BCHW), model.config.num_prefix)
    return suppress(heat_Bhw, outliers_BP.view_as(heat_Bhw))


def centre_blob(height: int, width: int) -> Tensor:
    down, across = ((torch.arange(side) + 0.5) / side - 0.5 for side in (height, width))
    return (-8 * (down[:, None] ** 2 + across**2)).exp()[None]


def box_of(heat_hw: Tensor, patch_size: tuple[float, float], view: pl.View) -> pl.Box:
    """The box around the largest region above the mean, in the photo's pixels; all that the model sees if none is."""
    rows, columns = largest_region(heat_hw > heat_hw.mean(), heat_hw).nonzero().unbind(1)
    if len(rows) == 0:
        return view.seen
    (down, across), ends = patch_size, (int(rows.max()) + 1, int(columns.max()) + 1)
    return view.to_source(pl.Box(int(columns.min()) * across, int(rows.min()) * down, ends[1] * across, ends[0] * down))


def off_centre(photo: Image.Image, box: pl.Box, corner: str) -> tuple[Image.Image, pl.Box]:
    """The photo cropped on two sides so that the box lies within MARGIN of this corner, and the box in it."""

    # The cut c from the near side solves (box - c) = MARGIN * (side - c).
    def cut(distance: float, side: int) -> int:
        return max(0, math.ceil((distance - MARGIN * side) / (1 - MARGIN)))

    width, height = photo.size
    left = cut(box.left, width) if "left" in corner else 0
    right = width - (cut(width - box.right, width) if "right" in corner else 0)
    top = cut(box.top, height) if "top" in corner else 0
    bottom = height - (cut(height - box.bottom, height) if "bottom" in corner else 0)
    # Rounding the cut up must not take a part of the subject with it.
    left, top = min(left, math.floor(box.left)), min(top, math.floor(box.top))
    right, bottom = max(right, math.ceil(box.right)), max(bottom, math.ceil(box.bottom))
    moved = pl.Box(box.left - left, box.top - top, box.right - left, box.bottom - top)
    return photo.crop((left, top, right, bottom)), moved


def size_of(image_BCHW: Tensor) -> tuple[int, int]:
    return image_BCHW.shape[-2], image_BCHW.shape[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--photos", type=Path, default=Path(__file__).parents[2] / "shared/data/localize")
    parser.add_argument("--limit", type=int, default=100, help="photos, taken evenly from the list")
    parser.add_argument("--steps", type=int, default=16, help="of the deletion and insertion curves")
    parser.add_argument("--baseline", default="blur", choices=["blur", "mean"])
    parser.add_argument("--squash", action="store_true", help="show the model the whole photo, squashed, not its crop")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    console = Console(stderr=True)

    loaded = pl.load(arguments.model, device=arguments.device)
    model, preprocess = loaded.model, loaded.preprocess
    if arguments.squash:
        whole = dataclasses.replace(preprocess.config, resize="squash", crop_pct=1.0, resize_size=None)
        preprocess = Preprocess(whole)
    rows = json.loads((arguments.photos / "boxes.json").read_text())
    limit = min(arguments.limit, len(rows))
    rows = [rows[index * len(rows) // limit] for index in range(limit)]

    def prepared(photo: Image.Image) -> tuple[Tensor, pl.View]:
        image_CHW, view = preprocess(photo)
        return image_CHW[None].to(arguments.device), view

    photos = [pl.decode(arguments.photos / row["file"]).image for row in rows]
    few = [prepared(photo)[0] for photo in photos[:: max(1, limit // PHOTOS_FOR_NEURONS)][:PHOTOS_FOR_NEURONS]]
    few = [image for image in few if image.shape == few[0].shape]  # crop="none" gives images of different sizes
    kinds, left_out = kinds_of_maps(model, torch.cat(few))
    figures: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in kinds}
    for index, (row, photo) in enumerate(
        track(list(zip(rows, photos, strict=True)), "photos", console=console, transient=True)
    ):
        box = pl.Box(*row["box"])
        cornered = off_centre(photo, box, CORNERS[index % 4])
        for where, (shown, subject) in {"centred": (photo, box), "off-centre": cornered}.items():
            image_BCHW, view = prepared(shown)
            patch_size = model.config.patch_pixels(size_of(image_BCHW))
            for name, kind in kinds.items():
                heat_Bhw = kind(image_BCHW).float().to(arguments.device)
                overlap = box_of(heat_Bhw[0].cpu(), patch_size, view).iou(subject)
                figures[name][f"{where} overlap"].append(overlap)
                if where == "centred":
                    curves = faithfulness(
                        model, image_BCHW, heat_Bhw, steps=arguments.steps, baseline=arguments.baseline
                    )
                    figures[name]["deletion"].append(curves.deletion_area.item())
                    figures[name]["insertion"].append(curves.insertion_area.item())

    followed = "the likeliest class's probability" if model.head is not None else "the features' cosine similarity"
    print(f"{arguments.model}, {limit} photos of {arguments.photos}, {arguments.steps} steps on {followed}")
    print(f"{'':45} {'faithfulness':^36} {'centred':^14} {'off-centre':^14}")
    print(f"{'map':45} {'deletion':>8} {'insertion':>9} {'difference':>17} " + f"{'CorLoc':>7} {'IoU':>6} " * 2)
    for name, figure in figures.items():
        deletion, insertion = (torch.tensor(figure[curve]) for curve in ("deletion", "insertion"))
        score = insertion - deletion
        error = score.std().item() / math.sqrt(limit) if limit > 1 else math.nan
        line = f"{name:45} {deletion.mean():8.3f} {insertion.mean():9.3f} {score.mean():8.3f} +-{error:6.3f} "
        for where in ("centred", "off-centre"):
            overlaps = torch.tensor(figure[f"{where} overlap"])
            line += f"{(overlaps >= 0.5).float().mean():7.1%} {overlaps.mean():6.3f} "
        print(line.rstrip())
    for remark in left_out:
        print(f"left out: {remark}")


if __name__ == "__main__":
    sys.exit(main())
