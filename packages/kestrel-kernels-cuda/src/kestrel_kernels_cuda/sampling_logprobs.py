"""sample_logprobs: sums and the likeliest ids of each chunk, then of each row.

Shapes: N rows, V vocabulary, C chunks of a row, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, jobs_of, power_of_two
from kestrel_kernels_cuda.ordering import value_of
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.sampling_parts import (
    CHUNK,
    LOWEST,
    cases_of,
    chained,
    chunks_of,
    finite_or_zero,
    log_sum_of,
    packed_of,
    rows_of,
    supports,
)

__all__ = ["IMPLS", "compile_cases", "sample_logprobs"]

MOST_COUNT = 32


@triton.jit
def top_parts_kernel(
    logits, sums, tops, stride_n, vocab, COUNT: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Of one chunk: the largest logit, the sum of exponentials relative to it, and the packed likeliest."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = n * tl.num_programs(0) + chunk
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    is_in = place < vocab
    x = tl.load(logits + n * stride_n + place, mask=is_in, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, axis=0)
    tl.store(sums + 2 * part, largest)
    tl.store(sums + 2 * part + 1, tl.sum(tl.exp(x - finite_or_zero(largest)), axis=0))
    if COUNT > 0:
        packed = packed_of(x, place, is_in)
        for k in range(COUNT):
            best = tl.max(packed, axis=0)
            tl.store(tops + part * COUNT + k, best)
            packed = tl.where(packed == best, LOWEST, packed)


@triton.jit
def top_kernel(
    logits, ids, sums, tops, logprob, top_ids, top_logprobs, stride_n, vocab, chunks,
    COUNT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Joins the chunks of one row."""
    start_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    at, is_chunk = sums + 2 * (n * chunks + chunk), chunk < chunks
    largest_C = tl.load(at, mask=is_chunk, other=float("-inf"))
    sum_C = tl.load(at + 1, mask=is_chunk, other=0.0)
    largest, log_sum = log_sum_of(largest_C, sum_C)
    x = tl.load(logits + n * stride_n + tl.load(ids + n)).to(tl.float32)
    tl.store(logprob + n, x - largest - log_sum)
    if COUNT > 0:
        every = tl.arange(0, BLOCK_T)
        packed = tl.load(tops + n * chunks * COUNT + every, mask=every < chunks * COUNT, other=LOWEST)
        for k in range(COUNT):
            best = tl.max(packed, axis=0)
            value = value_of((best >> 32).to(tl.int32))
            place = 0x7FFFFFFF - (best & 0xFFFFFFFF)
            tl.store(top_ids + n * COUNT + k, tl.minimum(place, vocab - 1))
            tl.store(top_logprobs + n * COUNT + k, value - largest - log_sum)
            packed = tl.where(packed == best, LOWEST, packed)


Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _launches(logits_NV: torch.Tensor, ids_N: torch.Tensor, count: int) -> tuple[Logprobs, list[Launch]]:
    logits_NV = rows_of(logits_NV)
    (num_rows, vocab), device, chunks = logits_NV.shape, logits_NV.device, chunks_of(logits_NV.shape[1])
    sums_NC2 = torch.empty((num_rows, chunks, 2), dtype=torch.float32, device=device)
    tops_NCK = torch.empty((num_rows, chunks, count), dtype=torch.int64, device=device)
    logprob_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    top_ids_NK = torch.empty((num_rows, count), dtype=torch.int64, device=device)
    top_NK = torch.empty((num_rows, count), dtype=torch.float32, device=device)
    stride = logits_NV.stride(0)
    first = Launch(
        top_parts_kernel,
        (chunks, num_rows),
        (logits_NV, sums_NC2, tops_NCK, stride, vocab),
        {"COUNT": count, "CHUNK": CHUNK},
    )
    args = (logits_NV, ids_N, sums_NC2, tops_NCK, logprob_N, top_ids_NK, top_NK, stride, vocab, chunks)
    blocks = {"BLOCK_C": power_of_two(chunks), "BLOCK_T": power_of_two(chunks * count)}
    second = Launch(top_kernel, (num_rows,), args, {"COUNT": count, **blocks, "num_warps": 8})
    return (logprob_N, top_ids_NK, top_NK), chained([first, second], device)


def sample_logprobs(logits_NV: torch.Tensor, ids_N: torch.Tensor, count: int) -> Logprobs:
    """As ``kestrel.ops.sample_logprobs``. Equal logits are named in the order of their ids."""
    out, launches = _launches(logits_NV, ids_N, count)
    for launch in launches:
        launch.run()
    return out


def _supports(query: OpQuery) -> Yes | No:
    if query.get("count") > MOST_COUNT:
        return No(f"names at most {MOST_COUNT} of the likeliest tokens, not {query.get('count')}")
    return supports(query)


def _planned(query: OpQuery, count: int) -> list[Launch]:
    logits_NV = torch.empty((2, query.get("vocab")), dtype=dtype_of(query), device="meta")
    return _launches(logits_NV, torch.empty(2, dtype=torch.int64, device="meta"), count)[1]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of([*_planned(query, query.get("count")), *_planned(query, 0)])


IMPLS = {"sample_logprobs": Impl(supports=_supports, fn=sample_logprobs, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """The twenty likeliest of Qwen 3.5's vocabulary, and none."""
    query = OpQuery.of("sample_logprobs", vocab=248_320, dtype="bfloat16", count=20)
    yield from cases_of("sample_logprobs", _planned(query, 20))
    yield from cases_of("sample_logprobs chosen", _planned(query, 0))
