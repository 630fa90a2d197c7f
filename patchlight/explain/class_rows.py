"""The class token's rows of many layers in one GPU kernel.

At a few microseconds of work a layer, what counts on a GPU is the number of calls: twelve layers' worth of small
products, scalings and softmaxes would take longer to launch than to run. So the layers' queries and keys are kept as
they are, and one launch reads them all through their addresses. `Heads.rows` is the reference; a test holds them equal.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from patchlight.models.attention import Heads


def fits(heads: Heads, query: slice | Tensor) -> bool:
    """Whether the kernel applies: one query, no mask, no gradient, on a CUDA device that Triton supports."""
    return (
        heads.q_BANE.is_cuda
        and isinstance(query, slice)
        and query.stop - query.start == 1
        and heads.mask is None
        and not heads.q_BANE.requires_grad
        and heads.q_BANE.shape[-1] <= 256
        and heads.q_BANE.stride(-1) == heads.k_BANE.stride(-1) == 1
        and _works(heads.q_BANE.device, heads.q_BANE.dtype, heads.q_BANE.shape[-1])
    )


def class_rows(layers: Sequence[Heads], query: int) -> Tensor:
    """One query's softmax rows in each of the layers: (L, B, A, 1, N), in float32."""
    (batch, num_heads, num_tokens, width), first = layers[0].k_BANE.shape, layers[0]
    for heads in layers:
        assert heads.q_BANE.stride() == first.q_BANE.stride()
        assert heads.k_BANE.stride() == first.k_BANE.stride()
    found = _kernel()
    assert found is not None, "ask `fits` first"
    kernel, next_power_of_2 = found
    rows_LBA1N = torch.empty(
        len(layers), batch, num_heads, 1, num_tokens, dtype=torch.float32, device=first.k_BANE.device
    )
    start = query * first.q_BANE.stride(2) * first.q_BANE.element_size()
    addresses = [(heads.q_BANE.data_ptr() + start, heads.k_BANE.data_ptr()) for heads in layers]
    table = _address_table(tuple(addresses), first.k_BANE.device)
    with torch.cuda.device(first.k_BANE.device):
        kernel[(num_heads, batch, len(layers))](
            table,
            first.k_BANE,  # for its dtype alone
            rows_LBA1N,
            num_tokens,
            width**-0.5,
            *first.q_BANE.stride()[:2],
            *first.k_BANE.stride()[:3],
            WIDTH=width,
            WIDTH_BLOCK=next_power_of_2(width),
            TOKENS_BLOCK=32,  # small programs, and many of them, keep the most reads in flight
            num_warps=1,
        )
    return rows_LBA1N


@functools.lru_cache(maxsize=256)
def _address_table(addresses: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Addresses on the device, cached: passes of one shape mostly reuse the same memory."""
    return torch.tensor(addresses, dtype=torch.int64).to(device)


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernel compiles here (Triton needs a C compiler) and gives what `Heads.rows` gives."""
    if _kernel() is None:
        return False
    with torch.inference_mode(), torch.random.fork_rng([device]):
        q, k = torch.randn(2, 2, 3, 50, width, device=device, dtype=dtype)
        heads = Heads(q, k, k, None, k)
        try:
            return torch.allclose(class_rows([heads], 1)[0], heads.rows(slice(1, 2)), atol=1e-5)
        except Exception:  # whatever a compiler may raise: the plain way is always there
            return False


@functools.cache
def _kernel() -> tuple[Any, Callable[[int], int]] | None:
    try:
        import triton  # type: ignore[import-not-found]
        import triton.language as tl  # type: ignore[import-not-found]
    except ImportError:
        return None

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        table,
        example,
        rows,
        num_tokens,
        scale,
        q_batch,
        q_head,
        k_batch,
        k_head,
        k_token,
        WIDTH: tl.constexpr,
        WIDTH_BLOCK: tl.constexpr,
        TOKENS_BLOCK: tl.constexpr,
    ):
        head, image, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        q = tl.load(table + 2 * layer).to(tl.pointer_type(example.dtype.element_ty))
        k = tl.load(table + 2 * layer + 1).to(tl.pointer_type(example.dtype.element_ty))
        k += image.to(tl.int64) * k_batch + head * k_head
        along = tl.arange(0, WIDTH_BLOCK)
        q_E = tl.load(q + image.to(tl.int64) * q_batch + head * q_head + along, mask=along < WIDTH, other=0.0)
        q_E = q_E.to(tl.float32) * scale
        row = rows + ((layer * tl.num_programs(1) + image).to(tl.int64) * tl.num_programs(0) + head) * num_tokens
        largest, total = -float("inf"), 0.0
        for start in range(0, num_tokens, TOKENS_BLOCK):
            token = start + tl.arange(0, TOKENS_BLOCK)
            inside = (token < num_tokens)[:, None] & (along < WIDTH)[None, :]
            k_NE = tl.load(k + token.to(tl.int64)[:, None] * k_token + along[None, :], mask=inside, other=0.0)
            score = tl.sum(k_NE.to(tl.float32) * q_E[None, :], 1)
            score = tl.where(token < num_tokens, score, -float("inf"))
            tl.store(row + token, score, mask=token < num_tokens)
            new_largest = tl.maximum(largest, tl.max(score, 0))
            total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(score - new_largest), 0)
            largest = new_largest
        tl.debug_barrier()  # the scores are read back by other threads than wrote them
        for start in range(0, num_tokens, TOKENS_BLOCK):
            token = start + tl.arange(0, TOKENS_BLOCK)
            score = tl.load(row + token, mask=token < num_tokens)
            tl.store(row + token, tl.exp(score - largest) / total, mask=token < num_tokens)

    return kernel, triton.next_power_of_2
