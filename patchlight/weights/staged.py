"""What checkpoints of models with stages (Swin, ConvNeXt) have in common.

Our blocks are counted over all stages, others' within each.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from patchlight.errors import PatchlightError
from patchlight.weights.convert import State
from patchlight.weights.family import Evidence, Reading, read_config
from patchlight.weights.read import CheckpointError


def count_over_stages(state: State, block: str, merge: str, first_merge: int) -> State:
    """Blocks counted over all stages, and what lies between stages as `merges`.

    `block` and `merge` are patterns whose groups are the numbers; `first_merge` is the number of the first merge there.
    """
    counts: dict[int, int] = {}
    for key in state:
        if match := re.match(block, key):
            counts[int(match[1])] = max(counts.get(int(match[1]), 0), int(match[2]) + 1)

    def rename(key: str) -> str:
        if match := re.match(block, key):
            before = sum(count for stage, count in counts.items() if stage < int(match[1]))
            return f"blocks.{before + int(match[2])}.{key[match.end() :]}"
        if match := re.match(merge, key):
            number = next(group for group in match.groups() if group is not None)
            return f"merges.{int(number) - first_merge}.{key[match.end() :]}"
        return key

    return {rename(key): value for key, value in state.items()}


def count_within_stages(state: State, config: Any, block: str, merge: str, first_merge: int) -> State:
    """The inverse: `block` and `merge` are forms for the names, to be filled with the numbers."""
    theirs: State = {}
    for key, value in state.items():
        if match := re.match(r"blocks\.(\d+)\.", key):
            stage = config.stage_of(int(match[1]))
            key = block.format(stage, int(match[1]) - config.stage_starts[stage]) + key[match.end() :]
        elif match := re.match(r"merges\.(\d+)\.", key):
            key = merge.format(int(match[1]) + first_merge) + key[match.end() :]
        theirs[key] = value
    return theirs


def read(evidence: Evidence) -> Reading:
    """The config of a checkpoint with stages."""
    source, told, config = evidence.source, evidence.told, evidence.shapes.family.config
    if "norm.weight" not in evidence.state:
        raise CheckpointError(
            f"{source}: the norm after the last stage is not in it, as in what transformers calls backbones; "
            "without it they are not supported"
        )
    hints, asked = list(evidence.hints), evidence.asked
    if evidence.found.entry is not None:  # which knows the size of the photos, where no config file does
        hints.append(("the catalogue", {"image_size": evidence.found.entry.preprocess.image_size}))
    sizes: dict[str, Any] = {name: asked.pop(name) for name in ("image_size", "window_size") if name in asked}
    if told.get("v2"):  # a Swin whose tensors do not tell them
        hints.append(("you", sizes))
    known = set(told).union(asked, *(settings for _, settings in hints))
    if told.get("v2") and not {"window_size", "image_size"} <= known:
        raise CheckpointError(
            f"{source}: the tensors of a Swin V2 do not tell its windows; pass those that it was trained with, as in "
            "window_size=8, image_size=256"
        )
    # What no tensor tells is named as a convention, so that a load says what it took for granted.
    usual = [field for field in fields(config) if field.name.endswith("norm_eps") or field.name == "mlp"]
    return read_config(evidence, asked, hints, {field.name: field.default for field in usual})


def timm_hints(config: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """`hints` of one family, with what timm's config.json says of every model with stages."""
    arguments = config.get("model_args") or {}
    pooling = arguments.get("global_pool") or config.get("global_pool") or "avg"
    if pooling != "avg":
        raise PatchlightError(f"config.json says global_pool={pooling!r}, which is not supported")
    size = (config.get("pretrained_cfg") or {}).get("input_size", [None])[1:]
    return {**hints, "image_size": arguments.get("img_size") or size or hints.get("image_size")}
