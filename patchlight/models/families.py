"""Every architecture behind one name: the model that a config means."""

from typing import Any

from torch import nn

from patchlight.config import ViTConfig
from patchlight.families import ConvNeXtConfig, ModelConfig, SwinConfig
from patchlight.models.convnext import ConvNeXt
from patchlight.models.swin import Swin
from patchlight.models.vit import ViT

Model = ViT | Swin | ConvNeXt
"""All take image_BCHW and have `config`, `blocks`, `norm`, `head` (or None), `features` and `tokens`."""

MODELS: dict[type, type[Any]] = {ViTConfig: ViT, SwinConfig: Swin, ConvNeXtConfig: ConvNeXt}
"""The class of the model, for each class of config."""


def make_model(config: ModelConfig) -> Model:
    """A model with fresh weights."""
    return MODELS[type(config)](config)


def is_model(value: object) -> bool:
    """Whether it is a model of some architecture that we have, neither compiled nor wrapped."""
    return isinstance(value, tuple(MODELS.values()))


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of all models and decoders in it."""
    stacks = [getattr(part, "blocks", None) for part in module.modules()]
    return list(dict.fromkeys(block for stack in stacks if isinstance(stack, nn.ModuleList) for block in stack))
