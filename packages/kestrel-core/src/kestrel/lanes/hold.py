"""Which media features one sequence waits for and which it holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from kestrel.state import FeaturePool, Features
from kestrel.types import Layout, Prepared, Span

__all__ = ["MediaHold", "feature_key"]

NEVER = 2**62


def feature_key(item: Prepared, adapter_load: int = 0) -> Hashable:
    """What makes two encoder results the same."""
    return item.digest, item.kind, adapter_load


@dataclass(slots=True)
class MediaHold:
    """``waiting``: spans without features, in order. ``held``: features by span. ``cross``: an item whose cross
    entry is to be written before anything runs."""

    layout: Layout
    waiting: list[Span] = field(default_factory=list)
    held: dict[Span, Features] = field(default_factory=dict)
    cross: Prepared | None = None

    @classmethod
    def of(cls, layout: Layout, cached: int, cross: Prepared | None) -> MediaHold | None:
        """What is needed beyond ``cached`` positions; None when nothing is."""
        waiting = [span for span in layout.spans if span.end > cached]
        return cls(layout, waiting, cross=cross) if waiting or cross is not None else None

    def item(self, span: Span) -> Prepared:
        """The item that fills ``span``."""
        return self.layout.media[span.item]

    @property
    def barrier(self) -> int:
        """The first position that cannot be computed yet."""
        if self.cross is not None:
            return 0
        starts = [span.start for span in self.waiting]
        starts += [span.start for span, features in self.held.items() if not features.is_written]
        return min(starts, default=NEVER)

    @property
    def needs_encoder(self) -> bool:
        """Something is still to be encoded, here or for another sequence."""
        return self.barrier != NEVER

    def acquire(self, pool: FeaturePool) -> bool:
        """Hold features, or a place for them, for every span in order; False when the pool has no place for one."""
        while self.waiting:
            span = self.waiting[0]
            key = feature_key(self.item(span))
            features = pool.find(key) or pool.allocate(key, span.end - span.start)
            if features is None:
                return False
            self.held[span] = features
            self.waiting.pop(0)
        return True

    def unwritten(self) -> Iterator[tuple[Features, Prepared]]:
        """Places that wait for the encoder."""
        for span, features in self.held.items():
            if not features.is_written:
                yield features, self.item(span)

    def passed(self, position: int, pool: FeaturePool) -> None:
        """Release the features of spans that end at or before ``position``: their launch was made."""
        for span in [span for span in self.held if span.end <= position]:
            pool.release(self.held.pop(span))

    def revoke(self, pool: FeaturePool) -> None:
        """Give everything back that was not used yet; it has to be acquired again."""
        self.waiting = sorted([*self.waiting, *self.held], key=lambda span: span.start)
        self.drop(pool)

    def drop(self, pool: FeaturePool) -> None:
        """Give everything back."""
        for features in self.held.values():
            pool.release(features)
        self.held.clear()
