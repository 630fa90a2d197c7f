"""Every architecture behind one name: the model that a config means."""

from patchlight.config import ViTConfig
from patchlight.families import ModelConfig, SwinConfig
from patchlight.models.convnext import ConvNeXt, ConvNeXtBlock
from patchlight.models.swin import Swin, SwinBlock
from patchlight.models.vit import Block, ViT

Model = ViT | Swin | ConvNeXt
"""All take image_BCHW and have `config`, `blocks`, `norm`, `head` (or None), `features` and `tokens`."""

BLOCKS = (Block, SwinBlock, ConvNeXtBlock)


def make_model(config: ModelConfig) -> Model:
    """A model with fresh weights."""
    if isinstance(config, ViTConfig):
        return ViT(config)
    return Swin(config) if isinstance(config, SwinConfig) else ConvNeXt(config)
