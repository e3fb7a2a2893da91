"""Checkpoints of recurrent state: copies that an op makes as it passes a position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kestrel.spi.batch import RecurrentView

__all__ = ["Stores", "stores_of_all", "stores_of_row"]


@dataclass(frozen=True, slots=True)
class Stores:
    """Copies to make: of row ``rows_M``'s state after ``counts_M`` of its tokens to slot ``slots_M`` of ``pool``.

    All int64 on the pool's device. An entry of count 0 is padding.
    """

    pool: torch.Tensor
    rows_M: torch.Tensor
    counts_M: torch.Tensor
    slots_M: torch.Tensor

    def write(
        self, start: int, end: int, states: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        """Make the copies whose count lies in (``start``, ``end``]; all others write to scratch slot 0.

        ``states(rows_M, counts_M)`` gives states [M, …] after ``counts`` tokens counted from ``start``, 1 to
        ``end`` − ``start``.
        """
        passed = (self.counts_M > start) & (self.counts_M <= end)
        within = (self.counts_M - start).clamp(1, end - start)
        passing = states(self.rows_M, within).to(self.pool.dtype)
        self.pool.index_copy_(0, torch.where(passed, self.slots_M, 0), passing)


def stores_of_all(view: RecurrentView, pool: torch.Tensor) -> Stores | None:
    """The copies of all rows, from the device's list; None when the launch has none."""
    rows, counts, slots = view.stores.unbind(1)
    return Stores(pool, rows, counts, slots) if view.stores.shape[0] else None


def stores_of_row(view: RecurrentView, row: int, pool: torch.Tensor) -> Stores | None:
    """The copies of one row, from the host's list, for an op that runs this row alone (as row 0); None if none."""
    mine = [(count, slot) for b, count, slot in view.host_stores if b == row]
    if not mine:
        return None
    counts, slots = (
        torch.tensor(column, dtype=torch.int64, device=pool.device) for column in zip(*mine, strict=True)
    )
    return Stores(pool, torch.zeros_like(counts), counts, slots)
