"""From tokens to one vector an image."""

import torch
from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.models.positions import TokenGeometry


def pool(x_BND: Tensor, how: str, geometry: TokenGeometry) -> Tensor:
    """features_BD: the class token ("cls"), the mean over the patches that hold a part of the image ("mean"), or
    both, one after the other ("cls_mean")."""
    if how == "cls":
        return x_BND[:, 0]
    if how == "cls_mean":
        return torch.cat([pool(x_BND, "cls", geometry), pool(x_BND, "mean", geometry)], 1)
    if how != "mean":
        raise PatchlightError(f"unknown pooling {how!r}; use 'cls', 'mean' or 'cls_mean'")
    patches_BPD = x_BND[:, geometry.num_prefix :]
    if geometry.valid_BN is None:
        return patches_BPD.mean(1)
    valid_BP1 = geometry.valid_BN[:, geometry.num_prefix :, None]
    return patches_BPD.where(valid_BP1, 0).sum(1) / valid_BP1.sum(1)
