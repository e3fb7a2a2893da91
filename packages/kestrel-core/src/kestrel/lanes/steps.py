"""A step in flight: what was launched for whom, and what waits for it to commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from kestrel.lanes.sequence import Sequence
from kestrel.runner import Pending, PrefillResult
from kestrel.state import Lease

__all__ = ["ChunkEntry", "DecodePart", "PrefillPart", "Step"]


@dataclass(slots=True)
class DecodePart:
    """One token for each of ``members``. ``crossed``: members whose state now fills a page. ``last``: members for
    which this was the last token that their limit allows. ``is_plain``: no member needs more than ids and
    log-probabilities."""

    members: list[Sequence]
    pending: Pending
    is_plain: bool
    crossed: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ChunkEntry:
    """A chunk of ``seq`` that ends at position ``end``. ``probes``: indices of its work's probes, in order."""

    seq: Sequence
    end: int
    samples: bool
    probes: tuple[int, ...] = ()


@dataclass(slots=True)
class PrefillPart:
    """Chunks of several sequences."""

    entries: list[ChunkEntry]
    result: PrefillResult


@dataclass(slots=True)
class Step:
    """A decode part and a prefill part, launched back to back. ``pinned``: leases to unpin at the commit."""

    decode: DecodePart | None = None
    prefill: PrefillPart | None = None
    pinned: list[Lease] = field(default_factory=list)

    def names(self, seq: Sequence) -> bool:
        """A launch of this step reads or writes the state of ``seq``."""
        if self.decode is not None and seq in self.decode.members:
            return True
        return self.prefill is not None and any(entry.seq is seq for entry in self.prefill.entries)
