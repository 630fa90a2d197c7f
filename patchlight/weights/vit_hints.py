"""What the config.json of timm and of transformers says of a ViT beyond its tensors."""

from collections.abc import Collection, Mapping
from typing import Any

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig
from patchlight.weights.find import Found
from patchlight.weights.read import CheckpointError
from patchlight.weights.timm_architectures import name_of, open_settings, settings_of
from patchlight.weights.timm_arguments import vit_settings
from patchlight.weights.transformers_configs import Keys, activation

TIMM_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "swiglu"}


def timm_hints(config: Mapping[str, Any], state: Collection[str]) -> dict[str, Any]:
    """What timm's config.json says beyond the shapes; `state`: our names of the tensors."""
    name = name_of(str(config["architecture"]))
    hints = {} if name is None else open_settings(name)
    gated = "blocks.0.mlp.gate_and_up.weight" in state
    if not gated and hints.get("mlp") == "swiglu":  # which model_args may take away
        hints["mlp"] = "gelu"
    arguments = config.get("model_args") or {}
    hints |= vit_settings(arguments, {} if name is None else settings_of(name))
    pooling = arguments.get("global_pool") or config.get("global_pool") or "token"
    if pooling not in ("token", "avg", "map") or (pooling == "map" and "attention_pool.query" not in state):
        without = " without the tensors for it" if pooling == "map" else ""
        raise PatchlightError(f"config.json says global_pool={pooling!r}{without}, which we do not have")
    activation = arguments.get("act_layer")
    if activation is not None and (activation not in TIMM_ACTIVATIONS or (activation == "silu") != gated):
        kind = " in an MLP without a gate" if activation == "silu" else " in a gated MLP" if gated else ""
        raise PatchlightError(f"config.json says act_layer={activation!r}{kind}, which we do not have")
    size = arguments.get("img_size") or (config.get("pretrained_cfg") or {}).get("input_size", [None])[1:]
    given = {
        "num_heads": arguments.get("num_heads"),
        "image_size": size or None,
        "mlp": TIMM_ACTIVATIONS.get(str(activation)),
        "pooling": {"avg": "mean"}.get(pooling) or ("cls" if arguments.get("global_pool") == "token" else None),
    }
    return hints | {name: value for name, value in given.items() if value is not None}


def refuse_uneven_size(size: Any, patch_size: tuple[int, int], source: str) -> None:
    """timm's convolution passes over the pixels that are left where patches do not divide an image."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    whole = tuple(side // patch * patch for side, patch in zip(sides, patch_size, strict=True))
    if whole != sides:
        raise CheckpointError(
            f"{source}: patches of {patch_size[0]}x{patch_size[1]} do not divide its images of {sides[0]}x{sides[1]} "
            f"(img_size), of which timm passes over the last pixels; image_size={whole} takes smaller photos instead"
        )


def refuse_partial_pooling(config: ModelConfig, found: Found, name: str | None) -> None:
    """Of timm's ViTs that pool by attention, most leave prefix tokens out of it, and no tensor tells; those with
    rotations never do. `name`: the architecture, if it is known."""
    told = (found.config.get("model_args") or {}).get("pool_include_prefix")
    if told is None and name is not None:  # one that leaves them out is refused by its name
        usual = settings_of(name)
        told = usual["pooling"] == "attention" and (usual["class_token"] or usual["num_registers"] > 0)
    if told or not isinstance(config, ViTConfig) or config.is_rotary:
        return
    if config.pooling == "attention" and config.num_prefix:
        raise CheckpointError(
            f"{found.source}: it pools by attention, with {config.num_prefix} tokens in front of its patches; timm "
            "leaves them out of the pooling, which we do not have (only pool_include_prefix=True in model_args)"
        )


# Parts that config.json says are there or not, and how the name of a tensor ends that tells whether they are.
_TOLD_TWICE = {
    "qkv_bias": ".attn.qkv.bias",
    "query_bias": ".q_proj.bias",
    "key_bias": ".k_proj.bias",
    "value_bias": ".v_proj.bias",
    "proj_bias": ".o_proj.bias",
    "mlp_bias": ".up_proj.bias",
    "use_swiglu_ffn": ".mlp.gate_and_up.weight",
    "use_gated_mlp": ".mlp.gate_and_up.weight",
    "use_absolute_position_embeddings": "positions.table",
}


def transformers_hints(keys: Keys, source: str, tensors: Collection[str]) -> dict[str, Any]:
    """What transformers' config.json says beyond the shapes, and of them what must agree; `tensors`: the names of those
    that are there, ours and theirs."""
    for key, end in _TOLD_TWICE.items():
        if key in keys.values:
            _check_agrees(key, keys.values[key], any(name.endswith(end) for name in tensors), source)
    gated = "blocks.0.mlp.gate_and_up.weight" in tensors
    values = keys.values
    hints: dict[str, Any] = {
        **keys.told,
        "width": values.get("hidden_size"),
        "depth": values.get("num_hidden_layers"),
        "num_heads": values.get("num_attention_heads"),
        "norm_eps": values.get("layer_norm_eps"),
        "image_size": values.get("image_size"),
        "rope_base": values.get("rope_theta"),
    }
    patch = values.get("patch_size")
    hints["patch_size"] = (patch, patch) if isinstance(patch, int) else tuple(patch) if patch else None
    with_gate = f" with use_gated_mlp={gated}" if keys.model_type == "dinov3_vit" else ""
    if not gated:
        hints["mlp"] = activation(keys, ("gelu", "gelu_tanh", "quick_gelu"), source, with_gate)
    elif with_gate:  # DINOv2's gate is a SiLU whatever the file says
        activation(keys, ("silu",), source, with_gate)
    if "use_mean_pooling" in values:  # BEiT
        hints |= _beit_hints(values, source, tensors)
    return {name: value for name, value in hints.items() if value is not None}


def _check_agrees(key: str, said: Any, there: bool, source: str) -> None:
    if bool(said) != there:
        raise CheckpointError(f"{source}: config.json says {key}={said!r}, but its tensors say {there}")


def _beit_hints(values: Mapping[str, Any], source: str, tensors: Collection[str]) -> dict[str, Any]:
    own, shared = "use_relative_position_bias", "use_shared_relative_position_bias"
    relative = values[own] or values[shared]
    has_relative = "blocks.0.attn.relative_bias.table" in tensors
    _check_agrees(shared if values[shared] else own, relative, has_relative, source)
    table, mean = values["use_absolute_position_embeddings"], values["use_mean_pooling"]
    if not mean:
        _check_agrees("use_mean_pooling", mean, "pooler.layernorm.weight" in tensors, source)
    if relative and table:
        raise CheckpointError(
            f"{source}: config.json says use_absolute_position_embeddings=True beside relative positions, which we do "
            "not have together"
        )
    size = values["image_size"]
    if relative and not isinstance(size, int) and len(set(size)) > 1:
        raise CheckpointError(
            f"{source}: config.json says image_size={size} with relative positions, where transformers takes rows for "
            "columns; we have squares alone"
        )
    position = "relative_bias" if relative else "learned" if table else "none"
    # With the mean it is the pooler that normalises, and models without one do not.
    return {"position": position, "pooling": "mean" if mean else "cls", "final_norm": "none" if mean else None}
