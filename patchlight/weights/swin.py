"""Swin: the names that timm, transformers and its authors give the tensors, what tells its settings, and how to write
it for them."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from patchlight.config import Size
from patchlight.errors import PatchlightError
from patchlight.families import SwinConfig
from patchlight.models.resampling import resample
from patchlight.models.swin import Swin
from patchlight.weights import staged
from patchlight.weights.convert import Names, Origin, State, convert_to, join_biases, refuse, shortest_ratio
from patchlight.weights.family import Evidence, Family, InTimm, InTransformers, Reading, Shapes, change_sizes
from patchlight.weights.read import CheckpointError
from patchlight.weights.timm_configs import check_arguments, open_settings
from patchlight.weights.transformers_configs import Keys, ModelType, activation

OURS: Names = tuple(
    (part, part) for part in ("patch_embed.proj.", "patch_embed.norm.", "blocks.", "merges.", "norm.", "head.")
)

TIMM: Names = (
    ("patch_embed.proj.", "patch_embed.proj."),
    ("patch_embed.norm.", "patch_embed.norm."),
    ("norm.", "norm."),
    ("head.fc.", "head."),
    ("head.", "head."),  # before timm 0.9, and in the authors' files
    ("merges.{}.", "merges.{}."),
    ("blocks.{}.norm1.", "blocks.{}.norm1."),
    ("blocks.{}.norm2.", "blocks.{}.norm2."),
    ("blocks.{}.attn.qkv.", "blocks.{}.attn.qkv."),
    ("blocks.{}.attn.proj.", "blocks.{}.attn.out."),
    ("blocks.{}.attn.relative_position_bias_table", "blocks.{}.attn.relative_bias.table"),
    ("blocks.{}.attn.cpb_mlp.0.", "blocks.{}.attn.relative_bias.hidden."),  # these three of Swin V2
    ("blocks.{}.attn.cpb_mlp.2.", "blocks.{}.attn.relative_bias.out."),
    ("blocks.{}.attn.logit_scale", "blocks.{}.attn.cosine_scale.logarithm"),
    ("blocks.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.fc2.", "blocks.{}.mlp.down."),
)

# The naming of transformers 4, which 5 reads as well; what we write.
TRANSFORMERS_OLD: Names = (
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("embeddings.norm.", "patch_embed.norm."),
    ("layernorm.", "norm."),
    ("classifier.", "head."),
    ("merges.{}.", "merges.{}."),
    ("blocks.{}.layernorm_before.", "blocks.{}.norm1."),
    ("blocks.{}.layernorm_after.", "blocks.{}.norm2."),
    ("blocks.{}.attention.self.query.", "blocks.{}.attn.q."),
    ("blocks.{}.attention.self.key.", "blocks.{}.attn.k."),
    ("blocks.{}.attention.self.value.", "blocks.{}.attn.v."),
    ("blocks.{}.attention.self.relative_position_bias_table", "blocks.{}.attn.relative_bias.table"),
    ("blocks.{}.attention.self.continuous_position_bias_mlp.0.", "blocks.{}.attn.relative_bias.hidden."),
    ("blocks.{}.attention.self.continuous_position_bias_mlp.2.", "blocks.{}.attn.relative_bias.out."),
    ("blocks.{}.attention.self.logit_scale", "blocks.{}.attn.cosine_scale.logarithm"),
    ("blocks.{}.attention.output.dense.", "blocks.{}.attn.out."),
    ("blocks.{}.intermediate.dense.", "blocks.{}.mlp.up."),
    ("blocks.{}.output.dense.", "blocks.{}.mlp.down."),
)

TRANSFORMERS: Names = (
    *TRANSFORMERS_OLD,
    ("blocks.{}.attention.q_proj.", "blocks.{}.attn.q."),
    ("blocks.{}.attention.k_proj.", "blocks.{}.attn.k."),
    ("blocks.{}.attention.v_proj.", "blocks.{}.attn.v."),
    ("blocks.{}.attention.o_proj.", "blocks.{}.attn.out."),
    (
        "blocks.{}.attention.relative_position_bias.relative_position_bias_table",
        "blocks.{}.attn.relative_bias.table",
    ),
    ("blocks.{}.mlp.fc1.", "blocks.{}.mlp.up."),
    ("blocks.{}.mlp.fc2.", "blocks.{}.mlp.down."),
)


def _prepare(state: State) -> State:
    """Blocks counted over all stages; what merges patches stands before a stage (timm) or after it (all others)."""
    after = any(re.match(r"(encoder\.)?layers\.0\.downsample\.", key) for key in state)
    block, merge = r"(?:encoder\.)?layers\.(\d+)\.blocks\.(\d+)\.", r"(?:encoder\.)?layers\.(\d+)\.downsample\."
    prepared = staged.count_over_stages(state, block, merge, first_merge=0 if after else 1)
    for key in [key for key in prepared if key.endswith(".logit_scale")]:
        prepared[key] = prepared[key].flatten()
    join_biases(prepared)
    return prepared


_LEFT_OUT = (
    (r"relative_position_index$|relative_coords_table$|attn_mask$", "a table that is computed"),
    (r"^(embeddings\.)?mask_token$", "the mask token of pre-training"),
)

ORIGINS: tuple[Origin, ...] = (
    Origin(
        name="patchlight",
        marks=("patch_embed.norm.weight", "blocks.0.attn.relative_bias.table"),
        names=OURS,
    ),
    Origin(
        name="patchlight",
        marks=("patch_embed.norm.weight", "blocks.0.attn.cosine_scale.logarithm"),
        names=OURS,
    ),
    *(
        Origin(
            name="timm",
            marks=("patch_embed.proj.weight", f"layers.0.blocks.0.attn.{mark}"),
            names=TIMM,
            left_out=_LEFT_OUT,
            prepare=_prepare,
        )
        for mark in ("relative_position_bias_table", "cpb_mlp.0.weight")
    ),
    *(
        Origin(
            name="transformers",
            marks=("embeddings.patch_embeddings.projection.weight", f"encoder.layers.0.blocks.0.attention.{table}"),
            names=TRANSFORMERS,
            left_out=_LEFT_OUT,
            conventions={"uneven_windows": "plain"},
            prepare=_prepare,
        )
        for table in (
            "self.relative_position_bias_table",
            "relative_position_bias.relative_position_bias_table",
            "self.logit_scale",
        )
    ),
)


def from_shapes(shapes: Shapes) -> dict[str, Any]:
    width, channels, down, across = shapes["patch_embed.proj.weight"]
    depth = next(n for n in range(len(shapes) + 1) if f"blocks.{n}.norm1.weight" not in shapes)
    widths = [shapes[f"blocks.{n}.norm1.weight"][0] for n in range(depth)]
    stages = [width * 2**stage for stage in range(len(set(widths)))]
    if widths != sorted(widths) or stages != sorted(set(widths)):
        raise CheckpointError(
            f"{shapes.source}: its blocks are {widths} wide; those of a Swin double from stage to stage"
        )
    v2 = "blocks.0.attn.cosine_scale.logarithm" in shapes
    biases = [shapes[f"blocks.{n}.attn.relative_bias.{'out.weight' if v2 else 'table'}"] for n in range(depth)]
    told: dict[str, Any] = {
        "width": width,
        "in_channels": channels,
        "patch_size": (down, across),
        "depths": tuple(widths.count(each) for each in stages),
        "num_heads": tuple(biases[widths.index(each)][0 if v2 else 1] for each in stages),
        "v2": v2,
        "mlp_ratio": shortest_ratio(
            stages, [shapes[f"blocks.{widths.index(each)}.mlp.up.weight"][0] for each in stages]
        ),
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "num_classes": shapes["head.weight"][0] if "head.weight" in shapes else 0,
    }
    if not v2 and (side := _side(max(rows for rows, _ in biases))) is not None:
        told["window_size"] = (side, side)
    return told


def _side(rows: int) -> int | None:
    """The side of the square window that a table of relative positions with so many rows is for."""
    root = math.isqrt(rows)
    return (root + 1) // 2 if root**2 == rows and root % 2 else None


def _fit(state: State, own: SwinConfig, config: SwinConfig, _: Origin, notes: list[str], source: str) -> State:
    """Bring the tables of relative positions to the window of the model.

    A stage whose grid was smaller than a window may come with a smaller table (timm); it gets the offsets that it
    lacks from the nearest that it has, which at its own image size are never used.
    """
    for key in [key for key in state if key.endswith(".relative_bias.table")]:
        table, window = state[key], own.window_size
        if len(table) != _rows(window):
            small = own.stage_windows()[own.stage_of(int(key.split(".")[1]))]
            if len(table) != _rows(small):
                raise CheckpointError(
                    f"{source}: {key} has {len(table)} rows, where windows of {window[0]}x{window[1]} have "
                    f"{_rows(window)}; windows of different sizes are not supported"
                )
            table = _widened(table, small, window)
            notes.append(f"{key} was for windows of {small[0]}x{small[1]}; farther offsets take the nearest")
        if config.window_size != window:
            old, new = ((2 * down - 1, 2 * across - 1) for down, across in (window, config.window_size))
            table = resample(table, old, new, "antialiased")
        state[key] = table
    if config.window_size != own.window_size and not own.v2:
        sizes = ["x".join(map(str, each.window_size)) for each in (own, config)]
        notes.append(f"resampled relative positions from windows of {sizes[0]} to {sizes[1]}")
    return state


def _change_sizes(own: SwinConfig, asked: SwinConfig, notes: list[str]) -> SwinConfig:
    """Keep the windows by which a trained Swin V2 measures offsets, whatever the new windows are."""
    if own.v2 and asked.measuring_windows is None:
        windows = own.stage_windows()
        if asked.stage_windows() != windows:
            asked = dataclasses.replace(asked, measuring_windows=tuple(max(window) for window in windows))
    change_sizes(own, asked, notes)
    return asked


def _read(evidence: Evidence) -> Reading:
    reading = staged.read(evidence)
    assert isinstance(reading.config, SwinConfig)
    if evidence.shapes.origin.name == "transformers" and reading.config.v2:
        _refuse_oblong_windows(reading.config, evidence.source)
    return reading


def _refuse_oblong_windows(config: SwinConfig, source: str) -> None:
    """transformers' Swin V2 makes all windows square, those of grids with a side shorter than a window, too."""
    for down, across in config.stage_windows():
        if down != across:
            raise CheckpointError(
                f"{source}: with image_size={config.image_size} and patch_size={config.patch_size} it would have "
                f"windows of {down}x{across} here, where transformers pads them to squares, which is not supported"
            )


def _rows(window: Size) -> int:
    return (2 * window[0] - 1) * (2 * window[1] - 1)


def _widened(table: Tensor, small: Size, window: Size) -> Tensor:
    picture = table.T.unflatten(1, (2 * small[0] - 1, 2 * small[1] - 1))
    down, across = window[0] - small[0], window[1] - small[1]
    return F.pad(picture[None], (across, across, down, down), mode="replicate")[0].flatten(1).T.contiguous()


def _narrowed(table: Tensor, window: Size, small: Size) -> Tensor:
    """The inverse of `_widened`: drop the offsets that do not occur in the small window."""
    down, across = window[0] - small[0], window[1] - small[1]
    picture = table.unflatten(0, (2 * window[0] - 1, 2 * window[1] - 1))
    return picture[down : len(picture) - down, across : picture.shape[1] - across].flatten(0, 1).contiguous()


def _timm_hints(config: Mapping[str, Any], name: str | None, _: Shapes) -> dict[str, Any]:
    arguments = config.get("model_args") or {}
    check_arguments(arguments)
    if arguments.get("act_layer", "gelu") != "gelu":
        raise PatchlightError(f"config.json says act_layer={arguments['act_layer']!r}, which is not supported")
    usual = {} if name is None else open_settings(name, LEFT_OPEN)
    hints = {"v2": str(config.get("architecture")).startswith("swinv2_")} | usual
    given = {"image_size": arguments.get("img_size"), "window_size": arguments.get("window_size")}
    given["measuring_windows"] = _measuring(arguments.get("pretrained_window_sizes"))
    return staged.timm_hints(config, hints | {name: value for name, value in given.items() if value is not None})


def _measuring(sizes: Any) -> tuple[int, ...] | None:
    """pretrained_window_sizes, where 0 stands for a stage's own; only all of them or none can be."""
    if sizes and any(sizes) and not all(sizes):
        raise PatchlightError(
            f"config.json says pretrained_window_sizes={sizes!r}; only all stages' or none are supported"
        )
    return tuple(sizes) if sizes and all(sizes) else None


def _transformers_hints(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    activation(keys, ("gelu",), shapes.source)
    values = keys.values
    return {
        **keys.told,
        "width": values.get("embed_dim"),
        "depths": values.get("depths"),
        "num_heads": values.get("num_heads"),
        "window_size": values.get("window_size"),
        "image_size": values.get("image_size"),
        "norm_eps": values.get("layer_norm_eps"),
        "measuring_windows": _measuring(values.get("pretrained_window_sizes")),
    }


def _to_timm(config: SwinConfig, state: State) -> InTimm:
    """Where a stage's grid is smaller than a window, timm's table is, too; it would resample a larger one."""
    patch, window = config.patch_size[0], config.window_size[0]
    refuse("timm", config, patch_size=(patch, patch), window_size=(window, window))
    refuse("timm", config, norm_eps=1e-5, uneven_windows="masked")
    windows = config.stage_windows()
    _check_timm_windows(config, windows)
    tables = {
        key: _narrowed(value, config.window_size, windows[config.stage_of(int(key.split(".")[1]))])
        for key, value in state.items()
        if key.endswith(".relative_bias.table")
    }
    # Both names of the head would fit; the first is today's.
    names = tuple(row for row in TIMM if row[0] != "head.")
    theirs = convert_to(_second(config, state | tables, "timm"), names)
    for key in [key for key in theirs if config.v2 and key.endswith(".qkv.bias")]:
        q, _, v = theirs.pop(key).chunk(3)
        theirs |= {key.replace("qkv.bias", "q_bias"): q.clone(), key.replace("qkv.bias", "v_bias"): v.clone()}
    measured = {"pretrained_window_sizes": list(config.measuring_windows or [0] * len(config.depths))}
    return InTimm(
        config,
        staged.count_within_stages(theirs, config, "layers.{}.blocks.{}.", "layers.{}.downsample.", 1),
        "swinv2_tiny_window8_256" if config.v2 else "swin_tiny_patch4_window7_224",
        (measured if config.v2 else {})
        | {
            "img_size": list(config.image_size),
            "patch_size": config.patch_size[0],
            "in_chans": config.in_channels,
            "embed_dim": config.width,
            "depths": list(config.depths),
            "num_heads": list(config.num_heads),
            "window_size": list(config.window_size),
            "mlp_ratio": config.mlp_ratio,
            "qkv_bias": config.qkv_bias,
        },
        first_conv="patch_embed.proj",
        classifier="head.fc",
    )


def _second(config: SwinConfig, state: State, layout: str) -> State:
    """A Swin V2's state in the shapes that others use; raises if keys have a bias, which theirs lack."""
    if not config.v2:
        return state
    for key, value in state.items():
        if key.endswith(".attn.qkv.bias") and value.chunk(3)[1].any():
            raise PatchlightError(
                f"a Swin V2 whose keys have a bias ({key}) cannot be written with layout={layout!r}, where they have "
                "none; use layout='patchlight'"
            )
    return {key: value.view(-1, 1, 1) if key.endswith(".logarithm") else value for key, value in state.items()}


def _check_timm_windows(config: SwinConfig, windows: list[Size]) -> None:
    """Refuse windows that timm would make otherwise (its grids are rounded down, ours up) or could not read."""
    grid = [pixels // patch for pixels, patch in zip(config.image_size, config.patch_size, strict=True)]
    for stage, (down, across) in enumerate(windows):
        theirs = [min(length // 2**stage, side) for length, side in zip(grid, config.window_size, strict=True)]
        if theirs != [down, across] or (down != across and not config.v2):
            raise PatchlightError(
                f"image_size={config.image_size} cannot be written with layout='timm': windows of stage {stage + 1} "
                f"are {down}x{across} there, timm's {theirs[0]}x{theirs[1]}, and square ones alone are read; use "
                "layout='patchlight'"
            )


def _to_transformers(config: SwinConfig, state: State) -> InTransformers:
    side, patch, window = config.image_size[0], config.patch_size[0], config.window_size[0]
    refuse("transformers", config, image_size=(side, side), patch_size=(patch, patch), window_size=(window, window))
    refuse("transformers", config, norm_eps=1e-5)
    grids_and_windows = zip(config.stage_grids(config.image_size), config.stage_windows(), strict=True)
    if any(h % down or w % across for (h, w), (down, across) in grids_and_windows):
        refuse("transformers", config, uneven_windows="plain")  # where all windows are full, both are the same
    model, measured = ("swinv2" if config.v2 else "swin"), list(config.measuring_windows or [0] * len(config.depths))
    theirs = convert_to(_second(config, state, "transformers"), TRANSFORMERS_OLD)
    if config.v2:
        theirs = {key: value for key, value in theirs.items() if not key.endswith(".key.bias")}
    block, merge = "encoder.layers.{}.blocks.{}.", "encoder.layers.{}.downsample."
    theirs = staged.count_within_stages(theirs, config, block, merge, 0)
    if config.num_classes:
        theirs = {key if key.startswith("classifier.") else f"{model}.{key}": value for key, value in theirs.items()}
    settings = {
        "model_type": model,
        "architectures": [f"{model.capitalize()}{'ForImageClassification' if config.num_classes else 'Model'}"],
        **({"pretrained_window_sizes": measured} if config.v2 else {}),
        "image_size": config.image_size[0],
        "patch_size": config.patch_size[0],
        "num_channels": config.in_channels,
        "embed_dim": config.width,
        "depths": list(config.depths),
        "num_heads": list(config.num_heads),
        "window_size": config.window_size[0],
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "layer_norm_eps": config.norm_eps,
        "hidden_size": config.feature_width,
        "drop_path_rate": 0.0,
        **({"num_labels": config.num_classes} if config.num_classes else {}),
    }
    return InTransformers(config, theirs, settings)


# Their patches and merges have norms with an eps of their own.
_ONLY = {"use_absolute_embeddings": False, "layer_norm_eps": 1e-5}
_DEFAULTS = {"hidden_act": "gelu", "image_size": 224, "window_size": 7}

LEFT_OPEN = ("norm_eps", "window_size", "measuring_windows")

FAMILY = Family(
    config=SwinConfig,
    model=Swin,
    origins=ORIGINS,
    from_shapes=from_shapes,
    read=_read,
    fixed_by_tensors=frozenset({"width", "depths", "num_heads", "patch_size", "in_channels", "v2"}),
    left_open=LEFT_OPEN,
    change_sizes=_change_sizes,
    fit=_fit,
    timm_names=("swin_", "swinv2_"),
    timm_hints=_timm_hints,
    model_types={
        "swin": ModelType(defaults=_DEFAULTS, told={"v2": False}, only=_ONLY),
        "swinv2": ModelType(defaults=_DEFAULTS | {"pretrained_window_sizes": ()}, told={"v2": True}, only=_ONLY),
    },
    transformers_hints=_transformers_hints,
    to_timm=_to_timm,
    to_transformers=_to_transformers,
)
