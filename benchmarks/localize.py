"""How well a model's methods find subjects, how far its decisions can be trusted, and the fit of its confidence.

    python benchmarks/localize.py MODEL                          # every method, beside boxes that look at nothing
    python benchmarks/localize.py MODEL --methods subject --second-look
    python benchmarks/localize.py MODEL --methods subject --small --tiles 4 4
    python benchmarks/localize.py MODEL --data VOC2007           # JPEGImages/ and Annotations/*.xml
    python benchmarks/localize.py MODEL --calibrate --write      # fits the confidence, stores it in MODEL/config.json

Boxes are measured as in benchmarks/default_model.py: CorLoc at 0.5 and 0.7 and the mean overlap, centred and
off-centre. For VOC-style photos, which have several boxes, the nearest one counts, and there is no off-centre. With
--small the subjects are cut out, a tenth to a sixth as long as the photo is wide, and stand somewhere in what lies
beside the subject of another photo: a hard test, since what lies there may have subjects of its own.

Decisions: photos are split into two halves, both versions of a photo in the same one. The confidence is fitted on the
first, with photos that have no subject (textures, gradients, noise, blur, and what is left of the photos beside their
subjects), and the decisions are counted on the second: how many photos were answered with `subject`, how many of those
boxes overlap by half or more, and how many photos without a subject were answered.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is imported by a test

from default_model import CORNERS, SHARED, Shown, boxes_that_look_at_nothing, finish, rows_of, shown, tell

import patchlight as pl
from patchlight.config import Calibration
from patchlight.files import replacing
from patchlight.images.decode import decode
from patchlight.localizing.calibrate import PRECISION, fit
from patchlight.localizing.decide import measure
from patchlight.localizing.detector import Detector, DetectorOptions, Localization, regions_by

PLACES = ("centred", "off-centre")
EMPTY = "without a subject"
LOOKING_AT_NOTHING = ("whole photo", "centre 0.7")


PUBLISHED = (
    ("DINO-seg", 45.8, "no labels; attention of DINO S/16"),
    ("LOST", 61.9, "no labels; features of DINO S/16"),
    ("TokenCut", 68.8, "no labels; features of DINO S/16"),
    ("FOUND", 72.5, "no labels; a layer on DINO S/8, taught on the photos of DUTS-TR"),
)
"""CorLoc on all 5,011 photos of VOC07 trainval, as those papers have it."""


@dataclass(frozen=True)
class Example:
    """A photo, and the boxes that would be right: none where it shows nothing."""

    photo: Image.Image
    boxes: tuple[pl.Box, ...]
    kind: str
    place: str
    half: int
    """0 for the fit, 1 for the report."""

    def overlap(self, box: pl.Box | None) -> float:
        return max((box.iou(own) for own in self.boxes), default=0.0) if box is not None else 0.0


class Answer(NamedTuple):
    """What a method said of an example."""

    example: Example
    method: str
    overlap: float
    found: Localization | None
    """None for boxes that look at nothing."""


# The photos


def own_examples(folder: Path, a_source: int | None, empty: bool) -> Iterator[Example]:
    """The photos of boxes.json, centred and off-centre, and with `empty` those without a subject."""
    rows = rows_of(folder, a_source)
    # A photo's half is the same however many are asked for; by fours, so that either half has all four corners.
    half_of = {row["file"]: index // 4 % 2 for index, row in enumerate(rows_of(folder, None))}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        corners = [CORNERS[index % 4] for index in range(len(rows))]
        for index, pair in enumerate(pool.map(shown, [folder] * len(rows), rows, corners)):
            half = half_of[rows[index]["file"]]
            for item in pair:
                yield Example(item.photo, (item.box,), item.kind, item.place, half)
            if empty:
                yield from emptied(pair[0], half, every=index // 8 % 3)
    if empty:
        yield from made_up()


def emptied(item: Shown, half: int, every: int) -> Iterator[Example]:
    """What is left of a photo without its subject: the scene beside it, and, in turn, a texture of that, or a blur."""
    scene = beside_the_subject(item.photo, item.box)
    if scene is not None:
        yield Example(scene, (), "empty scene", EMPTY, half)
    if every == 0 and scene is not None:
        yield Example(tiled(scene), (), "texture", EMPTY, half)
    if every == 1:
        blur = ImageFilter.GaussianBlur(max(item.photo.size) / 8)
        yield Example(item.photo.filter(blur), (), "blurred", EMPTY, half)


def beside_the_subject(photo: Image.Image, box: pl.Box) -> Image.Image | None:
    """The largest part of a photo to one side of its subject, or above or below; None where all are slivers."""
    width, height = photo.size
    left, top, right, bottom = box.to_ints()
    sides = [(0, 0, left, height), (right, 0, width, height), (0, 0, width, top), (0, bottom, width, height)]
    x0, y0, x1, y1 = max(sides, key=lambda side: (side[2] - side[0]) * (side[3] - side[1]))
    across, down = x1 - x0, y1 - y0
    if min(across, down) < 0.25 * min(width, height):
        return None
    # No longer than two squares: a strip squashed to the model's frame looks like nothing that a camera takes.
    cut_x, cut_y = max(0, across - 2 * down) // 2, max(0, down - 2 * across) // 2
    return photo.crop((x0 + cut_x, y0 + cut_y, x1 - cut_x, y1 - cut_y))


def small_examples(folder: Path, a_source: int | None) -> Iterator[Example]:
    """Subjects that are small in scenes of other photos, and those scenes without."""
    items = [shown(folder, row, CORNERS[0])[0] for row in rows_of(folder, a_source)]
    scenes = [scene for item in items if (scene := beside_the_subject(item.photo, item.box)) is not None]
    random = np.random.default_rng(0)
    for index, item in enumerate(items):
        scene = scenes[(index + len(scenes) // 2) % len(scenes)].resize((960, 720), Image.Resampling.BICUBIC)
        yield Example(scene, (), "empty scene", EMPTY, 1)
        around = item.box.expanded(0.08).clip((item.photo.height, item.photo.width))
        scale = random.uniform(0.1, 0.17) * scene.width / max(item.box.width, item.box.height)
        size = max(4, round(scale * around.width)), max(4, round(scale * around.height))
        cut = item.photo.resize(size, Image.Resampling.LANCZOS, box=dataclasses.astuple(around))
        y, x = np.mgrid[-1 : 1 : size[1] * 1j, -1 : 1 : size[0] * 1j]
        # Rounded and soft at its border, so that this does not stand out as a frame would.
        mask = Image.fromarray(((x**4 + y**4 < 1) * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(3))
        left, top = (int(random.integers(0, room)) for room in (scene.width - size[0], scene.height - size[1]))
        photo = scene.copy()
        photo.paste(cut, (left, top), mask)
        box = pl.Box(
            left + scale * (item.box.left - around.left),
            top + scale * (item.box.top - around.top),
            left + scale * (item.box.right - around.left),
            top + scale * (item.box.bottom - around.top),
        )
        yield Example(photo, (box,), item.kind, "centred", 1)


def tiled(scene: Image.Image, side: int = 48, size: int = 240) -> Image.Image:
    """A corner of a scene again and again."""
    corner = scene.crop((0, 0, min(side, scene.width), min(side, scene.height)))
    texture = Image.new("RGB", (size, size))
    for top in range(0, size, corner.height):
        for left in range(0, size, corner.width):
            texture.paste(corner, (left, top))
    return texture


def made_up(count: int = 120) -> Iterator[Example]:
    """Plain colours, gradients, skies, noise, stripes, checks and clouds, in colours at random."""
    kinds = ("plain", "gradient", "sky", "noise", "stripes", "checks", "clouds")
    for index in range(count):
        kind = kinds[index // 2 % len(kinds)]
        image = Image.fromarray(pattern(kind, np.random.default_rng(index)))
        yield Example(image, (), kind, EMPTY, index % 2)


def pattern(kind: str, rng: np.random.Generator, height: int = 160, width: int = 200) -> np.ndarray[Any, Any]:
    """HWC uint8."""
    one, other = rng.integers(0, 256, (2, 3)).astype(float)
    turn = rng.uniform(0, 2 * math.pi)
    y, x = np.mgrid[0:height, 0:width] / width
    along = np.cos(turn) * x + np.sin(turn) * y
    grain = 0.0
    match kind:
        case "plain":
            share = np.zeros((height, width))
        case "gradient":
            share = (along - along.min()) / np.ptp(along)
        case "sky":
            one, other, share, grain = np.array([90.0, 140, 220]), np.array([200.0, 220, 240]), y / y.max(), 3.0
        case "noise":
            share, grain = np.zeros((height, width)), rng.uniform(5, 60)
        case "stripes":
            share = (np.sin(along * rng.uniform(10, 120)) > 0).astype(float)
        case "checks":
            side = rng.integers(8, 40)
            share = ((y * width // side + x * width // side) % 2).astype(float)
        case _:
            coarse = Image.fromarray(rng.integers(0, 256, (rng.integers(6, 40), rng.integers(8, 50)), np.uint8))
            share = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) / 255
    colours = one + (other - one) * share[..., None] + grain * rng.standard_normal((height, width, 3))
    return colours.clip(0, 255).astype(np.uint8)


def voc_examples(folder: Path, most: int | None) -> Iterator[Example]:
    """The photos of a VOC-style folder, with the boxes of all their objects."""
    for index, path in enumerate(sorted((folder / "Annotations").glob("*.xml"))[:most]):
        boxes = voc_boxes(path)
        if boxes:
            photo = decode(folder / "JPEGImages" / f"{path.stem}.jpg").image
            yield Example(photo, boxes, "objects", "centred", index % 2)


def voc_boxes(path: Path) -> tuple[pl.Box, ...]:
    """Of all objects; the files count pixels from 1, and the last one belongs to the box."""
    boxes = []
    for corners in ElementTree.parse(path).getroot().iterfind("object/bndbox"):
        left, top, right, bottom = (float(corners.findtext(name, "")) for name in ("xmin", "ymin", "xmax", "ymax"))
        boxes.append(pl.Box(left - 1, top - 1, right, bottom))
    return tuple(boxes)


# What the model says


def answers(
    loaded: pl.Loaded,
    examples: Iterable[Example],
    methods: Sequence[str],
    *,
    second_look: bool = False,
    tiles: tuple[int, int] | None = None,
    batch: int = 32,
) -> Iterator[Answer]:
    """What each method says of each example, and the boxes that look at nothing."""
    options = DetectorOptions(second_look=second_look, tiles=tiles)
    detectors = {method: Detector.of(loaded, method, options) for method in methods}
    waiting, done = iter(examples), 0
    while part := list(islice(waiting, batch)):
        tell(f"photos {done:,}")
        done += len(part)
        photos = [decode(example.photo) for example in part]
        for example in part:
            for name, box in boxes_that_look_at_nothing(example.photo.size).items():
                yield Answer(example, name, example.overlap(box), None)
        for method, detector in detectors.items():
            for example, found in zip(part, detector(photos, batch), strict=True):
                box = found.subjects[0].box if found.subjects else None
                yield Answer(example, method, example.overlap(box), found)


def calibrate(said: Sequence[Answer]) -> Calibration:
    """The fit on the first half of what one method said."""
    measures, right, shows_one = [], [], []
    for example, _, overlap, found in said:
        if found is None or example.half != 0:
            continue
        heat_hw = found.heat_hw.double().numpy()
        patches_hw5 = None if found.patches_hw5 is None else found.patches_hw5.numpy()
        regions, apart = regions_by(found.method, heat_hw, patches_hw5=patches_hw5)
        if regions:
            measures.append(measure(heat_hw, regions[0], apart))
            right.append(overlap >= 0.5)
            shows_one.append(bool(example.boxes))
    return fit(measures, right, shows_one)


def decided_again(said: Iterable[Answer], loaded: pl.Loaded, calibration: Calibration) -> list[Answer]:
    """The same boxes with the decisions of another calibration."""
    again = []
    for answer in said:
        if answer.found is not None:
            old = answer.found
            patches_Bhw5 = None if old.patches_hw5 is None else old.patches_hw5[None]
            (new,) = Detector(loaded, old.method, calibration).judge(old.heat_hw[None], [old.view], None, patches_Bhw5)
            answer = answer._replace(found=replace(old, decision=new.decision, confidence=new.confidence))
        again.append(answer)
    return again


def write_calibration(loaded: pl.Loaded, calibration: Calibration) -> Path:
    """Store it in the model's config.json, beside what it was taught."""
    assert loaded.subject is not None
    return write_into_config(loaded, {"subject": replace(loaded.subject, calibration=calibration).to_dict()})


def write_into_config(loaded: pl.Loaded, changes: dict[str, Any]) -> Path:
    """Store these in the model's config.json; everything else in there stays."""
    path = loaded.provenance.path.parent / "config.json"
    values = json.loads(path.read_text())
    values["patchlight"] |= changes
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n")
    return path


# Tables


def box_table(said: Sequence[Answer]) -> str:
    """CorLoc at 0.5 and 0.7 and the mean overlap, a line a method."""
    said = [answer for answer in said if answer.example.boxes]
    kinds = [*dict.fromkeys(answer.example.kind for answer in said)]
    kinds += ["all"] * (len(kinds) > 1)
    lines = []
    for place in [place for place in PLACES if any(answer.example.place == place for answer in said)]:
        here = [answer for answer in said if answer.example.place == place]
        methods = list(dict.fromkeys(answer.method for answer in here))
        counts = Counter(answer.example.kind for answer in here if answer.method == methods[0])
        counts["all"] = counts.total()
        lines.append(f"{place:12}" + "".join(f"  {f'{kind} ({counts[kind]})':^18}" for kind in kinds))
        lines.append(f"{'':12}" + "      .5    .7   IoU" * len(kinds))
        for method in methods:
            line = f"{method:12}"
            for kind in kinds:
                own = np.array([a.overlap for a in here if a.method == method and kind in (a.example.kind, "all")])
                line += f"   {100 * (own >= 0.5).mean():5.1f} {100 * (own >= 0.7).mean():5.1f}  {own.mean():.3f}"
            lines.append(line)
    return "\n".join(lines)


def published(corloc: float, photos: str) -> list[str]:
    """A model's CorLoc on VOC07 beside what is published, with what each was taught."""
    lines = [f"CorLoc on VOC07 (published: all 5,011 photos of trainval; this model: {photos})"]
    lines += [f"{name:12} {value:5.1f}   {how}" for name, value, how in PUBLISHED]
    return [*lines, f"{'this model':12} {100 * corloc:5.1f}   its card says what it was taught with"]


def decision_table(said: Sequence[Answer]) -> str:
    """How the second half was decided, and how many of the answered boxes are right; for one method, by kind."""
    lines = [f"{'decisions':12}  {'':22} photos  subject  right  several  unsure   none"]
    said = [answer for answer in said if answer.found is not None and answer.example.half == 1]
    methods = dict.fromkeys(answer.method for answer in said)
    for method in methods:
        own = [answer for answer in said if answer.method == method]
        groups: dict[str, list[Answer]] = {"with a subject": [answer for answer in own if answer.example.boxes]}
        for answer in own if len(methods) == 1 else ():
            name = answer.example.place if answer.example.boxes else answer.example.kind
            groups.setdefault(f"  {name}", []).append(answer)
            if answer.example.boxes:
                groups.setdefault(f"  {answer.example.kind}", []).append(answer)
        empty = [answer for answer in own if not answer.example.boxes]
        if empty:
            groups[EMPTY] = empty
        for name, group in sorted(groups.items(), key=lambda pair: (not pair[1][0].example.boxes, -len(pair[1]))):
            lines.append(f"{method:12}  {name:22} {decision_line(group)}")
    return "\n".join(lines)


def decision_line(group: Sequence[Answer]) -> str:
    counts = Counter(answer.found.decision for answer in group if answer.found is not None)
    shares = {name: 100 * counts[name] / len(group) for name in ("subject", "several", "unsure", "none")}
    right = precision(group)
    spelt = "    -" if right is None else f"{100 * right:5.1f}"
    return (
        f"{len(group):6}   {shares['subject']:5.1f}  {spelt}    {shares['several']:5.1f}   "
        f"{shares['unsure']:5.1f}  {shares['none']:5.1f}"
    )


def precision(group: Sequence[Answer]) -> float | None:
    """Of the photos that were answered with `subject`, the share whose boxes are right; None if none was."""
    sure = [
        answer.overlap >= 0.5 for answer in group if answer.found is not None and answer.found.decision == "subject"
    ]
    return sum(sure) / len(sure) if sure else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, default=SHARED / "localize", help="photos with boxes.json, or VOC-style")
    parser.add_argument("--methods", nargs="+", help="else all that the model can do")
    parser.add_argument("--photos", type=int, help="of each source at most, taken evenly")
    parser.add_argument("--second-look", action="store_true", help="look once more at each box that was found")
    parser.add_argument("--tiles", type=int, nargs=2, metavar=("DOWN", "ACROSS"), help="look at overlapping tiles")
    parser.add_argument("--small", action="store_true", help="subjects that are small in scenes of other photos")
    parser.add_argument("--calibrate", action="store_true", help="fit the confidence on the first half")
    parser.add_argument("--write", action="store_true", help="and store it in the model's config.json")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.small and arguments.calibrate:
        parser.error("--calibrate fits on photos as they are; leave out --small")
    if arguments.write and not arguments.calibrate:
        parser.error("--write stores what --calibrate fits; give both")

    try:
        loaded = pl.load(arguments.model, device=arguments.device)
        for method in arguments.methods or ["subject"] * arguments.calibrate:
            Detector.of(loaded, method)
    except pl.PatchlightError as error:
        parser.error(str(error))
    possible = ["lost", "tokencut", "features"]
    if isinstance(loaded.config, pl.ViTConfig):
        possible = ["cls"] * loaded.config.class_token + ["rollout", *possible]
    methods = arguments.methods or ["subject"] * (loaded.subject is not None) + possible
    if arguments.calibrate:
        methods = ["subject"]
    if arguments.small:
        examples = small_examples(arguments.data, arguments.photos)
    elif (arguments.data / "Annotations").is_dir():
        examples = voc_examples(arguments.data, arguments.photos)
    else:
        examples = own_examples(arguments.data, arguments.photos, empty=True)
    began = time.perf_counter()
    tiles = None if arguments.tiles is None else (arguments.tiles[0], arguments.tiles[1])
    said = list(
        answers(loaded, examples, methods, second_look=arguments.second_look, tiles=tiles, batch=arguments.batch)
    )
    finish(loaded)
    seconds = time.perf_counter() - began
    tell("")
    how = " with a second look" * arguments.second_look + (f" in {tiles[0]}x{tiles[1]} tiles" if tiles else "")
    count = len(said) // (len(methods) + len(LOOKING_AT_NOTHING))
    print(f"\r{arguments.model}{how}, {count} photos of {arguments.data}, on {arguments.device}, {seconds:.0f} s")
    print(box_table(said))
    if (arguments.data / "Annotations").is_dir():
        own = [answer.overlap >= 0.5 for answer in said if answer.method == methods[0]]
        print("\n".join(published(sum(own) / max(1, len(own)), f"{count} photos of {arguments.data}")))
    if arguments.calibrate:
        calibration = calibrate(said)
        said = decided_again(said, loaded, calibration)
        print(json.dumps(calibration.to_dict(), indent=2))
    print(decision_table(said))
    if arguments.calibrate:
        reached = precision([answer for answer in said if answer.example.half == 1 and answer.example.boxes])
        if reached is None or reached < PRECISION:
            print(f"fewer than {PRECISION:.0%} of the answers are right on the second half")
    if arguments.write:
        print(f"stored in {write_calibration(loaded, calibration)}")


if __name__ == "__main__":
    main()
