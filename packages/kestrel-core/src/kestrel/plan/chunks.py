"""How prefills are cut: which sequences get how many tokens of one step, and where each chunk ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chunk", "Prefill", "chunk_end", "plan_chunks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A sequence whose state is behind its tokens.

    Positions ``[start, target)`` are to be computed; those from ``barrier`` on cannot yet (their media features do
    not exist). ``marks`` and ``ranges`` are sorted; ranges are disjoint, half-open and never split.
    """

    key: int
    start: int
    target: int
    barrier: int
    marks: Sequence[int] = ()
    ranges: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``start`` to ``end`` (exclusive) of sequence ``key`` run in this step."""

    key: int
    start: int
    end: int


def chunk_end(prefill: Prefill, allowance: int, page_size: int) -> int:
    """Where a chunk of at most ``allowance`` positions ends; ``prefill.start`` when none can run.

    A chunk that cannot take the rest ends at the last page boundary or mark that it reaches, else where the
    allowance does; never inside a bidirectional range.
    """
    reach = min(prefill.target, prefill.barrier)
    if reach - prefill.start <= allowance:
        return max(prefill.start, _outside(reach, prefill.ranges))
    end = _outside(prefill.start + allowance, prefill.ranges)
    tidy = [end - end % page_size]
    mark = bisect_right(prefill.marks, end)
    if mark:
        tidy.append(prefill.marks[mark - 1])
    ends = [at for at in tidy if at > prefill.start and _outside(at, prefill.ranges) == at]
    return max(ends, default=max(prefill.start, end))


def least(prefill: Prefill) -> int:
    """The fewest positions that a chunk at ``prefill.start`` can have: a whole bidirectional range, else one."""
    index = bisect_right(prefill.ranges, (prefill.start, prefill.target + 1)) - 1
    if index >= 0 and prefill.ranges[index][0] <= prefill.start < prefill.ranges[index][1]:
        return prefill.ranges[index][1] - prefill.start
    return 1


def plan_chunks(
    prefills: Sequence[Prefill], *, budget: int, decode_rows: int, page_size: int
) -> tuple[Chunk, ...]:
    """Chunks of one step, in the order of ``prefills``, within what ``decode_rows`` leave of ``budget``.

    The first sequence that can run gets at least one position (or one whole range), however many rows decode, so
    a prefill never starves. Sequences that cannot run now are passed over.
    """
    left = budget - decode_rows
    chunks: list[Chunk] = []
    for prefill in prefills:
        allowance = left if chunks else max(left, least(prefill))
        if allowance <= 0:
            break
        end = chunk_end(prefill, allowance, page_size)
        if end > prefill.start:
            chunks.append(Chunk(prefill.key, prefill.start, end))
            left = allowance - (end - prefill.start)
    return tuple(chunks)


def _outside(position: int, ranges: Sequence[tuple[int, int]]) -> int:
    """``position``, or the start of the range that a cut there would split."""
    index = bisect_right(ranges, (position,)) - 1
    if index >= 0 and ranges[index][0] < position < ranges[index][1]:
        return ranges[index][0]
    return position
