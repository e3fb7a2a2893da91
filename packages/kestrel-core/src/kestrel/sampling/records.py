"""One record of int64 words per row: named lists of tuples, each behind its length. The host writes, the device reads.

Shapes: R rows, K tuples of a list, D words of a tuple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kestrel.device import RowTable, Staging
from kestrel.ops.sample_tables import RowList

__all__ = ["Field", "Records", "bits_of", "pairs_of"]


@dataclass(frozen=True, slots=True)
class Field:
    """A list of up to ``width`` tuples; ``fill`` stands where there is none and must change nothing."""

    fill: tuple[int, ...]
    width: int = 1
    start: int = 0

    @property
    def stop(self) -> int:
        """The word behind the last one; the length comes first."""
        return self.start + 1 + self.width * len(self.fill)


class Records:
    """The records of all rows. A list that outgrows its field doubles the field, which moves ``generation``: tensors
    handed out before are stale then. What the device itself writes belongs in the first fields."""

    def __init__(self, staging: Staging, rows: int, fields: Mapping[str, Field]) -> None:
        self._staging, self._rows = staging, rows
        self.generation = 0
        self._fields: dict[str, Field] = {}
        self._table = self._laid_out(fields)

    def put(self, row: int, name: str, items: Sequence[Sequence[int]], *, can_wait: bool = False) -> None:
        """Replace a list of ``row``; every word of a tuple lies in int64. ``can_wait``: as ``RowTable.touch``."""
        field = self._fields[name]
        record = self._table.host[row]
        start, size, length = field.start, len(field.fill), len(items)
        before = int(record[start])
        if not length and not before:
            return
        if length > field.width:
            self._widen(name, length)
            self.put(row, name, items)
            return
        first, end, last = start + 1, start + 1 + length * size, start + 1 + before * size
        record[start] = length
        if length:
            record[first:end] = [word for item in items for word in item]
        if last > end:
            record[end:last] = field.fill * (before - length)
        self._table.touch(row, start, max(end, last), can_wait=can_wait)

    def clear(self, row: int) -> None:
        """Every list of ``row`` is empty; nobody names it until it is written again."""
        for name in self._fields:
            self.put(row, name, (), can_wait=True)

    def add(self, fields: Mapping[str, Field]) -> None:
        """More lists, empty in every row."""
        self._move({**self._fields, **fields})

    def list(self, name: str) -> RowList:
        """A list of every row on the device, valid for one generation."""
        field = self._fields[name]
        words_RK = self._table.tensor[:, field.start + 1 : field.stop]
        items_RKD = words_RK.view(-1, field.width, len(field.fill))
        return RowList(items_RKD=items_RKD, length_R=self._table.tensor[:, field.start])

    def _widen(self, name: str, length: int) -> None:
        wider = replace(self._fields[name], width=1 << (length - 1).bit_length())
        self._move({**self._fields, name: wider})

    def _move(self, fields: Mapping[str, Field]) -> None:
        """Lay ``fields`` out anew. The device's own words move on the device, behind what was written so far."""
        self._staging.flush()
        old_fields, old = self._fields, self._table
        self._table = self._laid_out(fields)
        for name, field in old_fields.items():
            start = self._fields[name].start
            stop = start + field.stop - field.start
            self._table.host[:, start:stop] = old.host[:, field.start : field.stop]
            if not self._staging.is_shared:
                self._table.tensor[:, start:stop] = old.tensor[:, field.start : field.stop]
        self.generation += 1

    def _laid_out(self, fields: Mapping[str, Field]) -> RowTable:
        """A table of blank records."""
        self._fields = {}
        blank: list[int] = []
        for name, field in fields.items():
            self._fields[name] = replace(field, start=len(blank))
            blank += [0, *field.fill * field.width]
        return self._staging.table((self._rows, len(blank)), np.int64, fill=blank)


def bits_of(value: float) -> int:
    """The bits of a float32 as a word."""
    with np.errstate(over="ignore"):  # larger than float32 is infinite
        return int(np.float32(value).view(np.int32))


def pairs_of(values: Sequence[float]) -> tuple[int, ...]:
    """The bits of float32 numbers, two to a word."""
    with np.errstate(over="ignore"):
        return tuple(np.array(values, dtype=np.float32).view(np.int64).tolist())
