"""What one sequence holds, and the moments at which that changes: reserve, commit, finish, close."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lease"]


class Lease:
    """Everything a sequence holds. Made by ``StateCache.open``; closed exactly once (more often does nothing).

    ``cached``: positions that came from the prefix cache. ``computed``: positions whose step committed.
    ``capacity``: positions reserved. ``version`` moves when a page table changed.
    """

    cached: int
    computed: int
    version: int

    @property
    def capacity(self) -> int:
        """Positions that have a place now."""
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        """``close`` or ``finish`` was called (pins may still hold the pages)."""
        raise NotImplementedError

    def reserve(self, end: int) -> bool:
        """True when positions [0, ``end``) have a place in every paged and window state, evicting cached pages.

        False, and unchanged, when a pool is dry.
        """
        raise NotImplementedError

    def table(self, name: str) -> NDArray[np.int32]:
        """Page ids of state ``name`` in order of position (0: released behind the window); a read-only view."""
        raise NotImplementedError

    def state_slot(self, name: str) -> int:
        """The live slot of recurrent state ``name``."""
        raise NotImplementedError

    def stores(self, start: int, end: int) -> list[tuple[int, int]]:
        """(position, slot) of the checkpoints that the launch computing (``start``, ``end``] shall store.

        The same for every recurrent state. Call it for each launch that is made, in order.
        """
        raise NotImplementedError

    def cross_entry(self, name: str) -> tuple[int, bool]:
        """(entry, is new) of cross state ``name``; new until ``cross_written``. Entry 0 without cross media."""
        raise NotImplementedError

    @property
    def cross_len(self) -> int:
        """Valid positions of the cross entry."""
        raise NotImplementedError

    def cross_written(self, length: int) -> None:
        """The cross entry now holds ``length`` positions, for everyone who shares it."""
        raise NotImplementedError

    def commit(self, computed: int) -> None:
        """The step that computed positions up to ``computed`` committed: they become cached, and shared.

        The keys of those positions are appended before. Window pages wholly behind the window are released.
        Nothing happens on a closed lease.
        """
        raise NotImplementedError

    def finish(self, *, exact: bool) -> None:
        """End a turn at ``computed``: a node there, with the live recurrent state when ``exact``; then close.

        ``exact``: the live state has consumed the committed positions, all and only those.
        """
        raise NotImplementedError

    def pin(self) -> None:
        """A step in flight names this lease: nothing it holds is freed before the matching ``unpin``."""
        raise NotImplementedError

    def unpin(self) -> None:
        """The step committed (or failed)."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back, now or at the last ``unpin``."""
        raise NotImplementedError

