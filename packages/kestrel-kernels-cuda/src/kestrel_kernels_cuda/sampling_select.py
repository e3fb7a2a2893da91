"""Which tokens top-k and top-p leave, without sorting the vocabulary.

A histogram over the distance to the best logit gives, for each bin, how many tokens it holds and their mass; both
edges then lie in few bins. The tokens of those are written down in the order of their ids, and one program per row
finds the edge among them. What is left is every key above a threshold, and at the threshold the ids up to a cut.

Source: Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units" (buckets, then the edge within
one), here for the mass as well as the count.
Shapes: N rows of a step, V vocabulary, C chunks of a row, B bins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kestrel.ops.sample_tables import SampleTables
from kestrel_kernels_cuda.launch import Launch, power_of_two
from kestrel_kernels_cuda.ordering import order_of
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.sampling_edges import edge_by_bisection, edge_by_ranks, mass_of
from kestrel_kernels_cuda.sampling_parts import CHUNK, SCALARS, STRIDES, chunks_of

__all__ = ["Threshold", "select_launches"]

NUM_BINS = 32  # a quarter of an octave of 1 + distance each: the last one begins at a distance of 220
BINS = tl.constexpr(NUM_BINS)
SHIFT = tl.constexpr(21)  # float32 bits below the two leading ones of the fraction
ONE = tl.constexpr(508)  # the bits of 1.0 above SHIFT
BLOCK = 4096  # candidates looked at together
FEW, STEP = 512, 8  # candidates whose ranks are counted pair by pair, and against how many at once


class Threshold(NamedTuple):
    """A token stays when its key is above ``order``, or equal to it and its id at most ``cut``; none does in chunks
    where ``kept`` is 0."""

    order_N: torch.Tensor
    cut_N: torch.Tensor
    kept_NC: torch.Tensor


@triton.jit
def bin_of(x, best):
    """The bin of logits, from 0 at the best."""
    bits = (1.0 + (best - x)).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> SHIFT) - ONE, 0), BINS - 1)


@triton.jit
def settings_of(floats, stride_floats, ints, stride_ints, row, vocab):
    """Temperature, top-k (at most V), top-p, and whether top-k and top-p are on."""
    temperature = tl.load(floats + row * stride_floats)
    top_p = tl.load(floats + row * stride_floats + 1)
    top_k = tl.load(ints + row * stride_ints).to(tl.int32)
    has_k = (temperature > 0.0) & (top_k > 0) & (top_k < vocab)
    has_p = (temperature > 0.0) & (top_p < 1.0)
    return temperature, top_k, top_p, has_k, has_p


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def histogram_kernel(
    logits,
    stride_n,
    best,
    rows,
    floats,
    stride_floats,
    ints,
    stride_ints,
    counts,
    masses,
    vocab,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tokens and mass of one chunk by bin."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + n)
    temperature, _, _, has_k, has_p = settings_of(floats, stride_floats, ints, stride_ints, row, vocab)
    if has_k | has_p:
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = place < vocab
        first = tl.load(best + n)
        x = tl.load(logits + n * stride_n + place, mask=is_in, other=float("-inf")).to(tl.float32)
        bins = tl.where(is_in, bin_of(x, first), BINS)
        mass = mass_of(x, first, temperature)
        number = tl.arange(0, BINS)
        counts_B = tl.zeros([BINS], tl.int32)
        masses_B = tl.zeros([BINS], tl.float32)
        low = tl.min(bins, axis=0)
        high = tl.max(tl.where(is_in, bins, 0), axis=0)
        for b in range(low, high + 1):
            is_here = bins == b
            counts_B = tl.where(number == b, tl.sum(is_here.to(tl.int32), axis=0), counts_B)
            masses_B = tl.where(number == b, tl.sum(tl.where(is_here, mass, 0.0), axis=0), masses_B)
        at = (n * tl.num_programs(0) + chunk) * BINS + number
        tl.store(counts + at, counts_B)
        tl.store(masses + at, masses_B)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def pick_kernel(
    rows, floats, stride_floats, ints, stride_ints, counts, masses, bins, bases, offsets, kept, vocab, chunks,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The bins of one row in which the edges lie, what is before them, and where each chunk's candidates go.

    ``bins`` [N, 3]: the first and last bin, and how many tokens are before them; ``bases`` [N, 2]: the mass before
    them, and of all. ``offsets`` [N, C + 1]. ``kept`` [N, C]: whether a chunk holds tokens that may stay.
    """
    start_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    _, top_k, top_p, has_k, has_p = settings_of(floats, stride_floats, ints, stride_ints, row, vocab)
    chunk = tl.arange(0, BLOCK_C)
    if has_k | has_p:
        number = tl.arange(0, BINS)
        at = (n * chunks + chunk[:, None]) * BINS + number[None, :]
        is_chunk = (chunk < chunks)[:, None] & (number >= 0)[None, :]
        counts_CB = tl.load(counts + at, mask=is_chunk, other=0)
        counts_B = tl.sum(counts_CB, axis=0)
        masses_B = tl.sum(tl.load(masses + at, mask=is_chunk, other=0.0), axis=0)
        until_B = tl.cumsum(counts_B, axis=0)
        mass_until_B = tl.cumsum(masses_B, axis=0)
        total = tl.sum(masses_B, axis=0)
        last_k = tl.minimum(tl.sum((until_B < top_k).to(tl.int32), axis=0), BINS - 1)
        least = tl.where(
            has_k, tl.sum(tl.where(number == last_k, mass_until_B - masses_B, 0.0), axis=0), total
        )
        last_p = tl.minimum(tl.sum((mass_until_B <= top_p * least).to(tl.int32), axis=0), BINS - 1)
        low = tl.where(has_p, tl.where(has_k, tl.minimum(last_p, last_k), last_p), last_k)
        high = tl.where(has_k, last_k, last_p)
        tl.store(bins + 3 * n, low)
        tl.store(bins + 3 * n + 1, high)
        tl.store(bins + 3 * n + 2, tl.sum(tl.where(number < low, counts_B, 0), axis=0))
        tl.store(bases + 2 * n, tl.sum(tl.where(number == low - 1, mass_until_B, 0.0), axis=0))
        tl.store(bases + 2 * n + 1, total)
        is_candidate = ((number >= low) & (number <= high))[None, :]
        found_C = tl.sum(tl.where(is_candidate, counts_CB, 0), axis=1)
        near_C = tl.sum(tl.where((number <= high)[None, :], counts_CB, 0), axis=1)
        tl.store(kept + n * chunks + chunk, near_C, mask=chunk < chunks)
        tl.store(offsets + n * (chunks + 1) + 1 + chunk, tl.cumsum(found_C, axis=0), mask=chunk < chunks)
        tl.store(offsets + n * (chunks + 1), 0)
    else:
        tl.store(kept + n * chunks + chunk, chunk * 0 + 1, mask=chunk < chunks)
        tl.store(offsets + n * (chunks + 1) + chunk, chunk * 0, mask=chunk < chunks)
        tl.store(offsets + n * (chunks + 1) + chunks, 0)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def gather_kernel(
    logits, stride_n, best, bins, offsets, orders, ids, vocab, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Write down the candidates of one chunk: keys and ids, in the order of ids."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = offsets + n * (tl.num_programs(0) + 1) + chunk
    start = tl.load(at)
    if tl.load(at + 1) > start:
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = place < vocab
        x = tl.load(logits + n * stride_n + place, mask=is_in, other=float("-inf")).to(tl.float32)
        b = bin_of(x, tl.load(best + n))
        is_candidate = is_in & (b >= tl.load(bins + 3 * n)) & (b <= tl.load(bins + 3 * n + 1))
        rank = start + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        tl.store(orders + n * vocab + rank, order_of(x), mask=is_candidate)
        tl.store(ids + n * vocab + rank, place, mask=is_candidate)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=SCALARS)
def select_kernel(
    best, rows, floats, stride_floats, ints, stride_ints, bins, bases, offsets, orders, ids, thresholds, cuts,
    vocab, chunks, BLOCK: tl.constexpr, FEW: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Threshold and cut of one row."""
    start_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n)
    temperature, top_k, top_p, has_k, has_p = settings_of(
        floats, stride_floats, ints, stride_ints, row, vocab
    )
    num = tl.load(offsets + n * (chunks + 1) + chunks)
    threshold = num * 0 - 0x7FFFFFFF
    cut = num * 0 + 0x7FFFFFFF
    if num > 0:
        orders += n * vocab
        ids += n * vocab
        first = tl.load(best + n)
        count_before, mass_before = tl.load(bins + 3 * n + 2), tl.load(bases + 2 * n)
        total = tl.load(bases + 2 * n + 1)
        if num <= FEW:
            threshold, cut = edge_by_ranks(
                orders, ids, num, top_k, top_p, has_k, has_p, count_before, mass_before, total, first, temperature,
                FEW, STEP,
            )  # fmt: skip
        else:
            threshold, cut = edge_by_bisection(
                orders, ids, num, top_k, top_p, has_k, has_p, count_before, mass_before, total, first, temperature,
                BLOCK,
            )  # fmt: skip
    tl.store(thresholds + n, threshold)
    tl.store(cuts + n, cut)


def select_launches(
    logits_NV: torch.Tensor, best_N: torch.Tensor, rows_N: torch.Tensor, tables: SampleTables
) -> tuple[Threshold, list[Launch]]:
    """Where the thresholds will be once the launches ran. Rows without top-k and top-p keep every token."""
    (num_rows, vocab), device = logits_NV.shape, logits_NV.device
    chunks = chunks_of(vocab)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    counts_NCB = empty(num_rows, chunks, NUM_BINS)
    masses_NCB = empty(num_rows, chunks, NUM_BINS, dtype=torch.float32)
    bins_N3, bases_N2 = empty(num_rows, 3), empty(num_rows, 2, dtype=torch.float32)
    offsets_NC = empty(num_rows, chunks + 1)
    orders_NV, ids_NV = empty(num_rows, vocab), empty(num_rows, vocab)
    kept = Threshold(empty(num_rows), empty(num_rows), empty(num_rows, chunks))
    stride = logits_NV.stride(0)
    rows = (rows_N, tables.floats_R6, tables.floats_R6.stride(0), tables.ints_R4, tables.ints_R4.stride(0))
    grid, meta = (chunks, num_rows), {"CHUNK": CHUNK}
    return kept, [
        Launch(
            histogram_kernel, grid, (logits_NV, stride, best_N, *rows, counts_NCB, masses_NCB, vocab), meta
        ),
        Launch(
            pick_kernel,
            (num_rows,),
            (*rows, counts_NCB, masses_NCB, bins_N3, bases_N2, offsets_NC, kept.kept_NC, vocab, chunks),
            {"BLOCK_C": power_of_two(chunks), "num_warps": 8},
        ),
        Launch(
            gather_kernel,
            grid,
            (logits_NV, stride, best_N, bins_N3, offsets_NC, orders_NV, ids_NV, vocab),
            meta,
        ),
        Launch(
            select_kernel,
            (num_rows,),
            (
                best_N,
                *rows,
                bins_N3,
                bases_N2,
                offsets_NC,
                orders_NV,
                ids_NV,
                kept.order_N,
                kept.cut_N,
                vocab,
                chunks,
            ),
            {"BLOCK": BLOCK, "FEW": FEW, "STEP": STEP, "num_warps": 8},
        ),
    ]
