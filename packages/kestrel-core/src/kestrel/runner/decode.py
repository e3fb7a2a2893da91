"""Decode launches: buffers for a fixed number of rows, advanced in place while the same sequences go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.runner.extents import DecodeExtents
from kestrel.runner.mirror import PackedMirror
from kestrel.runner.rows import RowTables
from kestrel.runner.states import Places, StateMap
from kestrel.spi.backend import OpCall
from kestrel.spi.batch import Batch, Limits
from kestrel.state import Lease

__all__ = ["DecodeRow", "DecodeStage"]

ONE_64, ONE_32 = np.ones((), np.int64), np.ones((), np.int32)  # numpy adds a Python 1 slower
LEAST_CONTEXT = 128  # ceilings of a launch's context double from here, so that a batch is rarely rebuilt


@dataclass(slots=True)
class DecodeRow:
    """A sequence as it enters a decode stage: ``computed`` positions exist, ``offsets`` per position row. ``has_aux``:
    its tokens may carry bins."""

    row: int
    computed: int
    offsets: tuple[int, ...]
    lease: Lease
    has_aux: bool = False


class DecodeStage:
    """One token for each of up to ``size`` rows; columns beyond the rows given are padding on the scratch row.

    ``block`` rows: P positions, one slot per page-table group, the state slot. Positions and slots of a launch are
    written by the host: it knows where each row stands without knowing what was sampled.

    ``captured``: for programs that are captured once. Its batch says the same for the stage's whole life: no host
    copies, a context of ``max_len``. Only what is in the tensors changes.
    """

    def __init__(
        self,
        states: StateMap,
        rows: RowTables,
        *,
        size: int,
        position_rows: int,
        max_len: int,
        tracks_life: bool,
        device: torch.device,
        row_inputs: OpCall,
        is_deterministic: bool = False,
        captured: bool = False,
    ) -> None:
        self._states, self._rows, self._device = states, rows, device
        self.size, self._max_len = size, max_len
        self._is_deterministic, self.is_captured = is_deterministic, captured
        self._tracks_life, self._row_inputs = tracks_life, row_inputs
        self._make_buffers(position_rows)
        self._extents = None if captured else DecodeExtents(self._small[0])
        self._tables: list[torch.Tensor] = []
        self._tables_version = -1
        self._batch: Batch | None = None
        self._has_aux = False
        self._ceiling = 0
        self._longest = max_len if captured else 0
        self.needs: int | None = None
        self.rows_host: list[int] = []
        self._set_views(size)

    def _make_buffers(self, position_rows: int) -> None:
        """What the host writes, and what is on the device beside it; none of it moves later."""
        states, rows, size, device = self._states, self._rows, self.size, self._device
        self._num_positions = position_rows
        self._moving = position_rows + len(states.groups)
        self._mirror = PackedMirror(
            {
                "block": ((self._moving + 1, size), np.int64),
                "fixed": ((3, size), np.int64),  # row, cross entry, adapter slot
                "small": ((2, size), np.int32),  # computed, cross length
            },
            device,
        )
        host, tensor = self._mirror.host, self._mirror.tensor
        self._block, self._fixed, self._small = host["block"], host["fixed"], host["small"]
        self._block_D, self._fixed_D, self._small_D = tensor["block"], tensor["fixed"], tensor["small"]
        self._shown = torch.zeros_like(self._block_D) if self._tracks_life else self._block_D
        self.rows = self._fixed_D[0]
        self._ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._aux = torch.zeros(size, rows.last_aux.shape[1], dtype=torch.int64, device=device)
        self._no_media = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._cu = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._stores = torch.zeros(0, 3, dtype=torch.int64, device=device)
        self._no_aux = torch.zeros_like(self._aux)

    def _set_views(self, count: int) -> None:
        """``count`` columns have sequences."""
        self.count = count
        self._advancing = self._block[: self._moving, :count]
        self.computed = self._small[0, :count]

    def fill(self, entries: Sequence[DecodeRow]) -> None:
        """Take new sequences, in order; the rest of the columns become padding."""
        count, states = len(entries), self._states
        assert 0 < count <= self.size
        if count < self.size:
            self._clear()
        self._set_views(count)
        self._fixed[0, :count] = [entry.row for entry in entries]
        self.computed[:] = [entry.computed for entry in entries]
        offsets_PB = np.array([entry.offsets for entry in entries], dtype=np.int64).T
        self._block[: self._num_positions, :count] = self.computed + offsets_PB
        self._place(np.arange(count))
        if states.recurrent:
            name = states.recurrent[0]
            self._block[self._moving, :count] = [entry.lease.state_slot(name) for entry in entries]
        if states.cross:
            name = states.cross[0]
            self._fixed[1, :count] = [entry.lease.cross_entry(name)[0] for entry in entries]
            self._small[1, :count] = [entry.lease.cross_len for entry in entries]
        self._renew(int(self.computed.max()) + 1, any(entry.has_aux for entry in entries))

    def blank(self) -> None:
        """Make every column padding."""
        self._clear()
        self._set_views(0)
        self._renew(1, False)

    def _clear(self) -> None:
        for array in (self._block, self._fixed, self._small):
            array[...] = 0
        self._fixed[0] = self._rows.scratch

    def _renew(self, longest: int, has_aux: bool) -> None:
        """Other rows are in the columns."""
        self.rows_host = self._fixed[0].tolist()
        self.needs = None
        self._tables_version = -1
        if self.is_captured:
            return
        self._longest = longest
        if has_aux != self._has_aux:
            self._has_aux = has_aux
            if self._batch is not None:
                self._batch = self._with_aux(self._batch, has_aux)

    def enter_pages(self, columns: Sequence[int]) -> None:
        """Point ``columns``, which stand at the first position of a page, at its first slot."""
        size = self._states.page_size
        for column in columns:
            row, page_idx = self.rows_host[column], int(self.computed[column]) // size
            for group, table in enumerate(self._rows.hosts):
                self._block[self._num_positions + group, column] = int(table[row, page_idx]) * size

    def _place(self, columns: NDArray[np.intp]) -> None:
        """Point ``columns`` at the slots of their positions, from the page tables of their rows."""
        rows, size = self._fixed[0, columns], self._states.page_size
        page_idx, offset = np.divmod(self.computed[columns], size)
        for group, table in enumerate(self._rows.hosts):
            pages = table[rows, page_idx].astype(np.int64)
            self._block[self._num_positions + group, columns] = pages * size + offset

    def ready(self) -> Batch:
        """The batch of the next launch, its input ids and life taken from what sampling left on the device."""
        self.push()
        return self.take_in(self._has_aux)

    def push(self) -> None:
        """Bring what the host wrote to the device."""
        self._mirror.push()
        if self._extents is not None:
            self._extents.renew()
        if self._batch is None or self._longest > self._ceiling:
            self._batch = self._build()
        if self._tables_version != self._rows.version:
            self._gather()

    def take_in(self, has_aux: bool) -> Batch:
        """The batch, once what sampling left of the rows was gathered: ids, bins if ``has_aux``, life. Device
        operations alone, so that a captured program begins with it."""
        assert self._batch is not None, "nothing was pushed yet"
        rows = self._rows
        if self._tracks_life:
            self._row_inputs(self.rows, rows.last_ids, rows.live, self._block_D, self._ids, self._shown)
        else:
            torch.index_select(rows.last_ids, 0, self.rows, out=self._ids)
        if has_aux:
            torch.index_select(rows.last_aux, 0, self.rows, out=self._aux)
        return self._batch if has_aux == self._has_aux else self._with_aux(self._batch, has_aux)

    def forget(self) -> None:
        """Drop what ops kept with the batch's views: after a capture, it lies in memory that only the program needs."""
        assert self._batch is not None, "nothing was pushed yet"
        for view in self._batch.states.values():
            view.memo.clear()

    def _with_aux(self, batch: Batch, has_aux: bool) -> Batch:
        return replace(batch, has_aux=has_aux, aux_TW=self._aux if has_aux else self._no_aux)

    def advance(self) -> None:
        """After a launch: every row stands one position further. Slots that leave their page need ``enter_pages``."""
        np.add(self._advancing, ONE_64, out=self._advancing)
        np.add(self.computed, ONE_32, out=self.computed)
        self._longest += not self.is_captured

    def _gather(self) -> None:
        for table, staged in zip(self._rows.tables, self._tables, strict=True):
            torch.index_select(table[:, : staged.shape[1]], 0, self.rows, out=staged)
        self._tables_version = self._rows.version

    def _raise_ceiling(self) -> Limits:
        """What the next launches stay below, with page tables as wide as that."""
        self._ceiling = LEAST_CONTEXT
        while self._ceiling < self._longest:
            self._ceiling *= 2
        self._ceiling = max(self._longest, min(self._ceiling, self._max_len))
        width = -(-self._ceiling // self._states.page_size)
        self._tables = [
            torch.zeros(self.size, min(width, table.shape[1]), dtype=torch.int32, device=self._device)
            for table in self._rows.tables
        ]
        self._tables_version = -1
        return Limits(
            max_rows=self.size,
            max_tokens=self.size,
            max_query_len=1,
            max_context_len=self._ceiling,
            is_deterministic=self._is_deterministic,
        )

    def _build(self) -> Batch:
        limits = self._raise_ceiling()
        places = Places(
            computed_B=self._small_D[0],
            cu_seqlens=self._cu,
            limits=limits,
            extents=self._extents,
            slots=list(self._shown[self._num_positions : self._moving].unbind(0)),
            tables=self._tables,
            state_slots_B=self._shown[self._moving],
            entries_B=self._fixed_D[1],
            lens_B=self._small_D[1],
            stores=self._stores,
        )
        return Batch(
            ids_T=self._ids,
            aux_TW=self._aux if self._has_aux else self._no_aux,
            media_rows_T=self._no_media,
            positions_PT=self._shown[: self._num_positions],
            cu_seqlens=self._cu,
            states=self._states.views(places),
            adapter_slots_B=self._fixed_D[2],
            limits=limits,
            extents=self._extents,
            has_aux=self._has_aux,
        )
