"""For how many rows and tokens programs are captured and kernels compiled."""

from __future__ import annotations

from kestrel.runner.prefill_programs import prefill_buckets

__all__ = ["launch_sizes", "row_buckets"]

_FEW = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)  # from 16 on multiples of 8: what matrix units like
_STEP = 32  # of more rows, or an eighth of them: a launch computes at most a third more rows than it needs


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows, ascending; the last is ``max_rows``, so that every batch has a bucket that holds it."""
    sizes = list(_FEW)
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + _STEP * max(1, sizes[-1] // (8 * _STEP)))
    return (*(size for size in sizes if size < max_rows), max_rows)


def launch_sizes(max_rows: int, max_tokens: int) -> dict[str, tuple[int, ...]]:
    """Numbers of rows (tokens) that launches will have, by program: what to compile kernels for."""
    prefill = prefill_buckets(max_tokens)
    return {
        "decode": row_buckets(max_rows),
        "prefill": prefill if max_tokens in prefill else (*prefill, max_tokens),
    }
