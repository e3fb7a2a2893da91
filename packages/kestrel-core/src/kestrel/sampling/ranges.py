"""Token sets as ranges: on the host as sorted pairs, on the device as masks over the vocabulary.

Shapes: N rows, V vocabulary, K ranges per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.spi.decoding import TokenSet

__all__ = ["allowed_by", "intersect", "ranges_of"]

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


def intersect(sets: Sequence[TokenSet], vocab_size: int) -> TokenSet:
    """The ids that every set holds (all of the vocabulary for no sets)."""
    left: Ranges = [(0, vocab_size)]
    for tokens in sets:
        right = ranges_of(tokens, vocab_size)
        left = _overlaps(left, right)
    return TokenSet(tuple(left))


def allowed_by(
    bounds_NK2: torch.Tensor, is_on_NK: torch.Tensor, need_N: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """A mask [N, V]: ids covered by exactly ``need`` of the row's ranges that are on.

    Ranges of one mask are disjoint, so with ``need`` = the number of masks this is their intersection. Padding
    starts and ends at ``vocab_size``. Integer arithmetic: the same whatever the batch.
    """
    weight_NK = is_on_NK.to(torch.int32)
    edges = torch.zeros(bounds_NK2.shape[0], vocab_size + 1, dtype=torch.int32, device=bounds_NK2.device)
    edges.scatter_add_(1, bounds_NK2.flatten(1), torch.stack((weight_NK, -weight_NK), dim=-1).flatten(1))
    return edges.cumsum(1, dtype=torch.int32)[:, :vocab_size] == need_N[:, None]


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
