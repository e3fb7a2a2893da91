"""sample_process: penalties, biases and masks in one pass over the logits; then two more per place of preferred groups.

Shapes: N rows of a step, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from kestrel.ops.sample_tables import COUNT, SampleTables
from kestrel.spi import Impl, OpQuery
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, jobs_of
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.sampling_meta import meta_tables
from kestrel_kernels_cuda.sampling_parts import (
    CHUNK,
    SCALARS,
    STRIDES,
    cases_of,
    chained,
    chunks_of,
    joined,
    lean_best_of,
    list_of,
    rows_of,
    supports,
)
from kestrel_kernels_cuda.sampling_prefer import member_of, prefer_launches

__all__ = ["IMPLS", "compile_cases", "sample_process"]

WRITTEN = tl.constexpr(COUNT)


@triton.jit
def windowed(banned, place, first_place, end_place, index, items, count):
    """``banned`` and the ids of ranges (start, end, first output index, last) that are on."""
    for k in range(count):
        start, end = tl.load(items + 4 * k).to(tl.int32), tl.load(items + 4 * k + 1).to(tl.int32)
        is_on = (tl.load(items + 4 * k + 2) <= index) & (index < tl.load(items + 4 * k + 3))
        if is_on & (start < end_place) & (end > first_place):
            banned = banned | ((place >= start) & (place < end))
    return banned


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def process_kernel(
    logits, stride_n, rows, out, parts, first_parts, vocab,
    floats, stride_floats, index, stride_index, counts,
    biases, num_biases, stride_biases, statics, num_statics, stride_statics, hosts, num_hosts, stride_hosts,
    numbers, num_numbers, stride_numbers, states, stride_states, base, bounds, num_bounds, stride_bounds,
    PENALTIES: tl.constexpr, BIASES: tl.constexpr, STATICS: tl.constexpr, HOSTS: tl.constexpr, AUTOMATA: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of one row, and its packed largest before and after."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + n)
    first_place = chunk * CHUNK
    end_place = first_place + CHUNK
    place = first_place + tl.arange(0, CHUNK)
    is_in = place < vocab
    x = tl.load(logits + n * stride_n + place, mask=is_in, other=0.0).to(tl.float32)
    part = n * tl.num_programs(0) + chunk
    tl.store(first_parts + part, lean_best_of(x, place, is_in))
    at = tl.load(index + row * stride_index)
    if PENALTIES:
        repetition = tl.load(floats + row * stride_floats + 3)
        presence = tl.load(floats + row * stride_floats + 4)
        frequency = tl.load(floats + row * stride_floats + 5)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            seen = tl.load(counts + row * vocab + place, mask=is_in, other=0)
            written = seen & WRITTEN
            scaled = tl.where(x > 0, x / repetition, x * repetition)
            x = tl.where(seen != 0, scaled, x)
            x = x - tl.where(written > 0, presence, 0.0) - frequency * written.to(tl.float32)
    if BIASES:
        items = biases + row * stride_biases
        for k in range(tl.load(num_biases + row * stride_biases).to(tl.int32)):
            token = tl.load(items + 4 * k).to(tl.int32)
            is_on = (tl.load(items + 4 * k + 2) <= at) & (at < tl.load(items + 4 * k + 3))
            if is_on & (token >= first_place) & (token < end_place):
                added = tl.load(items + 4 * k + 1).to(tl.int32).to(tl.float32, bitcast=True)
                x = tl.where(place == token, x + added, x)
    banned = place < 0
    if STATICS:
        count = tl.load(num_statics + row * stride_statics).to(tl.int32)
        banned = windowed(banned, place, first_place, end_place, at, statics + row * stride_statics, count)
    if HOSTS:
        count = tl.load(num_hosts + row * stride_hosts).to(tl.int32)
        banned = member_of(banned, place, first_place, end_place, hosts + row * stride_hosts, count)
    if AUTOMATA:
        for a in range(tl.load(num_numbers + row * stride_numbers).to(tl.int32)):
            number = tl.load(numbers + row * stride_numbers + a)
            state = tl.load(base + number) + tl.load(states + row * stride_states + a)
            count = tl.load(num_bounds + state).to(tl.int32)
            banned = member_of(banned, place, first_place, end_place, bounds + state * stride_bounds, count)
    x = tl.where(banned, float("-inf"), x)
    tl.store(out + n * vocab + place, x, mask=is_in)
    tl.store(parts + part, lean_best_of(x, place, is_in))


Flags = tuple[bool, bool, bool, bool, bool]
Processed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _launches(
    logits_NV: torch.Tensor, rows_N: torch.Tensor, tables: SampleTables, flags: Flags, prefers: bool
) -> tuple[Processed, list[Launch]]:
    logits_NV = rows_of(logits_NV)
    (num_rows, vocab), device, bank = logits_NV.shape, logits_NV.device, tables.bank
    processed_NV = torch.empty((num_rows, vocab), dtype=torch.float32, device=device)
    parts_2NC = torch.empty((2, num_rows, chunks_of(vocab)), dtype=torch.int64, device=device)
    parts_NC, first_NC = parts_2NC.unbind(0)
    counts_RV = tables.counts_RV if flags[0] else rows_N  # not read without penalties
    args = (
        logits_NV, logits_NV.stride(0), rows_N, processed_NV, parts_NC, first_NC, vocab,
        tables.floats_R6, tables.floats_R6.stride(0), tables.index_R, tables.index_R.stride(0), counts_RV,
        *list_of(tables.biases), *list_of(tables.statics), *list_of(tables.hosts), *list_of(tables.automata),
        tables.states_RA, tables.states_RA.stride(0),
        bank.base_A, bank.bounds_SK2, bank.num_bounds_S, bank.bounds_SK2.stride(0),
    )  # fmt: skip
    names = ("PENALTIES", "BIASES", "STATICS", "HOSTS", "AUTOMATA")
    meta = {**dict(zip(names, flags, strict=True)), "CHUNK": CHUNK}
    launches = [Launch(process_kernel, (chunks_of(vocab), num_rows), args, meta)]
    for group, unless in tables.prefers if prefers else ():
        launches += prefer_launches(processed_NV, rows_N, group, unless, parts_NC)
    ids_2N, best_2N, join = joined(parts_2NC.flatten(0, 1), vocab)
    return (processed_NV, ids_2N[:num_rows], best_2N[:num_rows], best_2N[num_rows:]), chained(
        [*launches, join], device
    )


def sample_process(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    tables: SampleTables,
    *,
    penalties: bool = False,
    biases: bool = False,
    statics: bool = False,
    automata: bool = False,
    hosts: bool = False,
    prefers: bool = False,
) -> Processed:
    """As ``kestrel.ops.sample_process``."""
    assert not penalties or tables.counts_RV is not None, "a row has penalties and nothing counts its tokens"
    flags = (penalties, biases, statics, hosts, automata)
    out, launches = _launches(logits_NV, rows_N, tables, flags, prefers)
    for launch in launches:
        launch.run()
    return out


_USUAL: tuple[tuple[Flags, bool], ...] = (  # the programs that the sampler rounds a step's needs up to
    ((False, True, True, False, True), False),
    ((False, True, True, False, True), True),
    ((True, False, False, False, False), False),
)


def _planned(query: OpQuery, flags: Flags, prefers: bool) -> list[Launch]:
    vocab = query.get("vocab")
    logits_NV = torch.empty((2, vocab), dtype=dtype_of(query), device="meta")
    rows_N = torch.empty(2, dtype=torch.int64, device="meta")
    return _launches(logits_NV, rows_N, meta_tables(vocab), flags, prefers)[1]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of(launch for flags, prefers in _USUAL for launch in _planned(query, flags, prefers))


IMPLS = {"sample_process": Impl(supports=supports, fn=sample_process, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Everything at once, and what steps usually need."""
    query = OpQuery.of("sample_process", vocab=51_866, dtype="bfloat16")
    yield from cases_of("sample_process", _planned(query, (True, True, True, True, True), True)[:3])
    for number, flags in enumerate(dict.fromkeys(flags for flags, _ in _USUAL)):
        yield from cases_of(f"sample_process usual {number}", _planned(query, flags, False)[:1])
