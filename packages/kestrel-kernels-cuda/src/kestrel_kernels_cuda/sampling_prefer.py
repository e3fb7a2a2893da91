"""One place of "prefer_group" rules: what is inside and outside of each row's group, then who wins.

Shapes: N rows of a step, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kestrel.ops.sample_tables import RowList
from kestrel_kernels_cuda.launch import Launch, power_of_two
from kestrel_kernels_cuda.ordering import order_of, value_of
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.sampling_parts import (
    CHUNK,
    SCALARS,
    STRIDES,
    best_of,
    finite_or_zero,
    list_of,
    log_sum_of,
)

__all__ = ["member_of", "prefer_launches"]


@triton.jit
def member_of(member, place, first_place, end_place, items, count):
    """``member`` and the ids of ranges (start, end)."""
    for k in range(count):
        start, end = tl.load(items + 2 * k).to(tl.int32), tl.load(items + 2 * k + 1).to(tl.int32)
        if (start < end_place) & (end > first_place):
            member = member | ((place >= start) & (place < end))
    return member


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def scan_kernel(
    logits, rows, sums, vocab, chunks, group, num_group, stride_group, unless, num_unless, stride_unless,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of one chunk: the largest inside, the sum of exponentials relative to it, and the largest outside."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + n)
    count = tl.load(num_group + row * stride_group).to(tl.int32)
    if count > 0:
        first_place = chunk * CHUNK
        end_place = first_place + CHUNK
        place = first_place + tl.arange(0, CHUNK)
        is_in = place < vocab
        x = tl.load(logits + n * vocab + place, mask=is_in, other=float("-inf"))
        inside = member_of(place < 0, place, first_place, end_place, group + row * stride_group, count)
        num_free = tl.load(num_unless + row * stride_unless).to(tl.int32)
        free = member_of(place < 0, place, first_place, end_place, unless + row * stride_unless, num_free)
        mine = tl.where(inside & (free == 0), x, float("-inf"))
        others = tl.where(inside | free, float("-inf"), x)
        largest = tl.max(mine, axis=0)
        sum_of = tl.sum(tl.exp(mine - finite_or_zero(largest)), axis=0)
        at = sums + n * 3 * chunks + chunk
        tl.store(at, largest)
        tl.store(at + chunks, sum_of)
        tl.store(at + 2 * chunks, value_of(tl.max(order_of(others), axis=0)))


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def prefer_kernel(
    logits, rows, sums, parts, vocab, chunks, group, num_group, stride_group, unless, num_unless, stride_unless,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Mask one chunk outside of a group that wins, in place; the chunk's packed largest is made anew."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + n)
    count = tl.load(num_group + row * stride_group).to(tl.int32)
    if count > 0:
        every = tl.arange(0, BLOCK_C)
        at, is_chunk = sums + n * 3 * chunks + every, every < chunks
        largest_C = tl.load(at, mask=is_chunk, other=float("-inf"))
        sum_C = tl.load(at + chunks, mask=is_chunk, other=0.0)
        outside_C = tl.load(at + 2 * chunks, mask=is_chunk, other=float("-inf"))
        largest, log_sum = log_sum_of(largest_C, sum_C)
        if largest + log_sum > value_of(tl.max(order_of(outside_C), axis=0)):
            first_place = chunk * CHUNK
            end_place = first_place + CHUNK
            place = first_place + tl.arange(0, CHUNK)
            is_in = place < vocab
            x = tl.load(logits + n * vocab + place, mask=is_in, other=float("-inf"))
            kept = member_of(place < 0, place, first_place, end_place, group + row * stride_group, count)
            num_free = tl.load(num_unless + row * stride_unless).to(tl.int32)
            kept = member_of(kept, place, first_place, end_place, unless + row * stride_unless, num_free)
            x = tl.where(kept, x, float("-inf"))
            tl.store(logits + n * vocab + place, x, mask=is_in)
            tl.store(parts + n * chunks + chunk, best_of(x, place, is_in))


def prefer_launches(
    logits_NV: torch.Tensor, rows_N: torch.Tensor, group: RowList, unless: RowList, parts_NC: torch.Tensor
) -> list[Launch]:
    """Launches that apply one rule of each row to float32 ``logits`` and the packed largest of their chunks."""
    num_rows, vocab = logits_NV.shape
    chunks = parts_NC.shape[1]
    sums_N3C = torch.empty((num_rows, 3, chunks), dtype=torch.float32, device=logits_NV.device)
    lists = (*list_of(group), *list_of(unless))
    grid = (chunks, num_rows)
    scan = Launch(scan_kernel, grid, (logits_NV, rows_N, sums_N3C, vocab, chunks, *lists), {"CHUNK": CHUNK})
    args = (logits_NV, rows_N, sums_N3C, parts_NC, vocab, chunks, *lists)
    return [scan, Launch(prefer_kernel, grid, args, {"CHUNK": CHUNK, "BLOCK_C": power_of_two(chunks)})]
