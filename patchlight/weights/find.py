"""Where a checkpoint lies (in the package, on disk or on the hub), which files it is made of, and what names its
architecture: the caller, its config.json, an entry beside its tensors, or the name of its file."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchlight.weights.catalog import CATALOGUE, Entry, find_by_hub
from patchlight.weights.hub import fetch
from patchlight.weights.read import CheckpointError, read_json
from patchlight.weights.timm_configs import architectures, name_in_file, name_of, refuse_unsupported

ASSETS = Path(__file__).parent.parent / "assets"

FILE_NAME = "the name of its file"

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclass(frozen=True)
class Found:
    """The files behind a source."""

    source: str
    weights: Path
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    entry: Entry | None
    config_from: str = "config.json"
    """Where `config` was read: a file name, or an argument."""


def find(source: str | Path, revision: str | None = None) -> Found:
    """The weights file of a source, and the config files beside it."""
    name = str(source)
    if name == "default":
        return _in_folder(name, ASSETS / "default", None)
    if name.startswith("hf:"):
        return _in_folder(name, fetch(name.removeprefix("hf:"), revision), find_by_hub(name.removeprefix("hf:")))
    path = Path(source)
    try:
        if path.is_dir():
            return _in_folder(name, path, None)
        exists = path.exists() or path.is_symlink()
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise CheckpointError(f"{name}: {(error.strerror or 'cannot be read').lower()}") from None
    if exists:
        beside = configs_beside(path.parent) if path.name in WEIGHT_FILES else ({}, {})
        return Found(name, path, *beside, None)
    if name in CATALOGUE:
        return _in_folder(name, fetch(CATALOGUE[name].hub, revision), CATALOGUE[name])
    nearest = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.7)
    hint = (
        f"did you mean {nearest[0]!r}?" if nearest else "`patchlight models` lists the names, hf:owner/name is the hub"
    )
    raise CheckpointError(f"{name}: no such file, folder or catalogue name; {hint}")


def _in_folder(source: str, folder: Path, entry: Entry | None) -> Found:
    weights = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if weights is None:
        others = sorted(
            path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".npz")
        )
        if not others and (folder / "engine.json").exists():
            raise CheckpointError(
                f"{source}: holds an exported model; give it to crop, classify or serve as --engine, or to "
                "`load_engine`"
            )
        if not others and (folder / "run.json").exists():
            raise CheckpointError(f"{source}: this run is not finished; resume the training first")
        if len(others) != 1:
            what = f"several ({', '.join(path.name for path in others)}): name one" if others else "none"
            raise CheckpointError(f"{source}: expected model.safetensors or one other weights file in it; found {what}")
        weights = others[0]
    return Found(source, weights, *configs_beside(folder), entry)


def configs_beside(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of config.json and of transformers' preprocessor file; {} for a missing file."""
    config, processor, preprocessor = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("config.json", "processor_config.json", "preprocessor_config.json")
    )
    if "architecture" in config and not {"pretrained_cfg", "model_args", "patchlight"} & set(config):
        # timm's first form, in which pretrained_cfg was not a part of the file but all of it
        flat = {{"labels": "label_names"}.get(name, name): value for name, value in config.items()}
        config["pretrained_cfg"] = {name: flat[name] for name in flat if name not in ("architecture", "num_features")}
    # transformers 5 writes the image processor of models that read texts, too, into their processor's file, and looks
    # there first.
    return config, processor.get("image_processor") or preprocessor


def identify(found: Found, beside: Mapping[str, Any], like: str | None) -> Found:
    """The same with the config that says which architecture it is; `beside`: what stands beside its tensors."""
    if like is not None:
        found = _like(found, like)
    elif not found.config and name_of(str(beside.get("architecture"))) is not None:
        found = dataclasses.replace(found, config=dict(beside), config_from="its entry 'arch'")
    elif not found.config and (name := name_in_file(found.weights)) is not None:
        found = dataclasses.replace(found, config={"architecture": name}, config_from=FILE_NAME)
    name = name_of(str(found.config.get("architecture")))
    if name is not None:
        refuse_unsupported(name, found.config_from, found.source)
    return found


def _like(found: Found, like: str) -> Found:
    """The same checkpoint with the config of what `like` names."""
    if "patchlight" in found.config:
        raise CheckpointError(f"{found.source}: its config.json says already what it is; leave like={like!r} out")
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
    """Of what `like` names: config.json, the image processor's settings, and its row in the catalogue."""
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
