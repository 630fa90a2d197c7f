"""Any checkpoint that we know to the model that its authors meant, with its preprocessing; or one clear sentence."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from patchlight.config import PreprocessConfig, SubjectHeat, ViTConfig
from patchlight.devices import resolve_device
from patchlight.errors import PatchlightError, PatchlightWarning, and_more
from patchlight.families import CONFIGS, ConvNeXtConfig, ModelConfig, SwinConfig, check_names_of_any
from patchlight.images.decode import Photo, listed
from patchlight.images.preprocess import PHOTO_CHANNELS, Preprocess, Transform, counted_channels
from patchlight.json_config import check_names
from patchlight.models.families import Model, make_model
from patchlight.models.resampling import resample
from patchlight.models.stems import resize_projection
from patchlight.weights.about import groups_of, labels_of, licence_of, own_preprocess_of, read_own_config, subject_of
from patchlight.weights.convert import PROJECTIONS, State, convert, reorder_rope
from patchlight.weights.convert_swin import fit_windows
from patchlight.weights.find import find
from patchlight.weights.groups import UNKNOWN, Groups
from patchlight.weights.inspect import Reading, Recognised, recognise
from patchlight.weights.named import named
from patchlight.weights.others import name_in, refuse_others
from patchlight.weights.read import CheckpointError, check_finite, read_checkpoint


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


Outputs = Literal["logits", "probabilities", "features"]


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

    @property
    def names(self) -> tuple[str, ...] | None:
        """The labels, in people's words where the groups of the classes are known."""
        return self.labels if self.groups is None else self.groups.words

    @functools.cached_property
    def naming(self) -> Groups | None:
        """By which photos are named: its groups; of a model that has none its labels alone; None where it has neither.

        A head that was replaced, or one for other uses, names nothing.
        """
        if self.groups is not None or self.labels is None or len(self.labels) != self.config.num_classes:
            return self.groups
        return Groups(self.labels, (UNKNOWN,) * len(self.labels))

    @property
    def transform(self) -> Transform:
        """`preprocess` without the view, for `torchvision.transforms.Compose`, a Dataset and its DataLoader."""
        return self.preprocess.transform

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.norm.weight.device

    def to(self, device: str | torch.device) -> Self:
        """Move the model to a device, as torch does it: in place, and given back."""
        self.model.to(resolve_device(device))
        return self

    def predict(self, photos: Photo | Iterable[Photo], outputs: Outputs = "logits", *, batch_size: int = 32) -> Tensor:
        """What the model says of a photo (a path, a file's bytes, a Pillow image, an array HWC uint8, or what `decode`
        gave): K numbers; of several photos a row for each, in their order. float32, on the CPU.

        `outputs`: "logits" (the embedding, where the head is CLIP's projection), "probabilities" (their softmax), or
        "features" (pooled, before the head). On a CPU each photo goes through the model alone, so that its numbers do
        not depend on the photos beside it; on a GPU `batch_size` at a time.
        """
        several, one = listed(photos)
        if outputs not in get_args(Outputs):
            raise PatchlightError(
                f"outputs={outputs!r} is not one of {', '.join(get_args(Outputs))}; `localize` finds subjects"
            )
        if batch_size < 1:
            raise PatchlightError(f"batch_size={batch_size} must be 1 or more")
        if outputs == "probabilities":
            self.check_names_classes()
        if outputs == "logits" and not self.config.num_classes:
            raise PatchlightError(f"{self.provenance.source}: has no head, so it gives no logits; ask for 'features'")
        at_once, answers = 1 if self.device.type == "cpu" else batch_size, []
        with torch.inference_mode():
            for start in range(0, len(several), at_once):
                images = [self.preprocess(photo)[0] for photo in several[start : start + at_once]]
                # Without a crop photos stay of different sizes.
                together = [torch.stack(images)] if len({image.shape for image in images}) == 1 else images
                answers += [self._answer(image_BCHW, outputs) for image_BCHW in together]
        answer_BK = torch.cat(answers)
        return answer_BK[0] if one else answer_BK

    def _answer(self, image_BCHW: Tensor, outputs: Outputs) -> Tensor:
        image_BCHW = image_BCHW if image_BCHW.ndim == 4 else image_BCHW[None]
        image_BCHW = image_BCHW.to(self.device, self.model.norm.weight.dtype)
        answer_BK = (self.model.features if outputs == "features" else self.model)(image_BCHW).float()
        return (answer_BK.softmax(1) if outputs == "probabilities" else answer_BK).cpu()

    def check_names_classes(self) -> None:
        """Refuse a model that has no classes to name."""
        if not self.config.num_classes:
            raise PatchlightError(
                f"{self.provenance.source}: has no head to classify with; load one that has, or train one"
            )
        if self.provenance.origin in PROJECTIONS:
            raise PatchlightError(f"{self.provenance.source}: its head gives an embedding, not classes")


def load(
    source: str | Path,
    *,
    strict: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    preprocess: PreprocessConfig | None = None,
    weights: Literal["model", "ema"] | None = None,
    like: str | None = None,
    **overrides: Any,
) -> Loaded:
    """The model in a checkpoint, in eval mode.

    `source`: "default" (the model inside the package), a catalogue name (`patchlight models`), a .safetensors, .pt,
    .pth, .bin or .npz file, a folder (Hugging Face's, timm's or ours), or "hf:owner/name" on the hub.
    `overrides` are settings of its config (`ViTConfig`, `SwinConfig`, `ConvNeXtConfig`) that the checkpoint cannot
    tell, such as `num_heads=3`; `num_classes=` puts a fresh head in place of another, `image_size=` (in a Swin,
    `window_size=`) resamples the positions for good, and `patch_size=` resizes a ViT's patch projection too, so that
    the same image becomes fewer or more tokens (FlexiViT). A partial load raises, unless `strict=False`, which says in
    `notes` what is missing. `weights` chooses where a checkpoint holds the trained weights ("model") and a moving
    average of them ("ema", a teacher); None takes the average, and says so in `notes`. `like` names what the
    checkpoint is where nothing with it does: an architecture of timm, a checkpoint of the catalogue or on the hub, or
    a folder with a config.json. What is guessed for want of it is a `PatchlightWarning`, and in `notes`.
    """
    check_names_of_any(overrides)
    _check_arguments(source, dtype, device, preprocess, weights)
    found = find(source, revision)
    tensors = read_checkpoint(found.weights)
    said = named(found, tensors.timm, like)
    try:
        encoder = recognise(tensors, str(source), weights)
    except CheckpointError as error:
        refuse_others(tensors, found.config, str(source))
        called = name_in(said.config)
        raise CheckpointError(f"{error}; {said.config_from} says {called!r}" if called else str(error)) from None
    refuse_others((encoder.prefix + key for key in encoder.shapes), found.config, str(source))
    del tensors  # from here on, what the encoder does not need can go
    check_names(CONFIGS[encoder.origin.architecture], overrides)
    with _naming(str(source), "a tensor is not what its name promises"):
        state, left_out = convert(encoder.state, encoder.origin)
    _check_finite(state, found.weights, str(source), weights)
    with _naming(str(source), "its config.json has a value that cannot be"):
        reading = read_own_config(state, encoder, said, overrides)
        labels = labels_of(found, reading.config)
        subject = subject_of(found)
        groups = groups_of(found, labels)
        notes = _notes(encoder, left_out, reading)
        wanted = preprocess is None and reading.config.in_channels == PHOTO_CHANNELS
        speaks = said if like is not None else found
        own_preprocess = own_preprocess_of(speaks, reading.config, notes if wanted else [], wanted=wanted)
    for warning in reading.warnings:
        warnings.warn(f"{source}: {warning}", PatchlightWarning, stacklevel=2)

    with _naming(str(source), "an override cannot be"):
        config = _target(reading.config, overrides, notes)
    if isinstance(config, ViTConfig) and isinstance(reading.config, ViTConfig):
        if encoder.origin.name == "timm" and config.is_rotary and config.rope_coordinates == "index":
            state = reorder_rope(state, config)
        if config.pooling != "attention" and "attention_pool.query" in state:
            state = {key: value for key, value in state.items() if not key.startswith("attention_pool.")}
            notes.append(f"left out its attention pooling, which is not read with pooling={config.pooling!r}")
        _resize_patches(state, reading.config, config)
        _resample_positions(state, reading.config, config)
    elif isinstance(config, SwinConfig) and isinstance(reading.config, SwinConfig):
        fit_windows(state, reading.config, config, notes, str(source))
    with _naming(str(source), "its config.json asks for a model that cannot be made"), torch.device("meta"):
        model = make_model(config)
    _fill(model, state, reading.config, notes, strict=strict, source=str(source), dtype=dtype, device=device)
    prepare = _preprocess(
        own_preprocess,
        config,
        preprocess,
        notes,
        resized="image_size" in overrides,
        known=found.entry is not None,
    )
    model.preprocess = prepare.config
    return Loaded(
        model=model.eval(),
        config=config,
        preprocess=prepare,
        labels=labels if config.num_classes == reading.config.num_classes else None,
        subject=subject,
        provenance=Provenance(str(source), encoder.origin.name, found.weights, licence_of(found)),
        why=reading.why | dict.fromkeys(overrides, "you"),
        notes=tuple(notes),
        groups=groups if config.num_classes == reading.config.num_classes else None,
    )


def load_or_given(model: object, device: str | torch.device | None = None) -> Loaded:
    """What a function's `model` stands for: what `load` gave, or else what it takes."""
    if isinstance(model, str | os.PathLike):
        return load(os.fspath(model), device="cpu" if device is None else device)
    if not isinstance(model, Loaded):
        raise PatchlightError(f"model is a name, a path, or what load gave, not {type(model).__name__}")
    if device is not None:
        asked, own = torch.device(device), model.device
        if asked.type != own.type or asked.index not in (None, own.index or 0):  # "cuda" is whichever it is on
            raise PatchlightError(f"device={device}: the model is loaded already; say so to load, or give its name")
    return model


def _check_arguments(source: Any, dtype: Any, device: Any, preprocess: Any, weights: Any) -> None:
    """Name a mistake in the call before any file is opened."""
    if not isinstance(source, str | Path) or not str(source):
        raise CheckpointError(f"{source!r} is no source; give a path, a catalogue name, or hf:owner/name")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"dtype={dtype!r} is not a floating-point type such as torch.bfloat16")
    if preprocess is not None and not isinstance(preprocess, PreprocessConfig):
        raise CheckpointError(f"preprocess is a {type(preprocess).__name__}; give a PreprocessConfig")
    if weights not in (None, "model", "ema"):
        raise CheckpointError(f"weights={weights!r} should be 'model' (as trained) or 'ema' (their moving average)")
    resolve_device(device)


def _check_finite(state: State, file: Path, source: str, weights: str | None) -> None:
    """Refuse NaN and infinity, after the parts were joined and freed; by the name that the tensor has in the file."""
    try:
        check_finite(state, source)
    except CheckpointError:
        check_finite(recognise(read_checkpoint(file), source, weights).state, source)
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


def _notes(encoder: Recognised, left_out: Mapping[str, list[str]], reading: Reading) -> list[str]:
    notes = [f"left out {meaning} ({_count(keys)})" for meaning, keys in left_out.items()]
    if encoder.prefix:
        notes.append(f"took the encoder below {encoder.prefix!r}")
    if encoder.choice:
        notes.append(encoder.choice)
    if encoder.beside:
        notes.append(f"left out what lies beside the encoder ({_count(encoder.beside)})")
    return [*notes, *reading.notes, *reading.warnings]


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
    if isinstance(own, ViTConfig) and own.final_norm == "none":
        fresh |= {"norm.weight", "norm.bias"}  # which nothing reads
    missing = sorted(set(wanted) - set(state) - fresh)
    unexpected = sorted(set(state) - set(wanted))
    reshaped = sorted(key for key in set(wanted) & set(state) if wanted[key].shape != state[key].shape)
    for key in sorted(set(wanted) & set(state)):
        if not state[key].is_floating_point():
            raise CheckpointError(f"{source}: the tensor for {key!r} is of type {state[key].dtype}; weights are floats")
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    problems = {what: keys for what, keys in problems.items() if keys}
    if problems and strict:
        said = [f"{what}: {', '.join(keys[:5])}" + and_more(len(keys), 5) for what, keys in problems.items()]
        if "norm.weight" in missing and isinstance(own, ViTConfig):
            said.append("final_norm='none' does without its last norm")
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
    known: bool,
) -> Preprocess:
    """`resized`: the caller says the model's size; `known`: the catalogue has the checkpoint, and its sizes."""
    if config.in_channels != PHOTO_CHANNELS:
        notes.append(f"photos cannot be prepared: it takes images of {counted_channels(config.in_channels)}")
        return Preprocess(asked or own or PreprocessConfig(image_size=config.image_size), config.in_channels)
    if own is not None and own.image_size != config.image_size:
        ours, theirs = _size(config.image_size), _size(own.image_size)
        if resized:
            notes.append(f"photos are prepared for {ours} instead of {theirs}")
            own = own.for_size(config.image_size)
        elif asked is None and not known and not isinstance(config, ConvNeXtConfig):  # which is made for no size
            notes.append(f"photos are prepared for {theirs}, and it was made for {ours}; image_size= sets both")
    if own is None:
        own = PreprocessConfig(image_size=config.image_size, crop_pct=0.875)
        if asked is None:
            notes.append(
                "its preprocessing is not known: the usual of ImageNet is assumed; pass preprocess= to change it"
            )
    elif asked is not None:
        notes += [f"preprocessing differs from its own: {difference}" for difference in asked.differences(own)]
    return Preprocess(asked or own)
