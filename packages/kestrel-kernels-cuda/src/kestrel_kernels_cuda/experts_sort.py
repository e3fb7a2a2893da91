"""Pairs of token and expert sorted by expert, on the device alone: a counting sort, in one launch for few
pairs and in four for many.

Letters: P pairs, E experts (padded to a power of two), N chunks of pairs, M tiles of rows that share an expert. A row
is a place in the sorted order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kestrel_kernels_cuda.launch import Launch, power_of_two
from kestrel_kernels_cuda.overlap import overlap, start_next, wait_for_previous

__all__ = ["Sorted", "sort_launches"]

CHUNK = 128  # pairs of one program, which compares each with each
COLUMNS = 16  # experts of one scanning program
TILES = 64  # tiles of one program
SMALL = (512, 2048)  # pairs that one program counts


@dataclass(frozen=True, slots=True)
class Sorted:
    """``order_P``: the pair at each row. ``tile_expert_M`` (−1: no tile), ``tile_row_M`` its first row and
    ``tile_end_M`` the end of its expert's rows. All int32. ``block``: rows of a tile."""

    order_P: torch.Tensor
    tile_expert_M: torch.Tensor
    tile_row_M: torch.Tensor
    tile_end_M: torch.Tensor
    block: int


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(experts, counts, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """``counts`` [N, E]: pairs of each chunk that go to each expert."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = pair < pairs
    expert = tl.load(experts + pair, mask=inside, other=0).to(tl.int32)
    found = tl.histogram(expert, EXPERTS, mask=inside)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(
    counts, totals, chunks, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``counts`` become the pairs of earlier chunks; ``totals`` [E]."""
    start_next(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    before = tl.zeros([1, COLUMNS], tl.int32)
    for first in range(0, chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)[:, None]
        place = counts + chunk * EXPERTS + expert
        found = tl.load(place, mask=chunk < chunks, other=0)
        tl.store(place, before + tl.cumsum(found, axis=0) - found, mask=chunk < chunks)
        before += tl.sum(found, axis=0)[None, :]
    tl.store(totals + expert, before)


@triton.jit
def _store_tiles(
    total, start, tile_expert, tile_row, tile_end, part, tiles,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``TILES`` tiles from ``part`` · TILES on, of experts with ``total`` rows from ``start`` on."""
    expert = tl.arange(0, EXPERTS)
    of_expert = (total + BLOCK - 1) // BLOCK
    end_tile = tl.cumsum(of_expert, axis=0)
    tile = part * TILES + tl.arange(0, TILES)
    # the one expert whose tiles include this one; none behind the last
    mine = (tile[:, None] < end_tile[None, :]) & (tile[:, None] >= (end_tile - of_expert)[None, :])
    found = tl.sum(tl.where(mine, expert[None, :] + 1, 0), axis=1) - 1
    first_row = start - (end_tile - of_expert) * BLOCK
    row = tl.sum(tl.where(mine, first_row[None, :], 0), axis=1) + tile * BLOCK
    end = tl.sum(tl.where(mine, (start + total)[None, :], 0), axis=1)
    inside = tile < tiles
    tl.store(tile_expert + tile, found, mask=inside)
    tl.store(tile_row + tile, row, mask=inside)
    tl.store(tile_end + tile, end, mask=inside)


@triton.jit
def _rank(experts, expert, first, pairs, CHUNK: tl.constexpr):
    """How many earlier pairs of the chunk from ``first`` on go to the same expert."""
    lane = tl.arange(0, CHUNK)
    # the same numbers down and across
    across = tl.load(experts + first + lane[None, :], mask=first + lane[None, :] < pairs, other=-1)
    earlier = (across.to(tl.int32) == expert[:, None]) & (lane[None, :] < lane[:, None])
    return tl.sum(earlier.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["tiles"])
def tiles_kernel(
    totals, starts, tile_expert, tile_row, tile_end, tiles,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``starts`` [E]: each expert's first row; the tiles that cover the rows, expert by expert."""
    start_next(PDL)
    wait_for_previous(PDL)
    expert = tl.arange(0, EXPERTS)
    total = tl.load(totals + expert)
    start = tl.cumsum(total, axis=0) - total
    if tl.program_id(0) == 0:
        tl.store(starts + expert, start)
    _store_tiles(
        total, start, tile_expert, tile_row, tile_end, tl.program_id(0), tiles, EXPERTS, BLOCK, TILES
    )


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(
    experts, counts, starts, order, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """``order`` [P]: pairs by expert, in their own order within one."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + lane
    inside = pair < pairs
    expert = tl.load(experts + pair, mask=inside, other=0).to(tl.int32)
    rank = _rank(experts, expert, chunk * CHUNK, pairs, CHUNK)
    row = tl.load(starts + expert, mask=inside, other=0) + rank
    row += tl.load(counts + chunk * EXPERTS + expert, mask=inside, other=0)
    tl.store(order + row, pair, mask=inside)


@triton.jit(do_not_specialize=["pairs", "chunks", "tiles"])
def small_sort_kernel(
    experts, order, tile_expert, tile_row, tile_end, pairs, chunks, tiles,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All of the above for at most ``PAIRS`` pairs: every program counts them all, so that none waits for another.
    ``chunks`` programs place pairs, the others make tiles."""
    start_next(PDL)
    wait_for_previous(PDL)
    part = tl.program_id(0)
    place = tl.arange(0, PAIRS)
    every = tl.load(experts + place, mask=place < pairs, other=0).to(tl.int32)
    total = tl.histogram(every, EXPERTS, mask=place < pairs)
    start = tl.cumsum(total, axis=0) - total
    if part < chunks:
        first = part * CHUNK
        before = start + tl.histogram(every, EXPERTS, mask=(place < pairs) & (place < first))
        pair = first + tl.arange(0, CHUNK)
        expert = tl.load(experts + pair, mask=pair < pairs, other=0).to(tl.int32)
        row = tl.gather(before, expert, 0) + _rank(experts, expert, first, pairs, CHUNK)
        tl.store(order + row, pair, mask=pair < pairs)
    else:
        _store_tiles(
            total, start, tile_expert, tile_row, tile_end, part - chunks, tiles, EXPERTS, BLOCK, TILES
        )


def sort_launches(experts_P: torch.Tensor, experts: int, block: int) -> tuple[list[Launch], Sorted]:
    """Launches that sort ``experts_P`` (contiguous, each below ``experts``), and where the result will be.

    The number of tiles depends on shapes alone: what the pairs fill plus one begun tile per expert.
    """
    pairs, device = experts_P.shape[0], experts_P.device
    padded, chunks = power_of_two(experts), triton.cdiv(pairs, CHUNK)
    columns = min(COLUMNS, padded)
    tiles = (pairs + (block - 1) * min(experts, pairs)) // block

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    result = Sorted(empty(pairs), empty(tiles), empty(tiles), empty(tiles), block)
    placed = (result.tile_expert_M, result.tile_row_M, result.tile_end_M)
    shared = {"EXPERTS": padded, **overlap(device)}
    if pairs <= SMALL[-1]:
        room = next(size for size in SMALL if pairs <= size)
        small = {**shared, "PAIRS": room, "CHUNK": CHUNK, "BLOCK": block, "TILES": TILES, "num_warps": 8}
        args = (experts_P, result.order_P, *placed, pairs, chunks, tiles)
        return [Launch(small_sort_kernel, (chunks + triton.cdiv(tiles, TILES),), args, small)], result
    counts, totals, starts = empty(chunks, padded), empty(padded), empty(padded)
    sizes = {**shared, "CHUNK": CHUNK, "num_warps": 4}
    scan = {**shared, "COLUMNS": columns, "ROWS": CHUNK, "num_warps": 4}
    tile = {**shared, "BLOCK": block, "TILES": TILES, "num_warps": 8}
    launches = [
        Launch(count_kernel, (chunks,), (experts_P, counts, pairs), sizes),
        Launch(scan_kernel, (padded // columns,), (counts, totals, chunks), scan),
        Launch(tiles_kernel, (triton.cdiv(tiles, TILES),), (totals, starts, *placed, tiles), tile),
        Launch(place_kernel, (chunks,), (experts_P, counts, starts, result.order_P, pairs), sizes),
    ]
    return launches, result
