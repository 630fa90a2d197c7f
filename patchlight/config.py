"""What a model is: frozen settings that check themselves, and the sizes that the literature names.

Nothing here imports torch, so that the command line answers at once.
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from patchlight.errors import PatchlightError

Size = tuple[int, int]
"""(height, width), in pixels or in patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """A plain Vision Transformer. Where a size is (height, width), one number stands for a square."""

    # What comes in. The model takes images of any size; the positions are made for this one.
    image_size: Size = (224, 224)
    patch_size: Size = (16, 16)
    in_channels: int = 3
    # An image size that the patch does not divide: refuse it; pad it (right and below, with zeros) so that every
    # pixel is seen; or resize it to the nearest multiple.
    uneven_size: Literal["error", "pad", "resize"] = "error"

    # The encoder.
    width: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_dim: int = 0  # 0: four times the width
    mlp: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu"
    qkv_bias: bool = True
    patch_bias: bool = True
    qk_norm: bool = False  # normalise each head's queries and keys
    embed_norm: bool = False  # normalise the tokens before the first block (CLIP)
    norm_eps: float = 1e-6
    layer_scale: float | None = None  # first value of the learned scale on each residual branch; None: no scale
    drop_path: float = 0.0  # stochastic depth: the rate in the last block, growing linearly from 0 in the first

    # The tokens in front of the patches, in this order: class, distillation, registers.
    class_token: bool = True
    distill_token: bool = False
    num_registers: int = 0

    # Where the patches lie.
    position: Literal["learned", "sincos2d", "rope2d", "relative_bias", "none"] = "learned"
    prefix_positions: Literal["all", "class", "none"] = "all"  # which prefix tokens own a row of the learned table
    rope_base: float = 100.0
    # RoPE counts patches from the corner, or measures from -1 to 1 across the image (DINOv3).
    rope_coordinates: Literal["index", "centred"] = "index"

    # What comes out.
    pooling: Literal["cls", "mean"] = "cls"
    final_norm: Literal["tokens", "pooled"] = "tokens"  # normalise every token, or only what pooling leaves
    head_hidden: int = 0  # width of the head's tanh layer (the original's pre-training head); 0: a linear head
    num_classes: int = 1000  # 0: no head, forward gives the pooled features

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value, value) if type(value) is int else _as_tuple(value))
        check_types(self)
        if self.mlp_dim == 0:
            object.__setattr__(self, "mlp_dim", 4 * self.width)
        self._check_numbers()
        self._check_contradictions()

    def _check_numbers(self) -> None:
        for name in ("in_channels", "width", "depth", "num_heads", "mlp_dim", "norm_eps", "rope_base"):
            _require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be more than 0")
        for name in ("image_size", "patch_size"):
            _require(min(getattr(self, name)) > 0, f"{name}={getattr(self, name)} must be more than 0")
        for name in ("num_registers", "head_hidden", "num_classes"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be 0 or more")
        _require(0 <= self.drop_path < 1, f"drop_path={self.drop_path} must lie in [0, 1)")
        divisors = [n for n in range(1, self.width + 1) if self.width % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - self.num_heads))
        _require(
            self.width % self.num_heads == 0,
            f"width={self.width} is not divisible by num_heads={self.num_heads}; num_heads={nearest} would do",
        )
        self.grid_for(self.image_size)

    def _check_contradictions(self) -> None:
        _require(
            self.class_token or self.pooling != "cls",
            "pooling='cls' needs class_token=True; without a class token use pooling='mean'",
        )
        _require(
            not self.distill_token or (self.class_token and self.pooling == "cls"),
            "distill_token=True goes with class_token=True and pooling='cls'",
        )
        _require(
            not self.head_hidden or bool(self.num_classes),
            f"head_hidden={self.head_hidden} needs a head; set num_classes, or head_hidden=0",
        )
        _require(
            self.prefix_positions != "class" or self.class_token,
            "prefix_positions='class' needs class_token=True; use prefix_positions='none'",
        )
        _require(
            self.position != "sincos2d" or self.width % 4 == 0,
            f"position='sincos2d' needs a width divisible by 4 (sine and cosine of two coordinates), not {self.width}",
        )
        _require(
            self.position != "rope2d" or self.head_width % 4 == 0,
            f"position='rope2d' needs heads of a width divisible by 4, not {self.width}/{self.num_heads} = "
            f"{self.head_width}; change num_heads",
        )
        for name, scheme in (
            ("prefix_positions", "learned"),
            ("rope_base", "rope2d"),
            ("rope_coordinates", "rope2d"),
        ):
            value, default = getattr(self, name), _default(type(self), name)
            _require(
                value == default or self.position == scheme,
                f"{name}={value!r} means nothing with position={self.position!r}; leave it out, "
                f"or use position={scheme!r}",
            )

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def num_prefix(self) -> int:
        """Tokens in front of the patches."""
        return self.class_token + self.distill_token + self.num_registers

    @property
    def num_prefix_positions(self) -> int:
        """Rows of the learned position table that belong to prefix tokens; they come first."""
        return {"all": self.num_prefix, "class": 1, "none": 0}[self.prefix_positions]

    @property
    def grid(self) -> Size:
        """Patches (down, across) of an image of the configured size."""
        return self.grid_for(self.image_size)

    def grid_for(self, image_size: Size) -> Size:
        """Patches (down, across) that an image of this size becomes; raises where `uneven_size` forbids it."""
        (height, width), (down, across) = image_size, self.patch_size
        if height % down == 0 and width % across == 0:
            return height // down, width // across
        if self.uneven_size == "pad":
            return -(-height // down), -(-width // across)
        rows, columns = max(1, round(height / down)), max(1, round(width / across))
        if self.uneven_size == "resize":
            return rows, columns
        raise PatchlightError(
            f"patches of {down}x{across} do not divide an image of {height}x{width}; "
            f"{rows * down}x{columns * across} would do, or set uneven_size='pad' or 'resize'"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the architecture's name beside the settings."""
        values = {name: getattr(self, name) for name in _field_names(type(self))}
        return {"architecture": "vit"} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> typing.Self:
        """The inverse of `to_dict`; a setting that is left out keeps its default, an unknown one raises."""
        settings = dict(values)
        architecture = settings.pop("architecture", "vit")
        _require(architecture == "vit", f"architecture={architecture!r} is not a plain ViT; ViTConfig holds 'vit' only")
        check_names(cls, settings)
        return cls(**settings)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> typing.Self:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise PatchlightError(f"the config is not valid JSON: {error}") from None
        _require(isinstance(values, dict), f"the config must be a JSON object, not {type(values).__name__}")
        return cls.from_dict(values)


SIZES: dict[str, dict[str, int]] = {
    "mu": {"width": 32, "depth": 1, "num_heads": 2},
    "Ti": {"width": 192, "depth": 12, "num_heads": 3},
    "S": {"width": 384, "depth": 12, "num_heads": 6},
    "M": {"width": 512, "depth": 12, "num_heads": 8},
    "B": {"width": 768, "depth": 12, "num_heads": 12},
    "L": {"width": 1024, "depth": 24, "num_heads": 16},
    "So400m": {"width": 1152, "depth": 27, "num_heads": 16, "mlp_dim": 4304},
    "H": {"width": 1280, "depth": 32, "num_heads": 16},
    "g": {"width": 1408, "depth": 40, "num_heads": 16, "mlp_dim": 6144},
    "G": {"width": 1664, "depth": 48, "num_heads": 16, "mlp_dim": 8192},
    "e": {"width": 1792, "depth": 56, "num_heads": 16, "mlp_dim": 15360},
}


def variant(name: str, **changes: Any) -> ViTConfig:
    """The config that the literature calls `name`, a size and a patch such as "B/16", with `changes` on top."""
    size, slash, patch = name.partition("/")
    _require(
        size in SIZES and bool(slash) and patch.isascii() and patch.isdigit() and int(patch) > 0,
        f"unknown variant {name!r}; write SIZE/PATCH such as 'S/16', with SIZE one of {', '.join(SIZES)}",
    )
    check_names(ViTConfig, changes)
    asked_patch = changes.pop("patch_size", int(patch))
    _require(
        asked_patch in (int(patch), (int(patch), int(patch)), [int(patch), int(patch)]),
        f"variant {name!r} has patch_size={patch}, but patch_size={asked_patch} was asked for; leave one of them out, "
        f"or write ViTConfig(...) in full",
    )
    settings: dict[str, Any] = {"patch_size": (int(patch), int(patch))} | SIZES[size] | changes
    return ViTConfig(**settings)


def check_names(config_type: type, settings: dict[str, Any]) -> None:
    """Refuse settings that the config does not have, with the nearest name it has."""
    names = _field_names(config_type)
    for name in settings:
        nearest = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(names)}"
        _require(name in names, f"unknown setting {name!r} for {config_type.__name__}; {hint}")


def check_types(config: Any) -> None:
    """Refuse a config whose values are not of the types that its fields declare."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        _require(_fits(value, hint), f"{name}={value!r} should be {_spell(hint)}")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is types.UnionType:
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return type(value) is tuple and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint  # exactly, since True is an int


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join(map(_spell, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a whole number, or two of them (height, width)"
    return {int: "a whole number", float: "a number", bool: "True or False", types.NoneType: "None"}[hint]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _field_names(config_type: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config_type)]


def _default(config_type: type, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(config_type) if field.name == name)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PatchlightError(message)
