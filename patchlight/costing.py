"""What a model costs: tokens, parameters, multiply-adds, attention entries, memory; and, measured, its latency.

Counts come from running the model itself on the meta device, where tensors have shapes and no data, so that the
largest model costs nothing to ask about and no formula can disagree with the code.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from patchlight.config import Size
from patchlight.devices import resolve_device
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig
from patchlight.models.families import make_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What one image of the configured size costs in one forward pass."""

    image_size: Size
    grid: Size
    tokens: int
    """Patches and prefix tokens; in a model with stages, of the first."""
    parameters: int
    macs: int
    """Multiply-adds of all matrix products and convolutions; twice this is the count of FLOPs."""
    attention_macs: int
    """Of these, in attention: projections, scores and weighted values."""
    mlp_macs: int
    attention_entries: int
    """Numbers in the attention matrices of all blocks, windows and heads; fused kernels never store them."""
    attention_entries_by_block: tuple[int, ...]
    """The same, block by block."""
    activation_bytes: int
    """What training in float32 keeps of one image for the backward pass, with fused attention."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """How long a forward pass took, measured."""

    device: str
    threads: int
    batch: int
    runs: int
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    images_per_second: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def costs(config: ModelConfig) -> Costs:
    """Count what the model does to one image of `config.image_size`; no weights are made."""
    with torch.inference_mode(False):  # which keeps nothing for a backward pass
        return _count(config)


def _count(config: ModelConfig) -> Costs:
    with torch.device("meta"):
        model = make_model(config).float().eval()
    try:
        image_1CHW = torch.empty(1, config.in_channels, *config.image_size, device="meta", dtype=torch.float32)
        with FlopCounterMode(display=False) as counter:
            model(image_1CHW)
        activation_bytes = _bytes_kept_for_backward(model, image_1CHW)
    except RuntimeError as error:  # sizes beyond what torch can count in 64 bits
        raise PatchlightError(f"image_size={config.image_size} is too large to count ({error!s:.60})") from None
    flops = {name: sum(by_operation.values()) for name, by_operation in counter.get_flop_counts().items()}
    grid = config.first_grid
    return Costs(
        image_size=config.image_size,
        grid=grid,
        tokens=config.num_prefix + grid[0] * grid[1],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        macs=counter.get_total_flops() // 2,
        attention_macs=sum(count for name, count in flops.items() if name.endswith(".attn")) // 2,
        mlp_macs=sum(count for name, count in flops.items() if name.endswith(".mlp")) // 2,
        attention_entries=sum(model.attention_entries()),
        attention_entries_by_block=model.attention_entries(),
        activation_bytes=activation_bytes,
    )


def measure_latency(config: ModelConfig, *, batch: int = 1, device: str = "cpu", seconds: float = 2.0) -> Latency:
    """Time forward passes in float32 for about `seconds`, three at least: the median, after one or more to warm up."""
    if batch < 1:
        raise PatchlightError(f"batch={batch} must be 1 or more")
    chosen = resolve_device(device)
    try:
        with chosen:
            model = make_model(config).eval()
            image_BCHW = torch.randn(batch, config.in_channels, *config.image_size)
    except (RuntimeError, AssertionError, TypeError, ValueError, MemoryError) as error:
        raise PatchlightError(f"the model could not be made on device={device!r}: {error!s:.100}") from None

    def run() -> float:
        start = time.perf_counter()
        model(image_BCHW)
        if image_BCHW.device.type != "cpu":
            torch.accelerator.synchronize(image_BCHW.device)
        return time.perf_counter() - start

    times: list[float] = []
    try:
        with torch.inference_mode():
            warm_up = [run()]
            while len(warm_up) < 3 and sum(warm_up) < seconds:
                warm_up.append(run())
            while len(times) < 3 or sum(times) < seconds:
                times.append(run())
    except (RuntimeError, MemoryError) as error:
        raise PatchlightError(f"a forward pass of {batch} failed on device={device!r}: {error!s:.100}") from None
    median = statistics.median(times)
    return Latency(
        device=torch.cuda.get_device_name(device) if image_BCHW.is_cuda else device,
        threads=torch.get_num_threads(),
        batch=batch,
        runs=len(times),
        median_ms=1000 * median,
        fastest_ms=1000 * min(times),
        slowest_ms=1000 * max(times),
        images_per_second=batch / median,
    )


def _bytes_kept_for_backward(model: nn.Module, image_1CHW: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward, without parameters."""
    kept: list[Tensor] = []  # alive until counted, or a freed storage's identity could be given out again

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _FusedAttention():
        output = model(image_1CHW)
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in kept)}
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    del output
    return sum(storages.values())


class _FusedAttention(TorchFunctionMode):
    """Lets attention keep for the backward pass what fused kernels keep; on the meta device torch has only the plain
    formula, which would keep the whole attention matrix."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask")
            return _KeepsLikeFused.apply(*args[:3], mask)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _KeepsLikeFused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BANE: Tensor, k_BANE: Tensor, v_BANE: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, queries, _ = q_BANE.shape
        out_BANE = v_BANE.new_empty(batch, queries, heads, v_BANE.shape[-1]).transpose(1, 2)
        log_sums_BAN = q_BANE.new_empty(batch, heads, queries, dtype=torch.float32)
        ctx.save_for_backward(q_BANE, k_BANE, v_BANE, mask, out_BANE, log_sums_BAN)
        return out_BANE
