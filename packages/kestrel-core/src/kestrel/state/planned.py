"""At which positions a sequence ends tree nodes and stores recurrent checkpoints."""

from __future__ import annotations

from kestrel.state.keys import KeyRun
from kestrel.state.match import Match

__all__ = ["checkpoint_positions"]

MAX_MARKS = 4  # a film of a hundred frames must not push every other checkpoint out


def checkpoint_positions(keys: KeyRun, hit: Match, page_size: int) -> tuple[int, ...]:
    """Positions after the hit, ascending: the last page boundary that leaves a position to compute, the last marks,
    the stable mark, and the branch point, where the keys matched deeper than the states."""
    wanted = {_last_boundary(keys, page_size), hit.branch, keys.stable or 0, *keys.marks[-MAX_MARKS:]}
    return tuple(sorted(p for p in wanted if hit.end < p <= len(keys) and not keys.splits_range(p)))


def _last_boundary(keys: KeyRun, page_size: int) -> int:
    boundary = (len(keys) - 1) // page_size * page_size
    while boundary > 0 and keys.splits_range(boundary):
        boundary -= page_size
    return boundary
