"""Attention followed through all layers: rollout (Abnar and Zuidema 2020), and weighted by gradients (Chefer 2021).

Both carry one row of relevance, that of the tokens which the model's answer is read from, backwards through the
layers, a few rows of attention at a time: no N x N matrix is made, unless weights are discarded by their rank.
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from patchlight.config import Size
from patchlight.errors import PatchlightError
from patchlight.explain.attention import image_for, plain_vit
from patchlight.models.attention import Heads
from patchlight.models.token_geometry import TokenGeometry
from patchlight.models.vit import ViT

Fusion = Literal["mean", "max", "min"]
Classes = int | str | Sequence[int] | Sequence[str] | Tensor
"""A class for all images, or one for each, by number or label."""
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
    if not isinstance(discard, int | float) or not 0 <= discard < 1:
        raise PatchlightError(f"discard={discard!r} must be a number from 0 to less than 1")
    vit = plain_vit(model)
    layers: list[Heads] = []
    with torch.no_grad():
        x_BND, geometry = vit.encode(image_for(vit, image_BCHW), sizes, lambda _, heads, x: layers.append(heads))
        relevance_BN = answering_tokens(vit, geometry, x_BND)
        while layers:
            heads, passed_BN = layers.pop(), torch.zeros_like(relevance_BN)
            kept = _kept(heads, fusion, discard, geometry) if discard else None
            for queries, rows_BQN in _fused_rows(heads, fusion):
                if kept is not None:
                    rows_BQN = rows_BQN * kept[:, queries]
                # The row times (A + I), each row of which sums to one plus what is left of A's.
                share_BQ = relevance_BN[:, queries] / (1 + rows_BQN.sum(2))
                passed_BN[:, queries] += share_BQ
                passed_BN += (share_BQ[:, None] @ rows_BQN)[:, 0]
            relevance_BN = passed_BN
        return relevance_BN[:, geometry.num_prefix :].unflatten(1, geometry.grid)


def attribution(
    model: Any,
    image_BCHW: Tensor,
    classes: Classes | None = None,
    *,
    sizes: Sequence[Size] | None = None,
) -> Tensor:
    """How much each patch spoke for a class: attention times its gradient, followed through the layers: heat_Bhw.

    `classes` is one class for all images, or one each, by number or, where `model` is what `load` gave, by label; None
    takes the likeliest. The gradient of a class with respect
    to an attention weight is the gradient of the head's output times the value, so fused attention serves here too.
    """
    vit = plain_vit(model)
    if vit.head is None:
        raise PatchlightError("attribution needs a model with a head; without classes use rollout or attention")
    layers: list[Heads] = []
    with torch.inference_mode(False), torch.enable_grad():
        # The image as the start of the graph gives gradients in a frozen model, too.
        image_BCHW = image_for(vit, image_BCHW).detach().clone().requires_grad_()
        x_BND, geometry = vit.encode(image_BCHW, sizes, lambda _, heads, x: layers.append(heads))
        logits_BK = vit.read(x_BND, geometry)
        chosen_B = logits_BK.argmax(1) if classes is None else one_class_each(classes, logits_BK, model)
        score = logits_BK.gather(1, chosen_B[:, None]).sum()
        gradients = torch.autograd.grad(score, [heads.out_BANE for heads in layers])
    with torch.no_grad():
        relevance_BN = answering_tokens(vit, geometry, x_BND)
        for heads, gradient_BANE in zip(reversed(layers), reversed(gradients), strict=True):
            passed_BN = relevance_BN.clone()
            for queries, rows_BQN in _fused_rows(heads, "mean", gradient_BANE):
                passed_BN += (relevance_BN[:, None, queries] @ rows_BQN)[:, 0]
            relevance_BN = passed_BN
        return relevance_BN[:, geometry.num_prefix :].unflatten(1, geometry.grid)


def answering_tokens(vit: ViT, geometry: TokenGeometry, x_BND: Tensor) -> Tensor:
    """How much each encoded token counts in the pooled answer, from which relevance is followed back: (B, N)."""
    if vit.attention_pool is not None:
        return vit.attention_pool.rows(x_BND, geometry).mean(1)
    class_BN, patches_BN = torch.zeros(2, *x_BND.shape[:2], device=geometry.device)
    if vit.config.class_token:
        read = 2 if vit.distill_head is not None else 1  # two heads answer together, each from its own token
        class_BN[:, :read] = 1 / read
    patches_BN[:, geometry.num_prefix :] = 1
    if geometry.valid_BN is not None:
        patches_BN *= geometry.valid_BN
    patches_BN /= patches_BN.sum(1, keepdim=True)
    return {"cls": class_BN, "mean": patches_BN}.get(vit.config.pooling, (class_BN + patches_BN) / 2)


def _fused_rows(heads: Heads, fusion: Fusion, gradient_BANE: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """A layer's rows, a few queries at a time, one for all heads (B, Q, N); weighted by the gradient, where given, and
    then positive."""
    for start in range(0, heads.q_BANE.shape[2], QUERIES_AT_ONCE):
        queries = slice(start, start + QUERIES_AT_ONCE)
        rows_BAQN = heads.rows(queries)
        if gradient_BANE is not None:
            rows_BAQN = rows_BAQN * (gradient_BANE[:, :, queries].float() @ heads.v_BANE.float().transpose(2, 3))
            rows_BAQN = rows_BAQN.clamp(min=0)
        yield queries, rows_BAQN.mean(1) if fusion == "mean" else getattr(rows_BAQN, f"a{fusion}")(1)


def _kept(heads: Heads, fusion: Fusion, discard: float, geometry: TokenGeometry) -> Tensor:
    """True at weights that stay when this share of each image's smallest is dropped (B, N, N); ties stay."""
    fused_BNN = torch.cat([rows_BQN for _, rows_BQN in _fused_rows(heads, fusion)], 1)
    limits = []
    for index, fused_NN in enumerate(fused_BNN):
        own_N = slice(None) if geometry.valid_BN is None else geometry.valid_BN[index]
        own = fused_NN[own_N][:, own_N].flatten()
        limits.append(own.kthvalue(int(discard * len(own)) + 1).values)
    return fused_BNN >= torch.stack(limits)[:, None, None]


def one_class_each(classes: Classes, logits_BK: Tensor, model: Any) -> Tensor:
    """The number of a class for each image (B,)."""
    batch, count = logits_BK.shape
    each: Any = [classes] * batch if isinstance(classes, int | str) else classes
    if isinstance(each, Sequence) and any(isinstance(name, str) for name in each):
        each = [_number_of(name, getattr(model, "labels", None)) for name in each]
    try:
        chosen_B = torch.as_tensor(each, device=logits_BK.device)
    except (TypeError, ValueError, RuntimeError):
        chosen_B = torch.empty(0)
    if chosen_B.shape != (batch,) or chosen_B.is_floating_point() or not ((chosen_B >= 0) & (chosen_B < count)).all():
        raise PatchlightError(
            f"classes={classes!r:.60}: give one class, or one for each of {batch} images, from 0 to {count - 1}"
        )
    return chosen_B.long()


def _number_of(name: object, labels: Sequence[str] | None) -> object:
    if not isinstance(name, str):
        return name
    if labels is None:
        raise PatchlightError(f"class {name!r}: this model has no labels; give the number of the class")
    if name not in labels:
        nearest = difflib.get_close_matches(name, labels, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"such as {labels[0]!r}"
        raise PatchlightError(f"class {name!r} is not among the model's labels; {hint}")
    return list(labels).index(name)
