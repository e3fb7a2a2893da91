"""Prefill launches: chunks of one or several sequences, side by side, from values that the host knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.runner.mirror import to_device
from kestrel.runner.rows import RowTables
from kestrel.runner.states import Places, StateMap
from kestrel.spi.batch import Batch, Limits, RowExtent
from kestrel.state import Lease

__all__ = ["ChunkRun", "prefill_batch"]


@dataclass(slots=True, kw_only=True)
class ChunkRun:
    """A chunk of one sequence: ``ids`` int64 [n] at positions from ``start`` on, after that many computed ones.

    ``aux`` int64 [n, W]; ``positions`` int64 [P, n]; ``media_rows`` int64 [n] rows of the feature pool (−1: text), or
    None. ``ranges``: bidirectional ranges inside the chunk. ``stores``: (position, slot) of checkpoints to keep.
    ``lease`` None: nobody's, on scratch. ``samples``: the last position yields a token. ``probes``: (place in the
    chunk, ids) to give log-probabilities of.
    """

    row: int
    lease: Lease | None
    start: int
    ids: NDArray[np.int64]
    aux: NDArray[np.int64]
    positions: NDArray[np.int64]
    media_rows: NDArray[np.int64] | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    stores: Sequence[tuple[int, int]] = ()
    samples: bool = False
    probes: Sequence[tuple[int, tuple[int, ...]]] = field(default_factory=tuple)

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.ids)


def prefill_batch(
    chunks: Sequence[ChunkRun],
    states: StateMap,
    rows: RowTables,
    features_RC: torch.Tensor | None,
    device: torch.device,
) -> Batch:
    """The batch of a prefill launch. ``features_RC`` is used when a chunk has media."""
    lengths = [len(chunk.ids) for chunk in chunks]
    longest = max(chunk.end for chunk in chunks)
    cu = _dev(np.cumsum([0, *lengths], dtype=np.int32), device)
    limits = Limits(
        max_rows=len(chunks), max_tokens=sum(lengths), max_query_len=max(lengths), max_context_len=longest
    )
    extents = tuple(RowExtent(len(chunk.ids), chunk.start, chunk.ranges) for chunk in chunks)
    has_media = features_RC is not None and any(chunk.media_rows is not None for chunk in chunks)
    host_stores = tuple(
        (index, position - chunk.start, slot)
        for index, chunk in enumerate(chunks)
        for position, slot in chunk.stores
    )
    row_ids = np.array([chunk.row for chunk in chunks], dtype=np.int64)
    aux_TW = np.concatenate([chunk.aux for chunk in chunks])
    width = -(-longest // states.page_size)
    places = Places(
        computed_B=_dev(np.array([chunk.start for chunk in chunks], dtype=np.int32), device),
        cu_seqlens=cu,
        limits=limits,
        extents=extents,
        slots=[_dev(_slots(chunks, table, states.page_size), device) for table in rows.hosts],
        tables=[_dev(table[row_ids, :width], device) for table in rows.hosts],
        state_slots_B=_dev(_state_slots(chunks, states), device),
        entries_B=_dev(_entries(chunks, states), device),
        lens_B=_dev(np.array([_cross_len(chunk) for chunk in chunks], dtype=np.int32), device),
        stores=_dev(np.array(host_stores, dtype=np.int64).reshape(-1, 3), device),
        host_stores=host_stores,
        bidirectional_end_T=_range_ends(chunks, device),
    )
    return Batch(
        ids_T=_dev(np.concatenate([chunk.ids for chunk in chunks]), device),
        aux_TW=_dev(aux_TW, device),
        media_rows_T=_dev(np.concatenate([_media_rows(chunk) for chunk in chunks]), device),
        positions_PT=_dev(np.concatenate([chunk.positions for chunk in chunks], axis=1), device),
        cu_seqlens=cu,
        states=states.views(places),
        adapter_slots_B=_dev(np.zeros(len(chunks), dtype=np.int64), device),
        limits=limits,
        features_RC=features_RC if has_media else None,
        extents=extents,
        has_aux=bool(aux_TW.any()),
    )


_dev = to_device


def _slots(chunks: Sequence[ChunkRun], table: NDArray[np.int32], page_size: int) -> NDArray[np.int64]:
    parts = []
    for chunk in chunks:
        at = np.arange(chunk.start, chunk.end)
        parts.append(table[chunk.row, at // page_size].astype(np.int64) * page_size + at % page_size)
    return np.concatenate(parts)


def _state_slots(chunks: Sequence[ChunkRun], states: StateMap) -> NDArray[np.int64]:
    if not states.recurrent:
        return np.zeros(len(chunks), dtype=np.int64)
    name = states.recurrent[0]
    return np.array([chunk.lease.state_slot(name) if chunk.lease else 0 for chunk in chunks], dtype=np.int64)


def _entries(chunks: Sequence[ChunkRun], states: StateMap) -> NDArray[np.int64]:
    if not states.cross:
        return np.zeros(len(chunks), dtype=np.int64)
    name = states.cross[0]
    entries = [chunk.lease.cross_entry(name)[0] if chunk.lease else 0 for chunk in chunks]
    return np.array(entries, dtype=np.int64)


def _cross_len(chunk: ChunkRun) -> int:
    return chunk.lease.cross_len if chunk.lease else 0


def _media_rows(chunk: ChunkRun) -> NDArray[np.int64]:
    return np.full(len(chunk.ids), -1, dtype=np.int64) if chunk.media_rows is None else chunk.media_rows


def _range_ends(chunks: Sequence[ChunkRun], device: torch.device) -> torch.Tensor | None:
    if not any(chunk.ranges for chunk in chunks):
        return None
    ends = []
    for chunk in chunks:
        part = np.zeros(len(chunk.ids), dtype=np.int32)
        for start, end in chunk.ranges:
            part[start - chunk.start : end - chunk.start] = end
        ends.append(part)
    return _dev(np.concatenate(ends), device)
