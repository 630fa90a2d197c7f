"""What timm's config.json says: the name of an architecture, and the arguments that it was made with.

The table of architectures beside this file says what each is beyond its tensors; benchmarks/timm_architectures.py
writes it from timm itself. Where no name is given, it tells which of them a checkpoint's tensors may be of.
"""

import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchlight.config import ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import CONFIGS
from patchlight.weights.read import CheckpointError

FILE = Path(__file__).with_name("timm_architectures.json")

# Values of settings that families leave open, and that tensors do tell.
_SEEN = {"mlp": ("swiglu",), "pooling": ("attention",), "position": ("rope_mixed", "relative_bias", "relative_mlp")}

# What a model may have otherwise and still be of its architecture.
_VARYING = {"depth", "depths", "in_channels", "num_classes", "head_hidden", "image_size", "prefix_positions"}


@functools.cache
def architectures() -> dict[str, dict[str, Any]]:
    """The table: how each differs from the default of our config, or {"refused": why we do not compute it}."""
    rows: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["architectures"]
    return rows


def name_of(text: str) -> str | None:
    """The architecture that a name is about, with or without owner and tag, as in timm/vit_tiny_patch16_224.augreg."""
    name = text.removeprefix("hf:").removeprefix("hf-hub:").removeprefix("timm/").partition(".")[0]
    return name if name in architectures() else None


def name_in_file(path: Path) -> str | None:
    """The architecture that a file is named after: its name up to the first dot, or up to the dash before a hash."""
    first = path.name.partition(".")[0]
    return next((name for name in (first, first.rpartition("-")[0]) if name in architectures()), None)


def _family_of(row: Mapping[str, Any]) -> str:
    return row.get("architecture", ViTConfig.architecture)


@functools.cache
def settings_of(name: str) -> dict[str, Any]:
    """All settings of an architecture, and its family under "architecture"; of a refused one, what tensors tell."""
    row = architectures()[name]
    settings = CONFIGS[_family_of(row)]().to_dict() | row
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def open_settings(name: str, left_open: tuple[str, ...]) -> dict[str, Any]:
    """Of an architecture the settings that its tensors leave open, and the size of its images."""
    settings = settings_of(name)
    told = {key: settings[key] for key in (*left_open, "image_size")}
    if "position" in told and not str(told["position"]).startswith("rope"):
        told = {key: value for key, value in told.items() if not key.startswith("rope_")}
    return told


def refuse_unsupported(name: str, where: str, source: str) -> None:
    reason = architectures()[name].get("refused")
    if reason:
        raise CheckpointError(f"{source}: by {where} it is timm's {name}, which is not supported: {reason}")


def check_claim(name: str, told: Mapping[str, Any], where: str, source: str) -> None:
    """Refuse a checkpoint whose tensors contradict the architecture that is named for it."""
    apart = differences(name, told)
    for key, value in apart.items():
        have = told.get(key, "another")
        raise CheckpointError(f"{source}: {where} says {name}, with {key}={value!r}, but its tensors have {have!r}")


def check_depth(name: str, depths: Any, told: Mapping[str, Any], where: str, source: str) -> None:
    """Refuse a checkpoint with other blocks than its named architecture; `depths`: what model_args say of them."""
    key = "depths" if "depths" in told else "depth"
    expected = depths if depths is not None else settings_of(name).get(key)
    expected = tuple(expected) if isinstance(expected, list) else expected
    if key in told and expected != told[key]:
        raise CheckpointError(
            f"{source}: {where} says {name}, with {key}={expected}, but its tensors have {told[key]}; if nothing is "
            f"missing in it, say {key}={told[key]}"
        )


def layer_scale_name(keys: Mapping[str, Any]) -> str | None:
    """The checkpoint's name for LayerScale weights, which differs between timm's classes."""
    return next((name for name in ("gamma_1", "ls1.gamma") if f"blocks.0.{name}" in keys), None)


def traits(told: Mapping[str, Any], keys: Mapping[str, Any], *, has_table: bool) -> dict[str, Any]:
    """What tells timm's architectures apart: settings from shapes, and whether there is a table of positions."""
    scale = layer_scale_name(keys)
    return dict(told) | {"has_table": has_table} | ({"layer_scale": scale} if "layer_scale" in told and scale else {})


def differences(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture's settings that differ from what `traits` gave, with the architecture's values."""
    settings = dict(settings_of(name))
    if settings.get("layer_scale") and told.get("layer_scale") not in (None, "ls1.gamma"):
        settings["layer_scale"] = told["layer_scale"]  # gamma_1 is what DeiT III's authors call it, too
    if "position" in settings:
        settings["has_table"] = settings["position"] == "learned" or settings["add_learned_table"]
    apart = {
        key: settings[key]
        for key, value in told.items()
        if key in settings and key not in _VARYING and settings[key] != value
    }
    return apart | {
        key: settings[key] for key, values in _SEEN.items() if key not in told and settings.get(key) in values
    }


@dataclass(frozen=True)
class Settled:
    """Settings that follow because the tensors are those of a known architecture of timm."""

    name: str
    """Name of one architecture that fits."""
    settings: dict[str, Any]
    warning: str | None
    """Says that blocks may be missing; None if not."""

    @property
    def where(self) -> str:
        return f"timm's {self.name}"


def settle(
    family: str, left_open: tuple[str, ...], told: Mapping[str, Any], given: Mapping[str, Any], source: str
) -> Settled | None:
    """What all of timm's architectures of a family have in common whose tensors have these names and shapes; None where
    there is none, and an error where they differ in what they compute.

    `left_open`: what tensors do not tell; `told`: from `traits`; `given`: what is known already.
    """
    rows = architectures()
    names = [name for name, row in rows.items() if _family_of(row) == family and not differences(name, told)]
    if not names:
        return None
    depth = "depths" if "depths" in told else "depth"
    names.sort(key=lambda name: (settings_of(name)[depth] != told.get(depth), "refused" in rows[name]))
    for key in left_open:
        if key in given:
            fitting = [name for name in names if "refused" not in rows[name] and settings_of(name)[key] == given[key]]
            names = fitting or names
    still_open = [key for key in left_open if key not in told and key not in given]
    kinds: dict[tuple[Any, ...], str] = {}
    for name in names:
        if "refused" not in rows[name]:
            kinds.setdefault(tuple(open_settings(name, left_open).get(key) for key in still_open), name)
    unsupported = [name for name in names if "refused" in rows[name]]
    if len(kinds) + bool(unsupported) > 1:
        apart = [place for place, values in enumerate(zip(*kinds, strict=True)) if len(set(values)) > 1]
        if "position" in [still_open[place] for place in apart]:  # which says it all
            apart = [place for place in apart if not still_open[place].startswith("rope_")]
        said = []
        for kind, name in kinds.items():
            values = ", ".join(f"{still_open[place]}={kind[place]!r}" for place in apart)
            said.append(f"like={name!r}" + (f" ({values})" if values else ""))
        if unsupported:
            said.append(f"it is {unsupported[0]}, which is not supported ({rows[unsupported[0]]['refused']})")
        raise CheckpointError(
            f"{source}: its tensors fit several of timm's architectures, which compute differently; say which: "
            f"{' or '.join(said)}"
        )
    if unsupported:
        refuse_unsupported(unsupported[0], "its tensors", source)
    first = open_settings(names[0], left_open)
    common = {key: first[key] for key in still_open if key in first}
    if len({settings_of(name)["image_size"] for name in names}) == 1:
        common["image_size"] = first["image_size"]
    depth_given = "depth" in given or "depths" in given
    return Settled(names[0], common, None if depth_given else _other_depth(told, names))


def _other_depth(told: Mapping[str, Any], names: list[str]) -> str | None:
    key = "depths" if "depths" in told else "depth"
    depths = {settings_of(name)[key]: name for name in reversed(names)}
    if key not in told or told[key] in depths:
        return None
    (depth, name), *_ = depths.items()
    return (
        f"it has {key}={told[key]}, and timm's {name}, whose tensors are like its, {depth}: if some are missing, it "
        f"will be wrong; {key}={told[key]} says that none are"
    )


# Arguments that the tensors tell as well; that matter in training alone, or for what sizes are taken; and those that
# are read elsewhere. Names with spaces between.
_IN_SHAPES = (
    "patch_size in_chans num_classes embed_dim depth depths dims mlp_ratio qkv_bias qkv_fused qk_norm init_values "
    "ls_init_value class_token reg_tokens num_reg_tokens pre_norm fc_norm use_fc_norm scale_attn_norm "
    "scale_mlp_norm scale_mlp scale_attn_inner proj_bias swiglu_mlp swiglu_align_to use_abs_pos_emb "
    "use_rel_pos_bias use_shared_rel_pos_bias rel_pos_dim shared_rel_pos use_pre_transformer_norm "
    "use_post_transformer_norm kernel_sizes use_grn conv_mlp conv_bias attn_type attn_pool_mlp_ratio head_dim "
)
_IN_TRAINING = (
    "drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate head_init_scale "
    "weight_init fix_init dynamic_img_size dynamic_img_pad strict_img_size rope_shift_coords rope_jitter_coords "
    "rope_rescale_coords device dtype "
)
_ELSEWHERE = "img_size window_size pretrained_window_sizes num_heads norm_eps act_layer global_pool no_embed_class"
HARMLESS_ARGUMENTS = frozenset(f"{_IN_SHAPES} {_IN_TRAINING} {_ELSEWHERE}".split())

# Of those that change what is computed, the values beside none at all that say nothing new; others are refused.
USUAL_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "output_stride": (32,),
    "stem_type": ("patch",),
    "head_norm_first": (False,),
    "head_hidden_size": (),
    "always_partition": (False,),
    "final_norm": (True,),
    "norm_layer": ("layernorm", "LayerNorm"),
    "rel_pos_type": ("mlp", "bias"),
    "pool_include_prefix": (False,),
    "attn_only_layer_scale": (False,),
    "rope_grid_offset": (0,),
    "out_indices": (),
    "features_only": (False,),
    "embed_norm_layer": (),
    "attn_layer": (),
    "block_fn": (),
    "embed_layer": (),
    "mlp_layer": (),
}


def argument_error(said: str) -> PatchlightError:
    return PatchlightError(
        f"config.json says {said} in model_args, which is not supported; if it makes no difference to the model, "
        "take it out"
    )


def check_arguments(arguments: Mapping[str, Any], followed: Collection[str] = ()) -> None:
    """Refuse an argument that changes the computation, unless it is among those that the caller follows."""
    for name, value in arguments.items():
        if name == "global_pool" and value == "":
            raise argument_error("global_pool=''")
        if (
            name in USUAL_ARGUMENTS
            and name not in followed
            and value is not None
            and value not in USUAL_ARGUMENTS[name]
        ):
            raise argument_error(f"{name}={value!r}")


def note_unknown_arguments(arguments: Mapping[str, Any], followed: Collection[str]) -> tuple[str, ...]:
    """What is to be said of arguments that are in no table, and are ignored; `followed`: those that a family reads."""
    unknown = sorted(set(arguments) - HARMLESS_ARGUMENTS - set(USUAL_ARGUMENTS) - set(followed))
    if not unknown:
        return ()
    return (f"model_args in config.json that we do not know, taken to change nothing: {', '.join(unknown)}",)
