"""ConvNeXt: the names that timm, transformers and its authors give the tensors, what tells its settings, and how to
write it for them."""

from collections.abc import Mapping
from typing import Any

from patchlight.errors import PatchlightError
from patchlight.families import ConvNeXtConfig
from patchlight.models.convnext import ConvNeXt
from patchlight.weights import staged
from patchlight.weights.convert import Names, Origin, State, convert_to, refuse
from patchlight.weights.family import Family, InTimm, InTransformers, Shapes
from patchlight.weights.read import CheckpointError
from patchlight.weights.timm_configs import argument_error, check_arguments, open_settings
from patchlight.weights.transformers_configs import Keys, ModelType, activation

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
    prepared = staged.count_over_stages(state, _BLOCK, _MERGE, first_merge=1)
    for key, value in prepared.items():
        if ".mlp.fc" in key and value.ndim == 4:
            prepared[key] = value.flatten(1)
        elif ".grn." in key:
            prepared[key] = value.flatten()
    return prepared


ORIGINS: tuple[Origin, ...] = (
    Origin(name="patchlight", marks=("stem.conv.weight", "blocks.0.conv.weight"), names=OURS),
    Origin(
        name="timm",
        marks=("stem.0.weight", "stages.0.blocks.0.conv_dw.weight"),
        names=TIMM,
        prepare=_prepare,
    ),
    Origin(
        name="transformers",
        marks=("embeddings.patch_embeddings.weight", "encoder.stages.0.layers.0.dwconv.weight"),
        names=TRANSFORMERS,
        conventions={"final_norm_eps": 1e-12},
        prepare=_prepare,
    ),
    Origin(
        name="ConvNeXt",
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


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    for key, what in UNSUPPORTED.items():
        if key in shapes:
            raise CheckpointError(f"{shapes.source}: it is a ConvNeXt {what}, which is not supported")
    if "stem.norm.weight" in shapes and "stem.norm.bias" not in shapes:
        raise CheckpointError(
            f"{shapes.source}: its norms have no bias, as RMS norms have none; only LayerNorm is supported"
        )
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


def _timm_hints(config: Mapping[str, Any], name: str | None, _: Shapes) -> dict[str, Any]:
    hints = {} if name is None else open_settings(name, LEFT_OPEN)
    arguments = {name: value for name, value in (config.get("model_args") or {}).items() if value is not None}
    check_arguments(arguments)
    if arguments.get("patch_size", 4) > 4:  # so that output_stride=32 is reached early, and convolutions are dilated
        raise argument_error(f"patch_size={arguments['patch_size']!r}")
    activation = arguments.get("act_layer")
    if activation not in (None, "gelu", "gelu_tanh"):
        raise PatchlightError(f"config.json says act_layer={activation!r}, which is not supported")
    if "norm_eps" in arguments:
        hints |= {"norm_eps": arguments["norm_eps"], "final_norm_eps": arguments["norm_eps"]}
    given = {"depths": arguments.get("depths"), "mlp": activation}
    return staged.timm_hints(config, hints | {name: value for name, value in given.items() if value is not None})


def _transformers_hints(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    values = keys.values
    return {
        **keys.told,
        "mlp": activation(keys, ("gelu", "gelu_tanh"), shapes.source),
        "widths": values.get("hidden_sizes"),
        "depths": values.get("depths"),
        "image_size": values.get("image_size"),
        "final_norm_eps": values.get("layer_norm_eps"),
    }


def _to_timm(config: ConvNeXtConfig, state: State) -> InTimm:
    patch = config.patch_size[0]
    refuse("timm", config, patch_size=(patch, patch), final_norm_eps=config.norm_eps)
    if len(config.depths) != 4:
        raise PatchlightError(f"depths={config.depths} cannot be written with layout='timm', which has 4 stages")
    theirs = convert_to(state, TIMM)
    return InTimm(
        config,
        staged.count_within_stages(theirs, config, "stages.{}.blocks.{}.", "stages.{}.downsample.", 1),
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
        first_conv="stem.0",
        classifier="head.fc",
    )


def _to_transformers(config: ConvNeXtConfig, state: State) -> InTransformers:
    side, patch = config.image_size[0], config.patch_size[0]
    refuse("transformers", config, image_size=(side, side), patch_size=(patch, patch))
    refuse("transformers", config, kernel_size=7, norm_eps=1e-6, mlp="gelu")
    if config.grn:
        refuse("transformers", config, layer_scale=None)
    kind, prefix = ("ConvNextV2", "convnextv2") if config.grn else ("ConvNext", "convnext")
    theirs = convert_to(state, TRANSFORMERS)
    theirs = {key: value.view(1, 1, 1, -1) if ".grn." in key else value for key, value in theirs.items()}
    block, merge = "encoder.stages.{}.layers.{}.", "encoder.stages.{}.downsampling_layer."
    theirs = staged.count_within_stages(theirs, config, block, merge, 1)
    if config.num_classes:
        theirs = {key if key.startswith("classifier.") else f"{prefix}.{key}": value for key, value in theirs.items()}
    settings = {
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
    return InTransformers(config, theirs, settings)


_MODEL_TYPE = ModelType(
    defaults={"hidden_act": "gelu", "image_size": 224, "layer_norm_eps": 1e-12}, told={"norm_eps": 1e-6}
)

LEFT_OPEN = ("mlp", "norm_eps", "final_norm_eps")

FAMILY = Family(
    config=ConvNeXtConfig,
    model=ConvNeXt,
    origins=ORIGINS,
    from_shapes=from_shapes,
    read=staged.read,
    fixed_by_tensors=frozenset({"widths", "depths", "patch_size", "in_channels", "kernel_size", "grn"}),
    left_open=LEFT_OPEN,
    timm_names=("convnext_", "convnextv2_"),
    timm_hints=_timm_hints,
    model_types={"convnext": _MODEL_TYPE, "convnextv2": _MODEL_TYPE},
    transformers_hints=_transformers_hints,
    to_timm=_to_timm,
    to_transformers=_to_transformers,
)
