"""Any checkpoint that we know to the model that its authors meant, with its preprocessing; or one clear sentence."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from patchlight.config import PreprocessConfig, SubjectHeat
from patchlight.devices import resolve_device
from patchlight.errors import PatchlightError, PatchlightWarning, and_more
from patchlight.families import ModelConfig, check_names_of_any
from patchlight.images.decode import Photo, listed
from patchlight.images.preprocess import PHOTO_CHANNELS, Preprocess, Transform, counted_channels
from patchlight.json_config import check_names, field_names
from patchlight.models.families import Model, make_model
from patchlight.weights.about import groups_of, labels_of, licence_of, own_preprocess_of, read_own_config, subject_of
from patchlight.weights.convert import State, convert
from patchlight.weights.families import family_of
from patchlight.weights.family import Family, Reading, Recognised
from patchlight.weights.find import find, identify
from patchlight.weights.groups import UNKNOWN, Groups
from patchlight.weights.read import CheckpointError, check_finite, read_checkpoint
from patchlight.weights.recognise import name_in, recognise, refuse_others
from patchlight.weights.vit.names import PROJECTIONS


@dataclass(frozen=True)
class Provenance:
    """Where a model came from."""

    source: str
    origin: str
    path: Path
    licence: str | None
    known_sha256: str | None = None
    """Of weights that are not here, since they were exported."""

    @functools.cached_property
    def sha256(self) -> str:
        """Of the weights file (of the index, for shards); computed when first asked for."""
        if self.known_sha256 is not None:
            return self.known_sha256
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()


Outputs = Literal["logits", "probabilities", "features"]


class Runs(Protocol):
    """A model that another engine computes: `deploy.engines.Engine`. Threads may share it."""

    @property
    def folder(self) -> Path: ...

    @property
    def loaded(self) -> "Loaded":
        """What functions that take a model take it for."""

    @property
    def outputs(self) -> tuple[str, ...]: ...

    @property
    def label(self) -> str:
        """For people: "openvino in bfloat16"."""

    @property
    def fingerprint(self) -> str:
        """Of all that its numbers depend on, besides the weights."""

    def __call__(self, images: Any) -> dict[str, npt.NDArray[np.float32]]: ...

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether it takes images of this shape, (B, C, H, W)."""

    def shared_by(self, callers: int) -> Self:
        """The same for so many threads that call it at once, each with a core for itself."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, and everything that came with it."""

    model: Model
    config: ModelConfig
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    subject: SubjectHeat | None
    """How subjects are found with this model, if it was trained for that."""
    provenance: Provenance
    why: Mapping[str, str]
    """Where each setting of the config came from: shapes, config.json, the catalogue, a convention, or you."""
    notes: tuple[str, ...]
    """What loading left out, replaced, resampled or assumed, one sentence each."""
    groups: Groups | None = None
    """What its classes have in common (animal, thing, ...), if it is known."""
    engine: Runs | None = None
    """What computes in the stead of `model`, whose weights may then be missing, see `load_engine`."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """The labels, in readable form if the groups of the classes are known."""
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
        """Where the model's weights are; engines compute on the CPU."""
        return torch.device("cpu") if self.engine is not None else self.model.norm.weight.device

    def to(self, device: str | torch.device) -> Self:
        """Move the model to a device in place, and return self, as torch's modules do."""
        self.check_has_weights("to")
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
        self.check_outputs("features" if outputs == "features" else "logits")
        at_once, answers = 1 if self.device.type == "cpu" else batch_size, []
        with torch.inference_mode():
            for start in range(0, len(several), at_once):
                images = [self.preprocess(photo)[0] for photo in several[start : start + at_once]]
                # Without a crop photos stay of different sizes.
                together = [torch.stack(images)] if len({image.shape for image in images}) == 1 else images
                answers += [self.answer(image_BCHW, outputs) for image_BCHW in together]
        answer_BK = torch.cat(answers)
        return answer_BK[0] if one else answer_BK

    def answer(self, image_BCHW: Tensor, outputs: Outputs) -> Tensor:
        """What the model, or the engine in its stead, says of images that are prepared: float32, on the CPU."""
        image_BCHW = image_BCHW if image_BCHW.ndim == 4 else image_BCHW[None]
        if self.engine is not None:
            answer_BK = torch.from_numpy(
                self.engine(image_BCHW.numpy())["features" if outputs == "features" else "logits"]
            )
        else:
            image_BCHW = image_BCHW.to(self.device, self.model.norm.weight.dtype)
            answer_BK = (self.model.features if outputs == "features" else self.model)(image_BCHW).float()
        return (answer_BK.softmax(1) if outputs == "probabilities" else answer_BK).cpu()

    def check_outputs(self, *names: str) -> None:
        """Refuse an exported model that does not give these outputs."""
        if self.engine is None:
            return
        missing = [name for name in names if name not in self.engine.outputs]
        if missing:
            wanted = ",".join(dict.fromkeys((*self.engine.outputs, *missing)))
            raise PatchlightError(
                f"{self.engine.folder}: was exported without {' and '.join(missing)}; export it again with "
                f"--outputs {wanted}"
            )

    def check_has_weights(self, who: str) -> None:
        """Refuse an exported model, in the name of what needs the model itself."""
        if self.engine is not None:
            raise PatchlightError(
                f"{self.engine.folder}: is an exported model, and {who} needs the model itself; load that, from "
                f"{self.provenance.source}"
            )

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
    said = identify(found, tensors.timm, like)
    refuse_others([], said.config, str(source))
    try:
        encoder = recognise(tensors, str(source), weights)
    except CheckpointError as error:
        refuse_others(tensors, found.config, str(source))
        called = name_in(said.config)
        raise CheckpointError(f"{error}; {said.config_from} says {called!r}" if called else str(error)) from None
    refuse_others((encoder.prefix + key for key in encoder.shapes), found.config, str(source))
    del tensors  # from here on, what the encoder does not need can go
    family = encoder.family
    check_names(family.config, overrides)
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
        config = _target(family, reading.config, overrides, notes)
    state = family.fit(state, reading.config, config, encoder.origin, notes, str(source))
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
    """Load `model` if it is a name or a path; return it if it is what `load` or `load_engine` gave."""
    if isinstance(model, str | os.PathLike):
        return load(os.fspath(model), device="cpu" if device is None else device)
    model = model if isinstance(model, Loaded) else getattr(model, "loaded", model)
    if not isinstance(model, Loaded):
        raise PatchlightError(f"model is a name, a path, or what load gave, not {type(model).__name__}")
    if device is not None and model.engine is not None and torch.device(device).type != "cpu":
        raise PatchlightError(f"device={device}: {model.engine.folder} is an exported model, which runs on the CPU")
    if device is not None:
        asked, own = torch.device(device), model.device
        if asked.type != own.type or asked.index not in (None, own.index or 0):  # "cuda" is whichever it is on
            raise PatchlightError(f"device={device}: the model is loaded already; say so to load, or give its name")
    return model


def _check_arguments(source: Any, dtype: Any, device: Any, preprocess: Any, weights: Any) -> None:
    """Raise for wrong arguments before any file is opened."""
    if not isinstance(source, str | Path) or not str(source):
        raise CheckpointError(f"{source!r} is not a source; give a path, a catalogue name, or hf:owner/name")
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
    """Turn any error that a damaged checkpoint causes inside into one line that names the checkpoint."""
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


def _target(family: Family, own: ModelConfig, overrides: Mapping[str, Any], notes: list[str]) -> ModelConfig:
    """The checkpoint's config with the caller's overrides; what changes is added to the notes."""
    if overrides.get("num_classes") == 0 and "head_hidden" in field_names(family.config):
        overrides = {"head_hidden": 0, **overrides}
    asked = family.change_sizes(own, dataclasses.replace(own, **overrides), notes)
    if asked.num_classes != own.num_classes:
        fresh = f"a fresh head of {asked.num_classes} classes" if asked.num_classes else "no head"
        notes.append(f"{fresh} in place of its {own.num_classes} classes" if own.num_classes else fresh)
    return asked


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


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
    fresh.update(family_of(own).not_read(own))
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
        if "norm.weight" in missing and "final_norm" in field_names(type(own)):
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
        elif asked is None and not known and config.made_for_its_size:
            notes.append(f"photos are prepared for {theirs}, and it was made for {ours}; image_size= sets both")
    if own is None:
        own = PreprocessConfig(image_size=config.image_size, crop_pct=0.875)
        if asked is None:
            notes.append(
                "its preprocessing is not known: ImageNet's usual settings are assumed; pass preprocess= to change it"
            )
    elif asked is not None:
        notes += [f"preprocessing differs from its own: {difference}" for difference in asked.differences(own)]
    return Preprocess(asked or own)
