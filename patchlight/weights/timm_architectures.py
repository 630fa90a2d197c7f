"""timm's architectures by name: what each is beyond its tensors, and which of them a checkpoint's tensors may be of.

The table beside this file is written by benchmarks/timm_architectures.py, from timm itself.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchlight.families import CONFIGS
from patchlight.weights.read import CheckpointError

FILE = Path(__file__).with_suffix(".json")

# Settings that change what is computed, and that tensors of the same names and shapes may differ in.
OPEN = {
    "vit": (
        "num_heads",
        "mlp",
        "norm_eps",
        "position",
        "rope_base",
        "rope_coordinates",
        "rope_grid",
        "block_norm",
        "pooling",
    ),
    "swin": ("norm_eps", "window_size", "measuring_windows"),
    "convnext": ("mlp", "norm_eps", "final_norm_eps"),
}

# Values of them that tensors do tell.
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


@functools.cache
def settings_of(name: str) -> dict[str, Any]:
    """All settings of an architecture, and its family under "architecture"; of a refused one, what tensors tell."""
    row = architectures()[name]
    settings = CONFIGS[row.get("architecture", "vit")]().to_dict() | row
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def open_settings(name: str) -> dict[str, Any]:
    """What the tensors of an architecture leave open, and the size of its images."""
    settings = settings_of(name)
    told = {key: settings[key] for key in (*OPEN[settings["architecture"]], "image_size")}
    if "position" in told and not str(told["position"]).startswith("rope"):
        told = {key: value for key, value in told.items() if not key.startswith("rope_")}
    return told


def refuse_unsupported(name: str, where: str, source: str) -> None:
    reason = architectures()[name].get("refused")
    if reason:
        raise CheckpointError(f"{source}: by {where} it is timm's {name}, which is not supported: {reason}")


def check_claim(name: str, told: Mapping[str, Any], where: str, source: str) -> None:
    """Refuse a checkpoint that is said to be what its tensors are not."""
    apart = differences(name, told)
    for key, value in apart.items():
        have = told.get(key, "another")
        raise CheckpointError(f"{source}: {where} says {name}, with {key}={value!r}, but its tensors have {have!r}")


def check_depth(name: str, depths: Any, told: Mapping[str, Any], where: str, source: str) -> None:
    """Refuse a checkpoint with fewer or more blocks than what it is said to be; `depths`: what is said beyond that."""
    key = "depths" if "depths" in told else "depth"
    expected = depths if depths is not None else settings_of(name).get(key)
    expected = tuple(expected) if isinstance(expected, list) else expected
    if key in told and expected != told[key]:
        raise CheckpointError(
            f"{source}: {where} says {name}, with {key}={expected}, but its tensors have {told[key]}; if nothing is "
            f"missing in it, say {key}={told[key]}"
        )


def layer_scale_name(keys: Mapping[str, Any]) -> str | None:
    """What a checkpoint calls the scale of its branches, which is not the same in all of timm's classes."""
    return next((name for name in ("gamma_1", "ls1.gamma") if f"blocks.0.{name}" in keys), None)


def traits(told: Mapping[str, Any], keys: Mapping[str, Any], *, has_table: bool) -> dict[str, Any]:
    """What tells timm's architectures apart: settings from shapes, and whether there is a table of positions."""
    scale = layer_scale_name(keys)
    return dict(told) | {"has_table": has_table} | ({"layer_scale": scale} if "layer_scale" in told and scale else {})


def differences(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an architecture that are not what `traits` gave, with its values."""
    settings = dict(settings_of(name))
    if settings.get("layer_scale") and told.get("layer_scale") not in (None, "ls1.gamma"):
        settings["layer_scale"] = told["layer_scale"]  # gamma_1 is what DeiT III's authors call it, too
    has_table = settings.get("position") == "learned" or settings.get("add_learned_table", False)
    settings = settings | {"has_table": has_table} if settings["architecture"] == "vit" else settings
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
    """What the tensors tell by being those of an architecture of timm."""

    name: str
    """Of one of them."""
    settings: dict[str, Any]
    warning: str | None
    """That blocks may be missing."""

    @property
    def where(self) -> str:
        return f"timm's {self.name}"


def settle(family: str, told: Mapping[str, Any], given: Mapping[str, Any], source: str) -> Settled | None:
    """What all of timm's architectures have in common whose tensors have these names and shapes; None where there is
    none, and an error where they differ in what they compute. `told`: from `traits`; `given`: what is known already."""
    rows = architectures()
    names = [
        name for name, row in rows.items() if row.get("architecture", "vit") == family and not differences(name, told)
    ]
    if not names:
        return None
    depth = "depths" if "depths" in told else "depth"
    names.sort(key=lambda name: (settings_of(name)[depth] != told.get(depth), "refused" in rows[name]))
    for key in OPEN[family]:
        if key in given:
            fitting = [name for name in names if "refused" not in rows[name] and settings_of(name)[key] == given[key]]
            names = fitting or names
    still_open = [key for key in OPEN[family] if key not in told and key not in given]
    kinds: dict[tuple[Any, ...], str] = {}
    for name in names:
        if "refused" not in rows[name]:
            kinds.setdefault(tuple(open_settings(name).get(key) for key in still_open), name)
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
    common = {key: open_settings(names[0])[key] for key in still_open if key in open_settings(names[0])}
    if len({open_settings(name)["image_size"] for name in names}) == 1:
        common["image_size"] = open_settings(names[0])["image_size"]
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
