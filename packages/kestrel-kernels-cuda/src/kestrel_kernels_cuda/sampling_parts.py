"""What the sampling kernels share: the largest of a chunk, and of all chunks.

A row's vocabulary is cut into chunks of a fixed size, one program each, whatever the batch: sums of floating-point
numbers have one order, so a row's result never depends on its neighbours. A second kernel joins the chunks of a row.

Shapes: N rows of a step, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from kestrel.ops.sample_tables import RowList
from kestrel.spi import No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, power_of_two, refuse_dtype
from kestrel_kernels_cuda.ordering import order_of, value_of
from kestrel_kernels_cuda.overlap import overlap, overlapped, start_next, wait_for_previous

__all__ = [
    "CHUNK",
    "LOWEST",
    "MOST_VOCAB",
    "SCALARS",
    "STRIDES",
    "best_of",
    "cases_of",
    "chained",
    "chunks_of",
    "finite_or_zero",
    "join_kernel",
    "joined",
    "lean_best_of",
    "list_of",
    "log_of",
    "log_sum_of",
    "packed_of",
    "rows_of",
    "supports",
]

STRIDES = [
    "stride_floats", "stride_ints", "stride_index", "stride_states", "stride_stops", "stride_biases",
    "stride_statics", "stride_hosts", "stride_numbers", "stride_group", "stride_unless", "stride_bounds",
]  # fmt: skip
"""Arguments that are words from record to record. They move when a list grows, which must not compile a kernel anew."""

SCALARS = [
    "rows", "best", "first", "greedy", "parts", "first_parts", "floats", "ints", "index", "states", "stops",
    "num_stops", "biases", "num_biases", "statics", "num_statics", "hosts", "num_hosts", "numbers", "num_numbers",
    "group", "num_group", "unless", "num_unless", "base", "bounds", "num_bounds",
]  # fmt: skip
"""Arguments that are read a number at a time, so that it does not matter where in a record they lie."""

CHUNK = 2048  # 122 programs for one row of 248,320: about one per multiprocessor of a large device
MOST_VOCAB = 1 << 20  # chunks of a row that one program joins
LOWEST = tl.constexpr(-(2**63))  # below every packed logit


@triton.jit
def log_of(x):
    """Logarithms; -inf where ``x`` is 0 or no number."""
    return tl.where(x > 0.0, tl.log(tl.where(x > 0.0, x, 1.0)), float("-inf"))


@triton.jit
def finite_or_zero(x):
    """``x``, or 0 where it is infinite: what exponents are taken relative to."""
    return tl.where((x == float("inf")) | (x == float("-inf")), 0.0, x)


@triton.jit
def log_sum_of(largest_C, sum_C):
    """(base, logarithm of the sum relative to it) of a row, from each chunk's largest and its sum relative to that."""
    base = finite_or_zero(tl.max(largest_C, axis=0))
    share_C = tl.where(sum_C == 0.0, 0.0, sum_C * tl.exp(finite_or_zero(largest_C) - base))
    return base, log_of(tl.sum(share_C, axis=0))


@triton.jit
def packed_of(x, place, is_in):
    """Keys above the complements of places, so that of equals the first is the largest."""
    packed = order_of(x).to(tl.int64) * 4294967296 + (0x7FFFFFFF - place).to(tl.int64)
    return tl.where(is_in, packed, LOWEST)


@triton.jit
def best_of(x, place, is_in):
    """The largest of a chunk, packed."""
    return tl.max(packed_of(x, place, is_in), axis=0)


@triton.jit
def lean_best_of(x, place, is_in):
    """``best_of`` by two reductions, for kernels that have no registers left."""
    order = order_of(x)
    best = tl.max(tl.where(is_in, order, -0x80000000), axis=0)
    first = tl.min(tl.where(is_in & (order == best), place, 0x7FFFFFFF), axis=0)
    return best.to(tl.int64) * 4294967296 + (0x7FFFFFFF - first).to(tl.int64)


@triton.jit
def join_kernel(parts, ids, best, chunks, vocab, BLOCK_C: tl.constexpr, PDL: tl.constexpr):
    """Ids and values of the largest of each row."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    packed = tl.max(tl.load(parts + row * chunks + chunk, mask=chunk < chunks, other=LOWEST), axis=0)
    place = 0x7FFFFFFF - (packed & 0xFFFFFFFF)
    tl.store(ids + row, tl.minimum(place, vocab - 1))
    tl.store(best + row, value_of((packed >> 32).to(tl.int32)))


def chunks_of(vocab: int) -> int:
    """How many chunks a row of ``vocab`` logits has."""
    return -(-vocab // CHUNK)


def joined(parts_NC: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor, Launch]:
    """Where ids [N] and values [N] will be once the launch ran."""
    num_rows, chunks = parts_NC.shape
    ids_N = torch.empty(num_rows, dtype=torch.int64, device=parts_NC.device)
    best_N = torch.empty(num_rows, dtype=torch.float32, device=parts_NC.device)
    args = (parts_NC, ids_N, best_N, chunks, vocab)
    return ids_N, best_N, Launch(join_kernel, (num_rows,), args, {"BLOCK_C": power_of_two(chunks)})


def rows_of(logits_NV: torch.Tensor) -> torch.Tensor:
    """Logits whose vocabulary is contiguous."""
    return logits_NV if logits_NV.stride(1) == 1 or logits_NV.shape[1] == 1 else logits_NV.contiguous()


def list_of(row_list: RowList) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Arguments that stand for a list: its items, its lengths, and words from row to row of both."""
    items, length, size = row_list.items_RKD, row_list.length_R, row_list.items_RKD.shape[2]
    assert items.stride(2) == 1 or size == 1, "the words of a tuple lie side by side"
    assert items.stride(1) == size or items.shape[1] == 1, "the tuples of a list lie side by side"
    assert items.stride(0) == length.stride(0), "a list and its length belong to one record"
    return items, length, items.stride(0)


def supports(query: OpQuery) -> Yes | No:
    """Yes to vocabularies whose chunks one program joins."""
    if query.get("vocab") > MOST_VOCAB:
        return No(f"serves vocabularies up to {MOST_VOCAB:,}, not {query.get('vocab'):,}")
    return refuse_dtype(query) or Yes()


def chained(launches: Iterable[Launch], device: torch.device) -> list[Launch]:
    """``launches`` of which each starts, where the device can, while the one before it ends."""
    return [replace(launch, meta={**launch.meta, **overlap(device)}) for launch in launches]


def cases_of(name: str, launches: Iterable[Launch]) -> Iterator[CompileCase]:
    """Cases of launches of tensors of the meta device, as each architecture runs them."""
    for launch in launches:
        title = f"{name} {launch.kernel.__name__}"
        yield compile_case_of(title, launch, (80,))
        yield compile_case_of(title, overlapped(launch))
