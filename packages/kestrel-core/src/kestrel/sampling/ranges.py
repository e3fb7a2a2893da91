"""Token sets as sorted ranges of ids."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.spi.decoding import TokenSet

__all__ = ["Ranges", "banned_ranges", "complement", "intersect", "overlaps", "ranges_of"]

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
    return complement(merged, vocab_size) if tokens.inverted else merged


def banned_ranges(allowed: TokenSet, vocab_size: int) -> Ranges:
    """The ids that are not in ``allowed``, as ranges."""
    return ranges_of(allowed.but(), vocab_size)


def intersect(sets: Sequence[TokenSet], vocab_size: int) -> TokenSet:
    """The ids that every set holds (all of the vocabulary for no sets)."""
    left: Ranges = [(0, vocab_size)]
    for tokens in sets:
        right = ranges_of(tokens, vocab_size)
        left = overlaps(left, right)
    return TokenSet(tuple(left))


def complement(ranges: Ranges, vocab_size: int) -> Ranges:
    """The ids that sorted, disjoint ranges leave out."""
    out: Ranges = []
    at = 0
    for start, end in ranges:
        if start > at:
            out.append((at, start))
        at = end
    if at < vocab_size:
        out.append((at, vocab_size))
    return out


def overlaps(left: Ranges, right: Ranges) -> Ranges:
    """The ids that both hold; sorted, disjoint ranges."""
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
