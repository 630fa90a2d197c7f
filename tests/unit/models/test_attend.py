"""Which kernel attention takes, and that its gradients are right whatever the process did before."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from models_at_random import tiny_vit
from patchlight.models.attention import Heads, attend


@pytest.mark.parametrize("wanted", [True, False])
def test_gradients_are_not_left_to_cudnn(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []

    def see(*tensors: Any, attn_mask: Any) -> None:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())

    monkeypatch.setattr(F, "scaled_dot_product_attention", see)
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with torch.set_grad_enabled(wanted):
        attend(on_gpu, on_gpu, on_gpu)
    assert allowed == [before and not wanted]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def _apart(some: Tensor, others: Tensor) -> float:
    return ((some.float() - others.float()).norm() / others.float().norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["contiguous", "as the output"])
def test_gradients_do_not_depend_on_what_came_before(first: str) -> None:
    """A gradient that comes in lies in memory as whoever made it likes; torch's cuDNN attention mixes these up."""
    tokens = 77 if first == "contiguous" else 79  # each case begins with shapes that the process has not seen
    qkv_BN3AE = torch.randn(8, tokens, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    come_BANE = torch.randn(8, tokens, 3, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    orders = ["contiguous", "as the output"]
    for order in orders if first == "contiguous" else reversed(orders):
        q, k, v = (each.transpose(1, 2).detach().requires_grad_() for each in qkv_BN3AE.unbind(2))
        given = come_BANE.contiguous() if order == "contiguous" else come_BANE
        found = torch.autograd.grad(attend(q, k, v), (q, k, v), given)
        q, k, v = (each.detach().float().requires_grad_() for each in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            right = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), come_BANE.float())
        for some, others in zip(found, right, strict=True):
            assert _apart(some, others) < 0.01, order


@pytest.mark.gpu
# Dynamo of torch 2.11 asks an activation for its gradient, and warns itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("heads_are_kept", [True, False])
def test_compiled_blocks_pass_the_right_gradients(heads_are_kept: bool) -> None:
    """With the queries and keys of the last block read beside what it answers, as learning to find subjects does."""
    torch._dynamo.reset()
    model = tiny_vit(width=192, num_heads=3, depth=2, patch_size=8, image_size=64).cuda().train()
    image_BCHW = torch.randn(16, 3, 64, 64, device="cuda")

    def gradients(*, low: bool) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            x_BND, geometry = model.embed(image_BCHW)
            heads: list[Heads] = []
            for block in model.blocks:
                heads.clear()
                x_BND = block(x_BND, geometry, heads) if heads_are_kept else block(x_BND, geometry)
            seen = sum((each.q_BANE[:, :, :1] * each.k_BANE).sum(-1).float().sigmoid().mean() for each in heads)
            loss = seen + x_BND.float().square().mean()
        loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    with sdpa_kernel(SDPBackend.MATH):
        right = gradients(low=False)
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True)
    found = gradients(low=True)
    for name, gradient in right.items():
        if gradient.ndim == 2 and name.startswith("blocks."):
            for part, own in zip(found[name].chunk(3), gradient.chunk(3), strict=True):
                assert _apart(part, own) < 0.05, name
