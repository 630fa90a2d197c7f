"""Attention followed through all layers: rollout (Abnar and Zuidema 2020), and weighted by gradients (Chefer 2021).

Both carry one row of relevance, that of the tokens which the model's answer is read from, backwards through the
layers. One layer's N x N matrix, averaged over heads, exists at a time.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from patchlight.config import Size
from patchlight.errors import PatchlightError
from patchlight.explain.attention import image_for, plain_vit
from patchlight.models.positions import TokenGeometry
from patchlight.models.vit import Heads, ViT

Fusion = Literal["mean", "max", "min"]
QUERIES_AT_ONCE = 256
"""Rows computed at a time before their heads are fused: bounds the memory, changes nothing."""


def rollout(
    model: Any,
    image_BCHW: Tensor,
    *,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    sizes: Sequence[Size] | None = None,
) -> Tensor:
    """How much of each patch reaches the answer if every block passes on half of what it gets unchanged: heat_Bhw.

    Each layer's attention, its heads fused, is averaged with the identity (the residual connection), its rows brought
    back to a sum of one, and the layers are multiplied. `discard` sets that share of each layer's smallest weights to
    zero first.
    """
    if fusion not in ("mean", "max", "min"):
        raise PatchlightError(f"fusion={fusion!r} is not known; it is 'mean', 'max' or 'min'")
    if not 0 <= discard < 1:
        raise PatchlightError(f"discard={discard} must be at least 0 and less than 1")
    vit = plain_vit(model)
    layers: list[Heads] = []
    with torch.no_grad():
        _, geometry = vit.encode(image_for(vit, image_BCHW), sizes, lambda _, heads, x: layers.append(heads))
        relevance_BN = answering_tokens(vit, geometry, len(image_BCHW))
        for heads in reversed(layers):
            fused_BNN = _fused(heads, fusion)
            if discard:
                smallest = fused_BNN.flatten(1).kthvalue(max(1, int(discard * fused_BNN[0].numel())), 1).values
                fused_BNN = fused_BNN.where(fused_BNN > smallest[:, None, None], 0)
            # The row times (A + I), each row of which sums to one plus what is left of A's.
            relevance_BN = relevance_BN / (1 + fused_BNN.sum(2))
            relevance_BN = relevance_BN + (relevance_BN[:, None] @ fused_BNN)[:, 0]
        return relevance_BN[:, geometry.num_prefix :].unflatten(1, geometry.grid)


def attribution(
    model: Any,
    image_BCHW: Tensor,
    classes: int | Sequence[int] | Tensor | None = None,
    *,
    sizes: Sequence[Size] | None = None,
) -> Tensor:
    """How much each patch spoke for a class: attention times its gradient, followed through the layers: heat_Bhw.

    `classes` is one class for all images, or one each; None takes the likeliest. The gradient of a class with respect
    to an attention weight is the gradient of the head's output times the value, so fused attention serves here too.
    """
    vit = plain_vit(model)
    if vit.head is None:
        raise PatchlightError("attribution needs a model with a head; without classes use rollout or attention")
    layers: list[Heads] = []
    with torch.enable_grad():
        # The image as the start of the graph gives gradients in a frozen model, too.
        image_BCHW = image_for(vit, image_BCHW).detach().requires_grad_()
        x_BND, geometry = vit.encode(image_BCHW, sizes, lambda _, heads, x: layers.append(heads))
        logits_BK = vit.read(x_BND, geometry)
        chosen_B = logits_BK.argmax(1) if classes is None else one_class_each(classes, logits_BK)
        score = logits_BK.gather(1, chosen_B[:, None]).sum()
        gradients = torch.autograd.grad(score, [heads.out_BANE for heads in layers])
    with torch.no_grad():
        relevance_BN = answering_tokens(vit, geometry, len(image_BCHW))
        for heads, gradient_BANE in zip(reversed(layers), reversed(gradients), strict=True):
            relevance_BN = relevance_BN + (relevance_BN[:, None] @ _fused(heads, "mean", gradient_BANE))[:, 0]
        return relevance_BN[:, geometry.num_prefix :].unflatten(1, geometry.grid)


def answering_tokens(vit: ViT, geometry: TokenGeometry, batch: int) -> Tensor:
    """How much each token counts in the pooled answer, from which relevance is followed back: (B, N)."""
    num_tokens = geometry.num_prefix + geometry.grid[0] * geometry.grid[1]
    class_N = torch.zeros(num_tokens, device=geometry.device)
    if vit.config.pooling != "mean":
        class_N[: 1 + vit.config.distill_token] = 1 / (1 + vit.config.distill_token)
        return class_N.expand(batch, -1).clone()
    patches_N = torch.ones(num_tokens, device=geometry.device)
    patches_N[: geometry.num_prefix] = 0
    patches_BN = patches_N.expand(batch, -1) if geometry.valid_BN is None else patches_N * geometry.valid_BN
    return patches_BN / patches_BN.sum(1, keepdim=True)


def _fused(heads: Heads, fusion: Fusion, gradient_BANE: Tensor | None = None) -> Tensor:
    """All rows of a layer, one matrix an image (B, N, N); weighted by the gradient, where given, and then positive."""
    chunks = []
    for start in range(0, heads.q_BANE.shape[2], QUERIES_AT_ONCE):
        queries = slice(start, start + QUERIES_AT_ONCE)
        rows_BAQN = heads.rows(queries)
        if gradient_BANE is not None:
            rows_BAQN = rows_BAQN * (gradient_BANE[:, :, queries].float() @ heads.v_BANE.float().transpose(2, 3))
            rows_BAQN = rows_BAQN.clamp(min=0)
        chunks.append(rows_BAQN.mean(1) if fusion == "mean" else getattr(rows_BAQN, f"a{fusion}")(1))
    return torch.cat(chunks, 1)


def one_class_each(classes: int | Sequence[int] | Tensor, logits_BK: Tensor) -> Tensor:
    """A class an image (B,), from one for all or one each."""
    batch, count = logits_BK.shape
    chosen = (
        torch.as_tensor(classes, device=logits_BK.device).expand(batch)
        if isinstance(classes, int)
        else torch.as_tensor(classes, device=logits_BK.device)
    )
    if chosen.shape != (batch,) or chosen.is_floating_point() or not ((chosen >= 0) & (chosen < count)).all():
        raise PatchlightError(
            f"classes={classes!r}: give one class, or one for each of {batch} images, from 0 to {count - 1}"
        )
    return chosen.long()
