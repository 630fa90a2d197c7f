"""What a checkpoint is: whose naming it has, where in it the encoder lies, and the config that its tensors tell.

Shapes tell most settings. What they cannot tell comes, in this order, from the caller, the config file beside the
checkpoint, the catalogue, and the convention of its origin; `why` records which, setting by setting.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from patchlight.config import Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig
from patchlight.weights import convert_convnext, convert_swin
from patchlight.weights.convert import ORIGINS as VIT_ORIGINS
from patchlight.weights.convert import Origin, State
from patchlight.weights.read import CheckpointError

# A plain ViT's marks are the fewest, so that others are looked for first.
ORIGINS: tuple[Origin, ...] = (*convert_swin.ORIGINS, *convert_convnext.ORIGINS, *VIT_ORIGINS)

# Where a checkpoint holds several encoders, the better one by its authors' account comes first.
PREFERENCE = ("teacher", "ema", "target_encoder", "model", "backbone", "student")

# What stands around weights that are a moving average of those that were trained: model_ema, teacher.backbone, ...
AVERAGED = re.compile(r"(?<![a-z])(teacher|ema|target|momentum|averaged|swa)(?![a-z])")

# Heads are 64 wide, except in the giants.
HEADS_BY_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}

# Classifiers that stand beside the encoder, not in it.
OUTSIDE_HEADS = ("classifier.", "cls_classifier.", "distillation_classifier.", "visual_projection.")


@dataclass(frozen=True)
class Recognised:
    """An encoder found in a checkpoint."""

    origin: Origin
    prefix: str
    """What stands in front of the encoder's names, such as `module.backbone.`."""
    state: State
    """The encoder's tensors, and its heads', under their own names without the prefix."""
    shapes: dict[str, tuple[int, ...]]
    """Their shapes, which stay when `convert` takes the tensors."""
    beside: list[str]
    """Keys of everything else in the file."""
    choice: str | None = None
    """Where the file holds both trained and averaged weights: which these are, and how to get the others."""


@dataclass(frozen=True)
class Reading:
    """A config and where each of its settings came from."""

    config: ModelConfig
    why: dict[str, str]
    notes: tuple[str, ...] = ()
    """What its config file leaves to be said."""
    warnings: tuple[str, ...] = ()
    """What was guessed, and may be wrong."""


def recognise(tensors: Mapping[str, Tensor], source: str, weights: str | None = None) -> Recognised:
    """Find the encoder, whatever wrappers (DDP, compile, Lightning, EMA, teacher and student) stand around it.

    Of trained weights ("model") and their moving average ("ema") `weights` says which to take; None takes the average
    where there is one.
    """
    for origin in ORIGINS:
        first = origin.marks[0]
        prefixes = [key.removesuffix(first) for key in tensors if key.endswith(first)]
        prefixes = [prefix for prefix in prefixes if all(prefix + mark in tensors for mark in origin.marks)]
        prefixes = [prefix for prefix in prefixes if prefix == "" or prefix[-1] in "./"]
        if not prefixes:
            continue
        prefix, choice = _choose(prefixes, weights, source)
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        parent = prefix.removesuffix(prefix.split(".")[-2] + ".") if prefix.count(".") else ""
        outside = [key for key in tensors if not key.startswith(prefix)]
        elsewhere = OUTSIDE_HEADS + _outside_parts(origin, state)
        heads = [key for key in outside if key.startswith(tuple(parent + part for part in elsewhere))]
        state |= {key.removeprefix(parent): tensors[key] for key in heads}
        beside = [key for key in outside if key not in heads]
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        return Recognised(origin, prefix, state, shapes, beside, choice)
    known = ", ".join(dict.fromkeys(origin.name for origin in VIT_ORIGINS)) + "; also Swin, ConvNeXt"
    names = ", ".join(sorted(tensors)[:3]) + (", ..." if len(tensors) > 3 else "")
    raise CheckpointError(f"{source}: no ViT that we know is in it (tensors: {names or 'none'}; known: {known})")


def _choose(prefixes: list[str], weights: str | None, source: str) -> tuple[str, str | None]:
    """The encoder to take, by what stands before its names, and what to say where both kinds of weights are there."""
    of_kind: dict[str, list[str]] = {"model": [], "ema": []}
    for prefix in sorted(prefixes, key=_rank):
        of_kind["ema" if AVERAGED.search(prefix.lower()) else "model"].append(prefix)
    if weights is not None and not of_kind[weights]:
        lies = f"below {min(prefixes, key=_rank)!r}" if min(prefixes, key=_rank) else "at its top"
        missing = "no averaged weights are" if weights == "ema" else "nothing but averaged weights is"
        raise CheckpointError(f"{source}: weights={weights!r}: {missing} in it ({lies}); leave weights= out")
    best = min(of_kind[weights] if weights else prefixes, key=_rank)
    if not (of_kind["model"] and of_kind["ema"]):
        return best, None
    taken, other = ("ema", "model") if best in of_kind["ema"] else ("model", "ema")
    called = {"ema": "averaged (EMA)", "model": "trained"}
    return best, f"took the {called[taken]} weights; weights={other!r} takes the {called[other]} ones beside them"


def _outside_parts(origin: Origin, state: State) -> tuple[str, ...]:
    """Of transformers, what belongs to the encoder and lies beside it: blocks (ViT-MSN), the last norm (BEiT)."""
    if origin.name != "transformers" or origin.architecture != "vit":
        return ()
    blocks = any(re.match(r"(encoder\.)?layers?\.", key) for key in state)
    norm = "layernorm.weight" in state or "pooler.layernorm.weight" in state
    return ("layernorm.",) * (not norm) + ("encoder.layer.",) * (not blocks)


def _rank(prefix: str) -> tuple[int, int]:
    wrappers = prefix.lower()
    found = [rank for rank, word in enumerate(PREFERENCE) if word in wrappers]
    return (min(found, default=len(PREFERENCE)) if wrappers else len(PREFERENCE)), len(prefix)


def read_config(
    state: Mapping[str, Tensor],
    found: Recognised,
    hints: Sequence[tuple[str, Mapping[str, Any]]],
    overrides: Mapping[str, Any],
    source: str,
) -> Reading:
    """The config of a checkpoint in our names, from its shapes and then from `hints`: (where from, settings)."""
    told = settings_from_shapes(state, found, source)
    why = dict.fromkeys(told, "shapes")
    sources = [("you", overrides), *hints, (f"convention of {found.origin.name}", _conventions(told, found))]
    for where, settings in sources:
        for name, value in settings.items():
            if name not in told:
                told[name], why[name] = value, where
            elif why[name] == "shapes" and value != told[name] and where != "you" and name in FIXED_BY_TENSORS:
                raise CheckpointError(f"{source}: {where} says {name}={value!r}, but its tensors have {told[name]!r}")
    for name in sorted(set(overrides) & FIXED_BY_TENSORS):
        if why[name] == "shapes" and overrides[name] != told[name]:
            raise CheckpointError(
                f"{source}: {name}={overrides[name]!r} was asked for, but its tensors have {told[name]!r}"
            )
    has_table = "positions.table" in state
    if "position" not in told and has_table:
        told["position"], why["position"] = "learned", "shapes"
    if "position" not in told:
        raise CheckpointError(f"{source}: no positions are in it; if there are none to be, say position='none'")
    _refuse_ambiguous(told, found, source)
    image_size, prefix_positions, where = _grid(state, told, [*hints, *sources[:1], *sources[-1:]], source)
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
        return Reading(ViTConfig(**told), why)
    except PatchlightError as error:
        raise CheckpointError(f"{source}: {error}") from None


def check_config(
    state: Mapping[str, Tensor], found: Recognised, settings: Mapping[str, Any], where: str, source: str
) -> None:
    """Refuse settings that the tensors contradict, before a model of a false size is made."""
    told = settings_from_shapes(state, found, source)
    for name in sorted(FIXED_BY_TENSORS & set(settings)):
        value = tuple(settings[name]) if isinstance(settings[name], list) else settings[name]
        if value != told[name]:
            raise CheckpointError(f"{source}: {where} says {name}={value!r}, but its tensors have {told[name]!r}")


def _refuse_ambiguous(told: Mapping[str, Any], found: Recognised, source: str) -> None:
    """Refuse tensors that two different computations of timm have under the same names, unless somebody said which."""
    if found.origin.name != "timm":
        return
    bare = told["layer_scale"] is None and "block_norm" not in told
    relative = told["position"] in ("relative_bias", "relative_mlp") and "blocks.0.attn.q_bias" not in found.shapes
    if bare and (relative or not (told["class_token"] or told["qkv_bias"])):
        raise CheckpointError(
            f"{source}: its tensors do not tell whether blocks normalise before or after each branch; say "
            "block_norm='after' for timm's models with rpn in their name, else block_norm='before'"
        )
    if told["embed_norm"] and told.get("pooling") == "attention" and "norm_pre.weight" in found.shapes:
        raise CheckpointError(f"{source}: it looks like a Perception Encoder, which is not supported")


# Settings that tensors decide, so that nothing else may contradict them.
FIXED_BY_TENSORS = frozenset({"width", "depth", "stem", "patch_size", "in_channels", "num_registers", "class_token"})


def settings_from_shapes(state: Mapping[str, Tensor], found: Recognised, source: str) -> dict[str, Any]:
    def shape(key: str, ndim: int) -> tuple[int, ...]:
        if key not in state:
            raise CheckpointError(f"{source}: tensor for {key!r} is missing (read as {found.origin.name})")
        if state[key].ndim != ndim:
            raise CheckpointError(f"{source}: tensor for {key!r} has shape {tuple(state[key].shape)}, not {ndim} axes")
        return tuple(state[key].shape)

    if "blocks.0.norm1.weight" in state and not any(".norm1.bias" in key for key in state):
        raise CheckpointError(f"{source}: its norms have no bias, as RMS norms have none; only LayerNorm is supported")
    stem, resnet = "patchify", None
    convs = sum(key.startswith("patch_embed.convs.") and key.endswith(".weight") for key in state)
    if convs:
        stem, down, across = "convolutions", 2**convs, 2**convs
        width = shape(f"patch_embed.convs.{convs - 1}.weight", 4)[0]
        channels = shape("patch_embed.convs.0.weight", 4)[1]
    else:
        width, channels, down, across = shape("patch_embed.proj.weight", 4)
    if "patch_embed.resnet.conv.weight" in state:
        channels = shape("patch_embed.resnet.conv.weight", 4)[1]
        parts = [key.split(".") for key in state if key.startswith("patch_embed.resnet.stages.")]
        resnet = tuple(len({part[4] for part in parts if part[3] == str(stage)}) for stage in range(4))
        resnet = tuple(itertools.takewhile(bool, resnet))
        stride = 4 * 2 ** max(0, len(resnet) - 1)
        down, across = stride * down, stride * across
    blocks = {key.split(".")[1] for key in state if key.startswith("blocks.")}
    told: dict[str, Any] = {
        "width": width,
        "in_channels": channels,
        "stem": stem,
        "patch_size": (down, across),
        "resnet": resnet,
        # Up to the first gap: what comes after it is unexpected, and a huge number cannot ask for as many blocks.
        "depth": next(number for number in itertools.count() if str(number) not in blocks),
        "patch_bias": "patch_embed.proj.bias" in state or "patch_embed.convs.0.bias" in state,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "embed_norm": "embed_norm.weight" in state,
        "inner_norm": "both" if "blocks.0.attn.norm.weight" in state else "none",
        "layer_scale": 1e-5 if "blocks.0.residual1.scale" in state else None,
        "class_token": "class_token" in state,
        "distill_token": "distill_token" in state,
        "num_registers": shape("registers", 2)[0] if "registers" in state else 0,
        "num_classes": shape("head.out.weight", 2)[0] if "head.out.weight" in state else 0,
        "head_hidden": shape("head.hidden.weight", 2)[0] if "head.hidden.weight" in state else 0,
    }
    if "norm.weight" in state:
        pooled = {"fc_norm.weight", "pooler.layernorm.weight"} & set(found.shapes)
        told["final_norm"] = "pooled" if pooled else "tokens"
    if "blocks.0.mlp.norm.weight" in state and told["inner_norm"] == "none":
        told["inner_norm"] = "mlp"
    if not told["num_classes"]:
        told["head_hidden"] = 0  # a hidden layer without a classifier is of no use
    if "blocks.0.mlp.gate_and_up.weight" in state:
        told |= {"mlp": "swiglu", "mlp_dim": shape("blocks.0.mlp.gate_and_up.weight", 2)[0] // 2}
    else:
        told["mlp_dim"] = shape("blocks.0.mlp.up.weight", 2)[0]
    if told["mlp_dim"] == 4 * width:
        told["mlp_dim"] = None
    if "blocks.0.attn.rope.frequencies" in state:
        told["position"] = "rope_mixed"
        told["num_heads"] = shape("blocks.0.attn.rope.frequencies", 3)[1]
    elif "blocks.0.attn.relative_bias.table" in state:
        told["position"] = "relative_bias"
        told["num_heads"] = shape("blocks.0.attn.relative_bias.table", 2)[1]
    elif "blocks.0.attn.relative_bias.out.weight" in state:
        told["position"] = "relative_mlp"
        told["num_heads"], told["relative_hidden"] = shape("blocks.0.attn.relative_bias.out.weight", 2)
    if "blocks.0.attn.q_norm.weight" in state:
        told["num_heads"] = width // max(1, shape("blocks.0.attn.q_norm.weight", 1)[0])
    if "rope_embed.periods" in found.shapes:  # a quarter of a head's width
        told["num_heads"] = width // max(1, 4 * found.shapes["rope_embed.periods"][0])
    for key, sizes in found.shapes.items():
        if key.endswith("/query/kernel") and len(sizes) == 3:  # in, heads, each head's width
            told["num_heads"] = sizes[1]
    if told["num_classes"] and not told["head_hidden"] and shape("head.out.weight", 2)[1] == 2 * width:
        told["pooling"] = "cls_mean"
    if "attention_pool.query" in state:
        told["pooling"] = "attention"
    if "classifier.weight" in found.shapes and found.origin.name in ("transformers CLIP", "transformers SigLIP"):
        told["pooling"] = "mean"  # whatever else is in it
        if found.origin.name == "transformers CLIP":
            told["final_norm"] = "none"
    return told


def _conventions(told: Mapping[str, Any], found: Recognised) -> dict[str, Any]:
    """What the origin's authors take for granted."""
    width = told["width"]
    conventions: dict[str, Any] = {
        "num_heads": HEADS_BY_WIDTH.get(width, max(1, width // 64)),
        "norm_eps": 1e-6,
        "mlp": "gelu",
        "pooling": "cls" if told["class_token"] and told.get("final_norm") == "tokens" else "mean",
        "final_norm": "tokens",
    }
    # Models of transformers, and DINOv2 as published (it comes with a mask token), except with registers.
    registers = told["num_registers"] and "embeddings.distillation_token" not in found.shapes
    if (found.origin.name.startswith("transformers") or "mask_token" in found.shapes) and not registers:
        relative = told.get("position") == "relative_bias"
        conventions["position_resampling"] = "linear" if relative else "plain"
    # Of the models that come without a table of positions, those with a LayerScale of this name use RoPE, and those of
    # them with a class token and registers measure from the centre (DINOv3).
    has_table, apart = "pos_embed" in found.shapes, {"blocks.0.attn.q_bias", "blocks.0.attn.q_proj.weight"}
    counted = {"position": "rope2d", "rope_base": 10_000.0, "rope_grid": (16, 16)}
    if has_table and told.get("mlp") == "swiglu" and apart & set(found.shapes):
        conventions |= counted  # EVA-02
    elif has_table and "blocks.0.gamma_1" in found.shapes:
        conventions["position"] = "learned"  # DeiT III by its authors; a RoPE model may look the same
    elif not has_table and ("blocks.0.gamma_1" in found.shapes or "rope_embed.periods" in found.shapes):
        conventions["position"] = "rope2d"
        if told["class_token"] and told["num_registers"]:
            conventions |= {"rope_coordinates": "centred", "norm_eps": 1e-5}
            if found.origin.name == "timm" and not told["qkv_bias"]:  # other models of timm with RoPE have one
                conventions["pooling"] = "mean"
        elif told["num_registers"]:
            conventions |= counted
    conventions |= found.origin.conventions
    if "layers.0.layer_scale1.lambda1" in found.shapes or "encoder.layer.0.layer_scale1.lambda1" in found.shapes:
        conventions["norm_eps"] = 1e-6  # DINOv2 in transformers
    return conventions


def _grid(
    state: Mapping[str, Tensor], told: Mapping[str, Any], sources: Sequence[tuple[str, Mapping[str, Any]]], source: str
) -> tuple[Size, str, str]:
    """The image size that the positions were made for, which prefix tokens own rows, and where that came from."""
    down, across = told["patch_size"]
    sizes = [
        (where, _pair(settings["image_size"])) for where, settings in sources if settings.get("image_size") is not None
    ]
    prefix = told["class_token"] + told["distill_token"] + told["num_registers"]
    if "positions.table" in state:
        rows = len(state["positions.table"])
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
            f"{source}: its {rows} positions are not a square grid; say the image size that they were made for, "
            f"as in image_size=(height, width)"
        )
    if told["position"] == "relative_bias":
        rows = len(state["blocks.0.attn.relative_bias.table"]) - 3 * (prefix > 0)
        for where, (height, width) in sizes:
            if (2 * (height // down) - 1) * (2 * (width // across) - 1) == rows:
                return (height, width), "all", where
        side = math.isqrt(max(0, rows))
        if side**2 == rows and side % 2:
            return ((side + 1) // 2 * down, (side + 1) // 2 * across), "all", "shapes"
        raise CheckpointError(
            f"{source}: its {rows} relative positions are not of a square grid; say the image size that they were made "
            f"for, as in image_size=(height, width)"
        )
    where, size = sizes[0] if sizes else ("a usual size", (224 // down * down, 224 // across * across))
    return size, "all", where


def _pair(size: Any) -> Size:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
