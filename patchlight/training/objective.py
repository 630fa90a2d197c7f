"""What is learnt: labels, and beside them what a teacher says (DeiT, arXiv:2012.12877)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.config import SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.images.augment import augment, mix, normalise
from patchlight.images.draws import Draws
from patchlight.models.families import Model
from patchlight.models.vit import ViT
from patchlight.training.config import DistillConfig, TrainConfig
from patchlight.training.data import Batch, Dataset, evaluation_batches
from patchlight.training.evaluate import Evaluation, evaluate
from patchlight.training.learner import Learner

Teacher = Callable[[Tensor], Tensor]
"""Images (B, 3, H, W) with values from 0 to 1, as the student sees them, -> logits_BK of the student's classes."""


class Classification(Learner):
    """Learning to name photos."""

    def __init__(
        self, vit: Model, config: TrainConfig, teacher: Teacher | None = None, subject: SubjectHeat | None = None
    ) -> None:
        """`subject`: how the model finds subjects, where what it learns leaves that as it is."""
        super().__init__()
        self.vit, self.config, self.subject = vit, config, subject
        self.teacher = (teacher,)  # in a tuple, so that a module is not taken for a part of this one
        self.records_prepare = self.prepares_ahead = teacher is None
        if (teacher is None) != (config.distill is None):
            raise PatchlightError("distillation needs both: the setting `distill`, and a teacher")

    def prepare(self, batch: Batch, *, cropped: bool) -> tuple[Tensor, ...]:
        """The photos varied, mixed and normalised, their targets_BK, and with a teacher its logits_BK."""
        config = self.config
        draws = Draws(config.seed, batch.epochs_B, batch.samples_B, batch.repeats_B)
        images_BCHW = augment(batch.images_BCHW, draws, config.augment, cropped=cropped)
        images_BCHW, targets_BK = mix(
            images_BCHW, batch.labels_B, config.model.num_classes, draws, config.augment, config.label_smoothing
        )
        inputs = (normalise(images_BCHW, config.preprocess), targets_BK)
        (teacher,) = self.teacher
        if teacher is None:
            return inputs
        with torch.no_grad():
            return *inputs, teacher(images_BCHW).float()

    def forward(self, *inputs: Tensor) -> Tensor:
        images_BCHW, targets_BK, *taught = inputs
        if not taught:
            return F.cross_entropy(self.vit(images_BCHW).float(), targets_BK)
        (taught_BK,) = taught
        assert self.config.distill is not None
        assert isinstance(self.vit, ViT)
        logits_BK, distilled_BK = self.vit.both_logits(images_BCHW)
        told = F.cross_entropy(logits_BK.float(), targets_BK)
        distilled = distillation_loss(distilled_BK.float(), taught_BK, self.config.distill)
        return (1 - self.config.distill.share) * told + self.config.distill.share * distilled

    def saved_with(self) -> dict[str, Any]:
        return {} if self.subject is None else {"subject": self.subject}

    def judge(self, shown: Model, training: Dataset, validation: Dataset, device: torch.device) -> Evaluation:
        images = evaluation_batches(
            validation,
            batch_size=min(1000, self.config.batch_size),
            preprocess=self.config.preprocess,
            workers=self.config.data.workers,
            device=device,
        )
        return evaluate(shown, images, training.classes)


def distillation_loss(distilled_BK: Tensor, taught_BK: Tensor, config: DistillConfig) -> Tensor:
    """The distillation loss between the distillation head and the teacher."""
    if config.kind == "hard":
        return F.cross_entropy(distilled_BK, taught_BK.argmax(1))
    # Times the temperature squared, so that the gradients keep their size whatever the temperature is.
    student, teacher = (logits_BK / config.temperature for logits_BK in (distilled_BK, taught_BK))
    gap = F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)
    return gap * config.temperature**2


def check_teacher(teacher: Teacher, config: TrainConfig, device: torch.device) -> None:
    """Refuse one that does not answer with a logit for each of the student's classes."""
    images_BCHW = torch.zeros((2, 3, *config.preprocess.image_size), device=device)
    try:
        with torch.no_grad():
            taught = teacher(images_BCHW)
    except PatchlightError:
        raise
    except Exception as error:
        raise PatchlightError(
            f"the teacher fails on images {list(images_BCHW.shape)} with values from 0 to 1 "
            f"({type(error).__name__}: {error}); give one that takes them"
        ) from None
    wanted = [len(images_BCHW), config.model.num_classes]
    if not isinstance(taught, Tensor) or list(taught.shape) != wanted:
        given = list(taught.shape) if isinstance(taught, Tensor) else type(taught).__name__
        raise PatchlightError(
            f"the teacher answers {len(images_BCHW)} images with {given}, not with logits {wanted}, one for each of "
            "the classes; give one of the same classes"
        )


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
