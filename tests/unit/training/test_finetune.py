"""Which recipe is chosen for which photos."""

from pathlib import Path

import pytest
import torch

from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.training.data import Dataset
from patchlight.training.finetune import choose_recipe, in_words, resumed_recipe
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
    config = choose_recipe(start(tmp_path), "nowhere", Many(count, classes))
    assert config.trainable_blocks == blocks
    assert config.model.num_classes == classes
    assert config.model.image_size == (24, 24), "as the photos are prepared"
    assert config.batch_size <= max(8, count // 10)
    assert config.epochs * count / config.batch_size >= 100
    assert f"{count:,} photos in {classes} classes" in in_words(config, Many(count, classes))


@pytest.mark.parametrize(
    ("asked", "like", "said"),
    [
        (0, 20, "the head alone learns, on frozen features;"),
        (4, 3_000, "the last 4 of 6 blocks learn, everything before them is frozen;"),
        (6, 3_000, "all 6 blocks learn, everything before them is frozen;"),
        (None, 50_000, "the whole model learns, earlier blocks more slowly;"),
    ],
)
@pytest.mark.parametrize("count", [1_001, 3_000, 50_000])
def test_who_says_how_much_learns_gets_the_settings_for_it(
    asked: int | None, like: int, said: str, count: int, tmp_path: Path
) -> None:
    loaded = start(tmp_path)
    expected = choose_recipe(loaded, "nowhere", Many(like, 2))
    config = choose_recipe(loaded, "nowhere", Many(count, 2), changes={"trainable_blocks": asked})
    assert config.trainable_blocks == asked
    assert (config.optim, config.augment, config.model) == (expected.optim, expected.augment, expected.model)
    assert said in in_words(config, Many(count, 2))


def test_the_sentence_is_true_of_what_was_changed(tmp_path: Path) -> None:
    changes = {"trainable_blocks": None, "optim.layer_decay": 1.0, "epochs": 1.0}
    loaded = start(tmp_path)
    config = choose_recipe(loaded, "nowhere", Many(20, 2), changes=changes)
    assert in_words(config, Many(20, 2)).endswith(": the whole model learns; 1 epoch, batches of 8")
    with pytest.raises(PatchlightError, match="trainable_blocks=99: the model has 6 blocks"):
        choose_recipe(loaded, "nowhere", Many(20, 2), changes={"trainable_blocks": 99})


def test_a_run_goes_on_with_what_was_chosen_for_its_photos(tmp_path: Path) -> None:
    loaded = start(tmp_path)
    begun = choose_recipe(loaded, "nowhere", Many(118, 2), changes={"batch_size": 8})
    assert choose_recipe(loaded, "nowhere", Many(120, 2), changes={"batch_size": 8}) != begun
    assert begun.start is not None
    assert resumed_recipe(begun, begun.start, "nowhere", changes={}) == begun
    assert resumed_recipe(begun, begun.start, "there", changes={"epochs": 3.0}).epochs == 3.0
    assert resumed_recipe(begun, "other", "there", validation="more", changes={}) == begun.changed(
        {"start": "other", "data.train": "there", "data.validation": "more"}
    )
