"""Whether self-supervision still learns: the signs by which a run shows that every photo means the same to it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_INFORMATION = 0.01
"""Of ln K: what a photo tells of the teacher's answer. A run that learns has left this behind within its warm-up."""
LEAST_RANK = 1.02
"""Directions that the features use. It is 1 where all features are the same, and at most the features' width."""


class Signs(NamedTuple):
    """What is known of the teacher's answers to many photos: probabilities of K classes of its own making."""

    classes: int
    loss: float
    """The student's cross-entropy against the teacher."""
    mean_entropy: float
    """Of the mean answer: how evenly the classes are used. Entropies are shares of ln K, from 0 to 1."""
    answer_entropy: float
    """In the mean over photos: how undecided an answer is."""
    feature_rank: float

    @property
    def information(self) -> float:
        """How much the answers depend on the photo: 0 if all photos get the same answer."""
        return self.mean_entropy - self.answer_entropy


def entropy(probabilities: Tensor) -> Tensor:
    """Of distributions along the last dimension, in nats; nothing is lost where a probability is zero."""
    return torch.special.entr(probabilities).sum(-1)


def effective_rank(moment_DD: Tensor) -> float:
    """Of the features' second moments (mean of x x'): exp of the entropy of the shares that the directions have.

    Not centred, so that it is 1 where all features are the same, and not a matter of rounding.
    """
    strengths_D = torch.linalg.eigvalsh(moment_DD.double().cpu()).clamp(min=0)
    total = float(strengths_D.sum())
    return math.exp(float(entropy(strengths_D / total))) if total > 0 else 1.0


def diagnose(signs: Signs, *, centring: str, teacher_temperature: float, student_temperature: float) -> str | None:
    """What is wrong and what to change, in a sentence that names the settings; None if the run learns."""
    most = math.log(signs.classes)
    informative, spread = signs.information >= LEAST_INFORMATION, signs.feature_rank >= LEAST_RANK
    if informative and spread and signs.loss < most:
        return None
    if informative and not spread:
        return (
            f"the features of all photos point the same way (rank {signs.feature_rank:.3f}); raise dino.koleo (0.1 "
            "spreads them), or lower optim.lr"
        )
    if not informative and signs.mean_entropy < 0.5:
        remedy = (
            "set dino.centring='sinkhorn' or 'mean'"
            if centring == "none"
            else f"raise dino.teacher_temperature (now {teacher_temperature:g}), or lower optim.lr"
        )
        return (
            f"every photo gets the same answer, one of few classes (its mean entropy is {signs.mean_entropy:.3f} "
            f"of ln K, the loss {signs.loss:.2f}); {remedy}"
        )
    what = (
        f"the student's answers are no better than guesses (loss {signs.loss:.2f} where ln K is {most:.2f})"
        if informative
        else f"every photo gets the same undecided answer (entropy {signs.answer_entropy:.3f} of ln K, loss "
        f"{signs.loss:.2f} where ln K is {most:.2f})"
    )
    if teacher_temperature > 0.7 * student_temperature:
        return (
            f"{what}; lower dino.teacher_temperature (now {teacher_temperature:g}) well under dino.student_temperature "
            f"({student_temperature:g})"
        )
    return (
        f"{what}; lower dino.prototypes (now {signs.classes:,}) or dino.teacher_temperature (now "
        f"{teacher_temperature:g}), or change optim.lr: raise it where the loss has hardly moved"
    )
