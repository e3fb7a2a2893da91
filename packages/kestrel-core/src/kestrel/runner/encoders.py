"""Encoder launches: media features, and cross entries written from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kestrel.device import Staging
from kestrel.runner.states import StateMap
from kestrel.spi.batch import CrossView, Limits
from kestrel.spi.driver import TokenDriver
from kestrel.state import Lease
from kestrel.types import Prepared

__all__ = ["Encoders"]


class Encoders:
    """The media part of one model."""

    def __init__(self, driver: TokenDriver, states: StateMap, staging: Staging) -> None:
        self._driver, self._states, self._staging = driver, states, staging

    def encode(self, kind: str, items: Sequence[Prepared]) -> torch.Tensor:
        """Features of ``items``, concatenated."""
        return self._driver.encode(kind, items)

    def write_cross(self, items: Sequence[Prepared], leases: Sequence[Lease]) -> None:
        """Encode ``items`` of one kind, one per lease, and project each into its lease's cross entry."""
        encoded = self.encode(items[0].kind, items)
        share = encoded.shape[0] // len(items)
        lengths = [item.cross_positions or share for item in items]
        name = self._states.cross[0]
        entries = [lease.cross_entry(name)[0] for lease in leases]
        views = self._views(entries, lengths, encoded.shape[0])
        self._driver.write_cross(encoded, items, views)
        for lease, length in zip(leases, lengths, strict=True):
            lease.cross_written(length)

    def _views(
        self, entries: Sequence[int], lengths: Sequence[int], num_tokens: int
    ) -> Mapping[str, CrossView]:
        """A view per cross state of ``entries`` with ``lengths`` valid positions, one row each."""
        put, states = self._staging.put, self._states
        entries_B = put(np.array(entries, dtype=np.int64))
        lens_B = put(np.array(lengths, dtype=np.int32))
        cu = put(np.cumsum([0, *lengths], dtype=np.int32))
        self._staging.send()
        longest = max(lengths)
        limits = Limits(
            max_rows=len(entries),
            max_tokens=num_tokens,
            max_query_len=longest,
            max_context_len=longest,
        )
        return {name: states.cross_view(name, entries_B, lens_B, cu, limits, None) for name in states.cross}
