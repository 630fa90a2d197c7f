"""Learning to name photos by the head alone: the rest of the model looks once at each photo, however long the run is.

What the model makes of a photo does not change while its head learns. So each of the photo's variations
(`augment.variations`) is read and looked at once, before the first step; the steps, then a small product each,
take the features from memory.

The head learns from features that are moved and scaled to lie around 0, at a distance of 1 in each number on average.
What all photos have in common would else be a large part of every gradient, and a head of few photos names by it: of 20
photos each of birds, deer and pets, 85.9 % of others are named right in place of 81.6 % (benchmarks/few_photos.py). In
the model that is saved this is part of the head's own weights.

Shapes: N photos, V variations of each, D numbers in a feature.
"""

import contextlib
import math
from collections.abc import Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.models.families import Model
from patchlight.reporting import Progress, Reporter
from patchlight.signals import StopRequest
from patchlight.training.config import TrainConfig
from patchlight.training.data import Batch, Dataset, evaluation_batches, places
from patchlight.training.evaluate import Evaluation, evaluate, evaluating
from patchlight.training.features import features_of
from patchlight.training.objective import Classification
from patchlight.training.processes import Processes

MOST_BYTES = 2**31
"""For the features of all photos."""


class HeadAlone(Classification):
    """Learning to name photos by features that stay as they are."""

    @staticmethod
    def suits(vit: Model, config: TrainConfig, photos: int) -> bool:
        """Whether a run is of this kind, and what it keeps fits into memory."""
        augment, width = config.augment, config.model.feature_width
        return (
            config.trainable_blocks == 0
            and augment.variations is not None
            and augment.repeats == 1
            and not augment.mix
            and config.distill is None
            and not config.sharded  # no process has the whole model to look with
            and getattr(vit, "distill_head", None) is None  # which reads a token of its own
            and 4 * photos * augment.variations * width <= MOST_BYTES
        )

    features_NVD: Tensor
    """float32: of each photo as it is varied in the first V epochs, moved and scaled."""
    middle_D: Tensor
    """Where features lie as the model gives them, and"""
    spread: Tensor
    """how far from there, in each number: 0 until they were looked at. A checkpoint keeps both."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.register_buffer("middle_D", torch.zeros(self.config.model.feature_width))
        self.register_buffer("spread", torch.zeros(()))

    def stream(
        self, training: Dataset, processes: Processes, *, start: int, steps: int
    ) -> Generator[Batch, None, None]:
        """Stream of stored features instead of photos."""
        device, labels_N = processes.device, training.labels_N.to(processes.device)
        order = self.order(processes, start=start, steps=steps)
        for places_3B in places(len(training), order, self.config.augment.variations):
            variations_B, samples_B, repeats_B = places_3B.to(device)
            features_BD = self.features_NVD[samples_B, variations_B]
            yield Batch(features_BD, labels_N[samples_B], variations_B, samples_B, repeats_B)

    @torch.no_grad()
    def look_ahead(
        self, training: Dataset, processes: Processes, asked: StopRequest, reporter: Reporter, *, steps: int
    ) -> None:
        """Each variation that the steps take, once.

        Always from the first step on and by one process, so that a resumed run, or one of several processes, computes
        the same batches, which a sum's rounding depends on.
        """
        variations, batch_size = self.config.augment.variations, self.config.batch_size
        assert variations is not None
        count = min(len(training) * variations, steps * batch_size)
        alone = type(processes)(0, 1, processes.device)
        self.features_NVD = torch.zeros(
            (len(training), variations, self.config.model.feature_width), device=processes.device
        )
        looked_at_NV = torch.zeros(self.features_NVD.shape[:2], dtype=torch.bool, device=processes.device)
        each = min(variations, math.ceil(count / len(training)))
        reporter.tell(f"looking once at {len(training):,} photos" + (f" in {each} variations each" if each > 1 else ""))
        seen = 0
        photos = super().stream(training, alone, start=0, steps=math.ceil(count / batch_size))
        with contextlib.closing(photos), evaluating(self.vit), processes.autocast(self.config):
            for batch in photos:
                if asked.signal:
                    return
                images_BCHW, _ = super().prepare(batch, cropped=self.cropped(training))
                # The last batch may run over into the first variations again.
                new = min(batch_size, count - seen)
                features_BD = self.vit.features(images_BCHW).float()
                here = batch.samples_B[:new], batch.epochs_B[:new]
                self.features_NVD[here], looked_at_NV[here] = features_BD[:new], True
                seen += new
                reporter.progress(Progress(what="looking at photo", done=seen, total=count))
        self._centre(self.features_NVD[looked_at_NV])

    def _centre(self, features_MD: Tensor) -> None:
        """Move and scale all features by where these lie, and at the very first time the head, so that its answers stay
        the same."""
        if not self.spread:  # a resumed run goes on with those that it began with
            self.middle_D.copy_(features_MD.mean(0))
            spread = (features_MD - self.middle_D).square().mean().sqrt()
            self.spread.copy_(torch.where(spread > 0, spread, 1.0))
            layer = _first_layer(self.vit)
            layer.bias.add_(layer.weight @ self.middle_D)
            layer.weight.mul_(self.spread)
        self.features_NVD.sub_(self.middle_D).div_(self.spread)

    @torch.no_grad()
    def finish(self, shown: Model) -> None:
        if self.spread:
            layer = _first_layer(shown)
            layer.weight.div_(self.spread)
            layer.bias.sub_(layer.weight @ self.middle_D)

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        return batch.images_BCHW, batch.labels_B

    def forward(self, *inputs: Tensor) -> Tensor:
        features_BD, labels_B = inputs
        assert self.vit.head is not None
        logits_BK = self.vit.head(features_BD).float()
        return F.cross_entropy(logits_BK, labels_B, label_smoothing=self.config.label_smoothing)

    def judge(self, shown: Model, training: Dataset, validation: Dataset, device: torch.device) -> Evaluation:
        if self.judged_by is None:
            photos = evaluation_batches(
                validation,
                batch_size=min(1000, self.config.batch_size),
                preprocess=self.config.preprocess,
                workers=self.config.data.workers,
                device=device,
            )
            self.judged_by = features_of(self.vit, photos)
        features_MD, labels_M = self.judged_by
        assert shown.head is not None
        return evaluate(shown.head, [(features_MD, labels_M, torch.arange(len(labels_M)))], training.classes)

    judged_by: tuple[Tensor, Tensor] | None = None
    """The features and labels of the photos to judge by, once they were looked at."""


def _first_layer(model: Model) -> nn.Linear:
    """The head's first linear layer, which reads the features."""
    assert model.head is not None
    return next(layer for layer in model.head.modules() if isinstance(layer, nn.Linear))
