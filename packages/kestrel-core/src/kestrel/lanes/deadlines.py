"""When works run out of time."""

from __future__ import annotations

import heapq
from collections.abc import Collection

__all__ = ["Deadlines"]

SPARE = 64  # dead entries that are not worth a look through the heap


class Deadlines:
    """A heap of (time, work id). Works that are not ``alive`` any more leave it when their time comes, or when there
    are more of them than of the others; callers look whether an expired id still lives."""

    def __init__(self, alive: Collection[int]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int]] = []

    def add(self, work_id: int, deadline: float | None) -> None:
        """Remember ``work_id``, unless it may take forever."""
        if deadline is None:
            return
        heapq.heappush(self._heap, (deadline, work_id))
        if len(self._heap) > 2 * len(self._alive) + SPARE:
            self._heap = [entry for entry in self._heap if entry[1] in self._alive]
            heapq.heapify(self._heap)

    @property
    def next(self) -> float | None:
        """The next time at which a work may run out."""
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> list[int]:
        """The works whose time has come."""
        found: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[1])
        return found
