"""How far one output of a model really looks: the effective receptive field, by gradients (Luo et al. 2016,
arXiv:1701.04128).

A convolutional network could look no further than its kernels reach, and looks at much less; a ViT could look
everywhere from its first block on. What either does with that is to be measured, and differs before and after training.
"""

from typing import Any

import torch
from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.explain.attention import unwrapped
from patchlight.models.convnext import ConvNeXt
from patchlight.models.stems import check_image
from patchlight.models.swin import Swin
from patchlight.models.vit import ViT


def receptive_field(model: Any, image_BCHW: Tensor, block: int = -1, patch: tuple[int, int] | None = None) -> Tensor:
    """How much each pixel of the images moves one patch's features after a block: (H, W), which sum to one.

    The size of the gradient of the patch's features, summed, averaged over colours and images. `model` is a ViT, a Swin
    or a ConvNeXt, `patch` its (row, column) after that block, the middle one if None.
    """
    model = unwrapped(model)
    if not isinstance(model, ViT | Swin | ConvNeXt):
        raise PatchlightError(
            f"a receptive field is measured of a ViT, Swin or ConvNeXt, not of a {type(model).__name__}"
        )
    check_image(image_BCHW, model.config.in_channels)
    was_training = model.training
    parameter = next(model.parameters())
    with torch.enable_grad(), torch.inference_mode(False):
        image_BCHW = image_BCHW.detach().to(parameter).clone().requires_grad_()
        try:
            (map_BDhw,) = model.eval().intermediates(image_BCHW, block, dense=True)
        finally:
            model.train(was_training)
        h, w = map_BDhw.shape[2:]
        row, column = (h // 2, w // 2) if patch is None else patch
        if not (0 <= row < h and 0 <= column < w):
            raise PatchlightError(f"patch {(row, column)} lies outside the grid of {h} rows and {w} columns")
        (gradient_BCHW,) = torch.autograd.grad(map_BDhw[:, :, row, column].sum(), image_BCHW)
    field_HW = gradient_BCHW.float().abs().mean((0, 1))
    return field_HW / field_HW.sum().clamp(min=torch.finfo(torch.float32).tiny)


def reach(field_HW: Tensor, share: float = 0.5) -> float:
    """The share of the pixels that holds `share` of the field, the strongest first: small is local, `share` is even."""
    if not 0 < share < 1:
        raise PatchlightError(f"share={share!r} must lie between 0 and 1")
    strongest_first = field_HW.flatten().sort(descending=True).values.cumsum(0)
    return (int((strongest_first < share * strongest_first[-1]).sum()) + 1) / field_HW.numel()
