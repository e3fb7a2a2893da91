"""What a device thread needs of a lane, and what callers on other threads may ask of any."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from kestrel.errors import KestrelError
from kestrel.lanes.intake import Intake

__all__ = ["Lane", "QueuedLane"]

W = TypeVar("W")


class Lane(ABC):
    """Drives one model, a tick at a time."""

    wake: Callable[[], None]

    @abstractmethod
    def tick(self) -> bool:
        """One round: commit, plan, launch. True while there is more to do without anything new coming in."""

    @abstractmethod
    def recover(self, error: BaseException) -> None:
        """A tick raised ``error``: end what runs with it, and be fit for the next tick."""

    @abstractmethod
    def abort(self, error: KestrelError) -> None:
        """End everything with ``error`` at the next tick, and refuse what comes later."""

    @abstractmethod
    def pause(self) -> None:
        """Launch nothing until ``resume``."""

    @abstractmethod
    def resume(self) -> None:
        """Go on launching."""

    @property
    @abstractmethod
    def next_deadline(self) -> float | None:
        """When a tick is due although nothing came in (``time.monotonic`` seconds)."""


class QueuedLane(Lane, Generic[W]):
    """A lane behind an intake. What it does itself is safe on any thread; the rest is the subclass's."""

    def __init__(self, max_queue: int) -> None:
        self._intake: Intake[W] = Intake(max_queue)
        self._paused = False
        self._aborted: KestrelError | None = None
        self._idle = threading.Condition()

    @property
    def wake(self) -> Callable[[], None]:
        """Called when something came in; set by the device thread."""
        return self._intake.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._intake.wake = wake

    def cancel(self, work_id: int) -> None:
        """End ``work_id`` as cancelled; nothing happens when it has ended."""
        self._intake.cancel(work_id)

    def abort(self, error: KestrelError) -> None:
        """End everything with ``error`` at the next tick, and refuse what comes later with it."""
        self._intake.close(error)  # first: who sees ``_aborted`` finds everything that ever came in
        self._aborted = error
        self._intake.wake()

    def pause(self) -> None:
        """Launch nothing until ``resume``; what is in flight still commits, timeouts and cancellations still count."""
        self._paused = True

    def resume(self) -> None:
        """Go on launching."""
        self._paused = False
        self._intake.wake()

    def drain(self) -> None:
        """Refuse new works; those taken run to their end (``wait_idle``)."""
        self._intake.close()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """True once the lane is idle, False after ``timeout_s``. Not on the device thread."""
        with self._idle:
            return self._idle.wait_for(lambda: self.is_idle, timeout_s)

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Nothing runs, waits, is in flight or on its way in."""

    def _came_to_rest(self) -> None:
        """Tell whoever waits for the lane to be idle."""
        with self._idle:
            self._idle.notify_all()
