"""Images of different sizes in one sequence, without seeing each other (NaViT, Dehghani et al. 2023, arXiv:2307.06304).

A batch of different sizes has to be padded to the largest, and the padding costs as much as the images. Packed, the
tokens of several small images share a row with each other, each image with prefix tokens and positions of its own, and
a mask lets every token attend to its own image alone: the answers are those of the images one by one.

Shapes: R rows, N tokens a row, n tokens of one image, I images.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.config import Size
from patchlight.errors import PatchlightError
from patchlight.models.stems import check_image
from patchlight.models.token_geometry import TokenGeometry
from patchlight.models.vit import ViT, check_vit

MOVABLE = ("learned", "sincos2d", "rope2d", "none")
"""Positions that a token carries with it, so that tokens need not lie on one grid."""


@dataclass(frozen=True)
class Row:
    """The images of a row, by their numbers, and the tokens that they take."""

    images: tuple[int, ...]
    tokens: int


def plan_rows(lengths: Sequence[int], max_tokens: int | None = None) -> list[Row]:
    """Which images share a row: the longest first, each into the first row that has room for it.

    `max_tokens` is the length of a row; None takes the longest image's, so that a row never costs more than padding.
    """
    longest = max(lengths, default=0)
    room = longest if max_tokens is None else max_tokens
    if longest > room:
        raise PatchlightError(f"max_tokens={room} is less than the {longest} tokens of the largest image")
    rows: list[tuple[list[int], int]] = []
    for image in sorted(range(len(lengths)), key=lambda image: -lengths[image]):
        place = next((place for place, (_, used) in enumerate(rows) if used + lengths[image] <= room), None)
        if place is None:
            rows.append(([image], lengths[image]))
        else:
            images, used = rows[place]
            rows[place] = ([*images, image], used + lengths[image])
    return [Row(tuple(images), used) for images, used in rows]


def packed(vit: ViT, images_CHW: Sequence[Tensor], max_tokens: int | None = None) -> Tensor:
    """What the model says of each of these images (C, H, W) of any sizes, in their order: logits_IK or features_ID."""
    answers: list[Tensor | None] = [None] * len(images_CHW)
    for images, x_BnD, geometry in _encode(vit, images_CHW, max_tokens):
        for image, answer in zip(images, vit.read(x_BnD, geometry), strict=True):
            answers[image] = answer
    return torch.stack([answer for answer in answers if answer is not None])


def packed_tokens(vit: ViT, images_CHW: Sequence[Tensor], max_tokens: int | None = None) -> list[Tensor]:
    """The last block's tokens x_nD of each image, prefix tokens first, as `vit.tokens` gives them."""
    tokens: dict[int, Tensor] = {}
    for images, x_BnD, _ in _encode(vit, images_CHW, max_tokens):
        tokens |= dict(zip(images, x_BnD, strict=True))
    return [tokens[image] for image in range(len(images_CHW))]


def _encode(
    vit: ViT, images_CHW: Sequence[Tensor], max_tokens: int | None
) -> list[tuple[list[int], Tensor, TokenGeometry]]:
    """For the images of each size: their numbers, their tokens x_BnD after the last block, and how these lie."""
    check_vit(vit, "packing")
    if vit.config.position not in MOVABLE:
        raise PatchlightError(
            f"position={vit.config.position!r} knows one grid at a time; packing goes with {', '.join(MOVABLE)}"
        )
    if isinstance(images_CHW, Tensor) or not images_CHW:
        raise PatchlightError("packing takes a list of images, each a tensor (channels, height, width)")
    by_size: defaultdict[Size, list[int]] = defaultdict(list)
    for image, image_CHW in enumerate(images_CHW):
        check_image(image_CHW[None] if isinstance(image_CHW, Tensor) else image_CHW, vit.config.in_channels)
        by_size[image_CHW.shape[1], image_CHW.shape[2]].append(image)

    groups = [(images, *vit.embed(torch.stack([images_CHW[image] for image in images]))) for images in by_size.values()]
    tokens = {image: x_nD for images, x_BnD, _ in groups for image, x_nD in zip(images, x_BnD, strict=True)}
    ropes = {image: geometry.rope for images, _, geometry in groups for image in images}
    rows = plan_rows([len(tokens[image]) for image in range(len(images_CHW))], max_tokens)

    length = max(row.tokens for row in rows)
    x_RND = torch.stack([_filled([tokens[image] for image in row.images], length) for row in rows])
    segments_RN = torch.full((len(rows), length), -1)  # what fills a row up is of no image
    for row, segments_N in zip(rows, segments_RN, strict=True):
        numbers = [image for image in row.images for _ in tokens[image]]
        segments_N[: row.tokens] = torch.tensor(numbers)
    geometry = replace(groups[0][2], segments_BN=segments_RN.to(x_RND.device), rope=_rope_of_rows(ropes, rows, length))
    x_RND = vit.run_blocks(x_RND, geometry)

    after: dict[int, Tensor] = {}
    for row, x_ND in zip(rows, x_RND, strict=True):
        lengths = [len(tokens[image]) for image in row.images]
        after |= dict(zip(row.images, x_ND[: row.tokens].split(lengths), strict=True))
    return [(images, torch.stack([after[image] for image in images]), own) for images, _, own in groups]


def _filled(parts_nD: Sequence[Tensor], length: int) -> Tensor:
    row_ND = torch.cat(list(parts_nD))
    return F.pad(row_ND, (0, 0, 0, length - len(row_ND)))


def _rope_of_rows(
    ropes: dict[int, tuple[Tensor, Tensor] | None], rows: Sequence[Row], length: int
) -> tuple[Tensor, Tensor] | None:
    """Each image's own rotations (1, 1, n, E) on its part of the row: (R, 1, N, E)."""
    if any(rope is None for rope in ropes.values()):
        return None
    cos, sin = (
        torch.stack([_filled([ropes[image][part][0, 0] for image in row.images], length)[None] for row in rows])  # type: ignore[index]
        for part in (0, 1)
    )
    return cos, sin
