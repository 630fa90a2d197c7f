"""What a run trains: a ViT and whatever takes part in teaching it. Each way of learning is one `Learner`."""

import dataclasses
from collections.abc import Generator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from patchlight.config import PreprocessConfig
from patchlight.images.augment import AugmentConfig
from patchlight.models.families import Model
from patchlight.reporting import Reporter
from patchlight.signals import StopRequest
from patchlight.training.config import TrainConfig
from patchlight.training.data import Batch, Dataset, PhotoOrder, batches
from patchlight.training.processes import Processes


class Result(Protocol):
    """The result of an evaluation."""

    @property
    def photos(self) -> int: ...
    @property
    def accuracy(self) -> float | None: ...
    def summary(self) -> dict[str, Any]:
        """Figures for the model card."""

    def course(self) -> dict[str, float]:
        """Figures for a line of metrics.jsonl."""


def as_squares(preprocess: PreprocessConfig, side: int) -> PreprocessConfig:
    """Whole photos on squares of this many pixels a side."""
    return dataclasses.replace(preprocess, image_size=(side, side), resize="squash", crop_pct=1.0)


class Learner(nn.Module):
    """Photos in, loss out. Its parameters and buffers are what a checkpoint keeps.

    On a GPU the parts of a step are recorded once and replayed (see step.py), so `prepare`, `forward` and `after_move`
    may neither wait for the device nor branch on its values; numbers that change from step to step live in buffers,
    which `set_progress` fills.
    """

    vit: Model
    config: TrainConfig
    records_prepare = True
    """Whether `prepare` can be recorded; not where it calls what a user gave."""
    prepares_ahead = False
    """Whether photos of several steps may be prepared at once, before these are there: what `set_progress` fills plays
    no part, and each tensor that `prepare` gives has one row for each photo, in their order."""

    def reading(self) -> PreprocessConfig:
        """How photos are read: as the model takes them, or larger, where parts and views are cut from them."""
        return self.config.preprocess

    def cutting(self) -> AugmentConfig:
        """Which random parts are cut out of photos in files when they are read, from their full size."""
        return self.config.augment

    def cropped(self, training: Dataset) -> bool:
        """Whether whoever reads the photos cuts random parts out of them."""
        return training.images_NCHW is None and self.cutting().crop == "resized"

    def look_ahead(
        self, training: Dataset, processes: Processes, asked: StopRequest, reporter: Reporter, *, steps: int
    ) -> None:
        """What can be done once, before the first step of so many. It ends early where a stop is asked for."""

    def stream(
        self, training: Dataset, processes: Processes, *, start: int, steps: int
    ) -> Generator[Batch, None, None]:
        """This process's photos of so many steps, from step `start` on."""
        reading = self.reading()
        return batches(
            training,
            self.order(processes, start=start, steps=steps, repeats=self.config.augment.repeats),
            image_size=reading.image_size,
            augment=self.cutting(),
            preprocess=reading,
            workers=self.config.data.workers,
            device=processes.device,
        )

    def order(self, processes: Processes, *, start: int, steps: int, repeats: int = 1) -> PhotoOrder:
        """Order of the photos for this process."""
        return PhotoOrder(
            seed=self.config.seed,
            batch_size=self.config.batch_size,
            steps=steps,
            start_step=start,
            repeats=repeats,
            rank=processes.rank,
            world=processes.world,
        )

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        """From photos as they were read to what `forward` takes. Whatever is random in it comes from `Draws`.

        `cropped`: whoever read the photos has cut random parts out of them already.
        """
        raise NotImplementedError

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss, in the mean over the batch."""
        raise NotImplementedError

    def set_progress(self, done: float) -> None:
        """Before each step: the share of the run that is done, from 0 to 1."""

    def after_move(self) -> None:
        """Called after each update of the weights."""

    def measures(self) -> dict[str, float]:
        """Figures of the learner's own for the next line of metrics."""
        return {}

    def check(self) -> None:
        """After a line of metrics was written: raises `PatchlightError` where there is no point in going on."""

    def shown(self) -> Model:
        """The model that is judged and saved, where no average of the weights is kept."""
        return self.vit

    def finish(self, shown: Model) -> None:
        """Whatever else makes it the model that is judged and saved, in place."""

    def judge(self, shown: Model, training: Dataset, validation: Dataset, device: torch.device) -> Result:
        """How good the shown model is on photos that it did not learn from."""
        raise NotImplementedError

    def saved_with(self) -> dict[str, Any]:
        """More arguments for `save`."""
        return {}

    def pictures(self, validation: Dataset, device: torch.device) -> dict[str, bytes]:
        """PNG files for the run's folder, by name."""
        return {}
