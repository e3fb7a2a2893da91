"""sample_draw: the largest sum of a tempered logit and its Gumbel noise, over what the filters leave.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10); Maddison et al. 2014,
arXiv 1411.0030, section 2 (the Gumbel maximum).
Shapes: N rows of a step, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from kestrel.ops.sample_tables import SampleTables
from kestrel.spi import Impl, OpQuery
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, jobs_of, power_of_two
from kestrel_kernels_cuda.ordering import order_of
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.sampling_meta import meta_tables
from kestrel_kernels_cuda.sampling_parts import (
    CHUNK,
    LOWEST,
    SCALARS,
    STRIDES,
    best_of,
    cases_of,
    chained,
    chunks_of,
    log_of,
    rows_of,
    supports,
)
from kestrel_kernels_cuda.sampling_select import Threshold, select_launches

__all__ = ["IMPLS", "compile_cases", "sample_draw"]


@triton.jit
def gumbel_of(word):
    """Standard Gumbel numbers of random words, as ``kestrel.ops.philox`` makes them."""
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, -1.0, rest - 1.0)
    # log1p: what rounding took from 1 - uniform is put back; the upper tail, where the winners are, stays exact
    log_rest = tl.where(rest == 1.0, -uniform, tl.log(rest) * (-uniform / lost))
    return -tl.log(-log_rest)


@triton.jit
def noise_of(chunk, seed, index, choice, CHUNK: tl.constexpr):
    """Noise of one chunk: token v takes word v % 4 of vocabulary block v // 4."""
    block = (chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)).to(tl.uint32)
    zero = block * 0
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second = zero + index.to(tl.uint32), zero + choice.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(first, second, block, zero, zero + low, zero + high)
    return gumbel_of(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [CHUNK]))


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def draw_kernel(
    logits, stride_n, best, rows, floats, stride_floats, ints, stride_ints, index, stride_index,
    threshold, cut, near, parts, vocab,
    RANKS: tl.constexpr, MIN_P: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The packed largest score of one chunk."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + n)
    temperature = tl.load(floats + row * stride_floats)
    may_stay = temperature > 0.0
    part = n * tl.num_programs(0) + chunk
    packed = tl.full([], LOWEST, tl.int64)
    if RANKS:
        may_stay = may_stay & (tl.load(near + part) > 0)
    if may_stay:
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = place < vocab
        x = tl.load(logits + n * stride_n + place, mask=is_in, other=float("-inf")).to(tl.float32)
        scaled = (x - tl.load(best + n)) / temperature
        kept = is_in
        if RANKS:
            order, least = order_of(x), tl.load(threshold + n)
            kept = kept & ((order > least) | ((order == least) & (place <= tl.load(cut + n))))
        if MIN_P:
            kept = kept & (scaled >= log_of(tl.load(floats + row * stride_floats + 2)))
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            seed, choice = tl.load(ints + row * stride_ints + 1), tl.load(ints + row * stride_ints + 2)
            noise = noise_of(chunk, seed, tl.load(index + row * stride_index), choice, CHUNK)
            packed = best_of(scaled + noise, place, kept)
    tl.store(parts + part, packed)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def drawn_kernel(
    scores, greedy, rows, floats, stride_floats, ids, chunks, vocab, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    """The id of the largest score of each row, or the greedy one."""
    start_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    chosen = tl.load(greedy + n)
    if tl.load(floats + row * stride_floats) > 0.0:
        chunk = tl.arange(0, BLOCK_C)
        packed = tl.max(tl.load(scores + n * chunks + chunk, mask=chunk < chunks, other=LOWEST), axis=0)
        chosen = tl.minimum(0x7FFFFFFF - (packed & 0xFFFFFFFF), vocab - 1)
    tl.store(ids + n, chosen)


def _launches(
    logits_NV: torch.Tensor,
    best_N: torch.Tensor,
    greedy_N: torch.Tensor,
    rows_N: torch.Tensor,
    tables: SampleTables,
    ranks: bool,
    min_p: bool,
) -> tuple[torch.Tensor, list[Launch]]:
    logits_NV = rows_of(logits_NV)
    (num_rows, vocab), device, chunks = logits_NV.shape, logits_NV.device, chunks_of(logits_NV.shape[1])
    kept, launches = Threshold(rows_N, rows_N, rows_N), list[Launch]()  # not read without ranks
    if ranks:
        kept, launches = select_launches(logits_NV, best_N, rows_N, tables)
    parts_NC = torch.empty((num_rows, chunks), dtype=torch.int64, device=device)
    ids_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    floats = (tables.floats_R6, tables.floats_R6.stride(0))
    args = (
        logits_NV, logits_NV.stride(0), best_N, rows_N, *floats, tables.ints_R4, tables.ints_R4.stride(0),
        tables.index_R, tables.index_R.stride(0), *kept, parts_NC, vocab,
    )  # fmt: skip
    draw = Launch(draw_kernel, (chunks, num_rows), args, {"RANKS": ranks, "MIN_P": min_p, "CHUNK": CHUNK})
    last = (parts_NC, greedy_N, rows_N, *floats, ids_N, chunks, vocab)
    drawn = Launch(drawn_kernel, (num_rows,), last, {"BLOCK_C": power_of_two(chunks)})
    return ids_N, chained([*launches, draw, drawn], device)


def sample_draw(
    logits_NV: torch.Tensor,
    best_N: torch.Tensor,
    greedy_N: torch.Tensor,
    rows_N: torch.Tensor,
    tables: SampleTables,
    *,
    ranks: bool = False,
    min_p: bool = False,
) -> torch.Tensor:
    """As ``kestrel.ops.sample_draw``."""
    ids_N, launches = _launches(logits_NV, best_N, greedy_N, rows_N, tables, ranks, min_p)
    for launch in launches:
        launch.run()
    return ids_N


def _planned(query: OpQuery, ranks: bool, min_p: bool) -> list[Launch]:
    vocab = query.get("vocab")
    logits_NV = torch.empty((2, vocab), dtype=dtype_of(query), device="meta")
    best_N = torch.empty(2, dtype=torch.float32, device="meta")
    rows_N = torch.empty(2, dtype=torch.int64, device="meta")
    return _launches(logits_NV, best_N, rows_N, rows_N, meta_tables(vocab), ranks, min_p)[1]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of([*_planned(query, False, False), *_planned(query, True, True)])


IMPLS = {"sample_draw": Impl(supports=supports, fn=sample_draw, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Every filter and none, over Qwen 3.5's vocabulary."""
    query = OpQuery.of("sample_draw", vocab=248_320, dtype="bfloat16")
    yield from cases_of("sample_draw", _planned(query, True, True))
    yield from cases_of("sample_draw plain", _planned(query, False, False)[:1])
