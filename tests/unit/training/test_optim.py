"""Groups, Muon, the rate over the run and the averaged weights, against references written out by hand or in numpy."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models_at_random import randomize, tiny_vit
from patchlight.errors import PatchlightError
from patchlight.models.vit import ViT
from patchlight.training.checkpoint import fingerprint, read_newest, write_checkpoint
from patchlight.training.config import OptimConfig
from patchlight.training.optim import Muon, WeightAverage, learning_rate, make_optimizer, orthogonalize

EVERYTHING = {"num_registers": 2, "distill_token": True, "layer_scale": 0.1, "qk_norm": True, "embed_norm": True}
UNDECAYED_ENDINGS = ("bias", "norm.weight", "norm1.weight", "norm2.weight", "scale", "table", "token", "registers")


def group_of_each(model: ViT, optimizer: Any) -> dict[str, dict[str, Any]]:
    names = {weight: name for name, weight in model.named_parameters()}
    named = [(names[weight], group) for group in optimizer.groups for weight in group["params"]]
    assert len({name for name, _ in named}) == len(named), "a parameter is in two groups"
    return dict(named)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 32, generator=generator)
        labels = torch.randint(0, 5, (4,), generator=generator)
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.set_lr(1 / (1 + step))
        optimizer.step()


def push(model: nn.Module, optimizer: Any, step: int) -> None:
    """A step along drawn gradients: AdamW blows the last digits of gradients near zero up to whole steps."""
    generator = torch.Generator().manual_seed(step)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()


def well_conditioned(*shape: int) -> Tensor:
    """Matrices with singular values from 0.1 to 1."""
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    return u * torch.linspace(0.1, 1, u.shape[-1]) @ v


@pytest.mark.parametrize("changes", [EVERYTHING, {"position": "relative_bias", "head_hidden": 7}, {"mlp": "swiglu"}])
def test_adamw_groups_are_as_written_out(changes: dict[str, Any]):
    model = tiny_vit(**changes)
    optimizer = make_optimizer(model, OptimConfig(lr=0.01, weight_decay=0.3, layer_decay=0.5))
    groups = group_of_each(model, optimizer)
    assert groups.keys() == dict(model.named_parameters()).keys()
    rates = {  # three blocks: the norm and the heads are layer 4
        "class_token": 0.01 / 16,
        "distill_token": 0.01 / 16,
        "registers": 0.01 / 16,
        "patch_embed": 0.01 / 16,
        "positions": 0.01 / 16,
        "embed_norm": 0.01 / 16,
        "blocks.0": 0.01 / 8,
        "blocks.1": 0.01 / 4,
        "blocks.2": 0.01 / 2,
        "norm": 0.01,
        "head": 0.01,
        "distill_head": 0.01,
    }
    for name, group in groups.items():
        place = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        assert group["lr"] == pytest.approx(rates[place], rel=1e-12), name
        assert group["weight_decay"] == (0.0 if name.endswith(UNDECAYED_ENDINGS) else 0.3), name
    decayed = {name for name, group in groups.items() if group["weight_decay"] and not name.startswith("blocks.")}
    heads = {"distill_head.out.weight"} if "distill_token" in changes else set()
    heads |= {"head.hidden.weight"} if "head_hidden" in changes else set()
    assert decayed == {"patch_embed.proj.weight", "head.out.weight"} | heads


def test_set_lr_sets_every_rate_to_its_share():
    model = tiny_vit()
    optimizer = make_optimizer(model, OptimConfig(name="muon", lr=0.01, muon_lr=0.1, layer_decay=0.5))
    for share in (0.0, 0.25, 1.0):
        optimizer.set_lr(share)
        groups = group_of_each(model, optimizer)
        assert groups["head.out.weight"]["lr"] == 0.01 * share
        assert groups["blocks.2.mlp.up.weight"]["lr"] == 0.1 / 2 * share
        assert groups["blocks.0.mlp.up.bias"]["lr"] == 0.01 / 8 * share


def test_only_what_learns_is_moved():
    model = tiny_vit().requires_grad_(False)
    with pytest.raises(PatchlightError, match="nothing to learn"):
        make_optimizer(model, OptimConfig())
    model.head.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model, OptimConfig(name="muon"))
    assert group_of_each(model, optimizer).keys() == {"head.out.weight", "head.out.bias"}
    train(model, optimizer, range(2))
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"head.out.weight", "head.out.bias"}


def test_adamw_steps_as_torch_does():
    ours, theirs = tiny_vit(**EVERYTHING), tiny_vit(**EVERYTHING)
    optimizer = make_optimizer(ours, OptimConfig(lr=0.01, weight_decay=0.0, betas=(0.8, 0.95)))
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0, betas=(0.8, 0.95), foreach=False)
    for step in range(3):
        push(ours, optimizer, step)
        push(theirs, reference, step)
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest(mlp: str):
    model = tiny_vit(mlp=mlp, position="relative_bias", **EVERYTHING)
    optimizer = make_optimizer(model, OptimConfig(name="muon", lr=0.01, muon_lr=0.1, weight_decay=0.3))
    adamw, muon = optimizer.optimizers
    names = {weight: name for name, weight in model.named_parameters()}
    by_muon = {names[weight]: group for group in muon.param_groups for weight in group["params"]}
    up, parts = ("mlp.gate_and_up", 2) if mlp == "swiglu" else ("mlp.up", 1)
    expected = {"attn.qkv": 3, "attn.out": 1, up: parts, "mlp.down": 1}
    assert {name: group["parts"] for name, group in by_muon.items()} == {
        f"blocks.{i}.{layer}.weight": parts for i in range(3) for layer, parts in expected.items()
    }
    assert all(group["lr"] == 0.1 and group["weight_decay"] == 0.3 for group in by_muon.values())
    by_adamw = {names[weight] for group in adamw.param_groups for weight in group["params"]}
    assert by_adamw == set(names.values()) - by_muon.keys()


@pytest.mark.parametrize("shape", [(24, 24), (96, 24), (24, 96), (1, 8), (8, 1)])
def test_orthogonalized_matrices_keep_their_directions_and_lose_their_scales(shape: tuple[int, int]):
    matrices = well_conditioned(5, *shape) * torch.tensor([1e-6, 0.1, 1.0, 1e3, 1e12])[:, None, None]
    turned = orthogonalize(matrices)
    assert turned.shape == matrices.shape
    values = torch.linalg.svdvals(turned)
    assert values.min() > 0.6
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices.double(), full_matrices=False)
    kept = torch.einsum("mri,mrc,mic->mi", u, turned.double(), v)  # the turned matrix in the old singular directions
    torch.testing.assert_close(kept.sort().values.float(), values.sort().values, rtol=1e-3, atol=1e-3)
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """One matrix, in float64, without transposing."""
    x = matrix / np.sqrt((matrix**2).sum())
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def muon_in_numpy(
    weight: np.ndarray, gradients: list[np.ndarray], parts: int, lr: float, momentum: float, decay: float
) -> np.ndarray:
    """The momentum as a sum over all gradients so far, and a plain loop over the matrices."""
    for now in range(len(gradients)):
        average = sum((1 - momentum) * momentum ** (now - t) * gradients[t] for t in range(now + 1))
        ahead = (1 - momentum) * gradients[now] + momentum * average
        rows = len(weight) // parts
        steps = [newton_schulz(ahead[i * rows : (i + 1) * rows]) for i in range(parts)]
        step = np.concatenate(steps) * math.sqrt(max(1, rows / weight.shape[1]))
        weight = weight * (1 - lr * decay) - lr * step
    return weight


@pytest.mark.parametrize("lr_in_tensor", [False, True])
def test_muon_in_batches_equals_a_loop_in_numpy(lr_in_tensor: bool):
    shapes = [((24, 8), 3, 0.1), ((8, 8), 1, 0.1), ((8, 8), 1, 0.02), ((32, 8), 1, 0.1), ((8, 32), 1, 0.02)]
    shapes += [((64, 8), 2, 0.1), ((24, 8), 3, 0.02)]
    weights = [nn.Parameter(torch.randn(shape)) for shape, _, _ in shapes]
    unused = nn.Parameter(torch.ones(8, 8))
    groups = [
        {"params": [weight], "parts": parts, "lr": torch.tensor(lr) if lr_in_tensor else lr, "weight_decay": 0.5}
        for weight, (_, parts, lr) in zip(weights, shapes, strict=True)
    ]
    muon = Muon([*groups, {"params": [unused]}], momentum=0.9)
    gradients = [[torch.randn(shape) for shape, _, _ in shapes] for _ in range(4)]
    expected = [
        muon_in_numpy(
            weight.detach().double().numpy(),
            [step[i].double().numpy() for step in gradients],
            parts,
            lr,
            momentum=0.9,
            decay=0.5,
        )
        for i, (weight, (_, parts, lr)) in enumerate(zip(weights, shapes, strict=True))
    ]
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient
        muon.step()
    for weight, reference in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight.detach().numpy(), reference, rtol=1e-4, atol=1e-4)
    assert torch.equal(unused, torch.ones(8, 8))


def test_queries_keys_and_values_each_get_an_orthogonal_step():
    model = tiny_vit(mlp="swiglu")
    before = copy.deepcopy(model)
    optimizer = make_optimizer(model, OptimConfig(name="muon", muon_lr=1.0, weight_decay=0.0))
    # Gradients of very different sizes: turned together, the largest part would crowd out the others.
    for name, weight in model.named_parameters():
        parts = 3 if "qkv.weight" in name else 2 if "gate_and_up.weight" in name else 1
        rows = weight.shape[0] // parts
        matrices = well_conditioned(parts, rows, 24) if parts > 1 else torch.randn(1, *weight.shape)
        weight.grad = torch.cat([matrix * 1000**i for i, matrix in enumerate(matrices)])
    optimizer.step()
    step = (before.blocks[1].attn.qkv.weight - model.blocks[1].attn.qkv.weight).detach()
    for part in step.chunk(3):
        values = torch.linalg.svdvals(part)
        assert values.min() > 0.6
        assert values.max() < 1.3
    step = (before.blocks[1].mlp.gate_and_up.weight - model.blocks[1].mlp.gate_and_up.weight).detach()
    for part in step.chunk(2):  # 96 x 24 each, so twice the length
        values = torch.linalg.svdvals(part) / 2
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_muon_solves_a_linear_problem_that_is_hard_for_plain_descent():
    inputs = torch.randn(64, 8) * torch.logspace(0, -1.5, 8)  # directions whose curvatures differ 1,000 times
    wanted = torch.randn(8, 8)

    def distance(optimizer: torch.optim.Optimizer, weight: Tensor, lr: float) -> float:
        for step in range(150):
            optimizer.zero_grad()
            (inputs @ (weight - wanted).T).square().mean().backward()
            optimizer.param_groups[0]["lr"] = lr * (1 - step / 150)
            optimizer.step()
        return (weight - wanted).abs().max().item()

    by_muon, plain = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))
    assert distance(Muon([by_muon], momentum=0.8), by_muon, 0.2) < 0.03
    assert distance(torch.optim.SGD([plain], lr=3.0, momentum=0.9), plain, 3.0) > 0.3


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_stopped_run_goes_on_bit_for_bit(name: str, capturable: bool, tmp_path: Path):
    config = OptimConfig(name=name, layer_decay=0.7)  # type: ignore[arg-type]
    through, stopped = tiny_vit(**EVERYTHING), tiny_vit(**EVERYTHING)
    train(through, make_optimizer(through, config, capturable=capturable), range(6))

    optimizer = make_optimizer(stopped, config, capturable=capturable)
    train(stopped, optimizer, range(3))
    write_checkpoint(tmp_path, 3, {"model": stopped.state_dict(), "optimizer": optimizer.state_dict()})
    found = read_newest(tmp_path)
    assert found is not None
    resumed = tiny_vit(**EVERYTHING)
    randomize(resumed, seed=5)
    again = make_optimizer(resumed, config, capturable=capturable)
    rates = [group["lr"] for group in again.groups]
    resumed.load_state_dict(found[1]["model"])
    again.load_state_dict(found[1]["optimizer"])
    assert fingerprint(again.state_dict()) == fingerprint(optimizer.state_dict())
    assert [float(group["lr"]) for group in again.groups] == [float(group["lr"]) for group in optimizer.groups]
    if capturable:  # a captured graph reads these very tensors
        assert all(group["lr"] is rate for group, rate in zip(again.groups, rates, strict=True))
    train(resumed, again, range(3, 6))
    assert fingerprint(resumed.state_dict()) == fingerprint(through.state_dict())


def test_rates_in_tensors_train_the_same():
    plain, captured = tiny_vit(), tiny_vit()
    config = OptimConfig(name="muon", layer_decay=0.7)
    optimizers = make_optimizer(plain, config), make_optimizer(captured, config, capturable=True)
    for step in range(3):
        for model, optimizer in zip((plain, captured), optimizers, strict=True):
            optimizer.set_lr(1 / (1 + step))
            push(model, optimizer, step)
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(captured.get_parameter(name), weight, rtol=1e-4, atol=1e-5)


def test_the_state_of_another_model_is_refused():
    optimizer = make_optimizer(tiny_vit(), OptimConfig())
    for other, named in (
        (make_optimizer(tiny_vit(depth=2), OptimConfig()), r"'blocks\.2.*missing"),
        (make_optimizer(tiny_vit(layer_scale=0.1), OptimConfig()), r"'blocks\.0.*too many"),
        (make_optimizer(tiny_vit(num_classes=6), OptimConfig()), r"head\.out\.\w+ exp_avg: .*6.*5"),
        (make_optimizer(tiny_vit(), OptimConfig(name="muon")), "missing"),
    ):
        with pytest.raises(PatchlightError, match=named):
            optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("settings", "step", "share"),
    [
        ({}, 0, 0.1),  # ten steps of warm-up
        ({}, 4, 0.5),
        ({}, 9, 1.0),
        ({}, 10, 1.0),
        ({}, 40, 0.75),  # a third of the way down: (1 + cos 60 degrees) / 2
        ({}, 55, 0.5),
        ({}, 70, 0.25),
        ({}, 100, 0.0),
        ({}, 130, 0.0),
        ({"final_lr": 0.2}, 55, 0.6),
        ({"final_lr": 0.2}, 100, 0.2),
        ({"schedule": "linear"}, 10, 1.0),
        ({"schedule": "linear"}, 28, 0.8),
        ({"schedule": "linear", "final_lr": 0.5}, 28, 0.9),
        ({"schedule": "constant"}, 4, 0.5),
        ({"schedule": "constant"}, 99, 1.0),
        ({"warmup": 0.0}, 0, 1.0),
        ({"warmup": 0.0}, 50, 0.5),
        ({"warmup": 1.0}, 49, 0.5),
        ({"warmup": 1.0}, 99, 1.0),
        ({"warmup": 0.025}, 0, 0.4),  # two steps and a half
        ({"warmup": 0.025}, 2, 1.0),
    ],
)
def test_the_rate_over_a_run_of_100_steps(settings: dict[str, Any], step: int, share: float):
    config = OptimConfig(**{"warmup": 0.1, **settings})
    assert learning_rate(step, 100, config) == pytest.approx(share, abs=1e-12)


def test_the_rate_never_leaves_its_bounds_in_runs_of_a_few_steps():
    for schedule, warmup, steps in itertools.product(("cosine", "linear", "constant"), (0, 0.05, 0.5, 1), (1, 2, 7)):
        config = OptimConfig(schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
        shares = [learning_rate(step, steps, config) for step in range(steps)]
        assert all(0 < share <= 1 for share in shares), (schedule, warmup, steps, shares)


class Counting(nn.Module):
    """Weights, a buffer of numbers and a buffer of counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.tensor(0))

    @torch.no_grad()
    def move(self) -> None:
        self.weight.add_(torch.randn(3, 4))
        self.mean.add_(1)
        self.count.add_(1)


def test_averages_equal_a_loop_in_numpy():
    model = Counting()
    average = WeightAverage(model, decay=0.7)
    expected = {name: model.state_dict()[name].double().numpy().copy() for name in ("weight", "mean")}
    for step in range(40):  # the decay is 0.1, 2/11, ... until it reaches 0.7 at step 20
        model.move()
        average.set_step(step)
        average.follow()
        decay = min(0.7, (1 + step) / (10 + step))
        for name in expected:
            expected[name] = decay * expected[name] + (1 - decay) * model.state_dict()[name].double().numpy()
    for name, reference in expected.items():
        np.testing.assert_allclose(average.state_dict()[name].numpy(), reference, rtol=1e-5, atol=1e-5)
    assert average.state_dict()["count"] == 40
    assert not any(tensor.requires_grad for tensor in average.state_dict().values())


def test_averages_go_on_bit_for_bit_and_leave_the_model_alone(tmp_path: Path):
    model = Counting()
    average = WeightAverage(model, decay=0.99)
    for step in range(3):
        model.move()
        average.set_step(step)
        average.follow()
    write_checkpoint(tmp_path, 3, average.state_dict())
    found = read_newest(tmp_path)
    assert found is not None
    again = WeightAverage(model, decay=0.99)
    again.load_state_dict(found[1])
    before = fingerprint(model.state_dict())
    for step in range(3, 6):
        for each in (average, again):
            each.set_step(step)
            each.follow()
    assert fingerprint(again.state_dict()) == fingerprint(average.state_dict())
    assert fingerprint(model.state_dict()) == before != fingerprint(average.state_dict())
    with pytest.raises(PatchlightError, match="missing"):
        again.load_state_dict({"weight": torch.zeros(3, 4)})


@pytest.mark.parametrize("position", ["learned", "relative_bias"])
def test_a_model_that_takes_the_average_forgets_what_it_remembered_of_its_old_tables(position: str):
    """Resampled position tables are remembered between calls; the average has to be seen through that."""
    model, other = tiny_vit(position=position), tiny_vit(position=position)
    randomize(other, seed=3)
    average = WeightAverage(other, decay=0.9)
    image = torch.randn(1, 3, 40, 48)
    with torch.no_grad():
        before = model(image)
        model.load_state_dict(average.state_dict())
        after = model(image)
        assert not torch.allclose(before, after)
        assert torch.equal(after, other(image))
    assert all(weight.requires_grad and weight.is_leaf for weight in model.parameters())
    with torch.no_grad():
        model.norm.weight.add_(1)
    assert torch.equal(average.state_dict()["norm.weight"], other.norm.weight), "the model and the average share memory"


@pytest.mark.gpu
def test_a_captured_step_replays_as_it_runs():
    """With rates that change between replays; graphs keep what was a Python number when they were captured."""
    config = OptimConfig(name="muon", layer_decay=0.7)
    eager, captured = tiny_vit().cuda(), tiny_vit().cuda()
    gradients = [[torch.randn_like(weight) for weight in eager.parameters()] for _ in range(4)]

    def give(model: nn.Module, numbers: list[Tensor]) -> None:
        for weight, number in zip(model.parameters(), numbers, strict=True):
            weight.grad = number.clone() if weight.grad is None else weight.grad.copy_(number)

    optimizer = make_optimizer(captured, config, capturable=True)
    give(captured, gradients[0])
    spare = copy.deepcopy((captured.state_dict(), optimizer.state_dict()))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the libraries' first calls may not be captured
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    captured.load_state_dict(spare[0])
    optimizer.load_state_dict(spare[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()

    reference = make_optimizer(eager, config)
    for step, numbers in enumerate(gradients):
        give(captured, numbers)
        give(eager, numbers)
        optimizer.set_lr(1 / (1 + step))
        reference.set_lr(1 / (1 + step))
        graph.replay()
        reference.step()
    for name, weight in eager.named_parameters():
        torch.testing.assert_close(captured.get_parameter(name), weight, rtol=1e-4, atol=1e-5)
