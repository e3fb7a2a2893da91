"""sample_commit: one program per row does what follows from its token.

Shapes: N rows of a step, A automata of a row, K stop ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from kestrel.ops.sample_tables import SampleTables
from kestrel.spi import Impl, OpQuery
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, jobs_of
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.sampling_meta import meta_tables
from kestrel_kernels_cuda.sampling_parts import (
    SCALARS,
    STRIDES,
    cases_of,
    chained,
    list_of,
    supports,
)

__all__ = ["IMPLS", "compile_cases", "sample_commit"]


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def commit_kernel(
    ids, first, best, rows, stopped, status,
    index, stride_index, counts, vocab, stops, num_stops, stride_stops,
    numbers, num_numbers, stride_numbers, states, stride_states,
    base, offset, following, classes, stride_classes,
    ADVANCES: tl.constexpr, PENALTIES: tl.constexpr, AUTOMATA: tl.constexpr, STOPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As sample_commit, for one row."""
    start_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0)
    row = tl.load(rows + n)
    chosen = tl.load(ids + n)
    before, after = tl.load(first + n), tl.load(best + n)
    is_fault = (before != before) | (tl.abs(before) == float("inf"))
    tl.store(status + n, tl.where(is_fault, 1, tl.where(after == float("-inf"), 2, 0)).to(tl.uint8))
    is_stop = chosen < 0
    if STOPS:
        for k in range(tl.load(num_stops + row * stride_stops).to(tl.int32)):
            is_stop = is_stop | (tl.load(stops + row * stride_stops + k) == chosen)
    tl.store(stopped + n, is_stop.to(tl.uint8))
    if ADVANCES:
        tl.store(index + row * stride_index, tl.load(index + row * stride_index) + 1)
    if PENALTIES:
        count = counts + row * vocab + chosen
        tl.store(count, tl.load(count) + 1)
    if AUTOMATA:
        for a in range(tl.load(num_numbers + row * stride_numbers).to(tl.int32)):
            number = tl.load(numbers + row * stride_numbers + a)
            state = tl.load(states + row * stride_states + a)
            kind = tl.load(classes + number * stride_classes + chosen).to(tl.int64)
            place = tl.load(offset + tl.load(base + number) + state) + kind
            tl.store(states + row * stride_states + a, tl.load(following + place).to(tl.int64))


def _launch(
    ids_N: torch.Tensor,
    first_N: torch.Tensor,
    best_N: torch.Tensor,
    rows_N: torch.Tensor,
    tables: SampleTables,
    flags: tuple[bool, bool, bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, Launch]:
    num_rows, bank = len(ids_N), tables.bank
    stopped_N, status_N = (torch.empty(num_rows, dtype=torch.uint8, device=ids_N.device) for _ in range(2))
    counts_RV = tables.counts_RV if flags[1] else None
    counts = (
        (ids_N, 0) if counts_RV is None else (counts_RV, counts_RV.stride(0))
    )  # not read without penalties
    args = (
        ids_N, first_N, best_N, rows_N, stopped_N, status_N,
        tables.index_R, tables.index_R.stride(0), *counts, *list_of(tables.stops), *list_of(tables.automata),
        tables.states_RA, tables.states_RA.stride(0),
        bank.base_A, bank.offset_S, bank.next, bank.classes_AV, bank.classes_AV.stride(0),
    )  # fmt: skip
    named = dict(zip(("ADVANCES", "PENALTIES", "AUTOMATA", "STOPS"), flags, strict=True))
    launch = Launch(commit_kernel, (num_rows,), args, {**named, "num_warps": 1})
    return stopped_N, status_N, *chained([launch], ids_N.device)


def sample_commit(
    ids_N: torch.Tensor,
    first_N: torch.Tensor,
    best_N: torch.Tensor,
    rows_N: torch.Tensor,
    tables: SampleTables,
    *,
    advances: bool = False,
    penalties: bool = False,
    automata: bool = False,
    stops: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.sample_commit``."""
    assert not penalties or tables.counts_RV is not None, "a row has penalties and nothing counts its tokens"
    flags = (advances, penalties, automata, stops)
    stopped_N, status_N, launch = _launch(ids_N, first_N, best_N, rows_N, tables, flags)
    launch.run()
    return stopped_N.view(torch.bool), status_N


def _planned(query: OpQuery, flags: tuple[bool, bool, bool, bool]) -> Launch:
    ids_N, rows_N = (torch.empty(2, dtype=torch.int64, device="meta") for _ in range(2))
    best_N = torch.empty(2, dtype=torch.float32, device="meta")
    return _launch(ids_N, best_N, best_N, rows_N, meta_tables(query.get("vocab")), flags)[2]


_USUAL = (
    (False, False, False, True),
    (True, False, False, True),
    (True, False, True, True),
    (True, True, False, True),
    (True, True, True, True),
)


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of(_planned(query, flags) for flags in _USUAL)


IMPLS = {"sample_commit": Impl(supports=supports, fn=sample_commit, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Everything at once, and greedy rows."""
    query = OpQuery.of("sample_commit", vocab=248_320, dtype="bfloat16")
    yield from cases_of("sample_commit", [_planned(query, (True, True, True, True))])
    yield from cases_of("sample_commit greedy", [_planned(query, (False, False, False, True))])
