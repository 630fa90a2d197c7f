"""High-norm patches: the few that large models turn into scratch space, and that blot attention maps.

Darcet et al. 2023 ("Vision Transformers Need Registers", arXiv:2309.16588) found them: patches of dull background whose
tokens grow to several times the length of their neighbours', hold facts about the whole image, and draw attention
that has nothing to do with what they show.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.errors import PatchlightError

DEVIATIONS = 8.0
"""How many robust deviations above the median a patch's norm has to lie."""

LEAST_RATIO = 2.0
"""And how many times the median it has to be at least, however small the deviation is."""


def outlier_tokens(norms_BN: Tensor, num_prefix: int, valid_BN: Tensor | None = None) -> Tensor:
    """Patches whose tokens are far longer than the others of the same image: a bool mask (B, P).

    Each image is judged by its own patches alone: the class token and the registers are long for good reasons. Tokens
    that are not valid, or whose norm is NaN (the padding in `token_norms`), are nobody's outliers and do not count.
    """
    if norms_BN.ndim != 2 or not 0 <= num_prefix < norms_BN.shape[1]:
        raise PatchlightError(
            f"norms of shape {tuple(norms_BN.shape)} with num_prefix={num_prefix} hold no patches; "
            "give one layer's norms (batch, tokens), as token_norms(...)[-1]"
        )
    norms_BP = norms_BN[:, num_prefix:].float()
    if valid_BN is not None:
        norms_BP = norms_BP.where(valid_BN[:, num_prefix:], torch.nan)
    # The median and the median distance from it (times 1.4826: the deviation, for a normal distribution) do not move
    # as long as fewer than half of the patches are artifacts, where mean and standard deviation would be carried away.
    # DINOv2's artifacts have 5 to 10 times the median, at a few patches in a hundred. A spread of 10 to 30 % of the
    # median is taken to be healthy, with a tail above that is longer than a normal distribution's: eight deviations
    # leave it alone (log-normal with 0.3: three patches in 100,000) and catch five times the median up to a spread of
    # 50 %. Norms that are nearly equal have hardly any deviation and would make outliers of patches a few per cent
    # longer, hence the least ratio.
    median_B1 = norms_BP.nanmedian(1, keepdim=True).values
    deviation_B1 = 1.4826 * (norms_BP - median_B1).abs().nanmedian(1, keepdim=True).values
    return norms_BP > torch.maximum(median_B1 + DEVIATIONS * deviation_B1, LEAST_RATIO * median_B1)


def artifact_patches(norms_LBN: Tensor, num_prefix: int, valid_BN: Tensor | None = None) -> Tensor:
    """Which patches are outliers after the last block or the one before it: a bool mask (B, P).

    `norms_LBN` is what `token_norms` gives. Both, because it differs where artifacts show: Jiang et al. 2025 look
    after the last block of OpenCLIP B/16, and after the one before in DINOv2 L/14 and OpenCLIP L/14.
    """
    masks = [outlier_tokens(norms_BN, num_prefix, valid_BN) for norms_BN in norms_LBN[-2:]]
    return torch.stack(masks).any(0)


def suppress(heat: Tensor, outliers: Tensor, valid: Tensor | None = None) -> Tensor:
    """Heat maps (..., h, w) in which the outliers are replaced by the median of the good patches around them.

    Around them are the 8 neighbours; where none of those is good, the next ring, and so on; a map without any good
    patch stays as it is. `valid` marks the patches that hold a part of the image, in padded batches.

    `outliers` and `valid` are masks that broadcast to the heat: (h, w) for all maps alike, or with the heat's leading
    axes. One (B, h, w) also goes with heat_Bhw, and with (L, B, A, Q, h, w) as `AttentionMaps.heat` gives it, where it
    stands for (B, 1, 1, h, w). The maps' sums change.
    """
    bad = _like(heat, outliers, "outliers")
    good = ~bad if valid is None else ~bad & _like(heat, valid, "valid")
    known = heat.float().where(good, torch.nan)
    result, missing = heat.clone(), bad & good.any(-1, keepdim=True).any(-2, keepdim=True)
    for radius in range(1, max(heat.shape[-2:])):
        if not missing.any():
            break
        around = F.pad(known, (radius, radius, radius, radius), value=torch.nan)
        window = 2 * radius + 1  # the rings inside hold nothing good, so the whole square counts as its outermost ring
        near = around.unfold(-2, window, 1).unfold(-2, window, 1)[missing].flatten(1)
        found = ~near.isnan().all(1)
        medians = _nan_median(near).to(heat.dtype)
        places = missing.nonzero()[found].unbind(1)
        result[places] = medians[found]
        missing = missing.index_put(places, torch.tensor(False, device=missing.device))
    return result


def _nan_median(values_XY: Tensor) -> Tensor:
    """The middle of each row's numbers, or the mean of the two in the middle; NaN in a row without any."""
    sorted_XY = values_XY.sort(1).values  # NaN goes to the end
    last_X1 = (~values_XY.isnan()).sum(1, keepdim=True) - 1
    lower_X1, upper_X1 = last_X1.clamp(min=0) // 2, (last_X1.clamp(min=0) + 1) // 2
    return (sorted_XY.gather(1, lower_X1) + sorted_XY.gather(1, upper_X1))[:, 0] / 2


def _like(heat: Tensor, mask: Tensor, name: str) -> Tensor:
    """The mask at the shape of the heat."""
    if mask.dtype != torch.bool:
        raise PatchlightError(f"{name} is {mask.dtype}; give a bool mask, such as outlier_tokens makes")
    if mask.ndim == 3 and heat.ndim in (4, 5):
        raise PatchlightError(
            f"{name} {tuple(mask.shape)} may mean any axis of heat {tuple(heat.shape)}; "
            "put ones where it is to be repeated, as in mask[:, None]"
        )
    wide = mask[:, None, None] if mask.ndim == 3 and heat.ndim == 6 else mask
    try:
        return wide.expand(heat.shape)
    except RuntimeError:
        raise PatchlightError(
            f"{name} {tuple(mask.shape)} does not fit heat {tuple(heat.shape)}; for heat (..., h, w) it is "
            f"{(*heat.shape[-2:],)}, or has the leading axes too"
        ) from None
