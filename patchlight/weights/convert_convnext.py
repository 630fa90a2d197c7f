"""ConvNeXt checkpoints: the names that timm, transformers and its authors give the tensors, and what the shapes tell.

Our blocks are counted over all stages, theirs within each; otherwise the tables of names are as in `convert`.
"""

import re
from collections.abc import Mapping
from typing import Any

from patchlight.errors import PatchlightError
from patchlight.families import ConvNeXtConfig
from patchlight.weights.convert import Origin, State, convert_to, refuse
from patchlight.weights.convert_swin import staged
from patchlight.weights.names import Names
from patchlight.weights.read import CheckpointError
from patchlight.weights.timm_architectures import name_of, open_settings
from patchlight.weights.timm_arguments import check_arguments
from patchlight.weights.timm_arguments import refuse as refuse_argument
from patchlight.weights.transformers_configs import Keys, activation

OURS: Names = tuple((part, part) for part in ("stem.", "blocks.", "merges.", "norm.", "head."))

TIMM: Names = (
    ("stem.0.", "stem.conv."),
    ("stem.1.", "stem.norm."),
    ("merges.{}.0.", "merges.{}.norm."),
    ("merges.{}.1.", "merges.{}.conv."),
    ("head.norm.", "norm."),
    ("head.fc.", "head."),
    ("blocks.{}.conv_dw.", "blocks.{}.conv."),
    ("blocks.{}.norm.", "blocks.{}.norm."),
    ("blocks.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.grn.", "blocks.{}.mlp.grn."),
    ("blocks.{}.mlp.fc2.", "blocks.{}.mlp.down."),
    ("blocks.{}.gamma", "blocks.{}.residual.scale"),
)

TRANSFORMERS: Names = (
    ("embeddings.patch_embeddings.", "stem.conv."),
    ("embeddings.layernorm.", "stem.norm."),
    ("merges.{}.0.", "merges.{}.norm."),
    ("merges.{}.1.", "merges.{}.conv."),
    ("layernorm.", "norm."),
    ("classifier.", "head."),
    ("blocks.{}.dwconv.", "blocks.{}.conv."),
    ("blocks.{}.layernorm.", "blocks.{}.norm."),
    ("blocks.{}.pwconv1.", "blocks.{}.mlp.up."),
    ("blocks.{}.grn.", "blocks.{}.mlp.grn."),
    ("blocks.{}.pwconv2.", "blocks.{}.mlp.down."),
    ("blocks.{}.layer_scale_parameter", "blocks.{}.residual.scale"),
)

AUTHORS: Names = (
    ("merges.-1.0.", "stem.conv."),
    ("merges.-1.1.", "stem.norm."),
    ("merges.{}.0.", "merges.{}.norm."),
    ("merges.{}.1.", "merges.{}.conv."),
    ("norm.", "norm."),
    ("head.", "head."),
    ("blocks.{}.dwconv.", "blocks.{}.conv."),
    ("blocks.{}.norm.", "blocks.{}.norm."),
    ("blocks.{}.pwconv1.", "blocks.{}.mlp.up."),
    ("blocks.{}.grn.gamma", "blocks.{}.mlp.grn.weight"),
    ("blocks.{}.grn.beta", "blocks.{}.mlp.grn.bias"),
    ("blocks.{}.pwconv2.", "blocks.{}.mlp.down."),
    ("blocks.{}.gamma", "blocks.{}.residual.scale"),
)

_BLOCK = r"(?:encoder\.)?stages\.(\d+)\.(?:blocks\.|layers\.)?(\d+)\."
_MERGE = r"(?:(?:encoder\.)?stages\.(\d+)\.(?:downsample|downsampling_layer)|downsample_layers\.(\d+))\."


def _prepare(state: State) -> State:
    """Blocks counted over all stages; linear layers that are kept as 1 x 1 convolutions, and flat norms over images."""
    counts: dict[int, int] = {}
    for key in state:
        if match := re.match(_BLOCK, key):
            counts[int(match[1])] = max(counts.get(int(match[1]), 0), int(match[2]) + 1)

    def rename(key: str) -> str:
        if match := re.match(_BLOCK, key):
            before = sum(count for stage, count in counts.items() if stage < int(match[1]))
            return f"blocks.{before + int(match[2])}.{key[match.end() :]}"
        if match := re.match(_MERGE, key):
            return f"merges.{int(match[1] or match[2]) - 1}.{key[match.end() :]}"
        return key

    prepared = {rename(key): value for key, value in state.items()}
    for key, value in prepared.items():
        if ".mlp.fc" in key and value.ndim == 4:
            prepared[key] = value.flatten(1)
        elif ".grn." in key:
            prepared[key] = value.flatten()
    return prepared


ORIGINS: tuple[Origin, ...] = (
    Origin(name="patchlight", architecture="convnext", marks=("stem.conv.weight", "blocks.0.conv.weight"), names=OURS),
    Origin(
        name="timm",
        architecture="convnext",
        marks=("stem.0.weight", "stages.0.blocks.0.conv_dw.weight"),
        names=TIMM,
        prepare=_prepare,
    ),
    Origin(
        name="transformers",
        architecture="convnext",
        marks=("embeddings.patch_embeddings.weight", "encoder.stages.0.layers.0.dwconv.weight"),
        names=TRANSFORMERS,
        conventions={"final_norm_eps": 1e-12},
        prepare=_prepare,
    ),
    Origin(
        name="ConvNeXt",
        architecture="convnext",
        marks=("downsample_layers.0.0.weight", "stages.0.0.dwconv.weight"),
        names=AUTHORS,
        left_out=((r"^mask_token$|^decoder|^pred\.|^proj\.", "the decoder of pre-training"),),
        prepare=_prepare,
    ),
)


# Tensors of timm's that ours has not.
UNSUPPORTED = {
    "stem.2.weight": "whose stem is two convolutions that overlap",
    "norm_pre.weight": "that normalises before it pools",
    "head.pre_logits.fc.weight": "with a hidden layer in its head",
}


def from_shapes(shapes: Mapping[str, tuple[int, ...]], source: str) -> dict[str, Any]:
    """The settings that tensors in our names tell."""
    for key, what in UNSUPPORTED.items():
        if key in shapes:
            raise CheckpointError(f"{source}: it is a ConvNeXt {what}, which is not supported")
    if "stem.norm.weight" in shapes and "stem.norm.bias" not in shapes:
        raise CheckpointError(f"{source}: its norms have no bias, as RMS norms have none; only LayerNorm is supported")
    width, channels, down, across = shapes["stem.conv.weight"]
    depth = next(n for n in range(len(shapes) + 1) if f"blocks.{n}.norm.weight" not in shapes)
    stages = 1 + next(n for n in range(len(shapes) + 1) if f"merges.{n}.conv.weight" not in shapes)
    widths = (width, *(shapes[f"merges.{n}.conv.weight"][0] for n in range(stages - 1)))
    blocks = [shapes[f"blocks.{n}.norm.weight"][0] for n in range(depth)]
    told: dict[str, Any] = {
        "widths": widths,
        "in_channels": channels,
        "patch_size": (down, across),
        "kernel_size": shapes["blocks.0.conv.weight"][2],
        "layer_scale": 1e-6 if "blocks.0.residual.scale" in shapes else None,
        "grn": "blocks.0.mlp.grn.weight" in shapes,
        "num_classes": shapes["head.weight"][0] if "head.weight" in shapes else 0,
    }
    if len(set(widths)) == stages:  # else two stages look alike, and only a config knows where one ends
        told["depths"] = tuple(blocks.count(each) for each in widths)
    return told


# Settings that tensors decide, so that nothing else may contradict them.
FIRM = frozenset({"widths", "depths", "patch_size", "in_channels", "kernel_size", "grn"})


def timm_hints(config: Mapping[str, Any]) -> dict[str, Any]:
    """What timm's config.json says beyond the shapes."""
    name = name_of(str(config.get("architecture")))
    hints = {} if name is None else open_settings(name)
    arguments = {name: value for name, value in (config.get("model_args") or {}).items() if value is not None}
    check_arguments(arguments)
    if arguments.get("patch_size", 4) > 4:  # so that output_stride=32 is reached early, and convolutions are dilated
        raise refuse_argument(f"patch_size={arguments['patch_size']!r}")
    activation = arguments.get("act_layer")
    if activation not in (None, "gelu", "gelu_tanh"):
        raise PatchlightError(f"config.json says act_layer={activation!r}, which we do not have")
    if "norm_eps" in arguments:
        hints |= {"norm_eps": arguments["norm_eps"], "final_norm_eps": arguments["norm_eps"]}
    given = {"depths": arguments.get("depths"), "mlp": activation}
    return hints | {name: value for name, value in given.items() if value is not None}


def transformers_hints(keys: Keys, source: str) -> dict[str, Any]:
    """What transformers' config.json says beyond the shapes, and of the shapes what must agree."""
    values = keys.values
    return {
        **keys.told,
        "mlp": activation(keys, ("gelu", "gelu_tanh"), source),
        "widths": values.get("hidden_sizes"),
        "depths": values.get("depths"),
        "image_size": values.get("image_size"),
        "final_norm_eps": values.get("layer_norm_eps"),
    }


def to_timm(config: ConvNeXtConfig, state: State) -> tuple[State, str, dict[str, Any]]:
    """Our state in timm's names, the architecture, and the arguments that make it."""
    patch = config.patch_size[0]
    refuse("timm", config, patch_size=(patch, patch), final_norm_eps=config.norm_eps)
    if len(config.depths) != 4:
        raise PatchlightError(f"depths={config.depths} cannot be written with layout='timm', which has 4 stages")
    theirs = staged(convert_to(state, TIMM), config, "stages.{}.blocks.{}.", "stages.{}.downsample.", 1)
    return (
        theirs,
        "convnext_tiny",
        {
            "in_chans": config.in_channels,
            "patch_size": config.patch_size[0],
            "depths": list(config.depths),
            "dims": list(config.widths),
            "kernel_sizes": config.kernel_size,
            "ls_init_value": config.layer_scale,
            "use_grn": config.grn,
            "norm_eps": config.norm_eps,
            "act_layer": config.mlp,
        },
    )


def to_transformers(config: ConvNeXtConfig, state: State) -> tuple[State, dict[str, Any]]:
    """Our state in transformers' names, and its config.json."""
    side, patch = config.image_size[0], config.patch_size[0]
    refuse("transformers", config, image_size=(side, side), patch_size=(patch, patch))
    refuse("transformers", config, kernel_size=7, norm_eps=1e-6, mlp="gelu")
    if config.grn:
        refuse("transformers", config, layer_scale=None)
    kind, prefix = ("ConvNextV2", "convnextv2") if config.grn else ("ConvNext", "convnext")
    theirs = convert_to(state, TRANSFORMERS)
    theirs = {key: value.view(1, 1, 1, -1) if ".grn." in key else value for key, value in theirs.items()}
    theirs = staged(theirs, config, "encoder.stages.{}.layers.{}.", "encoder.stages.{}.downsampling_layer.", 1)
    if config.num_classes:
        theirs = {key if key.startswith("classifier.") else f"{prefix}.{key}": value for key, value in theirs.items()}
    return theirs, {
        "model_type": prefix,
        "architectures": [f"{kind}ForImageClassification" if config.num_classes else f"{kind}Model"],
        "image_size": config.image_size[0],
        "patch_size": config.patch_size[0],
        "num_channels": config.in_channels,
        "num_stages": len(config.depths),
        "hidden_sizes": list(config.widths),
        "depths": list(config.depths),
        "hidden_act": "gelu",
        "layer_norm_eps": config.final_norm_eps,
        "layer_scale_init_value": config.layer_scale or 0.0,
        "drop_path_rate": 0.0,
        **({"num_labels": config.num_classes} if config.num_classes else {}),
    }
