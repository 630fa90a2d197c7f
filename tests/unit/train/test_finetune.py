"""Which recipe is chosen for which photos."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.train.data import Dataset
from patchlight.train.finetune import choose_recipe
from patchlight.train.sources import open_dataset
from patchlight.weights.load import Loaded, load
from patchlight.weights.save import save


class Many(Dataset):
    """As many photos as one says, none of which exists."""

    def __init__(self, count: int, classes: int) -> None:
        self.classes = tuple(f"class {k}" for k in range(classes))
        self.labels_N = torch.arange(count) % classes

    def __len__(self) -> int:
        return len(self.labels_N)


def start(folder: Path, **changes: int) -> Loaded:
    model = tiny_vit(depth=6, image_size=32, **changes)
    return load(save(model, folder / "start", preprocess=PreprocessConfig(image_size=24)))


@pytest.mark.parametrize(
    ("count", "classes", "blocks"),
    [(20, 2, 0), (1_000, 5, 0), (3_000, 5, 2), (3_000, 500, 0), (19_999, 10, 2), (50_000, 100, None)],
)
def test_more_photos_let_more_of_the_model_learn(count: int, classes: int, blocks: int | None, tmp_path: Path) -> None:
    choice = choose_recipe(start(tmp_path), "nowhere", Many(count, classes))
    config = choice.config
    assert config.learning_blocks == blocks
    assert config.model.num_classes == classes
    assert config.model.image_size == (24, 24), "as the photos are prepared"
    assert config.batch_size <= max(8, count // 10)
    assert config.epochs * count / config.batch_size >= 100
    assert f"{count:,} photos in {classes} classes" in choice.why


def test_a_validation_part_of_ones_own_is_used(tmp_path: Path) -> None:
    for part, shades in {"train": (0, 10, 20), "val": (5, 15)}.items():
        for name, red in {"a": 0, "b": 200}.items():
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for shade in shades:
                Image.new("RGB", (8, 8), (red, shade, 0)).save(tmp_path / "photos" / part / name / f"{shade}.png")
    photos = str(tmp_path / "photos")
    assert choose_recipe(start(tmp_path), photos, open_dataset(photos)).config.data.validation == photos
    whole = str(tmp_path / "photos" / "train")
    assert choose_recipe(load(tmp_path / "start"), whole, open_dataset(whole)).config.data.validation is None
