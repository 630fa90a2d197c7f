"""How well the masks that `--cutout` makes fit, and what they cost: both in one run.

    python benchmarks/cutouts.py [--photos 1476] [--cost-photos 8] [--rounds 3] [--shared ../shared/data]

The masks are compared with those of DUTS (48 x 48, stretched over the photo) on photos that the default model is not
trained on: a tenth of ../shared/data/subjects, by a hash of their names (recipes/gather_default_photos.py). A mask
is made as `patchlight crop --cutout --subjects all` makes it, for each box that counts as a subject; IoU is
intersection over union of all of a photo's masks with the true one, above one half. Beside it stand the heat alone,
above one half, and the boxes, filled. Photos that are called `none` get no crop, and are counted apart.

The cost is the processor's time of a run with the option as a multiple of the time of one without, in rounds that are
interleaved (the median counts): on photos of 12 to 24 megapixels (benchmarks/crop.py), with full-size crops and with
`--size 1200x1200`, in one process. At most 1.3 is what is asked for.
"""

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from crop import make_photos
from default_model import SHARED
from gather_default_photos import in_tenth, plan_subjects
from subjects import contents

import patchlight as pl
from patchlight.batch.rows import heat_of, row_of
from patchlight.images.crop import Cut, cut_out

MASK_SIDE = 48
KINDS = {"--cutout": {"cutout": True}, "--background white": {"background": "white"}}
SIZES = {"full size": {}, "--size 1200x1200": {"size": "1200x1200"}}


def compare_masks(folder: Path, most: int, loaded: pl.Loaded) -> None:
    masks, about = np.load(folder / "masks.npz"), json.loads((folder / "boxes.json").read_text())
    places = {f"{int(number):06}": place for place, number in enumerate(masks["ids"])}
    rows, _ = plan_subjects(folder, "subjects")
    rows = [
        row
        for row in rows
        if in_tenth(row.file) and Path(row.file).stem in places and about[Path(row.file).stem]["set"].startswith("duts")
    ]
    rows = rows[:: max(1, len(rows) // most)][:most]
    overlaps: dict[str, list[float]] = {"mask": [], "heat": [], "boxes": []}
    nothing = 0
    for row, content in contents(folder, rows):
        found = pl.localize(content, loaded, subjects="all")
        if found.decision == "none":
            nothing += 1
            continue
        true_HW = np.unpackbits(masks[f"bits_{MASK_SIDE}x{MASK_SIDE}"][places[Path(row.file).stem]])
        true_HW = true_HW.reshape(MASK_SIDE, MASK_SIDE) > 0
        height, width = found.view.source_size
        order = sorted(found.subjects[1:], key=lambda subject: -subject.confidence)
        boxes = [subject.box for subject in [found.subjects[0], *order[: found.count - 1]]]
        heat = heat_of(row_of("", found))
        mask, filled = Image.new("L", (width, height)), np.zeros((height, width), np.uint8)
        for box, crop in zip(boxes, cut_out(content, boxes, Cut(cutout=True), heat=heat), strict=True):
            with Image.open(io.BytesIO(crop.content)) as made:
                alpha = made.convert("RGBA").getchannel("A")  # a WebP whose mask is all of it has none
            mask.paste(255, crop.region[:2], alpha)
            x0, y0, x1, y1 = box.to_ints()
            filled[y0:y1, x0:x1] = 255
        size = MASK_SIDE, MASK_SIDE
        shown = {
            "mask": np.asarray(mask.resize(size, Image.Resampling.BOX)) >= 128,
            "heat": np.asarray(Image.fromarray(heat.levels_hw).resize(size, Image.Resampling.BICUBIC)) >= 128,
            "boxes": np.asarray(Image.fromarray(filled).resize(size, Image.Resampling.BOX)) >= 128,
        }
        for name, mask_HW in shown.items():
            overlaps[name].append(float((mask_HW & true_HW).sum() / max(1, (mask_HW | true_HW).sum())))
    print(f"{len(rows):,} photos of DUTS that are held out, {nothing} of them without a subject by the model\n")
    print("| | IoU, mean | median | photos above 0.5 | above 0.8 |\n|---|---|---|---|---|")
    for name, each in overlaps.items():
        above = [f"{np.mean(np.array(each) > least):.0%}" for least in (0.5, 0.8)]
        print(f"| {name} | {np.mean(each):.3f} | {np.median(each):.3f} | {above[0]} | {above[1]} |")


def compare_costs(photos: int, rounds: int, loaded: pl.Loaded) -> None:
    print("\n| | " + " | ".join(KINDS) + " | seconds of a core a photo, without |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_photos(folder / "photos", photos)
        how = pl.CropRunSettings(workers=0, device="cpu", report=False, overwrite=True)

        def seconds(**settings: object) -> float:
            begun = time.process_time()
            asked = pl.CropSettings(**settings)  # type: ignore[arg-type]
            pl.crop_photos(folder / "photos", folder / "out", asked, how, model=loaded, reporter=pl.Reporter())
            return time.process_time() - begun

        for name, size in SIZES.items():
            seconds(**size)  # what is read from the disk is read once for all
            ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
            plain = []
            for _ in range(rounds):
                plain.append(seconds(**size))
                for kind, more in KINDS.items():
                    ratios[kind].append(seconds(**size, **more) / plain[-1])
            said = [
                f"{statistics.median(each):.2f} ({', '.join(f'{r:.2f}' for r in each)})" for each in ratios.values()
            ]
            print(f"| {name} | {' | '.join(said)} | {statistics.median(plain) / photos:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=1476, help="of DUTS")
    parser.add_argument("--cost-photos", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", type=Path, default=SHARED)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loaded = pl.load("default")
    if asked.photos:
        compare_masks(asked.shared / "subjects", asked.photos, loaded)
    if asked.cost_photos:
        compare_costs(asked.cost_photos, asked.rounds, loaded)


if __name__ == "__main__":
    main()
