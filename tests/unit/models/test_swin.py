"""Swin against a slow reference that knows no windows, no rolling and no padding: only who may look at whom."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from patchlight.errors import PatchlightError
from patchlight.families import SwinConfig, variant
from patchlight.models.swin import Swin, WindowHeads, Windows, lay_windows
from staged_models import TINY_SWIN, slow_attention, tiny_swin


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 32), (48, 32), (37, 61), (16, 50), (7, 9), (20, 4), (45, 45)])
@pytest.mark.parametrize("window", [4, (3, 5), 7])
def test_any_size_is_what_the_slow_reference_gives(size: tuple[int, int], window: int | tuple[int, int]) -> None:
    model = tiny_swin(window_size=window)
    image_1CHW = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    x = model.patch_embed(image_1CHW)[0]
    assert x.shape[:2] == (-(-size[0] // 4), -(-size[1] // 4))
    for index, block in enumerate(model.blocks):
        if index == 2:  # four neighbours become one, rows first
            x = F.pad(x, (0, 0, 0, x.shape[1] % 2, 0, x.shape[0] % 2))
            x = torch.cat([x[0::2, 0::2], x[1::2, 0::2], x[0::2, 1::2], x[1::2, 1::2]], -1)
            x = model.merges[0].reduction(model.merges[0].norm(x))
        x = x + slow_attention(model, index, x, shifted=index % 2 == 1)[0]
        x = x + block.mlp(block.norm2(x))
    expected = model.norm(x)
    torch.testing.assert_close(model.encode(image_1CHW)[0], expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(model(image_1CHW)[0], model.head(expected.mean((0, 1))), atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_heads_show_what_the_forward_pass_used() -> None:
    model = tiny_swin()
    seen: list[tuple[WindowHeads, Windows]] = []
    model.encode(torch.randn(2, 3, 37, 61), lambda index, heads, windows, x: seen.append((heads, windows)))
    assert len(seen) == 4
    for heads, windows in seen:
        every = torch.arange(heads.q_BWAnE.shape[1])
        rows_BWAnn = heads.rows(every)
        torch.testing.assert_close(rows_BWAnn.sum(-1), torch.ones_like(rows_BWAnn[..., 0]))
        torch.testing.assert_close(rows_BWAnn @ heads.v_BWAnE, heads.out_BWAnE, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(heads.rows(every[1:2]), rows_BWAnn[:, 1:2])
        assert windows.mask_Wnn is not None  # at this size every layer has padding


@pytest.mark.parametrize("grid", [(8, 8), (9, 13), (3, 11), (1, 1), (4, 4)])
@pytest.mark.parametrize("shifted", [False, True])
def test_join_undoes_split(grid: tuple[int, int], shifted: bool) -> None:
    windows = lay_windows(SwinConfig(**TINY_SWIN), grid, torch.device("cpu"), shifted=shifted)
    x_BhwD = torch.randn(2, *grid, 3)
    assert torch.equal(windows.join(windows.split(x_BhwD)), x_BhwD)


def test_grids_that_windows_fill_need_no_mask_without_a_shift() -> None:
    config, device = SwinConfig(), torch.device("cpu")
    assert lay_windows(config, (56, 56), device, shifted=False).mask_Wnn is None
    assert lay_windows(config, (7, 7), device, shifted=True).mask_Wnn is None
    mask_Wnn = lay_windows(config, (14, 14), device, shifted=True).mask_Wnn
    assert mask_Wnn is not None
    assert mask_Wnn[0].all()  # the first window holds no wrapped patch
    assert not mask_Wnn[-1].all()


@torch.no_grad()
def test_what_the_padding_holds_does_not_matter() -> None:
    """Masked: a window of an uneven grid gives what its patches alone would give."""
    model = tiny_swin(depths=(1,), num_heads=(2,), window_size=8)
    image_BCHW = torch.randn(1, 3, 20, 28)  # 5 x 7 patches, less than a window
    whole = tiny_swin(depths=(1,), num_heads=(2,), window_size=(5, 7))
    state = model.state_dict()
    table = state["blocks.0.attn.relative_bias.table"].unflatten(0, (15, 15))[3:12, 1:14].flatten(0, 1)
    whole.load_state_dict(state | {"blocks.0.attn.relative_bias.table": table})
    torch.testing.assert_close(model(image_BCHW), whole(image_BCHW))
    plain = Swin(dataclasses.replace(model.config, uneven_windows="plain")).eval()
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(image_BCHW), whole(image_BCHW))  # smaller than a window: nothing to pad
    larger = torch.randn(1, 3, 40, 28)
    assert not torch.allclose(plain(larger), model(larger))


def test_gradients_reach_every_weight() -> None:
    for checkpointed in (False, True):
        model = tiny_swin(drop_path=0.2).train()
        model.checkpoint_blocks = checkpointed
        model(torch.randn(4, 3, 37, 45)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
def test_half_precision_is_near() -> None:
    model = tiny_swin()
    image_BCHW = torch.randn(2, 3, 37, 45)
    expected = model(image_BCHW)
    near = model.bfloat16()(image_BCHW).float()
    assert (near - expected).norm() < 0.1 * expected.norm()


def test_sizes_are_the_published_ones() -> None:
    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in Swin(variant(name)).parameters()) for name in ("swin-T", "swin-B")}
    assert counts == {"swin-T": 28_288_354, "swin-B": 87_768_224}


def test_mistakes_are_one_line() -> None:
    model = tiny_swin()
    with pytest.raises(PatchlightError, match="needs a class token"):
        model.features(torch.randn(1, 3, 32, 32), pooling="cls")
    with pytest.raises(PatchlightError, match="expected \\(batch, 3, height, width\\)"):
        model(torch.randn(3, 32, 32))
    with pytest.raises(PatchlightError, match="Swin takes a SwinConfig"):
        Swin(variant("S/16"))  # type: ignore[arg-type]
    for changes, words in (
        ({"num_heads": (2, 5)}, "5 heads do not divide a width of 24"),
        ({"mlp_ratio": 1e-9}, "mlp_ratio=1e-09 leaves nothing of the MLP at a width of 12"),
        ({"depths": [], "num_heads": []}, r"there are no stages in depths=\(\) and num_heads=\(\)"),
        ({"depths": []}, r"the stages are not as many in depths=\(\) as in num_heads=\(2, 3\)"),
    ):
        with pytest.raises(PatchlightError, match=words):
            SwinConfig(**TINY_SWIN | changes)


@pytest.mark.parametrize("name", ["swin-X", ["S/16"], ["swin-T"], None, {"swin-T": 1}])
def test_an_unknown_variant_names_all_families(name: Any) -> None:
    with pytest.raises(PatchlightError, match=r"unknown variant .* one of mu, Ti.*; or one of swin-T, .*convnextv2-L$"):
        variant(name)


def test_intermediates_are_a_feature_pyramid() -> None:
    model = tiny_swin().eval()
    config, images = model.config, torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        pyramid = model.intermediates(images, config.stage_ends, dense=True)
        tokens = model.intermediates(images, [-1, 0])
        last, final = model.encode(images), model.norm(pyramid[-1].permute(0, 2, 3, 1))
    grids = config.stage_grids((64, 96))
    assert [tuple(level.shape) for level in pyramid] == [
        (2, width, *grid) for width, grid in zip(config.widths, grids, strict=True)
    ]
    assert torch.equal(tokens[0], pyramid[-1].flatten(2).transpose(1, 2))
    assert tokens[1].shape == (2, grids[0][0] * grids[0][1], config.widths[0])
    assert torch.equal(final, last)
    with pytest.raises(PatchlightError, match="reaches beyond the model's"):
        model.intermediates(images, config.depth)
