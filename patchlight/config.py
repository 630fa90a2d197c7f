"""What a model is and how photos are prepared: frozen settings that check themselves.

Nothing here imports torch, so that the command line answers at once.
"""

import dataclasses
import hashlib
import json
import math
import typing
from dataclasses import dataclass
from typing import Any, Literal

from patchlight.errors import PatchlightError
from patchlight.json_config import (
    JsonConfig,
    as_tuple,
    check_names,
    check_types,
    default_of,
    field_names,
    form_sizes,
    require,
)

Size = tuple[int, int]
"""(height, width), in pixels or in patches."""


Colour = tuple[float, float, float]
"""(red, green, blue), where 1 is full brightness."""


class ArchitectureConfig(JsonConfig):
    """What the configs of all architectures share: a name in JSON, and what cards and probes ask of any of them."""

    __slots__ = ()
    architecture = ""
    """Its name in JSON."""
    title = ""
    """Its name for people."""
    made_for_its_size = True
    """Whether some of its weights belong to images of `image_size`."""
    exports_any_size = True
    """Whether one exported graph takes images of every size."""

    image_size: Size
    patch_size: Size

    def grid_for(self, image_size: Size) -> Size:
        """Patches (down, across) that come out, of an image of this size."""
        raise NotImplementedError

    @property
    def grid(self) -> Size:
        """Patches (down, across) of an image of the configured size."""
        return self.grid_for(self.image_size)

    @property
    def first_grid(self) -> Size:
        """Patches (down, across) that enter the first block."""
        return self.grid

    @property
    def num_prefix(self) -> int:
        """Tokens in front of the patches."""
        return 0

    def patch_pixels(self, image_size: Size) -> tuple[float, float]:
        """(height, width) of a patch that comes out, in an image of this size."""
        return float(self.patch_size[0]), float(self.patch_size[1])

    @property
    def size_step(self) -> Size:
        """The sides of exported images are multiples of it."""
        return self.patch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the architecture's name beside the settings."""
        return {"architecture": self.architecture} | JsonConfig.to_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> typing.Self:
        """The inverse of `to_dict`; a setting that is left out keeps its default, an unknown one raises."""
        settings = dict(values)
        architecture = settings.pop("architecture", cls.architecture)
        require(
            architecture == cls.architecture,
            f"architecture={architecture!r} is not {cls.architecture!r}, which {cls.__name__} holds",
        )
        check_names(cls, settings)
        return cls(**settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig(ArchitectureConfig):
    """A plain Vision Transformer. Where a size is (height, width), one number stands for a square."""

    architecture = "vit"
    title = "Vision Transformer"

    # What comes in. The model takes images of any size; the positions are made for this one.
    image_size: Size = (224, 224)
    patch_size: Size = (16, 16)
    in_channels: int = 3
    # From pixels to tokens: each patch alone through one matrix; or small convolutions, each followed by pooling that
    # halves the image, until it is a patch_size-th of its size (CCT), so that tokens know what lies across their edge.
    stem: Literal["patchify", "convolutions"] = "patchify"
    # An image size that the patch does not divide: refuse it; pad it (right and below, with zeros) so that every
    # pixel is seen; or resize it to the nearest multiple.
    uneven_size: Literal["error", "pad", "resize"] = "error"
    # A ResNet in front of the patches (a hybrid): blocks a stage, () for its first convolution and pooling alone.
    resnet: tuple[int, ...] | None = None

    # The encoder.
    width: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_dim: int | None = None  # None: four times the width
    mlp: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu"
    qkv_bias: bool = True
    patch_bias: bool = True
    qk_norm: bool = False  # normalise each head's queries and keys
    embed_norm: bool = False  # normalise the tokens before the first block (CLIP)
    block_norm: Literal["before", "after"] = "before"  # normalise what a branch takes in, or what it adds (Swin V2)
    inner_norm: Literal["none", "mlp", "both"] = (
        "none"  # normalise before the last matrix of MLP and attention (EVA-02)
    )
    norm_eps: float = 1e-6
    layer_scale: float | None = None  # first value of the learned scale on each residual branch; None: no scale
    drop_path: float = 0.0  # stochastic depth: the rate in the last block, growing linearly from 0 in the first
    # In training alone, where the paper has it: after every matrix but those of queries, keys and values, and after the
    # positions were added.
    dropout: float = 0.0
    # How fresh weights are drawn: all alike, cut off at two deviations (as most ViTs); as timm draws them by default;
    # or as the paper's JAX code does. See models/fresh.py.
    init: Literal["vit", "timm", "jax"] = "vit"

    # The tokens in front of the patches, in this order: class, distillation, registers.
    class_token: bool = True
    distill_token: bool = False
    num_registers: int = 0

    # Where the patches lie.
    # A learned table; sines and cosines; rotations by row and column, or by learned mixtures of both; a bias for each
    # offset between patches, learned one by one or as an MLP over the logarithms of the offsets.
    position: Literal["learned", "sincos2d", "rope2d", "rope_mixed", "relative_bias", "relative_mlp", "none"] = (
        "learned"
    )
    add_learned_table: bool = False  # a learned table besides the rotations
    prefix_positions: Literal["all", "class", "none"] = "all"  # which prefix tokens own a row of the learned table
    # A learned table is resampled to other image sizes bicubically: widened when shrinking, with Keys' a = -1/2 (timm,
    # DINOv2 with registers), or as it is, with a = -3/4 (other models of transformers); or linearly (BEiT there).
    position_resampling: Literal["antialiased", "plain", "linear"] = "antialiased"
    rope_base: float = 100.0
    # RoPE counts patches from the corner, or measures from -1 to 1 across the image (DINOv3).
    rope_coordinates: Literal["index", "centred"] = "index"
    rope_grid: Size | None = None  # count as if every image had this many patches (EVA-02); None: as many as it has
    relative_hidden: int = 128  # width of the hidden layer of position="relative_mlp"

    # What comes out.
    # The class token; the mean of the patches; both, one after the other (DINOv2's classifiers); or one more attention,
    # by a learned query (SigLIP).
    pooling: Literal["cls", "mean", "cls_mean", "attention"] = "cls"
    # Normalise every token, or only what pooling leaves, or neither (what CLIP's classifiers read in transformers).
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"
    head_hidden: int = 0  # width of the head's tanh layer (the original's pre-training head); 0: a linear head
    patch_boxes: bool = False  # each patch says where its object ends, see models/patch_boxes.py
    num_classes: int = 1000  # 0: no head, forward gives the pooled features

    def __post_init__(self) -> None:
        form_sizes(self, "image_size", "patch_size", "rope_grid")
        object.__setattr__(self, "resnet", as_tuple(self.resnet))
        check_types(self)
        self._check_numbers()
        self._check_contradictions()

    def _check_numbers(self) -> None:
        positive = (
            "in_channels",
            "width",
            "depth",
            "num_heads",
            "mlp_width",
            "norm_eps",
            "rope_base",
            "relative_hidden",
        )
        for name in positive:
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be more than 0")
        for name in ("image_size", "patch_size", "rope_grid", "resnet"):
            value = getattr(self, name)
            require(not value or min(value) > 0, f"{name}={value} must be more than 0")
        for name in ("num_registers", "head_hidden", "num_classes"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must be 0 or more")
        for name in ("drop_path", "dropout"):
            require(0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)} must lie in [0, 1)")
        if self.width % self.num_heads:
            fewer = next(n for n in range(min(self.num_heads, self.width), 0, -1) if self.width % n == 0)
            raise PatchlightError(
                f"width={self.width} is not divisible by num_heads={self.num_heads}; num_heads={fewer} would do"
            )
        stride = self.resnet_stride
        require(
            len(self.resnet or ()) <= 4 and all(side % stride == 0 for side in self.patch_size),
            f"resnet={self.resnet} leaves one pixel of {stride}x{stride}, and at most 4 stages; "
            f"patch_size={self.patch_size} must be a multiple of that",
        )
        self.grid_for(self.image_size)

    def _check_contradictions(self) -> None:
        require(
            not self.patch_boxes or self.depth > 1,
            "patch_boxes=True reads what enters the last block; depth must be 2 or more",
        )
        require(
            self.resnet is None or self.stem == "patchify",
            f"resnet={self.resnet} and stem={self.stem!r} are two stems; leave one of them out",
        )
        side = self.patch_size[0]
        require(
            self.stem == "patchify" or (self.patch_size == (side, side) and side > 1 and side.bit_count() == 1),
            f"stem={self.stem!r} halves the image again and again: patch_size={self.patch_size} must be a square of 2, "
            "4, 8 or another power of two",
        )
        require(
            self.class_token or self.pooling in ("mean", "attention"),
            f"pooling={self.pooling!r} needs class_token=True; without a class token use 'mean' or 'attention'",
        )
        require(
            self.pooling != "cls_mean" or self.final_norm == "tokens",
            "pooling='cls_mean' goes with final_norm='tokens'",
        )
        require(
            not self.distill_token or (self.class_token and self.pooling == "cls"),
            "distill_token=True goes with class_token=True and pooling='cls'",
        )
        require(
            not self.head_hidden or bool(self.num_classes),
            f"head_hidden={self.head_hidden} needs a head; set num_classes, or head_hidden=0",
        )
        require(
            self.prefix_positions != "class" or self.class_token,
            "prefix_positions='class' needs class_token=True; use prefix_positions='none'",
        )
        require(
            self.position != "sincos2d" or self.width % 4 == 0,
            f"position='sincos2d' needs a width divisible by 4 (sine and cosine of two coordinates), not {self.width}",
        )
        require(
            not self.is_rotary or self.head_width % 4 == 0,
            f"position={self.position!r} needs heads of a width divisible by 4, not {self.width}/{self.num_heads} = "
            f"{self.head_width}; change num_heads",
        )
        require(
            self.rope_grid is None or self.rope_coordinates == "index",
            f"rope_grid={self.rope_grid} counts patches, so it goes with rope_coordinates='index'",
        )
        for name, schemes in (
            ("prefix_positions", ("learned",)),
            ("add_learned_table", ("rope2d", "rope_mixed")),
            ("rope_base", ("rope2d", "rope_mixed")),
            ("rope_coordinates", ("rope2d",)),
            ("rope_grid", ("rope2d",)),
            ("relative_hidden", ("relative_mlp",)),
        ):
            value, default = getattr(self, name), default_of(type(self), name)
            has_a_table = name == "prefix_positions" and self.has_position_table
            require(
                value == default or self.position in schemes or has_a_table,
                f"{name}={value!r} has no effect with position={self.position!r}; leave it out, "
                f"or use position={schemes[0]!r}",
            )

    @property
    def is_rotary(self) -> bool:
        """Whether positions are told by turning queries and keys."""
        return self.position in ("rope2d", "rope_mixed")

    @property
    def has_position_table(self) -> bool:
        """Whether a learned table is added to the patches."""
        return self.position == "learned" or self.add_learned_table

    @property
    def resnet_stride(self) -> int:
        """Pixels, along each side, that one pixel of the ResNet in front stands for; 1 without one."""
        return 1 if self.resnet is None else 4 * 2 ** max(0, len(self.resnet) - 1)

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Numbers in the MLP's hidden layer."""
        return 4 * self.width if self.mlp_dim is None else self.mlp_dim

    @property
    def feature_width(self) -> int:
        """Numbers that pooling leaves of an image."""
        return 2 * self.width if self.pooling == "cls_mean" else self.width

    @property
    def num_prefix(self) -> int:
        """Tokens in front of the patches."""
        return self.class_token + self.distill_token + self.num_registers

    @property
    def num_prefix_positions(self) -> int:
        """Rows of the learned position table that belong to prefix tokens; they come first."""
        return {"all": self.num_prefix, "class": 1, "none": 0}[self.prefix_positions]

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

    @property
    def encoder_in_words(self) -> str:
        """What stands between the image and the head, for cards."""
        return f"{self.depth} blocks, {self.width} wide, {self.num_heads} heads, {self.position} positions"

    def patch_pixels(self, image_size: Size) -> tuple[float, float]:
        """(height, width) of a patch in an image of this size; `uneven_size="resize"` rescales the image."""
        if self.uneven_size != "resize":
            return ArchitectureConfig.patch_pixels(self, image_size)
        grid = self.grid_for(image_size)
        return image_size[0] / grid[0], image_size[1] / grid[1]

    @property
    def token_width(self) -> int:
        """Numbers of each patch that comes out."""
        return self.width

    @property
    def probe_heads(self) -> int:
        """Heads of an attention over what comes out."""
        return self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig(JsonConfig):
    """How a photo becomes the model's image: resized, cropped about its centre, normalised."""

    image_size: Size = (224, 224)  # what comes out, (height, width)

    # Before the crop the photo is scaled towards `scaled_size`, which is image_size / crop_pct, or resize_size.
    # "shortest": keep the aspect and cover it (its shortest side, where it is square); "squash": exactly, aspect lost;
    # "border": keep the aspect and fit inside, then fill up with the mean colour; "none": leave the pixels as they are.
    resize: Literal["shortest", "squash", "border", "none"] = "shortest"
    crop_pct: float = 1.0
    resize_size: Size | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic"
    # Resized pixels are rounded to whole grey levels, as Pillow does, or not (DINOv3 in transformers).
    resize_in: Literal["bytes", "floats"] = "bytes"

    # The crop's corner is half the margin. An odd margin's half is rounded to the even number (torchvision, timm) or
    # down (transformers). "none": no crop, so that "shortest" gives images of different sizes.
    crop: Literal["round", "floor", "none"] = "round"

    # Channels from 0 to 1 become (value - mean) / std; the defaults are ImageNet's.
    mean: Colour = (0.485, 0.456, 0.406)
    std: Colour = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        form_sizes(self, "image_size", "resize_size")
        for name in ("mean", "std"):
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        check_types(self)
        for name in ("mean", "std"):  # 1 and 1.0 are the same setting and should write the same JSON
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        object.__setattr__(self, "crop_pct", float(self.crop_pct))
        for name in ("image_size", "resize_size", "std"):
            value = getattr(self, name)
            require(value is None or min(value) > 0, f"{name}={value} must be more than 0")
        require(self.crop_pct > 0, f"crop_pct={self.crop_pct} must be more than 0")
        require(
            max(*self.image_size, *self.scaled_size) <= 16_384,
            f"image_size={self.image_size} at crop_pct={self.crop_pct} is beyond 16,384 pixels a side",
        )
        require(
            self.resize_size is None or self.crop_pct == 1,
            f"resize_size={self.resize_size} and crop_pct={self.crop_pct} both say the size before the crop; "
            "leave one of them out",
        )
        require(
            self.resize != "none" or (self.crop != "none" and self.scaled_size == self.image_size),
            "resize='none' needs a crop to image_size, and neither crop_pct nor resize_size",
        )
        require(
            self.crop != "none" or (self.resize != "border" and self.scaled_size == self.image_size),
            "crop='none' goes with resize='shortest' or 'squash', without crop_pct and resize_size",
        )

    @property
    def scaled_size(self) -> Size:
        """The (height, width) that the photo is scaled towards before the crop."""
        if self.resize_size is not None:
            return self.resize_size
        height, width = self.image_size
        return max(1, math.floor(height / self.crop_pct)), max(1, math.floor(width / self.crop_pct))

    def for_size(self, image_size: Size) -> "PreprocessConfig":
        """The same for another image size: the size before the crop, where it is given, grows in proportion."""
        resize_size = self.resize_size
        if resize_size is not None:
            heights, widths = (image_size[0], self.image_size[0]), (image_size[1], self.image_size[1])
            resize_size = round(resize_size[0] * heights[0] / heights[1]), round(resize_size[1] * widths[0] / widths[1])
        return dataclasses.replace(self, image_size=image_size, resize_size=resize_size)

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits, the same for two configs that prepare every photo alike."""
        return hashlib.sha256(json.dumps(self._effect(), sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, other: "PreprocessConfig") -> list[str]:
        """What differs in effect, one setting a line: "interpolation is 'bicubic' here and 'bilinear' there"."""
        mine, theirs = self._effect(), other._effect()
        differing = {name for name in mine if mine[name] != theirs[name]}
        if "scaled_size" in differing:
            differing |= {"crop_pct", "resize_size"}
        return [
            f"{name} is {getattr(self, name)!r} here and {getattr(other, name)!r} there"
            for name in field_names(type(self))
            if name in differing and getattr(self, name) != getattr(other, name)
        ]

    def _effect(self) -> dict[str, Any]:
        """The settings in a form where those that cannot matter are equal.

        Fingerprints are stored beside models: a setting that is added later belongs here only where it is not at its
        default, so that the old fingerprints stay true.
        """
        effect = self.to_dict() | {"scaled_size": list(self.scaled_size)}
        del effect["crop_pct"], effect["resize_size"]
        if self.resize == "squash" and self.scaled_size == self.image_size:
            effect["crop"] = "none"
        if self.resize == "none":
            effect |= {"interpolation": None, "resize_in": None}
        return effect


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(JsonConfig):
    """How far a model's boxes can be trusted, fitted on photos whose boxes are known (benchmarks/subjects.py).

    confidence = sigmoid(bias + the sum of weight * measure), see `localize.decide.Measures`: that the box overlaps the
    subject's by half or more.
    """

    bias: float
    mean: float = 0.0
    peak: float = 0.0
    sharpness: float = 0.0
    outside: float = 0.0
    others: float = 0.0
    size: float = 0.0
    touching: float = 0.0
    fit: float = 0.0
    sure: float = 0.5  # the least confidence of an answer "subject"
    nothing: float = 0.0  # with less than this there is nothing in the photo
    # For the boxes beside a photo's first one, fitted on photos of which all objects are known; from its `sure` on they
    # are subjects, too. None: as the first.
    further: "Calibration | None" = None

    def __post_init__(self) -> None:
        if isinstance(self.further, dict):  # as JSON holds it
            object.__setattr__(self, "further", Calibration.from_dict(self.further))
        check_types(self)
        require(
            self.further is None or self.further.further is None,
            "the calibration in `further` cannot have a `further` itself",
        )
        require(
            0 <= self.nothing <= self.sure <= 1,
            f"nothing={self.nothing} and sure={self.sure} must be confidences from 0 to 1, the first not the larger",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `further` is an object of its own, and left out where there is none."""
        values = JsonConfig.to_dict(self)
        del values["further"]
        return values if self.further is None else values | {"further": self.further.to_dict()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectHeat(JsonConfig):
    """How a model that was taught to find subjects says where: the share of each patch that the subject covers.

    heat_hw = sigmoid(scale * score + bias), where score is q_class . k_patch / sqrt(E) of the last block, the mean over
    its heads: the class token's attention before the softmax.
    """

    scale: float
    bias: float
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if isinstance(self.calibration, dict):  # as JSON holds it
            object.__setattr__(self, "calibration", Calibration.from_dict(self.calibration))
        check_types(self)
        require(self.scale > 0, f"scale={self.scale} must be more than 0")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a calibration is an object of its own, and left out where there is none."""
        values = JsonConfig.to_dict(self)
        if self.calibration is None:
            del values["calibration"]
            return values
        return values | {"calibration": self.calibration.to_dict()}
