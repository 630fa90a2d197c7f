"""Which recipe suits one's own photos: how much of a checkpoint to let learn, by how much there is to learn from."""

import dataclasses
from dataclasses import dataclass

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import AugmentConfig
from patchlight.train.config import DataConfig, OptimConfig, TrainConfig
from patchlight.train.data import Dataset
from patchlight.train.sources import open_dataset
from patchlight.weights.load import Loaded

FEW, MANY = 1_000, 20_000
"""Photos up to which the head alone learns, and from which on the whole model does."""
FEW_A_CLASS = 10
"""And photos of a class below which the head alone learns, however many classes there are."""

STEPS = {"probe": 1_000, "partial": 2_000, "full": 6_000}
EPOCHS = {"probe": 20, "partial": 15, "full": 10}
"""As many steps as these, but every photo is seen at least so many times, and at most a hundred."""


@dataclass(frozen=True)
class Choice:
    config: TrainConfig
    why: str
    """One sentence for the user."""


def choose_recipe(loaded: Loaded, photos: str, training: Dataset, *, validation: str | None = None) -> Choice:
    """Settings to fine-tune a checkpoint on a set of labelled photos.

    Without `validation`, the set's own validation part is taken, where it has one, and else a part held out.
    """
    if validation is None and _has_own_validation(photos, training):
        validation = photos
    count, classes = len(training), len(training.classes)
    kind = "probe" if count <= FEW or count < FEW_A_CLASS * classes else "partial" if count < MANY else "full"
    depth = loaded.config.depth
    learning_blocks = {"probe": 0, "partial": max(1, depth // 3), "full": None}[kind]
    batch_size = next(size for size in (8, 16, 32, 64, 128, 256) if size == 256 or count < 40 * size)
    epochs = max(EPOCHS[kind], min(100, round(STEPS[kind] * batch_size / max(1, count))))
    what = {
        "probe": "the head alone learns, on frozen features: more would learn the photos by heart",
        "partial": f"the last {learning_blocks} of {depth} blocks learn, the earlier ones stay as they are",
        "full": "the whole model learns, earlier blocks more slowly",
    }[kind]
    model = dataclasses.replace(
        loaded.config,
        image_size=loaded.preprocess.config.image_size,  # some were made for a larger one than they are used with
        num_classes=classes,
        drop_path=0.1 if kind == "full" else 0.0,
    )
    if isinstance(model, ViTConfig):
        model = dataclasses.replace(model, head_hidden=0)
    config = TrainConfig(
        model=model,
        data=DataConfig(train=photos, validation=validation, validation_share=0.2 if count < 500 else 0.1),
        preprocess=loaded.preprocess.config,
        augment=AugmentConfig(
            crop="resized",
            area=(0.6, 1.0) if kind == "probe" else (0.35, 1.0),
            colour=0.1 if kind == "probe" else 0.3,
            policy="none" if kind == "probe" else "trivial",
            mix=0.5 if kind == "full" else 0.0,
            mixup=0.2 if kind == "full" else 0.0,
            cutmix=1.0 if kind == "full" else 0.0,
        ),
        optim=OptimConfig(
            lr={"probe": 3e-3, "partial": 3e-4, "full": 5e-4}[kind],
            weight_decay=0.0 if kind == "probe" else 0.05,
            layer_decay=1.0 if kind == "probe" else 0.75,
            warmup=0.1,
        ),
        start=str(loaded.provenance.source),
        learning_blocks=learning_blocks,
        epochs=float(epochs),
        batch_size=batch_size,
        label_smoothing=0.1 if kind == "full" else 0.0,
        evaluate_every=max(1.0, epochs / 10),
        checkpoint_every=200,
    )
    return Choice(config, f"{count:,} photos in {classes} classes: {what}")


def _has_own_validation(photos: str, training: Dataset) -> bool:
    """Whether the set comes in two parts; of one that does not, every part is the whole."""
    try:
        return open_dataset(photos, "validation").fingerprint() != training.fingerprint()
    except PatchlightError:
        return False
