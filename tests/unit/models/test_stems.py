import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from models_at_random import tiny_vit
from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.stems import PatchEmbed, embed_with_linear, embed_with_numpy, fit_to_patches, patchify


@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    patch=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    channels=st.sampled_from([1, 3, 5]),
    batch=st.integers(1, 3),
)
def test_three_forms_of_the_patch_embedding_agree(
    grid: tuple[int, int], patch: tuple[int, int], channels: int, batch: int
) -> None:
    size = (grid[0] * patch[0], grid[1] * patch[1])
    config = ViTConfig(image_size=size, patch_size=patch, in_channels=channels, width=12, num_heads=1)
    embed = PatchEmbed(config)
    weight_DCHW, bias_D = embed.proj.weight.detach(), embed.proj.bias.detach()
    image_BCHW = torch.randn(batch, channels, *size)
    tokens_BPD = embed(image_BCHW).detach()
    assert tokens_BPD.shape == (batch, grid[0] * grid[1], 12)
    torch.testing.assert_close(embed_with_linear(image_BCHW, weight_DCHW, bias_D), tokens_BPD, atol=1e-5, rtol=0)
    for image_CHW, tokens_PD in zip(image_BCHW, tokens_BPD, strict=True):
        by_numpy = embed_with_numpy(image_CHW.numpy(), weight_DCHW.numpy(), bias_D.numpy())
        np.testing.assert_allclose(by_numpy, tokens_PD.numpy(), atol=1e-5, rtol=0)


def test_patchify_is_unfold_and_reads_left_to_right() -> None:
    image = torch.arange(2 * 3 * 8 * 12.0).view(2, 3, 8, 12)
    patches_BPF = patchify(image, (4, 3))
    assert torch.equal(patches_BPF, F.unfold(image, (4, 3), stride=(4, 3)).transpose(1, 2))
    assert torch.equal(patches_BPF[1, 1], image[1, :, :4, 3:6].flatten())


def test_any_number_of_channels() -> None:
    for channels in (1, 2, 13):
        assert tiny_vit(in_channels=channels)(torch.randn(2, channels, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(3, 32, 32), r"shape \(3, 32, 32\); expected \(batch, 3, height, width\)"),
        (torch.zeros(1, 32, 32, 3), r"image.permute\(0, 3, 1, 2\) puts the channels first"),
        (torch.zeros(3, 32, 32), r"image\[None\] adds the batch axis"),
        (torch.zeros(1, 3, 0, 32), "expected"),
        (np.zeros((1, 3, 32, 32)), "the image is of type ndarray; the model takes a tensor"),
        (torch.zeros(1, 1, 32, 32), r"\(1, 1, 32, 32\)"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "the image is torch.uint8"),
        (torch.zeros(1, 3, 33, 32), "do not divide an image of 33x32; 32x32 would do"),
    ],
)
def test_images_that_do_not_fit_are_named(image: torch.Tensor, message: str) -> None:
    with pytest.raises(PatchlightError, match=message):
        tiny_vit()(image)


def test_uneven_images_are_padded_right_and_below() -> None:
    config = ViTConfig(patch_size=8, uneven_size="pad")
    image = torch.randn(1, 3, 13, 24)
    fitted, grids = fit_to_patches(image, config)
    assert grids == [(2, 3)]
    assert torch.equal(fitted[:, :, :13], image)
    assert (fitted[:, :, 13:] == 0).all()
    assert fitted.shape[2:] == (16, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uneven_images_are_resized_to_the_nearest_multiple(dtype: torch.dtype) -> None:
    config = ViTConfig(patch_size=8, uneven_size="resize")
    image = torch.randn(1, 3, 29, 27).to(dtype)
    fitted, grids = fit_to_patches(image, config)
    assert grids == [(4, 3)]
    expected = F.interpolate(image.float(), size=(32, 24), mode="bicubic", antialias=True)
    torch.testing.assert_close(fitted, expected)


@pytest.mark.parametrize("sizes", [[(32, 32)], [(32, 32), (0, 8)], [(32, 32), (40, 8)], [(32, 32), (8, 12)]])
def test_sizes_that_do_not_fit_raise(sizes: list[tuple[int, int]]) -> None:
    with pytest.raises(PatchlightError, match=r"`sizes` needs a|do not divide"):
        tiny_vit()(torch.randn(2, 3, 32, 32), sizes=sizes)
    for nonsense in ([32, 32], [(8.5, 8), (8, 8)], 3):
        with pytest.raises(PatchlightError, match="of whole numbers for each image"):
            tiny_vit()(torch.randn(2, 3, 32, 32), sizes=nonsense)
    with pytest.raises(PatchlightError, match="with 'resize' give images of one size"):
        tiny_vit(uneven_size="resize")(torch.randn(2, 3, 32, 32), sizes=[(8, 8), (8, 8)])
