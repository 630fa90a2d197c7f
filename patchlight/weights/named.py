"""Which architecture a checkpoint is said to be of: by the caller, its config.json, an entry beside its tensors, or the
name of its file."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchlight.weights.catalog import CATALOGUE, Entry, find_by_hub
from patchlight.weights.find import Found, configs_beside
from patchlight.weights.hub import fetch
from patchlight.weights.others import refuse_others
from patchlight.weights.read import CheckpointError
from patchlight.weights.timm_architectures import architectures, name_in_file, name_of, refuse_unsupported

FILE_NAME = "the name of its file"


def named(found: Found, said: Mapping[str, Any], like: str | None) -> Found:
    """What is found, with the config that says what it is; `said`: what stands beside its tensors."""
    if like is not None:
        found = _like(found, like)
    elif not found.config and name_of(str(said.get("architecture"))) is not None:
        found = dataclasses.replace(found, config=dict(said), config_from="its entry 'arch'")
    elif not found.config and (name := name_in_file(found.weights)) is not None:
        found = dataclasses.replace(found, config={"architecture": name}, config_from=FILE_NAME)
    refuse_others([], found.config, found.source)
    name = name_of(str(found.config.get("architecture")))
    if name is not None:
        refuse_unsupported(name, found.config_from, found.source)
    return found


def _like(found: Found, like: str) -> Found:
    """With the config of another checkpoint in place of its own."""
    if "patchlight" in found.config:
        raise CheckpointError(f"{found.source}: its config.json says all that it is; leave like={like!r} out")
    config, preprocessor, entry = _config_of(like)
    where = f"like={like!r}"
    if name_of(str(config.get("architecture"))) is None and not {"model_type", "patchlight"} & set(config):
        raise CheckpointError(
            f"{found.source}: {where} has no config.json of timm, transformers or Patchlight; name another"
        )
    return dataclasses.replace(
        found, config=config, preprocessor=found.preprocessor or preprocessor, entry=entry, config_from=where
    )


def _config_of(like: str) -> tuple[dict[str, Any], dict[str, Any], Entry | None]:
    """config.json, how photos are prepared, and row of the catalogue of what `like` names."""
    entry = CATALOGUE.get(like) or find_by_hub(like.removeprefix("hf:"))
    name = name_of(like)
    if name is not None:
        return {"architecture": name}, {}, entry
    folder = Path(like)
    if entry is not None or like.startswith("hf:"):
        folder = fetch(entry.hub if entry is not None else like.removeprefix("hf:"), configs_only=True)
    elif not folder.is_dir():
        nearest = difflib.get_close_matches(like, [*architectures(), *CATALOGUE], n=1)
        remedy = f"did you mean {nearest[0]!r}?" if nearest else "`patchlight models` lists the catalogue"
        raise CheckpointError(
            f"like={like!r} is not an architecture of timm, a checkpoint of the catalogue, hf:owner/name, or a folder "
            f"with a config.json; {remedy}"
        )
    return *configs_beside(folder), entry
