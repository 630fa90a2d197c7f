"""Frozen settings that check themselves and go to JSON and back: what all configs have in common.

Nothing here imports torch, so that the command line answers at once.
"""

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from patchlight.errors import PatchlightError
from patchlight.other_names import other_name


def parse_json(text: str | bytes) -> Any:
    """The value; raises ValueError for what is no JSON, or too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class JsonConfig:
    """The JSON form that the configs share: plain values, and no key that is not a setting."""

    __slots__ = ()

    def __new__(cls, **settings: Any) -> typing.Self:
        """A misspelt setting is answered with the nearest name, where Python would say TypeError."""
        check_names(cls, settings)
        return super().__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {name: getattr(self, name) for name in field_names(type(self))}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> typing.Self:
        """The inverse of `to_dict`; a setting that is left out keeps its default, an unknown one raises."""
        check_whole(cls, values)
        return cls(**{name: as_tuple(value) for name, value in values.items()})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> typing.Self:
        try:
            values = parse_json(text)
        except ValueError as error:
            raise PatchlightError(f"the config is not valid JSON: {error}") from None
        require(isinstance(values, dict), f"the config must be a JSON object, not {type(values).__name__}")
        return cls.from_dict(values)


def check_names(config_type: type, settings: dict[str, Any]) -> None:
    """Refuse settings that the config does not have, with the nearest name it has."""
    names = field_names(config_type)
    for name in settings:
        if name not in names:
            nearest = difflib.get_close_matches(str(name), names, n=1)
            hint = other_name(name, names)
            hint = hint or (f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names)}")
            raise PatchlightError(f"unknown setting {name!r:.80} for {config_type.__name__}; {hint}")


def check_whole(config_type: type, settings: dict[str, Any]) -> None:
    """Refuse settings among which one is missing that has no default."""
    for field in dataclasses.fields(config_type):
        given = field.name in settings or field.default_factory is not dataclasses.MISSING
        require(given or field.default is not dataclasses.MISSING, f"{config_type.__name__} needs {field.name!r}")


def check_types(config: Any, skip: typing.Container[str] = ()) -> None:
    """Refuse a config whose values are not of the types that its fields declare."""
    for name, hint in typing.get_type_hints(type(config)).items():
        if name in skip:
            continue
        value = getattr(config, name)
        require(_fits(value, hint), f"{name}={value!r:.200} should be {_spell(hint)}")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (types.UnionType, typing.Union):  # the second of Literal[...] | None
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return type(value) is tuple and all(_fits(each, arguments[0]) for each in value)
    if origin is tuple:
        return type(value) is tuple and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # JSON's whole numbers have no end
    return type(value) is hint  # exactly, since True is an int


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(_spell, typing.get_args(hint)))
    if typing.get_args(hint)[-1:] == (Ellipsis,):
        return "several numbers"
    if typing.get_origin(hint) is tuple:
        spelt = {
            tuple[int, int]: "a whole number, or two of them (height, width)",
            tuple[float, float, float]: "three numbers (red, green, blue)",
        }
        return spelt.get(hint, f"{len(typing.get_args(hint))} numbers")
    plain = {int: "a whole number", float: "a number", bool: "True or False", str: "text", types.NoneType: "None"}
    return plain.get(hint) or f"a {hint.__name__}"


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def form_sizes(config: Any, *names: str) -> None:
    """Bring sizes into their form, (height, width): one number stands for a square, and JSON has lists."""
    for name in names:
        value = getattr(config, name)
        object.__setattr__(config, name, (value, value) if type(value) is int else as_tuple(value))


def field_names(config_type: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config_type)]


def default_of(config_type: type, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(config_type) if field.name == name)


def require(condition: bool, message: str) -> None:
    """Refuse a setting with this line unless the condition holds."""
    if not condition:
        raise PatchlightError(message)


def require_within(config: Any, name: str, low: float, high: float) -> None:
    """Refuse a number that lies outside its range."""
    value = getattr(config, name)
    require(low <= value <= high, f"{name}={value} must lie from {low} to {high}")


def parse_values(settings: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON (4, 0.1, true, null, [224, 336]), or Python's True, False, None, or a word."""
    changes: dict[str, Any] = {}
    python = {"True": True, "False": False, "None": None}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise PatchlightError(f"--set {setting}: write NAME=VALUE, such as num_registers=4")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = python.get(value, value)
    return changes
