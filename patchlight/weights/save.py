"""A model to a folder that reloads bit for bit: weights, config, preprocessing, labels and a card."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from patchlight.config import PreprocessConfig, SubjectHeat, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.families import ConvNeXtConfig, ModelConfig, SwinConfig, encoder_in_words
from patchlight.files import replacing
from patchlight.models.families import Model
from patchlight.weights import convert_convnext, convert_swin
from patchlight.weights.convert import State, convert_to
from patchlight.weights.load import VERSION, Loaded
from patchlight.weights.names import TIMM, TRANSFORMERS_OLD

TRANSFORMERS_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}


def save(
    model: Model | Loaded,
    folder: str | Path,
    *,
    layout: Literal["patchlight", "transformers", "timm"] = "patchlight",
    preprocess: PreprocessConfig | None = None,
    labels: Sequence[str] | None = None,
    subject: SubjectHeat | None = None,
    licence: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model to `folder`, for `load`; with another `layout`, for that library's loader too.

    `layout="transformers"` is read by its AutoModel and AutoModelForImageClassification, `layout="timm"` by
    `timm.create_model("local-dir:FOLDER")`; an architecture that the library does not have raises. What came with a
    loaded model (preprocessing, labels, how it finds subjects, licence) goes along unless given.
    """
    vit = model.model if isinstance(model, Loaded) else model
    if isinstance(model, Loaded):
        preprocess = preprocess or model.preprocess.config
        labels = labels if labels is not None else model.labels
        subject = subject or model.subject
        licence = licence or model.provenance.licence
    if not isinstance(vit, Model):
        raise PatchlightError(f"save takes a ViT, a Swin, a ConvNeXt, or what load gave, not a {type(vit).__name__}")
    if layout not in ("patchlight", *_LAYOUTS):
        raise PatchlightError(f"layout={layout!r} should be one of 'patchlight', 'transformers', 'timm'")
    preprocess = preprocess or PreprocessConfig(image_size=vit.config.image_size, crop_pct=0.875)
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels or ()):
        raise PatchlightError("labels should be a list of names, one a class")
    if labels is not None and len(labels) != vit.config.num_classes:
        raise PatchlightError(f"{len(labels)} labels were given for {vit.config.num_classes} classes")
    config = vit.config
    state, outer = (
        _LAYOUTS[layout](config, vit.state_dict(), preprocess) if layout != "patchlight" else (vit.state_dict(), {})
    )
    own = {
        "version": VERSION,
        "model": config.to_dict(),
        "preprocess": preprocess.to_dict(),
        "preprocess_fingerprint": preprocess.fingerprint(),
        "labels": None if labels is None else list(labels),
        "subject": None if subject is None else subject.to_dict(),
        "licence": licence,
    }
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
    return _write(Path(folder), files, overwrite=overwrite)


def _write(folder: Path, files: dict[str, bytes | State], *, overwrite: bool) -> Path:
    """Each file whole or not at all, the config last: a folder without one was never finished."""
    if folder.exists() and not folder.is_dir():
        raise PatchlightError(f"{folder}: is a file; name a folder to save to")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise PatchlightError(f"{folder}: is not empty; name another folder, or pass overwrite=True")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in {"preprocessor_config.json"} - set(files):  # of another layout, written over
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


def _refuse(layout: str, config: ModelConfig, **needed: Any) -> None:
    """Raise where the config has something that the other library's model has not."""
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise PatchlightError(
                f"{name}={getattr(config, name)!r} cannot be written with layout={layout!r}, whose model has "
                f"{value!r}; use layout='patchlight'"
            )


def _to_transformers(config: ModelConfig, state: State, preprocess: PreprocessConfig) -> tuple[State, dict[str, Any]]:
    if not isinstance(config, ViTConfig):
        return _staged_to_transformers(config, state)
    _refuse(
        "transformers",
        config,
        stem="patchify",
        position="learned",
        prefix_positions="all",
        class_token=True,
        distill_token=False,
        num_registers=0,
        qk_norm=False,
        embed_norm=False,
        layer_scale=None,
        patch_bias=True,
        resnet=None,
        block_norm="before",
        inner_norm="none",
        pooling="cls",
        final_norm="tokens",
        head_hidden=0,
    )
    if config.mlp not in TRANSFORMERS_ACTIVATIONS:
        _refuse("transformers", config, mlp="gelu")
    theirs = _with_batch_axis(
        convert_to(state, TRANSFORMERS_OLD), ("embeddings.cls_token", "embeddings.position_embeddings")
    )
    if config.num_classes:
        theirs = {key if key.startswith("classifier.") else f"vit.{key}": value for key, value in theirs.items()}
    return theirs, {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification" if config.num_classes else "ViTModel"],
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": TRANSFORMERS_ACTIVATIONS[config.mlp],
        "layer_norm_eps": config.norm_eps,
        "image_size": _one_or_two(config.image_size),
        "patch_size": _one_or_two(config.patch_size),
        "num_channels": config.in_channels,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **({"num_labels": config.num_classes} if config.num_classes else {}),
    }


def _to_timm(config: ModelConfig, state: State, preprocess: PreprocessConfig) -> tuple[State, dict[str, Any]]:
    if not isinstance(config, ViTConfig):
        return _staged_to_timm(config, state, preprocess)
    _refuse("timm", config, position="learned", head_hidden=0, distill_token=False)
    _refuse("timm", config, stem="patchify", resnet=None, block_norm="before", inner_norm="none")
    if config.mlp == "swiglu":
        _refuse("timm", config, mlp="gelu")
    if config.prefix_positions == "class" and config.num_registers:
        _refuse("timm", config, prefix_positions="all")
    if config.pooling == "cls_mean":
        _refuse("timm", config, pooling="cls")
    if config.norm_eps not in (1e-6, 1e-5):
        _refuse("timm", config, norm_eps=1e-6)
    if config.patch_bias == config.embed_norm:  # timm ties the two
        _refuse("timm", config, patch_bias=not config.embed_norm)
    names = tuple(row for row in TIMM if row[0] != ("norm." if config.final_norm == "pooled" else "fc_norm."))
    theirs = _with_batch_axis(convert_to(state, names), ("cls_token", "reg_token", "pos_embed", "attn_pool.latent"))
    pooling = {"cls": "token", "mean": "avg", "attention": "map"}[config.pooling]
    arguments = {
        "img_size": list(config.image_size),
        "patch_size": list(config.patch_size),
        "in_chans": config.in_channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_width / config.width,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
        "class_token": config.class_token,
        "reg_tokens": config.num_registers,
        "no_embed_class": config.prefix_positions == "none",
        "pre_norm": config.embed_norm,
        "fc_norm": config.final_norm == "pooled",
        "global_pool": pooling,
        "act_layer": config.mlp,  # timm's names for these are ours
    }
    if config.norm_eps == 1e-5:
        arguments["norm_layer"] = "layernorm"
    return theirs, {
        "architecture": "vit_base_patch16_224",
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": pooling,
        "model_args": arguments,
        "pretrained_cfg": _pretrained_cfg(config, preprocess, first_conv="patch_embed.proj", classifier="head"),
    }


def _pretrained_cfg(config: ModelConfig, preprocess: PreprocessConfig, **layers: str) -> dict[str, Any]:
    """How timm prepares photos, and which layers are the first and the last."""
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
        **layers,
    }


def _staged_to_timm(
    config: SwinConfig | ConvNeXtConfig, state: State, preprocess: PreprocessConfig
) -> tuple[State, dict[str, Any]]:
    patch = config.patch_size[0]
    _refuse("timm", config, patch_size=(patch, patch))
    if isinstance(config, SwinConfig):
        window = config.window_size[0]
        _refuse("timm", config, window_size=(window, window), norm_eps=1e-5, uneven_windows="masked")
        (theirs, name, arguments), first = convert_swin.to_timm(config, state), "patch_embed.proj"
    else:
        _refuse("timm", config, final_norm_eps=config.norm_eps)
        if len(config.depths) != 4:
            raise PatchlightError(f"depths={config.depths} cannot be written with layout='timm', which has 4 stages")
        (theirs, name, arguments), first = convert_convnext.to_timm(config, state), "stem.0"
    return theirs, {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.feature_width,
        "global_pool": "avg",
        "model_args": arguments,
        "pretrained_cfg": _pretrained_cfg(config, preprocess, first_conv=first, classifier="head.fc"),
    }


def _staged_to_transformers(config: SwinConfig | ConvNeXtConfig, state: State) -> tuple[State, dict[str, Any]]:
    side, patch = config.image_size[0], config.patch_size[0]
    _refuse("transformers", config, image_size=(side, side), patch_size=(patch, patch))
    if isinstance(config, SwinConfig):
        window = config.window_size[0]
        _refuse("transformers", config, window_size=(window, window), norm_eps=1e-5, uneven_windows="plain")
        return convert_swin.to_transformers(config, state)
    _refuse("transformers", config, kernel_size=7, norm_eps=1e-6, mlp="gelu")
    if config.grn:
        _refuse("transformers", config, layer_scale=None)
    return convert_convnext.to_transformers(config, state)


_LAYOUTS = {"transformers": _to_transformers, "timm": _to_timm}


def _with_batch_axis(state: State, keys: tuple[str, ...]) -> dict[str, Tensor]:
    return {key: value[None] if key in keys else value for key, value in state.items()}


def _one_or_two(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def _transformers_preprocessor(preprocess: PreprocessConfig) -> dict[str, Any]:
    """The nearest image processor of transformers; ours is exact, in config.json."""
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
        "encoder": encoder_in_words(config),
        "output": f"{config.num_classes or 'no'} classes, pooling {getattr(config, 'pooling', 'mean')}",
        "labels": "in config.json" if labels else "none",
        "resizing": f"{preprocess.resize}, {_times(preprocess.scaled_size)}, {preprocess.interpolation}",
        "colours": f"mean {preprocess.mean}, std {preprocess.std}",
        "preprocessing": preprocess.fingerprint(),
        "licence": licence or "not stated",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    title = {"swin": "A Swin Transformer", "convnext": "A ConvNeXt"}.get(config.to_dict()["architecture"])
    front = f"---\nlicense: {licence.lower() if licence else 'unknown'}\ntags: [vision-transformer]\n---"
    heading = f"# {title or 'A Vision Transformer'}\n\n| | |\n|---|---|"
    return f'{front}\n\n{heading}\n{table}\n\nLoad it with `patchlight.load("FOLDER")`.\n'


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
