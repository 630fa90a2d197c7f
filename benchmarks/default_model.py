"""How well a model finds subjects, and how good its features are: the figures that the default model is judged by.

    python benchmarks/default_model.py MODEL           # a folder, a checkpoint file, or a name that `load` takes
    python benchmarks/default_model.py MODEL --photos 100 --methods subject tokencut --held-out 0
    python benchmarks/default_model.py MODEL --triage [--tiny-imagenet FOLDER]

Localisation: the box that each method finds first, against the subject's box in boxes.json. `.5` and `.7` are CorLoc,
the share of photos where the two overlap by that much (intersection over union), `IoU` is the mean overlap. Off-centre
photos are the same, cropped on two sides so that the subject's whole box lies within 4 % of one corner, the four
corners in turn. Beside them stand boxes that look at nothing: the whole photo, and its middle with 0.7 of either side.

Features: the share of 1,000 held-out training photos (of ../shared/data/photos, 360 classes) that their 20 nearest
neighbours among the other training photos name right.

Triage, alone: what the model says that photos show (animal, thing, vehicle, or unknown where no group has half of the
probability), and how often its finest name is right. On the photos with boxes, which are all of animals, on the same
1,000 held-out training photos, and, where its folder is given, on validation photos of Tiny-ImageNet-200, of whose
training photos the model was shown 34,000. What is true is in recipes/default_groups.csv.

Needs torch, numpy, Pillow and safetensors only; takes a GPU where there is one.
"""

import argparse
import json
import math
import os
import random
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

import patchlight as pl
from patchlight.images.decode import decode
from patchlight.localizing.detector import Detector
from patchlight.localizing.heat import HeatPass
from patchlight.weights.groups import UNKNOWN, Named, read_groups

CORNERS = ("top left", "top right", "bottom left", "bottom right")
MARGIN = 0.04
"""How far from the corner an off-centre subject may lie, as a share of the frame."""

SOURCES = {"pets": "pets", "cub": "birds", "deer": "deer"}
"""How a photo's `source` begins, and what it shows."""

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
CPU_NEIGHBOURS = 2000


class Shown(NamedTuple):
    """A photo as it is shown to the model, and its subject's box in it."""

    photo: Image.Image
    box: pl.Box
    kind: str
    place: str


def off_centre(photo: Image.Image, box: pl.Box, corner: str) -> tuple[Image.Image, pl.Box]:
    """The photo cropped on two sides so that the box lies within MARGIN of this corner, and the box in it."""

    def cut(before: float, side: int) -> int:
        # The least cut c that leaves no more than the margin: before - c <= MARGIN * (side - c).
        least = math.ceil((before - MARGIN * side) / (1 - MARGIN))
        return min(max(0, least), math.floor(before))  # and never takes a part of the subject

    width, height = photo.size
    left = cut(box.left, width) if "left" in corner else 0
    right = width - (cut(width - box.right, width) if "right" in corner else 0)
    top = cut(box.top, height) if "top" in corner else 0
    bottom = height - (cut(height - box.bottom, height) if "bottom" in corner else 0)
    moved = pl.Box(box.left - left, box.top - top, box.right - left, box.bottom - top)
    return photo.crop((left, top, right, bottom)), moved


def boxes_that_look_at_nothing(size: tuple[int, int]) -> dict[str, pl.Box]:
    width, height = size
    whole = pl.Box(0, 0, width, height)
    return {"whole photo": whole, "centre 0.7": whole.expanded(-0.15)}


def rows_of(folder: Path, a_source: int | None) -> list[dict[str, Any]]:
    """The photos of boxes.json, of each source at most this many, taken evenly."""
    rows = json.loads((folder / "boxes.json").read_text())
    chosen = []
    for source in SOURCES:
        own = [row for row in rows if row["source"].split("/")[0] == source]
        count = len(own) if a_source is None else min(a_source, len(own))
        chosen += [own[index * len(own) // count] for index in range(count)]
    return chosen


def shown(folder: Path, row: dict[str, Any], corner: str) -> list[Shown]:
    photo, box = decode(folder / row["file"]).image, pl.Box(*row["box"])
    kind = SOURCES[row["source"].split("/")[0]]
    return [Shown(photo, box, kind, "centred"), Shown(*off_centre(photo, box, corner), kind, "off-centre")]


class Overlaps:
    """Intersections over union by place (centred or not), method and kind of subject."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, item: Shown, method: str, box: pl.Box | None) -> None:
        overlap = 0.0 if box is None else box.iou(item.box)
        for kind in (item.kind, "all"):
            self.values[item.place, method, kind].append(overlap)

    def figures(self, place: str, method: str, kind: str) -> tuple[float, float, float]:
        """CorLoc at 0.5 and 0.7, and the mean overlap."""
        overlaps = torch.tensor(self.values[place, method, kind], dtype=torch.float64)
        return tuple(value.double().mean().item() for value in (overlaps >= 0.5, overlaps >= 0.7, overlaps))  # type: ignore[return-value]

    def table(self) -> str:
        kinds = [*SOURCES.values(), "all"]
        methods = list(dict.fromkeys(method for _, method, _ in self.values))
        lines = []
        for place in ("centred", "off-centre"):
            counts = [len(self.values[place, methods[0], kind]) for kind in kinds]
            titles = (f"{kind} ({count})" for kind, count in zip(kinds, counts, strict=True))
            lines.append(f"{place:12}" + "".join(f"  {title:^18}" for title in titles))
            lines.append(f"{'':12}" + "      .5    .7   IoU" * len(kinds))
            for method in methods:
                line = f"{method:12}"
                for kind in kinds:
                    half, more, mean = self.figures(place, method, kind)
                    line += f"   {100 * half:5.1f} {100 * more:5.1f}  {mean:.3f}"
                lines.append(line)
        return "\n".join(lines)


def localisation(
    loaded: pl.Loaded, folder: Path, rows: Sequence[dict[str, Any]], methods: Sequence[str], batch: int
) -> tuple[Overlaps, dict[str, float]]:
    """The overlaps, and the seconds that the model and each method's maps and boxes took."""
    overlaps, seconds = Overlaps(), dict.fromkeys(["reading", "model", *methods], 0.0)
    detectors = {method: Detector.of(loaded, method) for method in methods}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            tell(f"photos {start:,} of {len(rows):,}")
            began = time.perf_counter()
            corners = [CORNERS[(start + index) % 4] for index in range(len(part))]
            items = [item for pair in pool.map(shown, [folder] * len(part), part, corners) for item in pair]
            prepared = list(pool.map(lambda item: loaded.preprocess(item.photo), items))
            images_BCHW = torch.stack([image_CHW for image_CHW, _ in prepared])
            views = [view for _, view in prepared]
            seconds["reading"] += time.perf_counter() - began
            began = time.perf_counter()
            heat_pass = HeatPass(loaded, images_BCHW, [detector.method for detector in detectors.values()])
            finish(loaded)
            seconds["model"] += time.perf_counter() - began
            for item in items:
                for name, box in boxes_that_look_at_nothing(item.photo.size).items():
                    overlaps.add(item, name, box)
            for method, detector in detectors.items():
                began = time.perf_counter()
                patches_Bhw5 = heat_pass.patch_boxes(detector.method)
                found = detector.judge(heat_pass.heat(detector.method), views, patches_Bhw5=patches_Bhw5)
                seconds[method] += time.perf_counter() - began
                for item, result in zip(items, found, strict=True):
                    overlaps.add(item, method, result.subjects[0].box if result.subjects else None)
    return overlaps, seconds


def nearest_neighbours(
    loaded: pl.Loaded, folder: Path, held_out: int, neighbours: int | None, batch: int
) -> tuple[float, int, int]:
    """The k-NN accuracy, the number of neighbours to choose from, and of classes."""
    from patchlight.training.features import features_of, knn_accuracy

    labels = json.loads((folder / "labels.json").read_text())
    classes = {name: index for index, name in enumerate(sorted(set(labels.values())))}
    names = sorted(labels)
    random.Random(0).shuffle(names)
    asked = names[:held_out]
    known = names[held_out:] if neighbours is None else names[held_out : held_out + neighbours]
    zips = [zipfile.ZipFile(path) for path in sorted(folder.glob("photos-*.zip"))]
    holder = {member: file for file in zips for member in file.namelist()}

    def prepared(content: bytes) -> Tensor:
        return loaded.preprocess(decode(content))[0]

    def batches(chosen: Sequence[str]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start in range(0, len(chosen), batch):
            part = chosen[start : start + batch]
            # A zip file is read by one thread, in order; decoding takes longer, and is shared out.
            contents = [holder[f"{name}.webp"].read(f"{name}.webp") for name in part]
            labels_B = torch.tensor([classes[labels[name]] for name in part])
            yield torch.stack(list(pool.map(prepared, contents))), labels_B, torch.arange(start, start + len(part))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        train = features_of(loaded.model, batches(known), reporter=SHOWN)
        test = features_of(loaded.model, batches(asked), reporter=SHOWN)
    device = loaded.model.norm.weight.device
    result = knn_accuracy(train, test, device=device)
    return result.accuracy, len(known), len(classes)


class Asked(NamedTuple):
    """A photo that is to be sorted: its file's content, and what it shows."""

    content: bytes | Path
    kind: str
    label: str
    """Its class, as the model has it; "" where that is not known."""
    path: str
    """Its group, such as "animal/bird"."""


def boxed_photos(folder: Path, a_source: int | None) -> list[Asked]:
    kinds = ((row, SOURCES[row["source"].split("/")[0]]) for row in rows_of(folder, a_source))
    return [Asked(folder / row["file"], kind, "", "animal") for row, kind in kinds]


def held_out_photos(folder: Path, count: int, truth: dict[str, str]) -> list[Asked]:
    from gather_default_photos import IMAGENETTE

    labels = json.loads((folder / "labels.json").read_text())
    names = sorted(labels)
    random.Random(0).shuffle(names)
    zips = [zipfile.ZipFile(path) for path in sorted(folder.glob("photos-*.zip"))]
    holder = {member: file for file in zips for member in file.namelist()}
    asked = []
    for name in names[:count]:
        source, _, class_name = labels[name].partition("/")
        label = f"{source}/{IMAGENETTE.get(class_name, class_name)}"
        if label not in truth:  # foxes, turkeys, tracks and empty frames in one class
            continue
        content = holder[f"{name}.webp"].read(f"{name}.webp")
        asked.append(Asked(content, f"held out: {_kind(truth[label])}", label, truth[label]))
    return asked


def tiny_imagenet_photos(folder: Path, count: int, classes: Sequence[str], truth: dict[str, str]) -> list[Asked]:
    """The first validation photos, which are in no order; `classes` are its classes' names in the order of wnids."""
    wnids = sorted((folder / "wnids.txt").read_text().split())
    short = [f"thing/{name.partition(',')[0].strip().replace(' ', '_')}" for name in classes]
    labels = dict(zip(wnids, short, strict=True))
    asked = []
    for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()[:count]:
        file, wnid = line.split("\t")[:2]
        path = truth[labels[wnid]]
        kind = f"Tiny-ImageNet: {_kind(path)}"
        asked.append(Asked(folder / "val" / "images" / file, kind, labels[wnid], path))
    return asked


def _kind(path: str) -> str:
    return "mixed" if path == UNKNOWN else path.partition("/")[0]


def triage(loaded: pl.Loaded, asked: Sequence[Asked], batch: int) -> str:
    """A table of what the model says of each kind, and how often it is right."""
    assert loaded.groups is not None
    said = []
    weight = loaded.model.norm.weight
    with ThreadPoolExecutor(os.cpu_count()) as pool, torch.inference_mode():
        for start in range(0, len(asked), batch):
            tell(f"photos {start:,} of {len(asked):,}")
            part = [each.content for each in asked[start : start + batch]]
            images = list(pool.map(lambda content: loaded.preprocess(decode(content))[0], part))
            said += loaded.groups.named(loaded.model(torch.stack(images).to(weight.device, weight.dtype)))
    groups = [*loaded.groups.names, UNKNOWN]
    lines = [f"{'what it says':24}{'photos':>8}" + "".join(f"{group:>10}" for group in groups)]
    for kind in dict.fromkeys(each.kind for each in asked):
        own = [name.group for each, name in zip(asked, said, strict=True) if each.kind == kind]
        shares = "".join(f"{100 * own.count(group) / len(own):9.1f}%" for group in groups)
        lines.append(f"{kind:24}{len(own):8,}{shares}")
    for source, title in (("held out", "held-out photos"), ("Tiny-ImageNet", "Tiny-ImageNet's")):
        pairs = [(each, name) for each, name in zip(asked, said, strict=True) if each.kind.startswith(source)]
        if pairs:
            lines += _how_often_right(title, pairs, dict(zip(loaded.groups.labels, loaded.groups.words, strict=True)))
    return "\n".join(lines)


def _how_often_right(title: str, pairs: Sequence[tuple[Asked, Named]], words: dict[str, str]) -> list[str]:
    """`words`: each class of the model as it says it."""
    known = [(each.path.startswith("animal"), name.group) for each, name in pairs if each.path != UNKNOWN]
    sure = [(animal, group == "animal") for animal, group in known if group != UNKNOWN]
    animals, others = ([said for animal, said in sure if animal is kind] for kind in (True, False))
    named = [(each, name.label) for each, name in pairs if name.label is not None]
    classes = [label == words.get(each.label) for each, label in named if label in words.values()]
    parts = [label in each.path.split("/") for each, label in named if label not in words.values()]
    return [
        f"{title}: animal or not, {len(sure) / len(known):.1%} of {len(known):,} answered, "
        f"{sum(a == b for a, b in sure) / len(sure):.1%} of those right; "
        f"animals called something else {1 - sum(animals) / len(animals):.1%}, "
        f"others called animal {sum(others) / len(others):.1%}",
        f"{title}: {len(classes) / len(pairs):.1%} get the name of a class, "
        f"{sum(classes) / max(1, len(classes)):.1%} of those right; "
        f"{len(parts) / len(pairs):.1%} a coarser one, {sum(parts) / max(1, len(parts)):.1%} of those right",
    ]


def finish(loaded: pl.Loaded) -> None:
    """Wait for the GPU, so that what is timed is what was done."""
    if loaded.model.norm.weight.is_cuda:
        torch.cuda.synchronize()


def tell(progress: str) -> None:
    print(f"\r{progress:40}", end="", file=sys.stderr, flush=True)


SHOWN = pl.Reporter(progress=lambda now: tell(now.line()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, default=SHARED / "localize", help="photos with boxes.json")
    parser.add_argument("--training", type=Path, default=SHARED / "photos", help="labelled photos, for the features")
    parser.add_argument("--methods", nargs="+", help="else all that the model can do")
    parser.add_argument("--photos", type=int, help="of each source at most, taken evenly")
    parser.add_argument(
        "--held-out", type=int, default=1000, help="photos to name by their neighbours; 0 leaves it out"
    )
    parser.add_argument(
        "--neighbours", type=int, help=f"to choose from; else all of them, or {CPU_NEIGHBOURS:,} without a GPU"
    )
    parser.add_argument("--triage", action="store_true", help="what photos show, and nothing else")
    parser.add_argument("--tiny-imagenet", type=Path, help="with --triage: the unpacked tiny-imagenet-200")
    parser.add_argument("--tiny-photos", type=int, default=10_000, help="of its validation photos, the first")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    try:
        loaded = pl.load(arguments.model, device=arguments.device)
        for method in arguments.methods or ():
            Detector.of(loaded, method)
    except pl.PatchlightError as error:
        parser.error(str(error))
    if arguments.triage:
        if loaded.groups is None:
            parser.error(f"{arguments.model}: its classes have no groups")
        sys.path.append(str(RECIPES))
        table = read_groups(RECIPES / "default_groups.csv", loaded.groups.labels)
        truth = dict(zip(table.labels, table.paths, strict=True))
        asked = boxed_photos(arguments.data, arguments.photos)
        asked += held_out_photos(arguments.training, arguments.held_out, truth)
        if arguments.tiny_imagenet is not None:
            classes = json.loads((SHARED / "things" / "classes.json").read_text())
            asked += tiny_imagenet_photos(arguments.tiny_imagenet, arguments.tiny_photos, classes, truth)
        print("\r" + triage(loaded, asked, arguments.batch))
        return
    possible = ["lost", "tokencut", "features"]
    if isinstance(loaded.config, pl.ViTConfig):
        possible = ["cls"] * loaded.config.class_token + ["rollout", *possible]
    methods = arguments.methods or ["subject"] * (loaded.subject is not None) + possible
    rows = rows_of(arguments.data, arguments.photos)
    began = time.perf_counter()
    overlaps, seconds = localisation(loaded, arguments.data, rows, methods, arguments.batch)
    tell("")
    print(f"\r{arguments.model}, {len(rows)} photos of {arguments.data}, on {arguments.device}")
    print(overlaps.table())
    each = ", ".join(f"{name} {1000 * spent / (2 * len(rows)):.1f}" for name, spent in seconds.items())
    print(f"milliseconds a photo: {each}; {time.perf_counter() - began:.0f} s in all")
    if arguments.held_out:
        began, most = time.perf_counter(), arguments.neighbours
        if most is None and arguments.device == "cpu":
            most = CPU_NEIGHBOURS
        accuracy, known, classes = nearest_neighbours(
            loaded, arguments.training, arguments.held_out, most, arguments.batch
        )
        tell("")
        print(
            f"\rk-NN: {accuracy:.1%} of {arguments.held_out:,} held-out photos right, {classes} classes, "
            f"{known:,} photos to choose neighbours from; {time.perf_counter() - began:.0f} s"
        )


if __name__ == "__main__":
    main()
