"""What the config.json of timm and of transformers says of a ViT beyond its tensors."""

from collections.abc import Mapping
from typing import Any

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig
from patchlight.weights.find import Found
from patchlight.weights.read import CheckpointError
from patchlight.weights.timm_arguments import vit_settings
from patchlight.weights.transformers_configs import Keys, activation

EVA_ROPE = {"position": "rope2d", "rope_base": 10_000.0, "rope_grid": (16, 16)}

# What the name of a timm architecture says, and its config file does not. Later rows overrule earlier ones.
TIMM_ARCHITECTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("test_vit", {"num_heads": 2}),
    ("test_vit3", {"num_heads": 3}),
    ("vit_base_patch16_gap_224", {"num_heads": 16}),
    ("quickgelu", {"mlp": "quick_gelu"}),
    ("patch32_siglip", {"mlp": "gelu_tanh"}),
    ("large_patch16_siglip_512", {"mlp": "gelu_tanh"}),
    ("large_patch16_siglip_gap_512", {"mlp": "gelu_tanh"}),
    ("so400m_patch16_siglip", {"mlp": "gelu_tanh"}),
    ("giantopt", {"mlp": "gelu_tanh", "num_heads": 16}),
    ("_clip_", {"norm_eps": 1e-5}),
    ("beit3", {"norm_eps": 1e-5}),
    ("eva", {"norm_eps": 1e-6}),
    ("eva02", EVA_ROPE),
    ("eva02_enormous", {"position": "learned", "block_norm": "after"}),
    ("_rpn_", {"block_norm": "after"}),
    ("huge_plus", {"num_heads": 20}),
    ("_7b_", {"num_heads": 32}),
    ("dinov3", {"position": "rope2d", "rope_coordinates": "centred", "norm_eps": 1e-5, "pooling": "mean"}),
    ("lingbot", {"position": "rope2d", "rope_coordinates": "centred", "norm_eps": 1e-5}),
    ("_rope_", {"position": "rope2d"}),
    ("_rope_reg", EVA_ROPE),
)

# Those that pool prefix tokens, too.
TIMM_POOLS_PREFIX = ("test_vit3",)

# Parts of timm architectures' names whose computation is another, though the tensors' names are the same.
TIMM_OTHERS = ("vit_pe_", "_xp_", "_18x2_")

TIMM_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "swiglu"}


def timm_hints(config: Mapping[str, Any], *, gated: bool) -> dict[str, Any]:
    """What timm's config.json says beyond the shapes; `gated`: the MLPs are."""
    architecture = str(config["architecture"])
    others = [part for part in TIMM_OTHERS if part in f"{architecture}_"]
    if others:
        raise PatchlightError(f"timm's {architecture} is not a plain ViT ({others[0].strip('_')}); it is not supported")
    hints: dict[str, Any] = {"block_norm": "before", "norm_eps": 1e-6}
    for part, settings in TIMM_ARCHITECTURES:
        if part in f"{architecture}_":
            hints |= settings
    arguments = config.get("model_args") or {}
    hints |= vit_settings(arguments)
    pooling = arguments.get("global_pool") or config.get("global_pool") or "token"
    if pooling not in ("token", "avg", "map"):
        raise PatchlightError(f"config.json says global_pool={pooling!r}, which we do not have")
    activation = arguments.get("act_layer")
    if activation is not None and (activation not in TIMM_ACTIVATIONS or (activation == "silu" and not gated)):
        plain = " in an MLP without a gate" if activation == "silu" else ""
        raise PatchlightError(f"config.json says act_layer={activation!r}{plain}, which we do not have")
    size = arguments.get("img_size") or (config.get("pretrained_cfg") or {}).get("input_size", [None])[1:]
    given = {
        "num_heads": arguments.get("num_heads"),
        "image_size": size or None,
        "mlp": TIMM_ACTIVATIONS.get(str(activation)),
        "pooling": {"avg": "mean"}.get(pooling) or ("cls" if arguments.get("global_pool") == "token" else None),
    }
    return hints | {name: value for name, value in given.items() if value is not None}


def refuse_partial_pooling(config: ModelConfig, found: Found) -> None:
    """Of timm's ViTs that pool by attention, most leave prefix tokens out of it, and no tensor tells; those with
    rotations never do."""
    told = (found.config.get("model_args") or {}).get("pool_include_prefix")
    if told is None:
        told = found.config.get("architecture") in TIMM_POOLS_PREFIX
    if told or not isinstance(config, ViTConfig) or config.is_rotary:
        return
    if config.pooling == "attention" and config.num_prefix:
        raise CheckpointError(
            f"{found.source}: it pools by attention, with {config.num_prefix} tokens in front of its patches; timm "
            "leaves them out of the pooling, which we do not have (only pool_include_prefix=True in model_args)"
        )


def transformers_hints(keys: Keys, source: str, *, gated: bool) -> dict[str, Any]:
    """What transformers' config.json says beyond the shapes, and of them what must agree; `gated`: the MLPs are."""
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
        hints |= _beit_hints(values, source)
    return {name: value for name, value in hints.items() if value is not None}


def _beit_hints(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    relative = values["use_relative_position_bias"] or values["use_shared_relative_position_bias"]
    table = values["use_absolute_position_embeddings"]
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
    mean = values["use_mean_pooling"]
    # Then it is the pooler that normalises, and models without one do not.
    return {"position": position, "pooling": "mean" if mean else "cls", "final_norm": "none" if mean else None}
