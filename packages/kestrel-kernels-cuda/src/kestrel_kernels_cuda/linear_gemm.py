"""Products of a few rows to a few hundred: tiles on the matrix units, the weight streamed through shared memory."""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.linear_parts import finish, prefetch
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["gemm_kernel"]


@triton.jit(do_not_specialize=["m"])
def gemm_kernel(
    x_tiles, w_tiles, x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr,
    partial_ptr, counter_ptr, m, n, x_stride, residual_stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, STAGES: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [m, n] = epilogue(``x`` [m, K] · ``w`` [n or 2n, K] transposed), BM × BN outputs a program.

    ``SWAP``: the weight is the left operand, so that few rows fill a matrix unit that wants 64 on its left. ``SPLIT``
    programs share a tile's inputs; the last to finish adds all partial sums, always in the same order. ``BLOCK``: rows
    and columns of an 8-bit weight that share a scale (BN and BK divide it), 0 for one without scales. ``TMA``: tiles
    come by the tensor memory unit (sm_90) through the descriptors ``x_tiles`` and ``w_tiles``, else by threads' copies.
    """
    GATED: tl.constexpr = EPILOGUE == "silu_mul" or EPILOGUE == "gelu_tanh_mul"
    STEPS: tl.constexpr = triton.cdiv(triton.cdiv(K, BK), SPLIT)
    outputs = tl.program_id(1) * BN + tl.arange(0, BN)
    w_rows = tl.minimum(outputs, n - 1).to(tl.int64)
    x_rows = tl.program_id(0) * BM + tl.arange(0, BM)
    safe_rows = tl.minimum(x_rows, m - 1).to(tl.int64)
    first = tl.program_id(2) * STEPS * BK
    columns = first + tl.arange(0, BK)
    w_ptrs = w_ptr + w_rows[:, None] * K + columns[None, :]
    up_ptrs = w_ptrs + n.to(tl.int64) * K
    x_ptrs = x_ptr + safe_rows[:, None] * x_stride + columns[None, :]
    start_next(PDL)
    if PDL and BK >= 64 and STEPS * BK * SPLIT == K:
        lines = first + tl.arange(0, BK // 64) * 64
        for step in tl.static_range(0, min(STAGES, STEPS)):
            prefetch(w_ptr + w_rows[:, None] * K + lines[None, :] + step * BK)
            if GATED:
                prefetch(w_ptr + (n.to(tl.int64) + w_rows[:, None]) * K + lines[None, :] + step * BK)
    wait_for_previous(PDL)
    if SWAP:
        acc = tl.zeros([BN, BM], tl.float32)
        acc_up = tl.zeros([BN, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BN], tl.float32)
        acc_up = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = step * BK
        inside = columns + start < K
        if TMA:
            w = w_tiles.load([tl.program_id(1) * BN, first + start])
            x = x_tiles.load([tl.program_id(0) * BM, first + start])
        elif STEPS * BK * SPLIT == K:
            w = tl.load(w_ptrs + start, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start)
        else:
            w = tl.load(w_ptrs + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=inside[None, :], other=0.0)
        acc = _product(w, x, acc, scale_ptr, tl.program_id(1) * BN, first + start, K, SWAP, BLOCK)
        if GATED:
            if TMA:
                up = w_tiles.load([n + tl.program_id(1) * BN, first + start])
            elif STEPS * BK * SPLIT == K:
                up = tl.load(up_ptrs + start, eviction_policy="evict_first")
            else:
                up = tl.load(up_ptrs + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            acc_up = _product(
                up, x, acc_up, scale_ptr, n + tl.program_id(1) * BN, first + start, K, SWAP, BLOCK
            )
    if SPLIT > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if SWAP:
            inner = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        else:
            inner = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        parts: tl.constexpr = 2 if GATED else 1
        base = partial_ptr + tile.to(tl.int64) * (
            SPLIT * parts * BM * BN
        )  # a number: sums' places are 32 bits on
        mine = base + tl.program_id(2) * (parts * BM * BN)
        tl.store(mine + inner, acc)
        if GATED:
            tl.store(mine + BM * BN + inner, acc_up)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") != SPLIT - 1:
            return
        acc = tl.zeros_like(acc)
        acc_up = tl.zeros_like(acc_up)
        if SPLIT * parts * BM * BN <= 16384:  # all sums are asked for at once: their latency is paid once
            for part in tl.static_range(SPLIT):
                acc += tl.load(base + part * (parts * BM * BN) + inner, cache_modifier=".cg")
                if GATED:
                    acc_up += tl.load(base + part * (parts * BM * BN) + BM * BN + inner, cache_modifier=".cg")
        else:
            for part in tl.range(0, SPLIT, num_stages=2):
                acc += tl.load(base + part * (parts * BM * BN) + inner, cache_modifier=".cg")
                if GATED:
                    acc_up += tl.load(base + part * (parts * BM * BN) + BM * BN + inner, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    live = (x_rows < m)[:, None] & (outputs < n)[None, :]
    places = safe_rows[:, None] * residual_stride + w_rows[None, :]
    y = finish(acc, acc_up, bias_ptr, residual_ptr, w_rows[None, :], places, live, n, EPILOGUE, BIAS)
    out_ptrs = out_ptr + safe_rows[:, None] * n + w_rows[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _product(
    w, x, acc, scale_ptr, row, column, K: tl.constexpr, SWAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``acc`` and the product of two tiles, the weight's at ``row``, ``column``. A tile has one scale, or none."""
    precision: tl.constexpr = "ieee"  # of float32 operands alone: no TF32
    if BLOCK > 0:
        BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
        scale = tl.load(scale_ptr + row // BLOCK * BLOCKS + tl.minimum(column // BLOCK, BLOCKS - 1)).to(
            tl.float32
        )
        w = w.to(x.dtype)
        if SWAP:
            return acc + scale * tl.dot(w, tl.trans(x), input_precision=precision)
        else:
            return acc + scale * tl.dot(x, tl.trans(w), input_precision=precision)
    elif SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision=precision)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=precision)
