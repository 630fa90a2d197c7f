"""How weights move: AdamW, Muon for the blocks' matrices, the rate over the run, and the average of the weights."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.errors import PatchlightError
from patchlight.models.families import Model
from patchlight.training.config import OptimConfig
from patchlight.training.learner import Learner

# Matrices that are kept in one another's continuation, and how many they are: each of them is turned for itself.
JOINED_MATRICES = {"attn.qkv.weight": 3, "mlp.gate_and_up.weight": 2}
UNDECAYED = ("class_token", "distill_token", "registers", "table", "frequencies", "query")
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def make_optimizer(model: Model | Learner, config: OptimConfig, *, capturable: bool = False) -> "Optimizers":
    """The optimizer for the parameters of a model that learn (`requires_grad`), in groups.

    Biases, norms, LayerScale, tokens and position tables are not decayed. With `layer_decay`, a layer's rate is
    layer_decay ** (layers above it): the embedding, tokens and positions are layer 0, then the blocks (and with each
    stage's first what leads to it), then norm and heads, and whatever else a learner has. With `capturable`, rates live
    in tensors on the device, so that `step` can be captured in a CUDA graph.
    """
    learning = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not learning:
        raise PatchlightError("no parameter of the model has requires_grad=True; there is nothing to learn")
    inner = model.vit if isinstance(model, Learner) else model
    depth, stages = inner.config.depth, getattr(inner.config, "stage_starts", ())
    device = next(iter(learning.values())).device
    groups: dict[tuple[int, float, float], dict[str, Any]] = {}
    for name, weight in learning.items():
        parts = matrices_in(name, weight) if config.name == "muon" else 0
        rate = (config.muon_lr if parts else config.lr) * config.layer_decay ** (
            depth + 1 - _layer(name, depth, stages)
        )
        decay = config.weight_decay if weight.ndim > 1 and not name.endswith(UNDECAYED) else 0.0
        if (parts, rate, decay) not in groups:
            lr = torch.tensor(rate, device=device) if capturable else rate
            groups[parts, rate, decay] = {"params": [], "lr": lr, "base_lr": rate, "weight_decay": decay}
            if parts:
                groups[parts, rate, decay]["parts"] = parts
        groups[parts, rate, decay]["params"].append(weight)

    optimizers: list[torch.optim.Optimizer] = []
    for_adamw = [group for (parts, _, _), group in groups.items() if not parts]
    for_muon = [group for (parts, _, _), group in groups.items() if parts]
    if for_adamw:
        fused = device.type in FUSED_DEVICES
        optimizers.append(
            torch.optim.AdamW(for_adamw, lr=config.lr, betas=config.betas, fused=fused, capturable=capturable)
        )
    if for_muon:
        optimizers.append(Muon(for_muon, lr=config.muon_lr, momentum=config.muon_momentum))
    return Optimizers(optimizers, learning)


EMBEDDING = ("patch_embed", "stem", "positions", "class_token", "distill_token", "registers", "embed_norm")


def _layer(name: str, depth: int, stages: tuple[int, ...] = ()) -> int:
    top, _, rest = name.removeprefix("vit.").partition(".")
    if top == "blocks":
        return int(rest.partition(".")[0]) + 1
    if top == "merges":  # they lead to the second stage, the third, ...
        return stages[int(rest.partition(".")[0]) + 1] + 1
    return 0 if top in EMBEDDING else depth + 1


def matrices_in(name: str, weight: Tensor) -> int:
    """How many matrices a parameter of a block joins; 0 for what is none, or is outside of the blocks."""
    if "blocks" not in name.split(".") or weight.ndim != 2 or name.endswith(UNDECAYED):
        return 0
    return next((parts for joined, parts in JOINED_MATRICES.items() if name.endswith(joined)), 1)


class Optimizers:
    """One or two of torch's optimizers, as one whose rates are set together and whose state is kept by name."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], learning: Mapping[str, Tensor]) -> None:
        self.optimizers = optimizers
        self.share = 1.0
        self._names = {weight: name for name, weight in learning.items()}
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.AdamW):
                _make_state(optimizer)

    @property
    def groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def set_lr(self, share: float) -> None:
        """Set each group's learning rate to this share of its base rate."""
        self.share = share
        for group in self.groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["base_lr"] * share)
            else:
                group["lr"] = group["base_lr"] * share

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """{"share": share of the rates, "state": {parameter's name: {what: tensor}}}; the tensors are not copied."""
        states = {weight: state for optimizer in self.optimizers for weight, state in optimizer.state.items()}
        return {"share": self.share, "state": {self._names[weight]: dict(state) for weight, state in states.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, by copying into the tensors that are there: a captured step stays good."""
        mine, theirs = self.state_dict()["state"], state["state"]
        _check_same_names(mine, theirs, "optimizer state")
        for name in mine:
            _check_same_names(mine[name], theirs[name], f"optimizer state of {name}")
            for what, tensor in mine[name].items():
                _copy(tensor, theirs[name][what], f"{name} {what}")
        self.set_lr(state["share"])


def _make_state(optimizer: torch.optim.AdamW) -> None:
    """Make the state that the first step would make. Made inside a CUDA graph, it would begin anew at each replay."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            on_device = group["fused"] or group["capturable"]
            optimizer.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device if on_device else None),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal, so that every direction of a matrix learns alike (Jordan et al. 2024).

    For matrices only, or matrices one below the other (`parts` of a group says how many). Each step moves a matrix by
    lr times sqrt(max(1, rows / columns)), with decoupled weight decay.
    """

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        # Matrices of one shape are turned in one batch, whichever block or group they are from.
        batches: defaultdict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight, step in zip(weights, self._momentum_steps(weights, group["momentum"]), strict=True):
                step_prc = step.unflatten(0, (group["parts"], -1))
                batches[step_prc.shape[1:], step.dtype, step.device].append((weight, step_prc))

        turned: dict[Tensor, Tensor] = {}
        for batch in batches.values():
            steps_Mrc = orthogonalize(torch.cat([step_prc for _, step_prc in batch]))
            rows, columns = steps_Mrc.shape[1:]
            steps_Mrc.mul_(math.sqrt(max(1, rows / columns)))
            each_prc = steps_Mrc.split([len(step_prc) for _, step_prc in batch])
            turned |= {weight: step_prc.flatten(0, 1) for (weight, _), step_prc in zip(batch, each_prc, strict=True)}

        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight in turned]
            if weights:
                steps = [turned[weight] for weight in weights]
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_mul_(steps, -group["lr"])
                torch._foreach_add_(weights, steps)

    def _momentum_steps(self, weights: list[Tensor], momentum: float) -> list[Tensor]:
        """The gradients, averaged over steps and looked ahead by one step (Nesterov)."""
        if not weights:
            return []
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        averages = [self.state[weight]["momentum"] for weight in weights]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        return list(torch._foreach_lerp(gradients, averages, momentum))


def orthogonalize(matrices_Mrc: Tensor) -> Tensor:
    """The matrices with their singular values brought near one (0.7 to 1.2): U S V' becomes about U V'.

    Five Newton-Schulz steps of the odd polynomial a s + b s^3 + c s^5. Its coefficients are chosen for a steep rise at
    zero, not for meeting one exactly, which training does not miss; nor does it miss digits that bfloat16 lacks.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices_Mrc.shape[1] > matrices_Mrc.shape[2]
    x = matrices_Mrc.mT if tall else matrices_Mrc  # the products below are of the short side's size
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-20)  # no singular value is above the root of all squares
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices_Mrc.dtype).contiguous()


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The share of the base rate at a step, counted from 0, of a run of `steps`.

    It grows linearly over the first `warmup` of the run, then falls as the schedule says to `final_lr` at the end.
    """
    warmup = config.warmup * steps
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1e-9, steps - warmup))
    left = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.final_lr + (1 - config.final_lr) * left


class WeightAverage:
    """A running average of a model's weights and floating-point buffers; other buffers are copied as they are.

    Each step is `set_step`, which waits for nothing, and `follow`, which can be part of a CUDA graph.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._followed = model.state_dict()
        self._averages = {name: tensor.clone() for name, tensor in self._followed.items()}
        numbers = [name for name, average in self._averages.items() if average.is_floating_point()]
        self._numbers = [self._averages[name] for name in numbers], [self._followed[name] for name in numbers]
        self._others = sorted(self._averages.keys() - set(numbers))
        device = self._numbers[0][0].device if numbers else None
        self._share = torch.zeros((), device=device)

    def set_step(self, step: int) -> None:
        """Say which step it is that is taken in next, from 0. Early ones, of which few are known, count for more."""
        self._share.fill_(1 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def follow(self) -> None:
        """Take in the model's weights."""
        averages, followed = self._numbers
        ways = torch._foreach_sub(followed, averages)
        torch._foreach_mul_(ways, self._share)
        torch._foreach_add_(averages, ways)
        for name in self._others:
            self._averages[name].copy_(self._followed[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The averages under the model's names; they are not copied."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _check_same_names(self._averages, state, "averaged weights")
        for name, average in self._averages.items():
            _copy(average, state[name], name)


def _check_same_names(mine: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    differing = sorted(mine.keys() ^ theirs.keys())
    if differing:
        where = "missing" if differing[0] in mine else "too many"
        raise PatchlightError(f"{what}: {differing[0]!r} is {where}; it was kept for another model or other settings")


def _copy(target: Tensor, source: Tensor, name: str) -> None:
    if target.shape != source.shape or target.dtype != source.dtype:
        kinds = " and ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in (source, target))
        raise PatchlightError(f"{name}: kept and wanted are {kinds}; it was kept for another model or other settings")
    target.copy_(source)
