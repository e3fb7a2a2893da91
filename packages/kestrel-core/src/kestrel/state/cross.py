"""Entries of the cross-attention states: one per namespace with cross media, shared, the idle ones kept by last use."""

from __future__ import annotations

from kestrel.state.keys import Namespace
from kestrel.state.places import Places

__all__ = ["CrossEntries"]


class CrossEntries:
    """Which entry holds whose encoded media, and how many positions of it are valid (0: not written yet).

    Like the features of a ``FeaturePool`` they outlive their leases whether or not prefixes are cached: a window is
    encoded once for its language, its text and the times of its words.
    """

    __slots__ = ("_entries", "_owners", "lengths", "places")

    def __init__(self, total: int) -> None:
        self.places = Places(total)
        self.lengths = [0] * (total + 1)
        self._entries: dict[Namespace, int] = {}
        self._owners: dict[int, Namespace] = {}

    def acquire(self, namespace: Namespace) -> int:
        """The entry of ``namespace``, shared or new, evicting the oldest idle one; 0 when all are in use."""
        entry = self._entries.get(namespace, 0)
        if entry:
            self.places.share(entry)
            return entry
        if not self.places.free and not self._evict():
            return 0
        entry = self.places.take()
        self._entries[namespace] = entry
        self._owners[entry] = namespace
        return entry

    def written(self, entry: int, length: int) -> None:
        """``entry`` holds ``length`` positions; from now on it outlives its leases."""
        assert length > 0, "a cross entry holds at least one position"
        if not self.lengths[entry]:
            self.places.cache(entry)
        self.lengths[entry] = length

    def release(self, entry: int) -> None:
        """One lease less; an entry that nobody keeps is forgotten."""
        self.places.release(entry)
        if not self.places.lease_refs[entry] and not self.places.cache_refs[entry]:
            self._forget(entry)

    def clear(self) -> None:
        """Forget every idle entry."""
        while self._evict():
            pass

    def entries(self) -> dict[Namespace, int]:
        """Every entry in use or idle, by namespace."""
        return dict(self._entries)

    def _evict(self) -> bool:
        entry = self.places.oldest_idle()
        if entry:
            self.places.uncache(entry)
            self._forget(entry)
        return bool(entry)

    def _forget(self, entry: int) -> None:
        self.lengths[entry] = 0
        del self._entries[self._owners.pop(entry)]
