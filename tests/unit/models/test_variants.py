"""What the relatives of the ViT do otherwise, seen from inside; tests/parity holds them to the references."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models_at_random import tiny_vit
from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.explain.attention import attention
from patchlight.explain.rollout import answering_tokens
from patchlight.models.positions import log_offsets, relative_index
from patchlight.models.resampling import linear_weights
from patchlight.models.resnet import StandardConv
from patchlight.models.vit import ViT

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_the_norm_after_a_branch_sets_the_size_of_what_is_added() -> None:
    model = tiny_vit(block_norm="after", depth=1)
    block = model.blocks[0]
    x_BND, geometry = model.embed(IMAGE)
    added = F.layer_norm(block.attn(x_BND, geometry), (24,), block.norm1.weight, block.norm1.bias, 1e-6)
    between = x_BND + added
    expected = between + F.layer_norm(block.mlp(between), (24,), block.norm2.weight, block.norm2.bias, 1e-6)
    torch.testing.assert_close(block(x_BND, geometry), expected)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [None, [(32, 32), (16, 24)]])
def test_attention_pooling_is_what_its_rows_say(sizes: Any) -> None:
    model = tiny_vit(class_token=False, pooling="attention")
    pool = model.attention_pool
    x_BND, geometry = model.encode(IMAGE, sizes)
    rows_BAN = pool.rows(x_BND, geometry)
    torch.testing.assert_close(rows_BAN.sum(2), torch.ones(2, 2))
    if geometry.valid_BN is not None:
        assert not rows_BAN[1, :, ~geometry.valid_BN[1]].any()
    values_BNAE = pool.kv(x_BND)[..., 24:].unflatten(2, (2, 12))
    asked_BD = pool.out(torch.einsum("ban,bnae->bae", rows_BAN, values_BNAE).flatten(1))
    torch.testing.assert_close(model.features(IMAGE, sizes), asked_BD + pool.mlp(pool.norm(asked_BD)))


@torch.no_grad()
def test_the_pooling_query_is_seen_by_attention() -> None:
    model = tiny_vit(class_token=False, pooling="attention", num_registers=1)
    maps = attention(model, IMAGE, queries="pool")
    assert maps.weights.shape == (1, 2, 2, 1, 17)
    assert maps.heat().shape == (1, 2, 2, 1, 4, 4)
    x_BND = model.tokens(IMAGE)
    # The same by torch's own module, with the pooling's weights in its place.
    theirs = torch.nn.MultiheadAttention(24, 2, batch_first=True)
    pool = model.attention_pool
    theirs.in_proj_weight.copy_(torch.cat([pool.q.weight, pool.kv.weight]))
    theirs.in_proj_bias.copy_(torch.cat([pool.q.bias, pool.kv.bias]))
    _, rows_BA1N = theirs(pool.query.expand(2, 1, -1), x_BND, x_BND, average_attn_weights=False)
    torch.testing.assert_close(maps.weights[0], rows_BA1N)
    mean = attention(model, IMAGE, queries="pool", heads="mean").weights
    torch.testing.assert_close(mean[0], rows_BA1N.mean(1, keepdim=True))
    torch.testing.assert_close(answering_tokens(model, model.embed(IMAGE)[1], x_BND), rows_BA1N.mean(1)[:, 0])
    with pytest.raises(PatchlightError, match="this model has pooling='cls', which has no query"):
        attention(tiny_vit(), IMAGE, queries="pool")
    with pytest.raises(PatchlightError, match="leave out layers"):
        attention(model, IMAGE, layers=0, queries="pool")


def test_pooling_by_attention_is_made_with_the_model_or_not_at_all() -> None:
    model = tiny_vit(class_token=False, pooling="attention")
    model.set_pooling("mean", head="keep")
    assert "attention_pool.query" not in model.state_dict()
    with pytest.raises(PatchlightError, match="make the model with it"):
        model.set_pooling("attention", head="keep")
    with pytest.raises(PatchlightError, match="this model has none; use 'cls' or 'mean'"):
        tiny_vit().features(IMAGE, pooling="attention")


def test_log_offsets_lie_in_the_order_of_the_relative_index() -> None:
    offsets_T2, index_PP = log_offsets((2, 3)), relative_index((2, 3), 0)
    for query in range(6):
        for key in range(6):
            down, across = (query // 3 - key // 3), (query % 3 - key % 3)
            expected = [math.copysign(math.log(1 + abs(step)), step) for step in (down, across)]
            torch.testing.assert_close(offsets_T2[index_PP[query, key]], torch.tensor(expected))


@torch.no_grad()
def test_the_relative_mlp_says_nothing_about_prefix_tokens() -> None:
    model = tiny_vit(position="relative_mlp", num_registers=1)
    _, geometry = model.embed(IMAGE)
    bias_1ANN = model.blocks[0].attn.mask(geometry, torch.float32)
    assert not bias_1ANN[:, :, :2].any()
    assert not bias_1ANN[:, :, :, :2].any()
    assert bias_1ANN[:, :, 2:, 2:].abs().min() > 0


@pytest.mark.parametrize(("old", "new"), [(5, 9), (9, 5), (1, 4), (7, 7)])
def test_linear_weights_are_what_torch_interpolates_with(old: int, new: int) -> None:
    samples = torch.eye(old, dtype=torch.float64)[None]
    expected = F.interpolate(samples, size=new, mode="linear")[0].T
    torch.testing.assert_close(linear_weights(old, new, dtype=torch.float64), expected)


@torch.no_grad()
@pytest.mark.parametrize("grid", [(4, 4), (2, 8)])
def test_rope_reads_its_table_on_its_own_grid_and_computes_the_same_elsewhere(grid: tuple[int, int]) -> None:
    model = tiny_vit(position="rope2d", num_registers=1)
    _, geometry = model.embed(torch.randn(1, 3, 8 * grid[0], 8 * grid[1]))
    own = geometry.rope
    model.rope.table_NX = torch.empty(0, device="meta")
    computed = model.rope(geometry)
    for ours, again in zip(own, computed, strict=True):
        torch.testing.assert_close(ours, again, atol=0, rtol=0)
        assert ours.shape == (1, 1, 2 + 16, 12)


def test_the_table_of_rope_goes_along_and_stays_exact() -> None:
    with torch.device("meta"):
        model = ViT(ViTConfig(width=24, num_heads=2, depth=1, position="rope2d", image_size=32))
    assert model.rope.table_NX.is_meta
    exact = tiny_vit(position="rope2d", patch_size=16).rope.table_NX
    model.to_empty(device="cpu")
    assert torch.equal(model.rope.table_NX, exact)
    with torch.inference_mode():
        model.bfloat16()
    assert torch.equal(model.float().rope.table_NX, exact)
    assert not model.rope.table_NX.is_inference()
    assert "rope.table_NX" not in model.state_dict()


def test_mixed_frequencies_start_as_two_axes_at_a_right_angle() -> None:
    rope = ViT(ViTConfig(width=32, num_heads=2, depth=1, position="rope_mixed", rope_base=10.0)).blocks[0].attn.rope
    down_AX, across_AX = rope.frequencies.detach()
    sizes = (down_AX**2 + across_AX**2).sqrt()
    torch.testing.assert_close(sizes, (10.0 ** -(torch.arange(4) / 4)).repeat(2).expand(2, -1))
    inner = down_AX[:, :4] * down_AX[:, 4:] + across_AX[:, :4] * across_AX[:, 4:]
    torch.testing.assert_close(inner, torch.zeros(2, 4), atol=1e-6, rtol=0)
    assert not torch.allclose(down_AX[0], down_AX[1])


@torch.no_grad()
def test_kernels_of_the_stem_have_mean_zero_and_deviation_one() -> None:
    conv = StandardConv(3, 4, 3, 2)
    conv.weight.copy_(torch.randn(conv.weight.shape) * 5 + 7)
    x_BCHW = torch.randn(1, 3, 8, 6)
    standard = torch.stack([(kernel - kernel.mean()) / kernel.std(correction=0) for kernel in conv.weight])
    # SAME: an even side that is halved by a kernel of three needs one border pixel, right and below.
    expected = F.conv2d(F.pad(x_BCHW, (0, 1, 0, 1)), standard, stride=2)
    torch.testing.assert_close(conv(x_BCHW), expected, atol=1e-4, rtol=1e-4)
    assert conv(x_BCHW).shape == (1, 4, 4, 3)


@torch.no_grad()
def test_padding_cannot_be_seen_through_the_resnet() -> None:
    model = tiny_vit(resnet=(1, 1), uneven_size="pad", num_registers=1)
    sizes = [(16, 24), (30, 9)]
    padded = torch.full((2, 3, 40, 32), torch.nan)
    for index, (height, width) in enumerate(sizes):
        alone = torch.randn(1, 3, height, width)
        padded[index, :, :height, :width] = alone[0]
        sizes_so_far, batch = sizes[: index + 1], padded[: index + 1]
        torch.testing.assert_close(model(batch, sizes_so_far)[index], model(alone)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resnet": (1, 1), "patch_size": 4}, "must be a multiple of that"),
        ({"resnet": (1,) * 5, "patch_size": 64, "image_size": 64}, "at most 4 stages"),
        ({"resnet": (1, 0)}, "resnet=.1, 0. must be more than 0"),
        ({"add_learned_table": True}, "add_learned_table=True has no effect with position='learned'"),
        ({"rope_grid": 16}, "rope_grid=.16, 16. has no effect with position='learned'"),
        ({"position": "rope2d", "rope_grid": 16, "rope_coordinates": "centred"}, "goes with rope_coordinates='index'"),
        ({"relative_hidden": 3}, "relative_hidden=3 has no effect with position='learned'"),
        ({"position": "rope_mixed", "num_heads": 12}, "position='rope_mixed' needs heads of a width divisible by 4"),
        ({"class_token": False}, "without a class token use 'mean' or 'attention'"),
        ({"resnet": "many"}, "resnet='many' should be several numbers or None"),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        tiny_vit(**changes)


@pytest.mark.parametrize("resnet", [None, (), (3, 4, 9)])
def test_configs_keep_their_resnet_through_json(resnet: Any) -> None:
    config = ViTConfig(resnet=resnet, position="rope2d", rope_grid=(16, 8))
    assert ViTConfig.from_json(config.to_json()) == config
