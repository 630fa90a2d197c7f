"""How timm and transformers prepare photos, by their config files, in our settings.

Every key of theirs is in one table: followed, refused, or known to change nothing. What is in none of them `unknown`
names, for the notes of `load`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from patchlight.config import Colour, PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.images.preprocess import FILTERS


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


# timm's pretrained_cfg

TIMM_FOLLOWED = _keys("input_size interpolation crop_pct crop_mode mean std")
TIMM_REFUSED = _keys("crop_border_pixels")
TIMM_HARMLESS = _keys(
    "url file state_dict hf_hub_id hf_hub_filename source architecture tag custom_load num_classes label_offset "
    "label_names label_descriptions pool_size test_pool_size first_conv classifier license description origin_url "
    "paper_name paper_ids notes fixed_input_size min_input_size test_input_size test_crop_pct"
)
"""Where the weights came from and what the head is; the sizes that are tested with only where one asks timm to."""


def from_timm(values: Mapping[str, Any]) -> PreprocessConfig:
    """What `timm.data.create_transform` does for a model's pretrained_cfg."""
    values = {name: value for name, value in values.items() if value}  # 0 and nothing are not said, there
    _, height, width = _numbers(values, "input_size", 3, (3, 224, 224))
    for name in sorted(TIMM_REFUSED & set(values)):
        _require(False, name, values[name], "trimming the photo's border is not supported")
    mode = values.get("crop_mode", "center")
    _require(mode in ("center", "squash", "border"), "crop_mode", mode, "it is 'center', 'squash' or 'border'")
    interpolation = values.get("interpolation", "bicubic")
    _require(
        isinstance(interpolation, str) and interpolation in FILTERS,
        "interpolation",
        interpolation,
        f"it is one of {', '.join(FILTERS)}",
    )
    settings: dict[str, Any] = {
        "image_size": (height, width),
        "resize": "shortest" if mode == "center" else mode,
        "crop_pct": values.get("crop_pct", 0.875),
        "interpolation": interpolation,
        "mean": _numbers(values, "mean", 3, (0.485, 0.456, 0.406)),
        "std": _numbers(values, "std", 3, (0.229, 0.224, 0.225)),
    }
    config = PreprocessConfig(**settings)
    if mode == "center" and config.scaled_size[0] != config.scaled_size[1]:
        # timm does not hand the interpolation on to its resize for sizes that are not square.
        return PreprocessConfig(**settings | {"interpolation": "bilinear"})
    return config


# transformers' preprocessor_config.json

_HALF: Colour = (0.5, 0.5, 0.5)
_IMAGENET: tuple[Colour, Colour] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CLIP: tuple[Colour, Colour] = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def _processor(
    size: dict[str, int],
    resample: int,
    colours: tuple[Colour, Colour] = (_HALF, _HALF),
    *,
    crop: bool = False,
    to_square: bool = True,
) -> dict[str, Any]:
    return {
        "size": size,
        "resample": resample,
        "image_mean": colours[0],
        "image_std": colours[1],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_center_crop": crop,
        "crop_size": 224 if crop else None,
        "rescale_factor": 1 / 255,
        "default_to_square": to_square,  # whether one number for a size is a square's, or the shortest edge's
    }


PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": _processor({"height": 224, "width": 224}, 2),
    "DeiT": _processor({"height": 256, "width": 256}, 3, crop=True),
    "Beit": _processor({"height": 224, "width": 224}, 3) | {"crop_size": 224},
    "Bit": _processor({"shortest_edge": 224}, 3, _CLIP, crop=True, to_square=False),
    "CLIP": _processor({"shortest_edge": 224}, 3, _CLIP, crop=True, to_square=False),
    "ChineseCLIP": _processor({"shortest_edge": 224}, 3, _CLIP, crop=True, to_square=False),
    "Siglip": _processor({"height": 224, "width": 224}, 3, to_square=False),
    "DINOv3ViT": _processor({"height": 224, "width": 224}, 2, _IMAGENET),
    "ConvNext": _processor({"shortest_edge": 384}, 3, to_square=False) | {"crop_pct": 224 / 256},
}
"""What transformers' image processors do where their settings file is silent; the keys that are followed."""

TRANSFORMERS_REFUSED = _keys("do_pad use_square_size")
TRANSFORMERS_HARMLESS = _keys(
    "processor_class do_convert_rgb data_format input_data_format return_tensors device disable_grouping "
    "image_seq_length pad_size do_reduce_labels reduce_labels model_input_names _valid_processor_keys"
)
"""Every photo is RGB here, and becomes a tensor of three channels; what is padded to, and labels, matter elsewhere."""


_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_center_crop")


def from_transformers(values: Mapping[str, Any]) -> PreprocessConfig:
    """What transformers' PIL image processor does for a preprocessor_config.json.

    Files from before `image_processor_type` are ViT's; a "Fast" processor is taken as the one that it stands for.
    """
    kind = _kind(values)
    # Where a step is null it is not done, and any other null stands for the default.
    said = {name: False if value is None and name in _STEPS else value for name, value in values.items()}
    settings = PROCESSORS[kind] | {name: value for name, value in said.items() if value is not None}
    for name in sorted(TRANSFORMERS_REFUSED & set(settings)):
        _require(not settings[name], name, settings[name], "padding and other squares are not supported")
    for name in (*_STEPS, "default_to_square"):
        _require(type(settings[name]) is bool, name, settings[name], "it is true or false")
    if kind == "DINOv3ViT":  # whose torch rounds, and pads what is smaller than the crop, in other ways than Pillow
        for name in ("do_resize", "do_rescale"):
            _require(settings[name], name, False, "it is true with DINOv3ViTImageProcessor")
    interpolations: dict[Any, Any] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
    resample = settings["resample"]
    _require(
        isinstance(resample, int) and type(resample) is not bool and resample in interpolations,
        "resample",
        resample,
        f"it is one of {', '.join(f'{number} ({name})' for number, name in interpolations.items())}",
    )
    return PreprocessConfig(
        **_sizes(kind, settings),
        **_colours(settings),
        interpolation=interpolations[resample],
        resize_in="floats" if kind == "DINOv3ViT" else "bytes",
    )


def _kind(values: Mapping[str, Any]) -> str:
    """Which of `PROCESSORS` the file is for."""
    given = values.get("image_processor_type") or values.get("feature_extractor_type")
    if given is None:
        ambiguous = bool(values.get("do_center_crop")) or "shortest_edge" in str(values.get("size"))
        _require(not ambiguous, "image_processor_type", None, "ViTImageProcessor does not crop; say which it is")
        return "ViT"
    kind = str(given).removesuffix("Fast").removesuffix("Pil")
    kind = kind.removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    known = ", ".join(f"{name}ImageProcessor" for name in PROCESSORS)
    _require(kind in PROCESSORS, "image_processor_type", given, f"known: {known}")
    return kind


def _sizes(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `PreprocessConfig` that say sizes: image_size, resize, resize_size, crop."""
    crop_size = _size_of(settings, "crop_size", square=True) if settings["do_center_crop"] else None
    _require(crop_size is None or len(crop_size) == 2, "crop_size", settings["crop_size"], "it is a height and a width")
    if not settings["do_resize"]:
        _require(crop_size is not None, "do_resize", False, "without do_center_crop the images would have any size")
        return {"image_size": crop_size, "resize": "none", "crop": "floor"}
    size = _size_of(settings, "size", square=settings["default_to_square"])
    if kind == "ConvNext":
        _require(
            len(size) == 1 and crop_size is None, "size", settings["size"], "ConvNeXt has a shortest_edge, and no crop"
        )
        (edge,), crop_pct = size, settings["crop_pct"]
        _require(type(crop_pct) in (int, float) and crop_pct > 0, "crop_pct", crop_pct, "it is a number above 0")
        if edge >= 384:
            return {"image_size": (edge, edge), "resize": "squash", "crop": "none"}
        before = int(edge / crop_pct)
        return {"image_size": (edge, edge), "resize": "shortest", "resize_size": (before, before), "crop": "floor"}
    resize = "shortest" if len(size) == 1 else "squash"
    target = size * 2 if len(size) == 1 else size
    fits = crop_size is None or (crop_size[0] <= target[0] and crop_size[1] <= target[1])
    _require(fits or kind != "DINOv3ViT", "crop_size", settings["crop_size"], "it is larger than size")
    if crop_size is None:
        return {"image_size": target, "resize": resize, "crop": "none"}
    return {"image_size": crop_size, "resize": resize, "resize_size": target, "crop": "floor"}


def _size_of(settings: Mapping[str, Any], name: str, *, square: bool) -> tuple[int, ...]:
    """One number for the shortest edge, or two for (height, width). An int alone is a square, or the shortest edge."""
    value = settings[name]
    sizes: Any = None
    if type(value) is int:
        sizes = (value, value) if square else (value,)
    elif isinstance(value, list | tuple) and len(value) == 2:
        sizes = tuple(value)
    elif isinstance(value, dict):
        keys = {key for key in value if value[key] is not None}
        if keys == {"height", "width"}:
            sizes = (value["height"], value["width"])
        elif keys == {"shortest_edge"}:
            sizes = (value["shortest_edge"],)
    fits = sizes is not None and all(type(n) is int and n > 0 for n in sizes)
    _require(fits, name, value, 'it is a number, two, {"height", "width"} or {"shortest_edge"}')
    return tuple(sizes)


def _colours(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and std for channels from 0 to 1; another rescale_factor is folded into them."""
    if settings["do_normalize"]:
        mean, std = (_numbers(settings, name, 3) for name in ("image_mean", "image_std"))
        _require(min(std) > 0, "image_std", settings["image_std"], "it is more than 0")
    else:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    factor = settings["rescale_factor"] if settings["do_rescale"] else 1
    _require(type(factor) in (int, float) and factor > 0, "rescale_factor", factor, "it is a number above 0")
    whole = 255 * factor  # what white becomes, 1 as a rule
    if abs(whole - 1) > 1e-6:
        mean, std = (tuple(value / whole for value in colour) for colour in (mean, std))
    return {"mean": mean, "std": std}


def _numbers(values: Mapping[str, Any], name: str, count: int, default: Any = None) -> Any:
    value = values.get(name, default)
    if type(value) in (int, float):
        value = (value,) * count
    fits = isinstance(value, list | tuple) and len(value) == count and all(type(n) in (int, float) for n in value)
    _require(fits, name, value, f"it is {count} numbers")
    return tuple(value)


def _require(condition: bool, name: str, value: Any, remedy: str) -> None:
    if not condition:
        raise PatchlightError(
            f"cannot follow {name}={value!r} in the preprocessing settings: {remedy}; preprocess= of load replaces them"
        )


def unknown_to_timm(values: Mapping[str, Any]) -> list[str]:
    return _unknown(values, TIMM_FOLLOWED | TIMM_REFUSED | TIMM_HARMLESS)


def unknown_to_transformers(values: Mapping[str, Any]) -> list[str]:
    known = {"image_processor_type", "feature_extractor_type", *PROCESSORS[_kind(values)]}
    return _unknown(values, known | TRANSFORMERS_REFUSED | TRANSFORMERS_HARMLESS)


def _unknown(values: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The keys that are set and in no table."""
    return [name for name, value in values.items() if name not in known and value is not None]
