"""The attention that a Swin paid, exactly: its windows' maps, put back where they lie in the image.

As in `explain.attention`, the forward pass stays on fused attention, and the rows are computed beside it from its very
queries, keys, bias and mask.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from patchlight.config import Size
from patchlight.errors import PatchlightError
from patchlight.explain.attention import AttentionMaps, Layers, Queries, resolve_layers, token_indices
from patchlight.models.swin import Swin, WindowHeads, Windows

WINDOWS_AT_ONCE = 64
"""Whose matrices are in memory together: bounds the memory, changes nothing."""


def window_attention(
    model: Swin,
    image_BCHW: Tensor,
    layers: Layers = -1,
    queries: Queries = "windows",
    heads: Literal["all", "mean"] = "all",
    *,
    values: bool = False,
) -> AttentionMaps:
    """What the patches of one stage attended to; `attention` calls this for a Swin.

    `queries` are patches of that stage, or "windows": every window's map, the mean over the patches that ask, all in
    one picture. A patch's row is zero outside of its window. Where `uneven_windows="plain"`, padding takes a share
    and rows sum to less than one.
    """
    wanted = resolve_layers(layers, model.config.depth)
    stages = {model.config.stage_of(layer) for layer in wanted}
    grids = model.config.stage_grids((image_BCHW.shape[-2], image_BCHW.shape[-1]))
    if len(stages) > 1:
        sizes = ", ".join(
            f"{start} to {start + depth - 1} ({h} x {w})"
            for start, depth, (h, w) in zip(model.config.stage_starts, model.config.depths, grids, strict=True)
        )
        raise PatchlightError(
            f"layers={layers!r} are of stages with different grids; ask for those of one stage at a time: {sizes}"
        )
    (stage,) = stages
    grid = grids[stage]
    asked = _resolve_queries(queries, grid)
    rows: dict[int, Tensor] = {}
    kept_values: dict[int, Tensor] = {}

    def keep(index: int, layer: WindowHeads, windows: Windows, x_BhwD: Tensor) -> None:
        if index not in wanted:
            return
        rows_BAQN = _stitched(layer, windows) if asked is None else _rows_of(layer, windows, asked)
        rows[index] = rows_BAQN.mean(1, keepdim=True) if heads == "mean" else rows_BAQN
        if values:
            v_BhwD = windows.join(layer.v_BWAnE.transpose(2, 3).flatten(3))
            kept_values[index] = v_BhwD.flatten(1, 2).unflatten(2, (layer.v_BWAnE.shape[2], -1)).transpose(1, 2)

    x_BhwD = model.encode(image_BCHW, keep)
    return AttentionMaps(
        weights=torch.stack([rows[layer] for layer in wanted]),
        grid=grid,
        num_prefix=0,
        layers=wanted,
        queries=() if asked is None else tuple(asked),
        tokens=x_BhwD.flatten(1, 2),
        patch_size=model.config.patch_pixels(model.config.image_size, stage),
        values=torch.stack([kept_values[layer] for layer in wanted]) if values else None,
    )


def _resolve_queries(queries: Queries, grid: Size) -> list[int] | None:
    """Patches in reading order; None for the windows' maps."""
    if queries == "windows":
        return None
    if queries == "all":
        return list(range(grid[0] * grid[1]))
    if isinstance(queries, str):
        raise PatchlightError(
            f"queries={queries!r}: a Swin has patches alone; ask for 'windows', 'all', or a patch, such as (0, 0)"
        )
    return token_indices(queries, 0, grid)


def _places(windows: Windows, device: torch.device) -> Tensor:
    """For each place in each window the patch that stands there, in reading order; h * w for padding: place_Wn."""
    count = windows.grid[0] * windows.grid[1]
    number_1hw1 = 1 + torch.arange(count, device=device).view(1, *windows.grid, 1)
    place_Wn = windows.split(number_1hw1)[0, :, :, 0] - 1
    return place_Wn.where(place_Wn >= 0, count)


def _stitched(layer: WindowHeads, windows: Windows) -> Tensor:
    """The mean row of all patches: maps_BA1N."""
    device, count = layer.q_BWAnE.device, windows.grid[0] * windows.grid[1]
    place_Wn = _places(windows, device)
    shares = []
    for some in torch.arange(len(place_Wn), device=device).split(WINDOWS_AT_ONCE):
        asks_W1n1 = (place_Wn[some] < count)[:, None, :, None]
        shares.append(layer.rows(some).where(asks_W1n1, 0).sum(3))
    share_BAM = torch.cat(shares, 1).transpose(1, 2).flatten(2) / count
    maps_BAN = share_BAM.new_zeros(*share_BAM.shape[:2], count + 1)
    return maps_BAN.index_copy(2, place_Wn.flatten(), share_BAM)[:, :, None, :count]


def _rows_of(layer: WindowHeads, windows: Windows, asked: Sequence[int]) -> Tensor:
    """The rows of some patches: rows_BAQN."""
    device, count = layer.q_BWAnE.device, windows.grid[0] * windows.grid[1]
    place_Wn = _places(windows, device)
    asked_Q = torch.tensor(asked, device=device)
    where_QM = place_Wn.flatten() == asked_Q[:, None]
    spot_Q = where_QM.int().argmax(1)
    window_Q, within_Q = spot_Q // place_Wn.shape[1], spot_Q % place_Wn.shape[1]
    needed, number_Q = window_Q.unique(return_inverse=True)
    rows_BWAnn = layer.rows(needed)
    rows_QBAn = rows_BWAnn[:, number_Q, :, within_Q]  # torch puts the axis of two indices apart in front
    rows_QBAN = rows_QBAn.new_zeros(*rows_QBAn.shape[:3], count + 1)
    target_QBAn = place_Wn[window_Q][:, None, None].expand_as(rows_QBAn)
    return rows_QBAN.scatter(3, target_QBAn, rows_QBAn)[..., :count].permute(1, 2, 0, 3)
