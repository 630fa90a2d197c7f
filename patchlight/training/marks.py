"""What is known of where the subjects of photos are: boxes of their objects, masks, or that there is nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

MASK_SIDE = 48
"""Cells a side of a mask as it is kept: three for each patch of a 16 x 16 grid."""

MOST_OBJECTS = 16
"""Of a photo: beside the main one the largest are kept."""

Corners = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Marks:
    """Of N photos; a photo of which nothing is known has no box, no mask, and is not said to show nothing."""

    # float32: x0, y0, x1, y1 in pixels of the whole upright photo, x1 and y1 exclusive; the main object's first, NaN
    # after the last one. M is at least 1.
    boxes_NM4: Tensor
    nothing_N: Tensor  # bool: known to show nothing
    mask_N: Tensor  # int64: which of the masks is the photo's, -1 where it has none
    masks_SGG: Tensor  # uint8, over the whole photo: what share of each cell the subject covers, 255 for all of it

    def __post_init__(self) -> None:
        count = len(self.boxes_NM4)
        assert self.boxes_NM4.shape[2:] == (4,)
        assert self.boxes_NM4.dtype == torch.float32
        assert self.nothing_N.shape == self.mask_N.shape == (count,)
        assert self.masks_SGG.shape[1:] == (MASK_SIDE, MASK_SIDE)
        assert self.masks_SGG.dtype == torch.uint8

    def __len__(self) -> int:
        return len(self.boxes_NM4)

    def select(self, chosen: Tensor) -> "Marks":
        """Those of these photos, in this order. The masks stay as they are, and are shared."""
        return Marks(
            boxes_NM4=self.boxes_NM4[chosen],
            nothing_N=self.nothing_N[chosen],
            mask_N=self.mask_N[chosen],
            masks_SGG=self.masks_SGG,
        )

    def digest_into(self, digest: Any) -> None:
        """Feed the marks into a hash."""
        digest.update(f"marks {tuple(self.boxes_NM4.shape)}".encode())
        digest.update(self.boxes_NM4.nan_to_num(-1.0).numpy().tobytes())  # NaN has more than one form
        digest.update(self.nothing_N.numpy().tobytes())
        masked_N = self.mask_N >= 0
        digest.update(masked_N.numpy().tobytes())
        for part_S in self.mask_N[masked_N].split(4096):  # by what they are, wherever they are kept
            digest.update(self.masks_SGG[part_S].numpy().tobytes())

    def on_canvases(self, scale_N: Tensor, extents_N2: Tensor) -> "Marks":
        """Those of photos made `scale` times as large, which are then (height, width); masks without a box give one."""
        boxes_NM4 = self.boxes_NM4 * scale_N[:, None, None]
        from_mask_N = (self.mask_N >= 0) & ~boxes_NM4[:, 0].isfinite().all(1)
        if from_mask_N.any():
            around_S4 = boxes_around(self.masks_SGG)
            box_R4 = around_S4[self.mask_N[from_mask_N]] * extents_N2[from_mask_N].flip(1).repeat(1, 2)
            boxes_NM4[from_mask_N, 0] = box_R4.float()
        return Marks(boxes_NM4=boxes_NM4, nothing_N=self.nothing_N, mask_N=self.mask_N, masks_SGG=self.masks_SGG)


def make_marks(
    boxes: Sequence[Sequence[Corners] | None], masks: Sequence[int], kept: Sequence[npt.NDArray[np.uint8]]
) -> Marks:
    """From each photo's boxes (None: not known, none: it shows nothing), and its mask's place among those kept."""
    most = max((len(of_photo) for of_photo in boxes if of_photo), default=1)
    boxes_NM4 = np.full((len(boxes), min(most, MOST_OBJECTS), 4), np.nan, np.float32)
    for index, of_photo in enumerate(boxes):
        if of_photo:
            boxes_NM4[index, : min(len(of_photo), MOST_OBJECTS)] = main_and_largest(of_photo)
    return Marks(
        boxes_NM4=torch.from_numpy(boxes_NM4),
        nothing_N=torch.tensor([of_photo is not None and not of_photo for of_photo in boxes], dtype=torch.bool),
        mask_N=torch.tensor(masks, dtype=torch.int64),
        masks_SGG=torch.from_numpy(np.stack(kept) if len(kept) else np.zeros((0, MASK_SIDE, MASK_SIDE), np.uint8)),
    )


def main_and_largest(boxes: Sequence[Corners]) -> list[Corners]:
    """The first box, and of the others the largest, in their order."""
    if len(boxes) <= MOST_OBJECTS:
        return list(boxes)
    by_size = sorted(range(1, len(boxes)), key=lambda i: -(boxes[i][2] - boxes[i][0]) * (boxes[i][3] - boxes[i][1]))
    return [boxes[i] for i in [0, *sorted(by_size[: MOST_OBJECTS - 1])]]


def small_mask(image: Image.Image) -> npt.NDArray[np.uint8]:
    """A mask of any size as `Marks` keeps it; levels from 128 on are the subject."""
    levels = image.convert("L").point([0] * 128 + [255] * 128)
    return np.asarray(levels.resize((MASK_SIDE, MASK_SIDE), Image.Resampling.BOX))


def boxes_around(masks_SGG: Tensor) -> Tensor:
    """The boxes of what masks cover, in shares of their sides, (S, 4): edges lie as far in a cell as it is covered."""
    side = masks_SGG.shape[1]

    def first(profile_SG: Tensor) -> Tensor:
        """Where the first cell that is covered at all begins to be."""
        place_S1 = (profile_SG > 0).int().argmax(1, keepdim=True)
        return (place_S1 + 1 - profile_SG.gather(1, place_S1) / 255)[:, 0] / side

    across_SG, down_SG = masks_SGG.amax(1), masks_SGG.amax(2)
    ends = 1 - first(across_SG.flip(1)), 1 - first(down_SG.flip(1))
    return torch.stack((first(across_SG), first(down_SG), *ends), 1)
