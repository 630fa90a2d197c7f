"""The config of a checkpoint with stages (Swin, ConvNeXt), from its tensors and what came with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.families import ConvNeXtConfig, SwinConfig
from patchlight.weights import convert_convnext, convert_swin
from patchlight.weights.inspect import Reading, Recognised
from patchlight.weights.read import CheckpointError
from patchlight.weights.transformers_configs import Keys, note_unknown, read_keys


@dataclass(frozen=True, kw_only=True)
class Family:
    """How checkpoints of an architecture are read."""

    config: type[SwinConfig] | type[ConvNeXtConfig]
    from_shapes: Callable[[Mapping[str, tuple[int, ...]], str], dict[str, Any]]
    firm: frozenset[str]
    timm_hints: Callable[[Mapping[str, Any]], dict[str, Any]]
    transformers_hints: Callable[[Keys, str], dict[str, Any]]
    timm_names: tuple[str, ...]
    """What the names of timm's architectures begin with."""
    transformers_names: tuple[str, ...]
    """Of transformers' model types."""


FAMILIES: dict[str, Family] = {
    "swin": Family(
        config=SwinConfig,
        from_shapes=convert_swin.from_shapes,
        firm=convert_swin.FIRM,
        timm_hints=convert_swin.timm_hints,
        transformers_hints=convert_swin.transformers_hints,
        timm_names=("swin_", "swinv2_"),
        transformers_names=("swin", "swinv2"),
    ),
    "convnext": Family(
        config=ConvNeXtConfig,
        from_shapes=convert_convnext.from_shapes,
        firm=convert_convnext.FIRM,
        timm_hints=convert_convnext.timm_hints,
        transformers_hints=convert_convnext.transformers_hints,
        timm_names=("convnext_", "convnextv2_"),
        transformers_names=("convnext", "convnextv2"),
    ),
}


class _Shapes(dict[str, tuple[int, ...]]):
    """Says which tensor is missing."""

    def __init__(self, state: Mapping[str, Tensor], found: Recognised, source: str) -> None:
        super().__init__((key, tuple(value.shape)) for key, value in state.items())
        self.where, self.source = found.origin, source

    def __missing__(self, key: str) -> tuple[int, ...]:
        name = f"{self.where.architecture} of {self.where.name}"
        raise CheckpointError(f"{self.source}: tensor for {key!r} is missing (read as {name})")


def settings_from_shapes(state: Mapping[str, Tensor], found: Recognised, source: str) -> dict[str, Any]:
    try:
        return FAMILIES[found.origin.architecture].from_shapes(_Shapes(state, found, source), source)
    except CheckpointError:
        raise
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{source}: a tensor is not what its name promises ({error})") from None


def hints_of(found: Recognised, config: Mapping[str, Any], source: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What timm's or transformers' config.json says, and what is to be noted; one of another architecture raises."""
    family = FAMILIES[found.origin.architecture]
    notes: tuple[str, ...] = ()
    if "architecture" in config:
        name, expected = str(config["architecture"]), family.timm_names
        fits = name.startswith(expected)
    else:
        keys = read_keys(config, source)
        name, expected = keys.model_type, family.transformers_names
        fits = name in ("", *expected)
    if not fits:
        raise CheckpointError(
            f"{source}: config.json says {name!r}, but its tensors are named as those of a {found.origin.architecture}"
        )
    if "architecture" in config:
        hints = family.timm_hints(config)
        pooling = (config.get("model_args") or {}).get("global_pool") or config.get("global_pool") or "avg"
        if pooling != "avg":
            raise CheckpointError(f"{source}: config.json says global_pool={pooling!r}, which we do not have")
        size = (config.get("pretrained_cfg") or {}).get("input_size", [None])[1:]
        hints["image_size"] = (config.get("model_args") or {}).get("img_size") or size or hints.get("image_size")
    else:
        hints, notes = family.transformers_hints(keys, source), note_unknown(keys)
    return {name: value for name, value in hints.items() if value is not None}, notes


def read_staged(
    state: Mapping[str, Tensor],
    found: Recognised,
    hints: Sequence[tuple[str, Mapping[str, Any]]],
    overrides: Mapping[str, Any],
    source: str,
) -> Reading:
    """The config of a checkpoint in our names, from its shapes and then from `hints`: (where from, settings)."""
    family = FAMILIES[found.origin.architecture]
    told = settings_from_shapes(state, found, source)
    if "norm.weight" not in state:
        raise CheckpointError(
            f"{source}: the norm after the last stage is not in it, as in what transformers calls backbones; "
            "without it they are not supported"
        )
    why = dict.fromkeys(told, "shapes")
    conventions = _usual(family) | dict(found.origin.conventions)
    for where, settings in [("you", overrides), *hints, ("convention", conventions)]:
        for name, value in settings.items():
            value = _tupled(value, pair=name in ("image_size", "patch_size", "window_size"))
            if name not in told:
                told[name] = value
                why[name] = f"convention of {found.origin.name}" if where == "convention" else where
            elif why[name] == "shapes" and name in family.firm and value != told[name]:
                said = f"{name}={value!r} was asked for" if where == "you" else f"{where} says {name}={value!r}"
                raise CheckpointError(f"{source}: {said}, but its tensors have {told[name]!r}")
    unknown = [name for name in ("window_size", "image_size") if name not in told]
    if told.get("v2") and unknown:
        raise CheckpointError(
            f"{source}: the tensors of a Swin V2 do not tell its windows; say those that it was trained with, as in "
            "window_size=8, image_size=256"
        )
    try:
        config = family.config(**told)
    except PatchlightError as error:
        raise CheckpointError(f"{source}: {error}") from None
    if found.origin.name == "transformers" and isinstance(config, SwinConfig) and config.v2:
        _refuse_oblong_windows(config, source)
    return Reading(config, why)


def _refuse_oblong_windows(config: SwinConfig, source: str) -> None:
    """transformers' Swin V2 makes all windows square, those of grids with a side shorter than a window, too."""
    for down, across in config.stage_windows():
        if down != across:
            raise CheckpointError(
                f"{source}: with image_size={config.image_size} and patch_size={config.patch_size} it would have "
                f"windows of {down}x{across} here, where transformers pads them to squares, which we do not"
            )


def _usual(family: Family) -> dict[str, Any]:
    """What no tensor tells: named as a convention, so that a load says what it took for granted."""
    return {
        field.name: field.default
        for field in fields(family.config)
        if field.name.endswith("norm_eps") or field.name == "mlp"
    }


def check_staged(state: Mapping[str, Tensor], found: Recognised, settings: Mapping[str, Any], source: str) -> None:
    """Refuse settings of config.json that the tensors contradict, before a model of a false size is made."""
    told = settings_from_shapes(state, found, source)
    for name in sorted(FAMILIES[found.origin.architecture].firm & set(settings) & set(told)):
        value = _tupled(settings[name])
        if value != told[name]:
            raise CheckpointError(f"{source}: config.json says {name}={value!r}, but its tensors have {told[name]!r}")


def _tupled(value: Any, *, pair: bool = False) -> Any:
    if pair and isinstance(value, int):
        return value, value
    return tuple(value) if isinstance(value, list) else value
