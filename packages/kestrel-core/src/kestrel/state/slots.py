"""Slots of the recurrent states: one live slot per sequence, the rest checkpoints in the prefix tree.

Both are the same places of the same tensors, so a live state becomes a checkpoint without a copy.
"""

from __future__ import annotations

from kestrel.state.places import Places
from kestrel.state.tree import PrefixTree

__all__ = ["StateSlots"]


class StateSlots:
    """At most ``max_live`` live slots and ``max_checkpoints`` checkpoints, stored or promised to a launch."""

    __slots__ = ("max_checkpoints", "max_live", "num_live", "places")

    def __init__(self, max_live: int, max_checkpoints: int) -> None:
        self.places = Places(max_live + max_checkpoints)
        self.max_live = max_live
        self.max_checkpoints = max_checkpoints
        self.num_live = 0

    @property
    def num_pending(self) -> int:
        """Slots that launches in flight fill with checkpoints."""
        return self.places.live - self.num_live

    def take_live(self) -> int:
        """A slot for a sequence's live state; 0 when all are used."""
        if self.num_live == self.max_live:
            return 0
        self.num_live += 1
        return self.places.take()

    def release_live(self, slot: int) -> None:
        """The sequence is gone; its state stays only where the tree keeps it."""
        self.num_live -= 1
        self.places.release(slot)

    def take_checkpoint(self, tree: PrefixTree) -> int:
        """A slot for one more checkpoint, evicting the oldest; 0 when the budget is used by those pending."""
        return self.places.take() if self._make_room(tree) else 0

    def adopt_live(self, tree: PrefixTree) -> bool:
        """True when there is room to keep a live slot as a checkpoint; then it counts as pending, not live."""
        if not self._make_room(tree):
            return False
        self.num_live -= 1
        return True

    def _make_room(self, tree: PrefixTree) -> bool:
        if self.num_pending + self.places.num_idle < self.max_checkpoints:
            return True
        return tree.free_checkpoint()
