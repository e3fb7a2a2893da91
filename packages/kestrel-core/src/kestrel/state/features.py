"""Encoder features of media items, shared between the sequences that show the same item."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch

__all__ = ["FeaturePool", "Features"]


@dataclass(eq=False, slots=True)
class Features:
    """Rows ``start`` to ``start + rows`` of the pool's tensor, held by ``refs`` sequences.

    ``is_written``: the encoder's output is there (in stream order).
    """

    key: Hashable
    start: int
    rows: int
    refs: int = 1
    is_written: bool = False


class FeaturePool:
    """One [rows, C] tensor of features by key (digest, adapter load). Rows of an item lie side by side.

    A batch takes ``tensor`` as its ``features_RC`` and ``start + offset`` as a token's media row. Items that nobody
    holds stay until their rows are needed; the least recently used leave first.
    """

    def __init__(self, rows: int, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros((rows, width), dtype=dtype, device=device)
        self._entries: dict[Hashable, Features] = {}
        self._idle: OrderedDict[Hashable, Features] = OrderedDict()  # held by nobody, oldest first
        self._gaps: list[tuple[int, int]] = [(0, rows)] if rows else []  # free (start, end), ascending, apart

    @property
    def rows(self) -> int:
        """Rows in all: no item with more can ever be placed."""
        return self.tensor.shape[0]

    def find(self, key: Hashable) -> Features | None:
        """The features of ``key``, held until ``release``; None when they must be encoded."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.refs += 1
            self._idle.pop(key, None)
        return entry

    def allocate(self, key: Hashable, rows: int) -> Features | None:
        """A place for ``rows`` features of ``key``, held until ``release``; None when what others hold leaves none."""
        assert key not in self._entries, "these features have a place: find it"
        start = self._first_fit(rows)
        while start is None and self._idle and rows <= self.rows:
            _, oldest = self._idle.popitem(last=False)
            self._forget(oldest)
            start = self._first_fit(rows)
        if start is None:
            return None
        entry = self._entries[key] = Features(key, start, rows)
        return entry

    def write(self, features: Features, x_RC: torch.Tensor) -> None:
        """Store encoded rows at their place."""
        assert x_RC.shape[0] == features.rows, f"{x_RC.shape[0]} rows for a place of {features.rows}"
        self.tensor[features.start : features.start + features.rows].copy_(x_RC)
        features.is_written = True

    def put(self, key: Hashable, x_RC: torch.Tensor) -> Features | None:
        """``allocate`` and ``write``."""
        entry = self.allocate(key, x_RC.shape[0])
        if entry is not None:
            self.write(entry, x_RC)
        return entry

    def release(self, features: Features) -> None:
        """Give a hold back. Written features stay until their rows are needed, others are forgotten."""
        features.refs -= 1
        assert features.refs >= 0, "features were released more often than held"
        if features.refs:
            return
        if features.is_written:
            self._idle[features.key] = features
        else:
            self._forget(features)

    def clear(self) -> None:
        """Forget what nobody holds."""
        while self._idle:
            self._forget(self._idle.popitem(last=False)[1])

    def check(self) -> None:
        """Raise AssertionError unless items and gaps tile the tensor, and the idle are those without a holder."""
        items = [(entry.start, entry.start + entry.rows) for entry in self._entries.values()]
        end = 0
        for start, stop in sorted(items + self._gaps):
            assert start == end, f"feature rows {end} to {start} belong to no item and no gap"
            end = stop
        assert end == self.rows, f"feature rows {end} to {self.rows} belong to no item and no gap"
        idle = {key for key, entry in self._entries.items() if not entry.refs}
        assert idle == set(self._idle), f"{len(self._idle)} idle items recorded, {len(idle)} counted"

    def _first_fit(self, rows: int) -> int | None:
        for i, (start, end) in enumerate(self._gaps):
            if end - start >= rows:
                self._gaps[i : i + 1] = [(start + rows, end)] if end - start > rows else []
                return start
        return None

    def _forget(self, entry: Features) -> None:
        del self._entries[entry.key]
        start, end = entry.start, entry.start + entry.rows
        i = bisect_left(self._gaps, (start, end))
        if i < len(self._gaps) and self._gaps[i][0] == end:
            end = self._gaps.pop(i)[1]
        if i > 0 and self._gaps[i - 1][1] == start:
            start = self._gaps.pop(i - 1)[0]
        insort(self._gaps, (start, end))
