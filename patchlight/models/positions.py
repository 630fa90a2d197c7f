"""Where a patch lies, told to the model in four ways: a learned table, sines and cosines, rotations, a bias.

Rotations and biases come in two forms each, fixed or learned frequencies, and a table or an MLP of offsets.

Every scheme is a pure function of the patch grid (h, w), and so works for any image size. `GridMemory` keeps what was
computed for a grid; `TokenGeometry` is what attention and pooling have to know about a batch beside its tokens.

Shapes: h w patch grid, P = h * w patches in reading order, N tokens (prefix tokens, then patches), D width, A heads,
E = D / A, B batch.
"""

import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.config import Size, ViTConfig
from patchlight.models.fresh import draw


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
    """For how many tokens each one counts, where not all count for one (merging.py, video.py)."""

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
    down = torch.arange(1 - height, height, device=device, dtype=torch.float32).repeat_interleave(2 * width - 1)
    across = torch.arange(1 - width, width, device=device, dtype=torch.float32).repeat(2 * height - 1)
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


def resample(table_PD: Tensor, old: Size, new: Size, how: str = "antialiased") -> Tensor:
    """A table made for one grid, for another, bicubically or, if `how` says so, linearly.

    The same numbers as `F.interpolate`, written as two matrix products: those also export, run on every device, have
    deterministic gradients, and are right for a grid of one column, which torch 2.13 gets wrong on the CPU. They are
    taken in float64, which neither autocast nor TF32 touches (in float32 on Apple's GPUs, which have no other).
    """
    if tuple(old) == tuple(new):  # the grids themselves: 8x2 and 4x4 have as many patches and are not the same
        return table_PD
    exact = torch.float32 if table_PD.device.type == "mps" else torch.float64
    weights = {"antialiased": cubic_weights, "plain": plain_cubic_weights, "linear": linear_weights}[how]
    down, across = (weights(a, b, table_PD.device, exact) for a, b in zip(old, new, strict=True))
    width = table_PD.shape[1]
    columns_ywD = (down @ table_PD.to(exact).reshape(old[0], old[1] * width)).reshape(new[0], old[1], width)
    return (across @ columns_ywD).reshape(new[0] * new[1], width).to(table_PD.dtype)


def cubic_weights(old: int, new: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """How much each of `old` samples counts for each of `new` ones, antialiased: the kernel widens when shrinking."""
    centres = (torch.arange(new, device=device, dtype=dtype) + 0.5) * (old / new)
    samples = torch.arange(old, device=device, dtype=dtype) + 0.5
    weights = keys_kernel((samples[None, :] - centres[:, None]).abs() / torch.sym_max(old / new, 1.0), -0.5)
    return weights / weights.sum(1, keepdim=True)


def plain_cubic_weights(
    old: int, new: int, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The same without antialiasing: four samples each, and the border counts for what lies beyond it."""
    centres = (torch.arange(new, device=device, dtype=dtype) + 0.5) * (old / new)
    samples = torch.arange(-2, old + 2, device=device, dtype=dtype) + 0.5
    weights = keys_kernel((samples[None, :] - centres[:, None]).abs(), -0.75)
    before, inside, after = weights.split([2, old, 2], 1)
    first = F.pad(before.sum(1, keepdim=True), (0, old - 1))
    last = F.pad(after.sum(1, keepdim=True), (old - 1, 0))
    return inside + first + last


def linear_weights(old: int, new: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The two nearest samples each, by distance; beyond the border its own sample counts."""
    centres = ((torch.arange(new, device=device, dtype=dtype) + 0.5) * (old / new)).clamp(0.5, old - 0.5)
    samples = torch.arange(old, device=device, dtype=dtype) + 0.5
    return (1 - (samples[None, :] - centres[:, None]).abs()).clamp(min=0)


def keys_kernel(distance: Tensor, a: float) -> Tensor:
    """Keys' cubic convolution kernel: 1 at distance 0, and 0 from distance 2 on."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


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
    return rows.repeat_interleave(grid[1]), columns.repeat(grid[0])


class GridMemory:
    """Keeps what was computed for a grid, for the last few grids, as long as the table it came from stays the same.

    Nothing is kept in training (fused optimizers change a table without a trace), while gradients flow into the table
    (each step needs its own graph) or under torch.compile (the computation is part of the graph). In evaluation a
    changed table is known by its version and its memory; only an edit through `.data`, which hides itself from
    autograd, is hidden from us too: `clear()` after one.
    """

    def __init__(self, size: int = 16) -> None:
        self._size = size
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self._table: weakref.ref[Tensor] | None = None
        self._state: tuple[object, ...] = ()
        self._kept: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()

    def __getstate__(self) -> int:
        return self._size  # a copied or saved model starts with an empty memory

    def __setstate__(self, size: int) -> None:
        self.__init__(size)  # type: ignore[misc]

    def recall(
        self,
        grid: Size,
        device: torch.device,
        compute: Callable[[], Tensor],
        table: Tensor | None = None,
        *,
        training: bool = False,
    ) -> Tensor:
        """`compute()`, or what it gave the last time for this grid, device and state of the table."""
        if torch.compiler.is_compiling():
            return compute()
        state: tuple[object, ...] = ()
        if table is not None:
            if training or table.is_inference() or (torch.is_grad_enabled() and table.requires_grad):
                self.clear()
                return compute()
            try:
                state = (table._version, table.data_ptr(), table.dtype)
            except RuntimeError:  # a tensor of torch.func's transforms has no memory of its own
                return compute()
        # A tensor made in inference mode cannot take part in training later, hence the mode in the key.
        key = (tuple(grid), device, torch.is_inference_mode_enabled())
        with self._lock:
            if table is not None and (state != self._state or self._table is None or self._table() is not table):
                self.clear()
                self._state, self._table = state, weakref.ref(table)
            if key not in self._kept:
                self._kept[key] = compute()
            self._kept.move_to_end(key)
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
            return self._kept[key]


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
            and geometry.grid == self.grid
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
