"""Token sets as ranges: on the host as sorted pairs, on the device as masks over the vocabulary.

Shapes: N rows, V vocabulary, K ranges per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.spi.decoding import TokenSet

__all__ = ["banned_ranges", "covered_by", "intersect", "ranges_of"]

Ranges = list[tuple[int, int]]


def ranges_of(tokens: TokenSet, vocab_size: int) -> Ranges:
    """The set as sorted, disjoint, half-open ranges within the vocabulary."""
    merged: Ranges = []
    for start, end in sorted(tokens.ranges):
        start, end = max(start, 0), min(end, vocab_size)
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return _complement(merged, vocab_size) if tokens.inverted else merged


def banned_ranges(allowed: TokenSet, vocab_size: int) -> Ranges:
    """The ids that are not in ``allowed``, as ranges."""
    return ranges_of(allowed.but(), vocab_size)


def intersect(sets: Sequence[TokenSet], vocab_size: int) -> TokenSet:
    """The ids that every set holds (all of the vocabulary for no sets)."""
    left: Ranges = [(0, vocab_size)]
    for tokens in sets:
        right = ranges_of(tokens, vocab_size)
        left = _overlaps(left, right)
    return TokenSet(tuple(left))


def covered_by(bounds_NK2: torch.Tensor, is_on_NK: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """A mask [N, V] of the ids that any of the row's ranges covers; ranges that are not on cover nothing.

    ``bounds`` are starts and ends, in any order, overlapping or not; padding starts and ends at ``vocab_size``.
    Integer arithmetic: the same whatever the batch.
    """
    num_rows, num_ranges, _ = bounds_NK2.shape
    steps_NK = torch.ones(num_rows, num_ranges, dtype=torch.int32, device=bounds_NK2.device)
    if is_on_NK is not None:
        steps_NK = steps_NK.mul_(is_on_NK)
    edges = torch.zeros(num_rows, vocab_size + 1, dtype=torch.int32, device=bounds_NK2.device)
    edges.scatter_add_(1, bounds_NK2.flatten(1), torch.stack((steps_NK, -steps_NK), dim=-1).flatten(1))
    return edges.cumsum_(1)[:, :vocab_size] > 0


def _complement(ranges: Ranges, vocab_size: int) -> Ranges:
    out: Ranges = []
    at = 0
    for start, end in ranges:
        if start > at:
            out.append((at, start))
        at = end
    if at < vocab_size:
        out.append((at, vocab_size))
    return out


def _overlaps(left: Ranges, right: Ranges) -> Ranges:
    out: Ranges = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            out.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return out
