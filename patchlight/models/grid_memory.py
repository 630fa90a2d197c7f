"""What was computed for a patch grid, kept as long as it holds."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from patchlight.config import Size


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
        """The cached result for this grid, device and version of the table; else `compute()`."""
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
