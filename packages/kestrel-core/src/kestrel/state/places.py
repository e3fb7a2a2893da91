"""Reference counts over the numbered places of a pool: pages, state slots, cross entries."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Places"]


class Places:
    """Places 1 … ``total`` (0 is scratch); each is free, live (a lease holds it) or idle (only the cache does).

    ``idle`` is in order of last use, the oldest first.
    """

    __slots__ = ("cache_refs", "free", "idle", "lease_refs", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = list(range(total, 0, -1))  # popped from the end: low ids first
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.lease_refs = [0] * (total + 1)
        self.cache_refs = [0] * (total + 1)

    @property
    def available(self) -> int:
        """Places that a lease can get, by eviction if need be."""
        return len(self.free) + len(self.idle)

    @property
    def live(self) -> int:
        """Places that leases hold."""
        return self.total - len(self.free) - len(self.idle)

    def take(self) -> int:
        """A free place, held once by a lease."""
        place = self.free.pop()
        self.lease_refs[place] = 1
        return place

    def share(self, place: int) -> None:
        """One more lease holds ``place``, which is live or idle."""
        refs = self.lease_refs[place]
        if not refs:
            del self.idle[place]
        self.lease_refs[place] = refs + 1

    def release(self, place: int) -> None:
        """One lease less holds ``place``; with none left it is idle if the cache holds it, else free."""
        refs = self.lease_refs[place] - 1
        self.lease_refs[place] = refs
        if refs:
            assert refs > 0, f"place {place} was released more often than held"
        elif self.cache_refs[place]:
            self.idle[place] = None
        else:
            self.free.append(place)

    def cache(self, place: int) -> None:
        """The cache holds ``place`` (once more), which is live."""
        assert self.lease_refs[place] > 0, f"place {place} is cached but no lease wrote it"
        self.cache_refs[place] += 1

    def uncache(self, place: int) -> None:
        """The cache holds ``place`` once less; with no holder left it is free."""
        refs = self.cache_refs[place] - 1
        assert refs >= 0, f"place {place} was uncached more often than cached"
        self.cache_refs[place] = refs
        if not refs and not self.lease_refs[place]:
            del self.idle[place]
            self.free.append(place)

    def touch(self, place: int) -> None:
        """``place`` was used now, if it is idle."""
        if place in self.idle:
            self.idle.move_to_end(place)

    def oldest_idle(self) -> int:
        """The idle place that was used longest ago; 0 when none is idle."""
        return next(iter(self.idle), 0)
