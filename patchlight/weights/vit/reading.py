"""The config of a ViT, from its tensors and from what came with them, and its tensors for another size.

Shapes tell most settings. What they cannot tell comes, in this order, from the caller, the config file beside the
checkpoint, the catalogue, and the convention of its origin; `why` records which, setting by setting.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from patchlight.config import Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.models.resampling import resample
from patchlight.models.stems import resize_projection
from patchlight.weights.convert import Origin, State
from patchlight.weights.family import Evidence, Reading, Shapes, add_settings
from patchlight.weights.read import CheckpointError
from patchlight.weights.timm_configs import argument_error, check_arguments, open_settings, settings_of
from patchlight.weights.transformers_configs import Keys, ModelType, activation
from patchlight.weights.vit.names import reorder_rope

# Settings that change what is computed, and that tensors of the same names and shapes may differ in.
LEFT_OPEN = (
    "num_heads",
    "mlp",
    "norm_eps",
    "position",
    "rope_base",
    "rope_coordinates",
    "rope_grid",
    "block_norm",
    "pooling",
)

# Settings that tensors decide, so that nothing else may contradict them.
FIXED_BY_TENSORS = frozenset({"width", "depth", "stem", "patch_size", "in_channels", "num_registers", "class_token"})

# Heads are 64 wide, except in the giants.
HEADS_BY_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}


def read(evidence: Evidence) -> Reading:
    """The config of a checkpoint in our names, from its shapes and then from the hints."""
    shapes, source, told = evidence.shapes, evidence.source, dict(evidence.told)
    sources = [
        ("you", evidence.asked),
        *evidence.hints,
        (f"convention of {shapes.origin.name}", _conventions(told, shapes)),
    ]
    said = dict(evidence.hints).get(evidence.found.config_from, {}).get("image_size")
    if "architecture" in evidence.found.config and said and "image_size" not in evidence.overrides:
        _refuse_uneven_size(said, told["patch_size"], source)
    why = add_settings(told, sources, FIXED_BY_TENSORS, source)
    has_table = "positions.table" in shapes
    if "position" not in told and has_table:
        told["position"], why["position"] = "learned", "shapes"
    if "position" not in told:
        raise CheckpointError(f"{source}: no positions are in it; if it has none, pass position='none'")
    _refuse_ambiguous(told, shapes)
    image_size, prefix_positions, where = _grid(told, [*sources[1:-1], sources[0], sources[-1]], shapes)
    told["image_size"], why["image_size"] = image_size, where
    if has_table:
        told["prefix_positions"], why["prefix_positions"] = prefix_positions, where
        told["add_learned_table"], why["add_learned_table"] = told["position"] in ("rope2d", "rope_mixed"), "shapes"
    else:
        told.pop("prefix_positions", None)
    if told["position"] != "rope2d":
        for name in ("rope_base", "rope_coordinates", "rope_grid"):
            told.pop(name, None)
    try:
        config = ViTConfig(**told)
    except PatchlightError as error:
        raise CheckpointError(f"{source}: {error}") from None
    if shapes.origin.name == "timm":
        _refuse_partial_pooling(config, evidence)
    return Reading(config, why)


def _refuse_ambiguous(told: Mapping[str, Any], shapes: Shapes) -> None:
    """Refuse tensors that fit two different computations of timm, unless a setting says which it is."""
    if shapes.origin.name != "timm":
        return
    bare = told["layer_scale"] is None and "block_norm" not in told
    relative = told["position"] in ("relative_bias", "relative_mlp") and "blocks.0.attn.q_bias" not in shapes.theirs
    if bare and (relative or not (told["class_token"] or told["qkv_bias"])):
        raise CheckpointError(
            f"{shapes.source}: its tensors do not tell whether blocks normalise before or after each branch; say "
            "block_norm='after' for timm's models with rpn in their name, else block_norm='before'"
        )
    if told["embed_norm"] and told.get("pooling") == "attention" and "norm_pre.weight" in shapes.theirs:
        raise CheckpointError(f"{shapes.source}: it looks like a Perception Encoder, which is not supported")


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    if "blocks.0.norm1.weight" in shapes and not any(".norm1.bias" in key for key in shapes):
        raise CheckpointError(
            f"{shapes.source}: its norms have no bias, as RMS norms have none; only LayerNorm is supported"
        )
    stem, resnet = "patchify", None
    convs = sum(key.startswith("patch_embed.convs.") and key.endswith(".weight") for key in shapes)
    if convs:
        stem, down, across = "convolutions", 2**convs, 2**convs
        width = shapes.of(f"patch_embed.convs.{convs - 1}.weight", 4)[0]
        channels = shapes.of("patch_embed.convs.0.weight", 4)[1]
    else:
        width, channels, down, across = shapes.of("patch_embed.proj.weight", 4)
    if "patch_embed.resnet.conv.weight" in shapes:
        channels = shapes.of("patch_embed.resnet.conv.weight", 4)[1]
        parts = [key.split(".") for key in shapes if key.startswith("patch_embed.resnet.stages.")]
        resnet = tuple(len({part[4] for part in parts if part[3] == str(stage)}) for stage in range(4))
        resnet = tuple(itertools.takewhile(bool, resnet))
        stride = 4 * 2 ** max(0, len(resnet) - 1)
        down, across = stride * down, stride * across
    blocks = {key.split(".")[1] for key in shapes if key.startswith("blocks.")}
    told: dict[str, Any] = {
        "width": width,
        "in_channels": channels,
        "stem": stem,
        "patch_size": (down, across),
        "resnet": resnet,
        # Up to the first gap: what comes after it is unexpected, and a huge number cannot ask for as many blocks.
        "depth": next(number for number in itertools.count() if str(number) not in blocks),
        "patch_bias": "patch_embed.proj.bias" in shapes or "patch_embed.convs.0.bias" in shapes,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "qk_norm": "blocks.0.attn.q_norm.weight" in shapes,
        "embed_norm": "embed_norm.weight" in shapes,
        "inner_norm": "both" if "blocks.0.attn.norm.weight" in shapes else "none",
        "layer_scale": 1e-5 if "blocks.0.residual1.scale" in shapes else None,
        "class_token": "class_token" in shapes,
        "distill_token": "distill_token" in shapes,
        "num_registers": shapes.of("registers", 2)[0] if "registers" in shapes else 0,
        "num_classes": shapes.of("head.out.weight", 2)[0] if "head.out.weight" in shapes else 0,
        "head_hidden": shapes.of("head.hidden.weight", 2)[0] if "head.hidden.weight" in shapes else 0,
    }
    if "norm.weight" in shapes:
        pooled = {"fc_norm.weight", "pooler.layernorm.weight"} & set(shapes.theirs)
        told["final_norm"] = "pooled" if pooled else "tokens"
    if "blocks.0.mlp.norm.weight" in shapes and told["inner_norm"] == "none":
        told["inner_norm"] = "mlp"
    if not told["num_classes"]:
        told["head_hidden"] = 0  # a hidden layer without a classifier is of no use
    if "blocks.0.mlp.gate_and_up.weight" in shapes:
        told |= {"mlp": "swiglu", "mlp_dim": shapes.of("blocks.0.mlp.gate_and_up.weight", 2)[0] // 2}
    else:
        told["mlp_dim"] = shapes.of("blocks.0.mlp.up.weight", 2)[0]
    if told["mlp_dim"] == 4 * width:
        told["mlp_dim"] = None
    if "blocks.0.attn.rope.frequencies" in shapes:
        told["position"] = "rope_mixed"
        told["num_heads"] = shapes.of("blocks.0.attn.rope.frequencies", 3)[1]
    elif "blocks.0.attn.relative_bias.table" in shapes:
        told["position"] = "relative_bias"
        told["num_heads"] = shapes.of("blocks.0.attn.relative_bias.table", 2)[1]
    elif "blocks.0.attn.relative_bias.out.weight" in shapes:
        told["position"] = "relative_mlp"
        told["num_heads"], told["relative_hidden"] = shapes.of("blocks.0.attn.relative_bias.out.weight", 2)
    if "blocks.0.attn.q_norm.weight" in shapes:
        told["num_heads"] = width // max(1, shapes.of("blocks.0.attn.q_norm.weight", 1)[0])
    if "rope_embed.periods" in shapes.theirs:  # a quarter of a head's width
        told["num_heads"] = width // max(1, 4 * shapes.theirs["rope_embed.periods"][0])
    for key, sizes in shapes.theirs.items():
        if key.endswith("/query/kernel") and len(sizes) == 3:  # in, heads, each head's width
            told["num_heads"] = sizes[1]
    if told["num_classes"] and not told["head_hidden"] and shapes.of("head.out.weight", 2)[1] == 2 * width:
        told["pooling"] = "cls_mean"
    if "attention_pool.query" in shapes:
        told["pooling"] = "attention"
    if "classifier.weight" in shapes.theirs and shapes.origin.name in ("transformers CLIP", "transformers SigLIP"):
        told["pooling"] = "mean"  # whatever else is in it
        if shapes.origin.name == "transformers CLIP":
            told["final_norm"] = "none"
    return told


def _conventions(told: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Settings that the origin's authors take for granted."""
    width = told["width"]
    conventions: dict[str, Any] = {
        "num_heads": HEADS_BY_WIDTH.get(width, max(1, width // 64)),
        "norm_eps": 1e-6,
        "mlp": "gelu",
        "pooling": "cls" if told["class_token"] and told.get("final_norm") == "tokens" else "mean",
        "final_norm": "tokens",
    }
    # Models of transformers, and DINOv2 as published (it comes with a mask token), except with registers.
    registers = told["num_registers"] and "embeddings.distillation_token" not in shapes.theirs
    if (shapes.origin.name.startswith("transformers") or "mask_token" in shapes.theirs) and not registers:
        relative = told.get("position") == "relative_bias"
        conventions["position_resampling"] = "linear" if relative else "plain"
    # Of the models that come without a table of positions, those with a LayerScale of this name use RoPE, and those of
    # them with a class token and registers measure from the centre (DINOv3).
    has_table, apart = "pos_embed" in shapes.theirs, {"blocks.0.attn.q_bias", "blocks.0.attn.q_proj.weight"}
    counted = {"position": "rope2d", "rope_base": 10_000.0, "rope_grid": (16, 16)}
    if has_table and told.get("mlp") == "swiglu" and apart & set(shapes.theirs):
        conventions |= counted  # EVA-02
    elif has_table and "blocks.0.gamma_1" in shapes.theirs:
        conventions["position"] = "learned"  # DeiT III by its authors; a RoPE model may look the same
    elif not has_table and ("blocks.0.gamma_1" in shapes.theirs or "rope_embed.periods" in shapes.theirs):
        conventions["position"] = "rope2d"
        if told["class_token"] and told["num_registers"]:
            conventions |= {"rope_coordinates": "centred", "norm_eps": 1e-5}
            if shapes.origin.name == "timm" and not told["qkv_bias"]:  # other models of timm with RoPE have one
                conventions["pooling"] = "mean"
        elif told["num_registers"]:
            conventions |= counted
    conventions |= shapes.origin.conventions
    if "layers.0.layer_scale1.lambda1" in shapes.theirs or "encoder.layer.0.layer_scale1.lambda1" in shapes.theirs:
        conventions["norm_eps"] = 1e-6  # DINOv2 in transformers
    return conventions


def _grid(
    told: Mapping[str, Any], sources: Sequence[tuple[str, Mapping[str, Any]]], shapes: Shapes
) -> tuple[Size, str, str]:
    """The image size that the positions were made for, which prefix tokens own rows, and where that came from."""
    down, across = told["patch_size"]
    sizes = [
        (where, _pair(settings["image_size"])) for where, settings in sources if settings.get("image_size") is not None
    ]
    prefix = told["class_token"] + told["distill_token"] + told["num_registers"]
    if "positions.table" in shapes:
        rows = shapes["positions.table"][0]
        # All prefix tokens own rows, or the class token alone (DINOv2), or none.
        owners = {"all": prefix, "class": 1, "none": 0} if told["class_token"] else {"all": prefix, "none": 0}

        def fits(grid: Size) -> str | None:
            return next((who for who, count in owners.items() if rows - count == grid[0] * grid[1]), None)

        for where, (height, width) in sizes:
            who = fits((height // down, width // across)) if height % down == width % across == 0 else None
            if who:
                return (height, width), who, where
        for who, count in owners.items():
            side = math.isqrt(max(0, rows - count))
            if side and side**2 == rows - count:
                return (side * down, side * across), who, "shapes"
        raise CheckpointError(
            f"{shapes.source}: its {rows} positions are not a square grid; pass the image size that they were made "
            "for, as in image_size=(height, width)"
        )
    if told["position"] == "relative_bias":
        rows = shapes["blocks.0.attn.relative_bias.table"][0] - 3 * (prefix > 0)
        for where, (height, width) in sizes:
            if (2 * (height // down) - 1) * (2 * (width // across) - 1) == rows:
                return (height, width), "all", where
        side = math.isqrt(max(0, rows))
        if side**2 == rows and side % 2:
            return ((side + 1) // 2 * down, (side + 1) // 2 * across), "all", "shapes"
        raise CheckpointError(
            f"{shapes.source}: its {rows} relative positions are not of a square grid; pass the image size that they "
            "were made for, as in image_size=(height, width)"
        )
    where, size = sizes[0] if sizes else ("a usual size", (224 // down * down, 224 // across * across))
    return size, "all", where


def _pair(size: Any) -> Size:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)


# timm's config.json

TIMM_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "swiglu"}


def timm_hints(config: Mapping[str, Any], name: str | None, shapes: Shapes) -> dict[str, Any]:
    hints = {} if name is None else open_settings(name, LEFT_OPEN)
    gated = "blocks.0.mlp.gate_and_up.weight" in shapes
    if not gated and hints.get("mlp") == "swiglu":  # which model_args may take away
        hints["mlp"] = "gelu"
    arguments = config.get("model_args") or {}
    hints |= _settings_in_arguments(arguments, {} if name is None else settings_of(name))
    pooling = arguments.get("global_pool") or config.get("global_pool") or "token"
    if pooling not in ("token", "avg", "map") or (pooling == "map" and "attention_pool.query" not in shapes):
        without = " without the tensors for it" if pooling == "map" else ""
        raise PatchlightError(f"config.json says global_pool={pooling!r}{without}, which is not supported")
    activation = arguments.get("act_layer")
    if activation is not None and (activation not in TIMM_ACTIVATIONS or (activation == "silu") != gated):
        kind = " in an MLP without a gate" if activation == "silu" else " in a gated MLP" if gated else ""
        raise PatchlightError(f"config.json says act_layer={activation!r}{kind}, which is not supported")
    size = arguments.get("img_size") or (config.get("pretrained_cfg") or {}).get("input_size", [None])[1:]
    given = {
        "num_heads": arguments.get("num_heads"),
        "image_size": size or None,
        "mlp": TIMM_ACTIVATIONS.get(str(activation)),
        "pooling": {"avg": "mean"}.get(pooling) or ("cls" if arguments.get("global_pool") == "token" else None),
    }
    return hints | {name: value for name, value in given.items() if value is not None}


def _refuse_partial_pooling(config: ViTConfig, evidence: Evidence) -> None:
    """Of timm's ViTs that pool by attention, most leave prefix tokens out of it, and no tensor tells; those with
    rotations never do."""
    told = (evidence.found.config.get("model_args") or {}).get("pool_include_prefix")
    if told is None and evidence.name is not None:  # one that leaves them out is refused by its name
        usual = settings_of(evidence.name)
        told = usual["pooling"] == "attention" and (usual["class_token"] or usual["num_registers"] > 0)
    if not told and not config.is_rotary and config.pooling == "attention" and config.num_prefix:
        raise CheckpointError(
            f"{evidence.source}: it pools by attention, with {config.num_prefix} tokens in front of its patches; timm "
            "leaves them out of the pooling, which is not supported (only pool_include_prefix=True in model_args)"
        )


def _refuse_uneven_size(size: Any, patch_size: Size, source: str) -> None:
    """Refuse image sizes that patches do not divide: timm's convolution drops the remaining pixels."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    whole = tuple(side // patch * patch for side, patch in zip(sides, patch_size, strict=True))
    if whole != sides:
        raise CheckpointError(
            f"{source}: patches of {patch_size[0]}x{patch_size[1]} do not divide its images of {sides[0]}x{sides[1]} "
            f"(img_size), of which timm passes over the last pixels; image_size={whole} takes smaller photos instead"
        )


# What these arguments of timm's ViTs say, and no tensor does.
TIMM_ARGUMENTS = frozenset(
    {
        "pos_embed",
        "use_rot_pos_emb",
        "rope_type",
        "rope_temperature",
        "rope_grid_indexing",
        "rope_rotate_half",
        "ref_feat_shape",
        "use_post_norm",
        "pool_include_prefix",
        "attn_pool_num_heads",
        "num_kv_heads",
    }
)


def _settings_in_arguments(arguments: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """What timm's model_args say beyond the tensors; `usual`: the architecture's own settings."""
    check_arguments(arguments, TIMM_ARGUMENTS)
    told: dict[str, Any] = {}
    for name in ("attn_pool_num_heads", "num_kv_heads"):
        if arguments.get(name) not in (None, arguments.get("num_heads", usual.get("num_heads"))):
            raise argument_error(f"{name}={arguments[name]!r}")
    if usual.get("distill_token") and arguments.get("fc_norm"):  # which timm makes, and never calls
        raise argument_error(f"fc_norm={arguments['fc_norm']!r} with a distillation token")
    pooling = {"cls": "token", "mean": "avg", "attention": "map"}.get(usual.get("pooling", ""))
    if arguments.get("pool_include_prefix") and arguments.get("global_pool", pooling) == "avg":
        raise argument_error("pool_include_prefix=True with global_pool='avg'")
    if arguments.get("norm_layer"):
        told["norm_eps"] = 1e-6  # timm's own default
    if arguments.get("no_embed_class") is not None:
        told["prefix_positions"] = "none" if arguments["no_embed_class"] else "all"
    if arguments.get("use_post_norm") is not None:
        told["block_norm"] = "after" if arguments["use_post_norm"] else "before"
    if arguments.get("pos_embed") in ("none", "") or _false(arguments, "use_abs_pos_emb", "use_rot_pos_emb"):
        told["position"] = "none"
    elif _false(arguments, "use_rot_pos_emb"):
        told["position"] = "learned"
    return told | _rope(arguments, usual)


def _false(arguments: Mapping[str, Any], *names: str) -> bool:
    return all(arguments.get(name) is False for name in names)


def _rope(arguments: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotations; combinations that no published model uses are refused."""
    given = {name: value for name, value in arguments.items() if name in _ROPE}
    position = str(usual.get("position", ""))
    rotates = arguments.get("use_rot_pos_emb", position.startswith("rope"))
    if not rotates or not (given or "use_rot_pos_emb" in arguments):
        return {}
    centred, grid = usual.get("rope_coordinates") == "centred", usual.get("rope_grid")
    values: dict[str, Any] = {
        "rope_type": "dinov3" if centred else "mixed" if position == "rope_mixed" else "cat",
        "rope_grid_indexing": "ij" if centred or grid or not position.startswith("rope") else "xy",
        "rope_rotate_half": centred,
        "ref_feat_shape": grid,
        "rope_temperature": usual.get("rope_base") if position.startswith("rope") else 10_000.0,
    } | given
    kind, grid = values["rope_type"], values["ref_feat_shape"]
    ours = {
        "cat": ("ij" if grid else "xy", False),
        "mixed": ("xy", False),
        "dinov3": ("ij", True),
    }
    if ours.get(kind) != (values["rope_grid_indexing"], bool(values["rope_rotate_half"])):
        raise argument_error(" with ".join(f"{name}={values[name]!r}" for name in _ROPE if name in values))
    told: dict[str, Any] = {}
    if kind in ("cat", "dinov3"):
        told["position"] = "rope2d"
        told["rope_coordinates"] = "centred" if kind == "dinov3" else "index"
        told["rope_grid"] = (
            None if not grid or kind == "dinov3" else (grid, grid) if isinstance(grid, int) else tuple(grid)
        )
    if values.get("rope_temperature"):
        told["rope_base"] = float(values["rope_temperature"])
    return told


_ROPE = ("rope_type", "rope_grid_indexing", "rope_rotate_half", "ref_feat_shape", "rope_temperature")


# transformers' config.json


def _vit(norm_eps: float, heads: int = 12, act: str = "gelu", **more: Any) -> ModelType:
    own = {"num_attention_heads": heads, "hidden_act": act, "layer_norm_eps": norm_eps, "image_size": 224}
    return ModelType(defaults=own | more.pop("defaults", {}), told={"position": "learned", "pooling": "cls"} | more)


_POSITIONS: dict[str, Any] = {
    "use_absolute_position_embeddings": False,
    "use_relative_position_bias": False,
    "use_shared_relative_position_bias": False,
    "use_mean_pooling": True,
}
_BEIT = ModelType(defaults={**_vit(1e-12).defaults, **_POSITIONS})
MODEL_TYPES: dict[str, ModelType] = {
    "vit": _vit(1e-12),
    "deit": _vit(1e-12),
    "vit_mae": _vit(1e-12),
    "vit_msn": _vit(1e-6),
    "ijepa": _vit(1e-12, pooling="mean"),
    "beit": _BEIT,
    "data2vec-vision": _BEIT,
    "dinov2": _vit(1e-6),
    "dinov2_with_registers": _vit(1e-6),
    "dinov3_vit": _vit(1e-5, 6, defaults={"rope_theta": 100.0}, position="rope2d", rope_coordinates="centred"),
    **dict.fromkeys(
        (
            "clip_vision_model",
            "chinese_clip_vision_model",
            "altclip_vision_model",
            "clipseg_vision_model",
            "git_vision_model",
            "metaclip_2_vision_model",
        ),
        _vit(1e-5, act="quick_gelu"),
    ),
    "siglip_vision_model": _vit(1e-6, act="gelu_pytorch_tanh", pooling="mean"),  # where no tensors pool otherwise
}


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


def transformers_hints(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    source, tensors = shapes.source, {*shapes, *shapes.theirs}
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
    return hints


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
            "columns; only squares are supported"
        )
    position = "relative_bias" if relative else "learned" if table else "none"
    # With the mean it is the pooler that normalises, and models without one do not.
    return {"position": position, "pooling": "mean" if mean else "cls", "final_norm": "none" if mean else None}


# Other sizes


def change_sizes(own: ViTConfig, asked: ViTConfig, notes: list[str]) -> ViTConfig:
    """Note what becomes of patches and positions, or refuse it."""
    if asked.patch_size != own.patch_size:
        if own.stem != "patchify":
            raise PatchlightError(f"patch_size={asked.patch_size}: the patches of stem={own.stem!r} cannot be resized")
        notes.append(f"resized the patch projection from {_size(own.patch_size)} to {_size(asked.patch_size)}")
    if asked.grid != own.grid and (own.has_position_table or own.position == "relative_bias"):
        sizes = _size(own.image_size), _size(asked.image_size)
        how = (
            f"{sizes[0]} to {sizes[1]}" if sizes[0] != sizes[1] else f"{_size(own.grid)} to {_size(asked.grid)} patches"
        )
        notes.append(f"resampled positions from {how}")
    return asked


def _size(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def fit(state: State, own: ViTConfig, config: ViTConfig, origin: Origin, notes: list[str], _: str) -> State:
    if origin.name == "timm" and config.is_rotary and config.rope_coordinates == "index":
        state = reorder_rope(state, config)
    if config.pooling != "attention" and "attention_pool.query" in state:
        state = {key: value for key, value in state.items() if not key.startswith("attention_pool.")}
        notes.append(f"left out its attention pooling, which is not read with pooling={config.pooling!r}")
    _resize_patches(state, own, config)
    _resample_positions(state, own, config)
    return state


def not_read(config: ViTConfig) -> Collection[str]:
    return ("norm.weight", "norm.bias") if config.final_norm == "none" else ()


def _resize_patches(state: State, own: ViTConfig, config: ViTConfig) -> None:
    if own.patch_size != config.patch_size:
        key, (down, across), stride = "patch_embed.proj.weight", config.patch_size, config.resnet_stride
        state[key] = resize_projection(state[key], (down // stride, across // stride))


def _resample_positions(state: State, own: ViTConfig, config: ViTConfig) -> None:
    if own.grid == config.grid:
        return
    for key, table in state.items():
        if key == "positions.table":
            prefix, rows = table.tensor_split([own.num_prefix_positions])
            state[key] = torch.cat([prefix, resample(rows, own.grid, config.grid, config.position_resampling)])
        elif key.endswith(".relative_bias.table"):
            old, new = ((2 * h - 1, 2 * w - 1) for h, w in (own.grid, config.grid))
            rows, prefix = table.tensor_split([old[0] * old[1]])
            state[key] = torch.cat([resample(rows, old, new, config.position_resampling), prefix])
