"""What is learnt: labels, and beside them what a teacher says (DeiT, arXiv:2012.12877)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.images.augment import augment, mix
from patchlight.images.draws import Draws
from patchlight.models.vit import ViT
from patchlight.train.config import DistillConfig, TrainConfig
from patchlight.train.data import Batch

Teacher = Callable[[Tensor], Tensor]
"""Images (B, 3, H, W) with values from 0 to 1, as the student sees them, -> logits_BK of the student's classes."""


class Classification:
    """Learning to name photos."""

    def __init__(self, config: TrainConfig, teacher: Teacher | None = None) -> None:
        self.config, self.teacher = config, teacher
        if (teacher is None) != (config.distill is None):
            raise PatchlightError("distillation needs both: the setting `distill`, and a teacher")

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        """The photos varied, mixed and normalised, their targets_BK, and with a teacher its logits_BK.

        `cropped`: whoever read the photos has cut random parts out of them already.
        """
        config = self.config
        draws = Draws(config.seed, batch.epochs_B, batch.samples_B, batch.repeats_B)
        images_BCHW = augment(batch.images_BCHW, draws, config.augment, cropped=cropped)
        images_BCHW, targets_BK = mix(
            images_BCHW, batch.labels_B, config.model.num_classes, draws, config.augment, config.label_smoothing
        )
        inputs = (normalise(images_BCHW, config.preprocess), targets_BK)
        if self.teacher is None:
            return inputs
        with torch.no_grad():
            return *inputs, self.teacher(images_BCHW).float()

    def loss(
        self, model: nn.Module, images_BCHW: Tensor, targets_BK: Tensor, taught_BK: Tensor | None = None
    ) -> Tensor:
        """The mean over the batch, and nothing that waits for the device."""
        if taught_BK is None:
            return F.cross_entropy(model(images_BCHW).float(), targets_BK)
        assert self.config.distill is not None
        logits_BK, distilled_BK = model(images_BCHW, both=True)
        told = F.cross_entropy(logits_BK.float(), targets_BK)
        taught = distillation_loss(distilled_BK.float(), taught_BK, self.config.distill)
        return (1 - self.config.distill.share) * told + self.config.distill.share * taught


def distillation_loss(distilled_BK: Tensor, taught_BK: Tensor, config: DistillConfig) -> Tensor:
    """How far the distillation head's answer is from the teacher's."""
    if config.kind == "hard":
        return F.cross_entropy(distilled_BK, taught_BK.argmax(1))
    # Times the temperature squared, so that the gradients keep their size whatever the temperature is.
    student, teacher = (logits_BK / config.temperature for logits_BK in (distilled_BK, taught_BK))
    gap = F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    return gap * config.temperature**2


def loaded_teacher(loaded: Any, classes: tuple[str, ...]) -> Teacher:
    """A teacher from what `load` gives: with its own normalisation and size, its logits in the student's order."""
    model, preprocess = loaded.model.requires_grad_(False), loaded.preprocess.config
    if not loaded.config.num_classes:
        raise PatchlightError(f"{loaded.provenance.source}: has no head, so it cannot teach classes")
    order = None
    if loaded.labels is not None and tuple(loaded.labels) != tuple(classes):
        missing = [name for name in classes if name not in loaded.labels]
        if missing:
            raise PatchlightError(
                f"{loaded.provenance.source}: does not know the class {missing[0]!r}; take another teacher"
            )
        order = [loaded.labels.index(name) for name in classes]
    elif loaded.config.num_classes != len(classes):
        raise PatchlightError(
            f"{loaded.provenance.source}: has {loaded.config.num_classes} classes, the photos have {len(classes)}"
        )

    def teach(images_BCHW: Tensor) -> Tensor:
        if tuple(images_BCHW.shape[2:]) != tuple(preprocess.image_size):
            images_BCHW = F.interpolate(images_BCHW, preprocess.image_size, mode="bicubic", antialias=True)
        logits_BK = model(normalise(images_BCHW, preprocess))
        return logits_BK if order is None else logits_BK[:, order]

    return teach


def normalise(images_BCHW: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """From 0..1 to the model's range."""
    mean, std = (
        torch.tensor(colour, device=images_BCHW.device)[:, None, None] for colour in (preprocess.mean, preprocess.std)
    )
    return (images_BCHW - mean) / std


class BothHeads(nn.Module):
    """A ViT that also gives its two heads' logits apart, so that data-parallel and compiled models can be asked."""

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images_BCHW: Tensor, both: bool = False) -> Any:
        return self.vit.both_logits(images_BCHW) if both else self.vit(images_BCHW)
