"""Chunks of a prefill launch, and the host arrays that describe them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel.runner.rows import RowTables
from kestrel.runner.states import StateMap
from kestrel.spi.batch import RowExtent
from kestrel.state import Lease

__all__ = ["ChunkArrays", "ChunkRun", "arrays_of"]

NO_MEDIA = -1


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


@dataclass(slots=True, kw_only=True)
class ChunkArrays:
    """A launch of T tokens of B chunks, on the host.

    ``tokens``: by name, with T as the last axis but for ``aux`` [T, W]: ``ids``, ``media_rows``, ``positions``
    [P, T], ``slots`` [groups, T], ``range_ends`` (where some chunk has ranges). ``sequences``: by name, [B]: ``rows``,
    ``computed``, ``state_slots``, ``entries``, ``cross_lens``, ``adapters``. ``lengths`` of the chunks.
    """

    tokens: dict[str, NDArray[Any]]
    aux: NDArray[np.int64]
    sequences: dict[str, NDArray[Any]]
    lengths: list[int]
    longest: int
    stores: tuple[tuple[int, int, int], ...]
    extents: tuple[RowExtent, ...]
    has_media: bool


def arrays_of(chunks: Sequence[ChunkRun], states: StateMap, rows: RowTables) -> ChunkArrays:
    """What ``chunks`` bring to their launch, in order."""
    tokens: dict[str, NDArray[Any]] = {
        "ids": np.concatenate([chunk.ids for chunk in chunks]),
        "media_rows": np.concatenate([_media_rows(chunk) for chunk in chunks]),
        "positions": np.concatenate([chunk.positions for chunk in chunks], axis=1),
        "slots": _slots(chunks, states, rows),
    }
    if any(chunk.ranges for chunk in chunks):
        tokens["range_ends"] = np.concatenate([_range_ends(chunk) for chunk in chunks])
    leases = [chunk.lease for chunk in chunks]
    slot_of = states.recurrent[0] if states.recurrent else ""
    entry_of = states.cross[0] if states.cross else ""
    sequences: dict[str, NDArray[Any]] = {
        "rows": np.array([chunk.row for chunk in chunks], dtype=np.int64),
        "computed": np.array([chunk.start for chunk in chunks], dtype=np.int32),
        "state_slots": _of_leases(leases, lambda lease: lease.state_slot(slot_of) if slot_of else 0),
        "entries": _of_leases(leases, lambda lease: lease.cross_entry(entry_of)[0] if entry_of else 0),
        "cross_lens": _of_leases(leases, lambda lease: lease.cross_len).astype(np.int32),
        "adapters": np.zeros(len(chunks), dtype=np.int64),
    }
    return ChunkArrays(
        tokens=tokens,
        aux=np.concatenate([chunk.aux for chunk in chunks]),
        sequences=sequences,
        lengths=[len(chunk.ids) for chunk in chunks],
        longest=max(chunk.end for chunk in chunks),
        stores=tuple(
            (index, position - chunk.start, slot)
            for index, chunk in enumerate(chunks)
            for position, slot in chunk.stores
        ),
        extents=tuple(RowExtent(len(chunk.ids), chunk.start, chunk.ranges) for chunk in chunks),
        has_media=any(chunk.media_rows is not None for chunk in chunks),
    )


def _slots(chunks: Sequence[ChunkRun], states: StateMap, rows: RowTables) -> NDArray[np.int64]:
    size = states.page_size
    places = [np.divmod(np.arange(chunk.start, chunk.end), size) for chunk in chunks]
    slots = np.empty((len(rows.hosts), sum(len(chunk.ids) for chunk in chunks)), dtype=np.int64)
    for group, table in enumerate(rows.hosts):
        parts = [
            table[chunk.row, page].astype(np.int64) * size + offset
            for chunk, (page, offset) in zip(chunks, places, strict=True)
        ]
        slots[group] = np.concatenate(parts)
    return slots


def _of_leases(leases: Sequence[Lease | None], value: Callable[[Lease], int]) -> NDArray[np.int64]:
    return np.array([0 if lease is None else value(lease) for lease in leases], dtype=np.int64)


def _media_rows(chunk: ChunkRun) -> NDArray[np.int64]:
    if chunk.media_rows is None:
        return np.full(len(chunk.ids), NO_MEDIA, dtype=np.int64)
    return chunk.media_rows


def _range_ends(chunk: ChunkRun) -> NDArray[np.int32]:
    ends = np.zeros(len(chunk.ids), dtype=np.int32)
    for start, end in chunk.ranges:
        ends[start - chunk.start : end - chunk.start] = end
    return ends
