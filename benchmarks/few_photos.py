"""`patchlight finetune` on few photos beside a logistic regression on the same features: others that are named right.

    python benchmarks/few_photos.py PHOTOS                     # a folder a class, or a CSV (file,label)
    python benchmarks/few_photos.py --localize ../shared/data/localize --each 5 20 60 --draws 4

So many photos of each class are drawn, `finetune` teaches the default model's head with them (a fifth of which it holds
out to judge by), and all photos that were not drawn are named. Beside it: a logistic regression by L-BFGS with a
penalty of 0.1, on the features of all that were drawn. Means over draws, with their spread.
"""

import argparse
import csv
import json
import random
import statistics
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.training.data import evaluation_batches
from patchlight.training.features import features_of
from patchlight.training.finetune import choose_recipe
from patchlight.training.loop import train
from patchlight.training.sources import open_dataset
from patchlight.weights.load import Loaded, load

KINDS = {"cub": "bird", "pets": "pet", "deer": "deer"}


def localize_table(folder: Path, target: Path) -> Path:
    """A CSV of the localisation photos by what they show."""
    rows = json.loads((folder / "boxes.json").read_text())
    write_table(target, [(str((folder / row["file"]).resolve()), KINDS[row["source"].split("/")[0]]) for row in rows])
    return target


def write_table(target: Path, rows: list[tuple[str, str]]) -> None:
    with target.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *rows])


def finetuned(loaded: Loaded, table: Path, run: Path, features_ND: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """The answers of a head that `finetune` taught, and its classes."""
    train(choose_recipe(loaded, str(table), open_dataset(table), changes={"data.workers": 0}), run)
    taught = load(run)
    assert taught.model.head is not None
    assert taught.labels is not None
    with torch.inference_mode():
        return taught.model.head(features_ND).argmax(1), taught.labels


def regression(features_MD: Tensor, labels_M: Tensor, classes: int, penalty: float = 0.1) -> tuple[Tensor, Tensor]:
    weight_DK = torch.zeros(features_MD.shape[1], classes, requires_grad=True)
    bias_K = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_DK, bias_K], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(features_MD @ weight_DK + bias_K, labels_M) + penalty / 2 * weight_DK.square().sum()
        value.backward()
        return value.item()

    optimizer.step(loss)
    return weight_DK.detach(), bias_K.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="?", type=Path)
    parser.add_argument("--localize", type=Path, help="the folder of localisation photos with boxes.json")
    parser.add_argument("--each", nargs="+", type=int, default=[5, 20, 60], help="photos of each class")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--model", default="default")
    arguments = parser.parse_args()
    if min(arguments.each) < 2:
        parser.error("--each: give 2 photos a class or more, of which one is held out to judge by")
    with tempfile.TemporaryDirectory() as folder:
        source = arguments.photos
        if arguments.localize is not None:
            source = localize_table(arguments.localize, Path(folder) / "all.csv")
        elif source is None:
            parser.error("name labelled photos, or --localize FOLDER")
        photos, loaded = open_dataset(source), load(arguments.model)
        preprocess = loaded.preprocess.config
        batches = evaluation_batches(
            photos, batch_size=32, preprocess=preprocess, workers=2, device=torch.device("cpu")
        )
        features_ND, labels_N = features_of(loaded.model, batches)
        root = source.parent if source.is_file() else source
        print(f"{len(photos)} photos in {len(photos.classes)} classes, {arguments.draws} draws")
        for each in arguments.each:
            if each >= labels_N.bincount().max():
                print(f"{each:4} a class: leaves no photos to ask about")
                continue
            ours, theirs = [], []
            for draw in range(arguments.draws):
                chance = random.Random(f"{each} {draw}")
                by_class = [(labels_N == label).nonzero().flatten().tolist() for label in range(len(photos.classes))]
                drawn = [index for members in by_class for index in chance.sample(members, min(each, len(members)))]
                rest = [index for index in range(len(photos)) if index not in set(drawn)]
                table = Path(folder) / f"{each}-{draw}.csv"
                names = [(str((root / photos.names[i]).resolve()), photos.classes[labels_N[i]]) for i in drawn]
                write_table(table, names)
                answers, classes = finetuned(loaded, table, Path(folder) / f"run-{each}-{draw}", features_ND[rest])
                numbers = torch.tensor([photos.classes.index(name) for name in classes])
                ours.append((numbers[answers] == labels_N[rest]).float().mean().item())
                weight_DK, bias_K = regression(features_ND[drawn], labels_N[drawn], len(photos.classes))
                found = (features_ND[rest] @ weight_DK + bias_K).argmax(1)
                theirs.append((found == labels_N[rest]).float().mean().item())
            (a, a_spread), (b, b_spread) = ((statistics.mean(x), statistics.pstdev(x)) for x in (ours, theirs))
            print(
                f"{each:4} a class: finetune {a:.1%} +- {a_spread:.1%}, regression {b:.1%} +- {b_spread:.1%}, "
                f"ratio {a / b:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
