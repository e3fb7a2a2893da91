"""Pairs of token and expert sorted by expert, on the device alone: a counting sort in four launches.

Letters: P pairs, E experts (padded to a power of two), N chunks of pairs, M tiles of rows that share an expert. A row
is a place in the sorted order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kestrel_kernels_cuda.launch import Launch, power_of_two

__all__ = ["Sorted", "count_kernel", "place_kernel", "scan_kernel", "sort_launches", "tiles_kernel"]

CHUNK = 128  # pairs of one program, which compares each with each
COLUMNS = 16  # experts of one scanning program
TILES = 64  # tiles of one program


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
def count_kernel(experts, counts, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """``counts`` [N, E]: pairs of each chunk that go to each expert."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = pair < pairs
    expert = tl.load(experts + pair, mask=inside, other=0).to(tl.int32)
    found = tl.histogram(expert, EXPERTS, mask=inside)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(counts, totals, chunks, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """``counts`` become the pairs of earlier chunks; ``totals`` [E]."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    before = tl.zeros([1, COLUMNS], tl.int32)
    for first in range(0, chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)[:, None]
        place = counts + chunk * EXPERTS + expert
        found = tl.load(place, mask=chunk < chunks, other=0)
        tl.store(place, before + tl.cumsum(found, axis=0) - found, mask=chunk < chunks)
        before += tl.sum(found, axis=0)[None, :]
    tl.store(totals + expert, before)


@triton.jit(do_not_specialize=["tiles"])
def tiles_kernel(
    totals, starts, tile_expert, tile_row, tile_end, tiles,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``starts`` [E]: each expert's first row; the tiles that cover the rows, expert by expert."""
    expert = tl.arange(0, EXPERTS)
    total = tl.load(totals + expert)
    start = tl.cumsum(total, axis=0) - total
    if tl.program_id(0) == 0:
        tl.store(starts + expert, start)
    of_expert = (total + BLOCK - 1) // BLOCK
    end_tile = tl.cumsum(of_expert, axis=0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
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


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(experts, counts, starts, order, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """``order`` [P]: pairs by expert, in their own order within one."""
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + lane
    inside = pair < pairs
    expert = tl.load(experts + pair, mask=inside, other=0).to(tl.int32)
    # the same numbers down and across: each pair counts the earlier ones of its expert
    across = tl.load(
        experts + chunk * CHUNK + lane[None, :], mask=(chunk * CHUNK + lane[None, :]) < pairs, other=-1
    )
    earlier = (across.to(tl.int32) == expert[:, None]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    row = tl.load(starts + expert, mask=inside, other=0) + rank
    row += tl.load(counts + chunk * EXPERTS + expert, mask=inside, other=0)
    tl.store(order + row, pair, mask=inside)


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

    counts, totals, starts, order = empty(chunks, padded), empty(padded), empty(padded), empty(pairs)
    result = Sorted(order, empty(tiles), empty(tiles), empty(tiles), block)
    sizes = {"EXPERTS": padded, "CHUNK": CHUNK, "num_warps": 4}
    scan = {"EXPERTS": padded, "COLUMNS": columns, "ROWS": CHUNK, "num_warps": 4}
    tile = {"EXPERTS": padded, "BLOCK": block, "TILES": TILES, "num_warps": 8}
    placed = (result.tile_expert_M, result.tile_row_M, result.tile_end_M, tiles)
    launches = [
        Launch(count_kernel, (chunks,), (experts_P, counts, pairs), sizes),
        Launch(scan_kernel, (padded // columns,), (counts, totals, chunks), scan),
        Launch(tiles_kernel, (triton.cdiv(tiles, TILES),), (totals, starts, *placed), tile),
        Launch(place_kernel, (chunks,), (experts_P, counts, starts, order, pairs), sizes),
    ]
    return launches, result
