"""A model that sees what is bright, and photos for it."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from patchlight.config import PreprocessConfig, SubjectHeat, ViTConfig
from patchlight.images.preprocess import Preprocess
from patchlight.models.vit import ViT
from patchlight.weights.load import Loaded, Provenance


@torch.no_grad()
def sees_what_is_bright(uneven_size: Any = "error", **preprocess: Any) -> Loaded:
    """A model whose class token's query meets keys that are the patches' brightness, and heat that is its share."""
    config = ViTConfig(
        image_size=64,
        patch_size=4,
        width=4,
        depth=1,
        num_heads=1,
        position="none",
        norm_eps=1.0,  # so large that the norm hardly changes small tokens
        uneven_size=uneven_size,
    )
    model = ViT(config).eval()
    for parameter in model.parameters():
        parameter.zero_()
    block: Any = model.blocks[0]
    block.norm1.weight.fill_(1)
    # From black to white, which the preprocessing below makes -1 to 1, the token is (-0.2, 0.2) to (0.2, -0.2).
    model.patch_embed.proj.weight[0] = 0.2 / (3 * 16)
    model.patch_embed.proj.weight[1] = -0.2 / (3 * 16)
    assert model.class_token is not None
    model.class_token[:] = torch.tensor([0.0, 0.0, 1.0, -1.0])
    block.attn.qkv.weight[0, 2] = 20.0  # q takes the class token's third number
    block.attn.qkv.weight[4, 0] = 1.0  # k a patch's first
    settings = {"image_size": (64, 64), "resize": "squash", "mean": (0.5,) * 3, "std": (0.5,) * 3} | preprocess
    # White has the score 20 * 0.816 * 0.198 / 2; the scale is such that it gets about 0.98, and black 0.02.
    return as_loaded(model, Preprocess(PreprocessConfig(**settings)), SubjectHeat(scale=2.8, bias=0.0))


def as_loaded(model: ViT, preprocess: Preprocess, subject: SubjectHeat | None) -> Loaded:
    return Loaded(
        model=model,
        config=model.config,
        preprocess=preprocess,
        labels=None,
        subject=subject,
        provenance=Provenance("a test", "patchlight", Path("nowhere"), None),
        why={},
        notes=(),
    )


def bright(size: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
    photo = Image.new("RGB", size)
    photo.paste((255, 255, 255), box)
    return photo
