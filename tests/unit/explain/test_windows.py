"""What `attention` shows of a Swin is what its forward pass used, put back where it lies."""

from typing import Any

import pytest
import torch

from patchlight.errors import PatchlightError
from patchlight.explain.attention import attention
from patchlight.explain.rollout import rollout
from patchlight.models.swin import WindowHeads, Windows
from staged_models import slow_attention, tiny_convnext, tiny_swin

ODD = (37, 61)  # 10 x 16 patches, then 5 x 8


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_rows_are_those_of_the_slow_reference(layer: int) -> None:
    model, image_BCHW = tiny_swin(), torch.randn(1, 3, *ODD)
    entering = [model.patch_embed(image_BCHW)]
    model.encode(image_BCHW, lambda index, heads, windows, x_BhwD: entering.append(x_BhwD))
    x_BhwD = model.merges[0](entering[2]) if layer == 2 else entering[layer]
    expected_ANN = slow_attention(model, layer, x_BhwD[0], shifted=layer % 2 == 1)[1]
    maps = attention(model, image_BCHW, layers=layer, queries="all")
    assert maps.grid == ((10, 16) if layer < 2 else (5, 8))
    assert maps.patch_size == ((4.0, 4.0) if layer < 2 else (8.0, 8.0))
    torch.testing.assert_close(maps.weights[0, 0], expected_ANN, atol=1e-5, rtol=1e-5)
    stitched = attention(model, image_BCHW, layers=layer)
    torch.testing.assert_close(stitched.weights[0, 0, :, 0], expected_ANN.mean(1), atol=1e-6, rtol=1e-5)
    assert stitched.queries == ()


@torch.no_grad()
@pytest.mark.parametrize("fit", ["masked", "plain"])
def test_weights_times_values_are_what_the_heads_gave_out(fit: str) -> None:
    model, image_BCHW = tiny_swin(uneven_windows=fit), torch.randn(2, 3, *ODD)
    out: dict[int, torch.Tensor] = {}

    def keep(index: int, heads: WindowHeads, windows: Windows, x_BhwD: torch.Tensor) -> None:
        out_BhwD = windows.join(heads.out_BWAnE.transpose(2, 3).flatten(3))
        out[index] = out_BhwD.flatten(1, 2).unflatten(2, (heads.out_BWAnE.shape[2], -1)).transpose(1, 2)

    model.encode(image_BCHW, keep)
    maps = attention(model, image_BCHW, layers=[1, 0], queries="all", values=True)
    assert maps.values is not None
    given_LBANE = maps.weights @ maps.values
    expected_LBANE = torch.stack([out[1], out[0]])
    if fit == "masked":
        torch.testing.assert_close(maps.weights.sum(-1), torch.ones_like(maps.weights[..., 0]))
        torch.testing.assert_close(given_LBANE, expected_LBANE, atol=1e-5, rtol=1e-5)
    else:  # padding takes a share there, and has values of its own (the bias)
        assert maps.weights.sum(-1).min() < 0.99
        inside = maps.weights.sum(-1) > 0.9999
        torch.testing.assert_close(given_LBANE[inside], expected_LBANE[inside], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_some_patches_are_rows_of_all() -> None:
    model, image_BCHW = tiny_swin(), torch.randn(2, 3, *ODD)
    every = attention(model, image_BCHW, layers=[0, 1], queries="all")
    some = attention(model, image_BCHW, layers=[0, 1], queries=[(9, 15), (0, 3), (9, 15)], heads="mean")
    assert some.queries == (159, 3, 159)
    torch.testing.assert_close(some.weights, every.weights[:, :, :, [159, 3, 159]].mean(2, keepdim=True))
    assert some.heat().shape == (2, 2, 1, 3, 10, 16)
    torch.testing.assert_close(attention(model, image_BCHW, queries=5).tokens, model.tokens(image_BCHW))


def test_gradients_flow_where_asked() -> None:
    model, image_BCHW = tiny_swin(), torch.randn(1, 3, 32, 32, requires_grad=True)
    assert not attention(model, image_BCHW).weights.requires_grad
    attention(model, image_BCHW, differentiable=True).weights.square().sum().backward()
    assert image_BCHW.grad is not None
    assert image_BCHW.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": "all"}, r"ask for those of one stage at a time: 0 to 1 \(8 x 8\), 2 to 3 \(4 x 4\)"),
        ({"queries": "cls"}, "a Swin has patches alone; ask for 'windows', 'all', or a patch"),
        ({"queries": (4, 0)}, r"patch \(4, 0\) lies outside the grid of 4 rows and 4 columns"),
        ({"sizes": [(32, 32)]}, "are for a ViT"),
        ({"suppress_artifacts": True}, "are for a ViT"),
        ({"layers": 4}, "does not fit a model of 4 blocks"),
        ({"heads": "max"}, "it is 'all' or 'mean'"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchlightError, match=words) as caught:
        attention(tiny_swin(), torch.randn(1, 3, 32, 32), **changes)
    assert "\n" not in str(caught.value)


def test_what_has_no_attention_says_so() -> None:
    with pytest.raises(PatchlightError, match=r"a ConvNeXt .* pays no attention; patchlight.localize finds") as caught:
        attention(tiny_convnext(), torch.randn(1, 3, 32, 32))
    assert "\n" not in str(caught.value)
    with pytest.raises(PatchlightError, match=r"of a Swin, patchlight\.attention"):
        rollout(tiny_swin(), torch.randn(1, 3, 32, 32))
