"""row_inputs, row_results: what a decode step takes from the tables of rows and leaves there, one launch each.

Shapes: N rows of a step, M numbers per row that the host wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, jobs_of

__all__ = ["IMPLS", "compile_cases", "row_inputs", "row_results"]

BLOCK = 64  # rows of one program


@triton.jit
def inputs_kernel(
    rows, last_ids, live, block, ids, shown, count, numbers, stride_block, stride_shown, BLOCK: tl.constexpr
):
    """As row_inputs, for ``BLOCK`` rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = at < count
    row = tl.load(rows + at, is_row, 0)
    tl.store(ids + at, tl.load(last_ids + row, is_row, 0), is_row)
    alive = tl.load(live + row, is_row, 0)
    for m in range(numbers):
        number = tl.load(block + m * stride_block + at, is_row, 0)
        tl.store(shown + m * stride_shown + at, number * alive, is_row)


@triton.jit
def results_kernel(
    ids,
    stopped,
    status,
    rows,
    last_ids,
    live,
    words,
    flags,
    count,
    HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As row_results, for ``BLOCK`` rows; ``words`` are the first bytes of the result, ``flags`` those behind them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = at < count
    row = tl.load(rows + at, is_row, 0)
    chosen = tl.load(ids + at, is_row, 0)
    tl.store(last_ids + row, chosen, is_row)
    tl.store(words + at, chosen, is_row)
    ends = tl.load(stopped + at, is_row, 0)
    fault = tl.load(status + at, is_row, 0)
    tl.store(flags + at, ends, is_row)
    tl.store(flags + count + at, fault, is_row)
    if HAS_LIVE:
        tl.store(live + row, tl.zeros_like(chosen), is_row & ((ends | fault) != 0))


def _inputs(
    rows_N: torch.Tensor,
    last_ids_R: torch.Tensor,
    live_R: torch.Tensor,
    block_MN: torch.Tensor,
    ids_N: torch.Tensor,
    shown_MN: torch.Tensor,
) -> Launch:
    count = rows_N.shape[0]
    args = (rows_N, last_ids_R, live_R, block_MN, ids_N, shown_MN, count, block_MN.shape[0])
    strides = (block_MN.stride(0), shown_MN.stride(0))
    return Launch(inputs_kernel, (-(-count // BLOCK),), (*args, *strides), {"BLOCK": BLOCK, "num_warps": 2})


def row_inputs(
    rows_N: torch.Tensor,
    last_ids_R: torch.Tensor,
    live_R: torch.Tensor,
    block_MN: torch.Tensor,
    ids_N: torch.Tensor,
    shown_MN: torch.Tensor,
) -> None:
    """As ``kestrel.ops.row_tables``."""
    _inputs(rows_N, last_ids_R, live_R, block_MN, ids_N, shown_MN).run()


def _results(
    ids_N: torch.Tensor,
    stopped_N: torch.Tensor,
    status_N: torch.Tensor,
    rows_N: torch.Tensor,
    last_ids_R: torch.Tensor,
    live_R: torch.Tensor | None,
) -> tuple[torch.Tensor, Launch]:
    count, has_live = ids_N.shape[0], live_R is not None
    packed = torch.empty(10 * count, dtype=torch.uint8, device=ids_N.device)
    words, flags = packed[: 8 * count].view(torch.int64), packed[8 * count :]
    table = last_ids_R if live_R is None else live_R  # not touched then
    args = (ids_N, stopped_N.view(torch.uint8), status_N, rows_N, last_ids_R, table, words, flags, count)
    meta = {"HAS_LIVE": has_live, "BLOCK": BLOCK, "num_warps": 2}
    return packed, Launch(results_kernel, (-(-count // BLOCK),), args, meta)


def row_results(
    ids_N: torch.Tensor,
    stopped_N: torch.Tensor,
    status_N: torch.Tensor,
    rows_N: torch.Tensor,
    last_ids_R: torch.Tensor,
    live_R: torch.Tensor | None,
) -> torch.Tensor:
    """As ``kestrel.ops.row_tables``."""
    packed, launch = _results(ids_N, stopped_N, status_N, rows_N, last_ids_R, live_R)
    launch.run()
    return packed


def _planned(count: int) -> list[Launch]:
    """The launches of a step of ``count`` rows whose states are pages or slots of one kind."""
    longs = [torch.empty(max(count, 2), dtype=torch.int64, device="meta") for _ in range(3)]
    ids_N = torch.empty(count, dtype=torch.int64, device="meta")
    flags_N = torch.empty(count, dtype=torch.uint8, device="meta")
    block_MN = torch.empty(3, count, dtype=torch.int64, device="meta")
    inputs = _inputs(ids_N, longs[0], longs[1], block_MN, ids_N, block_MN)
    results = [_results(ids_N, flags_N, flags_N, ids_N, longs[0], live)[1] for live in (longs[1], None)]
    return [inputs, *results]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    kinds = slice(0, 1) if query.op == "row_inputs" else slice(1, None)
    return jobs_of(launch for count in row_counts for launch in _planned(count)[kinds])


def _always(query: OpQuery) -> Yes:
    return Yes()


IMPLS = {
    "row_inputs": Impl(supports=_always, fn=row_inputs, warm=_warm),
    "row_results": Impl(supports=_always, fn=row_results, warm=_warm),
}


def compile_cases() -> Iterator[CompileCase]:
    """Each kernel once."""
    inputs, results, _ = _planned(48)
    yield compile_case_of("row_inputs", inputs)
    yield compile_case_of("row_results", results)
