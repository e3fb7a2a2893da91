"""The products of grouped_experts: for a few pairs one program per pair, for many one per tile of rows.

Letters: T tokens, K experts of one token, P = T · K pairs, C hidden, I width of an expert. Rows as in ``experts_sort``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.linear_parts import activate
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["down_kernel", "gemv_down_kernel", "gemv_up_kernel", "sum_kernel", "up_kernel"]


@triton.jit
def _gated(gate, up, GELU: tl.constexpr):
    """act(gate) · up, float32."""
    if GELU:
        return activate(gate, "gelu_tanh") * up
    return activate(gate, "silu_mul") * up


@triton.jit
def _scales(scale, expert, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The scales of the blocks of 128 rows and columns that ``row`` and ``column`` of an expert's weight lie in; one of
    them is a vector. Behind the weight's end: those of its last block."""
    high: tl.constexpr = (ROWS + 127) // 128
    long: tl.constexpr = (COLUMNS + 127) // 128
    at = tl.minimum(row // 128, high - 1) * long + tl.minimum(column // 128, long - 1)
    return tl.load(scale + expert.to(tl.int64) * (high * long) + at)


@triton.jit
def gemv_up_kernel(
    x, experts, gate_up, scale, hidden, stride_x, stride_e, stride_i,
    TOP_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``hidden`` [P, I]. Programs (pair, block of I)."""
    start_next(PDL)
    wait_for_previous(PDL)
    pair = tl.program_id(0).to(tl.int64)
    wide = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts + pair)
    row = gate_up + expert * stride_e + wide[:, None] * stride_i
    token = x + (pair // TOP_K) * stride_x
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, DIM, BLOCK_K):
        dim = first + tl.arange(0, BLOCK_K)
        inside = (wide[:, None] < WIDTH) & (dim[None, :] < DIM)
        value = tl.load(token + dim, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
        for_up = value
        if scale is not None:  # of the weights; the inputs may as well take it
            column = tl.program_id(1) * BLOCK_N
            for_up *= _scales(scale, expert, WIDTH + column, dim, 2 * WIDTH, DIM)[None, :]
            value *= _scales(scale, expert, column, dim, 2 * WIDTH, DIM)[None, :]
        gate += tl.load(row + dim[None, :], mask=inside, other=0.0).to(tl.float32) * value
        up += tl.load(row + WIDTH * stride_i + dim[None, :], mask=inside, other=0.0).to(tl.float32) * for_up
    made = _gated(tl.sum(gate, axis=1), tl.sum(up, axis=1), GELU)
    tl.store(hidden + pair * WIDTH + wide, made.to(hidden.dtype.element_ty), mask=wide < WIDTH)


@triton.jit
def gemv_down_kernel(
    hidden, experts, weights, down, scale, out, stride_e, stride_c,
    TOP_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [T, C]: the weighted sum over a token's experts, in their order. Programs (token, block of C)."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(experts + pair)
        row = down + expert * stride_e + dim[:, None] * stride_c
        part = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for first in range(0, WIDTH, BLOCK_K):
            wide = first + tl.arange(0, BLOCK_K)
            inside = (dim[:, None] < DIM) & (wide[None, :] < WIDTH)
            value = tl.load(hidden + pair * WIDTH + wide, mask=wide < WIDTH, other=0.0).to(tl.float32)
            if scale is not None:
                value *= _scales(scale, expert, tl.program_id(1) * BLOCK_N, wide, DIM, WIDTH)
            part += tl.load(row + wide[None, :], mask=inside, other=0.0).to(tl.float32) * value[None, :]
        made = tl.sum(part, axis=1).to(out.dtype.element_ty).to(tl.float32)
        total += made * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * DIM + dim, total.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _tile_of(program, tiles, columns, GROUP: tl.constexpr):
    """Tile and column of a program: ``GROUP`` tiles at a time share an expert's columns while they are in cache."""
    first = program // (GROUP * columns) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    within = program % (GROUP * columns)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["tiles"])
def up_kernel(
    x, gate_up, scale, hidden, order, tile_expert, tile_row, tile_end, tiles, stride_x, stride_e, stride_i,
    TOP_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``hidden`` [P, I], in sorted order."""
    start_next(PDL)
    wait_for_previous(PDL)
    tile, column = _tile_of(tl.program_id(0), tiles, tl.cdiv(WIDTH, BLOCK_N), GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        row = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
        real = row < tl.load(tile_end + tile)
        token = tl.load(order + row, mask=real, other=0).to(tl.int64) // TOP_K
        wide = column * BLOCK_N + tl.arange(0, BLOCK_N)
        lane = tl.arange(0, BLOCK_K)
        a = x + token[:, None] * stride_x + lane[None, :]
        b = gate_up + expert.to(tl.int64) * stride_e + wide[None, :].to(tl.int64) * stride_i + lane[:, None]
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, DIM, BLOCK_K):
            held = lane < DIM - first
            rows = tl.load(a + first, mask=real[:, None] & held[None, :], other=0.0)
            inside = held[:, None] & (wide[None, :] < WIDTH)
            own = tl.load(b + first, mask=inside, other=0.0)
            other = tl.load(b + first + WIDTH * stride_i, mask=inside, other=0.0)
            if scale is None:
                gate = tl.dot(rows, own, gate, input_precision="ieee")
                up = tl.dot(rows, other, up, input_precision="ieee")
            else:
                shares = _scales(scale, expert, wide, first, 2 * WIDTH, DIM)
                gate += tl.dot(rows, own.to(rows.dtype), input_precision="ieee") * shares[None, :]
                shares = _scales(scale, expert, WIDTH + wide, first, 2 * WIDTH, DIM)
                up += tl.dot(rows, other.to(rows.dtype), input_precision="ieee") * shares[None, :]
        made = _gated(gate, up, GELU).to(hidden.dtype.element_ty)
        place = hidden + row.to(tl.int64)[:, None] * WIDTH + wide[None, :]
        tl.store(place, made, mask=real[:, None] & (wide[None, :] < WIDTH))


@triton.jit(do_not_specialize=["tiles"])
def down_kernel(
    hidden, down, scale, made, order, tile_expert, tile_row, tile_end, tiles, stride_e, stride_c,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``made`` [P, C]: what each pair's expert makes, in the pairs' own order."""
    start_next(PDL)
    wait_for_previous(PDL)
    tile, column = _tile_of(tl.program_id(0), tiles, tl.cdiv(DIM, BLOCK_N), GROUP)
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        row = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
        real = row < tl.load(tile_end + tile)
        pair = tl.load(order + row, mask=real, other=0).to(tl.int64)
        dim = column * BLOCK_N + tl.arange(0, BLOCK_N)
        lane = tl.arange(0, BLOCK_K)
        a = hidden + row.to(tl.int64)[:, None] * WIDTH + lane[None, :]
        b = down + expert.to(tl.int64) * stride_e + dim[None, :].to(tl.int64) * stride_c + lane[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, WIDTH, BLOCK_K):
            held = lane < WIDTH - first
            rows = tl.load(a + first, mask=real[:, None] & held[None, :], other=0.0)
            columns = tl.load(b + first, mask=held[:, None] & (dim[None, :] < DIM), other=0.0)
            if scale is None:
                total = tl.dot(rows, columns, total, input_precision="ieee")
            else:
                shares = _scales(scale, expert, dim, first, DIM, WIDTH)
                total += tl.dot(rows, columns.to(rows.dtype), input_precision="ieee") * shares[None, :]
        place = made + pair[:, None] * DIM + dim[None, :]
        tl.store(place, total.to(made.dtype.element_ty), mask=real[:, None] & (dim[None, :] < DIM))


@triton.jit
def sum_kernel(
    made, weights, out, TOP_K: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """``out`` [T, C]: the weighted sum over a token's experts, in their order."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        value = tl.load(made + pair * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        total += value * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * DIM + dim, total.to(out.dtype.element_ty), mask=dim < DIM)
