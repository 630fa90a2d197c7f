"""Training from Python: what it gives, from whatever photos come, and that it is what the command does."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import random_split

import patchlight as pl
from coloured_photos import write_coloured_photos
from command_line import patchlight
from models_at_random import tiny_vit
from patchlight.images.augment import AugmentConfig
from patchlight.training.checkpoint import fingerprint
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig
from patchlight.training.own_dataset import open_own
from patchlight.training.sources import open_dataset
from patchlight.weights.save import save
from warm_python import run_warm

RECIPE = """
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.training.config import DataConfig, TrainConfig


def config():
    return TrainConfig(
        model=ViTConfig(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, num_classes=3),
        data=DataConfig(train="photos", workers=0, validation_share=0.25),
        preprocess=PreprocessConfig(image_size=16),
        epochs=1.0,
        batch_size=9,
        log_every=1,
    )
"""
SILENT = pl.Reporter()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    folder.mkdir()
    return write_coloured_photos(folder, 24, 20)


def settings(**changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=pl.ViTConfig(image_size=16, patch_size=8, width=16, depth=2, num_heads=2, num_classes=3),
        data=DataConfig(train="photos", workers=0, validation_share=0.25),
        preprocess=pl.PreprocessConfig(image_size=16),
        augment=AugmentConfig(crop="resized"),
        optim=OptimConfig(lr=1e-2),
        epochs=8.0,
        batch_size=9,
        log_every=1,
    )
    return config.changed(changes)


def weights(folder: Path) -> str:
    return fingerprint(pl.load(folder).model.state_dict())


class Coloured(torch.utils.data.Dataset[tuple[Any, Any]]):
    """The photos of a folder with three folders of classes, in the way that `form` says."""

    def __init__(self, folder: Path, form: str = "image", classes: Sequence[Any] | None = None) -> None:
        self.paths, self.form = sorted(folder.glob("*/*.png")), form
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path = self.paths[index]
        name = path.parent.name
        number = ["blue", "green", "red"].index(name)
        image = Image.open(path)
        return {
            "image": (image, number),
            "path": (path, name),
            "bytes": (path.read_bytes(), np.int64(number)),
            "array": (np.asarray(image.convert("RGB")), torch.tensor(number)),
        }[self.form]


def test_train_gives_the_run_its_figures_and_the_model(photos: Path, tmp_path: Path) -> None:
    trained = pl.train(settings(), tmp_path / "run", photos=photos, settings={"epochs": 12.0}, reporter=SILENT)
    assert trained.folder == tmp_path / "run"
    assert trained.config == settings(epochs=12.0, **{"data.train": str(photos)})
    assert (trained.photos, trained.measures["accuracy"]) == (9, trained.accuracy)
    assert trained.accuracy is not None
    assert trained.accuracy > 0.6
    assert [row["step"] for row in trained.course() if "loss" in row] == list(range(1, 37))
    assert trained.loaded.labels == ("blue", "green", "red")
    assert trained.loaded is trained.loaded
    assert pl.classify(photos / "red" / "0.png", trained.loaded).labels


def test_it_is_what_the_command_does(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    change = {"data.train": str(photos), "epochs": 2}
    command = ["train", "recipe.py", "--out", "by-command", "--set", f"data.train={photos}", "--set", "epochs=2"]
    done = patchlight(*command, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trained = pl.train(tmp_path / "recipe.py", tmp_path / "own", settings=change, device="cpu", reporter=SILENT)
    assert weights(trained.folder) == weights(tmp_path / "by-command")
    assert (tmp_path / "own" / "run.json").read_bytes() == (tmp_path / "by-command" / "run.json").read_bytes()
    assert f"accuracy {trained.accuracy:.2%} on {trained.photos} photos" in done.stdout

    start = save(tiny_vit(image_size=16), tmp_path / "start", preprocess=pl.PreprocessConfig(image_size=16))
    tune = ["finetune", str(photos), "--out", "tuned", "--model", str(start), "--set", "epochs=2", "--device", "cpu"]
    done = patchlight(*tune, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "tuned in Python"
    tuned = pl.finetune(photos, out, model=start, settings={"epochs": 2}, device="cpu", reporter=SILENT)
    assert weights(tuned.folder) == weights(tmp_path / "tuned")


@pytest.mark.parametrize("form", ["image", "path", "bytes", "array"])
def test_a_dataset_of_ones_own_teaches_what_the_same_files_do(form: str, photos: Path, tmp_path: Path) -> None:
    config = settings(epochs=1.0, **{"data.validation_share": 0.0, "data.train": str(photos)})
    validation = photos
    expected = pl.train(config, tmp_path / "files", validation=validation, reporter=SILENT)
    own = Coloured(photos, form, ["blue", "green", "red"])
    trained = pl.train(config, tmp_path / "own", photos=own, validation=Coloured(photos, "path"), reporter=SILENT)
    assert weights(trained.folder) == weights(expected.folder)
    assert trained.accuracy == expected.accuracy
    assert trained.loaded.labels == ("blue", "green", "red")
    assert trained.config.data.train == "Coloured in Python"
    assert "Coloured in Python: 36 photos of 3 classes" in (trained.folder / "README.md").read_text()


def test_a_part_of_a_dataset_with_workers_and_going_on(photos: Path, tmp_path: Path) -> None:
    own, validation = random_split(Coloured(photos, classes=["b", "g", "r"]), [27, 9], torch.Generator().manual_seed(0))
    changes = {"data.workers": 1, "epochs": 1.0}
    whole = pl.train(settings(), tmp_path / "a", photos=own, validation=validation, settings=changes, reporter=SILENT)
    assert whole.loaded.labels == ("b", "g", "r")
    assert whole.photos == 9

    def stop(now: pl.Progress) -> None:
        if now.what.startswith("epoch") and now.done == 2:
            raise KeyboardInterrupt

    given: dict[str, Any] = {"photos": own, "validation": validation, "settings": changes | {"checkpoint_every": 1}}
    with pytest.raises(KeyboardInterrupt):
        pl.train(settings(), tmp_path / "b", **given, reporter=pl.Reporter(progress=stop))
    lines: list[str] = []
    resumed = pl.train(settings(), tmp_path / "b", **given, resume=True, reporter=pl.Reporter(tell=lines.append))
    assert "continuing after step 1 of 3" in lines
    assert weights(resumed.folder) == weights(whole.folder)
    given["photos"] = torch.utils.data.Subset(own, range(26))
    with pytest.raises(pl.PatchlightError, match="the training photos have changed since"):
        pl.train(settings(), tmp_path / "b", **given, resume=True, reporter=SILENT)


def test_finetune_takes_a_dataset(photos: Path, tmp_path: Path) -> None:
    start = save(tiny_vit(image_size=16), tmp_path / "start", preprocess=pl.PreprocessConfig(image_size=16))
    lines: list[str] = []
    pairs = [(path, path.parent.name) for path in sorted(photos.glob("*/*.png"))]
    given: dict[str, Any] = {"model": start, "settings": {"epochs": 3, "data.workers": 0}}
    tuned = pl.finetune(pairs, tmp_path / "run", **given, reporter=pl.Reporter(tell=lines.append))
    assert lines[0].startswith("36 photos in 3 classes: the head alone learns")
    assert tuned.loaded.labels == ("blue", "green", "red")
    assert tuned.config.data.train == "list in Python"
    again = pl.finetune(pairs, tmp_path / "run", **given, resume=True, reporter=SILENT)
    assert again.accuracy == tuned.accuracy


def test_photos_alone_teach_without_labels(photos: Path, tmp_path: Path) -> None:
    config = settings(epochs=1.0, **{"model.num_classes": 0, "mae.decoder_width": 8, "mae.decoder_depth": 1})
    images = [Image.open(path) for path in sorted(photos.glob("*/*.png"))]
    trained = pl.train(config, tmp_path / "run", photos=images, reporter=SILENT)
    assert trained.accuracy is None
    assert "explained" in trained.course()[-1]
    with pytest.raises(pl.PatchlightError, match=r"^list\[0\]: is a PngImageFile, not a pair \(photo, label\)$"):
        pl.train(settings(), tmp_path / "labels", photos=images, reporter=SILENT)


def test_what_cannot_be_read_is_left_out_and_said(photos: Path, tmp_path: Path) -> None:
    pairs = [(str(path), path.parent.name) for path in sorted(photos.glob("*/*.png"))]
    (tmp_path / "broken.png").write_bytes(b"no photo")
    pairs.insert(3, (str(tmp_path / "broken.png"), "red"))
    lines: list[str] = []
    trained = pl.train(settings(epochs=1.0), tmp_path / "run", photos=pairs, reporter=pl.Reporter(tell=lines.append))
    assert trained.photos == 9
    assert any(line.startswith("left out, list[3]: not-an-image") for line in lines)
    assert "photos that cannot be read and were left out: 1" in lines
    same, files = open_dataset(pairs, workers=0), open_dataset(photos)
    assert [same.content_hash(i) for i in range(36)] == [files.content_hash(i) for i in range(36)]


class Failing:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("the disk is gone")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "int is no set of photos; give a path, or a Dataset with a length"),
        (iter([]), "list_iterator is no set of photos; "),
        ([], "list in Python: has no photos; add some"),
        (Failing(), r"Failing\[0\]: cannot be read \(RuntimeError: the disk is gone\)"),
        ([("a.png", "x", "y")], r"list\[0\]: is 3 things, not a pair \(photo, label\)"),
        ([("missing.png", "x")], r"list in Python: has no photos \(left out, list\[0\]: missing"),
        (
            [(torch.zeros(3, 8, 8), "x")],
            r"list\[0\]: a photo is .* not Tensor; leave ToTensor and the like out",
        ),
        ([(Image.new("RGB", (8, 8)), 0.5)], r"list\[0\]: has the label 0\.5; give the name of a class, or its number"),
        ([(Image.new("RGB", (8, 8)), -1)], "list: label -1; labels count the classes from 0"),
        ([(Image.new("RGB", (8, 8)), each) for each in ("x", 1)], r"some labels are names, others numbers \(1\)"),
        ([(Image.new("RGB", (8, 8)), 0)], "all photos .*are of one class, '0'"),
    ],
)
def test_what_is_no_set_is_refused_in_a_line(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(pl.PatchlightError, match=message) as caught:
        pl.train(settings(**{"model.num_classes": 1}), tmp_path / "run", photos=given, reporter=SILENT)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_numbers_beyond_the_classes_and_what_is_no_recipe(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(
        pl.PatchlightError, match=r"^Coloured: label 2, but 2 classes; labels count the classes from 0$"
    ):
        pl.train(settings(), tmp_path / "run", photos=Coloured(photos, classes=["a", "b"]), reporter=SILENT)
    with pytest.raises(pl.PatchlightError, match=r"recipe=5 is not a recipe; give a TrainConfig"):
        pl.train(5, tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(pl.PatchlightError, match=r"no-recipe: there is no such recipe"):
        pl.train("no-recipe", tmp_path / "run")


def test_numbers_without_names_and_names_of_several_words(photos: Path) -> None:
    assert open_own(Coloured(photos), labelled=True, workers=0, reporter=SILENT).classes == ("0", "1", "2")
    own = Coloured(photos, classes=[("sea", "ocean"), ("grass",), ("fire", "flame")])
    assert open_own(own, labelled=True, workers=0, reporter=SILENT).classes == ("sea, ocean", "grass", "fire, flame")


SCRIPT = """
import sys
from pathlib import Path

from PIL import Image

import patchlight as pl
from patchlight.training.config import DataConfig, TrainConfig

print("begun")


class Mine:
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*/*.png"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return Image.open(self.paths[index]), self.paths[index].parent.name


config = TrainConfig(
    model=pl.ViTConfig(image_size=16, patch_size=8, width=16, depth=1, num_heads=2, num_classes=3),
    data=DataConfig(train="mine", workers=1),
    preprocess=pl.PreprocessConfig(image_size=16),
    epochs=1.0,
    batch_size=9,
)
trained = pl.train(config, sys.argv[2], photos=Mine(sys.argv[1]) if sys.argv[3] == "own" else sys.argv[1])
print(trained.loaded.labels)
"""


@pytest.mark.parametrize("which", ["own", "files"])
def test_a_plain_script_that_asks_for_no_main(which: str, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = run_warm([tmp_path / "script.py", photos, tmp_path / "run", which], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "begun\n('blue', 'green', 'red')\n"
    assert "Traceback" not in done.stderr
    cannot = "Mine: cannot be sent to other processes, so that this one reads its photos; where its class stands in"
    assert (cannot in done.stderr) == (which == "own")
