import pytest
import torch
import torch.nn.functional as F

from patchlight.errors import PatchlightError
from patchlight.families import ConvNeXtConfig, variant
from patchlight.models.convnext import ConvNeXt, GlobalResponseNorm
from staged_models import tiny_convnext


@torch.no_grad()
def test_a_block_is_what_the_paper_writes() -> None:
    """Channels first throughout, with 1 x 1 convolutions: the paper's other form of the same block."""
    block = tiny_convnext().blocks[0]
    x_BDhw = torch.randn(2, 8, 9, 6)
    y = F.conv2d(x_BDhw, block.conv.weight, block.conv.bias, padding=3, groups=8)
    mean, variance = y.mean(1, keepdim=True), y.var(1, keepdim=True, unbiased=False)
    scale, shift = block.norm.weight[:, None, None], block.norm.bias[:, None, None]
    y = (y - mean) / (variance + 1e-6).sqrt() * scale + shift
    y = F.gelu(F.conv2d(y, block.mlp.up.weight[:, :, None, None], block.mlp.up.bias))
    y = F.conv2d(y, block.mlp.down.weight[:, :, None, None], block.mlp.down.bias)
    expected = x_BDhw + y * block.residual.scale[:, None, None]
    torch.testing.assert_close(block(x_BDhw.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_response_norm_of_one_image_by_hand() -> None:
    norm = GlobalResponseNorm(2)
    norm.weight.copy_(torch.tensor([1.0, 2.0]))
    norm.bias.copy_(torch.tensor([0.5, 0.0]))
    x_BhwF = torch.tensor([[[[3.0, 0.0], [4.0, 1.0]]]])  # responses 5 and 1, mean 3
    expected = torch.tensor([[[[3 + 3 * 5 / 3 + 0.5, 0.0], [4 + 4 * 5 / 3 + 0.5, 1 + 2 * 1 / 3]]]])
    torch.testing.assert_close(norm(x_BhwF), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("size", [(32, 32), (48, 40), (37, 61), (8, 9)])
def test_grids_are_what_the_config_says(size: tuple[int, int]) -> None:
    model = tiny_convnext(grn=True, layer_scale=None)
    assert model.encode(torch.randn(1, 3, *size)).shape == (1, *model.config.grid_for(size), 12)
    assert model.tokens(torch.randn(2, 3, *size)).shape[::2] == (2, 12)


def test_gradients_reach_every_weight() -> None:
    for checkpointed in (False, True):
        model = tiny_convnext(grn=True, drop_path=0.2).train()
        model.checkpoint_blocks = checkpointed
        model(torch.randn(4, 3, 37, 45)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_skipped_branches_keep_the_expectation() -> None:
    residual = tiny_convnext(drop_path=0.5, layer_scale=None).train().blocks[2].residual
    x_BhwD, branch_BhwD = torch.zeros(4000, 1, 1, 1), torch.ones(4000, 1, 1, 1)
    torch.manual_seed(0)
    out = residual(x_BhwD, branch_BhwD)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert out.mean().item() == pytest.approx(1, abs=0.1)
    assert torch.equal(residual.eval()(x_BhwD, branch_BhwD), branch_BhwD)


def test_sizes_are_the_published_ones() -> None:
    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in ConvNeXt(variant(name)).parameters()) for name in ("convnext-T",)}
        counts["v2"] = sum(p.numel() for p in ConvNeXt(variant("convnext-T", grn=True, layer_scale=None)).parameters())
    assert counts == {"convnext-T": 28_589_128, "v2": 28_635_496}


def test_mistakes_are_one_line() -> None:
    with pytest.raises(PatchlightError, match="an image of 4x32 is too small: 2 stages need 8x8 pixels at least"):
        tiny_convnext()(torch.randn(1, 3, 4, 32))
    with pytest.raises(PatchlightError, match="kernel_size=4 must be odd"):
        ConvNeXtConfig(kernel_size=4)
    with pytest.raises(PatchlightError, match="ConvNeXt takes a ConvNeXtConfig"):
        ConvNeXt(variant("S/16"))  # type: ignore[arg-type]


def test_intermediates_are_a_feature_pyramid() -> None:
    model = tiny_convnext().eval()
    config, images = model.config, torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        pyramid = model.intermediates(images, config.stage_ends, dense=True)
        tokens = model.intermediates(images, [-1, 0])
        last = model.encode(images)
    grids = config.stage_grids((64, 96))
    assert [tuple(level.shape) for level in pyramid] == [
        (2, width, *grid) for width, grid in zip(config.widths, grids, strict=True)
    ]
    assert torch.equal(tokens[0], pyramid[-1].flatten(2).transpose(1, 2))
    assert tokens[1].shape == (2, grids[0][0] * grids[0][1], config.widths[0])
    final = pyramid[-1].permute(0, 2, 3, 1)
    assert torch.equal(final, last)
    with pytest.raises(PatchlightError, match="reaches beyond the model's"):
        model.intermediates(images, config.depth)
