"""Collapse is seen, named, and not cried where there is none."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.vit import ViT
from patchlight.training.collapse import Signs, diagnose, effective_rank, entropy
from patchlight.training.config import DataConfig, DinoConfig, OptimConfig, TrainConfig
from patchlight.training.data import Batch, PhotoOrder, places
from patchlight.training.dino import Dino
from patchlight.training.optim import learning_rate, make_optimizer
from patchlight.training.processes import Processes
from patchlight.training.step import Step


def test_entropy() -> None:
    probabilities = torch.tensor([[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0]])
    assert entropy(probabilities).tolist() == pytest.approx([0, math.log(4), math.log(2)])


def test_the_rank_counts_directions() -> None:
    assert effective_rank(torch.eye(7)) == pytest.approx(7)
    same_D = torch.randn(5, 1)
    assert effective_rank(same_D @ same_D.T) == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.diag(torch.tensor([1.0, 1, 0, 0]))) == pytest.approx(2)
    assert effective_rank(torch.zeros(3, 3)) == 1  # before the first step


HEALTHY = Signs(classes=1000, loss=4.0, mean_entropy=0.95, answer_entropy=0.5, feature_rank=12.0)
HOW = {"centring": "sinkhorn", "teacher_temperature": 0.03, "student_temperature": 0.1}


@pytest.mark.parametrize(
    ("changes", "how", "told"),
    [
        ({"mean_entropy": 0.02, "answer_entropy": 0.015, "loss": 0.1}, {"centring": "none"}, "set dino.centring="),
        ({"mean_entropy": 0.02, "answer_entropy": 0.015}, {}, "raise dino.teacher_temperature (now 0.03)"),
        (
            {"mean_entropy": 1.0, "answer_entropy": 0.999},
            {"teacher_temperature": 0.1},
            "under dino.student_temperature",
        ),
        ({"mean_entropy": 1.0, "answer_entropy": 0.999}, {}, "lower dino.prototypes (now 1,000)"),
        ({"feature_rank": 1.001}, {}, "raise dino.koleo"),
        ({"loss": 6.91}, {}, "no better than guesses (loss 6.91 where ln K is 6.91)"),
    ],
)
def test_each_sign_has_its_sentence(changes: dict[str, float], how: dict[str, Any], told: str) -> None:
    said = diagnose(HEALTHY._replace(**changes), **{**HOW, **how})
    assert said is not None
    assert told in said
    assert "\n" not in said
    assert diagnose(HEALTHY, **{**HOW, **how}) is None


def run(images_NCHW: Tensor, steps: int = 120, log_every: int = 5, lr: float = 1e-2, **dino: Any) -> Dino:
    """A real run, as the loop makes it."""
    shape = ViTConfig(image_size=16, patch_size=8, width=32, depth=1, num_heads=2, num_classes=0)
    config = TrainConfig(
        model=shape,
        data=DataConfig(train="photos"),
        preprocess=PreprocessConfig(image_size=16),
        optim=OptimConfig(lr=lr, schedule="constant"),
        batch_size=16,
        dino=DinoConfig(
            **{"prototypes": 64, "head_hidden": 32, "bottleneck": 16, "local_views": 1, "local_size": 8} | dino
        ),
    )
    learner = Dino(ViT(shape), config)
    alone = Processes(0, 1, torch.device("cpu"))
    update = Step(learner, learner, make_optimizer(learner, config.optim), None, config, alone)
    for step, (epochs_B, samples_B, repeats_B) in enumerate(places(64, PhotoOrder(seed=0, batch_size=16, steps=steps))):
        update.optimizer.set_lr(learning_rate(step, steps, config.optim))
        learner.set_progress(step / steps)
        update.learn(
            update.prepare(Batch(images_NCHW[samples_B], samples_B, epochs_B, samples_B, repeats_B)), last=True
        )
        update.move(step)
        if (step + 1) % log_every == 0:
            learner.check()
    return learner


@pytest.fixture
def images_NCHW() -> Tensor:
    """Sixty-four photos of a colour each."""
    colour_NC = torch.rand(64, 3, 1, 1).expand(-1, -1, 16, 16)
    return ((0.8 * colour_NC + 0.2 * torch.rand(64, 3, 16, 16)) * 255).byte()


def test_one_class_for_all_stops_the_run(images_NCHW: Tensor) -> None:
    with pytest.raises(PatchlightError, match=r"every photo gets the same answer.*set dino\.centring="):
        run(images_NCHW, centring="none", koleo=0.0, momentum=0.0)


def test_the_same_undecided_answer_for_all_stops_the_run(images_NCHW: Tensor) -> None:
    flat = {"teacher_temperature_start": 0.2, "teacher_temperature": 0.2}
    with pytest.raises(PatchlightError, match=r"lower dino\.teacher_temperature \(now 0\.2\) well under"):
        run(images_NCHW, centring="mean", koleo=0.0, momentum=0.0, **flat)


def test_a_student_that_does_not_move_stops_the_run(images_NCHW: Tensor) -> None:
    """Answers that are made even look informative, also those of a teacher that has learnt nothing."""
    with pytest.raises(PatchlightError, match=r"no better than guesses.*change optim\.lr: raise it"):
        run(images_NCHW, lr=1e-9)


def test_the_usual_settings_go_through(images_NCHW: Tensor) -> None:
    learner = run(images_NCHW, lr=2e-3)
    measures = learner.measures()
    assert measures["feature_rank"] > 1.5
    assert 0 <= measures["teacher_entropy"] < measures["teacher_mean_entropy"] <= 1.0001
    assert learner.bad_checks.item() == 0


def test_a_few_bad_checks_are_forgiven_and_none_counts_early() -> None:
    learner = run(torch.zeros(64, 3, 16, 16, dtype=torch.uint8), steps=1, koleo=0.0, collapse_after=0.2)
    # Black photos all get one answer.
    learner.mean_answer_K.fill_(1 / 64)
    learner.answer_entropy.fill_(math.log(64))
    learner.set_progress(0.1)
    for _ in range(20):
        learner.check()
    learner.set_progress(0.3)
    for _ in range(4):
        learner.check()
    kept = learner.state_dict()
    learner.answer_entropy.fill_(0.1)
    learner.class_loss.fill_(1.0)
    learner.feature_moment_DD.copy_(torch.eye(32))
    learner.check()
    assert learner.bad_checks.item() == 0
    learner.load_state_dict(kept | {"bad_checks": torch.tensor(4), "answer_entropy": torch.tensor(math.log(64))})
    with pytest.raises(PatchlightError, match="DINO has collapsed after 30% of the run"):
        learner.check()
