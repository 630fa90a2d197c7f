"""Patches in another order, and models that do not know where patches lie."""

import pytest
import torch

from models_at_random import POSITIONS, tiny_vit
from patchlight.errors import PatchlightError
from patchlight.explain.shuffling import shuffle_patches, shuffled_order, without_positions


def test_each_patch_comes_to_its_place() -> None:
    image = torch.arange(6.0).view(2, 3).repeat_interleave(4, 0).repeat_interleave(2, 1)[None, None]  # 2 x 3 patches
    shuffled = shuffle_patches(image, (4, 2), torch.tensor([5, 0, 1, 2, 3, 4]))
    assert shuffled[0, 0, ::4, ::2].flatten().tolist() == [5, 0, 1, 2, 3, 4]
    assert torch.equal(shuffle_patches(image, (4, 2), torch.arange(6)), image)
    noise = torch.randn(2, 3, 8, 6)
    order = shuffled_order(6, 1)
    back = shuffle_patches(shuffle_patches(noise, (4, 2), order), (4, 2), order.argsort())
    assert torch.equal(back, noise)


def test_orders_are_drawn_from_the_seed() -> None:
    assert torch.equal(shuffled_order(50, 3), shuffled_order(50, 3))
    assert not torch.equal(shuffled_order(50, 3), shuffled_order(50, 4))
    assert sorted(shuffled_order(50, 3).tolist()) == list(range(50))


@pytest.mark.parametrize("position", [*POSITIONS[:-1], "rope2d and learned"])
@torch.no_grad()
def test_without_positions_the_order_means_nothing(position: str) -> None:
    scheme, _, also = position.partition(" and ")
    model = tiny_vit(
        position=scheme, add_learned_table=bool(also), num_registers=2
    ).double()  # so that small differences are seen
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    before = model(images)
    shuffled = shuffle_patches(images, (8, 8), shuffled_order(16, 0))
    blind = without_positions(model)
    torch.testing.assert_close(blind(shuffled), blind(images), atol=1e-10, rtol=1e-10)
    assert (model(shuffled) - before).abs().max() > 1e-5
    assert torch.equal(model(images), before), "the model itself was changed"
    assert (blind(images) - before).abs().max() > 1e-5
    assert blind.patch_embed.proj.weight is model.patch_embed.proj.weight


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(PatchlightError, match="there are no positions to leave out"):
        without_positions(tiny_vit(position="none"))
    with pytest.raises(PatchlightError, match="do not divide"):
        shuffle_patches(torch.zeros(1, 3, 30, 32), (8, 8), torch.arange(16))
    with pytest.raises(PatchlightError, match="each number from 0 to 15 once"):
        shuffle_patches(torch.zeros(1, 3, 32, 32), (8, 8), torch.zeros(16, dtype=torch.long))


def test_an_order_is_drawn_where_none_is_given() -> None:
    noise = torch.randn(1, 3, 8, 8)
    assert torch.equal(shuffle_patches(noise, 4, seed=2), shuffle_patches(noise, (4, 4), shuffled_order(4, 2)))
