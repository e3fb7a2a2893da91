"""Reference counts over the numbered places of a pool: pages, state slots, cross entries."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Places"]


class Places:
    """Places 1 … ``total`` (0 is scratch); each is free, live (a lease holds it) or idle (only the cache does).

    The idle ones are a linked list in order of last use, inside two arrays whose index 0 is its head: constant time
    without the occasional long pause of a growing dictionary.
    """

    __slots__ = ("_newer", "_older", "cache_refs", "free", "lease_refs", "num_idle", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_idle = 0
        self.free = list(range(total, 0, -1))  # popped from the end: low ids first
        self.lease_refs = [0] * (total + 1)
        self.cache_refs = [0] * (total + 1)
        self._newer = [0] * (total + 1)  # of 0: the oldest
        self._older = [0] * (total + 1)  # of 0: the newest

    @property
    def available(self) -> int:
        """Places that a lease can get, by eviction if need be."""
        return len(self.free) + self.num_idle

    @property
    def live(self) -> int:
        """Places that leases hold."""
        return self.total - len(self.free) - self.num_idle

    def take(self) -> int:
        """A free place, held once by a lease."""
        place = self.free.pop()
        self.lease_refs[place] = 1
        return place

    def share(self, place: int) -> None:
        """One more lease holds ``place``, which is live or idle."""
        refs = self.lease_refs[place]
        if not refs:
            self._leave_idle(place)
        self.lease_refs[place] = refs + 1

    def release(self, place: int) -> None:
        """One lease less holds ``place``; with none left it is idle if the cache holds it, else free."""
        refs = self.lease_refs[place] - 1
        self.lease_refs[place] = refs
        if refs:
            assert refs > 0, f"place {place} was released more often than held"
        elif self.cache_refs[place]:
            self._join_idle(place)
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
            self._leave_idle(place)
            self.free.append(place)

    def touch(self, place: int) -> None:
        """``place`` was used now, if it is idle."""
        if self.cache_refs[place] and not self.lease_refs[place]:
            self._leave_idle(place)
            self._join_idle(place)

    def oldest_idle(self) -> int:
        """The idle place that was used longest ago; 0 when none is idle."""
        return self._newer[0]

    def idle(self) -> Iterator[int]:
        """The idle places, the one used longest ago first."""
        place = self._newer[0]
        while place:
            yield place
            place = self._newer[place]

    def _join_idle(self, place: int) -> None:
        newer, older = self._newer, self._older
        last = older[0]
        newer[last] = older[0] = place
        older[place], newer[place] = last, 0
        self.num_idle += 1

    def _leave_idle(self, place: int) -> None:
        newer, older = self._newer, self._older
        after, before = newer[place], older[place]
        newer[before], older[after] = after, before
        self.num_idle -= 1
