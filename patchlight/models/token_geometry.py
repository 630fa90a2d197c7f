"""How the tokens of a batch lie on its images: what attention, positions and pooling know beside the tokens.

Shapes: h w patch grid, P = h * w patches in reading order, N tokens (prefix tokens, then patches), D width, A heads,
E = D / A, B batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from patchlight.config import Size


@dataclass(frozen=True)
class TokenGeometry:
    """How the tokens of one batch lie on the image."""

    grid: Size
    """The patch grid that the whole batch is laid out on."""
    num_prefix: int
    device: torch.device
    grids: Sequence[Size]
    """One grid if every image fills `grid`, else each image's own, lying in the upper left corner of `grid`."""
    valid_BN: Tensor | None = None
    """False where a token holds no pixel of its image; None if every token holds some."""
    rope: tuple[Tensor, Tensor] | None = None
    """What turns queries and keys (1 or B, 1, N, E): cosines, and sines that are negative in the first half."""
    offsets_NN: Tensor | None = None
    """For each pair of tokens the row of a relative table that holds its bias."""
    segments_BN: Tensor | None = None
    """In rows that hold several images (packing.py) the one that each token is of: it attends to no other."""
    counts_BN: Tensor | None = None
    """Weight of each token in attention, if they differ (merging.py, video.py)."""

    @property
    def every_image_fills_the_grid(self) -> bool:
        return list(self.grids) == [self.grid]

    def mask_B11N(self) -> Tensor | None:
        """Which tokens may be attended to, for `scaled_dot_product_attention`; None if all."""
        return None if self.valid_BN is None else self.valid_BN[:, None, None, :]

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """The same, with packed rows kept apart (B, 1, N, N), or what is added to the scores of tokens that count for
        more or less than one (B, 1, 1, N): attention is then what it would be on as many equal tokens."""
        if self.counts_BN is not None:
            return self.counts_BN.log()[:, None, None].to(dtype)
        if self.segments_BN is not None:
            return self.segments_BN[:, None, :, None] == self.segments_BN[:, None, None]
        return self.mask_B11N()

    def picture_BDhw(self, x_BND: Tensor) -> Tensor:
        """The patch tokens, without the prefix, where they lie on the image."""
        return x_BND[:, self.num_prefix :].transpose(1, 2).unflatten(2, self.grid)


def lay_tokens(grid: Size, grids: Sequence[Size], num_prefix: int, device: torch.device) -> TokenGeometry:
    """The geometry of a batch, without rotations; see `TokenGeometry` for what the grids are."""
    geometry = TokenGeometry(grid=grid, num_prefix=num_prefix, device=device, grids=grids)
    if geometry.every_image_fills_the_grid:
        return geometry
    filled_BP = lay_out(lambda own: torch.ones(math.prod(own), 1, dtype=torch.bool, device=device), geometry)[..., 0]
    return replace(geometry, valid_BN=F.pad(filled_BP, (num_prefix, 0), value=True))


def lay_out(table_for: Callable[[Size], Tensor], geometry: TokenGeometry) -> Tensor:
    """Tables of each image's own grid on the grid of the batch: (1 or B, P, ...), zeros where an image has no patch."""
    if geometry.every_image_fills_the_grid:
        return table_for(geometry.grid)[None]
    height, width = geometry.grid
    tables = [
        F.pad(table_for((h, w)).unflatten(0, (h, w)), (0, 0, 0, width - w, 0, height - h)) for h, w in geometry.grids
    ]
    return torch.stack(tables).flatten(1, 2)


def grid_coordinates(grid: Size, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The row and the column of each patch, in reading order: rows_P, columns_P."""
    rows = torch.arange(grid[0], device=device, dtype=torch.float32)
    columns = torch.arange(grid[1], device=device, dtype=torch.float32)
    # Not `repeat_interleave`, which ONNX gets wrong for sizes that it does not know.
    return rows[:, None].expand(*grid).reshape(-1), columns[None].expand(*grid).reshape(-1)


def is_same_grid(one: Size, other: Size) -> bool:
    """Whether they are equal. Of sizes that `torch.export` leaves open they are only if they always are, for an
    equality that holds by chance would be built into what is exported."""
    if torch.compiler.is_dynamo_compiling() or not torch.compiler.is_compiling():
        return tuple(one) == tuple(other)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))
