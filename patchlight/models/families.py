"""Every architecture behind one name: the model that a config means."""

from typing import Any

from patchlight.config import ViTConfig
from patchlight.families import ConvNeXtConfig, ModelConfig, SwinConfig
from patchlight.models.convnext import ConvNeXt, ConvNeXtBlock
from patchlight.models.swin import Swin, SwinBlock
from patchlight.models.vit import Block, ViT

Model = ViT | Swin | ConvNeXt
"""All take image_BCHW and have `config`, `blocks`, `norm`, `head` (or None), `features` and `tokens`."""

BLOCKS = (Block, SwinBlock, ConvNeXtBlock)

MODELS: dict[type, Any] = {ViTConfig: ViT, SwinConfig: Swin, ConvNeXtConfig: ConvNeXt}


def make_model(config: ModelConfig) -> Model:
    """A model with fresh weights."""
    return MODELS[type(config)](config)
