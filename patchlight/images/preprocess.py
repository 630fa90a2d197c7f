"""From an image to the model's input, exactly as timm or transformers would, and the `View` that leads back.

torch is imported where a tensor is made, and not before: processes that only read photos start sooner without.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from patchlight.config import PreprocessConfig, Size
from patchlight.errors import PatchlightError
from patchlight.geometry import Box, View, covering_size, fitting_size
from patchlight.images.decode import Decoded, Photo, decode

if TYPE_CHECKING:
    import torch

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

_MAX_RESIZED_PIXELS = 64_000_000
"""Above this a long strip is cropped in the same step as it is resized, for it would not fit into memory."""


PHOTO_CHANNELS = 3
"""Red, green and blue."""


def counted_channels(channels: int) -> str:
    return f"{channels} channel{'s' * (channels != 1)}"


class Preprocess:
    """Make images of one config's kind: `image_CHW, view = Preprocess(config)(photo)`."""

    def __init__(self, config: PreprocessConfig, channels: int = PHOTO_CHANNELS) -> None:
        """`channels`: how many the model takes; photos cannot be prepared for a model that takes others than theirs."""
        self.config = config
        self.channels = channels

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

    @property
    def transform(self) -> "Transform":
        """For `torchvision.transforms.Compose`, a Dataset and its DataLoader: a photo in, image_CHW out."""
        return Transform(self)

    def check_channels(self) -> None:
        """Refuse to make images for a model that takes other channels than photos have."""
        if self.channels != PHOTO_CHANNELS:
            raise PatchlightError(
                f"the model takes images of {counted_channels(self.channels)}, and a photo has {PHOTO_CHANNELS} (red, "
                "green, blue); make its images yourself, and give them to `loaded.model`"
            )

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
        self.check_channels()
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
        """The image that the model sees, resized and cropped; see `levels`."""
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
        resample = FILTERS[self.config.interpolation]
        if self.config.resize_in == "bytes":
            return np.asarray(image.resize(size[::-1], resample, box))
        bands = [np.asarray(band.convert("F").resize(size[::-1], resample, box)) for band in image.split()]
        return np.stack(bands, axis=-1)


class Transform:
    """A photo, see `Photo`, to image_CHW float32 alone. It can be sent to other processes."""

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess

    def __call__(self, photo: Photo) -> "torch.Tensor":
        return self.preprocess(photo)[0]

    def __repr__(self) -> str:
        return f"Transform({self.preprocess.config})"
