"""Which recipe suits one's own photos: how much of a checkpoint to let learn, by how much there is to learn from."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from patchlight.images.augment import AugmentConfig
from patchlight.json_config import field_names
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig
from patchlight.training.data import Dataset
from patchlight.weights.load import Loaded

FEW, MANY = 1_000, 20_000
"""Photos up to which the head alone learns, and from which on the whole model does."""
FEW_A_CLASS = 10
"""And photos of a class below which the head alone learns, however many classes there are."""

STEPS = {"probe": 1_000, "partial": 2_000, "full": 6_000}
EPOCHS = {"probe": 20, "partial": 15, "full": 10}
"""As many steps as these, but every photo is seen at least so many times, and at most a hundred."""

VARIATIONS = 8
"""Of each photo, where the head alone learns: each is read and looked at once, which is all but all of the time."""


Kind = Literal["probe", "partial", "full"]


def choose_recipe(
    loaded: Loaded,
    photos: str,
    training: Dataset,
    *,
    validation: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Settings to fine-tune a checkpoint on a set of labelled photos, with the changes that are asked for."""
    changes = changes or {}
    count, classes = len(training), len(training.classes)
    if "trainable_blocks" in changes:
        asked = changes["trainable_blocks"]
        kind: Kind = "full" if asked is None else "probe" if asked == 0 else "partial"
    else:
        kind = "probe" if _few(training) else "partial" if count < MANY else "full"
    depth = loaded.config.depth
    trainable_blocks = {"probe": 0, "partial": max(1, depth // 3), "full": None}[kind]
    batch_size = next(size for size in (8, 16, 32, 64, 128, 256) if size == 256 or count < 40 * size)
    epochs = max(EPOCHS[kind], min(100, round(STEPS[kind] * batch_size / max(1, count))))
    linear_head: dict[str, Any] = {"head_hidden": 0} if "head_hidden" in field_names(type(loaded.config)) else {}
    model = dataclasses.replace(
        loaded.config,
        image_size=loaded.preprocess.config.image_size,  # some were made for a larger one than they are used with
        num_classes=classes,
        drop_path=0.1 if kind == "full" else 0.0,
        **linear_head,
    )
    config = TrainConfig(
        model=model,
        data=DataConfig(train=photos, validation=validation, validation_share=0.2 if count < 500 else 0.1),
        preprocess=loaded.preprocess.config,
        augment=AugmentConfig(
            crop="resized",
            area=(0.6, 1.0) if kind == "probe" else (0.35, 1.0),
            colour=0.1 if kind == "probe" else 0.3,
            policy="none" if kind == "probe" else "trivial",
            variations=VARIATIONS if kind == "probe" else None,
            mix=0.5 if kind == "full" else 0.0,
            mixup=0.2 if kind == "full" else 0.0,
            cutmix=1.0 if kind == "full" else 0.0,
        ),
        optim=OptimConfig(
            lr={"probe": 3e-3, "partial": 3e-4, "full": 5e-4}[kind],
            weight_decay=1.0 if kind == "probe" else 0.05,
            layer_decay=1.0 if kind == "probe" else 0.75,
            warmup=0.1,
        ),
        start=str(loaded.provenance.source),
        trainable_blocks=trainable_blocks,
        epochs=float(epochs),
        batch_size=batch_size,
        label_smoothing=0.1 if kind == "full" else 0.0,
        evaluate_every=max(1.0, epochs / 10),
        checkpoint_every=200,
    )
    return config.changed(dict(changes))


def resumed_recipe(
    begun: TrainConfig, model: str, photos: str, *, validation: str | None = None, changes: Mapping[str, Any]
) -> TrainConfig:
    """Those of a run that goes on: as it was begun, even if one would choose otherwise for the photos of today."""
    asked = {"start": model, "data.train": photos} | ({} if validation is None else {"data.validation": validation})
    return begun.changed(asked | dict(changes))


def in_words(config: TrainConfig, training: Dataset) -> str:
    """How much of a checkpoint learns, in a sentence for the user."""
    blocks, depth = config.trainable_blocks, config.model.depth
    if blocks is None:
        what = "the whole model learns" + (", earlier blocks more slowly" if config.optim.layer_decay < 1 else "")
    elif blocks == 0:
        what = "the head alone learns, on frozen features"
        what += ": training more of it would overfit" if _few(training) else ""
    else:
        which = f"the last {blocks} of {depth} blocks" if blocks < depth else f"all {depth} blocks"
        what = f"{which} learn, everything before them is frozen"
    epochs = "1 epoch" if config.epochs == 1 else f"{config.epochs:g} epochs"
    photos = f"{len(training):,} photos in {len(training.classes)} classes"
    return f"{photos}: {what}; {epochs}, batches of {config.batch_size}"


def _few(training: Dataset) -> bool:
    return len(training) <= FEW or len(training) < FEW_A_CLASS * len(training.classes)
