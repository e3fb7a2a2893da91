"""What the device keeps per row of the running batch: page tables, the last sampled ids and bins, and who lives."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.device import Staging
from kestrel.runner.states import StateMap
from kestrel.state import Lease

__all__ = ["RowTables"]


class RowTables:
    """Device tables of ``max_rows`` rows and a scratch row behind them, which is never live.

    ``last_ids`` [R] and ``last_aux`` [R, W]: what sampling produced last, the next decode step's input. ``live`` int64
    [R]: 1 while a row may write state; sampling clears it at a stop id or a fault. ``tables``: [R, max_pages] page
    ids per group; ``version`` moves when one changed. What the host changes here reaches the device with the next
    ``send`` of ``staging``, before the launch that it makes room for.
    """

    def __init__(
        self, states: StateMap, staging: Staging, *, max_rows: int, max_len: int, aux_width: int
    ) -> None:
        rows = max_rows + 1
        pages = -(-max_len // states.page_size) + 1
        self._states = states
        self.scratch = max_rows
        self.last_ids = torch.zeros(rows, dtype=torch.int64, device=staging.device)
        self._live = staging.table((rows,), np.int64)
        self._last_aux = staging.table((rows, aux_width), np.int64)
        self._tables = [staging.table((rows, pages), np.int32) for _ in states.groups]
        self.live, self.last_aux = self._live.tensor, self._last_aux.tensor
        self.hosts: list[NDArray[np.int32]] = [table.host for table in self._tables]
        self.tables = [table.tensor for table in self._tables]
        self.version = 0
        self._sent: list[int] = [-1] * rows
        self._lengths: list[int] = [0] * rows

    def bind(self, row: int, lease: Lease) -> None:
        """Give ``row`` to a new lease."""
        self._sent[row] = -1
        if self.last_aux.shape[1]:
            self._last_aux.host[row] = 0
            self._last_aux.touch(row)
        self.send(row, lease)

    def send(self, row: int, lease: Lease) -> None:
        """Bring the page tables of ``row`` up to date; cheap when the lease's did not change."""
        if self._sent[row] == lease.version:
            return
        self._sent[row] = lease.version
        self.version += 1
        for name, table in zip(self._states.groups, self._tables, strict=True):
            pages = lease.table(name)
            count, held = len(pages), max(len(pages), self._lengths[row])
            known = table.host[row]
            changed = np.flatnonzero(known[:count] != pages)
            start, stop = (int(changed[0]), int(changed[-1]) + 1) if len(changed) else (count, 0)
            known[start:stop] = pages[start:stop]
            if held > count:
                known[count:held] = 0
                stop = held
            if start < stop:
                table.touch(row, start, stop)
        self._lengths[row] = len(pages) if self._states.groups else 0

    def unbind(self, row: int) -> None:
        """``row`` has no sequence any more: whatever still names it writes to scratch."""
        self._sent[row] = -1
        self._live.host[row] = 0
        self._live.touch(row, can_wait=row != self.scratch)
