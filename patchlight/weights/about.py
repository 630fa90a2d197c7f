"""What the files of a checkpoint tell about it: config, preprocessing, labels and their groups, licence."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from patchlight.config import PreprocessConfig, SubjectHeat, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig, config_from_dict
from patchlight.json_config import field_names
from patchlight.weights import timm_configs
from patchlight.weights.convert import State
from patchlight.weights.families import all_model_types
from patchlight.weights.family import (
    Evidence,
    Family,
    Reading,
    Recognised,
    Shapes,
    check_settings,
    settings_from_shapes,
)
from patchlight.weights.find import FILE_NAME, Found
from patchlight.weights.groups import SURE, Groups
from patchlight.weights.preprocessing import from_timm, from_transformers, unknown_to_timm, unknown_to_transformers
from patchlight.weights.read import CheckpointError
from patchlight.weights.transformers_configs import note_unknown, read_keys

VERSION = 1
"""Version of our own part of config.json."""


def read_own_config(state: State, encoder: Recognised, found: Found, overrides: Mapping[str, Any]) -> Reading:
    """The checkpoint's own config. Its head, image and patch size are its own business, whatever the caller wants of
    them."""
    family, shapes = encoder.family, Shapes(state, encoder, found.source)
    if "patchlight" in found.config:
        return _read_ours(found, shapes)
    told = settings_from_shapes(shapes)
    traits = timm_configs.traits(told, encoder.shapes, has_table="positions.table" in state)
    without_norm = "final_norm" in field_names(family.config) and not {"norm.weight", "norm.bias"} & state.keys()
    if without_norm and encoder.origin.name == "timm" and overrides.get("final_norm") != "none":
        raise CheckpointError(
            f"{found.source}: it has no norm after its last block, as timm's models with final_norm=False; "
            "final_norm='none' loads it as it is"
        )
    warnings: list[str] = []
    arguments = found.config.get("model_args") or {}
    name = timm_configs.name_of(str(found.config.get("architecture")))
    if name is not None and found.config_from == FILE_NAME and (apart := timm_configs.differences(name, traits)):
        key = next(iter(apart))
        warnings.append(f"its file is named after timm's {name}, which has {key}={apart[key]!r}: it is something else")
        found, name = dataclasses.replace(found, config={}), None
    elif name is not None and found.config_from != "config.json" and not arguments:
        timm_configs.check_claim(name, traits, found.config_from, found.source)
    hints: list[tuple[str, Mapping[str, Any]]] = []
    notes: tuple[str, ...] = ()
    if found.config:
        own_hints, notes = _hints_of(found, name, shapes)
        hints.append((found.config_from, own_hints))
    if found.entry is not None:
        hints.append(("the catalogue", found.entry.settings))
    settled = None
    if encoder.origin.name == "timm" and not names_architecture(found):
        given = {key: value for _, settings in hints for key, value in settings.items()} | dict(overrides)
        settled = timm_configs.settle(family.architecture, family.left_open, traits, given, found.source)
    if settled is not None:
        hints.append((settled.where, settled.settings))
        name = settled.name
    reading = family.read(Evidence(state, shapes, told, found, tuple(hints), overrides, name))
    if settled is not None:
        warnings += [settled.warning] if settled.warning else []
    elif name is not None:
        depth = "depths" if "depths" in told else "depth"
        if depth not in overrides:
            timm_configs.check_depth(name, arguments.get(depth), told, found.config_from, found.source)
    # DINOv3 as published has tables of its own for its rotations.
    elif not (encoder.origin.settled or names_architecture(found) or "rope_embed.periods" in encoder.shapes):
        warnings += _guessed(reading, family)
    return dataclasses.replace(reading, notes=notes, warnings=tuple(warnings))


def _read_ours(found: Found, shapes: Shapes) -> Reading:
    """The config that `save` wrote."""
    settings, family = _our_part(found, "model"), shapes.family
    architecture = settings.get("architecture", ViTConfig.architecture)
    if architecture != family.architecture:
        raise CheckpointError(
            f"{found.source}: config.json says architecture={architecture!r}, but its tensors have the names of a "
            f"{family.name}"
        )
    check_settings(shapes, settings)
    own = config_from_dict(settings)
    return Reading(own, dict.fromkeys(own.to_dict(), "config.json"))


def _hints_of(found: Found, name: str | None, shapes: Shapes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings from timm's or transformers' config.json, and notes on it; the config of another family raises."""
    family = shapes.family
    hints: dict[str, Any] = {}
    if "architecture" in found.config:
        called = str(found.config["architecture"])
        fits = not family.timm_names or called.startswith(family.timm_names)
    else:
        keys = read_keys(found.config, all_model_types(), found.source)
        called = keys.model_type
        fits = called in ("", *family.model_types)
    if not fits:
        raise CheckpointError(
            f"{found.source}: config.json says {called!r}, but its tensors have the names of a {family.name}"
        )
    if "architecture" in found.config:
        notes = timm_configs.note_unknown_arguments(found.config.get("model_args") or {}, family.timm_arguments)
        if family.timm_hints is not None:
            hints = family.timm_hints(found.config, name, shapes)
    else:
        notes = note_unknown(keys)
        if family.transformers_hints is not None:
            hints = family.transformers_hints(keys, shapes)
    return {name: value for name, value in hints.items() if value is not None}, notes


def names_architecture(found: Found) -> bool:
    """Whether a file or the catalogue names the architecture, so that its usual settings are not a guess."""
    known = timm_configs.name_of(str(found.config.get("architecture"))) is not None
    return known or found.entry is not None or bool(found.config.get("model_type"))


def _guessed(reading: Reading, family: Family) -> list[str]:
    """A warning that names the settings which neither tensors nor files tell."""
    guesses = [
        f"{name}={getattr(reading.config, name)!r}"
        for name in family.left_open
        if reading.why.get(name, "").startswith("convention")
    ]
    if not guesses:
        return []
    return [
        f"nothing says which architecture it is, and its tensors leave open {', '.join(guesses)}: these are guesses; "
        "say them, or like=NAME, an architecture of timm or a checkpoint on the hub"
    ]


def own_preprocess_of(
    found: Found, config: ModelConfig, notes: list[str], *, wanted: bool = True
) -> PreprocessConfig | None:
    """The preprocessing that the checkpoint asks for; errors in it are ignored if it is not `wanted`."""
    try:
        return _read_preprocess(found, config, notes)
    except PatchlightError:
        if wanted:
            raise
        return None


def _read_preprocess(found: Found, config: ModelConfig, notes: list[str]) -> PreprocessConfig | None:
    if "patchlight" in found.config:
        return PreprocessConfig.from_dict(_our_part(found, "preprocess"))
    if found.preprocessor:
        for name in unknown_to_transformers(found.preprocessor):
            notes.append(f"ignored {name}={found.preprocessor[name]!r} of its image processor, which is not known here")
        return from_transformers(found.preprocessor)
    values = found.config.get("pretrained_cfg")
    if values:
        for name in unknown_to_timm(values):
            notes.append(f"ignored {name}={values[name]!r} in pretrained_cfg, which is not known here")
        prepared = from_timm(values)
        if prepared.image_size == config.image_size:
            return prepared
        # Made with an img_size of its own, of which pretrained_cfg does not know; and it takes no other.
        ours, theirs = _size(config.image_size), _size(prepared.image_size)
        notes.append(f"photos are prepared for {ours}, not for {theirs} as pretrained_cfg says")
        return from_timm({**values, "input_size": (3, *config.image_size)})
    return found.entry.preprocess if found.entry else None


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _our_part(found: Found, part: str) -> dict[str, Any]:
    own = found.config["patchlight"]
    if not isinstance(own, dict) or own.get("version") != VERSION or not isinstance(own.get(part), dict):
        raise CheckpointError(
            f"{found.source}: the patchlight part of its config.json is damaged, or of a later version"
        )
    return own[part]


def labels_of(found: Found, config: ModelConfig) -> tuple[str, ...] | None:
    """The names of the classes, or None if there are not as many as the model has classes."""
    labels: Any = (found.config.get("patchlight") or {}).get("labels")
    labels = labels or found.config.get("label_names") or (found.config.get("pretrained_cfg") or {}).get("label_names")
    by_number = found.config.get("id2label")
    if labels is None and isinstance(by_number, dict) and config.num_classes:
        labels = [by_number.get(str(index)) for index in range(config.num_classes)]
        if labels[0] == "LABEL_0":  # transformers' way of having none
            return None
    if not isinstance(labels, list) or len(labels) != config.num_classes or not all(isinstance(x, str) for x in labels):
        return None
    return tuple(labels)


def groups_of(found: Found, labels: tuple[str, ...] | None) -> Groups | None:
    paths = (found.config.get("patchlight") or {}).get("groups")
    if paths is not None and not isinstance(paths, list):
        raise PatchlightError(f"{found.source}: its groups are {paths!r:.60}; they should be a list, one a label")
    if paths is None or labels is None:
        return None
    said_from = found.config["patchlight"].get("groups_said_from") or {}
    if not isinstance(said_from, dict) or not all(isinstance(value, int | float) for value in said_from.values()):
        raise PatchlightError(
            f"{found.source}: groups_said_from is {said_from!r:.60}; it should hold two probabilities"
        )
    return Groups(labels, tuple(paths), said_from.get("group", SURE), said_from.get("label", SURE))


def subject_of(found: Found) -> SubjectHeat | None:
    values = (found.config.get("patchlight") or {}).get("subject")
    return None if values is None else SubjectHeat.from_dict(values)


def licence_of(found: Found) -> str | None:
    if "patchlight" in found.config:
        return found.config["patchlight"].get("licence")
    return found.entry.licence if found.entry else None
