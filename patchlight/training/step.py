"""One step of learning: photos are prepared, forward and backward, and then the weights move.

On a GPU all three are recorded once and replayed (CUDA graphs): a small model's step is hundreds of kernels of a few
microseconds each, and launching them one by one takes longer than running them.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.training.config import TrainConfig
from patchlight.training.data import Batch
from patchlight.training.learner import Learner
from patchlight.training.processes import Processes

STEPS_BEFORE_RECORDING = 3
"""Steps taken the plain way first, while libraries choose their kernels and optimizers make their state."""

MOST_AT_ONCE, NUMBERS_AT_ONCE = 8, 2**24
"""How many steps' photos are prepared at once, and of how many numbers they may be: the kernels that vary small photos
take hardly longer for several times as many."""


class Step:
    def __init__(
        self,
        learner: Learner,
        model: nn.Module,
        optimizer: Any,
        average: Any | None,
        config: TrainConfig,
        processes: Processes,
        *,
        cropped: bool = False,
    ) -> None:
        """`model` is the learner as `Processes.spread` gives it; `cropped` as in `Learner.prepare`."""
        self.learner, self.model, self.optimizer, self.average = learner, model, optimizer, average
        self.config, self.processes, self.cropped = config, processes, cropped
        self.parameters = [parameter for parameter in learner.parameters() if parameter.requires_grad]
        self.records = processes.device.type == "cuda" and processes.world == 1
        self.steps_taken = 0
        self.norm = torch.zeros((), device=processes.device)
        """Of all gradients together, after `learn`."""
        self.recorded_prepare: tuple[torch.cuda.CUDAGraph, Batch, tuple[Tensor, ...]] | None = None
        self.recorded_learn: tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor] | None = None
        self.recorded_move: torch.cuda.CUDAGraph | None = None

    def prepared(self, stream: Iterator[Batch]) -> Iterator[tuple[Tensor, ...]]:
        """What `learn` takes of each batch of the stream, in turn; it holds until the next is asked for."""
        for first in stream:
            at_once = 1
            if self.records and self.learner.prepares_ahead:
                at_once = max(1, min(MOST_AT_ONCE, NUMBERS_AT_ONCE // first.images_BCHW.numel()))
            several = [first, *itertools.islice(stream, at_once - 1)]
            if len(several) == 1:
                yield self.prepare(first)
                continue
            joined = Batch(*map(torch.cat, zip(*several, strict=True)))
            yield from zip(*(value.chunk(len(several)) for value in self.prepare(joined)), strict=True)

    def prepare(self, batch: Batch) -> tuple[Tensor, ...]:
        """What `learn` takes of a batch."""
        if self.records and self.learner.records_prepare:
            if self.recorded_prepare is None and self.steps_taken >= STEPS_BEFORE_RECORDING:
                self._record_prepare(batch)
            if self.recorded_prepare is not None:
                graph, held, inputs = self.recorded_prepare
                if held.images_BCHW.shape == batch.images_BCHW.shape:
                    _fill(held, batch)
                    graph.replay()
                    return inputs
        with torch.no_grad():
            return self.learner.prepare(batch, cropped=self.cropped)

    def learn(self, inputs: tuple[Tensor, ...], *, last: bool) -> float:
        """Add the gradients of what `prepare` gave, and give its share of the loss; `last` is the step's last part.

        NaN where the loss or the gradient is not a number: then the weights must not move.
        """
        if self.records and self.recorded_learn is None and self.steps_taken >= STEPS_BEFORE_RECORDING:
            self._record_learn_and_move(inputs)
        if self.recorded_learn is not None:
            graph, held, loss = self.recorded_learn
            _fill(held, inputs)
            graph.replay()
            return loss.item()
        alone = contextlib.nullcontext() if last or self.processes.world == 1 else self._without_exchange()
        with alone:
            return self._forward_backward(inputs).item()

    def move(self, step: int) -> None:
        """Let the weights follow the gradients, and the average follow the weights."""
        if self.average is not None:
            self.average.set_step(step)
        if self.recorded_move is not None:
            self.recorded_move.replay()
        else:
            self._clip_and_move()
        self.steps_taken += 1
        self.forget()

    def forget(self) -> None:
        """Drop the gradients. Recorded steps write to fixed places: they write anew, or add to what is made zero."""
        if self.recorded_learn is not None:
            if self.config.accumulate == 1:
                return
            torch._foreach_zero_([parameter.grad for parameter in self.parameters if parameter.grad is not None])
            return
        for parameter in self.parameters:
            parameter.grad = None

    def _record_prepare(self, batch: Batch) -> None:
        held = Batch(*(value.clone() for value in batch))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), _recording(graph):
            inputs = self.learner.prepare(held, cropped=self.cropped)
        self.recorded_prepare = graph, held, inputs

    def _record_learn_and_move(self, inputs: tuple[Tensor, ...]) -> None:
        # What is always prepared to the same place is read from there.
        fixed = self.recorded_prepare is not None and _same(inputs, self.recorded_prepare[2])
        held = inputs if fixed else tuple(value.clone() for value in inputs)
        for parameter in self.parameters:
            parameter.grad = None if self.config.accumulate == 1 else torch.zeros_like(parameter)
        torch.cuda.synchronize()
        learn = torch.cuda.CUDAGraph()
        with _recording(learn):
            loss = self._forward_backward(held)
        move = torch.cuda.CUDAGraph()
        with _recording(move, pool=learn.pool()):
            self._clip_and_move()
        self.recorded_learn, self.recorded_move = (learn, held, loss), move

    def _forward_backward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with self.processes.autocast(self.config):
            loss = self.model(*inputs) / self.config.accumulate
        loss.backward()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm: Any = nn.utils.get_total_norm(gradients, foreach=True)
        self.norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded weights
        return torch.where(self.norm.isfinite(), loss.detach(), torch.nan)

    def _clip_and_move(self) -> None:
        if self.config.optim.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.optim.clip_grad, self.norm, foreach=True)
        self.optimizer.step()
        self.learner.after_move()
        if self.average is not None:
            self.average.follow()

    def _without_exchange(self) -> Any:
        """Gradients of all but the last part are summed here before the processes exchange them."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()


def _recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Any:
    """What other threads do meanwhile, such as pinning memory for the next photos, does not spoil it."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


def _fill(held: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for there, value in zip(held, values, strict=True):
        if there is not value:
            there.copy_(value)


def _same(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))
