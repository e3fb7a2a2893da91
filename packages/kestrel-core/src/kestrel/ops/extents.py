"""A sequence's queries split into blocks that see one run of keys, from host extents alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel.spi.batch import RowExtent

__all__ = ["BLOCK", "QueryBlock", "blocks_of"]

BLOCK = (
    512  # queries under one mask: bounds its memory at 512 · context, and skips keys that none of them sees
)


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries at positions ``start`` to ``end``; the keys that any of them sees are at ``low`` to ``high``.

    A query sees keys up to its own position, or all of them when ``sees_all``; none at or before it − ``window``.
    """

    start: int
    end: int
    low: int
    high: int
    sees_all: bool = False
    window: int | None = None

    @property
    def is_causal(self) -> bool:
        """A square lower triangle, which needs no mask."""
        return not self.sees_all and self.window is None and self.low == self.start < self.end - 1

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """What each query sees, bool [queries, keys]; None when ``is_causal``, or when all is seen."""
        if self.is_causal or (self.window is None and (self.sees_all or self.end - self.start == 1)):
            return None
        query = torch.arange(self.start, self.end, device=device).unsqueeze(1)
        key = torch.arange(self.low, self.high, device=device)
        if self.window is None:
            return key <= query
        seen = key > query - self.window
        return seen if self.sees_all else seen & (key <= query)


def blocks_of(row: RowExtent, window: int | None, block: int = BLOCK) -> list[QueryBlock]:
    """The blocks of ``row``'s new tokens, in order: cut where bidirectional ranges begin and end, and every ``block``
    queries where a mask is needed."""
    first, last = row.computed, row.computed + row.query_len
    blocks: list[QueryBlock] = []
    at = first
    for start, end in [*sorted(row.bidirectional), (last, last)]:
        blocks += _split(at, max(start, at), window, None, block)
        blocks += _split(max(start, at), end, window, end, block)
        at = max(at, end)
    return blocks


def _split(start: int, end: int, window: int | None, high: int | None, block: int) -> list[QueryBlock]:
    """Queries ``start`` to ``end``: causal when ``high`` is None, else ones that see all before ``high``."""
    needs_mask = (high is None and start > 0) or window is not None
    step = block if needs_mask else max(end - start, 1)
    return [_block(at, min(at + step, end), window, high) for at in range(start, end, step)]


def _block(start: int, end: int, window: int | None, high: int | None) -> QueryBlock:
    low = 0 if window is None else max(0, start - window + 1)
    hides = (
        window is not None and low <= end - 1 - window
    )  # else no query of the block is that far from a key
    return QueryBlock(
        start, end, low, end if high is None else high, high is not None, window if hides else None
    )
