"""From tokens to one vector an image."""

from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.models.positions import TokenGeometry


def pool(x_BND: Tensor, how: str, geometry: TokenGeometry) -> Tensor:
    """features_BD: the class token ("cls"), or the mean over the patches that hold a part of the image ("mean")."""
    if how == "cls":
        return x_BND[:, 0]
    if how != "mean":
        raise PatchlightError(f"unknown pooling {how!r}; use 'cls' or 'mean'")
    patches_BPD = x_BND[:, geometry.num_prefix :]
    if geometry.valid_BN is None:
        return patches_BPD.mean(1)
    weight_BP1 = geometry.valid_BN[:, geometry.num_prefix :, None].to(x_BND.dtype)
    return (patches_BPD * weight_BP1).sum(1) / weight_BP1.sum(1)
