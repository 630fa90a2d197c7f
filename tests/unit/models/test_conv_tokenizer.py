"""The convolutional tokenizer, against the formula written out, and in a model that is padded, saved and read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from models_at_random import tiny_vit
from patchlight.config import ViTConfig
from patchlight.costing import costs
from patchlight.errors import PatchlightError
from patchlight.models.stems import ConvTokenizer
from patchlight.models.vit import ViT
from patchlight.weights.load import load
from patchlight.weights.save import save

SMALL = {"stem": "convolutions", "image_size": 16, "class_token": False, "pooling": "mean"}


def by_hand(image_CHW: np.ndarray, weight_DCHW: np.ndarray, bias_D: np.ndarray) -> np.ndarray:
    """Convolution of 3x3 over zeros, ReLU, and only then the largest of 3x3, every other place: (D, H / 2, W / 2)."""
    _, height, width = image_CHW.shape
    padded = np.pad(image_CHW, ((0, 0), (1, 1), (1, 1)))
    conv = np.empty((len(weight_DCHW), height, width))
    for y in range(height):
        for x in range(width):
            conv[:, y, x] = np.einsum("dcij,cij->d", weight_DCHW, padded[:, y : y + 3, x : x + 3]) + bias_D
    relu = np.pad(np.maximum(conv, 0), ((0, 0), (1, 1), (1, 1)))  # zeros cannot be larger than what a ReLU leaves
    rows = [[relu[:, y : y + 3, x : x + 3].max((1, 2)) for x in range(0, width, 2)] for y in range(0, height, 2)]
    return np.moveaxis(np.array(rows), 2, 0)


@pytest.mark.parametrize("patch", [2, 4])
@pytest.mark.parametrize("size", [(8, 12), (4, 4)])
def test_equals_the_formula(patch: int, size: tuple[int, int]) -> None:
    stem = ConvTokenizer(ViTConfig(stem="convolutions", image_size=size, patch_size=patch, width=12, num_heads=1))
    image_CHW = torch.randn(3, *size)
    expected = image_CHW.numpy()
    for conv in stem.convs:
        expected = by_hand(expected, conv.weight.detach().numpy(), conv.bias.detach().numpy())
    tokens_PD = stem(image_CHW[None]).detach()[0]
    assert tokens_PD.shape == (size[0] * size[1] // patch**2, 12)
    np.testing.assert_allclose(tokens_PD.numpy(), expected.reshape(12, -1).T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("patch", [2, 4, 8])
def test_what_is_padded_gets_the_answer_it_gets_alone(patch: int) -> None:
    vit = tiny_vit(**SMALL, patch_size=patch)
    sizes = [(16, 8), (8, 16), (16, 16)]
    images = [torch.randn(3, *size) for size in sizes]
    batch = torch.full((3, 3, 16, 16), 7.0)
    for place, image in zip(batch, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    alone = torch.cat([vit(image[None]) for image in images])
    torch.testing.assert_close(vit(batch, sizes=sizes), alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(vit(batch[:1], sizes=sizes[:1]), alone[:1], atol=1e-4, rtol=1e-4)


def test_saved_and_read_with_and_without_its_config(tmp_path: Path) -> None:
    image = torch.randn(1, 3, 16, 16)
    for patch in (2, 4):
        vit = tiny_vit(**SMALL, patch_size=patch, num_heads=3)
        again = load(save(vit, tmp_path / f"{patch}"))
        assert again.config == vit.config
        assert all(torch.equal(again.model.state_dict()[key], value) for key, value in vit.state_dict().items())
        save_file(vit.state_dict(), tmp_path / f"{patch}.safetensors")
        bare = load(tmp_path / f"{patch}.safetensors", num_heads=3)
        assert (bare.config.stem, bare.config.patch_size) == ("convolutions", (patch, patch))
        torch.testing.assert_close(bare.model(image), vit(image))
    with pytest.raises(PatchlightError, match="cannot be resized"):
        load(tmp_path / "4", patch_size=2)
    for layout in ("timm", "transformers"):
        with pytest.raises(PatchlightError, match=r"stem='convolutions'.* cannot be written"):
            save(vit, tmp_path / "x", layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("patch", [2, 4])
def test_exports_with_any_batch_and_size(patch: int) -> None:
    vit = tiny_vit(**SMALL, patch_size=patch)
    batch, rows, columns = (torch.export.Dim(name, min=2, max=16) for name in ("batch", "rows", "columns"))
    shapes = {"image_BCHW": {0: batch, 2: patch * rows, 3: patch * columns}}
    exported = torch.export.export(vit, (torch.randn(2, 3, 24, 32),), dynamic_shapes=shapes).module()
    image = torch.randn(3, 3, 8, 32)
    torch.testing.assert_close(exported(image), vit(image), atol=1e-5, rtol=1e-5)


def test_config_says_which_patches_it_can_have() -> None:
    for patch in (1, 6, 12, (2, 4)):
        with pytest.raises(PatchlightError, match="power of two"):
            ViTConfig(stem="convolutions", image_size=48, patch_size=patch)
    with pytest.raises(PatchlightError, match="are two stems"):
        ViTConfig(stem="convolutions", patch_size=16, resnet=())


def test_starts_with_tokens_that_vary_as_the_pixels_do() -> None:
    vit = ViT(ViTConfig(**SMALL, patch_size=2, width=64, num_heads=4, num_classes=0))
    out = vit.patch_embed.convs[0](torch.randn(4, 3, 16, 16))
    assert 1.1 < out.std() < 1.7  # the root of 2, a little less at the edges


def test_cct_7_3x1_has_the_published_size() -> None:
    config = ViTConfig(
        stem="convolutions",
        image_size=32,
        patch_size=2,
        width=256,
        depth=7,
        num_heads=4,
        mlp_dim=512,
        patch_bias=False,
        qkv_bias=False,
        class_token=False,
        pooling="mean",
        num_classes=10,
    )
    counted = costs(config)
    # Published: 3.76 M parameters and 1.19 GMACs; its sequence pooling has 257 parameters that ours has not.
    assert counted.tokens == 256
    assert round(counted.parameters / 1e6, 2) == 3.76
    assert counted.macs == pytest.approx(1.19e9, rel=0.01)
