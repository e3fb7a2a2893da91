"""When works run out of time."""

from __future__ import annotations

import heapq

__all__ = ["Deadlines"]


class Deadlines:
    """A heap of (time, work id). Ended works stay until their time comes, which is why ids are checked by callers."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, work_id: int, deadline: float | None) -> None:
        """Remember ``work_id``, unless it may take forever."""
        if deadline is not None:
            heapq.heappush(self._heap, (deadline, work_id))

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
