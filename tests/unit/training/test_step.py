"""A step's parts, where the loop's tests do not reach: photos of several steps prepared at once."""

import torch

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.images.augment import AugmentConfig
from patchlight.models.vit import ViT
from patchlight.training.config import DataConfig, TrainConfig
from patchlight.training.data import Batch
from patchlight.training.objective import Classification
from patchlight.training.optim import make_optimizer
from patchlight.training.processes import Processes
from patchlight.training.step import MOST_AT_ONCE, Step


def make_step() -> Step:
    shape = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, num_heads=2, num_classes=5)
    config = TrainConfig(
        model=shape,
        data=DataConfig(train="photos"),
        preprocess=PreprocessConfig(image_size=16),
        augment=AugmentConfig(crop="pad", policy="trivial", mix=0.7, mixup=0.8, cutmix=1.0, erase=0.5),
        batch_size=6,
    )
    learner = Classification(ViT(shape), config)
    alone = Processes(0, 1, torch.device("cpu"))
    return Step(learner, learner, make_optimizer(learner, config.optim), None, config, alone)


def batches_of(count: int, size: int = 6) -> list[Batch]:
    images = torch.randint(0, 256, (count * size, 3, 16, 16), dtype=torch.uint8)
    samples, zeros = torch.arange(count * size), torch.zeros(count * size, dtype=torch.int64)
    whole = Batch(images, samples % 5, zeros, samples, zeros)
    return [Batch(*part) for part in zip(*(value.chunk(count) for value in whole), strict=True)]


def test_photos_of_several_steps_prepared_at_once_are_what_they_would_be_one_by_one():
    update, stream = make_step(), batches_of(2 * MOST_AT_ONCE + 3)
    one_by_one = [update.prepare(batch) for batch in stream]
    update.records = True  # as on a GPU
    prepared, counted = [], []
    learner_prepare = update.learner.prepare

    def counting(batch: Batch, *, cropped: bool) -> tuple[torch.Tensor, ...]:
        counted.append(len(batch.labels_B))
        return learner_prepare(batch, cropped=cropped)

    update.learner.prepare = counting  # type: ignore[method-assign]
    prepared = list(update.prepared(iter(stream)))
    assert counted == [6 * MOST_AT_ONCE, 6 * MOST_AT_ONCE, 18]
    assert len(prepared) == len(one_by_one)
    for ahead, alone in zip(prepared, one_by_one, strict=True):
        assert all(torch.equal(value, other) for value, other in zip(ahead, alone, strict=True))


def test_what_depends_on_the_steps_progress_is_not_prepared_ahead():
    update = make_step()
    update.records, update.learner.prepares_ahead = True, False
    asked = iter(batches_of(3))
    prepared = update.prepared(asked)
    next(prepared)
    assert len(list(asked)) == 2
