"""sample_process for models on a CPU: ranges are slices of the row, instead of masks over the vocabulary.

Values are those of sample_process, but for rounding. Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.ops.sample_process import sample_process
from kestrel.ops.sample_tables import RowList, SampleTables
from kestrel.sampling.params import Needs
from kestrel.sampling.ranges import Ranges, complement, overlaps, ranges_of
from kestrel.spi.decoding import TokenSet

__all__ = ["process_on_host"]

Floats = NDArray[np.float32]
Processed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def process_on_host(
    logits_NV: torch.Tensor, rows: torch.Tensor, tables: SampleTables, needs: Needs
) -> Processed:
    """As sample_process gives them for tables in the host's memory."""
    if needs & Needs.PENALTIES:
        processed_NV, _, _, first_N = sample_process(logits_NV, rows, tables, penalties=True)
    else:
        first_N = logits_NV.amax(1).float()
        processed_NV = logits_NV.to(torch.float32, copy=True)
    values_NV = processed_NV.numpy()
    with np.errstate(invalid="ignore", over="ignore"):  # rows that are not finite fail by their status
        for values_V, row in zip(values_NV, rows.tolist(), strict=True):
            _process(values_V, row, tables, needs)
    best_N, ids_N = processed_NV.max(dim=1)
    return processed_NV, ids_N, best_N, first_N


def _process(values_V: Floats, row: int, tables: SampleTables, needs: Needs) -> None:
    """Everything but penalties, in place."""
    index = int(tables.index_R[row])
    if needs & Needs.BIAS:
        biases = _on(tables.biases, row, index)
        added = biases[:, 1].astype(np.int32).view(np.float32)
        for token, value in zip(biases[:, 0].tolist(), added, strict=True):
            values_V[token] += value
    for start, end in _banned(row, index, tables, needs):
        values_V[start:end] = -np.inf
    if needs & Needs.LOGIT_RULES:
        for group, unless in tables.prefers:
            wanted = _entries(group, row)
            if len(wanted):
                _prefer(values_V, _ranges(wanted), _ranges(_entries(unless, row)))


def _banned(row: int, index: int, tables: SampleTables, needs: Needs) -> Iterator[tuple[int, int]]:
    if needs & Needs.STATIC:
        yield from _ranges(_on(tables.statics, row, index))
    if needs & Needs.HOST:
        yield from _ranges(_entries(tables.hosts, row))
    if needs & Needs.AUTOMATA:
        bank, states = tables.bank, tables.states_RA[row].tolist()
        for place, number in enumerate(_entries(tables.automata, row)[:, 0].tolist()):
            at = int(bank.base_A[number]) + states[place]
            yield from _ranges(bank.bounds_SK2[at, : int(bank.num_bounds_S[at])].numpy())


def _prefer(values_V: Floats, group: Ranges, unless: Ranges) -> None:
    """Mask what is outside of ``group`` where the group wins; ids of ``unless`` are on neither side."""
    size = len(values_V)
    group, free = (ranges_of(TokenSet(tuple(part)), size) for part in (group, unless))
    inside = overlaps(group, complement(free, size))
    outside = overlaps(complement(group, size), complement(free, size))
    if not inside:
        return
    mine = np.concatenate([values_V[start:end] for start, end in inside])
    best = mine.max()
    mass = best if np.isneginf(best) else best + np.log(np.exp(mine - best).sum())
    if mass > max((values_V[start:end].max() for start, end in outside), default=-np.inf):
        for start, end in outside:
            values_V[start:end] = -np.inf


def _entries(row_list: RowList, row: int) -> NDArray[np.int64]:
    """What counts of a row's list: [K, D]."""
    entries: NDArray[np.int64] = row_list.items_RKD[row, : int(row_list.length_R[row])].numpy()
    return entries


def _on(row_list: RowList, row: int, index: int) -> NDArray[np.int64]:
    """Entries whose window, their last two words, holds ``index``."""
    entries = _entries(row_list, row)
    return entries[(entries[:, 2] <= index) & (index < entries[:, 3])]


def _ranges(entries: NDArray[np.int64]) -> Ranges:
    return [(start, end) for start, end in entries[:, :2].tolist()]
