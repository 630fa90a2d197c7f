"""Packed images get the answers that they get alone, and nothing of one reaches another."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.models.packing import MOVABLE, packed, packed_tokens, plan_rows
from patchlight.models.vit import ViT
from staged_models import tiny_swin

SIZES = [(16, 24), (32, 32), (8, 8), (16, 24), (24, 8), (8, 40), (32, 32), (8, 8)]


def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, generator=generator) for size in SIZES]


def assert_as_alone(vit: ViT, max_tokens: int | None = None) -> None:
    with torch.no_grad():
        alone = torch.cat([vit(image[None]) for image in images()])
        torch.testing.assert_close(packed(vit, images(), max_tokens), alone, atol=1e-4, rtol=1e-4)
        for image, tokens_nD in zip(images(), packed_tokens(vit, images(), max_tokens), strict=True):
            torch.testing.assert_close(tokens_nD, vit.tokens(image[None])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", MOVABLE)
@pytest.mark.parametrize("max_tokens", [None, 24, 200])
def test_the_answer_is_the_one_given_alone(position: Any, max_tokens: int | None) -> None:
    assert_as_alone(tiny_vit(position=position), max_tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_registers": 3},
        {"num_registers": 2, "position": "rope2d", "rope_coordinates": "centred"},
        {"class_token": False, "pooling": "mean"},
        {"pooling": "cls_mean"},
        {"pooling": "mean", "final_norm": "pooled"},
        {"distill_token": True},
        {"qk_norm": True, "layer_scale": 0.1, "mlp": "swiglu", "embed_norm": True, "num_classes": 0},
        {"stem": "convolutions", "class_token": False, "pooling": "mean"},
        {"pooling": "attention", "block_norm": "after", "position": "rope2d", "add_learned_table": True},
        {"resnet": ()},
    ],
)
def test_whatever_the_model_is(changes: dict[str, Any]) -> None:
    assert_as_alone(tiny_vit(**changes))


def test_sizes_that_patches_do_not_divide() -> None:
    for uneven in ("pad", "resize"):
        vit = tiny_vit(uneven_size=uneven)
        odd = [torch.randn(3, 13, 30), torch.randn(3, 32, 17)]
        torch.testing.assert_close(packed(vit, odd, 40), torch.cat([vit(image[None]) for image in odd]))


def test_other_images_in_the_row_change_no_bit() -> None:
    vit, others = tiny_vit(num_registers=1), images()
    first = packed_tokens(vit, others, 100)[0]
    others[1:] = [1e4 * torch.randn_like(image) for image in others[1:]]
    assert torch.equal(packed_tokens(vit, others, 100)[0], first)
    others[0] = others[0] + 1
    assert not torch.equal(packed_tokens(vit, others, 100)[0], first)


def test_more_images_than_half_precision_can_number() -> None:
    vit = tiny_vit(depth=1).bfloat16()
    many = [torch.randn(3, 8, 8).bfloat16() for _ in range(300)]
    alone = torch.cat([vit(image[None]) for image in many])
    assert (packed(vit, many, 1000).float() - alone.float()).abs().max() < 0.1


def test_gradients_flow() -> None:
    vit = tiny_vit()
    packed(vit, images()).square().sum().backward()
    together = {name: weight.grad.clone() for name, weight in vit.named_parameters()}
    vit.zero_grad()
    torch.cat([vit(image[None]) for image in images()]).square().sum().backward()
    for name, weight in vit.named_parameters():
        torch.testing.assert_close(together[name], weight.grad, atol=2e-3, rtol=1e-3)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), room=st.integers(50, 120))
def test_every_image_has_one_place_and_no_row_overflows(lengths: list[int], room: int) -> None:
    rows = plan_rows(lengths, room)
    assert sorted(image for row in rows for image in row.images) == list(range(len(lengths)))
    for row in rows:
        assert row.tokens == sum(lengths[image] for image in row.images) <= room
    # Of two rows at least one is more than half full: the later one's first image had no room in the earlier.
    assert len(rows) <= max(1, 2 * sum(lengths) / room + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([torch.zeros(3, 32, 32)], 5), "max_tokens=5 is less than the 17 tokens of the largest image"),
        (([],), "packing takes a list of images"),
        ((torch.zeros(2, 3, 32, 32),), "packing takes a list of images"),
        (([torch.zeros(3, 32, 33)],), "do not divide an image of 32x33"),
        (([torch.zeros(1, 32, 32)],), r"\(1, 1, 32, 32\); expected \(batch, 3, height, width\)"),
        (([torch.zeros(1, 3, 32, 32)],), "expected"),
    ],
)
def test_mistakes_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        packed(tiny_vit(), *arguments)


@pytest.mark.parametrize("other", [tiny_swin(), "S/16"])
def test_what_is_no_vit_is_named(other: Any) -> None:
    for function in (packed, packed_tokens):
        with pytest.raises(PatchlightError, match=f"packing takes a ViT, not a {type(other).__name__};"):
            function(other, images())


def test_positions_that_need_a_grid_are_refused() -> None:
    with pytest.raises(PatchlightError, match="position='relative_bias' knows one grid at a time"):
        packed(tiny_vit(position="relative_bias"), images())
