"""A model to a folder that reloads bit for bit (weights, config, preprocessing, labels and a card), or to the hub."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import save_file

from patchlight.config import PreprocessConfig, SubjectHeat
from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig
from patchlight.files import replacing
from patchlight.models.families import Model, is_model
from patchlight.remote import on_disk
from patchlight.weights.about import VERSION
from patchlight.weights.convert import State
from patchlight.weights.families import family_of, names_of_families
from patchlight.weights.groups import Groups, read_groups
from patchlight.weights.hub import upload
from patchlight.weights.load import Loaded, load


def save(
    model: Model | Loaded,
    folder: str | Path,
    *,
    layout: Literal["patchlight", "transformers", "timm"] = "patchlight",
    preprocess: PreprocessConfig | None = None,
    labels: Sequence[str] | None = None,
    subject: SubjectHeat | None = None,
    groups: Groups | str | Path | None = None,
    licence: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model to `folder`, for `load`; with another `layout`, for that library's loader too.

    `layout="transformers"` is read by its AutoModel and AutoModelForImageClassification, `layout="timm"` by
    `timm.create_model("local-dir:FOLDER")`; an architecture that the library does not have raises. What came with a
    loaded model (preprocessing, labels and their groups, how it finds subjects, licence) goes along unless given; of
    its bare `.model` the preprocessing alone does. A model that was never loaded gets the usual one unless given.
    `groups` may be the path of a table as `read_groups` takes it.
    """
    vit = model.model if isinstance(model, Loaded) else model
    if isinstance(model, Loaded):
        model.check_has_weights("save")
        preprocess = preprocess or model.preprocess.config
        if labels is None:
            labels, groups = model.labels, groups or model.groups  # of other labels, the groups would be others
        subject = subject or model.subject
        licence = licence or model.provenance.licence
    if not is_model(vit):
        raise PatchlightError(
            f"save takes a {names_of_families('or')} model, or what load gave, not a {type(vit).__name__}"
        )
    if layout not in ("patchlight", *_LAYOUTS):
        raise PatchlightError(f"layout={layout!r} should be one of 'patchlight', 'transformers', 'timm'")
    preprocess = preprocess or vit.preprocess or PreprocessConfig(image_size=vit.config.image_size, crop_pct=0.875)
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels or ()):
        raise PatchlightError("labels should be a list of names, one a class")
    if labels is not None and len(labels) != vit.config.num_classes:
        raise PatchlightError(f"{len(labels)} labels were given for {vit.config.num_classes} classes")
    if groups is not None and labels is None:
        raise PatchlightError("groups= needs labels=, and there are no labels; pass them too, or leave groups= out")
    if isinstance(groups, str | Path):
        groups = read_groups(groups, labels or ())
    if groups is not None and not isinstance(groups, Groups):
        raise PatchlightError(f"groups should be the path of a CSV (label,group), not a {type(groups).__name__}")
    if groups is not None and (labels is None or groups.labels != tuple(labels)):
        raise PatchlightError("the groups belong to other labels; make them from the labels that are saved")
    config, state = vit.config, vit.state_dict()
    outer: dict[str, Any] = {}
    if layout != "patchlight":
        config, state, outer = _LAYOUTS[layout](config, state, preprocess)
    own = own_part(config, preprocess, labels, groups, subject, licence)
    if labels is not None and layout == "transformers":
        outer |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    if labels is not None and layout == "timm":
        outer["label_names"] = list(labels)
    files: dict[str, bytes | State] = {
        "model.safetensors": {key: value.contiguous() for key, value in state.items()},
        "config.json": _json(outer | {"patchlight": own}),
        "README.md": _card(config, preprocess, licence, labels).encode(),
    }
    if layout == "transformers":
        files["preprocessor_config.json"] = _json(_transformers_preprocessor(preprocess))
    return _write(on_disk(folder), files, overwrite=overwrite)


def own_part(
    config: ModelConfig,
    preprocess: PreprocessConfig,
    labels: Sequence[str] | None,
    groups: Groups | None,
    subject: SubjectHeat | None,
    licence: str | None,
) -> dict[str, Any]:
    """What config.json says of a model under "patchlight"."""
    return {
        "version": VERSION,
        "model": config.to_dict(),
        "preprocess": preprocess.to_dict(),
        "preprocess_fingerprint": preprocess.fingerprint(),
        "labels": None if labels is None else list(labels),
        **({} if groups is None else {"groups": list(groups.paths)}),
        **({} if groups is None or not groups.is_measured else {"groups_said_from": groups.said_from}),
        "subject": None if subject is None else subject.to_dict(),
        "licence": licence,
    }


def _write(folder: Path, files: dict[str, bytes | State], *, overwrite: bool) -> Path:
    """Each file whole or not at all, the config last: a folder without one was never finished."""
    if folder.exists() and not folder.is_dir():
        raise PatchlightError(f"{folder}: is a file; name a folder to save to")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise PatchlightError(f"{folder}: is not empty; name another folder, or pass overwrite=True")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in {"preprocessor_config.json", "processor_config.json"} - set(files):  # of another layout, written over
        (folder / stale).unlink(missing_ok=True)
    for name in sorted(files, key=lambda name: name == "config.json"):
        content = files[name]
        try:
            with replacing(folder / name) as temporary:
                if isinstance(content, bytes):
                    temporary.write_bytes(content)
                else:
                    save_file(content, temporary, {"format": "pt"})
                    temporary.chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read
        except (OSError, SafetensorError) as error:
            raise PatchlightError(f"{folder / name}: could not be written ({error})") from None
    return folder


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


Written = tuple[ModelConfig, State, dict[str, Any]]
"""The config of what is written, its state in their names, and their config.json."""


def _to_transformers(config: ModelConfig, state: State, preprocess: PreprocessConfig) -> Written:
    write = family_of(config).to_transformers
    if write is None:
        raise PatchlightError(f"layout='transformers': it has no {config.title}; use layout='patchlight'")
    written = write(config, state)
    return written.config, written.state, written.settings


def _to_timm(config: ModelConfig, state: State, preprocess: PreprocessConfig) -> Written:
    write = family_of(config).to_timm
    if write is None:
        raise PatchlightError(f"layout='timm': it has no {config.title}; use layout='patchlight'")
    written = write(config, state)
    return (
        written.config,
        written.state,
        {
            "architecture": written.architecture,
            "num_classes": config.num_classes,
            "num_features": config.token_width,
            "global_pool": written.arguments.get("global_pool", "avg"),
            "model_args": written.arguments,
            "pretrained_cfg": _pretrained_cfg(config, preprocess)
            | {"first_conv": written.first_conv, "classifier": written.classifier},
        },
    )


def _pretrained_cfg(config: ModelConfig, preprocess: PreprocessConfig) -> dict[str, Any]:
    """How timm prepares photos."""
    if preprocess.resize == "none":
        raise PatchlightError("preprocessing with resize='none' cannot be written with layout='timm'")
    height, width = preprocess.image_size
    return {
        "input_size": [config.in_channels, height, width],
        "num_classes": config.num_classes,
        "interpolation": preprocess.interpolation,
        "crop_pct": height / preprocess.scaled_size[0],
        "crop_mode": {"shortest": "center"}.get(preprocess.resize, preprocess.resize),
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }


_LAYOUTS = {"transformers": _to_transformers, "timm": _to_timm}


def _transformers_preprocessor(preprocess: PreprocessConfig) -> dict[str, Any]:
    """Settings for the image processor of transformers that comes nearest; the exact ones are in config.json."""
    resample = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}[preprocess.interpolation]
    values: dict[str, Any] = {
        "do_resize": True,
        "resample": resample,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    height, width = preprocess.image_size
    if preprocess.resize == "squash" and preprocess.scaled_size == preprocess.image_size:
        return values | {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    return values | {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": min(preprocess.scaled_size)},
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
    }


def _card(config: ModelConfig, preprocess: PreprocessConfig, licence: str | None, labels: Sequence[str] | None) -> str:
    height, width = config.image_size
    rows = {
        "image": f"{height} x {width}, {config.in_channels} channels, patches of {_times(config.patch_size)}",
        "encoder": config.encoder_in_words,
        "output": f"{config.num_classes or 'no'} classes, pooling {getattr(config, 'pooling', 'mean')}",
        "labels": "in config.json" if labels else "none",
        "resizing": f"{preprocess.resize}, {_times(preprocess.scaled_size)}, {preprocess.interpolation}",
        "colours": f"mean {preprocess.mean}, std {preprocess.std}",
        "preprocessing": preprocess.fingerprint(),
        "licence": licence or "not stated",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    front = f"---\nlicense: {licence.lower() if licence else 'unknown'}\ntags: [vision-transformer]\n---"
    heading = f"# A {config.title}\n\n| | |\n|---|---|"
    return f'{front}\n\n{heading}\n{table}\n\nLoad it with `patchlight.load("FOLDER")`.\n'


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


CARD_FILES = ("README.md", "curves.png")
"""Files of a finished run that are uploaded in place of the plain card that `save` writes."""


def push(
    model: str | Path | Loaded,
    name: str,
    *,
    layout: Literal["patchlight", "timm", "transformers"] = "patchlight",
    private: bool = False,
) -> str:
    """Upload a model (a run's folder, or whatever `load` takes or gave) to NAME, as OWNER/NAME; its address."""
    loaded = model if isinstance(model, Loaded) else load(model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = save(loaded, temporary, layout=layout)
        for each in CARD_FILES:
            if not isinstance(model, Loaded) and (Path(model) / each).is_file():
                (folder / each).write_bytes((Path(model) / each).read_bytes())
        return upload(folder, name, private=private)
