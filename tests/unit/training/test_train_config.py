"""Settings of runs: nested, changed by dotted names, checked."""

from typing import Any

import pytest

from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.families import variant
from patchlight.training.config import DataConfig, TrainConfig


def settings() -> TrainConfig:
    model = variant("Ti/16", num_classes=10, image_size=32)
    return TrainConfig(model=model, data=DataConfig(train="x"), preprocess=PreprocessConfig(image_size=32))


def test_json_there_and_back_with_every_part() -> None:
    changes = {
        "distill.teacher": "t",
        "model.distill_token": True,
        "augment.area": [0.5, 1.0],
        "optim.betas": [0.9, 0.95],
    }
    config = settings().changed(changes)
    assert TrainConfig.from_json(config.to_json()) == config
    assert config.augment.area == (0.5, 1.0)
    assert config.distill is not None
    assert config.changed({"distill": None}).distill is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim.lrr": 1}, "unknown setting 'lrr' for OptimConfig; did you mean 'lr'"),
        ({"optimizer.lr": 1}, "unknown part 'optimizer'"),
        ({"lr": 1}, r"unknown setting 'lr' of a run; did you mean optim\.lr\?"),
        ({"image_size": 64}, r"did you mean model\.image_size or preprocess\.image_size\?"),
        ({"widht": 64}, r"did you mean model\.width\?"),
        ({"epoch": 3}, r"did you mean epochs\?"),
        ({"xyz": 3}, r"unknown setting 'xyz' of a run; known: model, data, "),
        ({"optim": 3}, r"optim=3 is no OptimConfig; set its parts, such as optim\.name"),
        ({"optim.lr": 0}, "lr=0 must be more than 0"),
        ({"optim.lr": "fast"}, "lr='fast' should be a number"),
        ({"augment.area": [0.5, 1.5]}, "area"),
        ({"augment.mix": 0.5}, "mix needs mixup or cutmix"),
        ({"augment.mix": 0.5, "augment.mixup": 1, "augment.repeats": 2}, "its own repeat"),
        ({"accumulate": 3}, "accumulate must divide batch_size"),
        ({"distill.kind": "soft"}, "distillation needs distill.teacher"),
        ({"distill.teacher": "t"}, "distillation needs model.distill_token=True"),
        ({"preprocess.image_size": 64}, "differs from model.image_size"),
        ({"seed": 10**12}, "seed=1000000000000 must lie from 0"),
        ({"model.in_channels": 1}, "photos have 3 channels"),
        ({"model.num_classes": 0}, "model.num_classes"),
        ({"data.train": ""}, "data.train is empty; give a path"),
        ({"data.validation": ""}, "data.validation is empty; give a path"),
        ({"trainable_blocks": 13}, "trainable_blocks=13: the model has 12 blocks; take at most these, or None"),
        ({"trainable_blocks": -1}, "trainable_blocks=-1: the model has 12 blocks"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        settings().changed(changes)
