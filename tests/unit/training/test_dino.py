"""DINO: each part against a plain reference, exact resume, and that it learns what nobody told it."""

import contextlib
import io
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models_at_random import randomize
from patchlight.config import PreprocessConfig, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.images.draws import Draws
from patchlight.models.vit import ViT
from patchlight.training.checkpoint import fingerprint
from patchlight.training.config import DataConfig, OptimConfig, TrainConfig
from patchlight.training.data import Batch, PhotoOrder, places
from patchlight.training.dino import (
    Dino,
    DinoConfig,
    ProjectionHead,
    even_answers,
    hidden_patches,
    koleo,
    multi_view_loss,
)
from patchlight.training.optim import learning_rate, make_optimizer
from patchlight.training.processes import Processes
from patchlight.training.step import Step
from warm_python import WarmPython

MODEL = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2, "num_classes": 0}
SMALL = {"prototypes": 24, "head_hidden": 16, "bottleneck": 8, "local_views": 3, "local_size": 8}


def settings(model: dict[str, Any] | None = None, **dino: Any) -> TrainConfig:
    shape = ViTConfig(**{**MODEL, **(model or {})})
    return TrainConfig(
        model=shape,
        data=DataConfig(train="photos"),
        preprocess=PreprocessConfig(image_size=shape.image_size),
        optim=OptimConfig(name="muon", lr=2e-3, warmup=0.1),
        batch_size=8,
        dino=DinoConfig(**{**SMALL, **dino}),
    )


def learner(model: dict[str, Any] | None = None, **dino: Any) -> Dino:
    config = settings(model, **dino)
    return Dino(ViT(config.model), config)


def photos(count: int, size: int = 16) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)


def batch_of(images_NCHW: Tensor, places_3B: Tensor) -> Batch:
    epochs_B, samples_B, repeats_B = places_3B
    return Batch(images_NCHW[samples_B], torch.zeros_like(samples_B), epochs_B, samples_B, repeats_B)


def batch(count: int = 4) -> Batch:
    return batch_of(
        photos(count), torch.stack([torch.zeros(count).long(), torch.arange(count), torch.zeros(count).long()])
    )


# The parts


def test_the_loss_is_the_mean_over_pairs_of_different_views() -> None:
    guesses_VBK, answers_2BK = torch.randn(5, 3, 7), torch.rand(2, 3, 7).softmax(2)
    expected = [
        float(F.cross_entropy(guesses_VBK[view], answers_2BK[taught]))
        for taught in range(2)
        for view in range(5)
        if view != taught
    ]
    loss = multi_view_loss(guesses_VBK, answers_2BK.flatten(0, 1))
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-5)
    only_large = multi_view_loss(guesses_VBK[:2], answers_2BK.flatten(0, 1))
    assert float(only_large) == pytest.approx((expected[0] + expected[4]) / 2, rel=1e-5)


def test_even_answers_are_sinkhorns() -> None:
    logits_BK = 5 * torch.randn(12, 6)
    weights = np.exp(logits_BK.numpy().astype(float))
    for _ in range(3):
        weights = weights / weights.sum(0) / 6
        weights = weights / weights.sum(1, keepdims=True) / 12
    np.testing.assert_allclose(even_answers(logits_BK), weights * 12, atol=1e-5)
    many_BK = even_answers(logits_BK, rounds=200)
    np.testing.assert_allclose(many_BK.sum(0), np.full(6, 2.0), atol=1e-3)
    np.testing.assert_allclose(many_BK.sum(1), np.ones(12), atol=1e-5)


def test_even_answers_of_extreme_logits_are_numbers() -> None:
    logits_BK = torch.tensor([[0.0, 1000.0, -1000.0], [0.0, 1000.0, -1000.0]])
    answers_BK = even_answers(logits_BK)
    assert answers_BK.isfinite().all()
    np.testing.assert_allclose(answers_BK.sum(1), [1, 1], atol=1e-5)


def test_koleo_is_minus_the_log_of_the_nearest_distance() -> None:
    features_BD = torch.randn(9, 5)
    points = F.normalize(features_BD).numpy()
    distances = np.linalg.norm(points[:, None] - points, axis=2) + 10 * np.eye(9)
    assert float(koleo(features_BD)) == pytest.approx(-np.log(distances.min(1)).mean(), rel=1e-4)


def test_the_head_gives_cosines_and_prototypes_may_rest() -> None:
    head = ProjectionHead(16, DinoConfig(**SMALL))
    randomize(head)
    features_BD = torch.randn(5, 16)
    similar_BK = head(features_BD)
    expected = F.cosine_similarity(head.layers(features_BD)[:, None], head.prototypes[None], dim=2)
    torch.testing.assert_close(similar_BK, expected)
    similar_BK.square().sum().backward()
    assert head.prototypes.grad is not None
    assert head.prototypes.grad.abs().max() > 0
    first = head.layers[0].weight.grad.clone()
    head.zero_grad()
    head.moving.fill_(0)
    resting_BK = head(features_BD)
    assert torch.equal(resting_BK, similar_BK)
    resting_BK.square().sum().backward()
    assert head.prototypes.grad.abs().max() == 0
    torch.testing.assert_close(head.layers[0].weight.grad, first)


@pytest.mark.parametrize("grid", [(16, 16), (4, 4), (7, 3), (1, 2)])
def test_hidden_patches_are_as_many_as_asked_and_differ(grid: tuple[int, int]) -> None:
    draws = Draws(0, torch.zeros(50, dtype=torch.long), torch.arange(50))
    hidden_BM = hidden_patches(draws, grid, 0.4)
    patches = grid[0] * grid[1]
    assert hidden_BM.shape == (50, max(1, round(0.4 * patches)))
    assert all(len(set(row)) == len(row) and 0 <= min(row) <= max(row) < patches for row in hidden_BM.tolist())
    assert len({tuple(sorted(row)) for row in hidden_BM.tolist()}) > (30 if patches > 2 else 1)
    share_P = torch.zeros(50, patches).scatter(1, hidden_BM, 1).mean(0)
    assert share_P.min() > 0.05  # no patch is always seen
    assert share_P.max() < 0.95


def test_hidden_pixels_do_not_reach_the_student_but_the_teacher() -> None:
    model = learner(patch_loss=1.0)
    randomize(model)
    large_GCHW, _, hidden_BM = model.prepare(batch(), cropped=False)
    # A patch of another colour, first where it is hidden, then where it is seen.
    other_GCHW = large_GCHW.clone()
    row, column = divmod(int(hidden_BM[0, 0]), 4)
    other_GCHW[4, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    assert torch.equal(model._hide(large_GCHW, hidden_BM), model._hide(other_GCHW, hidden_BM))
    assert not torch.equal(model.teacher(large_GCHW), model.teacher(other_GCHW))
    seen_GCHW = model._hide(large_GCHW, hidden_BM)
    assert torch.equal(seen_GCHW[:4], large_GCHW[:4])
    hidden_B = F.unfold((seen_GCHW - large_GCHW)[4:].detach(), 4, stride=4).abs().amax(1) > 0
    assert hidden_B.sum(1).tolist() == [hidden_BM.shape[1]] * 4
    # The mask is told apart from every patch by pixels of its own: they learn.
    model(large_GCHW, model.prepare(batch(), cropped=False)[1], hidden_BM).backward()
    assert model.mask_X is not None
    assert model.mask_X.grad.abs().max() > 0


def test_the_patch_loss_compares_hidden_patches_with_the_teachers() -> None:
    photos_B, losses = batch(), {}
    for weight in (1.0, 3.0):
        torch.manual_seed(0)
        model = learner(patch_loss=weight, centring="none")
        randomize(model)
        model.set_progress(0.5)
        losses[weight] = model(*model.prepare(photos_B, cropped=False)).item()
    large_GCHW, _, hidden_BM = model.prepare(photos_B, cropped=False)
    taught_BPD = model.teacher.tokens(large_GCHW)[4:, 1:]
    guessed_BPD = model.vit.tokens(model._hide(large_GCHW, hidden_BM))[4:, 1:]
    expected = []
    for row, hidden in enumerate(hidden_BM.tolist()):
        answers_MK = (model.teacher_head(taught_BPD[row, hidden]) / model.teacher_temperature).softmax(1)
        guesses_MK = model.head(guessed_BPD[row, hidden]) / model.dino.student_temperature
        expected.append(F.cross_entropy(guesses_MK, answers_MK).item())
    assert (losses[3.0] - losses[1.0]) / 2 == pytest.approx(np.mean(expected), rel=1e-3)


# Teacher and student


def test_the_teacher_follows_and_nothing_else_moves_it() -> None:
    model = learner({"drop_path": 0.5}, momentum=0.9)
    randomize(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    model.set_progress(0.3)
    model(*model.prepare(batch(), cropped=False)).backward()
    model.after_move()
    momentum = 1 - 0.1 * (1 + math.cos(0.3 * math.pi)) / 2
    for name, weight in model.named_parameters():
        if not name.startswith("teacher"):
            assert torch.equal(weight, before[name])
            continue
        assert weight.grad is None
        other = name.replace("teacher_head.", "head.").replace("teacher.", "vit.")
        torch.testing.assert_close(weight, momentum * before[name] + (1 - momentum) * before[other])
    assert model.shown() is model.teacher


def test_schedules() -> None:
    model = learner(
        momentum=0.9, teacher_temperature_start=0.02, teacher_temperature=0.04, teacher_warmup=0.5, prototypes_rest=0.1
    )
    seen = {}
    for done in (0.0, 0.25, 0.5, 1.0):
        model.set_progress(done)
        seen[done] = [float(each) for each in (model.momentum, model.teacher_temperature, model.head.moving)]
    assert seen[0.0] == pytest.approx([0.9, 0.02, 0])
    assert seen[0.25] == pytest.approx([1 - 0.1 * (1 + math.sqrt(0.5)) / 2, 0.03, 1])
    assert seen[0.5] == pytest.approx([0.95, 0.04, 1])
    assert seen[1.0] == pytest.approx([1.0, 0.04, 1])


def test_the_teacher_never_drops_anything() -> None:
    model = learner({"drop_path": 0.9}).train()
    assert model.vit.training
    assert not any(module.training for module in model.teacher.modules())


def test_the_centre_follows_the_teachers_answers_and_no_bad_number() -> None:
    model = learner(centring="mean", centre_momentum=0.8)
    randomize(model)
    model.centre_K.zero_()
    inputs = model.prepare(batch(), cropped=False)
    model(*inputs)
    expected_K = 0.2 * model.teacher_head(model.teacher(inputs[0])).mean(0)
    torch.testing.assert_close(model.centre_K, expected_K)
    state = fingerprint({name: buffer for name, buffer in model.named_buffers() if name != "class_loss"})
    model(inputs[0] * torch.nan, *inputs[1:])
    assert state == fingerprint({name: buffer for name, buffer in model.named_buffers() if name != "class_loss"})
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_views_are_a_samples_own() -> None:
    model, whole = learner(patch_loss=1.0), batch(6)
    large_GCHW, small_LCHW, hidden_BM = model.prepare(whole, cropped=False)
    assert large_GCHW.shape == (12, 3, 16, 16)
    assert small_LCHW.shape == (18, 3, 8, 8)
    alone = model.prepare(Batch(*(part[2:3] for part in whole)), cropped=False)
    assert torch.equal(alone[0], large_GCHW[2::6])
    assert torch.equal(alone[1], small_LCHW[2::6])
    assert torch.equal(alone[2], hidden_BM[2:3])
    views = [*large_GCHW[::6], *small_LCHW[::6]]
    assert all(not torch.equal(a, b) for i, a in enumerate(views) for b in views[:i] if a.shape == b.shape)


class OnDevice(TorchDispatchMode):
    """Refuses every operation on a tensor that lies on the CPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        assert all(tensor.device.type == "meta" for tensor in tensors), function
        return result


@pytest.mark.parametrize("centring", ["mean", "sinkhorn", "none"])
def test_a_step_neither_waits_for_the_device_nor_copies_to_it(centring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values, so that whatever asks for one fails."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # there is none without a device
    model = learner({"num_registers": 2, "drop_path": 0.1}, centring=centring, patch_loss=1.0, koleo=0.1).to("meta")
    valueless = Batch(*(part.to("meta") for part in batch()))
    with OnDevice():
        model.set_progress(0.5)
        model(*model.prepare(valueless, cropped=False)).backward()
        model.after_move()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_half_precision_gives_nearly_the_same_loss() -> None:
    model = learner({"num_registers": 2}, patch_loss=1.0)
    randomize(model)
    inputs = model.prepare(batch(), cropped=False)
    whole = model(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(*inputs)
    half.backward()
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(whole.item(), rel=0.03)


# Runs


def steps_of(model: Dino, update: Step, images_NCHW: Tensor, start: int, stop: int, steps: int) -> Iterator[float]:
    """As the loop does them."""
    stream = places(len(images_NCHW), PhotoOrder(seed=0, batch_size=8, start_step=start, steps=stop - start))
    for step, places_3B in enumerate(stream, start):
        update.optimizer.set_lr(learning_rate(step, steps, model.config.optim))
        model.set_progress(step / steps)
        torch.manual_seed(step)
        yield update.learn(update.prepare(batch_of(images_NCHW, places_3B)), last=True)
        update.move(step)


def started(config: TrainConfig) -> tuple[Dino, Step]:
    torch.manual_seed(0)
    model = Dino(ViT(config.model), config)
    alone = Processes(0, 1, torch.device("cpu"))
    return model, Step(model, model, make_optimizer(model, config.optim), None, config, alone)


@pytest.mark.parametrize(
    "dino", [{"patch_loss": 1.0, "koleo": 0.1}, {"centring": "mean", "patch_loss": 0.5, "local_views": 0}]
)
@pytest.mark.parametrize("stopped_after", [1, 5])
def test_stopped_and_resumed_is_never_stopped(dino: dict[str, Any], stopped_after: int) -> None:
    config = settings({"drop_path": 0.3, "num_registers": 1}, prototypes_rest=0.2, **dino)
    images_NCHW, steps = photos(20), 8
    whole, update = started(config)
    losses = list(steps_of(whole, update, images_NCHW, 0, steps, steps))
    assert len(set(losses)) == steps
    whole.measures()

    first, update = started(config)
    list(steps_of(first, update, images_NCHW, 0, stopped_after, steps))
    first.measures()
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": update.optimizer.state_dict()}, file)
    kept = torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    config = settings({"drop_path": 0.3, "num_registers": 1}, prototypes_rest=0.2, **dino)
    second, update = started(config)
    randomize(second, seed=1)
    second.load_state_dict(kept["model"])
    update.optimizer.load_state_dict(kept["optimizer"])
    assert list(steps_of(second, update, images_NCHW, stopped_after, steps, steps)) == losses[stopped_after:]
    second.measures()
    assert fingerprint(second.state_dict()) == fingerprint(whole.state_dict())


def patterns(count: int) -> tuple[Tensor, Tensor]:
    """Six kinds of grey patterns of any phase, scale, brightness and contrast: images (N, 3, 32, 32), kinds_N."""
    kind_N = torch.arange(count) % 6
    y_HW, x_HW = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1)

    rate_N = 2 * math.pi / between(4, 7)
    across, down = (rate_N * x_HW + between(0, 6.3)).sin(), (rate_N * y_HW + between(0, 6.3)).sin()
    rings = (rate_N * torch.hypot(x_HW - between(8, 24), y_HW - between(8, 24))).sin()
    noise = 2 * torch.rand(count, 32, 32) - 1
    pattern_NHW = torch.stack([across, down, across * down, rings, noise, torch.maximum(across, down)], 1)
    level_NHW = between(0.35, 0.65) + between(0.15, 0.35) * pattern_NHW[torch.arange(count), kind_N]
    return (level_NHW * 255).byte()[:, None].expand(-1, 3, -1, -1).contiguous(), kind_N


def neighbours_accuracy(vit: ViT, images_NCHW: Tensor, labels_N: Tensor) -> float:
    """How often most of a photo's 10 nearest among the first half of the photos are of its kind."""
    with torch.no_grad():
        features_ND = F.normalize(vit.eval()(images_NCHW / 255 * 4 - 2))
    half = len(images_NCHW) // 2
    nearest = labels_N[:half][(features_ND[half:] @ features_ND[:half].T).topk(10).indices]
    return float((nearest.mode(1).values == labels_N[half:]).float().mean())


def test_it_learns_what_nobody_told_it() -> None:
    images_NCHW, kinds_N = patterns(600)
    views = {"local_views": 2, "local_size": 16, "local_area": (0.2, 0.5), "global_area": (0.5, 1.0)}
    config = settings(
        {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 2},
        **views,
        prototypes=128,
        head_hidden=256,
        bottleneck=64,
        momentum=0.95,
        teacher_temperature=0.02,
    )
    dino, update = started(config)
    before = neighbours_accuracy(dino.shown(), images_NCHW, kinds_N)
    steps = 100
    for step, places_3B in enumerate(places(300, PhotoOrder(seed=0, batch_size=48, steps=steps))):
        update.optimizer.set_lr(learning_rate(step, steps, config.optim))
        dino.set_progress(step / steps)
        update.learn(update.prepare(batch_of(images_NCHW, places_3B)), last=True)
        update.move(step)
    signs = dino.signs()
    after = neighbours_accuracy(dino.shown(), images_NCHW, kinds_N)
    assert after > before + 0.15, (before, after, signs)
    assert signs.loss < 0.95 * math.log(128), signs
    dino.check()


# Processes

TWO = """
    import sys, torch, torch.distributed as dist
    from patchlight.training.dino import even_answers, _sum_of_all, _num_processes
    rank, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    logits_BK = torch.load(file + ".logits", weights_only=True)
    answers_BK = even_answers(logits_BK.chunk(2)[rank].clone())
    mean_K = _sum_of_all(logits_BK.chunk(2)[rank].mean(0)) / _num_processes()
    torch.save((answers_BK, mean_K), f"{file}.{rank}")
    dist.destroy_process_group()
"""


def test_processes_even_their_answers_out_together(tmp_path: Path) -> None:
    logits_BK, file = 4 * torch.randn(10, 5), tmp_path / "meeting"
    torch.save(logits_BK, f"{file}.logits")
    for run in [WarmPython(["-c", textwrap.dedent(TWO), rank, file]) for rank in range(2)]:
        _, complained = run.communicate(timeout=120)
        assert run.returncode == 0, complained
    (first_BK, mean_K), (second_BK, other_mean_K) = (torch.load(f"{file}.{r}", weights_only=True) for r in range(2))
    torch.testing.assert_close(torch.cat([first_BK, second_BK]), even_answers(logits_BK))
    torch.testing.assert_close(mean_K, logits_BK.mean(0))
    assert torch.equal(mean_K, other_mean_K)


# Mistakes


@pytest.mark.parametrize(
    ("model", "dino", "told"),
    [
        ({}, {"local_size": 10}, "patches of 4x4 do not divide an image of 10x10"),
        ({"pooling": "cls_mean"}, {"patch_loss": 1.0}, "needs model.pooling='cls' or 'mean'"),
        ({}, {"local_area": (0.5, 0.1)}, "local_area"),
        ({}, {"prototypes": 1}, "prototypes=1 must be 2 or more"),
        ({}, {"mask_share": 1.0}, "mask_share=1.0"),
        ({}, {"teacher_temprature": 0.1}, "teacher_temperature"),
        ({}, {"centring": "off"}, "centring='off' should be one of"),
    ],
)
def test_mistakes_are_named(model: dict[str, Any], dino: dict[str, Any], told: str) -> None:
    with pytest.raises(PatchlightError, match=told.replace("(", r"\(")):
        learner(model, **dino)


def test_a_model_with_classes_is_refused() -> None:
    with pytest.raises(PatchlightError, match="num_classes=5; set it to 0"):
        Dino(ViT(ViTConfig(**{**MODEL, "num_classes": 5})), settings())


def test_small_views_default_to_whole_patches() -> None:
    sizes = {
        (image, patch): DinoConfig().local_size_for(ViTConfig(image_size=image, patch_size=patch))
        for image, patch in [(128, 8), (224, 16), (32, 4), (16, 16)]
    }
    assert sizes == {(128, 8): (48, 48), (224, 16): (80, 80), (32, 4): (12, 12), (16, 16): (16, 16)}
