"""A ViT as transformers has it: which of its models computes the same, that model's config.json, and our state in its
names. We write the names of transformers 4, which 5 reads as well.
"""

import dataclasses
import re
from typing import Any

import torch

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.positions import sincos_2d
from patchlight.weights.convert import Names, State, convert_to, refuse
from patchlight.weights.family import InTransformers
from patchlight.weights.vit.names import BEIT, TRANSFORMERS, TRANSFORMERS_CLIP, TRANSFORMERS_SIGLIP, without_patch_boxes

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu", "swiglu": "silu"}

Written = tuple[ViTConfig, State, dict[str, Any]]
"""The config of what is written, our state in their names, and their config.json beside what all models have in it."""


def to_transformers(config: ViTConfig, state: State) -> InTransformers:
    config, state = without_patch_boxes(config, state)
    if config.position == "sincos2d":
        state["positions.table"] = sincos_2d(config.grid, config.width).to(state["norm.weight"])
        config = dataclasses.replace(config, position="learned", prefix_positions="none")
    model = _model_for(config)
    refuse("transformers", config, model, stem="patchify", resnet=None, block_norm="before", inner_norm="none")
    refuse("transformers", config, model, qk_norm=False, head_hidden=0)
    written, theirs, own = _WRITERS[model](config, state)
    tokens = ("cls_token", "distillation_token", "register_tokens", "position_embeddings")
    batched = [f"embeddings.{name}" for name in tokens]
    theirs = {key: value[None] if key in batched else value for key, value in theirs.items()}
    heads = ("classifier.", "cls_classifier.", "distillation_classifier.", "visual_projection.")
    prefix = _PREFIXES.get(model, "")
    if prefix == "vision_model" or (prefix and config.num_classes):
        theirs = {key if key.startswith(heads) else f"{prefix}.{key}": value for key, value in theirs.items()}
    return InTransformers(written, theirs, _shared(written) | own)


def _model_for(config: ViTConfig) -> str:
    """transformers' model type that has the parts of this model."""
    if config.is_rotary:
        return "dinov3_vit"
    if config.position == "relative_bias":
        return "beit"
    if config.distill_token:
        return "deit"
    if config.embed_norm:
        return "clip_vision_model"
    if config.pooling == "attention":
        return "siglip_vision_model"
    if config.num_registers:
        return "dinov2_with_registers"
    if config.layer_scale is not None or config.mlp == "swiglu" or config.pooling == "cls_mean":
        return "dinov2"
    return "vit" if config.class_token else "ijepa"


_PREFIXES = {
    "vit": "vit",
    "deit": "deit",
    "ijepa": "ijepa",
    "beit": "beit",
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2_with_registers",
    "clip_vision_model": "vision_model",
    "siglip_vision_model": "vision_model",
}


def _shared(config: ViTConfig) -> dict[str, Any]:
    """Entries of config.json that all model types share."""
    height, width = config.image_size
    down, across = config.patch_size
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": ACTIVATIONS[config.mlp],
        "layer_norm_eps": config.norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": down if down == across else [down, across],
        "num_channels": config.in_channels,
        **({"num_labels": config.num_classes} if config.num_classes else {}),
    }


def _names(dropped: str, block: str = "encoder.layer.", table: Names = TRANSFORMERS) -> Names:
    """Of the names that transformers has for one of ours, those of one model: all but what the pattern finds."""
    return tuple((theirs.replace("layers.", block), ours) for theirs, ours in table if not re.search(dropped, theirs))


_OLD = r"_proj\.|\.mlp\.|\.norm\d|^norm|patch_embeddings\.$"


def _vit(config: ViTConfig, state: State) -> Written:
    """ViT; without a class token I-JEPA, which is the same and pools by the mean."""
    model = _model_for(config)
    pooling = "cls" if config.class_token else "mean"
    refuse("transformers", config, model, position="learned", patch_bias=True, final_norm="tokens", pooling=pooling)
    if model == "vit":
        config, state = _with_prefix_rows(config, state)
    kind = {"vit": "ViT", "ijepa": "IJepa"}[model]
    return config, convert_to(state, _names(_OLD + "|^cls_")), _named(config, model, kind) | _no_dropout(config)


def _deit(config: ViTConfig, state: State) -> Written:
    refuse("transformers", config, "distill_token=True", position="learned", layer_scale=None, num_registers=0)
    refuse("transformers", config, "distill_token=True", final_norm="tokens", patch_bias=True, embed_norm=False)
    if config.mlp == "swiglu":
        refuse("transformers", config, "distill_token=True", mlp="gelu")
    refuse("transformers", config, "distill_token=True", prefix_positions="all")
    own = _named(config, "deit", "DeiT", head="ForImageClassificationWithTeacher") | _no_dropout(config)
    return config, convert_to(state, _names(_OLD + "|^classifier")), own


def _beit(config: ViTConfig, state: State) -> Written:
    """BEiT. Its keys have no bias; ours is left out, since it adds the same to all scores of a query."""
    _refuse_oblong(config, "position='relative_bias'")
    mean = config.pooling == "mean"
    refuse("transformers", config, "position='relative_bias'", class_token=True, num_registers=0, distill_token=False)
    refuse("transformers", config, "position='relative_bias'", embed_norm=False, patch_bias=True)
    refuse("transformers", config, f"pooling={config.pooling!r}", final_norm="pooled" if mean else "tokens")
    if not mean:
        refuse("transformers", config, "position='relative_bias'", pooling="cls")
    if config.mlp == "swiglu":
        refuse("transformers", config, "position='relative_bias'", mlp="gelu")
    config, state = _with_qkv_bias(config, state)
    norm = r"|^layernorm\." if mean else r"|^pooler"
    theirs = convert_to(state, _names(_OLD + norm + r"|^layers\.\{\}\.relative|^cls_", table=BEIT + TRANSFORMERS))
    theirs = {key: value for key, value in theirs.items() if not key.endswith(".key.bias")}
    return (
        config,
        theirs,
        _named(config, "beit", "Beit")
        | {
            "use_relative_position_bias": True,
            "use_mean_pooling": mean,
            "layer_scale_init_value": 0.0 if config.layer_scale is None else config.layer_scale or 1e-5,  # 0 is none
            "drop_path_rate": 0.0,
        },
    )


def _dinov2(config: ViTConfig, state: State) -> Written:
    """DINOv2, whose classifiers read the class token and the patches' mean, one after the other."""
    model = _model_for(config)
    _refuse_oblong(config, model)
    refuse("transformers", config, model, position="learned", class_token=True, patch_bias=True, final_norm="tokens")
    if config.pooling == "mean" or not config.num_classes:  # it is their classifier that takes the mean, too
        refuse("transformers", config, model, pooling="cls")
    config, state = _with_prefix_rows(config, state)
    config, state = _with_scales(config, state)
    if config.num_classes and config.pooling == "cls":  # what the mean says counts for nothing
        state["head.out.weight"] = torch.cat([state["head.out.weight"], 0 * state["head.out.weight"]], 1)
        config = dataclasses.replace(config, pooling="cls_mean")
    gated = config.mlp == "swiglu"
    ratio = next((ratio for ratio in range(1, 65) if _dinov2_hidden(config.width, ratio, gated) == config.mlp_width), 0)
    if not ratio:
        raise PatchlightError(
            f"mlp_dim={config.mlp_width} cannot be written with layout='transformers', whose {model} has a whole "
            f"multiple of width={config.width}{', two thirds of it,' if gated else ''}; use layout='patchlight'"
        )
    dropped = r"_proj\.|layernorm_|^norm|patch_embeddings\.$|^cls_|\.intermediate\.|\}\.output\."
    theirs = convert_to(state, _names(dropped + (r"|mlp\.fc" if gated else r"|mlp\.weights")))
    own: dict[str, Any] = {"mlp_ratio": ratio, "use_swiglu_ffn": gated, "qkv_bias": config.qkv_bias}
    if model == "dinov2":
        own["use_mask_token"] = False
    else:  # which has no such setting
        theirs["embeddings.mask_token"] = torch.zeros_like(state["class_token"])
        own["num_register_tokens"] = config.num_registers
    kind = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[model]
    return config, theirs, own | _named(config, model, kind) | {"layerscale_value": config.layer_scale}


def _dinov2_hidden(width: int, ratio: int, gated: bool) -> int:
    return (int(width * ratio * 2 / 3) + 7) // 8 * 8 if gated else width * ratio


def _dinov3(config: ViTConfig, state: State) -> Written:
    refuse("transformers", config, f"position={config.position!r}", position="rope2d", rope_coordinates="centred")
    refuse("transformers", config, "position='rope2d'", add_learned_table=False, class_token=True, distill_token=False)
    refuse("transformers", config, "position='rope2d'", num_classes=0, pooling="cls", final_norm="tokens")
    refuse("transformers", config, "position='rope2d'", embed_norm=False, patch_bias=True)
    side = config.patch_size[0]
    refuse("transformers", config, "position='rope2d'", patch_size=(side, side))
    config, state = _with_scales(config, state)
    gated = config.mlp == "swiglu"
    state.setdefault("registers", torch.zeros(0, config.width, dtype=state["class_token"].dtype))
    dropped = r"attention\.attention|attention\.output|layernorm|projection|mlp\.fc|\.intermediate|\}\.output|weights_"
    theirs = convert_to(state, _names(dropped, block="layer."))
    theirs["embeddings.mask_token"] = torch.zeros_like(state["class_token"])[None]
    return (
        config,
        theirs,
        _named(config, "dinov3_vit", "DINOv3ViT")
        | {
            "use_gated_mlp": gated,
            "num_register_tokens": config.num_registers,
            "rope_theta": config.rope_base,
            "query_bias": config.qkv_bias,
            "key_bias": config.qkv_bias,
            "value_bias": config.qkv_bias,
            "layerscale_value": config.layer_scale,
        },
    )


def _clip(config: ViTConfig, state: State) -> Written:
    _refuse_oblong(config, "embed_norm=True")
    refuse("transformers", config, "embed_norm=True", position="learned", class_token=True, num_registers=0)
    refuse("transformers", config, "embed_norm=True", patch_bias=False, layer_scale=None, pooling="cls")
    if config.final_norm == "none":
        refuse("transformers", config, "embed_norm=True", final_norm="tokens")
    if config.mlp == "swiglu":
        refuse("transformers", config, "embed_norm=True", mlp="gelu")
    config, state = _with_prefix_rows(config, state)
    config, state = _with_qkv_bias(config, state)
    state["class_token"] = state["class_token"][0]
    if config.num_classes and state.pop("head.out.bias").any():
        raise PatchlightError(
            f"a head of {config.num_classes} classes with embed_norm=True cannot be written with "
            "layout='transformers', whose projection has no bias; load it with num_classes=0, or use "
            "layout='patchlight'"
        )
    head = "ModelWithProjection" if config.num_classes else "Model"
    return (
        config,
        convert_to(state, TRANSFORMERS_CLIP),
        {
            "model_type": "clip_vision_model",
            "architectures": [f"CLIPVision{head}"],
            "projection_dim": config.num_classes or config.width,
        },
    )


def _siglip(config: ViTConfig, state: State) -> Written:
    _refuse_oblong(config, "pooling='attention'")
    refuse("transformers", config, "pooling='attention'", position="learned", class_token=False, num_registers=0)
    refuse("transformers", config, "pooling='attention'", patch_bias=True, layer_scale=None, final_norm="tokens")
    refuse("transformers", config, "pooling='attention'", num_classes=0)
    if config.mlp == "swiglu":
        refuse("transformers", config, "pooling='attention'", mlp="gelu")
    config, state = _with_qkv_bias(config, state)
    joined: State = {}
    for part in ("weight", "bias"):
        q, kv = state.pop(f"attention_pool.q.{part}"), state.pop(f"attention_pool.kv.{part}")
        joined[f"head.attention.in_proj_{part}"] = torch.cat([q, kv])
    state["attention_pool.query"] = state["attention_pool.query"][None]
    return (
        config,
        convert_to(state, TRANSFORMERS_SIGLIP) | joined,
        {
            "model_type": "siglip_vision_model",
            "architectures": ["SiglipVisionModel"],
        },
    )


def _named(config: ViTConfig, model: str, kind: str, head: str = "ForImageClassification") -> dict[str, Any]:
    return {"model_type": model, "architectures": [f"{kind}{head if config.num_classes else 'Model'}"]}


def _no_dropout(config: ViTConfig) -> dict[str, Any]:
    return {"qkv_bias": config.qkv_bias, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _refuse_oblong(config: ViTConfig, because: str) -> None:
    side, patch = config.image_size[0], config.patch_size[0]
    refuse("transformers", config, because, image_size=(side, side), patch_size=(patch, patch))


def _with_prefix_rows(config: ViTConfig, state: State) -> tuple[ViTConfig, State]:
    """A row of positions for the class token alone: zeros where it had none; what registers had is added to them."""
    table, rows = state["positions.table"], config.num_prefix_positions
    if rows == 0:
        state["positions.table"] = torch.cat([torch.zeros_like(table[:1]), table])
    elif rows > 1:
        own, registers, patches = table.split([1, rows - 1, len(table) - rows])
        state["registers"] = state["registers"] + registers
        state["positions.table"] = torch.cat([own, patches])
    return dataclasses.replace(config, prefix_positions="class" if config.num_prefix > 1 else "all"), state


def _with_scales(config: ViTConfig, state: State) -> tuple[ViTConfig, State]:
    """A scale of one on each branch, where there is none."""
    if config.layer_scale is None:
        for index in range(config.depth):
            for branch in (1, 2):
                state[f"blocks.{index}.residual{branch}.scale"] = torch.ones_like(state["norm.weight"])
        config = dataclasses.replace(config, layer_scale=1.0)
    return config, state


def _with_qkv_bias(config: ViTConfig, state: State) -> tuple[ViTConfig, State]:
    """A bias of zero on queries, keys and values, where there is none."""
    if not config.qkv_bias:
        for index in range(config.depth):
            weight = state[f"blocks.{index}.attn.qkv.weight"]
            state[f"blocks.{index}.attn.qkv.bias"] = weight.new_zeros(len(weight))
        config = dataclasses.replace(config, qkv_bias=True)
    return config, state


_WRITERS = {
    "vit": _vit,
    "ijepa": _vit,
    "deit": _deit,
    "beit": _beit,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2,
    "dinov3_vit": _dinov3,
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
}
