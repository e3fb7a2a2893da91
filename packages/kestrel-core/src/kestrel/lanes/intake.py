"""The thread-safe door of a lane: what callers on other threads asked for since the last tick."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kestrel.errors import EngineBusyError, EngineStoppedError, KestrelError

__all__ = ["Intake"]

W = TypeVar("W")


class Intake(Generic[W]):
    """Submissions and cancellations on their way to the device thread, and how many works wait in all.

    ``wake`` is called after each; the device thread sets it.
    """

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._lock = threading.Lock()
        self._waiting = 0
        self._submitted: deque[W] = deque()
        self._cancelled: deque[int] = deque()
        self._closed: KestrelError | None = None
        self.wake: Callable[[], None] = _nothing

    @property
    def waiting(self) -> int:
        """Works submitted and not admitted."""
        return self._waiting

    def submit(self, work: W, *, exempt: bool) -> None:
        """Take ``work``. Raises EngineBusyError when the queue is full (unless ``exempt``), or why it is closed."""
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if self._waiting >= self._max_queue and not exempt:
                raise EngineBusyError(
                    f"{self._waiting} requests wait; max_queue is {self._max_queue}. Retry later, or raise it."
                )
            self._waiting += 1
            self._submitted.append(work)
        self.wake()

    def cancel(self, work_id: int) -> None:
        """The caller gave ``work_id`` up."""
        self._cancelled.append(work_id)
        self.wake()

    def left_queue(self, count: int = 1) -> None:
        """``count`` works were admitted or ended in the queue."""
        with self._lock:
            self._waiting -= count

    def returned(self) -> None:
        """A preempted work waits again."""
        with self._lock:
            self._waiting += 1

    def close(self, error: KestrelError | None = None) -> None:
        """Refuse what comes from now on."""
        with self._lock:
            self._closed = error or EngineStoppedError("the model is shutting down and takes no new requests")

    @property
    def is_empty(self) -> bool:
        """Nothing came since the last look; without a lock, for the idle check of every tick."""
        return not self._submitted and not self._cancelled

    def submitted(self) -> list[W]:
        """What was submitted since the last look, in order."""
        return _drained(self._submitted)

    def cancelled(self) -> list[int]:
        """What was cancelled since the last look."""
        return _drained(self._cancelled)


D = TypeVar("D")


def _drained(queue: deque[D]) -> list[D]:
    found: list[D] = []
    while queue:
        found.append(queue.popleft())
    return found


def _nothing() -> None:
    pass
