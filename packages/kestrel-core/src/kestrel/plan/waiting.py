"""The order of waiting sequences: higher priority first, older first among equals, and age makes up for priority."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

__all__ = ["WaitQueue"]

T = TypeVar("T")

AGEING_S = 30.0  # waiting this long is worth one priority level
SPARE = 64  # removed entries that are not worth a look through the heap


class WaitQueue(Generic[T]):
    """A heap of waiting entries. ``push`` and ``pop`` cost O(log n), ``remove`` O(1) on average: what was removed
    leaves the heap when its turn comes, or when there is more of it than of what waits.

    Everything ages at one rate, so an entry's place relative to another never changes: priority plus age compares
    as priority minus time of submission, which is fixed. That is why no clock is needed here.
    """

    def __init__(self, ageing_s: float = AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._heap: list[tuple[float, int, int]] = []
        self._entries: dict[int, T] = {}

    def push(self, key: int, entry: T, *, priority: int, submitted: float, arrival: int) -> None:
        """Add ``entry`` under ``key``; ``arrival`` breaks ties, smallest first. A returned entry keeps its place."""
        assert key not in self._entries, f"{key} waits already"
        self._entries[key] = entry
        heapq.heappush(self._heap, (submitted - priority * self._ageing_s, arrival, key))

    def peek(self) -> T | None:
        """The entry that is next, or None."""
        while self._heap:
            entry = self._entries.get(self._heap[0][2])
            if entry is not None:
                return entry
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T:
        """Remove and return the next entry; IndexError when nothing waits."""
        if self.peek() is None:
            raise IndexError("nothing waits")
        return self._entries.pop(heapq.heappop(self._heap)[2])

    def remove(self, key: int) -> T | None:
        """Take ``key`` out of the queue wherever it is; None when it does not wait."""
        entry = self._entries.pop(key, None)
        if len(self._heap) > 2 * len(self._entries) + SPARE:
            self._heap = [place for place in self._heap if place[2] in self._entries]
            heapq.heapify(self._heap)
        return entry

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[T]:
        """Everything that waits, in no particular order."""
        return list(self._entries.values())
