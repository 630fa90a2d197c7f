"""From an image to the model's input, exactly as timm or transformers would, and the `View` that leads back.

torch is imported where a tensor is made, and not before: processes that only read photos start sooner without.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from patchlight.config import Colour, PreprocessConfig, Size
from patchlight.errors import PatchlightError
from patchlight.geometry import Box, View, covering_size, fitting_size
from patchlight.images.decode import Decoded, Photo, decode

if TYPE_CHECKING:
    import torch

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

_MAX_RESIZED_PIXELS = 64_000_000
"""Above this a long strip is cropped in the same step as it is resized, for it would not fit into memory."""


class Preprocess:
    """Make images of one config's kind: `image_CHW, view = Preprocess(config)(photo)`."""

    def __init__(self, config: PreprocessConfig) -> None:
        self.config = config

    def __call__(self, photo: Photo) -> "tuple[torch.Tensor, View]":
        """A path, the bytes of a file, Pillow image, array HWC uint8 (RGB, 0..255) or what `decode` gave -> image_CHW
        float32 and its view.

        Files and Pillow images pass through `decode`, so that they are upright and RGB.
        """
        import torch

        level_HWC, view = self.levels(decode(photo))
        # numpy, since torch wakes all its threads for so few numbers
        image_CHW = np.array(level_HWC.transpose(2, 0, 1), np.float32, order="C")
        image_CHW /= np.float32(255)
        image_CHW -= np.array(self.config.mean, np.float32).reshape(3, 1, 1)
        image_CHW /= np.array(self.config.std, np.float32).reshape(3, 1, 1)
        return torch.from_numpy(image_CHW), view

    def batch(self, levels: Sequence[npt.NDArray[Any]], device: "torch.device") -> "torch.Tensor":
        """images_BCHW float32 on a device, of what `levels` gave, all of one size: the same numbers as `__call__`'s.

        Bytes are a quarter of what floats are to copy, so they become floats where they are needed.
        """
        import torch

        level_BHWC = torch.from_numpy(np.stack(levels))
        if device.type == "cuda":
            level_BHWC = level_BHWC.pin_memory().to(device, non_blocking=True)
        image_BCHW = level_BHWC.permute(0, 3, 1, 2).contiguous().float()
        # Tensors, for CUDA would multiply by the inverse of a plain number, which rounds in another way.
        white, mean_C11, std_C11 = (
            torch.tensor(values, device=device).reshape(-1, 1, 1)
            for values in ([255.0], self.config.mean, self.config.std)
        )
        return image_BCHW.div_(white).sub_(mean_C11).div_(std_C11)

    def levels(self, photo: Decoded) -> tuple[npt.NDArray[Any], View]:
        """HWC from 0 to 255, before it is normalised, and its view: uint8, or float32 with `resize_in="floats"`."""
        config = self.config
        resized_size = self._resized_size(photo.source_size)
        view = View.centred(
            photo.source_size,
            resized_size,
            config.image_size if config.crop != "none" else resized_size,
            half="floor" if config.crop == "floor" else "round",
            orientation=photo.orientation,
        )
        return self._resized_and_cropped(photo, resized_size, view), view

    def part(self, photo: Decoded, box: Box) -> npt.NDArray[Any]:
        """This box of the photo, in pixels of the source, resized to `image_size`: HWC as in `levels`."""
        # The decoded image may be smaller than the photo, and end in the middle of a pixel.
        image, region, (rows, columns) = photo.image, photo.region, photo.source_size
        part = box.scaled((region.height / rows, region.width / columns))
        part = Box(
            part.left + region.left, part.top + region.top, part.right + region.left, part.bottom + region.top
        ).clip((image.height, image.width))
        return self._resized(image, self.config.image_size, part)

    def _resized_size(self, source_size: Size) -> Size:
        match self.config.resize:
            case "shortest":
                return covering_size(source_size, self.config.scaled_size)
            case "border":
                return fitting_size(source_size, self.config.scaled_size)
            case "squash":
                return self.config.scaled_size
            case "none":
                return source_size

    def _resized_and_cropped(self, decoded: Decoded, resized_size: Size, view: View) -> npt.NDArray[Any]:
        """What the model sees, see `levels`."""
        top, left = round(-view.offset[0]), round(-view.offset[1])
        (height, width), (rows, columns) = view.model_size, resized_size
        # The part of the resized image that the model sees, and the part of the model's image that it fills.
        inside = Box(left, top, left + width, top + height).clip(resized_size)
        x0, y0, x1, y1 = inside.to_ints()
        image, region = decoded.image, decoded.region
        if rows * columns <= _MAX_RESIZED_PIXELS:
            level_HWC = self._resized(image, resized_size, region)[y0:y1, x0:x1]
        else:
            dx, dy = region.width / columns, region.height / rows
            part = Box(region.left + dx * x0, region.top + dy * y0, region.left + dx * x1, region.top + dy * y1)
            level_HWC = self._resized(image, (y1 - y0, x1 - x0), part.clip((image.height, image.width)))
        if level_HWC.shape[:2] == (height, width):
            return level_HWC
        canvas_HWC = np.empty((height, width, 3), level_HWC.dtype)
        canvas_HWC[:] = [round(255 * value) for value in self.config.mean] if self.config.resize == "border" else 0
        canvas_HWC[y0 - top : y1 - top, x0 - left : x1 - left] = level_HWC
        return canvas_HWC

    def _resized(self, image: Image.Image, size: Size, part: Box) -> npt.NDArray[Any]:
        """The part of the image at this (height, width)."""
        whole = Box(0, 0, image.width, image.height)
        if part == whole and size == (image.height, image.width):
            return np.asarray(image)
        box = None if part == whole else (part.left, part.top, part.right, part.bottom)
        resample = _FILTERS[self.config.interpolation]
        if self.config.resize_in == "bytes":
            return np.asarray(image.resize(size[::-1], resample, box))
        bands = [np.asarray(band.convert("F").resize(size[::-1], resample, box)) for band in image.split()]
        return np.stack(bands, axis=-1)


# Other people's settings


def from_timm(values: dict[str, Any]) -> PreprocessConfig:
    """What `timm.data.create_transform` does for a model's pretrained_cfg; keys that say nothing of it are ignored."""
    channels, height, width = _numbers(values, "input_size", 3, (3, 224, 224))
    _require(channels == 3, "input_size", values.get("input_size"), "only images of 3 channels are prepared")
    border_pixels = values.get("crop_border_pixels")
    _require(not border_pixels, "crop_border_pixels", border_pixels, "trimming the photo's border is not supported")
    mode = values.get("crop_mode") or "center"
    _require(mode in ("center", "squash", "border"), "crop_mode", mode, "it is 'center', 'squash' or 'border'")
    interpolation = values.get("interpolation") or "bicubic"
    _require(interpolation in _FILTERS, "interpolation", interpolation, f"it is one of {', '.join(_FILTERS)}")
    settings: dict[str, Any] = {
        "image_size": (height, width),
        "resize": "shortest" if mode == "center" else mode,
        "crop_pct": values.get("crop_pct") or 0.875,
        "interpolation": interpolation,
        "mean": _numbers(values, "mean", 3, (0.485, 0.456, 0.406)),
        "std": _numbers(values, "std", 3, (0.229, 0.224, 0.225)),
    }
    config = PreprocessConfig(**settings)
    if mode == "center" and config.scaled_size[0] != config.scaled_size[1]:
        # timm does not hand the interpolation on to its resize for sizes that are not square.
        return PreprocessConfig(**settings | {"interpolation": "bilinear"})
    return config


_HALF: Colour = (0.5, 0.5, 0.5)
_IMAGENET: tuple[Colour, Colour] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CLIP: tuple[Colour, Colour] = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def _processor(
    size: dict[str, int], resample: int, colours: tuple[Colour, Colour] = (_HALF, _HALF), crop: bool = False
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
    }


_PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": _processor({"height": 224, "width": 224}, 2),
    "DeiT": _processor({"height": 256, "width": 256}, 3, crop=True),
    "Bit": _processor({"shortest_edge": 224}, 3, _CLIP, crop=True),
    "CLIP": _processor({"shortest_edge": 224}, 3, _CLIP, crop=True),
    "Siglip": _processor({"height": 224, "width": 224}, 3),
    "DINOv3ViT": _processor({"height": 224, "width": 224}, 2, _IMAGENET),
    "ConvNext": _processor({"shortest_edge": 384}, 3) | {"crop_pct": 224 / 256},
}
"""What transformers' image processors do where their settings file is silent."""

_IGNORED = {"image_processor_type", "feature_extractor_type", "processor_class", "do_convert_rgb", "default_to_square"}
_IGNORED |= {"data_format", "input_data_format", "return_tensors", "_valid_processor_keys", "device", "auto_map"}
_IGNORED |= {"disable_grouping", "image_seq_length", "model_input_names", "size_divisor", "pad_size"}
"""Keys that do not change the pixels, since every photo is RGB here."""


def from_transformers(values: dict[str, Any]) -> PreprocessConfig:
    """What transformers' PIL image processor does for a preprocessor_config.json.

    Files from before `image_processor_type` are ViT's; a "Fast" processor is taken as the one that it stands for.
    """
    given = values.get("image_processor_type") or values.get("feature_extractor_type")
    if given is None:
        ambiguous = bool(values.get("do_center_crop")) or "shortest_edge" in str(values.get("size"))
        _require(not ambiguous, "image_processor_type", None, "ViTImageProcessor does not crop; say which it is")
        given = "ViTImageProcessor"
    kind = str(given).removesuffix("Fast").removesuffix("Pil")
    kind = kind.removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    _require(
        kind in _PROCESSORS,
        "image_processor_type",
        given,
        f"known: {', '.join(n + 'ImageProcessor' for n in _PROCESSORS)}",
    )
    settings = _PROCESSORS[kind] | {name: value for name, value in values.items() if value is not None}
    for name in sorted(set(settings) - set(_PROCESSORS[kind]) - _IGNORED):
        _require(settings[name] in (None, False), name, settings[name], "it is not known what it does to the pixels")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_center_crop"):
        _require(type(settings[name]) is bool, name, settings[name], "it is true or false")
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


def _sizes(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of `PreprocessConfig` that say sizes: image_size, resize, resize_size, crop."""
    crop_size = _size_of(settings, "crop_size", square=True) if settings["do_center_crop"] else None
    _require(crop_size is None or len(crop_size) == 2, "crop_size", settings["crop_size"], "it is a height and a width")
    if not settings["do_resize"]:
        _require(crop_size is not None, "do_resize", False, "without do_center_crop the images would have any size")
        return {"image_size": crop_size, "resize": "none", "crop": "floor"}
    size = _size_of(settings, "size", square=kind in ("ViT", "DeiT", "DINOv3ViT"))
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
    if crop_size is None:
        return {"image_size": target, "resize": resize, "crop": "none"}
    return {"image_size": crop_size, "resize": resize, "resize_size": target, "crop": "floor"}


def _size_of(settings: dict[str, Any], name: str, *, square: bool) -> tuple[int, ...]:
    """One number for the shortest edge, or two for (height, width). An int alone is a square, or the shortest edge."""
    value = settings[name]
    sizes: Any = None
    if type(value) is int:
        sizes = (value, value) if square else (value,)
    elif isinstance(value, list | tuple):
        sizes = tuple(value)
    elif isinstance(value, dict):
        keys = {key for key in value if value[key] is not None}
        if keys == {"height", "width"}:
            sizes = (value["height"], value["width"])
        elif keys == {"shortest_edge"}:
            sizes = (value["shortest_edge"],)
    fits = isinstance(sizes, tuple) and len(sizes) in (1, 2) and all(type(n) is int and n > 0 for n in sizes)
    _require(fits, name, value, 'it is a number, {"height", "width"} or {"shortest_edge"}')
    return tuple(sizes)


def _colours(settings: dict[str, Any]) -> dict[str, Any]:
    """Mean and std for channels from 0 to 1, with another rescaling taken into them."""
    if settings["do_normalize"]:
        mean, std = (_numbers(settings, name, 3, None) for name in ("image_mean", "image_std"))
    else:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    factor = settings["rescale_factor"] if settings["do_rescale"] else 1
    _require(type(factor) in (int, float) and factor > 0, "rescale_factor", factor, "it is a number above 0")
    whole = 255 * factor  # what white becomes, 1 as a rule
    if abs(whole - 1) > 1e-6:
        mean, std = (tuple(value / whole for value in colour) for colour in (mean, std))
    return {"mean": mean, "std": std}


def _numbers(values: dict[str, Any], name: str, count: int, default: Any) -> Any:
    value = values.get(name) or default
    if type(value) in (int, float):
        value = (value,) * count
    fits = isinstance(value, list | tuple) and len(value) == count and all(type(n) in (int, float) for n in value)
    _require(fits, name, value, f"it is {count} numbers")
    return tuple(value)


def _require(condition: bool, name: str, value: Any, remedy: str) -> None:
    if not condition:
        raise PatchlightError(f"cannot follow {name}={value!r} in the preprocessing settings: {remedy}")
