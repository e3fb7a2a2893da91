"""What one sequence holds, and the moments at which that changes: open, reserve, commit, finish, close."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kestrel.state.match import Match, match
from kestrel.state.tables import PageTable, WindowTable
from kestrel.state.trail import Trail

if TYPE_CHECKING:
    from kestrel.state.keys import KeyRun
    from kestrel.state.pools import Pools

__all__ = ["Holds", "Lease"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """What a lease holds, for checks: places of each pool (windows: per group), pages promised, pins on the tree."""

    pages: list[int]
    windows: list[list[int]]
    promised: list[int]
    slot: int
    pending: list[int]
    entry: int
    pins: int


class Lease:
    """Everything a sequence holds. Made by ``StateCache.open``; closed exactly once (more often does nothing).

    ``cached``: positions that came from the prefix cache. ``computed``: positions whose step committed.
    ``capacity``: positions reserved. ``version`` moves when a page table changed. ``is_closed``: ``close`` or
    ``finish`` was called, though pins may still hold everything.
    """

    __slots__ = (
        "_cross_entry",
        "_event",
        "_full",
        "_num_pages",
        "_pins",
        "_pools",
        "_settled",
        "_slot",
        "_trail",
        "_windows",
        "cached",
        "capacity",
        "computed",
        "is_closed",
        "keys",
        "version",
    )

    def __init__(self, pools: Pools, keys: KeyRun) -> None:
        self._pools = pools
        self.keys = keys
        self.cached = self.computed = self.capacity = self.version = 0
        self.is_closed = False
        self._full = PageTable()
        self._windows = tuple(WindowTable(group) for group in pools.windows)
        self._trail = (
            None if pools.tree is None else Trail(pools, pools.tree, keys, self._full, self._windows)
        )
        self._num_pages = 0
        self._slot = self._cross_entry = 0
        self._settled = 0  # ``computed`` when nodes and window pages were last brought up to date
        self._event = 0  # the next ``computed`` at which something is to be done
        self._pins = 0

    # -- open

    def acquire(self, limit: int, reserve: int) -> bool:
        """Take the longest cached prefix, ``reserve`` positions in all, a slot and an entry; False when any is used
        up (then only ``release`` is left to call). For ``StateCache.open``."""
        pools = self._pools
        if pools.slots is not None:
            self._slot = pools.slots.take_live()
            if not self._slot:
                return False
        if pools.cross is not None and self.keys.namespace.cross:
            self._cross_entry = pools.cross.acquire(self.keys.namespace)
            if not self._cross_entry:
                return False
        hit = Match() if pools.tree is None else match(pools.tree, self.keys, limit)
        checkpoint = 0 if hit.node is None else hit.node.checkpoint
        partial = hit.node if hit.end % pools.page_size else None
        sources = None if partial is None else (partial.page, tuple(partial.windows))
        self._share(hit)
        if not self.reserve(max(reserve, hit.end)):
            return False
        if sources is not None:
            self._copy_partial(*sources)
        if self._slot:
            pools.start_slot(self._slot, checkpoint)
        return True

    def _share(self, hit: Match) -> None:
        pools = self._pools
        self.cached = self.computed = self._settled = hit.end
        self._num_pages = len(hit.path)
        self.capacity = self._num_pages * pools.page_size
        if pools.full is not None:
            pages = [node.page for node in hit.path]
            self._full.extend(pages)
            for page in pages:
                pools.full.share(page)
        for group, window in enumerate(self._windows):
            window.share(hit.end, [node.windows[group] for node in hit.path], pools.page_size)
        if self._trail is not None:
            self._trail.begin(hit)
        self._event = self._next_event()

    def _copy_partial(self, page: int, windows: tuple[int, ...]) -> None:
        """Fill the first own page from the pages of the node inside it. They may have been evicted by now, yet
        nothing was launched that overwrites them."""
        pools, index = self._pools, self.cached // self._pools.page_size
        filled = self.cached % pools.page_size
        if pools.full is not None:
            pools.copy_page(None, page, self._full[index], filled)
        for window, source in zip(self._windows, windows, strict=True):
            if source:
                pools.copy_page(window.group.window, source, window.table[index], filled)

    # -- pages

    def reserve(self, end: int) -> bool:
        """True when positions [0, ``end``) have a place in every paged and window state, evicting cached pages.

        False, and unchanged, when a pool is dry.
        """
        if end <= self.capacity:
            return True
        assert not self.is_closed, "a closed lease reserves nothing"
        pools = self._pools
        num_pages = -(-end // pools.page_size)
        extra = num_pages - self._num_pages
        if pools.full is not None and extra > pools.full.available:
            return False
        if not all(window.can_promise(num_pages) for window in self._windows):
            return False
        if pools.full is not None:
            if pools.tree is not None and extra > len(pools.full.free):
                pools.tree.free_pages(extra)
            self._full.extend([pools.full.take() for _ in range(extra)])
        self._num_pages = num_pages
        self.capacity = num_pages * pools.page_size
        for group, window in enumerate(self._windows):
            window.promise(num_pages)
            self._cover(group, window)
        self.version += 1
        return True

    def _cover(self, group: int, window: WindowTable) -> None:
        """Give the window every page that launches may write to before the next page boundary commits."""
        pools = self._pools
        end = self.capacity
        if pools.max_ahead is not None:
            end = min(end, self._settled + pools.max_ahead + pools.page_size)
        extra = -(-end // pools.page_size) - window.table.size
        if extra <= 0:
            return
        places = window.group.places
        if pools.tree is not None and extra > len(places.free):
            pools.tree.free_window_pages(group, extra)
        window.table.extend([places.take() for _ in range(extra)])
        self.version += 1

    def table(self, name: str) -> NDArray[np.int32]:
        """Page ids of state ``name`` in order of position (0: released behind the window, or beyond ``max_ahead``);
        a read-only view of ``capacity`` / page size ids."""
        group = self._pools.window_of.get(name)
        return (self._full if group is None else self._windows[group].table).view(self._num_pages)

    # -- other states

    def state_slot(self, name: str) -> int:
        """The live slot of recurrent state ``name``."""
        assert self._slot, f"no recurrent state {name!r} is held"
        return self._slot

    def stores(self, start: int, end: int) -> list[tuple[int, int]]:
        """(position, slot) of the checkpoints that the launch computing (``start``, ``end``] shall store.

        The same for every recurrent state. Call it for each launch that is made, in order. What the budget of
        checkpoints cannot hold is left out.
        """
        return [] if self._trail is None else self._trail.stores(start, end)

    def cross_entry(self, name: str) -> tuple[int, bool]:
        """(entry, is new) of cross state ``name``; new until ``cross_written``. Entry 0 without cross media."""
        del name  # all cross states share the numbering
        return self._cross_entry, self._cross_entry != 0 and not self.cross_len

    @property
    def cross_len(self) -> int:
        """Valid positions of the cross entry."""
        cross = self._pools.cross
        return 0 if cross is None else cross.lengths[self._cross_entry]

    def cross_written(self, length: int) -> None:
        """The cross entry now holds ``length`` positions, for everyone who shares it."""
        cross = self._pools.cross
        assert cross is not None, "this model has no cross state"
        assert self._cross_entry, "this lease holds no cross entry"
        cross.written(self._cross_entry, length)

    # -- progress

    def commit(self, computed: int) -> None:
        """The step that computed positions up to ``computed`` committed: they become cached, and shared.

        The keys of those positions are appended before. Window pages wholly behind the window are released.
        Nothing happens on a closed lease.
        """
        if self.is_closed:
            return
        assert self.computed <= computed <= self.capacity, (
            f"{computed} of {self.capacity} positions, {self.computed}"
        )
        self.computed = computed
        if computed >= self._event:
            self._advance()

    def _advance(self) -> None:
        size = self._pools.page_size
        if self._trail is not None:
            assert self.computed <= len(self.keys), (
                f"{self.computed} positions committed, {len(self.keys)} keys"
            )
            self.version += self._trail.advance(self.computed)
        self._settled = self.computed
        for group, window in enumerate(self._windows):
            if window.release_before((self.computed - window.group.window + 1) // size):
                window.promise(self._num_pages)
                self.version += 1
            self._cover(group, window)
        self._event = self._next_event()

    def _next_event(self) -> int:
        size = self._pools.page_size
        boundary = (self.computed // size + 1) * size
        mark = None if self._trail is None else self._trail.next_mark()
        return boundary if mark is None else min(boundary, mark)

    def finish(self, *, exact: bool) -> None:
        """End a turn at ``computed``: a node there, with the live recurrent state when ``exact``; then close.

        ``exact``: the live state has consumed the committed positions, all and only those.
        """
        if self.is_closed:
            return
        if self._trail is not None and self.computed > self.cached:
            assert self.computed <= len(self.keys), (
                f"{self.computed} positions committed, {len(self.keys)} keys"
            )
            if self._trail.end_turn(self.computed, self._slot if exact else 0):
                self._slot = 0
        self.close()

    # -- end

    def pin(self) -> None:
        """A step in flight names this lease: nothing it holds is freed before the matching ``unpin``."""
        assert not self.is_closed, "a step names a closed lease"
        self._pins += 1

    def unpin(self) -> None:
        """The step committed (or failed)."""
        self._pins -= 1
        assert self._pins >= 0, "unpinned more often than pinned"
        if self.is_closed and not self._pins:
            self.release()

    def close(self) -> None:
        """Give everything back, now or at the last ``unpin``."""
        if not self.is_closed:
            self.is_closed = True
            if not self._pins:
                self.release()

    def release(self) -> None:
        """Give everything back now. For ``StateCache.open`` and this class."""
        pools = self._pools
        self.is_closed = True
        pools.leases.discard(self)
        if pools.full is not None:
            for page in self._full.pages():
                pools.full.release(page)
        for window in self._windows:
            window.close()
        if pools.slots is not None and self._slot:
            pools.slots.release_live(self._slot)
        if pools.cross is not None and self._cross_entry:
            pools.cross.release(self._cross_entry)
        if self._trail is not None:
            self._trail.close()

    def holds(self) -> Holds:
        """What this lease holds now. For checks."""
        trail = self._trail
        return Holds(
            pages=self._full.pages(),
            windows=[window.table.pages(window.first) for window in self._windows],
            promised=[window.promised for window in self._windows],
            slot=self._slot,
            pending=[] if trail is None else trail.pending,
            entry=self._cross_entry,
            pins=0 if trail is None else trail.num_pins,
        )
