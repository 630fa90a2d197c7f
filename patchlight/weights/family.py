"""The record of an architecture: all that loading and saving know of it, in one object; `families.py` lists them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.families import ModelConfig
from patchlight.weights.convert import Origin, State
from patchlight.weights.find import Found
from patchlight.weights.read import CheckpointError
from patchlight.weights.transformers_configs import Keys, ModelType


class Shapes(dict[str, tuple[int, ...]]):
    """The shapes of a checkpoint's tensors, by our names and (`theirs`) by their own; a missing one raises."""

    def __init__(self, state: Mapping[str, Tensor], found: "Recognised", source: str) -> None:
        super().__init__((key, tuple(value.shape)) for key, value in state.items())
        self.family, self.origin, self.theirs, self.source = found.family, found.origin, found.shapes, source

    def __missing__(self, key: str) -> tuple[int, ...]:
        raise CheckpointError(
            f"{self.source}: tensor for {key!r} is missing (read as {self.family.name} of {self.origin.name})"
        )

    def of(self, key: str, ndim: int) -> tuple[int, ...]:
        """The shape of a tensor that has to have so many axes."""
        shape = self[key]
        if len(shape) != ndim:
            raise CheckpointError(f"{self.source}: tensor for {key!r} has shape {shape}, not {ndim} axes")
        return shape


class InTimm(NamedTuple):
    """A model in timm's form."""

    config: ModelConfig
    """Of what is written, where that is another form of the same computation."""
    state: State
    architecture: str
    arguments: dict[str, Any]
    """What makes that architecture this model."""
    first_conv: str
    classifier: str | list[str]


class InTransformers(NamedTuple):
    """A model in transformers' form."""

    config: ModelConfig
    """Of what is written, where that is another form of the same computation."""
    state: State
    settings: dict[str, Any]
    """Its config.json."""


def change_sizes(own: ModelConfig, asked: ModelConfig, notes: list[str]) -> ModelConfig:
    """The config that was asked for; other patches are refused."""
    if asked.patch_size != own.patch_size:
        raise PatchlightError(f"patch_size={asked.patch_size}: only a ViT's patches can be resized")
    return asked


def _as_it_is(state: State, own: ModelConfig, asked: ModelConfig, origin: Origin, notes: list[str], _: str) -> State:
    return state


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture. What has a default may be left out; then the family cannot do it, or needs nothing done."""

    config: type[Any]
    """Of `families.ArchitectureConfig`; its `architecture` is the name in JSON."""
    model: type[Any]
    """The class of the model, made from a config alone; `models.families.Model` says what it has."""
    origins: tuple[Origin, ...]
    """The namings that its checkpoints come in, ours among them."""
    from_shapes: Callable[[Shapes], dict[str, Any]]
    """The settings that tensors in our names tell."""
    fixed_by_tensors: frozenset[str]
    """Settings that tensors decide, so that nothing else may contradict them."""
    left_open: tuple[str, ...] = ()
    """Settings that change what is computed, and that tensors of the same names and shapes may differ in."""

    read: Callable[["Evidence"], "Reading"] = lambda evidence: read_config(evidence)
    """The whole config, from these and everything else that is known."""
    change_sizes: Callable[[Any, Any, list[str]], Any] = change_sizes
    """Given its own config, the one that was asked for, and notes: what is to be made, or that it cannot be."""
    fit: Callable[[State, Any, Any, Origin, list[str], str], State] = _as_it_is
    """The tensors for that config, with positions resampled: given state, own config, new config, origin, notes,
    source."""
    not_read: Callable[[Any], Collection[str]] = lambda config: ()
    """Tensors of the model that its forward pass does not use, so that a checkpoint may go without them."""

    timm_names: tuple[str, ...] = ()
    """What timm's names of its architectures begin with; where none are given, any name will do."""
    timm_arguments: frozenset[str] = frozenset()
    """Which of timm's model_args are followed for this family alone."""
    timm_hints: Callable[[Mapping[str, Any], str | None, Shapes], dict[str, Any]] | None = None
    """What timm's config.json (with the architecture, where it is known) says beyond the shapes."""
    model_types: Mapping[str, ModelType] = field(default_factory=dict)
    """transformers' model types."""
    transformers_hints: Callable[[Keys, Shapes], dict[str, Any]] | None = None
    """What transformers' config.json says beyond the shapes."""
    to_timm: Callable[[Any, State], InTimm] | None = None
    to_transformers: Callable[[Any, State], InTransformers] | None = None

    @property
    def architecture(self) -> str:
        """Its name in JSON."""
        return self.config.architecture

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.config.__name__.removesuffix("Config")


@dataclass(frozen=True)
class Recognised:
    """An encoder found in a checkpoint."""

    family: Family
    origin: Origin
    prefix: str
    """What stands in front of the encoder's names, such as `module.backbone.`."""
    state: State
    """The encoder's tensors, and its heads', under their own names without the prefix."""
    shapes: dict[str, tuple[int, ...]]
    """Their shapes, which stay when `convert` takes the tensors."""
    beside: list[str]
    """Keys of everything else in the file."""
    choice: str | None = None
    """Where the file holds both trained and averaged weights: which these are, and how to get the others."""


@dataclass(frozen=True)
class Reading:
    """A config and where each of its settings came from."""

    config: ModelConfig
    why: dict[str, str]
    notes: tuple[str, ...] = ()
    """What is to be said of its config file."""
    warnings: tuple[str, ...] = ()
    """What was guessed, and may be wrong."""


@dataclass(frozen=True)
class Evidence:
    """All that the config of a checkpoint is read from."""

    state: State
    """In our names."""
    shapes: Shapes
    told: Mapping[str, Any]
    """The settings that its shapes tell."""
    found: Found
    hints: tuple[tuple[str, Mapping[str, Any]], ...]
    """Where from, and settings; the first that says one is right."""
    overrides: Mapping[str, Any]
    """What the caller says."""
    name: str | None
    """timm's name of it, where it is known."""

    @property
    def source(self) -> str:
        return self.found.source

    @property
    def asked(self) -> dict[str, Any]:
        """Of what the caller says, what the checkpoint is already; the rest `load` changes afterwards."""
        changed = {"num_classes", "head_hidden", "patch_size"}
        if "patch_size" in self.overrides:
            changed.add("image_size")  # which is then meant for the new patches
        return {name: value for name, value in self.overrides.items() if name not in changed}


def settings_from_shapes(shapes: Shapes) -> dict[str, Any]:
    """What tensors in our names tell; shapes that no model has raise."""
    try:
        return shapes.family.from_shapes(shapes)
    except (ValueError, IndexError) as error:
        if isinstance(error, PatchlightError):
            raise
        raise CheckpointError(f"{shapes.source}: a tensor is not what its name promises ({error})") from None


def add_settings(
    told: dict[str, Any], sources: Iterable[tuple[str, Mapping[str, Any]]], fixed: frozenset[str], source: str
) -> dict[str, str]:
    """Add what the shapes left open, from the first source that says it; gives where each setting came from.

    A source that contradicts tensors raises.
    """
    why = dict.fromkeys(told, "shapes")
    for where, settings in sources:
        for name, value in settings.items():
            value = _as_pair(value) if name in ("image_size", "patch_size", "window_size") else _as_tuple(value)
            if name not in told:
                told[name], why[name] = value, where
            elif why[name] == "shapes" and name in fixed and value != told[name]:
                said = f"{name}={value!r} was asked for" if where == "you" else f"{where} says {name}={value!r}"
                raise CheckpointError(f"{source}: {said}, but its tensors have {told[name]!r}")
    return why


def read_config(
    evidence: Evidence,
    asked: Mapping[str, Any] | None = None,
    hints: Iterable[tuple[str, Mapping[str, Any]]] | None = None,
    conventions: Mapping[str, Any] | None = None,
) -> Reading:
    """The config from its shapes, the caller, the hints and the conventions of its origin, in this order."""
    shapes, told = evidence.shapes, dict(evidence.told)
    sources = [
        ("you", evidence.asked if asked is None else asked),
        *(evidence.hints if hints is None else hints),
        (f"convention of {shapes.origin.name}", {**(conventions or {}), **shapes.origin.conventions}),
    ]
    why = add_settings(told, sources, shapes.family.fixed_by_tensors, shapes.source)
    try:
        return Reading(shapes.family.config(**told), why)
    except PatchlightError as error:
        raise CheckpointError(f"{shapes.source}: {error}") from None


def check_settings(shapes: Shapes, settings: Mapping[str, Any]) -> None:
    """Refuse settings of config.json that the tensors contradict, before a model of a false size is made."""
    told = settings_from_shapes(shapes)
    add_settings(told, [("config.json", dict(sorted(settings.items())))], shapes.family.fixed_by_tensors, shapes.source)


def _as_pair(value: Any) -> Any:
    return (value, value) if type(value) is int else _as_tuple(value)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
