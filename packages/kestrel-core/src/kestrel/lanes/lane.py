"""What a device thread needs of a lane."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kestrel.errors import KestrelError

__all__ = ["Lane"]


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
