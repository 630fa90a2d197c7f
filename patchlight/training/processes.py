"""One process or many: what a run needs to know of the others. `torchrun` starts them and tells them by environment."""

import contextlib
import datetime
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patchlight.devices import resolve_device
from patchlight.errors import PatchlightError
from patchlight.models.families import blocks_of
from patchlight.signals import Stopped
from patchlight.training.checkpoint import TYPE_NAMES, State, flatten, unflatten
from patchlight.training.config import TrainConfig
from patchlight.weights.read import TYPES

PATIENCE = datetime.timedelta(hours=6)
"""While the first process judges a model, or trains its teacher, the others wait."""


class FailedElsewhereError(PatchlightError):
    """Another process of the run has failed, and says why; or it was stopped, by `.signal`, which is 0 else."""

    def __init__(self, signal_number: int = 0) -> None:
        super().__init__("another process of the run has failed; it says why")
        self.signal = signal_number


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what the first process does alone, or each for itself: all go on when all are done.

        Where it fails, all end: the first that failed raises its error, the others raise `FailedElsewhereError`. A stop
        comes before any failure, which may be its doing.
        Inside, none may exchange anything with the others. A signal may raise inside, but nowhere else: whoever left
        without a word would leave the others waiting.
        """
        failure: Exception | Stopped | None = None
        number = 0
        try:
            yield
        except Exception as error:
            failure, number = error, self.world - self.rank  # the first has the largest
        except Stopped as stopped:
            failure, number = stopped, self.world + stopped.signal
        failed = self.agree(number)
        if failure is not None and failed == number:
            raise failure
        if failed:
            raise FailedElsewhereError(max(0, failed - self.world))

    def mean(self, value: float) -> float:
        """Over the processes, so that all decide alike."""
        return float(self._reduced(value, dist.ReduceOp.SUM)) / self.world if self.world > 1 else value

    def from_first(self, state: State) -> State:
        """What the first process holds, to all of them: so that a checkpoint is read by one, from one disk."""
        if self.world == 1:
            return state
        tree, tensors = flatten(state) if self.is_first else (None, {})
        kinds = {name: (TYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
        told: list[Any] = [tree, kinds]
        dist.broadcast_object_list(told, 0, device=self.device)
        for name, (kind, shape) in told[1].items():
            tensor = tensors[name] if self.is_first else torch.empty(shape, dtype=TYPES[kind])
            flat = tensor.contiguous().reshape(-1).view(torch.uint8).to(self.device)
            if len(flat):
                dist.broadcast(flat, 0)
            tensors[name] = flat.cpu().view(TYPES[kind]).reshape(shape)
        return unflatten(told[0], tensors)

    def agree(self, number: int) -> int:
        """The largest number that any of them holds."""
        return int(self._reduced(number, dist.ReduceOp.MAX)) if self.world > 1 else number

    def _reduced(self, value: float, operation: Any) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        result = tensor.item()
        held = weakref.ref(tensor)
        del tensor
        # gloo's thread lets go of it a moment later, for which it needs the interpreter: one that finds it at its end
        # aborts the process.
        while held() is not None and self.device.type == "cpu":
            time.sleep(0.0001)
        return result

    def check_batch(self, config: TrainConfig) -> None:
        if config.batch_size % (self.world * config.accumulate):
            raise PatchlightError(
                f"batch_size={config.batch_size} is not divided by {self.world} processes times accumulate="
                f"{config.accumulate}; choose a batch size that is"
            )
        if config.augment.mix and config.batch_size // (self.world * config.accumulate) % 2:
            raise PatchlightError(
                "photos are mixed in pairs, so that every process needs an even number; change batch_size"
            )
        if config.sharded and (config.ema is not None or config.optim.name == "muon" or config.dino is not None):
            raise PatchlightError("sharded=True goes with optim.name='adamw', ema=None and no dino; change those")

    def autocast(self, config: TrainConfig) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision == "bfloat16")

    def spread(self, learner: nn.Module, config: TrainConfig) -> nn.Module:
        """The learner as all processes train it together, compiled where asked for."""
        model, blocks = learner, blocks_of(learner)
        if config.sharded and self.world > 1:
            from torch.distributed.fsdp import fully_shard

            for block in blocks:
                fully_shard(block)
            fully_shard(model)
        if config.compile:
            # Block by block: all blocks share one compiled form, so that it takes seconds whatever the depth.
            for block in blocks:
                block.compile(dynamic=False)  # the few sizes that there are, each for itself
        if self.world > 1 and not config.sharded:
            ids = [self.device.index] if self.device.type == "cuda" else None
            model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
            model.broadcast_buffers = False  # as an argument, torch 2.13 warns of it, and earlier ones have no other
        return model

    def gather_state(self, model: nn.Module, optimizer: Any | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The weights, whole, on every process, and the optimizer's moments, which of a sharded model the first process
        has alone, and not on its device: they may not fit there."""
        if self.world > 1 and any(_is_sharded(parameter) for parameter in model.parameters()):
            weights = {name: _whole(value) for name, value in model.state_dict().items()}
            return weights, None if optimizer is None else _map_tensors(optimizer.state_dict(), self._gathered)
        return dict(model.state_dict()), None if optimizer is None else optimizer.state_dict()

    def _gathered(self, value: Any) -> Any:
        if not _is_sharded(value):
            return value
        whole = value.full_tensor()
        return whole.cpu() if self.is_first else None

    def load_state(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """The inverse, from a checkpoint."""
        model.load_state_dict(_cut_like(state["model"], model.state_dict()))
        optimizer.load_state_dict(_cut_like(state["optimizer"], optimizer.state_dict()))

    def hardware(self) -> str:
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        else:
            name = f"{self.device.type.upper()} ({torch.get_num_threads()} threads)"
        return name if self.world == 1 else f"{self.world} x {name}"


def rank_and_world() -> tuple[int, int]:
    """Which process this is, from 0, and of how many, as torchrun tells it."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise PatchlightError(
            f"RANK={rank!r} and WORLD_SIZE={world!r} in the environment are not those of a process; unset both, or "
            "start with torchrun, which sets them"
        )
    return int(rank), int(world)


@contextlib.contextmanager
def find_processes(device: str | None) -> Iterator[Processes]:
    """Join the run's other processes if torchrun started us, and leave them at the end."""
    rank, world = rank_and_world()
    if device in (None, "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # each process its own
    chosen = resolve_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1:
        try:
            dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE)
        except (ValueError, RuntimeError) as error:
            raise PatchlightError(
                f"the {world} processes of WORLD_SIZE cannot be joined ({' '.join(str(error).split())[:200]}); start "
                "them with torchrun, or unset WORLD_SIZE"
            ) from None
    try:
        yield Processes(rank, world, chosen)
    except RuntimeError as error:
        if world == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise PatchlightError(
            f"another process of the run is out of reach ({' '.join(str(error).split())[:160]}); start them again with "
            "resume=True to go on from the newest checkpoint"
        ) from None
    finally:
        if world > 1:
            dist.destroy_process_group()


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _whole(value: Any) -> Any:
    return value.full_tensor() if _is_sharded(value) else value


def _cut_like(whole: Any, example: Any) -> Any:
    """Each process's part of whole tensors, where the example is sharded; everything else as it is."""
    if isinstance(example, dict):
        return {name: _cut_like(each, example.get(name)) for name, each in whole.items()}
    if isinstance(example, list | tuple):
        return [_cut_like(each, part) for each, part in zip(whole, example, strict=True)]
    if not _is_sharded(example):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(example.device), example.device_mesh, example.placements)


def _map_tensors(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {name: _map_tensors(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_map_tensors(each, change) for each in value]
    return change(value)
