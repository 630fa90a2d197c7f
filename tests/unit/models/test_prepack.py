"""Linear layers laid out for the CPU: the same numbers from a copy, and the model itself where that cannot be."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from patchlight.config import ViTConfig
from patchlight.families import variant
from patchlight.models.families import make_model
from patchlight.models.prepack import PackedLinear, prepack_linears
from patchlight.models.vit import ViT

TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=2, num_heads=3, num_classes=7)


@pytest.fixture
def vit() -> ViT:
    torch.manual_seed(0)
    return ViT(TINY).eval()


@torch.no_grad()
@pytest.mark.parametrize("side", [32, 72])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_packed_model_gives_the_same(vit: ViT, side: int, batch: int) -> None:
    image_BCHW = torch.randn(batch, 3, side, side)
    twin = prepack_linears(vit)
    assert sum(isinstance(module, PackedLinear) for module in twin.modules()) == 2 * 4 + 1
    torch.testing.assert_close(twin(image_BCHW), vit(image_BCHW), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("position", ["sincos2d", "rope2d", "rope_mixed", "relative_bias", "relative_mlp", "none"])
def test_positions_of_every_kind_survive(position: Any) -> None:
    torch.manual_seed(0)
    model = ViT(dataclasses.replace(TINY, position=position)).eval()
    image_BCHW = torch.randn(1, 3, 40, 32)
    torch.testing.assert_close(prepack_linears(model)(image_BCHW), model(image_BCHW), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("swin-T", {"width": 16, "num_heads": (1, 2, 4, 8)}),
        ("swinv2-T", {"width": 16, "num_heads": (1, 2, 4, 8)}),
        ("convnext-T", {"widths": (8,) * 4}),
    ],
)
def test_other_families_are_packed_too(name: str, changes: dict[str, Any]) -> None:
    model = make_model(variant(name, image_size=64, depths=(1, 1, 2, 1), **changes)).eval()
    image_BCHW = torch.randn(1, 3, 64, 64)
    twin = prepack_linears(model)
    assert any(isinstance(module, PackedLinear) for module in twin.modules())
    torch.testing.assert_close(twin(image_BCHW), model(image_BCHW), atol=1e-5, rtol=1e-5)


def test_the_model_itself_stays_as_it_was_and_shares_its_other_weights(vit: ViT) -> None:
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    twin = prepack_linears(vit)
    assert not any(isinstance(module, PackedLinear) for module in vit.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in vit.state_dict().items())
    assert twin.norm.weight is vit.norm.weight


def test_what_cannot_be_packed_is_left(vit: ViT, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepack_linears(vit).blocks[0] is not vit.blocks[0]
    half = ViT(TINY).bfloat16()
    assert prepack_linears(half) is half
    none = nn.Sequential(nn.ReLU())
    assert prepack_linears(none) is none
    twin = prepack_linears(vit)
    assert prepack_linears(twin) is twin
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert prepack_linears(vit) is vit


@torch.no_grad()
@pytest.mark.parametrize("how", ["hook", "pre-hook", "own forward"])
def test_a_model_that_is_hooked_into_is_left(vit: ViT, how: str) -> None:
    linear = vit.blocks[0].mlp.up
    if how == "hook":
        linear.register_forward_hook(lambda module, given, out: out * 0)
    elif how == "pre-hook":
        linear.register_forward_pre_hook(lambda module, given: (given[0] * 0,))
    else:
        linear.forward = lambda x_BND: x_BND.new_zeros(*x_BND.shape[:-1], linear.out_features)  # type: ignore[method-assign]
    image_BCHW = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(prepack_linears(vit)(image_BCHW), vit(image_BCHW), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", ["gone", "other arguments", "other numbers"])
def test_operators_that_have_changed_are_not_used(vit: ViT, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    class Changed:
        def _reorder_linear_weight(self, weight: torch.Tensor, tokens: int) -> torch.Tensor:
            if wrong == "other arguments":
                raise RuntimeError("mkldnn::_reorder_linear_weight() takes 1 positional argument")
            return weight

        def __getattr__(self, name: str) -> Any:
            if wrong == "gone":
                raise AttributeError(name)
            return lambda x_ND, weight, bias, *rest: x_ND @ weight.T + 1

    monkeypatch.setattr(torch.ops, "mkldnn", Changed())
    assert prepack_linears(vit) is vit
