"""The attention that a model paid, exactly: the softmax rows asked for, from the very q and k of its forward pass.

The forward stays on fused attention, which never writes its weights down. The few rows that one wants to see are
computed beside it: for the class token that is one row a head, linear in the number of tokens.

Attention is a hint and not an explanation: it says where a layer took its values from, not why the model answered as
it did. `explain.faithfulness` measures how far a map can be trusted.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from patchlight.config import Size, ViTConfig
from patchlight.errors import PatchlightError
from patchlight.explain import class_rows
from patchlight.explain.artifacts import artifact_patches, suppress
from patchlight.geometry import View
from patchlight.models.attention import Heads
from patchlight.models.families import is_model
from patchlight.models.stems import check_image
from patchlight.models.swin import Swin
from patchlight.models.token_geometry import TokenGeometry
from patchlight.models.vit import ViT

Layers = int | Sequence[int] | Literal["all"]

Queries = (
    int
    | Sequence[int]
    | tuple[int, int]
    | Sequence[tuple[int, int]]
    | Literal["cls", "distill", "registers", "all", "pool", "windows"]
)
"""Tokens: an index or a list of them; patches: a (row, column) tuple or a list of them; or a name."""


BYTES_THAT_WAIT = 2**29
"""Layers are read together on a GPU (see class_rows) as long as their queries, keys and values take no more."""


@dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """What the asked-for tokens attended to."""

    weights: Tensor
    """Softmax rows (L, B, A, Q, N) in float32: each sums to one over the N tokens. A is 1 where heads were averaged."""
    grid: Size
    """(h, w): how the patches lie."""
    num_prefix: int
    """Number of prefix tokens: class token, distillation token, registers."""
    layers: tuple[int, ...]
    queries: tuple[int, ...]
    """Which tokens the Q rows belong to; none where the one row is the mean of all patches' (a Swin's windows)."""
    tokens: Tensor
    """The last block's tokens (B, N, D), from the same forward pass, as `model.tokens` gives them."""
    patch_size: tuple[float, float]
    """(height, width) of a patch in pixels of the model's image."""
    values: Tensor | None = None
    """With `values=True`: what the attention took its weighted mean of, (L, B, A, N, E)."""
    artifacts: Tensor | None = None
    """With `suppress_artifacts=True`: True at the artifact patches (B, h, w), see explain/artifacts.py."""
    valid: Tensor | None = None
    """False at the patches (B, h, w) that lie in an image's padding; None where there is none."""

    def heat(self) -> Tensor:
        """The share of the attention that went to each patch, where it lies: (L, B, A, Q, h, w).

        With `suppress_artifacts=True` artifacts show what their neighbours got; `weights` stay what they were.
        """
        heat = self.weights[..., self.num_prefix :].unflatten(-1, self.grid)
        return heat if self.artifacts is None else suppress(heat, self.artifacts, self.valid)


def attention(
    model: Any,
    image_BCHW: Tensor,
    layers: Layers = -1,
    queries: Queries | None = None,
    heads: Literal["all", "mean"] = "all",
    *,
    sizes: Sequence[Size] | None = None,
    values: bool = False,
    suppress_artifacts: bool = False,
    differentiable: bool = False,
) -> AttentionMaps:
    """What tokens attended to, in one forward pass on fused attention.

    `model` is a ViT or a Swin, compiled or not, or what `load` gives. `layers` counts from 0, or from -1 backwards.
    `queries` are "cls" (a ViT's default), "windows" (a Swin's, see `explain.windows`), "distill", "registers", "all",
    token indices (3, or [0, 3]), or patches by row and column ((2, 5), or [(2, 5), (3, 5)]); "pool" is the learned
    query of a model with pooling="attention", which asks after the last block and so goes without `layers`. `sizes` is
    as in `ViT`. `suppress_artifacts` takes patches of outlying norm out of `heat()`, see `explain.artifacts`. Gradients
    flow only if `differentiable`.
    """
    if heads not in ("all", "mean"):
        raise PatchlightError(f"heads={heads!r} is not known; it is 'all' or 'mean'")
    if isinstance(swin := unwrapped(model), Swin):
        from patchlight.explain.windows import window_attention  # which builds on this module

        if sizes is not None or suppress_artifacts:
            raise PatchlightError("`sizes` and `suppress_artifacts` are for a ViT; a Swin takes images of one size")
        check_image(image_BCHW, swin.config.in_channels)
        image_BCHW = image_BCHW.to(swin.norm.weight.device)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            asked_for = "windows" if queries is None else queries
            return window_attention(swin, image_BCHW, layers, asked_for, heads, values=values)
    queries = "cls" if queries is None else queries
    vit = plain_vit(model)
    wanted = resolve_layers(layers, vit.config.depth)
    image_BCHW = image_for(vit, image_BCHW)
    if isinstance(queries, str) and queries == "pool":
        if layers != -1 or values or suppress_artifacts:
            raise PatchlightError("queries='pool' asks after the last block; leave out layers, values and artifacts")
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            return _look_at_pooling(vit, image_BCHW, sizes, mean=heads == "mean")
    grid = vit.config.grid_for(_pixels(image_BCHW))
    asked = resolve_queries(queries, vit.config, grid)
    # One bool a block: as a tuple of numbers, the compiler would take it for a variable.
    in_order, chosen = tuple(sorted(set(wanted))), tuple(layer in wanted for layer in range(vit.config.depth))
    compiled = _is_compiled(model)
    run = _compiled_look() if compiled else _look
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        weights_LBAQN, values_LBANE, norms_LBN, tokens_BND, geometry = run(
            vit,
            image_BCHW,
            sizes,
            chosen,
            _as_index(asked, image_BCHW.device, num_prefix=vit.config.num_prefix if compiled else None),
            heads == "mean",
            values,
            suppress_artifacts,
        )
        if wanted != in_order:
            again = [in_order.index(layer) for layer in wanted]
            weights_LBAQN = weights_LBAQN[again]
            values_LBANE = None if values_LBANE is None else values_LBANE[again]
    artifacts_BP = None
    if norms_LBN is not None:
        artifacts_BP = artifact_patches(norms_LBN, geometry.num_prefix, geometry.valid_BN)
    return AttentionMaps(
        weights=weights_LBAQN,
        grid=geometry.grid,
        num_prefix=geometry.num_prefix,
        layers=wanted,
        queries=tuple(asked),
        tokens=tokens_BND,
        patch_size=vit.config.patch_pixels(_pixels(image_BCHW)),
        values=values_LBANE,
        artifacts=None if artifacts_BP is None else artifacts_BP.unflatten(1, geometry.grid),
        valid=_valid_patches(geometry),
    )


def _look_at_pooling(vit: ViT, image_BCHW: Tensor, sizes: Sequence[Size] | None, *, mean: bool) -> AttentionMaps:
    """What the learned query attended to, as the one layer after the last block."""
    if vit.attention_pool is None:
        raise PatchlightError(f"queries='pool': this model has pooling={vit.config.pooling!r}, which has no query")
    tokens_BND, geometry = vit.encode(image_BCHW, sizes)
    rows_BAN = vit.attention_pool.rows(tokens_BND, geometry)
    return AttentionMaps(
        weights=(rows_BAN.mean(1, keepdim=True) if mean else rows_BAN)[None, :, :, None],
        grid=geometry.grid,
        num_prefix=geometry.num_prefix,
        layers=(vit.config.depth,),
        queries=(),
        tokens=tokens_BND,
        patch_size=vit.config.patch_pixels(_pixels(image_BCHW)),
        valid=_valid_patches(geometry),
    )


def _valid_patches(geometry: TokenGeometry) -> Tensor | None:
    if geometry.valid_BN is None:
        return None
    return geometry.valid_BN[:, geometry.num_prefix :].unflatten(1, geometry.grid)


def _look(
    vit: ViT,
    image_BCHW: Tensor,
    sizes: Sequence[Size] | None,
    chosen: tuple[bool, ...],
    queries: slice | Tensor,
    mean: bool,
    values: bool,
    norms: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, TokenGeometry]:
    """The forward pass, and beside it the rows (L, B, A, Q, N) and values (L, B, A, N, E) of the chosen layers, and the
    norms of the tokens after every block (depth, B, N)."""
    rows: list[Tensor] = []
    kept_values: list[Tensor] = []
    kept_norms: list[Tensor] = []
    waiting: list[Heads] = []

    def keep(index: int, heads: Heads, x_BND: Tensor) -> None:
        if norms:
            kept_norms.append(torch.linalg.vector_norm(x_BND, dim=-1, dtype=torch.float32))
        if not chosen[index]:
            return
        if values:
            kept_values.append(heads.v_BANE)
        if not torch.compiler.is_compiling() and class_rows.fits(heads, queries):
            waiting.append(heads)
            if len(waiting) * heads.q_BANE.nbytes * 3 > BYTES_THAT_WAIT:
                finish()
        else:
            if waiting:
                finish()
            rows_BAQN = heads.rows(queries)
            rows.append((rows_BAQN.mean(1, keepdim=True) if mean else rows_BAQN)[None])

    def finish() -> None:
        assert isinstance(queries, slice)
        rows_LBAQN = class_rows.class_rows(waiting, queries.start)
        rows.append(rows_LBAQN.mean(2, keepdim=True) if mean else rows_LBAQN)
        waiting.clear()

    tokens_BND, geometry = vit.encode(image_BCHW, sizes, keep)
    if waiting:
        finish()
    weights_LBAQN = rows[0] if len(rows) == 1 else torch.cat(rows)
    return (
        weights_LBAQN,
        torch.stack(kept_values) if values else None,
        torch.stack(kept_norms) if norms else None,
        tokens_BND,
        geometry,
    )


@functools.cache
def _compiled_look() -> Callable[..., Any]:
    return torch.compile(_look)


def heat_on_photo(heat: Any, view: View, patch_size: tuple[float, float], photo_size: Size | None = None) -> Tensor:
    """Heat maps (..., h, w) over the photo that the view was made of: (..., H, W), bilinear between patch centres.

    NaN where the model did not see the photo. `photo_size` is the (height, width) to draw it at; the photo's own if
    None, which for many maps of a large photo is a lot of memory.
    """
    heat = as_heat(heat).float()
    expected = [math.ceil(pixels / patch - 1e-6) for pixels, patch in zip(view.model_size, patch_size, strict=True)]
    if list(heat.shape[-2:]) != expected:
        raise PatchlightError(
            f"heat of {heat.shape[-2]} x {heat.shape[-1]} patches does not fit this view, which has {expected[0]} x "
            f"{expected[1]}; pass maps.heat(), and the view that came with the image"
        )
    heights, widths = (
        _linear_weights(size, source, patches, scale, offset, patch, model)
        for size, source, patches, scale, offset, patch, model in zip(
            photo_size or view.source_size,
            view.source_size,
            heat.shape[-2:],
            view.scale,
            view.offset,
            patch_size,
            view.model_size,
            strict=True,
        )
    )
    return heights.to(heat) @ heat @ widths.to(heat).T


def _linear_weights(
    size: int, source: int, patches: int, scale: float, offset: float, patch: float, model: int
) -> Tensor:
    """How much each patch along an axis counts for each pixel of the photo drawn at `size` pixels: (size, patches)."""
    in_model = (torch.arange(size, dtype=torch.float64) + 0.5) * (source / size) * scale + offset
    place = (in_model / patch - 0.5).clamp(0, patches - 1)  # in patches, from the first one's centre
    weights = (1 - (place[:, None] - torch.arange(patches, dtype=torch.float64)).abs()).clamp(min=0)
    weights[(in_model < 0) | (in_model > model)] = torch.nan
    return weights


def as_heat(heat: Any) -> Tensor:
    """Heat maps (..., h, w) as a tensor, from numpy too."""
    if isinstance(heat, AttentionMaps):
        raise PatchlightError("these are whole AttentionMaps; pass their heat(), or one of its maps")
    try:
        tensor = torch.as_tensor(heat)
    except (TypeError, ValueError, RuntimeError):
        raise PatchlightError(f"heat is a tensor or array (..., h, w), not {type(heat).__name__}") from None
    if tensor.ndim < 2:
        raise PatchlightError(f"heat has shape {tuple(tensor.shape)}; it needs rows and columns, (..., h, w)")
    return tensor


def unwrapped(model: Any) -> Any:
    """The model inside what a user passes: a compiled or data-parallel model, or a loaded checkpoint."""
    for wrapper in ("model", "module", "_orig_mod"):
        if not is_model(model):
            model = getattr(model, wrapper, model)
    return model


def plain_vit(model: Any) -> ViT:
    """The ViT inside what a user passes; for another model, an error that says what to use instead."""
    model = unwrapped(model)
    if isinstance(model, ViT):
        return model
    kind = type(model).__name__
    if not is_model(model):
        raise PatchlightError(f"attention is read from a ViT, or from what patchlight.load gives, not from a {kind}")
    if not any(model.attention_entries()):
        raise PatchlightError(
            f"a {kind} is a convolutional network and pays no attention; patchlight.localize finds subjects by its "
            "features (method='features')"
        )
    raise PatchlightError(
        f"this is for a plain ViT; of a {kind}, patchlight.attention(model, image) shows the attention in its windows"
    )


def image_for(vit: ViT, image_BCHW: Tensor) -> Tensor:
    """The image on the model's device; a wrong shape or type raises."""
    check_image(image_BCHW, vit.config.in_channels)
    return image_BCHW.to(vit.norm.weight.device)


def _is_compiled(model: Any) -> bool:
    model = getattr(model, "model", model)
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def resolve_layers(layers: Layers, depth: int) -> tuple[int, ...]:
    """Indices from 0, in the order asked for."""
    if layers == "all":
        return tuple(range(depth))
    wanted = [layers] if isinstance(layers, int) else layers
    if not isinstance(wanted, list | tuple | range) or not all(isinstance(layer, int) for layer in wanted):
        raise PatchlightError(f"layers={layers!r} is not known; give 'all', or indices such as -1 or [0, 5]")
    if not wanted or not all(-depth <= layer < depth for layer in wanted):
        raise PatchlightError(f"layers={layers!r} does not fit a model of {depth} blocks (0 to {depth - 1}, or -1)")
    return tuple(layer % depth for layer in wanted)


def resolve_queries(queries: Queries, config: ViTConfig, grid: Size) -> list[int]:
    """Token indices from 0, in the order asked for."""
    num_tokens = config.num_prefix + grid[0] * grid[1]
    named = {
        "cls": range(int(config.class_token)),
        "distill": range(int(config.class_token), config.num_prefix - config.num_registers),
        "registers": range(config.num_prefix - config.num_registers, config.num_prefix),
        "all": range(num_tokens),
    }
    if isinstance(queries, str):
        if queries not in named:
            raise PatchlightError(
                f"queries={queries!r} is not known; the names are {', '.join(map(repr, [*named, 'pool']))}"
            )
        if not named[queries]:
            what = {"cls": "class token", "distill": "distillation token", "registers": "registers"}[queries]
            other = "'pool'" if config.pooling == "attention" else "a patch, such as (0, 0)"
            raise PatchlightError(f"queries={queries!r}: this model has no {what}; ask for {other}")
        return list(named[queries])
    return token_indices(queries, config.num_prefix, grid)


def token_indices(queries: Any, num_prefix: int, grid: Size) -> list[int]:
    """Token indices from 0 of one token or patch, or several, in the order asked for."""
    one = isinstance(queries, int) or (isinstance(queries, tuple) and _is_pair(queries))
    asked: Any = [queries] if one else queries
    if (
        not isinstance(asked, Sequence)
        or not asked
        or not all(isinstance(query, int) or _is_pair(query) for query in asked)
    ):
        raise PatchlightError(
            f"queries={queries!r} is not known; give a name, token indices such as [0, 3], or (row, column) patches"
        )
    return [_token_index(query, num_prefix, grid, num_prefix + grid[0] * grid[1]) for query in asked]


def _is_pair(query: object) -> bool:
    return isinstance(query, tuple | list) and len(query) == 2 and all(isinstance(place, int) for place in query)


def _token_index(query: int | tuple[int, int], num_prefix: int, grid: Size, num_tokens: int) -> int:
    if isinstance(query, int):
        if not -num_tokens <= query < num_tokens:
            raise PatchlightError(f"token {query} does not exist: the image has {num_tokens} tokens")
        return query % num_tokens
    row, column = query
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise PatchlightError(f"patch {(row, column)} lies outside the grid of {grid[0]} rows and {grid[1]} columns")
    return num_prefix + row * grid[1] + column


def _as_index(asked: list[int], device: torch.device, num_prefix: int | None = None) -> slice | Tensor:
    """A slice where the tokens follow each other (it costs no copy), else a tensor made once for all layers.

    In a compiled model the numbers of a slice are part of the program. With `num_prefix`, patches are a tensor, so that
    each new patch does not compile a new one.
    """
    one_program = num_prefix is None or asked[0] < num_prefix
    if one_program and asked == list(range(asked[0], asked[0] + len(asked))):
        return slice(asked[0], asked[0] + len(asked))
    return torch.tensor(asked, device=device)


def _pixels(image_BCHW: Tensor) -> Size:
    return (image_BCHW.shape[-2], image_BCHW.shape[-1])
