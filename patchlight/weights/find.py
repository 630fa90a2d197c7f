"""Where a checkpoint lies: in the package, on disk or on the hub, and which files it is made of."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchlight.weights.catalog import CATALOGUE, Entry, find_by_hub
from patchlight.weights.hub import fetch
from patchlight.weights.read import CheckpointError, read_json

ASSETS = Path(__file__).parent.parent / "assets"

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
    """Where `config` stands."""


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
        if not others and (folder / "run.json").exists():
            raise CheckpointError(
                f"{source}: this run is not finished; the command that began it goes on with --resume"
            )
        if len(others) != 1:
            what = f"several ({', '.join(path.name for path in others)}): name one" if others else "none"
            raise CheckpointError(f"{source}: expected model.safetensors or one other weights file in it; found {what}")
        weights = others[0]
    return Found(source, weights, *configs_beside(folder), entry)


def configs_beside(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json, and how transformers prepares photos; empty where there is none."""
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
