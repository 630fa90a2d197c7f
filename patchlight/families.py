"""The architectures beside the plain ViT, as settings: Swin and ConvNeXt, and which config a name or a file means.

Both work in stages: each halves the grid of the one before it and is wider. Nothing here imports torch.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, overload

from patchlight.config import ArchitectureConfig, Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.json_config import as_tuple, check_names, check_types, form_sizes, parse_json, require

SwinName = Literal["swin-T", "swin-S", "swin-B", "swin-L", "swinv2-T", "swinv2-S", "swinv2-B"]
ConvNeXtName = Literal[
    "convnext-T",
    "convnext-S",
    "convnext-B",
    "convnext-L",
    "convnext-XL",
    "convnextv2-T",
    "convnextv2-B",
    "convnextv2-L",
]


class StagedConfig(ArchitectureConfig):
    """What configs of models with stages share."""

    __slots__ = ()
    depths: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Blocks of all stages."""
        return sum(self.depths)

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """The number of each stage's first block, counted over all stages."""
        return tuple(sum(self.depths[:stage]) for stage in range(len(self.depths)))

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The number of each stage's last block, counted over all stages."""
        return tuple(start + depth - 1 for start, depth in zip(self.stage_starts, self.depths, strict=True))

    def stage_of(self, block: int) -> int:
        """The stage that a block, counted over all stages, belongs to."""
        return max(stage for stage, start in enumerate(self.stage_starts) if start <= block)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of each stage."""
        raise NotImplementedError

    def stage_grids(self, image_size: Size) -> list[Size]:
        """Patches (down, across) in each stage, of an image of this size."""
        raise NotImplementedError

    def grid_for(self, image_size: Size) -> Size:
        """Patches (down, across) that come out of the last stage."""
        return self.stage_grids(image_size)[-1]

    @property
    def first_grid(self) -> Size:
        return self.stage_grids(self.image_size)[0]

    def patch_pixels(self, image_size: Size, stage: int = -1) -> tuple[float, float]:
        """(height, width) in the image of one patch of a stage; the same for images of every size."""
        times = 2 ** (stage % len(self.depths))
        return float(self.patch_size[0] * times), float(self.patch_size[1] * times)

    @property
    def size_step(self) -> Size:
        """The sides of exported images are multiples of it: patches of the last stage."""
        times = 2 ** (len(self.depths) - 1)
        return self.patch_size[0] * times, self.patch_size[1] * times

    @property
    def _stages_in_words(self) -> str:
        stages = ", ".join(f"{depth} x {width}" for depth, width in zip(self.depths, self.widths, strict=True))
        return f"stages of {stages} (blocks x width)"

    @property
    def token_width(self) -> int:
        """Numbers of each patch that comes out."""
        return self.feature_width

    @property
    def probe_heads(self) -> int:
        """Heads of an attention over what comes out: about 64 numbers each."""
        return math.gcd(self.feature_width, max(1, self.feature_width // 64))

    @property
    def feature_width(self) -> int:
        """Numbers that pooling leaves of an image."""
        return self.widths[-1]

    def _check(self, *, pairs: tuple[str, ...], stages: tuple[str, ...], positive: tuple[str, ...]) -> None:
        """Bring sizes into their form, and refuse what cannot be."""
        form_sizes(self, *pairs)
        for name in stages:
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        check_types(self, skip=stages)
        for name in stages:
            value = getattr(self, name)
            whole = type(value) is tuple and all(type(number) is int and number > 0 for number in value)
            require(whole, f"{name}={value!r} should be a whole number above 0 for each stage")
        counts = [len(getattr(self, name)) for name in stages]
        empty = " and ".join(f"{name}={getattr(self, name)}" for name in stages)
        require(any(counts), f"there are no stages in {empty}; give each a number")
        require(
            len(set(counts)) == 1,
            "the stages are not as many in " + " as in ".join(f"{name}={getattr(self, name)}" for name in stages),
        )
        for name in positive:
            value = getattr(self, name)
            require((min(value) if isinstance(value, tuple) else value) > 0, f"{name}={value} must be more than 0")
        require(self.num_classes >= 0, f"num_classes={self.num_classes} must be 0 or more")
        require(0 <= self.drop_path < 1, f"drop_path={self.drop_path} must lie in [0, 1)")

    num_classes: int
    drop_path: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SwinConfig(StagedConfig):
    """A Swin Transformer (Liu et al. 2021, arXiv:2103.14030): attention in windows that are shifted every other block.

    It takes images of any size. Each stage is twice as wide as the one before it. With `v2` it is the second version
    (arXiv:2111.09883).
    """

    architecture = "swin"
    title = "Swin Transformer"
    exports_any_size = False

    image_size: Size = (224, 224)
    patch_size: Size = (4, 4)
    in_channels: int = 3

    width: int = 96  # of the first stage
    depths: tuple[int, ...] = (2, 2, 6, 2)  # blocks of each stage
    num_heads: tuple[int, ...] = (3, 6, 12, 24)  # of each stage
    window_size: Size = (7, 7)  # in patches
    # What happens where windows do not fill a grid, which is then padded right and below. "masked": nobody attends to
    # the padding, and an axis is shifted if it is longer than a window. "plain" (transformers): patches attend to
    # the padding as well, and nothing is shifted if the shorter axis fits into a window. (timm, at such sizes only,
    # shifts before it pads, so that patches from opposite edges attend to each other; that we do not follow.)
    uneven_windows: Literal["masked", "plain"] = "masked"
    # Swin V2: attention by the angle between queries and keys, positions as an MLP over the offsets' logarithms, and
    # norms after each branch in place of before it.
    v2: bool = False
    # Windows, as sides of squares in each stage, that its offsets are measured by: those that the weights were trained
    # with, if the model has others now. None: the windows that each stage has at `image_size`.
    measuring_windows: tuple[int, ...] | None = None
    mlp_ratio: float = 4.0  # the MLP's hidden layer, in widths of its stage
    qkv_bias: bool = True
    norm_eps: float = 1e-5
    drop_path: float = 0.0  # stochastic depth: the rate in the last block, growing linearly from 0 in the first

    num_classes: int = 1000  # 0: no head, forward gives the pooled features

    def __post_init__(self) -> None:
        object.__setattr__(self, "measuring_windows", as_tuple(self.measuring_windows))
        require(
            self.measuring_windows is None or (self.v2 and len(self.measuring_windows) == len(self.depths)),
            f"measuring_windows={self.measuring_windows} goes with v2=True, one number a stage",
        )
        self._check(
            pairs=("image_size", "patch_size", "window_size"),
            stages=("depths", "num_heads"),
            positive=("image_size", "patch_size", "window_size", "in_channels", "width", "mlp_ratio", "norm_eps"),
        )
        for width, heads in zip(self.widths, self.num_heads, strict=True):
            require(width % heads == 0, f"num_heads={self.num_heads}: {heads} heads do not divide a width of {width}")
        require(
            min(self.mlp_widths) > 0, f"mlp_ratio={self.mlp_ratio} leaves nothing of the MLP at a width of {self.width}"
        )

    def stage_windows(self) -> list[Size]:
        """The windows of each stage at `image_size`: no larger than the stage's grid."""
        down, across = self.window_size
        return [(min(h, down), min(w, across)) for h, w in self.stage_grids(self.image_size)]

    def measuring_window(self, stage: int) -> Size:
        """The window that Swin V2 measures offsets by in a stage."""
        if self.measuring_windows is None:
            return self.stage_windows()[stage]
        return self.measuring_windows[stage], self.measuring_windows[stage]

    @property
    def encoder_in_words(self) -> str:
        """What stands between the image and the head, for cards."""
        down, across = self.window_size
        return f"Swin{' V2' if self.v2 else ''}, {self._stages_in_words}, windows of {down} x {across} patches"

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.width * 2**stage for stage in range(len(self.depths)))

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Of the MLP's hidden layer in each stage."""
        return tuple(int(width * self.mlp_ratio) for width in self.widths)

    def stage_grids(self, image_size: Size) -> list[Size]:
        """Patches (down, across) in each stage: what a patch or two of them do not divide is padded."""
        grid = tuple(-(-pixels // patch) for pixels, patch in zip(image_size, self.patch_size, strict=True))
        return [(-(-grid[0] // 2**stage), -(-grid[1] // 2**stage)) for stage in range(len(self.depths))]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvNeXtConfig(StagedConfig):
    """A ConvNeXt (Liu et al. 2022, arXiv:2201.03545), or with `grn` its second version (arXiv:2301.00808).

    It takes images of any size; rows and columns that its strides do not divide are left out, as by any convolution.
    """

    architecture = "convnext"
    title = "ConvNeXt"
    made_for_its_size = False

    image_size: Size = (224, 224)
    patch_size: Size = (4, 4)  # of the first convolution
    in_channels: int = 3

    widths: tuple[int, ...] = (96, 192, 384, 768)  # of each stage
    depths: tuple[int, ...] = (3, 3, 9, 3)  # blocks of each stage
    kernel_size: int = 7
    layer_scale: float | None = 1e-6  # first value of the learned scale on each residual branch; None: no scale
    grn: bool = False  # normalise the MLP's hidden channels by their response to the whole image
    mlp: Literal["gelu", "gelu_tanh"] = "gelu"
    norm_eps: float = 1e-6
    final_norm_eps: float = 1e-6  # of the norm after pooling
    drop_path: float = 0.0  # stochastic depth: the rate in the last block, growing linearly from 0 in the first

    num_classes: int = 1000  # 0: no head, forward gives the pooled features

    def __post_init__(self) -> None:
        self._check(
            pairs=("image_size", "patch_size"),
            stages=("depths", "widths"),
            positive=("image_size", "patch_size", "in_channels", "kernel_size", "norm_eps", "final_norm_eps"),
        )
        require(self.kernel_size % 2 == 1, f"kernel_size={self.kernel_size} must be odd, to have a middle")
        self.stage_grids(self.image_size)

    @property
    def encoder_in_words(self) -> str:
        """What stands between the image and the head, for cards."""
        return f"ConvNeXt{' V2' if self.grn else ''}, {self._stages_in_words}, kernels of {self.kernel_size}"

    def stage_grids(self, image_size: Size) -> list[Size]:
        """Patches (down, across) in each stage; raises where an image is too small to leave any."""
        (height, width), (down, across) = image_size, self.patch_size
        times = 2 ** (len(self.depths) - 1)
        require(
            height >= down * times and width >= across * times,
            f"an image of {height}x{width} is too small: {len(self.depths)} stages need {down * times}x"
            f"{across * times} pixels at least",
        )
        return [(height // down // 2**stage, width // across // 2**stage) for stage in range(len(self.depths))]


ModelConfig = ViTConfig | SwinConfig | ConvNeXtConfig

CONFIGS: dict[str, type[ViTConfig] | type[SwinConfig] | type[ConvNeXtConfig]] = {
    config.architecture: config for config in (ViTConfig, SwinConfig, ConvNeXtConfig)
}

VIT_SIZES: dict[str, dict[str, int]] = {
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
SWIN_SIZES: dict[str, dict[str, Any]] = {
    "swin-T": {},
    "swin-S": {"depths": (2, 2, 18, 2)},
    "swin-B": {"depths": (2, 2, 18, 2), "width": 128, "num_heads": (4, 8, 16, 32)},
    "swin-L": {"depths": (2, 2, 18, 2), "width": 192, "num_heads": (6, 12, 24, 48)},
}
SWIN_SIZES |= {
    name.replace("swin", "swinv2"): SWIN_SIZES[name] | {"v2": True, "image_size": (256, 256), "window_size": (8, 8)}
    for name in ("swin-T", "swin-S", "swin-B")
}
CONVNEXT_SIZES: dict[str, dict[str, Any]] = {
    "convnext-T": {},
    "convnext-S": {"depths": (3, 3, 27, 3)},
    "convnext-B": {"depths": (3, 3, 27, 3), "widths": (128, 256, 512, 1024)},
    "convnext-L": {"depths": (3, 3, 27, 3), "widths": (192, 384, 768, 1536)},
    "convnext-XL": {"depths": (3, 3, 27, 3), "widths": (256, 512, 1024, 2048)},
}
CONVNEXT_SIZES |= {
    name.replace("convnext", "convnextv2"): CONVNEXT_SIZES[name] | {"grn": True, "layer_scale": None}
    for name in ("convnext-T", "convnext-B", "convnext-L")
}


SIZES = {SwinConfig.architecture: SWIN_SIZES, ConvNeXtConfig.architecture: CONVNEXT_SIZES}
"""The names that the literature has for models of an architecture, and their settings."""


@overload  # the names of the others are text, too: the first that fits is taken
def variant(name: SwinName, **changes: Any) -> SwinConfig: ...


@overload
def variant(name: ConvNeXtName, **changes: Any) -> ConvNeXtConfig: ...


@overload
def variant(name: str, **changes: Any) -> ViTConfig: ...


def variant(name: str, **changes: Any) -> ModelConfig:
    """The config that the literature calls `name`, with `changes` on top.

    A ViT's name is a size and a patch such as "B/16"; the others are "swin-T" to "swin-L", "swinv2-T" to
    "swinv2-B" (256 pixels, windows of 8), "convnext-T" to "convnext-XL" and "convnextv2-T" to "convnextv2-L".
    """
    for architecture, sizes in SIZES.items():
        if str(name) in sizes:  # a list could not be looked up
            return CONFIGS[architecture](**sizes[name] | changes)
    size, slash, patch = str(name).partition("/")
    require(
        size in VIT_SIZES and bool(slash) and patch.isascii() and patch.isdigit() and int(patch) > 0,
        f"unknown variant {name!r}; write SIZE/PATCH such as 'S/16', with SIZE one of {', '.join(VIT_SIZES)}; or one "
        f"of {', '.join(itertools.chain(*SIZES.values()))}",
    )
    check_names(ViTConfig, changes)
    asked_patch = changes.pop("patch_size", int(patch))
    require(
        asked_patch in (int(patch), (int(patch), int(patch)), [int(patch), int(patch)]),
        f"variant {name!r} has patch_size={patch}, but patch_size={asked_patch} was asked for; leave one of them out, "
        f"or write ViTConfig(...) in full",
    )
    settings: dict[str, Any] = {"patch_size": (int(patch), int(patch))} | VIT_SIZES[size] | changes
    return ViTConfig(**settings)


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    """The config that `to_dict` gave, of the architecture that it names; a plain ViT's where it names none."""
    architecture = values.get("architecture", ViTConfig.architecture)
    require(
        isinstance(architecture, str) and architecture in CONFIGS,
        f"architecture={architecture!r:.80} is not known; it is one of {', '.join(CONFIGS)}",
    )
    return CONFIGS[architecture].from_dict(values)


def config_from_json(text: str) -> ModelConfig:
    """As `config_from_dict`, from the text of a file."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise PatchlightError(f"the config is not valid JSON: {error}") from None
    require(isinstance(values, dict), f"the config must be a JSON object, not {type(values).__name__}")
    return config_from_dict(values)


def check_names_of_any(settings: dict[str, Any]) -> None:
    """Refuse settings that no architecture has, with the nearest name that a ViT has."""
    unknown = {}
    for name, value in settings.items():
        for config_type in CONFIGS.values():
            try:
                check_names(config_type, {name: value})
                break
            except PatchlightError:
                continue
        else:
            unknown[name] = value
    check_names(ViTConfig, unknown)
