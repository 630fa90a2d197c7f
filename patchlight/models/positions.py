"""Where a patch lies, told to the model in four ways: a learned table, sines and cosines, rotations, a bias.

Rotations and biases come in two forms each, fixed or learned frequencies, and a table or an MLP of offsets.

Every scheme is a pure function of the patch grid (h, w), and so works for any image size; tables that were learned for
one grid are resampled to others (resampling.py), and what was computed for a grid is kept (grid_memory.py).

Shapes: h w patch grid, P = h * w patches in reading order, N tokens (prefix tokens, then patches), D width, A heads,
E = D / A, B batch.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.config import Size, ViTConfig
from patchlight.models.fresh import draw
from patchlight.models.grid_memory import GridMemory
from patchlight.models.resampling import resample
from patchlight.models.token_geometry import TokenGeometry, grid_coordinates, is_same_grid, lay_out


def sincos_2d(grid: Size, width: int, base: float = 10000.0, device: torch.device | None = None) -> Tensor:
    """Fixed positions (P, D): the first half of a row tells the patch's row, the second half its column."""
    rows_P, columns_P = grid_coordinates(grid, device)
    frequencies = base ** -(torch.arange(width // 4, device=device, dtype=torch.float32) / (width // 4))
    down, across = rows_P.outer(frequencies), columns_P.outer(frequencies)
    return torch.cat([down.sin(), down.cos(), across.sin(), across.cos()], 1)


def rope_2d(
    grid: Size,
    head_width: int,
    base: float = 100.0,
    coordinates: str = "index",
    counted: Size | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Angles (P, E / 2) by which each pair of a query's or key's numbers is turned: by row, then by column.

    `counted` is a grid whose patches are counted in place of the image's own.
    """
    rows_P, columns_P = grid_coordinates(grid, device)
    if counted is not None:
        rows_P, columns_P = rows_P / grid[0] * counted[0], columns_P / grid[1] * counted[1]
    elif coordinates == "centred":
        # From the first patch's centre to the last's, so that an image twice as large keeps the same angles.
        rows_P, columns_P = (
            2 * math.pi * (2 * (along + 0.5) / count - 1)
            for along, count in zip((rows_P, columns_P), grid, strict=True)
        )
    frequencies = base ** -(torch.arange(head_width // 4, device=device, dtype=torch.float32) / (head_width // 4))
    return torch.cat([rows_P.outer(frequencies), columns_P.outer(frequencies)], 1)


def rotate(x_BANE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + E/2) of each head's numbers by the angles in `rope`, given as `cos_and_sin` gives them.

    In memory a token's heads lie side by side, and so they are left: attention answers in the layout of its queries,
    and any other would have to be copied back. Three kernels, since a small model takes longer to launch them than to
    run them.
    """
    cos, sin = (table.transpose(1, 2) for table in rope)
    x_BNAE = x_BANE.transpose(1, 2)
    first, second = x_BNAE.chunk(2, -1)
    return torch.addcmul(x_BNAE * cos, torch.cat([second, first], -1), sin).transpose(1, 2)


def cos_and_sin(angles: Tensor) -> Tensor:
    """(..., E / 2) to (..., 2 E): the cosines of each pair's two numbers, then their sines with the signs of a turn."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos, -sin, sin], -1)


def log_offsets(grid: Size, device: torch.device | None = None, *, measure: Size | None = None) -> Tensor:
    """The offsets (down, across) between patches in the order of a relative table, spaced by logarithms: (T, 2).

    With `measure`, offsets are first counted in eighths of the farthest on a grid of that size, whose logarithm is then
    about 1 (Swin V2).
    """
    height, width = grid
    rows, columns = grid_coordinates((2 * height - 1, 2 * width - 1), device)
    down, across = rows - (height - 1), columns - (width - 1)
    if measure is not None:
        down, across = 8 * down / max(1, measure[0] - 1), 8 * across / max(1, measure[1] - 1)
    offsets_T2 = torch.stack([down, across], 1)
    logarithms_T2 = offsets_T2.sign() * offsets_T2.abs().log1p()
    return logarithms_T2 if measure is None else logarithms_T2 / math.log(8)


def relative_index(
    grid: Size, num_prefix: int, device: torch.device | None = None, *, largest: Size | None = None
) -> Tensor:
    """For each pair of tokens the row of a relative table that holds its bias: index_NN.

    The table's rows are the offsets (down, across) from -(h-1), -(w-1) to h-1, w-1; then, where there are prefix
    tokens, three for prefix-to-patch, patch-to-prefix and prefix-to-prefix. The table is the grid's own, or that of the
    `largest` grid that it has rows for.
    """
    (height, width), (rows_P, columns_P) = largest or grid, grid_coordinates(grid, device)
    down_PP = (rows_P[:, None] - rows_P[None, :]).long() + height - 1
    across_PP = (columns_P[:, None] - columns_P[None, :]).long() + width - 1
    offsets = (2 * height - 1) * (2 * width - 1)
    index_NN = F.pad(down_PP * (2 * width - 1) + across_PP, (num_prefix, 0, num_prefix, 0))
    index_NN[:num_prefix, num_prefix:] = offsets
    index_NN[num_prefix:, :num_prefix] = offsets + 1
    index_NN[:num_prefix, :num_prefix] = offsets + 2
    return index_NN


class LearnedPositions(nn.Module):
    """One learned row a token, prefix tokens first; the patches' rows are resampled to other grids."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.num_prefix, self.how = config.grid, config.num_prefix_positions, config.position_resampling
        self.table = nn.Parameter(torch.zeros(self.num_prefix + math.prod(self.grid), config.width))
        self.memory = GridMemory()

    def reset_parameters(self) -> None:
        draw(self.table)

    def add_to_prefix(self, prefix_TD: Tensor) -> Tensor:
        """The prefix tokens, the first of them with their own rows added."""
        return prefix_TD + F.pad(self.table[: self.num_prefix], (0, 0, 0, len(prefix_TD) - self.num_prefix))

    def forward(self, geometry: TokenGeometry) -> Tensor:
        """Rows to add to the patches: (1 or B, P, D)."""
        rows_PD = self.table[self.num_prefix :]

        def rows_for(grid: Size) -> Tensor:
            resampled = functools.partial(resample, rows_PD, self.grid, grid, self.how)
            return self.memory.recall(grid, geometry.device, resampled, self.table, training=self.training)

        return lay_out(rows_for, geometry)


class SincosPositions(nn.Module):
    """Fixed sines and cosines of each patch's row and column."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.width = config.width
        self.memory = GridMemory()

    def forward(self, geometry: TokenGeometry) -> Tensor:
        """Rows to add to the patches: (1 or B, P, D)."""

        def rows_for(grid: Size) -> Tensor:
            return self.memory.recall(
                grid, geometry.device, lambda: sincos_2d(grid, self.width, device=geometry.device)
            )

        return lay_out(rows_for, geometry)


class RotaryPositions(nn.Module):
    """Cosines and sines that turn queries and keys, so that their products tell how far apart two patches lie."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.settings = (config.head_width, config.rope_base, config.rope_coordinates, config.rope_grid)
        self.grid, self.num_prefix = config.grid, config.num_prefix
        self.memory = GridMemory()
        self.table_NX = self._own_table(None)
        """The config's own grid, made once: a compiled model reads it, where it would compute it for every image."""

    def _own_table(self, device: torch.device | None) -> Tensor:
        with torch.inference_mode(False):  # a table made there could not take part in training later
            return _with_unturned_prefix(self._cos_and_sin(self.grid, device), self.num_prefix)

    def _cos_and_sin(self, grid: Size, device: torch.device | None) -> Tensor:
        return cos_and_sin(rope_2d(grid, *self.settings, device=device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryPositions":
        # Made anew where the model goes, in float32 whatever the model becomes: a rounded table could not be undone.
        self.table_NX = self._own_table(fn(torch.empty(0, device="cpu")).device)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, geometry: TokenGeometry) -> tuple[Tensor, Tensor]:
        """(1 or B, 1, N, E) each; prefix tokens lie nowhere and are not turned."""
        if (
            geometry.every_image_fills_the_grid
            and is_same_grid(geometry.grid, self.grid)
            and geometry.device == self.table_NX.device
        ):
            table_BNX = self.table_NX[None]
        else:

            def rows_for(grid: Size) -> Tensor:
                compute = functools.partial(self._cos_and_sin, grid, geometry.device)
                return self.memory.recall(grid, geometry.device, compute)

            table_BNX = _with_unturned_prefix(lay_out(rows_for, geometry), geometry.num_prefix)
        cos_B1NE, sin_B1NE = table_BNX[:, None].chunk(2, -1)
        return cos_B1NE, sin_B1NE


class MixedRotaryPositions(nn.Module):
    """One block's rotations, by learned mixtures of row and column, each head its own (Heo et al. 2024,
    arXiv:2403.13298)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.base = config.rope_base
        self.frequencies = nn.Parameter(torch.zeros(2, config.num_heads, config.head_width // 2))
        self.memory = GridMemory()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The frequencies of `rope_2d` on two axes at a right angle, which each head turns at random."""
        _, heads, half = self.frequencies.shape
        steps = torch.arange(half // 2, device=self.frequencies.device, dtype=torch.float32) / (half // 2)
        turn_A1 = 2 * math.pi * torch.rand(heads, 1, device=self.frequencies.device)
        axes_AX = torch.cat([turn_A1.expand(-1, half // 2), turn_A1.expand(-1, half // 2) + math.pi / 2], 1)
        sizes_X = (self.base**-steps).repeat(2)
        self.frequencies.copy_(torch.stack([sizes_X * axes_AX.sin(), sizes_X * axes_AX.cos()]))

    def forward(self, geometry: TokenGeometry) -> tuple[Tensor, Tensor]:
        """(1 or B, A, N, E) each."""
        heads, half = self.frequencies.shape[1:]

        def rows_for(grid: Size) -> Tensor:
            def compute() -> Tensor:
                (rows_P, columns_P), (down_AX, across_AX) = grid_coordinates(grid, geometry.device), self.frequencies
                angles_PAX = rows_P[:, None, None] * down_AX.float() + columns_P[:, None, None] * across_AX.float()
                cos_PAE, sin_PAE = cos_and_sin(angles_PAX).chunk(2, -1)
                return torch.cat([cos_PAE.flatten(1), sin_PAE.flatten(1)], 1)

            return self.memory.recall(grid, geometry.device, compute, self.frequencies, training=self.training)

        table_BNX = _with_unturned_prefix(lay_out(rows_for, geometry), geometry.num_prefix)
        cos_BANE, sin_BANE = table_BNX.unflatten(2, (2, heads, 2 * half)).permute(2, 0, 3, 1, 4)
        return cos_BANE, sin_BANE


def _with_unturned_prefix(cos_and_sin: Tensor, num_prefix: int) -> Tensor:
    """Cosines of one and sines of zero in front: (..., P, X) to (..., N, X)."""
    cos, sin = cos_and_sin.chunk(2, -1)
    unturned = (0, 0, num_prefix, 0)
    return torch.cat([F.pad(cos, unturned, value=1.0), F.pad(sin, unturned)], -1)


class RelativePositions(nn.Module):
    """A number for each head and each offset between two patches, added to the attention scores."""

    def rows_for(self, grid: Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers of every offset on a grid (T, A), and of the prefix tokens (3, A), or (0, A) without them."""
        raise NotImplementedError

    def forward(self, geometry: TokenGeometry) -> Tensor:
        """bias (1 or B, A, N, N), with -inf at tokens that hold no pixel."""
        assert geometry.offsets_NN is not None
        table_BTA = torch.stack([self._table_for(grid, geometry) for grid in geometry.grids])
        bias_BANN = table_BTA[:, geometry.offsets_NN].permute(0, 3, 1, 2)
        mask_B11N = geometry.mask_B11N()
        return bias_BANN if mask_B11N is None else bias_BANN.masked_fill(~mask_B11N, -torch.inf)

    def _table_for(self, grid: Size, geometry: TokenGeometry) -> Tensor:
        """The table for one image's grid, its offsets spread to those of the grid that the batch is laid out on."""
        own_TA, prefix_TA = self.rows_for(grid, geometry.device)
        above, beside = geometry.grid[0] - grid[0], geometry.grid[1] - grid[1]
        offsets = (2 * grid[0] - 1, 2 * grid[1] - 1)
        spread = F.pad(own_TA.unflatten(0, offsets), (0, 0, beside, beside, above, above))
        return torch.cat([spread.flatten(0, 1), prefix_TA])


class RelativeBias(RelativePositions):
    """Each offset's numbers learned by themselves (BEiT); resampled to other grids."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.offsets, self.how = (2 * config.grid[0] - 1, 2 * config.grid[1] - 1), config.position_resampling
        self.table = nn.Parameter(torch.zeros(math.prod(self.offsets) + 3 * (config.num_prefix > 0), config.num_heads))
        self.memory = GridMemory()

    def reset_parameters(self) -> None:
        draw(self.table)

    def rows_for(self, grid: Size, device: torch.device) -> tuple[Tensor, Tensor]:
        learned_TA, prefix_TA = self.table.tensor_split([math.prod(self.offsets)])
        offsets = (2 * grid[0] - 1, 2 * grid[1] - 1)
        resampled = functools.partial(resample, learned_TA, self.offsets, offsets, self.how)
        return self.memory.recall(grid, device, resampled, self.table, training=self.training), prefix_TA


class RelativeMLP(RelativePositions):
    """The numbers as an MLP of the offsets' logarithms, which knows every grid; none for prefix tokens."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.has_prefix = config.num_prefix > 0
        self.hidden = nn.Linear(2, config.relative_hidden)
        self.out = nn.Linear(config.relative_hidden, config.num_heads)

    def rows_for(self, grid: Size, device: torch.device) -> tuple[Tensor, Tensor]:
        offsets_T2 = log_offsets(grid, device).to(self.hidden.weight.dtype)
        rows_TA = self.out(self.hidden(offsets_T2).relu())
        return rows_TA, rows_TA.new_zeros(3 * self.has_prefix, rows_TA.shape[1])
