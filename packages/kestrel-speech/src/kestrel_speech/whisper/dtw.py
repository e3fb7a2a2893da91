"""Dynamic time warping: the cheapest monotonic path through a matrix of tokens by times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["first_columns"]

DIAGONAL, UP, LEFT = 0, 1, 2


def first_columns(cost_NM: NDArray[np.floating]) -> NDArray[np.int64]:
    """[N]: the column at which the cheapest path from corner to corner first reaches each row.

    A step goes to the next row, the next column or both. On ties a move along the row wins: the diagonal is taken only
    when strictly the cheapest, and so is the next row. Computed in float64, one anti-diagonal at a time.
    """
    rows, columns = cost_NM.shape
    trace = _trace(np.ascontiguousarray(cost_NM, dtype=np.float64))
    first = np.zeros(rows, dtype=np.int64)
    i, j = rows, columns
    while i > 0 or j > 0:
        if i > 0 and j > 0:
            first[i - 1] = j - 1  # the last write is the leftmost column
        move = LEFT if i == 0 else UP if j == 0 else trace[i + j, i]
        if move != LEFT:
            i -= 1
        if move != UP:
            j -= 1
    return first


def _trace(cost: NDArray[np.float64]) -> NDArray[np.int8]:
    """Where the path into cell (i, j) comes from, at [i + j, i]; cells count from 1."""
    rows, columns = cost.shape
    trace = np.zeros((rows + columns + 1, rows + 1), dtype=np.int8)
    before = np.full(rows + 1, np.inf)  # totals two anti-diagonals ago, by row
    before[0] = 0.0
    last = np.full(rows + 1, np.inf)
    for d in range(2, rows + columns + 1):
        low, high = max(1, d - columns), min(rows, d - 1)
        i = np.arange(low, high + 1)
        diagonal, up, left = before[i - 1], last[i - 1], last[i]
        is_diagonal = (diagonal < up) & (diagonal < left)
        is_up = (up < diagonal) & (up < left)
        trace[d, low : high + 1] = np.where(is_diagonal, DIAGONAL, np.where(is_up, UP, LEFT))
        best = np.where(is_diagonal, diagonal, np.where(is_up, up, left))
        now = np.full(rows + 1, np.inf)
        now[low : high + 1] = cost[i - 1, d - i - 1] + best
        before, last = last, now
    return trace
