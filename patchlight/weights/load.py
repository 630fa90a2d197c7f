"""Any checkpoint that we know to the model that its authors meant, with its preprocessing; or one clear sentence."""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.config import PreprocessConfig, SubjectHeat, ViTConfig, check_names
from patchlight.errors import PatchlightError
from patchlight.families import CONFIGS, ModelConfig, SwinConfig, check_names_of_any, config_from_dict
from patchlight.images.preprocess import Preprocess
from patchlight.images.preprocess import from_timm as timm_preprocess
from patchlight.images.preprocess import from_transformers as transformers_preprocess
from patchlight.models.families import Model, make_model
from patchlight.models.positions import resample
from patchlight.models.stems import resize_projection
from patchlight.weights.catalog import CATALOGUE, Entry, find_by_hub
from patchlight.weights.convert import State, convert, reorder_rope
from patchlight.weights.convert_swin import fit_windows
from patchlight.weights.fetch import fetch
from patchlight.weights.groups import Groups
from patchlight.weights.inspect import Reading, Recognised, check_config, read_config, recognise
from patchlight.weights.others import name_in, refuse_others
from patchlight.weights.read import CheckpointError, check_finite, read_checkpoint, read_json
from patchlight.weights.staged import check_staged, hints_of, read_staged
from patchlight.weights.timm_arguments import vit_settings

VERSION = 1
"""Of the part of config.json that is ours."""

ASSETS = Path(__file__).parent.parent / "assets"

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")

EVA_ROPE = {"position": "rope2d", "rope_base": 10_000.0, "rope_grid": (16, 16)}

# What the name of a timm architecture says, and its config file does not. Later rows overrule earlier ones.
TIMM_ARCHITECTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("test_vit", {"num_heads": 2}),
    ("test_vit3", {"num_heads": 3}),
    ("vit_base_patch16_gap_224", {"num_heads": 16}),
    ("quickgelu", {"mlp": "quick_gelu"}),
    ("patch32_siglip", {"mlp": "gelu_tanh"}),
    ("large_patch16_siglip_512", {"mlp": "gelu_tanh"}),
    ("large_patch16_siglip_gap_512", {"mlp": "gelu_tanh"}),
    ("so400m_patch16_siglip", {"mlp": "gelu_tanh"}),
    ("giantopt", {"mlp": "gelu_tanh", "num_heads": 16}),
    ("_clip_", {"norm_eps": 1e-5}),
    ("beit3", {"norm_eps": 1e-5}),
    ("eva", {"norm_eps": 1e-6}),
    ("eva02", EVA_ROPE),
    ("eva02_enormous", {"position": "learned", "block_norm": "after"}),
    ("_rpn_", {"block_norm": "after"}),
    ("huge_plus", {"num_heads": 20}),
    ("_7b_", {"num_heads": 32}),
    ("dinov3", {"position": "rope2d", "rope_coordinates": "centred", "norm_eps": 1e-5, "pooling": "mean"}),
    ("lingbot", {"position": "rope2d", "rope_coordinates": "centred", "norm_eps": 1e-5}),
    ("_rope_", {"position": "rope2d"}),
    ("_rope_reg", EVA_ROPE),
)

# Those that pool prefix tokens, too.
TIMM_POOLS_PREFIX = ("test_vit3",)

# Parts of timm architectures' names whose computation is another, though the tensors' names are the same.
TIMM_OTHERS = ("vit_pe_", "_xp_", "_18x2_")

TIMM_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "swiglu"}

TRANSFORMERS_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "swiglu",  # only gated MLPs have it
}


@dataclass(frozen=True)
class Provenance:
    """Where a model came from."""

    source: str
    origin: str
    path: Path
    licence: str | None

    @functools.cached_property
    def sha256(self) -> str:
        """Of the weights file (of the index, for shards); computed when first asked for."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, and everything that came with it."""

    model: Model
    config: ModelConfig
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    subject: SubjectHeat | None
    """How it says where the subject is, if it was taught to."""
    provenance: Provenance
    why: Mapping[str, str]
    """Where each setting of the config came from: shapes, config.json, the catalogue, a convention, or you."""
    notes: tuple[str, ...]
    """What was left out, replaced, resampled or assumed."""
    groups: Groups | None = None
    """What its classes have in common (animal, thing, ...), if it is known."""


@dataclass(frozen=True)
class Found:
    """The files behind a source."""

    source: str
    weights: Path
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    entry: Entry | None


def load(
    source: str | Path,
    *,
    strict: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    preprocess: PreprocessConfig | None = None,
    **overrides: Any,
) -> Loaded:
    """The model in a checkpoint, in eval mode.

    `source`: "default" (the model inside the package), a catalogue name (`patchlight models`), a .safetensors, .pt,
    .pth, .bin or .npz file, a folder (Hugging Face's, timm's or ours), or "hf:owner/name" on the hub.
    `overrides` are settings of its config (`ViTConfig`, `SwinConfig`, `ConvNeXtConfig`) that the checkpoint cannot
    tell, such as `num_heads=3`; `num_classes=` puts a fresh head in place of another, `image_size=` (in a Swin,
    `window_size=`) resamples the positions for good, and `patch_size=` resizes a ViT's patch projection too, so that
    the same image becomes fewer or more tokens (FlexiViT). A partial load raises, unless `strict=False`, which says in
    `notes` what is missing.
    """
    check_names_of_any(overrides)
    _check_arguments(source, dtype, device, preprocess)
    found = find(source, revision)
    tensors = read_checkpoint(found.weights)
    refuse_others([], found.config, str(source))
    try:
        encoder = recognise(tensors, str(source))
    except CheckpointError as error:
        refuse_others(tensors, {}, str(source))
        called = name_in(found.config)
        raise CheckpointError(f"{error}; config.json says {called!r}" if called else str(error)) from None
    refuse_others((encoder.prefix + key for key in encoder.shapes), {}, str(source))
    del tensors  # from here on, what the encoder does not need can go
    check_names(CONFIGS[encoder.origin.architecture], overrides)
    with _naming(str(source), "a tensor is not what its name promises"):
        state, left_out = convert(encoder.state, encoder.origin)
    _check_finite(state, found.weights, str(source))
    with _naming(str(source), "its config.json has a value that cannot be"):
        reading = _read(state, encoder, found, overrides)
        own_preprocess = _own_preprocess(found, asked=preprocess is not None)
        labels = _labels(found, reading.config)
        subject = _subject(found)
        groups = _groups(found, labels)
    notes = _notes(encoder, left_out, reading)

    with _naming(str(source), "an override cannot be"):
        config = _target(reading.config, overrides, notes)
    if isinstance(config, ViTConfig) and isinstance(reading.config, ViTConfig):
        if encoder.origin.name == "timm" and config.turns and config.rope_coordinates == "index":
            state = reorder_rope(state, config)
        if config.pooling != "attention" and reading.config.pooling == "attention":
            state = {key: value for key, value in state.items() if not key.startswith("attention_pool.")}
            notes.append(f"pooling={config.pooling!r} in place of its attention pooling")
        _resize_patches(state, reading.config, config)
        _resample_positions(state, reading.config, config)
    elif isinstance(config, SwinConfig) and isinstance(reading.config, SwinConfig):
        fit_windows(state, reading.config, config, notes, str(source))
    with _naming(str(source), "its config.json asks for a model that cannot be made"), torch.device("meta"):
        model = make_model(config)
    _fill(model, state, reading.config, notes, strict=strict, source=str(source), dtype=dtype, device=device)
    return Loaded(
        model=model.eval(),
        config=config,
        preprocess=_preprocess(own_preprocess, config, preprocess, notes, resized="image_size" in overrides),
        labels=labels if config.num_classes == reading.config.num_classes else None,
        subject=subject,
        provenance=Provenance(str(source), encoder.origin.name, found.weights, _licence(found)),
        why=reading.why | dict.fromkeys(overrides, "you"),
        notes=tuple(notes),
        groups=groups if config.num_classes == reading.config.num_classes else None,
    )


def _check_arguments(source: Any, dtype: Any, device: Any, preprocess: Any) -> None:
    """Name a mistake in the call before any file is opened."""
    if not isinstance(source, str | Path) or not str(source):
        raise CheckpointError(f"{source!r} is no source; give a path, a catalogue name, or hf:owner/name")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"dtype={dtype!r} is not a floating-point type such as torch.bfloat16")
    if preprocess is not None and not isinstance(preprocess, PreprocessConfig):
        raise CheckpointError(f"preprocess is a {type(preprocess).__name__}; give a PreprocessConfig")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError):
        raise CheckpointError(f"device={device!r} is not here") from None


def _check_finite(state: State, weights: Path, source: str) -> None:
    """Refuse NaN and infinity, after the parts were joined and freed; by the name that the tensor has in the file."""
    try:
        check_finite(state, source)
    except CheckpointError:
        check_finite(recognise(read_checkpoint(weights), source).state, source)
        raise


@contextlib.contextmanager
def _naming(source: str, what: str) -> Iterator[None]:
    """Whatever a damaged checkpoint makes our own code trip over becomes one line that names the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except PatchlightError as error:
        raise CheckpointError(f"{source}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{source}: {what} ({type(error).__name__}: {reason})") from error


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
        beside = _beside(path.parent) if path.name in WEIGHT_FILES else ({}, {})
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
        if len(others) != 1:
            what = f"several ({', '.join(path.name for path in others)}): name one" if others else "none"
            raise CheckpointError(f"{source}: expected model.safetensors or one other weights file in it; found {what}")
        weights = others[0]
    return Found(source, weights, *_beside(folder), entry)


def _beside(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config, preprocessor = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("config.json", "preprocessor_config.json")
    )
    return config, preprocessor


def _read(state: State, encoder: Recognised, found: Found, overrides: Mapping[str, Any]) -> Reading:
    """The checkpoint's own config. Its head, image and patch size are its own business, whatever the caller wants of
    them."""
    staged = encoder.origin.architecture != "vit"
    if "patchlight" in found.config:
        settings = _our_part(found, "model")
        architecture = settings.get("architecture", "vit")
        if architecture != encoder.origin.architecture:
            raise CheckpointError(
                f"{found.source}: config.json says architecture={architecture!r}, but its tensors are named as those "
                f"of a {encoder.origin.architecture}"
            )
        if staged:
            check_staged(state, encoder, settings, found.source)
        else:
            check_config(state, encoder, settings, "config.json", found.source)
        own = config_from_dict(settings)
        return Reading(own, dict.fromkeys(own.to_dict(), "config.json"))
    hints: list[tuple[str, Mapping[str, Any]]] = []
    if staged and found.config:
        hints.append(("config.json", hints_of(encoder, found.config, found.source)))
    elif "architecture" in found.config:
        gated = "blocks.0.mlp.gate_and_up.weight" in state
        hints.append(("config.json", _timm_hints(found.config, gated=gated)))
    elif found.config:
        hints.append(("config.json", _transformers_hints(found.config, found.source)))
    if found.entry is not None:
        hints.append(("the catalogue", found.entry.settings))
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
        return read_staged(state, encoder, hints, asked, found.source)
    reading = read_config(state, encoder, hints, asked, found.source)
    if encoder.origin.name == "timm":
        _refuse_partial_pooling(reading.config, found)
    return reading


def _refuse_partial_pooling(config: ModelConfig, found: Found) -> None:
    """Of timm's ViTs that pool by attention, most leave prefix tokens out of it, and no tensor tells; those with
    rotations never do."""
    told = (found.config.get("model_args") or {}).get("pool_include_prefix")
    if told is None:
        told = found.config.get("architecture") in TIMM_POOLS_PREFIX
    if told or not isinstance(config, ViTConfig) or config.turns:
        return
    if config.pooling == "attention" and config.num_prefix:
        raise CheckpointError(
            f"{found.source}: it pools by attention, with {config.num_prefix} tokens in front of its patches; timm "
            "leaves them out of the pooling, which we do not have (only pool_include_prefix=True in model_args)"
        )


def _timm_hints(config: Mapping[str, Any], *, gated: bool) -> dict[str, Any]:
    """What timm's config.json says beyond the shapes; `gated`: the MLPs are."""
    architecture = str(config["architecture"])
    others = [part for part in TIMM_OTHERS if part in f"{architecture}_"]
    if others:
        raise PatchlightError(f"timm's {architecture} is not a plain ViT ({others[0].strip('_')}); it is not supported")
    hints: dict[str, Any] = {"block_norm": "before", "norm_eps": 1e-6}
    for part, settings in TIMM_ARCHITECTURES:
        if part in f"{architecture}_":
            hints |= settings
    arguments = config.get("model_args") or {}
    hints |= vit_settings(arguments)
    pooling = arguments.get("global_pool") or config.get("global_pool") or "token"
    if pooling not in ("token", "avg", "map"):
        raise PatchlightError(f"config.json says global_pool={pooling!r}, which we do not have")
    activation = arguments.get("act_layer")
    if activation is not None and (activation not in TIMM_ACTIVATIONS or (activation == "silu" and not gated)):
        plain = " in an MLP without a gate" if activation == "silu" else ""
        raise PatchlightError(f"config.json says act_layer={activation!r}{plain}, which we do not have")
    size = arguments.get("img_size") or (config.get("pretrained_cfg") or {}).get("input_size", [None])[1:]
    given = {
        "num_heads": arguments.get("num_heads"),
        "image_size": size or None,
        "mlp": TIMM_ACTIVATIONS.get(str(activation)),
        "pooling": {"avg": "mean"}.get(pooling) or ("cls" if arguments.get("global_pool") == "token" else None),
    }
    return hints | {name: value for name, value in given.items() if value is not None}


def _transformers_hints(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What transformers' config.json says beyond the shapes, and of the shapes what must agree."""
    config = config.get("vision_config") or config
    hints: dict[str, Any] = {
        "width": config.get("hidden_size"),
        "depth": config.get("num_hidden_layers"),
        "num_heads": config.get("num_attention_heads"),
        "norm_eps": config.get("layer_norm_eps"),
        "image_size": config.get("image_size"),
        "rope_base": config.get("rope_theta"),
    }
    patch = config.get("patch_size")
    hints["patch_size"] = (patch, patch) if isinstance(patch, int) else tuple(patch) if patch else None
    activation = config.get("hidden_act")
    if isinstance(activation, str):
        if activation not in TRANSFORMERS_ACTIVATIONS:
            raise CheckpointError(f"{source}: config.json says hidden_act={activation!r}, which we do not have")
        hints["mlp"] = TRANSFORMERS_ACTIVATIONS[activation]
    return {name: value for name, value in hints.items() if value is not None}


def _notes(encoder: Recognised, left_out: Mapping[str, list[str]], reading: Reading) -> list[str]:
    notes = [f"left out {meaning} ({_count(keys)})" for meaning, keys in left_out.items()]
    if encoder.prefix:
        notes.append(f"took the encoder below {encoder.prefix!r}")
    if encoder.beside:
        notes.append(f"left out what lies beside the encoder ({_count(encoder.beside)})")
    for name in ("num_heads", "mlp", "norm_eps", "final_norm_eps", "position", "rope_coordinates", "pooling"):
        if reading.why.get(name, "").startswith("convention"):
            notes.append(
                f"{name}={getattr(reading.config, name)!r} is the {reading.why[name]}; override it if it is wrong"
            )
    return notes


def _count(keys: list[str]) -> str:
    return f"{keys[0]}" if len(keys) == 1 else f"{len(keys)} tensors: {keys[0]}, ..."


def _target(own: ModelConfig, overrides: Mapping[str, Any], notes: list[str]) -> ModelConfig:
    """The checkpoint's config with what the caller wants otherwise, said in notes."""
    if overrides.get("num_classes") == 0 and isinstance(own, ViTConfig):
        overrides = {"head_hidden": 0, **overrides}
    asked = dataclasses.replace(own, **overrides)
    if isinstance(own, SwinConfig) and isinstance(asked, SwinConfig) and own.v2 and asked.measuring_windows is None:
        windows = own.stage_windows()
        if asked.stage_windows() != windows:  # offsets stay measured by those that the weights were trained with
            asked = dataclasses.replace(asked, measuring_windows=tuple(max(window) for window in windows))
    if isinstance(own, ViTConfig) and isinstance(asked, ViTConfig):
        _note_resizing(own, asked, notes)
    elif asked.patch_size != own.patch_size:
        raise PatchlightError(f"patch_size={asked.patch_size}: only a ViT's patches can be resized")
    if asked.num_classes != own.num_classes:
        fresh = f"a fresh head of {asked.num_classes} classes" if asked.num_classes else "no head"
        notes.append(f"{fresh} in place of its {own.num_classes} classes" if own.num_classes else fresh)
    return asked


def _note_resizing(own: ViTConfig, asked: ViTConfig, notes: list[str]) -> None:
    """What becomes of patches and positions, or that it cannot be."""
    if asked.patch_size != own.patch_size:
        if own.stem != "patchify":
            raise PatchlightError(f"patch_size={asked.patch_size}: the patches of stem={own.stem!r} cannot be resized")
        notes.append(f"resized the patch projection from {_size(own.patch_size)} to {_size(asked.patch_size)}")
    if asked.grid != own.grid and (own.has_position_table or own.position == "relative_bias"):
        sizes = _size(own.image_size), _size(asked.image_size)
        how = (
            f"{sizes[0]} to {sizes[1]}" if sizes[0] != sizes[1] else f"{_size(own.grid)} to {_size(asked.grid)} patches"
        )
        notes.append(f"resampled positions from {how}")


def _and_more(keys: list[str]) -> str:
    return f" and {len(keys)} more" if keys else ""


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _resize_patches(state: State, own: ViTConfig, config: ViTConfig) -> None:
    if own.patch_size != config.patch_size:
        key, (down, across), stride = "patch_embed.proj.weight", config.patch_size, config.resnet_stride
        state[key] = resize_projection(state[key], (down // stride, across // stride))


def _resample_positions(state: State, own: ViTConfig, config: ViTConfig) -> None:
    if own.grid == config.grid:
        return
    for key, table in state.items():
        if key == "positions.table":
            prefix, rows = table.tensor_split([own.num_prefix_positions])
            state[key] = torch.cat([prefix, resample(rows, own.grid, config.grid, config.position_resampling)])
        elif key.endswith(".relative_bias.table"):
            old, new = ((2 * h - 1, 2 * w - 1) for h, w in (own.grid, config.grid))
            rows, prefix = table.tensor_split([old[0] * old[1]])
            state[key] = torch.cat([resample(rows, old, new, config.position_resampling), prefix])


def _fill(
    model: Model,
    state: State,
    own: ModelConfig,
    notes: list[str],
    *,
    strict: bool,
    source: str,
    dtype: torch.dtype,
    device: str | torch.device,
) -> None:
    """Move the tensors into the model; what does not fit is named, and a fresh head is drawn where one is wanted."""
    wanted = model.state_dict()
    if model.config.num_classes != own.num_classes:
        for key in [key for key in state if key.startswith(("head.", "distill_head."))]:
            del state[key]
        fresh = {key for key in wanted if key.startswith(("head.", "distill_head."))}
    else:
        fresh = set()
    missing = sorted(set(wanted) - set(state) - fresh)
    unexpected = sorted(set(state) - set(wanted))
    reshaped = sorted(key for key in set(wanted) & set(state) if wanted[key].shape != state[key].shape)
    for key in sorted(set(wanted) & set(state)):
        if not state[key].is_floating_point():
            raise CheckpointError(f"{source}: the tensor for {key!r} is of type {state[key].dtype}; weights are floats")
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    problems = {what: keys for what, keys in problems.items() if keys}
    if problems and strict:
        said = [f"{what}: {', '.join(keys[:5])}" + _and_more(keys[5:]) for what, keys in problems.items()]
        raise CheckpointError(f"{source}: does not fit the model; {'; '.join(said)}; strict=False loads the rest")
    notes += [f"{what}: {', '.join(keys)}" for what, keys in problems.items()]
    fitting: dict[str, Tensor] = {}
    for key in list(state):
        value = state.pop(key)
        if key in wanted and key not in reshaped:
            fitting[key] = value.to(device=device, dtype=dtype)
    if len(fitting) < len(wanted):  # whatever the checkpoint lacks starts fresh
        drawn = make_model(model.config).state_dict()
        fitting |= {key: drawn[key].to(device=device, dtype=dtype) for key in wanted if key not in fitting}
    model.load_state_dict(fitting, assign=True)
    model.to(device)  # tables that are computed, too


def _preprocess(
    own: PreprocessConfig | None,
    config: ModelConfig,
    asked: PreprocessConfig | None,
    notes: list[str],
    *,
    resized: bool,
) -> Preprocess:
    if own is not None and resized and own.image_size != config.image_size:
        notes.append(f"photos are prepared for {_size(config.image_size)} instead of {_size(own.image_size)}")
        own = own.for_size(config.image_size)
    if own is None:
        own = PreprocessConfig(image_size=config.image_size, crop_pct=0.875)
        if asked is None:
            notes.append(
                "its preprocessing is not known: the usual of ImageNet is assumed; pass preprocess= to change it"
            )
    elif asked is not None:
        notes += [f"preprocessing differs from its own: {difference}" for difference in asked.differences(own)]
    return Preprocess(asked or own)


def _own_preprocess(found: Found, *, asked: bool) -> PreprocessConfig | None:
    """What the checkpoint says of it; where the caller asks for another, what cannot be read is no obstacle."""
    try:
        return _read_preprocess(found)
    except PatchlightError:
        if asked:
            return None
        raise


def _read_preprocess(found: Found) -> PreprocessConfig | None:
    if "patchlight" in found.config:
        return PreprocessConfig.from_dict(_our_part(found, "preprocess"))
    if found.preprocessor:
        return transformers_preprocess(found.preprocessor)
    if found.config.get("pretrained_cfg"):
        return timm_preprocess(found.config["pretrained_cfg"])
    return found.entry.preprocess if found.entry else None


def _our_part(found: Found, part: str) -> dict[str, Any]:
    own = found.config["patchlight"]
    if not isinstance(own, dict) or own.get("version") != VERSION or not isinstance(own.get(part), dict):
        raise CheckpointError(
            f"{found.source}: the patchlight part of its config.json is damaged, or of a later version"
        )
    return own[part]


def _licence(found: Found) -> str | None:
    if "patchlight" in found.config:
        return found.config["patchlight"].get("licence")
    return found.entry.licence if found.entry else None


def _subject(found: Found) -> SubjectHeat | None:
    values = (found.config.get("patchlight") or {}).get("subject")
    return None if values is None else SubjectHeat.from_dict(values)


def _groups(found: Found, labels: tuple[str, ...] | None) -> Groups | None:
    paths = (found.config.get("patchlight") or {}).get("groups")
    if paths is not None and not isinstance(paths, list):
        raise PatchlightError(f"{found.source}: its groups are {paths!r:.60}; they should be a list, one a label")
    return None if paths is None or labels is None else Groups(labels, tuple(paths))


def _labels(found: Found, config: ModelConfig) -> tuple[str, ...] | None:
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
