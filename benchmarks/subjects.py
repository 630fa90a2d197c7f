"""How well a model finds the subject of any photo, whether it says so, and what it calls it: one table for one model.

    python benchmarks/subjects.py MODEL [--quick] [--shared ../shared/data]
    python benchmarks/subjects.py MODEL --calibrate [--write]     # fits the confidence and the names on one half

Everything is asked as a user asks: `pl.localize`, the same that `patchlight crop` finds by. The photos are none that
the default model is trained on:

    voc07       1,000 photos of PASCAL VOC 2007 with the boxes of all their objects
    localize    695 photos of pets, birds and deer, centred, and cropped so that the subject lies in a corner
    held out    a tenth of each set of ../shared/data/subjects (recipes/gather_default_photos.py); `people` are the sets
                of people alone, `people elsewhere` the photos of the other sets whose main object is a person
    nothing     empty scenes held out, what lies beside the subjects of `localize`, textures, blurs and patterns
    large       60 photos of 16 to 24 megapixels: held-out subjects, cut out by their masks, 4 to 10 % as wide as the
                frame, pasted on held-out empty scenes, which are enlarged and roughened where they are rough

`found` is CorLoc: the share of photos whose first box overlaps that of any object by half or more (intersection over
union; of a mask, the box around it or around one of its pieces), `IoU` the mean overlap. `subject` is the share of
photos that are answered so, `right` how many of those boxes overlap by half. `none` is the share called empty; below
the table stands how often that is true, where photos with something and with nothing are equally many.

What the photos of voc07 show is compared for those that show one kind alone, or of which one object is half as large
again as any of another kind. `thing` is every other group.

With --calibrate the confidence is fitted on half of voc07, localize, the held-out subjects and the photos of nothing,
drawn by a hash of their names, and so are the least probabilities that groups and names are said with (on voc07 and
nothing); the table then counts the other half alone. --write stores both in MODEL/config.json.
"""

import argparse
import dataclasses
import hashlib
import io
import json
import sys
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is imported by a test
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from default_model import CORNERS, SHARED, rows_of, shown, tell
from gather_default_photos import OTHER_NAMES, Row, find_members, hold_out, in_tenth, plan_photos, plan_subjects
from localize import emptied, made_up, published, write_into_config

import patchlight as pl
from patchlight.config import Calibration
from patchlight.localizing.boxes import Region
from patchlight.localizing.calibrate import fit, least_sure
from patchlight.localizing.decide import Measures, confidence_of, measure
from patchlight.localizing.detector import regions_by
from patchlight.weights.groups import SURE, Groups

GROUPS = {
    "person": ("person",),
    "vehicle": ("aeroplane", "bicycle", "boat", "bus", "car", "motorbike", "train"),
    "animal": ("bird", "cat", "cow", "dog", "horse", "sheep"),
    "thing": ("bottle", "chair", "diningtable", "pottedplant", "sofa", "tvmonitor"),
}
GROUP_OF = {label: group for group, labels in GROUPS.items() for label in labels}

CLEARLY = 1.5
ALL_OBJECTS = ("voc07", "voc12_train", "coco_train", "coco128", "people")
"""Kinds of photos whose boxes are those of all their objects."""
MOST_REGIONS = 6
SEVERAL_PRECISION = 0.85
"""Of the boxes beside the first that make a photo `several`, the share that are to be right."""
LARGE = 60
LARGE_SIZES = ((4928, 3280), (5472, 3648), (5664, 4240))
TILES = (4, 4)
BATCH = 32
PEOPLE = ("pennfudan", "people_vs")
NOTHING = "nothing"


@dataclass(frozen=True)
class Asked:
    """A photo, and the boxes that would be right: none where it shows nothing."""

    photo: Callable[[], Any]
    boxes: tuple[pl.Box, ...]
    kinds: tuple[str, ...]
    """The lines of the table that it counts in."""
    half: int
    """0 for the fit, 1 for the report."""
    group: str = ""
    """What it shows, where that is one thing: a key of GROUPS."""
    label: str = ""
    """The same as VOC names it."""


@dataclass(frozen=True)
class Answer:
    asked: Asked
    found: pl.Localization
    overlap: float

    @property
    def is_right(self) -> bool:
        return self.overlap >= 0.5


# The photos


def as_it_is(photo: Any) -> Any:
    return photo


def half_of(name: str) -> int:
    return hashlib.sha256(f"half of {name}".encode()).digest()[0] % 2


def voc07(folder: Path) -> list[Asked]:
    asked = []
    archive = zipfile.ZipFile(folder / "photos.zip")
    member = {Path(name).stem: name for name in archive.namelist()}
    for key, row in sorted(json.loads((folder / "boxes.json").read_text()).items()):
        boxes = tuple(pl.Box(*box) for box in row["boxes"])
        group, label = shows(boxes, row["labels"])
        content = archive.read(member[key])
        asked.append(Asked(partial(as_it_is, content), boxes, ("voc07",), half_of(key), group, label))
    return asked


def shows(boxes: Sequence[pl.Box], labels: Sequence[str]) -> tuple[str, str]:
    """The group and the label of the main object, where all are of one group, or it is clearly the largest."""
    order = sorted(range(len(boxes)), key=lambda index: -boxes[index].area)
    first = order[0]
    others = [boxes[index].area for index in order if GROUP_OF[labels[index]] != GROUP_OF[labels[first]]]
    if others and boxes[first].area < CLEARLY * others[0]:
        return "", ""
    return GROUP_OF[labels[first]], labels[first]


def localize_photos(folder: Path) -> list[Asked]:
    asked = []
    for index, row in enumerate(rows_of(folder, None)):
        for item in shown(folder, row, CORNERS[index % 4]):
            photo = item.photo
            kinds = (f"localize, {item.place}", f"  {item.kind}, {item.place}")
            asked.append(Asked(partial(as_it_is, photo), (item.box,), kinds, half_of(row["file"]), "animal"))
    return asked


def held_out_subjects(folder: Path) -> list[Asked]:
    rows, _ = plan_subjects(folder, "subjects")
    whole = json.loads((folder / "boxes.json").read_text())
    asked = []
    for row, content in contents(folder, [row for row in rows if in_tenth(row.file) and row.boxes]):
        key, name = Path(row.file).stem, Path(row.file).parts[1]
        around = [tuple(box) for box in whole[key]["boxes"]]
        boxes = tuple(pl.Box(*box) for box in dict.fromkeys([*(row.boxes or ()), *around]))
        kinds = ["held out", "  people" if name in PEOPLE else f"  {name}"]
        if row.label == "object/person" and name not in PEOPLE:
            kinds.append("  people elsewhere")
        asked.append(Asked(partial(as_it_is, content), boxes, tuple(kinds), half_of(key)))
    return asked


def contents(folder: Path, rows: Sequence[Row]) -> Iterator[tuple[Row, bytes]]:
    members = find_members(folder, [Path(row.file).stem for row in rows])
    zips = {path: zipfile.ZipFile(path) for path, _ in members.values()}
    for row in rows:
        path, name = members[Path(row.file).stem]
        yield row, zips[path].read(name)


def scenes(folder: Path) -> list[tuple[str, Image.Image]]:
    """The empty scenes that are held out."""
    rows, _ = plan_photos(folder)
    kept = hold_out(rows, 1000)
    empty = [row for row in rows if row.boxes == () and (row.file in kept or in_tenth(row.file))]
    return [(row.file, Image.open(io.BytesIO(content)).convert("RGB")) for row, content in contents(folder, empty)]


def photos_of_nothing(shared: Path) -> list[Asked]:
    asked = [
        Asked(partial(as_it_is, photo), (), (NOTHING, "  empty scenes"), half_of(name))
        for name, photo in scenes(shared / "photos")
    ]
    for index, row in enumerate(rows_of(shared / "localize", None)):
        item = shown(shared / "localize", row, CORNERS[0])[0]
        for example in emptied(item, half_of(row["file"]), every=index // 8 % 3):
            kind = "  beside subjects" if example.kind == "empty scene" else "  textures and blurs"
            asked.append(Asked(partial(as_it_is, example.photo), (), (NOTHING, kind), example.half))
    for example in made_up():
        asked.append(Asked(partial(as_it_is, example.photo), (), (NOTHING, "  patterns"), example.half))
    return asked


def large_photos(shared: Path, count: int) -> Iterator[Asked]:
    """Held-out subjects, small on held-out scenes; the same on every machine."""
    rng = np.random.default_rng(20)
    backgrounds = [photo for _, photo in scenes(shared / "photos")]
    cut_outs = [cut for _, cut in cut_outs_of(shared / "subjects")]
    order = rng.permutation(len(cut_outs))
    for index in range(count):
        size = LARGE_SIZES[index % len(LARGE_SIZES)]
        # Put together at a fourth of the size, where the subject has about the pixels that it came with.
        scene = enlarged(backgrounds[index % len(backgrounds)], (size[0] // 4, size[1] // 4), rng)
        photo, box = pasted(*cut_outs[order[index % len(order)]], scene, rng)
        whole = pl.Box(4 * box.left, 4 * box.top, 4 * box.right, 4 * box.bottom)
        yield Asked(partial(photo.resize, size, Image.Resampling.BICUBIC), (whole,), ("large",), 1)


def cut_outs_of(folder: Path) -> Iterator[tuple[str, tuple[Image.Image, Image.Image]]]:
    """By their ids held-out subjects in one piece that the frame does not cut, not too small, and their masks, cropped
    alike."""
    rows, _ = plan_subjects(folder, "subjects")
    masks = np.load(folder / "masks.npz")
    places = {f"{number:06}": place for place, number in enumerate(masks["ids"])}
    bits = masks["bits_48x48"]
    held_out = [row for row in rows if row.mask and in_tenth(row.file) and len(row.boxes or ()) == 1]
    for row, content in contents(folder, held_out):
        mask_HW = np.unpackbits(bits[places[Path(row.file).stem]]).reshape(48, 48)
        if mask_HW[[0, -1]].any() or mask_HW[:, [0, -1]].any() or not 0.06 <= mask_HW.mean() <= 0.5:
            continue
        photo = Image.open(io.BytesIO(content)).convert("RGB")
        mask = Image.fromarray(mask_HW * np.uint8(255)).resize(photo.size, Image.Resampling.BICUBIC)
        mask = mask.filter(ImageFilter.GaussianBlur(1)).point(lambda level: max(0, min(255, 2 * (level - 80))))
        box = mask.point(lambda level: 255 * (level >= 128)).getbbox()
        if box is not None and min(box[2] - box[0], box[3] - box[1]) >= 30:
            yield Path(row.file).stem, (photo.crop(box), mask.crop(box))


def enlarged(scene: Image.Image, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """The scene at this size. Where it has detail it gets finer detail, too, which enlarging does not make."""
    levels_HWC = np.asarray(scene.resize(size, Image.Resampling.BICUBIC), np.float32)
    grey = scene.convert("L")
    rough_HW = np.abs(np.asarray(grey, np.float32) - np.asarray(grey.filter(ImageFilter.GaussianBlur(2)), np.float32))
    rough = Image.fromarray(rough_HW).resize((scene.width // 8, scene.height // 8), Image.Resampling.BOX)
    noise_HW = np.zeros(size[::-1], np.float32)
    for side in (1, 2, 4):
        field = Image.fromarray(rng.normal(0, 1, (size[1] // side, size[0] // side)).astype(np.float32))
        noise_HW += np.asarray(field.resize(size, Image.Resampling.BICUBIC))
    noise_HW *= 1 + np.asarray(rough.resize(size, Image.Resampling.BICUBIC))
    return Image.fromarray((levels_HWC + noise_HW[..., None]).clip(0, 255).astype(np.uint8))


def pasted(
    cut: Image.Image, mask: Image.Image, scene: Image.Image, rng: np.random.Generator
) -> tuple[Image.Image, pl.Box]:
    """The scene with the subject somewhere in it, 4 to 10 % as wide as the frame, in a light more like the scene's."""
    width = round(rng.uniform(0.04, 0.1) * scene.width)
    height = min(round(width * cut.height / cut.width), round(0.3 * scene.height))
    width = max(round(0.04 * scene.width), round(height * cut.width / cut.height))
    left = int(rng.integers(0, scene.width - width))
    top = int(rng.integers(scene.height // 6, scene.height - height))
    around = np.asarray(scene.crop((left, top, left + width, top + height)), np.float32).mean((0, 1))
    levels = np.asarray(cut.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    levels = levels + 0.3 * (around.mean() - levels.mean()) + rng.normal(0, 3, (height, width, 1))
    photo = scene.copy()
    subject = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    photo.paste(subject, (left, top), mask.resize((width, height), Image.Resampling.BICUBIC))
    return photo, pl.Box(left, top, left + width, top + height)


# What the model says


def answers(loaded: pl.Loaded, asked: Iterable[Asked], **settings: Any) -> Iterator[Answer]:
    waiting: list[Asked] = []
    for number, each in enumerate(asked):
        waiting.append(each)
        if len(waiting) == (1 if settings else BATCH):
            tell(f"photos {number:,}")
            yield from answered(loaded, waiting, settings)
            waiting = []
    yield from answered(loaded, waiting, settings)


def answered(loaded: pl.Loaded, asked: Sequence[Asked], settings: dict[str, Any]) -> Iterator[Answer]:
    found = pl.localize([each.photo() for each in asked], loaded, **settings) if asked else []
    for each, result in zip(asked, found, strict=True):
        box = result.subjects[0].box if result.subjects else None
        overlap = max((box.iou(own) for own in each.boxes), default=0.0) if box is not None else 0.0
        yield Answer(each, result, overlap)


# Fitting


def with_every_name(loaded: pl.Loaded) -> pl.Loaded:
    """The model as it was before it was fitted: with whatever is likelier than not."""
    groups = loaded.groups and dataclasses.replace(loaded.groups, group_from=SURE, label_from=SURE)
    return dataclasses.replace(loaded, groups=groups)


def calibrated(loaded: pl.Loaded, said: Sequence[Answer]) -> pl.Loaded:
    """The model with its confidence, and the least probabilities of what it calls photos, fitted to these answers."""
    assert loaded.subject is not None
    subject = dataclasses.replace(loaded.subject, calibration=calibration_of(said))
    return dataclasses.replace(
        loaded, subject=subject, groups=None if loaded.groups is None else said_surely(loaded.groups, said)
    )


def calibration_of(said: Sequence[Answer]) -> Calibration:
    """The fit of first boxes on all photos, and of those beside them on photos of which all objects are known, and on
    those that show nothing."""
    first: list[tuple[Measures, bool, bool]] = []
    further: list[tuple[Measures, bool, bool]] = []
    for answer in said:
        found, boxes = answer.found, answer.asked.boxes
        heat_hw = found.heat_hw.double().numpy()
        patches_hw5 = None if found.patches_hw5 is None else found.patches_hw5.numpy()
        _, apart = regions_by(found.method, heat_hw, patches_hw5=patches_hw5)
        all_known = not boxes or any(kind.strip() in ALL_OBJECTS for kind in answer.asked.kinds)
        left = list(boxes)
        for place, region in enumerate(apart[:MOST_REGIONS] if all_known else apart[:1]):
            box = in_photo(region, found)
            right = [other for other in left if box.iou(other) >= 0.5]
            left = [other for other in left if other not in right[:1]]
            (further if place else first).append((measure(heat_hw, region, apart), bool(right), bool(boxes)))
    whole, beside = fit(*zip(*first, strict=True)), fit(*zip(*further, strict=True))
    confidence_N = np.array([confidence_of(each, beside) for each, _, _ in further])
    right_N = np.array([right for _, right, _ in further])
    sure = least_sure(confidence_N, right_N, SEVERAL_PRECISION, deviations=0.0)
    beside = dataclasses.replace(beside, sure=sure, nothing=min(beside.nothing, sure))
    return dataclasses.replace(whole, further=beside)


def in_photo(region: Region, found: pl.Localization) -> pl.Box:
    (x0, y0, x1, y1), (down, across) = region.box, found.patch_size
    return found.view.to_source(pl.Box(x0 * across, y0 * down, x1 * across, y1 * down))


def said_surely(groups: Groups, said: Sequence[Answer]) -> Groups:
    """Groups and names are said from a probability on from which they are right 9 times of 10."""
    of_groups, of_labels = [], []
    for answer in said:
        named, asked = answer.found.named, answer.asked
        shows_one = asked.kinds[0] == "voc07" and bool(asked.group)
        # What is beside an animal, or is left of it by a blur, may well be called one.
        if named is None or not (shows_one or asked.kinds[-1].strip() in ("empty scenes", "patterns")):
            continue
        moves = group_said(named) in ("person", "vehicle", "animal")
        if named.group_confidence is not None and (shows_one or moves):
            of_groups.append((named.group_confidence, group_said(named) == asked.group))
        if named.label_confidence is not None and shows_one:
            of_labels.append((named.label_confidence, is_called(named.label, asked.label, groups)))
    group_from, label_from = (
        max(SURE, least_sure(*map(np.array, zip(*pairs, strict=True)), deviations=0.0))
        for pairs in (of_groups, of_labels)
    )
    return dataclasses.replace(groups, group_from=group_from, label_from=max(group_from, label_from))


def is_called(name: str | None, label: str, groups: Groups) -> bool:
    """Whether a name that is said, of a class or of a part of a group, is what VOC calls it, a kind of that, or no
    more than its group."""
    wanted = OTHER_NAMES.get(label, label).replace("_", " ")
    if name in (wanted, GROUP_OF[label]):
        return True
    return any(
        words == name and wanted in (own.partition("/")[2].replace("_", " "), path.rpartition("/")[2])
        for words, own, path in zip(groups.words, groups.labels, groups.paths, strict=True)
    )


# Tables


def table(said: Sequence[Answer]) -> list[str]:
    of_kind: dict[str, list[Answer]] = defaultdict(list)
    for answer in said:
        for kind in answer.asked.kinds:
            of_kind[kind].append(answer)
    lines = [f"{'':26} photos   found    IoU   subject  right   several  unsure   none"]
    for kind in in_order(of_kind):
        own = of_kind[kind]
        found = f"{'':7}  {'':5}"
        if own[0].asked.boxes:
            found = f"{percent(a.is_right for a in own)}   {np.mean([a.overlap for a in own]):.3f}"
        counts = Counter(answer.found.decision for answer in own)
        shares = [100 * counts[name] / len(own) for name in ("subject", "several", "unsure", "none")]
        right = percent(a.is_right for a in own if a.found.decision == "subject") if own[0].asked.boxes else ""
        lines.append(
            f"{kind:26} {len(own):6}  {found:14}   {shares[0]:6.1f}  {right:>6}   {shares[1]:6.1f}  {shares[2]:6.1f} "
            f"{shares[3]:6.1f}"
        )
    return lines


def in_order(kinds: Iterable[str]) -> list[str]:
    """Each part after its whole: those that begin with spaces belong to the one before."""
    kinds = list(dict.fromkeys(kinds))
    wholes = ["voc07", "localize, centred", "localize, off-centre", "held out", NOTHING, "large"]
    parts = {
        "localize, centred": [kind for kind in kinds if kind.endswith(", centred") and kind[0] == " "],
        "localize, off-centre": [kind for kind in kinds if kind.endswith(", off-centre") and kind[0] == " "],
        NOTHING: ["  empty scenes", "  beside subjects", "  textures and blurs", "  patterns"],
    }
    taken = {kind for own in parts.values() for kind in own}
    parts["held out"] = sorted(kind for kind in kinds if kind[0] == " " and kind not in taken)
    order = [kind for whole in wholes for kind in [whole, *parts.get(whole, [])]]
    return [kind for kind in order if kind in kinds] + [kind for kind in kinds if kind not in order]


def percent(values: Iterable[bool]) -> str:
    values = list(values)
    return f"{100 * sum(values) / len(values):6.1f}" if values else "     -"


def true_none(said: Sequence[Answer]) -> str:
    """How often `none` is true."""
    with_one = [answer.found.decision == "none" for answer in said if answer.asked.boxes]
    without = [answer.found.decision == "none" for answer in said if not answer.asked.boxes]
    missed, right = sum(with_one) / max(1, len(with_one)), sum(without) / max(1, len(without))
    share = f"{100 * right / (missed + right):.1f} %" if missed + right else "-"
    return (
        f"none: said of {100 * right:.1f} % of the photos of nothing and of {100 * missed:.1f} % of the others; true "
        f"{share} of the times where both are as many"
    )


def group_said(named: Any) -> str:
    """One of GROUPS, or "" for nothing."""
    if named is None or named.group in (None, "unknown"):
        return ""
    return named.group if named.group in ("person", "vehicle", "animal") else "thing"


def confusion(said: Sequence[Answer]) -> list[str]:
    """What is said of the photos that show one kind of thing, and of those that show nothing."""
    groups = [*GROUPS, ""]
    lines = [
        f"{'said, % of photos':26} photos" + "".join(f"{group or 'no group':>10}" for group in groups) + "   of said"
    ]
    rows = [(group, [a for a in said if a.asked.kinds[0] == "voc07" and a.asked.group == group]) for group in GROUPS]
    rows.append(("nothing (scenes)", [a for a in said if "  empty scenes" in a.asked.kinds]))
    for name, own in rows:
        if not own:
            continue
        counts = Counter(group_said(answer.found.named) for answer in own)
        shares = "".join(f"{100 * counts[group] / len(own):10.1f}" for group in groups)
        answered = len(own) - counts[""]
        right = f"{100 * counts[name] / answered:6.1f} %" if answered and name in GROUPS else "-"
        lines.append(f"{name:26} {len(own):6}{shares}{right:>10}")
    three = [a for a in said if a.asked.kinds[0] == "voc07" and a.asked.group in ("person", "vehicle", "animal")]
    right_all = percent(group_said(a.found.named) == a.asked.group for a in three)
    right_said = percent(group_said(a.found.named) == a.asked.group for a in three if group_said(a.found.named))
    lines.append(f"person, vehicle or animal: {right_all.strip()} % right of all, {right_said.strip()} % of those said")
    return lines


def every(asked: Sequence[Asked], nth: int) -> list[Asked]:
    """Every nth photo of each line of the table."""
    counts: Counter[str] = Counter()
    chosen = []
    for each in asked:
        kind = each.kinds[-1]
        if counts[kind] % nth == 0:
            chosen.append(each)
        counts[kind] += 1
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--quick", action="store_true", help="every tenth photo, and ten large ones")
    parser.add_argument("--calibrate", action="store_true", help="fit on one half, and report on the other")
    parser.add_argument("--write", action="store_true", help="store what --calibrate fits in the model's folder")
    parser.add_argument("--large", type=int, help=f"large photos (default: {LARGE})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.write and not given.calibrate:
        parser.error("--write stores what --calibrate fits; give both")
    try:
        loaded = pl.load(given.model, device=given.device)
    except pl.PatchlightError as error:
        parser.error(str(error))
    began = time.perf_counter()
    asked = [
        *voc07(given.shared / "voc07"),
        *localize_photos(given.shared / "localize"),
        *held_out_subjects(given.shared / "subjects"),
        *photos_of_nothing(given.shared),
    ]
    if given.quick:
        asked = every(asked, 10)
    if given.calibrate:
        loaded = with_every_name(loaded)
        loaded = calibrated(loaded, list(answers(loaded, [each for each in asked if each.half == 0])))
        asked = [each for each in asked if each.half == 1]
        stored: dict[str, Any] = {"subject": loaded.subject.to_dict() if loaded.subject else None}
        if loaded.groups is not None:
            stored["groups_said_from"] = loaded.groups.said_from
        print(f"\r{json.dumps(stored, indent=2)}")
        if given.write:
            print(f"stored in {write_into_config(loaded, stored)}")
    said = list(answers(loaded, asked))
    count = given.large if given.large is not None else 10 if given.quick else LARGE
    large = list(large_photos(given.shared, count))
    for name, settings in (
        ("large", {}),
        ("large, tiles", {"tiles": TILES}),
        ("large, tiles, second look", {"tiles": TILES, "second_look": True}),
    ):
        kinds = [dataclasses.replace(each, kinds=(name,)) for each in large]
        said += answers(loaded, kinds, **settings)
    tell("")
    print(f"\r{given.model}, {len(asked):,} photos, on {given.device}, {time.perf_counter() - began:.0f} s")
    small = [answer for answer in said if not answer.asked.kinds[0].startswith("large")]
    corloc = float(np.mean([answer.is_right for answer in said if answer.asked.kinds[0] == "voc07"]))
    print(
        "\n".join([*table(said), true_none(small), "", *confusion(said), "", *published(corloc, "1,000 photos of it")])
    )


if __name__ == "__main__":
    main()
