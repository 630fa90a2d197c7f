"""One photo through one model, and what can be seen of it: a page that works offline, and its pictures."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchlight.config import Size, ViTConfig
from patchlight.explain import plot, probes
from patchlight.explain.artifacts import DEVIATIONS, LEAST_RATIO, artifact_patches
from patchlight.explain.attention import (
    Layers,
    heat_on_photo,
    plain_vit,
    resolve_layers,
    resolve_queries,
)
from patchlight.explain.rollout import QUERIES_AT_ONCE, attribution, rollout
from patchlight.geometry import fit_inside
from patchlight.images.decode import Decoded, Photo, decode
from patchlight.looking.page import TEXTS, Look, Picture, check_folder, write
from patchlight.models.attention import Heads
from patchlight.models.vit import ViT
from patchlight.remote import on_disk
from patchlight.reporting import SILENT, Progress, Reporter
from patchlight.weights.load import Loaded, load_or_given
from patchlight.weights.vit.names import PROJECTIONS

LARGE, SMALL = 1000, 500
"""Pixels that a photo's longer side is drawn with at most: beside one map, and among many."""

MOST_ANSWERS = 5
"""Classes that are named, the likeliest."""

MOST_POSITIONS = 48
"""Rows and columns of positions that are compared at most: the memory grows with the fourth power."""


class _LoadedViT(Loaded):
    """What is loaded, where it is a ViT."""

    model: ViT
    config: ViTConfig


def look(
    photo: Photo,
    model: str | os.PathLike[str] | Loaded = "default",
    *,
    layers: Layers = "all",
    patch: tuple[int, int] | None = None,
    out: str | os.PathLike[str] | None = None,
    reporter: Reporter = SILENT,
) -> Look:
    """Draw what a model did with a photo: a path, the bytes of a file, a Pillow image, an array HWC uint8, or what
    `decode` gave. `model` is what `load` takes, or gave.

    `layers` are the blocks to sweep over. `patch` is the (row, column) whose attention and likeness are shown; None
    takes the one that gets the most attention. `out` is the folder that the page goes to; with None it is not written.
    """
    start = time.perf_counter()
    loaded = load_or_given(model)
    loaded.check_has_weights("look")
    plain_vit(loaded)  # says so, where it is no ViT
    loaded = cast(_LoadedViT, loaded)
    if out is not None:
        check_folder(on_disk(out))
    plot.new_figure()  # better to hear now than later that there is no matplotlib
    reporter.progress(Progress(what="reading the photo"))
    decoded, blocks = decode(photo), resolve_layers(layers, loaded.config.depth)
    scene, pictures = _Scene(loaded, decoded, patch), []
    for picture in _draw(loaded, scene, blocks):
        pictures.append(picture)
        reporter.progress(Progress(what=f"drew {picture.name}"))
    name = Path(photo).name if isinstance(photo, str | os.PathLike) else "photo"
    seen = Look(
        photo=name,
        facts=_facts(loaded, scene, time.perf_counter() - start),
        notes=(*_notes(loaded, scene, patch is not None), *loaded.notes),
        pictures=tuple(pictures),
        page=None if out is None else Path(out) / "index.html",
    )
    if out is not None:
        write(seen, Path(out))
    return seen


# What the model did


class _Scene:
    """The photo, and what one forward pass over it showed."""

    @torch.no_grad()
    def __init__(self, loaded: _LoadedViT, decoded: Decoded, patch: tuple[int, int] | None) -> None:
        model, config, num_prefix = loaded.model, loaded.config, loaded.config.num_prefix
        image_CHW, self.view = loaded.preprocess(decoded)
        self.image_BCHW = image_CHW[None].to(model.norm.weight.device)
        self.grid = config.grid_for(self.view.model_size)
        self.even = 1 / (num_prefix + self.grid[0] * self.grid[1])
        """Each token's share of an attention that makes no difference."""
        self.patch_size = config.patch_pixels(self.view.model_size)
        self.photo_HWC = _drawn(decoded, LARGE)
        self.small_HWC = _drawn(decoded, SMALL)
        self.edges = plot.view_edges(self.view, self.grid, self.patch_size, self.photo_HWC.shape[:2])
        if patch is not None:
            resolve_queries([patch], config, self.grid)  # says so, where there is no such patch

        rows_LAN: list[Tensor] = []
        norms_LBN: list[Tensor] = []
        last: list[Heads] = []

        def keep(index: int, heads: Heads, x_BND: Tensor) -> None:
            rows_LAN.append(heads.rows([0])[0, :, 0] if config.class_token else _mean_row(heads, num_prefix))
            norms_LBN.append(x_BND.float().norm(dim=2))
            last[:] = [heads]

        self.tokens_BND, geometry = model.encode(self.image_BCHW, visit=keep)
        (heads,) = last
        self.heat_LAhw = torch.stack(rows_LAN)[..., num_prefix:].unflatten(-1, self.grid)
        """What each head pays to the patches: the class token's attention, or that of all patches on average."""
        self.norms_hw = norms_LBN[-1][0, num_prefix:].unflatten(0, self.grid)
        self.outliers_hw = artifact_patches(torch.stack(norms_LBN), num_prefix)[0].unflatten(0, self.grid)
        self.patch = patch or divmod(int(self.heat_LAhw[-1].mean(0).argmax()), self.grid[1])
        query = resolve_queries([self.patch], config, self.grid)
        self.patch_heat_hw = heads.rows(query)[0, :, 0, num_prefix:].mean(0).unflatten(0, self.grid)
        self.answers = _answers(loaded, model.read(self.tokens_BND, geometry)[0])

    def spread(self, heat: Tensor, photo_HWC: Any) -> Tensor:
        return heat_on_photo(heat.cpu().float(), self.view, self.patch_size, photo_HWC.shape[:2])


def _mean_row(heads: Heads, num_prefix: int) -> Tensor:
    """What each head's patches attend to on average, (A, N)."""
    num_tokens = heads.q_BANE.shape[2]
    chunks = range(num_prefix, num_tokens, QUERIES_AT_ONCE)
    sums = [heads.rows(slice(start, start + QUERIES_AT_ONCE))[0].sum(1) for start in chunks]
    return torch.stack(sums).sum(0) / (num_tokens - num_prefix)


def _answers(loaded: _LoadedViT, logits_K: Tensor) -> list[tuple[int, str]]:
    """The likeliest classes, best first, and in words their names and probabilities; none where no class is named."""
    if not loaded.config.num_classes or loaded.provenance.origin in PROJECTIONS:
        return []
    best = logits_K.float().softmax(0).topk(min(MOST_ANSWERS, len(logits_K)))
    names = loaded.names
    return [
        (number, f"{f'class {number}' if names is None else names[number]} at {probability:.1%}")
        for number, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _even_distance(grid: Size, patch_size: tuple[float, float]) -> float:
    """The mean distance of two patches, in pixels: how far a head looks that attends to all patches alike."""

    def apart(count: int, patch: float) -> tuple[Any, Any]:
        """How far two patches can be apart along one axis, and the share of all pairs that are."""
        steps = np.arange(count)
        return steps * patch, np.where(steps == 0, 1, 2) * (count - steps) / count**2

    (down_h, share_h), (across_w, share_w) = apart(grid[0], patch_size[0]), apart(grid[1], patch_size[1])
    return float(share_h @ np.hypot(down_h[:, None], across_w) @ share_w)


def _drawn(decoded: Decoded, longest: int) -> Any:
    """The upright photo as it is drawn, (H, W, 3) uint8: smaller where it is large, never larger."""
    height, width = fit_inside(decoded.source_size, longest)
    return np.asarray(decoded.image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0))


def _compared(grid: Size) -> Size:
    return min(grid[0], MOST_POSITIONS), min(grid[1], MOST_POSITIONS)


def _shares(loaded: _LoadedViT, scene: _Scene) -> dict[str, Tensor]:
    if loaded.config.class_token:
        return probes.attention_shares(loaded.model, scene.image_BCHW)
    artifacts_L, patches_L = (
        scene.heat_LAhw.mean(1).where(which_hw, 0).sum((1, 2)) for which_hw in (scene.outliers_hw, ~scene.outliers_hw)
    )
    return {"registers": 1 - artifacts_L - patches_L, "artifacts": artifacts_L, "patches": patches_L}


def _facts(loaded: _LoadedViT, scene: _Scene, seconds: float) -> tuple[tuple[str, str], ...]:
    config, parameters = loaded.config, sum(parameter.numel() for parameter in loaded.model.parameters())
    tokens = {
        "class": int(config.class_token),
        "distillation": int(config.distill_token),
        "registers": config.num_registers,
        "patches": scene.grid[0] * scene.grid[1],
    }
    kinds = ", ".join(f"{count} {kind}" for kind, count in tokens.items() if count)
    return (
        ("model", f"{loaded.provenance.source} ({loaded.provenance.origin})"),
        ("size", f"{parameters / 1e6:,.1f} million parameters, {config.depth} blocks of {config.num_heads} heads"),
        ("photo", f"{_by(scene.view.source_size)} pixels (height x width)"),
        ("model's image", f"{_by(scene.view.model_size)} pixels, in patches of {_by(scene.patch_size)}"),
        ("tokens", f"{sum(tokens.values()):,} ({kinds})"),
        *((("answers", "\n".join(words for _, words in scene.answers)),) if scene.answers else ()),
        ("time", f"{seconds:.1f} seconds"),
    )


def _words(loaded: _LoadedViT, scene: _Scene) -> dict[str, str]:
    """What the texts leave open."""
    config, count = loaded.config, int(scene.outliers_hw.sum())
    outliers = (
        f"{count} stand{'s' if count == 1 else ''} out (framed): after the last block or the one before, longer than "
        f"{LEAST_RATIO:g} times the median (here {float(scene.norms_hw.median()):.3g}) and {DEVIATIONS:g} robust "
        "deviations above it."
    )
    unseen = bool(scene.spread(scene.norms_hw, scene.photo_HWC).isnan().any())
    return {
        "grid": _by(scene.grid),
        "pixels": _by(scene.patch_size),
        "patch": f"the patch in row {scene.patch[0]}, column {scene.patch[1]}",
        "reader": "the class token" if config.class_token else "the average patch",
        "unseen": " The model never saw what is pale here." if unseen else "",
        "answer": scene.answers[0][1] if scene.answers else "",
        "outliers": outliers if count else "None stands out here.",
        "positions": _by(_compared(scene.grid)),
        "likeness": "the bias" if config.position in ("relative_bias", "relative_mlp") else "the likeness",
    }


def _notes(loaded: _LoadedViT, scene: _Scene, asked: bool) -> list[str]:
    notes = []
    if not loaded.config.class_token:
        notes.append(
            "This model has no class token. Its maps show the attention of all patches on average: the share that "
            "each patch receives."
        )
    if not asked:
        row, column = scene.patch
        notes.append(
            f"No patch was asked for. The one followed below, in row {row}, column {column} (counted from 0), gets the "
            "most attention in the last block."
        )
    y, x = scene.view.scale
    if loaded.preprocess.config.resize == "squash" and abs(y / x - 1) > 0.01:
        notes.append(
            f"The photo was squashed into the model's image of {_by(scene.view.model_size)} pixels, so the model saw "
            "it out of shape. The figures show it in its own."
        )
    if not loaded.config.num_classes:
        notes.append("This model has no head: it names no classes, so there is no map of what spoke for one.")
    elif not scene.answers:
        notes.append("This model's head gives an embedding and no classes, so there is no map of what spoke for one.")
    if loaded.config.position == "none":
        notes.append("This model is not told where its patches lie, so there are no positions to compare.")
    return notes


def _by(size: tuple[float, float]) -> str:
    return f"{size[0]:g} x {size[1]:g}"


# The pictures


def _draw(loaded: _LoadedViT, scene: _Scene, layers: tuple[int, ...]) -> Iterator[Picture]:
    model, image_BCHW, photo_HWC, edges = loaded.model, scene.image_BCHW, scene.photo_HWC, scene.edges
    aspect, words, even = photo_HWC.shape[1] / photo_HWC.shape[0], _words(loaded, scene), scene.even

    def picture(name: str, ax: Any) -> Picture:
        title, caption = TEXTS[name]
        return Picture(name, title, caption.format_map(words), plot.to_png(ax.figure))

    def beside(name: str, heat_hw: Tensor, title: str, label: str, *, marked: bool = False) -> Picture:
        """The photo, and a map over it."""
        left, right = axes = plot.panels(2, aspect, columns=2)
        plot.draw_photo(photo_HWC, left, edges, "photo")
        heat_HW, share = scene.spread(heat_hw, photo_HWC), "share" in label
        if name == "patch-similarity":
            plot.draw_similarity(photo_HWC, heat_HW, right, title=title)
        else:
            plot.draw_heat(photo_HWC, heat_HW, right, title=title, even=even if share else None)
        for ax in axes if marked else ():
            plot.mark_patch(ax, edges, scene.patch)
        plot.add_scale(axes, label, percent=share, marks={"even": even} if share else None)
        return picture(name, left)

    (ax,) = plot.panels(1, aspect)
    plot.draw_patches(photo_HWC, scene.grid, ax, edges)
    plot.mark_patch(ax, edges, scene.patch, plot.MARK)
    yield picture("patches", ax)

    heads_Ahw, small_HWC = scene.heat_LAhw[-1], scene.small_HWC
    axes = plot.draw_heads(small_HWC, scene.spread(heads_Ahw, small_HWC), probes.objectness(heads_Ahw), even=even)
    yield picture("heads", axes[0])
    layers_Lhw = scene.heat_LAhw.mean(1)[list(layers)]
    axes = plot.draw_layers(small_HWC, scene.spread(layers_Lhw, small_HWC), layers, even=even)
    yield picture("layers", axes[0])

    yield beside("rollout", rollout(model, image_BCHW)[0], "rollout", "share of what reaches the answer")
    if scene.answers:
        number, name = scene.answers[0]
        heat_hw = attribution(model, image_BCHW, number)[0]
        drawable = name.isascii() and name.isprintable() and len(name) <= 40  # the font has few other letters
        yield beside("attribution", heat_hw, f"for {name}" if drawable else f"for class {number}", "relevance")

    title = "attention of the framed patch"
    yield beside("patch-attention", scene.patch_heat_hw, title, "share of attention", marked=True)
    similarity_hw = probes.patch_similarity(scene.tokens_BND, scene.grid, scene.patch)[0]
    title = "likeness to the framed patch"
    yield beside("patch-similarity", similarity_hw, title, "cosine similarity", marked=True)

    distance_LA = probes.attention_distance(model, image_BCHW)
    even_distance = _even_distance(scene.grid, scene.patch_size)
    yield picture("attention-distance", plot.draw_attention_distance(distance_LA, even=even_distance))
    if loaded.config.position != "none":
        similarity_hwhw = probes.position_similarity(model, _compared(scene.grid))
        label = "bias" if loaded.config.position in ("relative_bias", "relative_mlp") else "cosine similarity"
        yield picture("position-similarity", plot.draw_position_similarity(similarity_hwhw, label=label))

    left, right = axes = plot.panels(2, aspect, columns=2)
    plot.draw_photo(photo_HWC, left, edges, "photo")
    plot.draw_photo(photo_HWC, right, edges)
    plot.draw_norms(scene.norms_hw, scene.outliers_hw, right, edges, "norms of the tokens")
    shortest = float(scene.norms_hw.min())
    plot.add_scale(axes, "norm", marks={f"smallest {shortest:.3g}": shortest})
    yield picture("token-norms", left)
    yield picture("attention-shares", plot.draw_shares(_shares(loaded, scene)))
