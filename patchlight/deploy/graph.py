"""What is exported: a model with the outputs that were asked for, and the preparation of photos where it is wanted.

Shapes: H W pixels, h w patch grid, B batch, A heads, D width, K classes, Y X sides of the prepared image.
"""

import functools
import math
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from patchlight.config import PreprocessConfig
from patchlight.errors import PatchlightError
from patchlight.localizing.heat import HeatPass
from patchlight.models.vit import ViT
from patchlight.weights.load import Loaded

Output = Literal["logits", "features", "dense", "attention", "subject", "boxes"]

MEANINGS: dict[Output, str] = {
    "logits": "(B, K): one number a class, before the softmax",
    "features": "(B, D): one vector an image",
    "dense": "(B, D, h, w): one vector a patch",
    "attention": "(B, A, h, w): what each head of the last block's class token pays to each patch",
    "subject": "(B, h, w): how much each patch belongs to the subject, 0 to 1",
    "boxes": "(B, h, w, 5): the box of the object that each patch belongs to, left, top, right and bottom in shares of "
    "the image's sides, and how well that box is expected to fit (overlap with the true one, 0 to 1)",
}


def check_outputs(loaded: Loaded, outputs: tuple[str, ...]) -> tuple[Output, ...]:
    """The outputs that a model can give; none means logits, or features of a model without classes.

    With `subject` come the boxes that its patches say, where it was taught them: the subject's box rests on both.
    """
    model = loaded.model
    if not outputs:
        return ("logits",) if model.head is not None else ("features",)
    for name in outputs:
        if name not in get_args(Output):
            raise PatchlightError(f"outputs={name!r} is not known; the outputs are {', '.join(get_args(Output))}")
    if len(set(outputs)) < len(outputs):
        raise PatchlightError(f"outputs={','.join(outputs)!r} names one twice")
    source = loaded.provenance.source
    if "logits" in outputs and model.head is None:
        raise PatchlightError(f"{source}: has no head, so there are no logits; take features")
    if "attention" in outputs and not (isinstance(model, ViT) and model.config.class_token):
        raise PatchlightError(f"{source}: has no class token, so it pays no such attention; leave attention out")
    if "subject" in outputs and (loaded.subject is None or not isinstance(model, ViT)):
        raise PatchlightError(f"{source}: was not trained to find subjects; leave subject out")
    has_boxes = isinstance(model, ViT) and model.patch_boxes is not None
    if "boxes" in outputs and not ("subject" in outputs and has_boxes):
        raise PatchlightError(f"{source}: gives boxes beside subject, if it was taught them; leave boxes out")
    if "subject" in outputs and has_boxes and "boxes" not in outputs:
        outputs = (*outputs, "boxes")
    return outputs  # type: ignore[return-value]


class Graph(nn.Module):
    """image_BCHW, as `loaded.preprocess` gives it, or with `prepare` one photo_HWC uint8 -> the outputs, in order."""

    def __init__(self, loaded: Loaded, outputs: tuple[Output, ...], *, prepare: bool = False) -> None:
        super().__init__()
        self.loaded, self.model, self.outputs = loaded, loaded.model, outputs
        self.prepare = Preparation(loaded.preprocess.config) if prepare else None

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return self.of_images(image if self.prepare is None else self.prepare(image))

    def of_images(self, image_BCHW: Tensor) -> tuple[Tensor, ...]:
        """The outputs of images that are prepared."""
        found = self._of_vit(image_BCHW) if isinstance(self.model, ViT) else self._of_stages(image_BCHW)
        return tuple(found[name].float() for name in self.outputs)

    def _of_vit(self, image_BCHW: Tensor) -> dict[Output, Tensor]:
        model = self.model
        assert isinstance(model, ViT)
        # The pass that subjects are found with; of the last block it computes no more than is read.
        whole = "dense" in self.outputs
        seen = HeatPass(self.loaded, image_BCHW, ["cls"], (lambda *_: None) if whole else None)
        geometry = seen.geometry
        found: dict[Output, Tensor] = {}
        if "logits" in self.outputs:
            found["logits"] = seen.logits()
        if "features" in self.outputs:
            found["features"] = seen.features()
        if "dense" in self.outputs:
            assert seen.tokens_BND is not None
            found["dense"] = geometry.picture_BDhw(seen.tokens_BND)
        if "attention" in self.outputs:
            assert seen.last is not None
            rows_BAP = seen.last.rows([0])[:, :, 0, geometry.num_prefix :]
            found["attention"] = rows_BAP.unflatten(2, geometry.grid)
        if "subject" in self.outputs:
            found["subject"] = seen.heat("subject")
        if "boxes" in self.outputs:
            boxes_Bhw5 = seen.patch_boxes("subject")
            assert boxes_Bhw5 is not None
            found["boxes"] = boxes_Bhw5
        return found

    def _of_stages(self, image_BCHW: Tensor) -> dict[Output, Tensor]:
        model = self.model
        assert not isinstance(model, ViT)
        x_BhwD = model.encode(image_BCHW)
        features_BD = model.pooled(x_BhwD)
        found: dict[Output, Tensor] = {"features": features_BD, "dense": x_BhwD.permute(0, 3, 1, 2)}
        if "logits" in self.outputs:
            assert model.head is not None
            found["logits"] = model.head(features_BD)
        return found


SUPPORTS = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
"""How far each of Pillow's filters reaches, in samples."""

FIXED_POINT = 2.0**22
"""Pillow's weights are whole multiples of one part in so many."""


class Preparation(nn.Module):
    """photo_HWC uint8 of any size -> image_BCHW with one image, by the very numbers of `loaded.preprocess`.

    Pillow resizes with whole numbers, along the rows and down the columns, and rounds to grey levels in between. In
    float64, which holds them exactly, two matrix products do the same. That is much work for large photos, of which
    Pillow skips the zeros.
    """

    def __init__(self, config: PreprocessConfig) -> None:
        super().__init__()
        odd = {"resize": config.resize, "interpolation": config.interpolation, "crop": config.crop}
        for name, value in odd.items():
            if value in ("border", "none", "nearest"):
                raise PatchlightError(
                    f"the model's preparation has {name}={value!r}, which is not exported; leave the preparation out, "
                    "and prepare photos as preprocess.json says"
                )
        self.config = config
        self.minds_the_order = config.resize_in == "bytes" and _goes_down_first()
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor(config.mean).reshape(1, -1, 1, 1))
        self.std: Tensor
        self.register_buffer("std", torch.tensor(config.std).reshape(1, -1, 1, 1))

    def forward(self, photo_HWC: Tensor) -> Tensor:
        config = self.config
        height, width = (torch.full((), side, dtype=torch.float64) for side in photo_HWC.shape[:2])
        rows, columns = self._resized(height, width)
        down_YH = self._weights(photo_HWC.shape[0], height, rows, config.image_size[0])
        across_XW = self._weights(photo_HWC.shape[1], width, columns, config.image_size[1])
        levels_CHW = photo_HWC.permute(2, 0, 1).double()
        levels_CYX = self._rounded(down_YH @ self._rounded(levels_CHW @ across_XW.T))
        if self.minds_the_order:
            down_first = (rows < height) & (height - rows > 2 * (width - columns))
            other_CYX = self._rounded(self._rounded(down_YH @ levels_CHW) @ across_XW.T)
            levels_CYX = torch.where(down_first, other_CYX, levels_CYX)
        image_BCHW = levels_CYX.float()[None] / torch.tensor(255.0)
        return (image_BCHW - self.mean) / self.std

    def _resized(self, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        """The size before the crop, as `geometry.covering_size` says."""
        down, across = self.config.scaled_size
        if self.config.resize == "squash":
            return torch.full_like(height, down), torch.full_like(width, across)
        if down == across:
            shortest = torch.minimum(height, width)
            return (down * height / shortest).floor(), (across * width / shortest).floor()
        ratio = torch.minimum(height / down, width / across)
        return (height / ratio).round().clamp(min=1), (width / ratio).round().clamp(min=1)

    def _weights(self, samples: int, length: Tensor, resized: Tensor, kept: int) -> Tensor:
        """How much each of the photo's samples counts for each that is kept: (kept, samples), a multiple of 2^-22."""
        margin = resized - kept
        start = (margin / 2).floor() if self.config.crop == "floor" else (margin / 2).round()
        if self.config.crop == "round":  # what is smaller than the crop is padded, by whole pixels
            start = torch.where(margin < 0, -((-margin) / 2).floor(), start)
        place_Y = torch.arange(kept, dtype=torch.float64) + start
        scale = length / resized
        widened = scale.clamp(min=1.0)
        centre_Y1 = ((place_Y + 0.5) * scale)[:, None]
        sample_S = torch.arange(samples, dtype=torch.float64)
        support = SUPPORTS[self.config.interpolation] * widened
        inside_YS = (sample_S >= (centre_Y1 - support + 0.5).floor()) & (sample_S < (centre_Y1 + support + 0.5).floor())
        weights_YS = self._filter(((sample_S + 0.5 - centre_Y1) / widened).abs()).where(inside_YS, 0.0)
        weights_YS = weights_YS / weights_YS.sum(1, keepdim=True)
        if self.config.resize_in == "bytes":
            whole_YS = weights_YS * FIXED_POINT
            weights_YS = whole_YS.sign() * (whole_YS.abs() + 0.5).floor() / FIXED_POINT
        beyond_Y1 = ((place_Y < 0) | (place_Y >= resized))[:, None]  # padding is black
        return weights_YS.where(~beyond_Y1, 0.0)

    def _filter(self, distance: Tensor) -> Tensor:
        if self.config.interpolation == "bilinear":
            return (1 - distance).clamp(min=0)
        if self.config.interpolation == "lanczos":
            return torch.where(distance < 3, _sinc(distance) * _sinc(distance / 3), 0.0)
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))

    def _rounded(self, levels: Tensor) -> Tensor:
        return (levels + 0.5).floor().clamp(0, 255) if self.config.resize_in == "bytes" else levels


@functools.cache
def _goes_down_first() -> bool:
    """Whether this Pillow resizes down the columns first where those lose more than twice as many pixels as the rows
    do, as Pillow 13 does: by how it rounds."""
    high = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 30), dtype=np.uint8))
    bicubic = Image.Resampling.BICUBIC
    both, down_first = high.resize((20, 30), bicubic), high.resize((30, 30), bicubic).resize((20, 30), bicubic)
    return np.array_equal(np.asarray(both), np.asarray(down_first))


def _sinc(x: Tensor) -> Tensor:
    angle = x * math.pi
    return torch.where(x == 0, 1.0, angle.sin() / torch.where(x == 0, 1.0, angle))
