"""What the leases of one cache work on together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kestrel.state.cross import CrossEntries
from kestrel.state.places import Places
from kestrel.state.slots import StateSlots
from kestrel.state.tables import WindowGroup
from kestrel.state.tensors import CrossTensors, PagedTensors, RecurrentTensors
from kestrel.state.tree import PrefixTree

if TYPE_CHECKING:
    from kestrel.state.lease import Lease

__all__ = ["Pools"]


@dataclass(slots=True, kw_only=True)
class Pools:
    """Places and tensors of every state. States of one kind (and window) share places, so one table serves them.

    ``tree`` is None when prefix caching is off; ``full``, ``slots`` and ``cross`` when no state needs them.
    """

    page_size: int
    max_ahead: int | None
    tree: PrefixTree | None
    full: Places | None
    windows: tuple[WindowGroup, ...]
    slots: StateSlots | None
    cross: CrossEntries | None
    tensors: Mapping[str, PagedTensors | RecurrentTensors | CrossTensors]
    window_of: Mapping[str, int]  # by state name: index into ``windows``
    leases: set[Lease] = field(default_factory=set)

    def copy_page(self, window: int | None, src: int, dst: int, filled: int) -> None:
        """Copy the filled part of a page in every state of one window length (None: full attention)."""
        for x in self.tensors.values():
            if src != dst and isinstance(x, PagedTensors) and x.window == window:
                x.copy_page(src, dst, filled)

    def start_slot(self, slot: int, checkpoint: int) -> None:
        """Make ``slot`` a copy of ``checkpoint`` (0: the state of an empty sequence) in every recurrent state."""
        for x in self.tensors.values():
            if isinstance(x, RecurrentTensors):
                if checkpoint:
                    x.copy(checkpoint, slot)
                else:
                    x.zero(slot)
