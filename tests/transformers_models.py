"""The vision models of transformers that we claim: how to make each one tiny, and what it answers."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import oracles

VIT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
VIT_MLP = VIT | {"intermediate_size": 72}
MAE_DECODER = {
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 24,
}
SWIN = {"embed_dim": 24, "depths": [2, 1], "num_heads": [2, 3], "image_size": 32, "window_size": 4}
CONVNEXT = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "image_size": 64}
RELATIVE = {"use_relative_position_bias": True}
TEXT = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 50}


@dataclass(frozen=True)
class Made:
    """A class of transformers, and the settings that make a tiny one."""

    name: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The name, and what distinguishes it from other rows of its class."""
        own = {key: value for key, value in self.settings.items() if key.startswith("use_")}
        return self.name + "".join(f" {key}={value}" for key, value in own.items())

    @property
    def has_text(self) -> bool:
        return self.config in ("CLIPConfig", "AltCLIPConfig", "MetaClip2Config", "SiglipConfig")


def _all(config: str, *names: str, **settings: Any) -> list[Made]:
    return [Made(name, config, settings) for name in names]


CLAIMED: tuple[Made, ...] = (
    *_all(
        "ViTConfig", "ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling", **VIT_MLP, encoder_stride=8
    ),
    *_all("DeiTConfig", "DeiTModel", "DeiTForImageClassification", **VIT_MLP),
    *_all("DeiTConfig", "DeiTForImageClassificationWithTeacher", **VIT_MLP),
    *_all("BeitConfig", "BeitModel", "BeitForImageClassification", "BeitForMaskedImageModeling", **VIT_MLP),
    *_all("BeitConfig", "BeitModel", "BeitForImageClassification", "BeitBackbone", **VIT_MLP, **RELATIVE),
    *_all("Data2VecVisionConfig", "Data2VecVisionModel", "Data2VecVisionForImageClassification", **VIT_MLP, **RELATIVE),
    *_all("Dinov2Config", "Dinov2Model", "Dinov2ForImageClassification", "Dinov2Backbone", **VIT),
    *_all("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone", **VIT),
    *_all("Dinov2WithRegistersConfig", "Dinov2WithRegistersForImageClassification", **VIT),
    *_all("DINOv3ViTConfig", "DINOv3ViTModel", "DINOv3ViTBackbone", **VIT_MLP),
    *_all("DINOv3ViTConfig", "DINOv3ViTModel", **VIT_MLP, use_gated_mlp=True, hidden_act="silu", num_register_tokens=2),
    *_all("ViTMAEConfig", "ViTMAEModel", "ViTMAEForPreTraining", **VIT_MLP, **MAE_DECODER),
    *_all("ViTMSNConfig", "ViTMSNModel", "ViTMSNForImageClassification", **VIT_MLP),
    *_all("IJepaConfig", "IJepaModel", "IJepaForImageClassification", **VIT_MLP),
    *_all("CLIPVisionConfig", "CLIPVisionModel", "CLIPVisionModelWithProjection", **VIT_MLP, projection_dim=20),
    *_all("CLIPConfig", "CLIPModel", "CLIPForImageClassification", **VIT_MLP),
    *_all("ChineseCLIPVisionConfig", "ChineseCLIPVisionModel", **VIT_MLP),
    *_all("AltCLIPVisionConfig", "AltCLIPVisionModel", **VIT_MLP),
    *_all("AltCLIPConfig", "AltCLIPModel", **VIT_MLP),
    *_all("CLIPSegVisionConfig", "CLIPSegVisionModel", **VIT_MLP),
    *_all("GitVisionConfig", "GitVisionModel", **VIT_MLP),
    *_all("MetaClip2VisionConfig", "MetaClip2VisionModel", "MetaClip2VisionModelWithProjection", **VIT_MLP),
    *_all("MetaClip2Config", "MetaClip2ForImageClassification", **VIT_MLP),
    *_all("SiglipVisionConfig", "SiglipVisionModel", **VIT_MLP),
    *_all("SiglipConfig", "SiglipModel", "SiglipForImageClassification", **VIT_MLP),
    *_all("SwinConfig", "SwinModel", "SwinForImageClassification", "SwinBackbone", **SWIN),
    *_all("SwinConfig", "SwinForMaskedImageModeling", **SWIN, encoder_stride=8),
    *_all("Swinv2Config", "Swinv2Model", "Swinv2ForImageClassification", "Swinv2Backbone", **SWIN),
    *_all("Swinv2Config", "Swinv2ForMaskedImageModeling", **SWIN, encoder_stride=8),
    *_all("ConvNextConfig", "ConvNextModel", "ConvNextForImageClassification", "ConvNextBackbone", **CONVNEXT),
    *_all("ConvNextV2Config", "ConvNextV2Model", "ConvNextV2ForImageClassification", "ConvNextV2Backbone", **CONVNEXT),
)
"""One class of each kind; several rows of a class are several models of it."""


def make(made: Made, **changes: Any) -> nn.Module:
    """A tiny model of the class, with other settings if asked; of two towers, they are the vision tower's."""
    library = oracles.transformers()
    settings = made.settings | changes
    if made.has_text:
        settings = {"vision_config": settings, "text_config": TEXT}
    return getattr(library, made.name)(getattr(library, made.config)(**settings)).eval()


def vision_config(model: Any) -> Any:
    """The part of its config that speaks of its image encoder."""
    parts = [getattr(model.config, name, None) for name in ("vision_config", "backbone_config")]
    return next((part for part in parts if part is not None), model.config)


def image_size(model: Any) -> tuple[int, ...]:
    """Channels, height and width of the images that it is made for."""
    config = vision_config(model)
    size = config.image_size
    return (config.num_channels, size, size) if isinstance(size, int) else (config.num_channels, *size)


def _tokens_inside(backbone: Any, image_BCHW: Tensor) -> Tensor:
    """What its last block gives, whatever is made of it afterwards."""
    seen: list[Tensor] = []
    blocks = max((module for module in backbone.modules() if isinstance(module, nn.ModuleList)), key=len)
    hook = blocks[-1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with contextlib.suppress(IndexError, TypeError):  # of a shortened model, whose later blocks are missed
        backbone(image_BCHW)
    hook.remove()
    return seen[0] if isinstance(seen[0], Tensor) else seen[0][0]


@torch.no_grad()
def theirs(model: Any, image_BCHW: Tensor) -> dict[str, Tensor]:
    """What the class gives, out of tokens, patches (of a backbone) and answers."""
    kind = type(model).__name__
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.return_dict = True
    if kind.endswith("Backbone"):
        return {"patches": model(image_BCHW).feature_maps[-1]}
    if hasattr(model, "backbone"):  # below a head for other tasks
        return {"tokens": _tokens_inside(model.backbone, image_BCHW)}
    encoder = model if kind.startswith("DINOv3") else getattr(model, "vision_model", model.base_model)
    order = {}
    if "MAE" in kind:  # it drops patches at random, and shuffles those that it keeps; all in order make a ViT
        encoder.embeddings.config.mask_ratio = 0.0
        patches = encoder.embeddings.patch_embeddings.num_patches
        order["noise"] = torch.arange(float(patches)).expand(len(image_BCHW), -1)
    output = encoder(image_BCHW, **order)
    tokens = output.last_hidden_state
    if kind == "BeitForMaskedImageModeling":
        tokens = model.layernorm(tokens)
    elif tokens.ndim == 4:
        tokens = tokens.permute(0, 2, 3, 1).flatten(1, 2)
    found = {"tokens": tokens}
    if "ForImageClassification" in kind:
        found["answers"] = model(image_BCHW).logits
    elif hasattr(model, "visual_projection"):
        found["answers"] = model.visual_projection(output.pooler_output)
    elif getattr(output, "pooler_output", None) is not None and not hasattr(getattr(model, "pooler", None), "dense"):
        found["answers"] = output.pooler_output
    return found


@torch.no_grad()
def ours(model: Any, loaded: Any, image_BCHW: Tensor) -> dict[str, Tensor]:
    """The same of what was loaded from it."""
    own = loaded.model
    if type(model).__name__.endswith("Backbone"):
        normed = getattr(model.config, "apply_layernorm", False)
        return {"patches": own.intermediates(image_BCHW, [-1], norm=normed, dense=True)[0]}
    # CLIP's tokens, unlike those of other models, are as they were before the last norm.
    before = any(name in type(model).__name__ for name in ("CLIP", "MetaClip2")) or hasattr(model, "backbone")
    tokens = own.intermediates(image_BCHW, [-1])[0] if before else own.tokens(image_BCHW)
    return {"tokens": tokens, "answers": own(image_BCHW)}
