"""One step of learning: forward and backward, and then the weights move.

On a GPU both halves are recorded once and replayed (CUDA graphs): a small model's step is hundreds of kernels of a few
microseconds each, and launching them one by one takes longer than running them.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchlight.train.config import TrainConfig
from patchlight.train.processes import Processes

STEPS_BEFORE_RECORDING = 3
"""Steps taken the plain way first, while libraries choose their kernels and optimizers make their state."""


class Step:
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: Any,
        average: Any | None,
        config: TrainConfig,
        processes: Processes,
    ) -> None:
        self.model, self.loss, self.optimizer, self.average = model, loss, optimizer, average
        self.config, self.processes = config, processes
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.records = processes.device.type == "cuda" and processes.world == 1
        self.steps_taken = 0
        self.norm = torch.zeros((), device=processes.device)
        """Of all gradients together, after `learn`."""
        self.recorded_learn: tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor] | None = None
        self.recorded_move: torch.cuda.CUDAGraph | None = None

    def learn(self, inputs: tuple[Tensor, ...], *, last: bool) -> float:
        """Add the batch's gradients, and give its share of the loss; `last` is the step's last part.

        NaN where the loss or the gradient is no number: then the weights must not move.
        """
        if self.recorded_learn is not None:
            graph, held, loss = self.recorded_learn
            for there, value in zip(held, inputs, strict=True):
                there.copy_(value)
            graph.replay()
            return loss.item()
        if self.records and self.steps_taken >= STEPS_BEFORE_RECORDING:
            self.record(inputs)
            return self.learn(inputs, last=last)
        alone = contextlib.nullcontext() if last or self.processes.world == 1 else self._without_exchange()
        with alone:
            return self._forward_backward(inputs).item()

    def move(self, step: int) -> None:
        """Let the weights follow the gradients, and the average follow the weights."""
        if self.recorded_move is not None:
            self.recorded_move.replay()
        else:
            self._clip_and_step()
        if self.average is not None:
            self.average.update(_vit(self.model), step)
        self.steps_taken += 1
        self.forget()

    def forget(self) -> None:
        """Drop the gradients. Recorded steps write to fixed places, so there they are set to zero."""
        for parameter in self.parameters:
            if parameter.grad is not None and self.recorded_learn is not None:
                parameter.grad.zero_()
            elif self.recorded_learn is None:
                parameter.grad = None

    def record(self, inputs: tuple[Tensor, ...]) -> None:
        held = tuple(value.clone() for value in inputs)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        torch.cuda.synchronize()
        learn = torch.cuda.CUDAGraph()
        with torch.cuda.graph(learn):
            loss = self._forward_backward(held)
        move = torch.cuda.CUDAGraph()
        with torch.cuda.graph(move, pool=learn.pool()):
            self._clip_and_step()
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        self.recorded_learn, self.recorded_move = (learn, held, loss), move

    def _forward_backward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with self.processes.autocast(self.config):
            loss = self.loss(self.model, *inputs) / self.config.accumulate
        loss.backward()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return torch.where(self.norm.isfinite(), loss.detach(), torch.nan)

    def _clip_and_step(self) -> None:
        if self.config.optim.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.optim.clip_grad, self.norm, foreach=True)
        self.optimizer.step()

    def _without_exchange(self) -> Any:
        """Gradients of all but the last part are summed here before the processes exchange them."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()


def _vit(model: Any) -> nn.Module:
    return getattr(model, "module", model).vit
