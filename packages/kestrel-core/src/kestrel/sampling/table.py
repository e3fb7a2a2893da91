"""A table of short lists, one per row, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["RowLists"]


class RowLists:
    """One list of D-tuples per row, padded with ``fill`` to a common length that doubles when a list outgrows it.

    ``values`` is [rows, K, D]. Only ``set`` writes it: one copy per call, when a row is taken or given back.
    """

    def __init__(
        self, rows: int, fill: Sequence[float], *, device: torch.device, dtype: torch.dtype = torch.int64
    ) -> None:
        self._fill = torch.tensor(fill, dtype=dtype, device=device)
        self.values = self._fill.repeat(rows, 1, 1)
        self._filled = [0] * rows

    def set(self, row: int, items: Sequence[Sequence[float]]) -> None:
        """Replace the list of ``row``."""
        if not items and not self._filled[row]:
            return
        self._grow(len(items))
        width = max(len(items), self._filled[row])
        padded = self._fill.repeat(width, 1)
        if items:
            padded[: len(items)] = torch.tensor(items, dtype=padded.dtype, device=padded.device)
        self.values[row, :width] = padded
        self._filled[row] = len(items)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The lists of ``rows``: [N, K, D], a copy."""
        return self.values.index_select(0, rows)

    def _grow(self, length: int) -> None:
        rows, have, _ = self.values.shape
        if length <= have:
            return
        more = 1 << (length - 1).bit_length()
        wider = self._fill.repeat(rows, more, 1)
        wider[:, :have] = self.values
        self.values = wider
