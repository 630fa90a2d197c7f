"""Closer looks: a found box once more with more pixels, and large photos in overlapping tiles."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from patchlight.config import PreprocessConfig, Size
from patchlight.geometry import Box, View
from patchlight.images.decode import Decoded
from patchlight.images.preprocess import Preprocess

MARGIN = 0.25
"""Around a found box, as a share of its sides, for the second look: room for what the first one cut off."""

OVERLAP = 0.25
"""Of neighbouring tiles, as a share of a tile: a subject on a border lies whole, or nearly so, in one of them."""

BORDER = 0.03
"""Of a tile's side: what ends so near to its border goes on in the next tile."""

Tiles = tuple[int, int]
"""(down, across)."""


def look_at(photo: Decoded, box: Box, preprocess: Preprocess) -> tuple[Tensor, View]:
    """A part of a photo, in its source pixels, as the model's whole image: image_CHW, and the view of the photo."""
    whole = _whole_frame(preprocess.config)
    image_CHW, _ = whole(whole.part(photo, box))  # of the model's size already, so that it is only normalised
    height, width = whole.config.image_size
    scale = (height / box.height, width / box.width)
    return image_CHW, View(
        source_size=photo.source_size,
        model_size=(height, width),
        scale=scale,
        offset=(-box.top * scale[0], -box.left * scale[1]),
        orientation=photo.orientation,
    )


def around(box: Box, source_size: Size) -> Box:
    """The part of the photo that a second look at this box sees: with a margin, and a pixel wide at least."""
    wide = box.expanded(MARGIN).clip(source_size)
    left, top = min(wide.left, source_size[1] - 1.0), min(wide.top, source_size[0] - 1.0)
    return Box(left, top, max(wide.right, left + 1), max(wide.bottom, top + 1))


def cut_off(box: Box, part: Box, source_size: Size) -> bool:
    """Whether a box that was found in a part of the photo ends at the part's border, where the photo goes on."""
    height, width = source_size
    room_x, room_y = BORDER * part.width, BORDER * part.height
    return (
        (part.left > 0.5 and box.left < part.left + room_x)
        or (part.top > 0.5 and box.top < part.top + room_y)
        or (part.right < width - 0.5 and box.right > part.right - room_x)
        or (part.bottom < height - 0.5 and box.bottom > part.bottom - room_y)
    )


class Mosaic:
    """The tiles of a photo, and how their heat maps make one.

    Tiles overlap by whole patches, so that the patches of all of them lie on one grid.
    """

    def __init__(self, tiles: Tiles | int, grid: Size, source_size: Size) -> None:
        """`tiles` is (down, across), or a number for the photo's shorter side: then a tile has the shape of the model's
        image, whatever the photo's, and there are as many along the longer side as it takes."""
        self.grid = grid
        shared = [min(round(OVERLAP * count), count - 1) for count in grid]
        self.stride = (grid[0] - shared[0], grid[1] - shared[1])
        """Patches from one tile's first to the next one's."""
        self.tiles = (tiles, tiles) if isinstance(tiles, int) else tiles
        if isinstance(tiles, int):
            # The axis along which so many tiles show the less of the photo is the longer one.
            reach = [step * (tiles - 1) + side for step, side in zip(self.stride, grid, strict=True)]
            pixels = [side / count for side, count in zip(source_size, reach, strict=True)]
            longer = int(pixels[1] > pixels[0])
            wanted = source_size[longer] / pixels[1 - longer]  # in patches as large as on the other axis
            count = 1 + math.ceil(max(0.0, wanted - grid[longer] - 0.5) / self.stride[longer])
            stride = round((wanted - grid[longer]) / (count - 1)) if count > 1 else self.stride[longer]
            self.tiles = (count, tiles) if longer == 0 else (tiles, count)
            self.stride = (stride, self.stride[1]) if longer == 0 else (self.stride[0], stride)
        self.size = tuple(
            step * (count - 1) + side for step, count, side in zip(self.stride, self.tiles, grid, strict=True)
        )
        """Patches of the whole, (down, across)."""

    def corners(self) -> list[Size]:
        """(row, column) of each tile's first patch, row by row."""
        down, across = self.tiles
        return [(row * self.stride[0], column * self.stride[1]) for row in range(down) for column in range(across)]

    def boxes(self, source_size: Size) -> list[Box]:
        """What each tile sees of the photo, in its pixels."""
        down, across = source_size[0] / self.size[0], source_size[1] / self.size[1]
        height, width = self.grid
        return [
            Box(column * across, row * down, (column + width) * across, (row + height) * down)
            for row, column in self.corners()
        ]

    def view(self, photo: Decoded, patch_size: tuple[float, float]) -> View:
        """Of the photo in the joined map, as if the model had so many patches of this (height, width)."""
        (rows, columns), (height, width), (down, across) = self.size, photo.source_size, patch_size
        return View(
            source_size=photo.source_size,
            model_size=(round(rows * down), round(columns * across)),
            scale=(rows * down / height, columns * across / width),
            orientation=photo.orientation,
        )

    def covered(self, boxes: Sequence[Box], source_size: Size) -> Tensor:
        """The patches of the joined map whose middle lies in one of the boxes (pixels of the photo), bool."""
        (rows, columns), (height, width) = self.size, source_size
        y_h1 = ((torch.arange(rows) + 0.5) * height / rows)[:, None]
        x_1w = ((torch.arange(columns) + 0.5) * width / columns)[None]
        mask_hw = torch.zeros(rows, columns, dtype=torch.bool)
        for box in boxes:
            mask_hw |= (y_h1 >= box.top) & (y_h1 < box.bottom) & (x_1w >= box.left) & (x_1w < box.right)
        return mask_hw

    def joined(self, heat_Thw: Tensor, whole_hw: Tensor) -> Tensor:
        """One map of the photo from the tiles' and that of the whole photo, (down, across) patches of `size`.

        Where tiles overlap, one counts the more the farther a patch lies from its border: there it sees what is around.
        A tile alone finds something in every corner of a lawn, and the whole photo alone does not see small things; so
        heat is the mean of the two.
        """
        sums_hw, weights_hw = torch.zeros(2, *self.size)
        weight_hw = torch.minimum(*(_to_border(side)[shape] for side, shape in zip(self.grid, _AXES, strict=True)))
        for (row, column), heat_hw in zip(self.corners(), heat_Thw, strict=True):
            place = slice(row, row + self.grid[0]), slice(column, column + self.grid[1])
            sums_hw[place] += weight_hw * heat_hw
            weights_hw[place] += weight_hw
        spread_hw = torch.nn.functional.interpolate(whole_hw[None, None], size=self.size, mode="bilinear")[0, 0]
        return (sums_hw / weights_hw + spread_hw) / 2


_AXES = ((slice(None), None), (None, slice(None)))


def _to_border(count: int) -> Tensor:
    """How far each of `count` patches in a row lies from the nearer end, its own half included."""
    place = torch.arange(count) + 0.5
    return torch.minimum(place, count - place)


def _whole_frame(config: PreprocessConfig) -> Preprocess:
    """As the config says, but for the frame: all of what is given, squashed to the model's size."""
    return Preprocess(
        dataclasses.replace(config, resize="squash", crop="none", crop_pct=1.0, resize_size=None, resize_in="bytes")
    )
