"""What a checkpoint says of itself: its config, preprocessing, labels and their groups, licence."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from patchlight.config import PreprocessConfig, SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig, config_from_dict
from patchlight.weights.convert import State
from patchlight.weights.find import Found
from patchlight.weights.groups import Groups
from patchlight.weights.inspect import Reading, Recognised, check_config, read_config, settings_from_shapes
from patchlight.weights.named import FILE_NAME
from patchlight.weights.preprocessing import from_timm, from_transformers, unknown_to_timm, unknown_to_transformers
from patchlight.weights.read import CheckpointError
from patchlight.weights.staged import check_staged, hints_of, read_staged
from patchlight.weights.staged import settings_from_shapes as staged_from_shapes
from patchlight.weights.timm_architectures import OPEN, check_claim, check_depth, differences, name_of, settle, traits
from patchlight.weights.timm_arguments import note_unknown_arguments
from patchlight.weights.transformers_configs import note_unknown, read_keys
from patchlight.weights.vit_hints import refuse_partial_pooling, refuse_uneven_size, timm_hints, transformers_hints

VERSION = 1
"""Of the part of config.json that is ours."""


def read_own_config(state: State, encoder: Recognised, found: Found, overrides: Mapping[str, Any]) -> Reading:
    """The checkpoint's own config. Its head, image and patch size are its own business, whatever the caller wants of
    them."""
    family = encoder.origin.architecture
    staged = family != "vit"
    if "patchlight" in found.config:
        settings = _our_part(found, "model")
        architecture = settings.get("architecture", "vit")
        if architecture != family:
            raise CheckpointError(
                f"{found.source}: config.json says architecture={architecture!r}, but its tensors are named as those "
                f"of a {family}"
            )
        if staged:
            check_staged(state, encoder, settings, found.source)
        else:
            check_config(state, encoder, settings, "config.json", found.source)
        own = config_from_dict(settings)
        return Reading(own, dict.fromkeys(own.to_dict(), "config.json"))
    told = (staged_from_shapes if staged else settings_from_shapes)(state, encoder, found.source)
    told = traits(told, encoder.shapes, has_table="positions.table" in state)
    without_norm = encoder.origin.name == "timm" and not staged and not {"norm.weight", "norm.bias"} & state.keys()
    if without_norm and overrides.get("final_norm") != "none":
        raise CheckpointError(
            f"{found.source}: it has no norm after its last block, as timm's with final_norm=False; "
            "final_norm='none' loads it as it is"
        )
    warnings: list[str] = []
    name = name_of(str(found.config.get("architecture")))
    if name is not None and found.config_from == FILE_NAME and (apart := differences(name, told)):
        key = next(iter(apart))
        warnings.append(f"its file is named after timm's {name}, which has {key}={apart[key]!r}: it is something else")
        found, name = dataclasses.replace(found, config={}), None
    elif name is not None and found.config_from != "config.json" and not found.config.get("model_args"):
        check_claim(name, told, found.config_from, found.source)
    hints: list[tuple[str, Mapping[str, Any]]] = []
    notes: tuple[str, ...] = ()
    if staged and found.config:
        own_hints, notes = hints_of(encoder, found.config, found.source)
        hints.append((found.config_from, own_hints))
        notes += note_unknown_arguments(found.config.get("model_args") or {})
    elif "architecture" in found.config:
        notes = note_unknown_arguments(found.config.get("model_args") or {})
        own_hints = timm_hints(found.config, state.keys())
        if "image_size" not in overrides and own_hints.get("image_size"):
            refuse_uneven_size(own_hints["image_size"], told["patch_size"], found.source)
        hints.append((found.config_from, own_hints))
    elif found.config:
        keys = read_keys(found.config, found.source)
        notes = note_unknown(keys)
        hints.append((found.config_from, transformers_hints(keys, found.source, {*state, *encoder.shapes})))
    if found.entry is not None:
        hints.append(("the catalogue", found.entry.settings))
    settled = None
    if encoder.origin.name == "timm" and not names_architecture(found):
        given = {key: value for _, settings in hints for key, value in settings.items()} | dict(overrides)
        settled = settle(family, told, given, found.source)
    if settled is not None:
        hints.append((settled.where, settled.settings))
        name = settled.name
    changed = {"num_classes", "head_hidden", "patch_size"}
    if "patch_size" in overrides:
        changed.add("image_size")  # which is then meant for the new patches
    asked = {name: value for name, value in overrides.items() if name not in changed}
    if staged:
        if found.entry is not None:  # which knows the size of the photos, where no config file does
            hints.append(("the catalogue", {"image_size": found.entry.preprocess.image_size}))
        sizes: dict[str, Any] = {name: asked.pop(name) for name in ("image_size", "window_size") if name in asked}
        if "blocks.0.attn.cosine_scale.logarithm" in state:  # a Swin V2, whose tensors do not tell them
            hints.append(("you", sizes))
        reading = read_staged(state, encoder, hints, asked, found.source)
    else:
        reading = read_config(state, encoder, hints, asked, found.source)
        if encoder.origin.name == "timm":
            refuse_partial_pooling(reading.config, found, name)
    if settled is not None:
        warnings += [settled.warning] if settled.warning else []
    elif name is not None:
        depth = "depths" if staged else "depth"
        if depth not in overrides:
            check_depth(name, (found.config.get("model_args") or {}).get(depth), told, found.config_from, found.source)
    # DINOv3 as published has tables of its own for its rotations.
    elif not (encoder.origin.settled or names_architecture(found) or "rope_embed.periods" in encoder.shapes):
        warnings += _guessed(reading, family)
    return dataclasses.replace(reading, notes=notes, warnings=tuple(warnings))


def names_architecture(found: Found) -> bool:
    """Whether something says which architecture it is, so that what is usual there is no guess."""
    known = name_of(str(found.config.get("architecture"))) is not None
    return known or found.entry is not None or bool(found.config.get("model_type"))


def _guessed(reading: Reading, family: str) -> list[str]:
    """One line that names what no tensor and no file told."""
    guesses = [
        f"{name}={getattr(reading.config, name)!r}"
        for name in OPEN[family]
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
    """What the checkpoint says of it; where it is not wanted, what cannot be read is no obstacle."""
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
            notes.append(f"passed over {name}={found.preprocessor[name]!r} of its image processor: not known here")
        return from_transformers(found.preprocessor)
    values = found.config.get("pretrained_cfg")
    if values:
        for name in unknown_to_timm(values):
            notes.append(f"passed over {name}={values[name]!r} in pretrained_cfg: not known here")
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
    """The names of the classes, if the checkpoint has as many as the model."""
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
    return None if paths is None or labels is None else Groups(labels, tuple(paths))


def subject_of(found: Found) -> SubjectHeat | None:
    values = (found.config.get("patchlight") or {}).get("subject")
    return None if values is None else SubjectHeat.from_dict(values)


def licence_of(found: Found) -> str | None:
    if "patchlight" in found.config:
        return found.config["patchlight"].get("licence")
    return found.entry.licence if found.entry else None
