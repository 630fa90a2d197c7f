"""Where things lie: boxes in a photo's pixels, and the way between the photo, its file and the model's image.

All coordinates are continuous and measured at the edges of pixels: the first pixel covers 0 to 1, and a photo of width
W reaches from 0 to W. This is the only place with resize arithmetic.
"""

import math
import typing
from dataclasses import dataclass
from typing import Literal

Size = tuple[int, int]
"""(height, width), in pixels."""

Point = tuple[float, float]
"""(x, y)."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, xyxy: (left, top) is inside, (right, bottom) is where it ends."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return max(0.0, self.right - self.left)

    @property
    def height(self) -> float:
        return max(0.0, self.bottom - self.top)

    @property
    def area(self) -> float:
        return self.width * self.height

    def intersection(self, other: "Box") -> "Box":
        """The part that both cover; its area is 0 where there is none."""
        return Box(
            max(self.left, other.left),
            max(self.top, other.top),
            min(self.right, other.right),
            min(self.bottom, other.bottom),
        )

    def iou(self, other: "Box") -> float:
        """Intersection over union, 0 to 1; 0 for two empty boxes."""
        shared = self.intersection(other).area
        union = self.area + other.area - shared
        return min(1.0, shared / union) if union > 0 else 0.0

    def clip(self, size: Size) -> "Box":
        """The part inside an image of this (height, width)."""
        height, width = size
        return Box(
            min(max(self.left, 0.0), width),
            min(max(self.top, 0.0), height),
            min(max(self.right, 0.0), width),
            min(max(self.bottom, 0.0), height),
        )

    def scaled(self, scale: tuple[float, float]) -> "Box":
        """The box in an image that is (y, x) times as large."""
        y, x = scale
        return Box(self.left * x, self.top * y, self.right * x, self.bottom * y)

    def expanded(self, margin: float) -> "Box":
        """The box with a margin on every side, as a share of its own width and height: 0.5 doubles both."""
        dx, dy = self.width * margin, self.height * margin
        return Box(self.left - dx, self.top - dy, self.right + dx, self.bottom + dy)

    def to_ints(self) -> tuple[int, int, int, int]:
        """The smallest box of whole pixels that contains it: (left, top, right, bottom)."""
        # The way to a model's pixels and back leaves dust behind the comma, which should not cost a row of pixels.
        dust = 1e-6
        return (
            math.floor(self.left + dust),
            math.floor(self.top + dust),
            math.ceil(self.right - dust),
            math.ceil(self.bottom - dust),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What the model sees of a photo: model = source * scale + offset, where a pair is (y, x).

    The source is the upright photo, as a viewer shows it. Its file holds it as `orientation` (EXIF, 1 to 8) says.
    """

    source_size: Size
    model_size: Size
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)
    orientation: int = 1

    @classmethod
    def centred(
        cls,
        source_size: Size,
        resized_size: Size,
        model_size: Size,
        *,
        half: Literal["round", "floor"],
        orientation: int = 1,
    ) -> typing.Self:
        """The view of a photo that is resized, and then cropped or padded about its centre.

        `half` says what the half of an odd margin is, see `PreprocessConfig.crop`.
        """
        top, left = (crop_start(resized, model, half) for resized, model in zip(resized_size, model_size, strict=True))
        return cls(
            source_size=source_size,
            model_size=model_size,
            scale=(resized_size[0] / source_size[0], resized_size[1] / source_size[1]),
            offset=(float(-top), float(-left)),
            orientation=orientation,
        )

    @property
    def stored_size(self) -> Size:
        """(height, width) of the photo as its file holds it."""
        height, width = self.source_size
        return (width, height) if self.orientation >= 5 else (height, width)

    @property
    def seen(self) -> Box:
        """The part of the photo that the model sees."""
        height, width = self.model_size
        return self.to_source(Box(0, 0, width, height))

    def point_to_model(self, point: Point) -> Point:
        (x, y), (scale_y, scale_x), (offset_y, offset_x) = point, self.scale, self.offset
        return x * scale_x + offset_x, y * scale_y + offset_y

    def point_to_source(self, point: Point) -> Point:
        """The point in the photo, moved to its edge if it lies outside."""
        height, width = self.source_size
        x, y = self._unclipped(point)
        return min(max(x, 0.0), width), min(max(y, 0.0), height)

    def to_model(self, box: Box) -> Box:
        """The box in the model's pixels; it may reach outside the model's image."""
        return Box(*self.point_to_model((box.left, box.top)), *self.point_to_model((box.right, box.bottom)))

    def to_source(self, box: Box) -> Box:
        """The box in the photo's pixels, clipped to the photo."""
        return self.around_source(box).clip(self.source_size)

    def around_source(self, box: Box) -> Box:
        """The box in the photo's pixels, not clipped: what was padded around the photo lies outside it."""
        return Box(*self._unclipped((box.left, box.top)), *self._unclipped((box.right, box.bottom)))

    def point_to_stored(self, point: Point) -> Point:
        """A point of the upright photo in the pixels of the file, before its EXIF orientation is applied."""
        (x, y), (height, width) = point, self.source_size
        return {
            1: (x, y),
            2: (width - x, y),
            3: (width - x, height - y),
            4: (x, height - y),
            5: (y, x),
            6: (y, width - x),
            7: (height - y, width - x),
            8: (height - y, x),
        }[self.orientation]

    def to_stored(self, box: Box) -> Box:
        """A box of the upright photo in the pixels of the file, before its EXIF orientation is applied."""
        x0, y0 = self.point_to_stored((box.left, box.top))
        x1, y1 = self.point_to_stored((box.right, box.bottom))
        return Box(min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))

    def _unclipped(self, point: Point) -> Point:
        (x, y), (scale_y, scale_x), (offset_y, offset_x) = point, self.scale, self.offset
        return (x - offset_x) / scale_x, (y - offset_y) / scale_y


def upright(box: Box, stored_size: Size, orientation: int) -> Box:
    """A box of the file's pixels in the upright photo: the inverse of `View.to_stored`."""
    reverse = {6: 8, 8: 6}.get(orientation, orientation)  # the other turns undo themselves
    return View(source_size=stored_size, model_size=stored_size, orientation=reverse).to_stored(box)


def covering_size(source_size: Size, target_size: Size) -> Size:
    """The size with the source's aspect that just covers the target, as torchvision and timm compute it."""
    (height, width), (target_height, target_width) = source_size, target_size
    if target_height == target_width:  # torchvision's Resize(int), which rounds the long side down
        if width <= height:
            return int(target_width * height / width), target_width
        return target_height, int(target_height * width / height)
    return _by_ratio(source_size, min(height / target_height, width / target_width))


def fitting_size(source_size: Size, target_size: Size) -> Size:
    """The size with the source's aspect that just fits into the target, as timm computes it."""
    (height, width), (target_height, target_width) = source_size, target_size
    return _by_ratio(source_size, max(height / target_height, width / target_width))


def fit_inside(size: tuple[float, float], longest: int) -> Size:
    """Shrink a size, keeping its aspect, until its longer side is at most `longest`; both sides stay at least 1."""
    scale = min(1.0, longest / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def crop_start(resized: int, model: int, half: Literal["round", "floor"]) -> int:
    """Where a centred crop of `model` pixels begins; negative where there is something to pad."""
    if half == "floor":
        return (resized - model) // 2
    # torchvision pads in whole numbers and crops with Python's rounding, which goes to the even number.
    return round((resized - model) / 2) if resized >= model else -((model - resized) // 2)


def _by_ratio(source_size: Size, ratio: float) -> Size:
    height, width = source_size
    return max(1, round(height / ratio)), max(1, round(width / ratio))  # timm gives up on a side of 0
