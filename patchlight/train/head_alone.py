"""Learning to name photos by the head alone: the rest of the model looks once at each photo, however long the run is.

What the model makes of a photo does not change while its head learns. So each of the photo's variations
(`augment.variations`) is read and looked at once, before the first step; the steps, then a small product each,
take the features from memory.

Shapes: N photos, V variations of each, D numbers in a feature.
"""

import contextlib
import math
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.models.families import Model
from patchlight.signals import Asked
from patchlight.train.config import TrainConfig
from patchlight.train.data import Batch, Dataset, evaluation_batches, places
from patchlight.train.evaluate import Evaluation, evaluate, evaluating
from patchlight.train.features import features_of
from patchlight.train.objective import Classification

if TYPE_CHECKING:
    from patchlight.train.processes import Processes

MOST_BYTES = 2**31
"""For the features of all photos."""

SECONDS_BETWEEN_LINES = 20.0
"""Of progress, while photos are looked at."""


class HeadAlone(Classification):
    """Learning to name photos by features that stay as they are."""

    @staticmethod
    def suits(vit: Model, config: TrainConfig, photos: int) -> bool:
        """Whether a run is of this kind, and what it keeps fits into memory."""
        augment, width = config.augment, config.model.feature_width
        return (
            config.learning_blocks == 0
            and augment.variations is not None
            and augment.repeats == 1
            and not augment.mix
            and config.distill is None
            and not config.sharded  # no process has the whole model to look with
            and getattr(vit, "distill_head", None) is None  # which reads a token of its own
            and 4 * photos * augment.variations * width <= MOST_BYTES
        )

    features_NVD: Tensor
    """float32: of each photo as it is varied in the first V epochs."""

    def stream(
        self, training: Dataset, processes: "Processes", *, start: int, steps: int
    ) -> Generator[Batch, None, None]:
        """Features in the place of photos."""
        device, labels_N = processes.device, training.labels_N.to(processes.device)
        for places_3B in places(
            len(training),
            seed=self.config.seed,
            batch_size=self.config.batch_size,
            variations=self.config.augment.variations,
            start_step=start,
            steps=steps,
            rank=processes.rank,
            world=processes.world,
        ):
            variations_B, samples_B, repeats_B = places_3B.to(device)
            features_BD = self.features_NVD[samples_B, variations_B]
            yield Batch(features_BD, labels_N[samples_B], variations_B, samples_B, repeats_B)

    @torch.no_grad()
    def look_ahead(
        self, training: Dataset, processes: "Processes", asked: Asked, tell: Callable[[str], None], *, steps: int
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
        each = min(variations, math.ceil(count / len(training)))
        tell(f"looking once at {len(training):,} photos" + (f" in {each} variations each" if each > 1 else ""))
        said, seen = time.monotonic(), 0
        photos = super().stream(training, alone, start=0, steps=math.ceil(count / batch_size))
        with contextlib.closing(photos), evaluating(self.vit), processes.autocast(self.config):
            for batch in photos:
                if asked.signal:
                    return
                images_BCHW, _ = super().prepare(batch, cropped=self.cropped(training))
                # The last batch may run over into the first variations again.
                new = min(batch_size, count - seen)
                features_BD = self.vit.features(images_BCHW).float()
                self.features_NVD[batch.samples_B[:new], batch.epochs_B[:new]] = features_BD[:new]
                seen += new
                if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                    said = time.monotonic()
                    tell(f"looked at {seen:,} of {count:,}")

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
