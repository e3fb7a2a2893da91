"""What the device keeps per row of the running batch: page tables, the last sampled ids and bins, and who lives."""

from __future__ import annotations

import numpy as np
import torch

from kestrel.runner.mirror import to_device
from kestrel.runner.states import StateMap
from kestrel.state import Lease

__all__ = ["RowTables"]


class RowTables:
    """Device tables of ``max_rows`` rows and a scratch row behind them, which is never live.

    ``last_ids`` [R] and ``last_aux`` [R, W]: what sampling produced last, the next decode step's input. ``live`` int64
    [R]: 1 while a row may write state; sampling clears it at a stop id or a fault. ``tables``: [R, max_pages] page
    ids per group; ``version`` moves when one changed.
    """

    def __init__(
        self, states: StateMap, *, max_rows: int, max_len: int, aux_width: int, device: torch.device
    ) -> None:
        rows = max_rows + 1
        pages = -(-max_len // states.page_size) + 1
        self._states, self._device = states, device
        self.scratch = max_rows
        self.last_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_aux = torch.zeros(rows, aux_width, dtype=torch.int64, device=device)
        self.live = torch.zeros(rows, dtype=torch.int64, device=device)
        self.hosts = [np.zeros((rows, pages), dtype=np.int32) for _ in states.groups]
        self.tables = [to_device(host, device) for host in self.hosts]
        self.version = 0
        self._sent: list[int] = [-1] * rows
        self._lengths: list[int] = [0] * rows

    def bind(self, row: int, lease: Lease) -> None:
        """Give ``row`` to a new lease."""
        self._sent[row] = -1
        if self.last_aux.shape[1]:
            self.last_aux[row] = 0
        self.send(row, lease)

    def send(self, row: int, lease: Lease) -> None:
        """Bring the page tables of ``row`` up to date; cheap when the lease's did not change."""
        if self._sent[row] == lease.version:
            return
        self._sent[row] = lease.version
        self.version += 1
        for name, host, table in zip(self._states.groups, self.hosts, self.tables, strict=True):
            pages = lease.table(name)
            held = max(len(pages), self._lengths[row])
            host[row, : len(pages)] = pages
            host[row, len(pages) : held] = 0
            if self._device.type != "cpu":
                table[row, :held].copy_(to_device(host[row, :held].copy(), self._device))
        self._lengths[row] = len(pages) if self._states.groups else 0

    def unbind(self, row: int) -> None:
        """``row`` has no sequence any more: whatever still names it writes to scratch."""
        self._sent[row] = -1
        self.live[row] = 0
