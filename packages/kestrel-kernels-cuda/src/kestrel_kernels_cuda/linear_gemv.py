"""The product of one row: every program reads a few rows of the weight, once, as wide loads, and sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.linear_parts import activate, prefetch
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["gemv_kernel"]

LINE: tl.constexpr = tl.constexpr(64)  # 16-bit numbers of a cache line


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, gain_ptr, shift_ptr, out_ptr, n, eps,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [n] = epilogue(``w`` [n or 2n, K] · norm(``x`` [K])): BN outputs a program, BK inputs at a time.

    A norm costs no pass of its own: of an RMS norm the sum of squares is taken on the way and scales the sums at the
    end; of a layer norm every program takes the mean for itself. ``BLOCK``: rows and columns of an 8-bit weight that
    share a scale (BN divides it), 0 for one without.
    ``AHEAD``: how many programs, the first ones, also bring what the others will read into the second-level cache,
    while they wait for the kernel before; 0 for none.
    """
    GATED: tl.constexpr = EPILOGUE == "silu_mul" or EPILOGUE == "gelu_tanh_mul"
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(outputs, n - 1).to(tl.int64)  # reading the last row again costs less than a mask
    columns = tl.arange(0, BK)
    if (
        BLOCK > 0
    ):  # so a thread has the same columns of 8-bit weights as of inputs, which need not be dealt again
        columns = tl.max_contiguous(columns, 8)
    w_ptrs = w_ptr + rows[:, None] * K + columns[None, :]
    up_ptrs = w_ptrs + n.to(tl.int64) * K
    start_next(PDL)
    # All that no kernel writes is asked for before the first sum, and before the kernel that makes x has finished.
    tiles = ()
    ups = ()
    gains = ()
    shifts = ()
    for start in tl.static_range(0, K, BK):
        tiles = tiles + (_tile(w_ptrs, columns, start, K, BK),)  # noqa: RUF005 -- Triton has no stars
        if GATED:
            ups = ups + (_tile(up_ptrs, columns, start, K, BK),)  # noqa: RUF005
        if NORM != "none":
            gains = gains + (_row(gain_ptr, start, K, BK),)  # noqa: RUF005
        if NORM == "layer":
            shifts = shifts + (_row(shift_ptr, start, K, BK),)  # noqa: RUF005
    bias = tl.load(bias_ptr + rows) if BIAS else 0.0
    bias_up = tl.load(bias_ptr + n + rows) if BIAS and GATED else 0.0
    if PDL and AHEAD > 0:
        _read_ahead(w_ptr, n, K, BN, AHEAD)
    wait_for_previous(PDL)
    residual = tl.load(residual_ptr + rows) if EPILOGUE == "residual" else 0.0
    xs = ()
    total = tl.zeros([BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        x = _row(x_ptr, start, K, BK).to(tl.float32)
        xs = xs + (x,)  # noqa: RUF005
        if NORM != "none":
            total += x
            squares += x * x
    if NORM == "layer":
        mean = tl.sum(total, 0) / K
        rstd = tl.rsqrt(tl.maximum(tl.sum(squares, 0) / K - mean * mean, 0.0) + eps)
    acc = tl.zeros([BN, BK], tl.float32)
    acc_up = tl.zeros([BN, BK], tl.float32)
    for step in tl.static_range(0, (K + BK - 1) // BK):
        x = xs[step]
        if NORM == "layer":
            x = (x - mean) * rstd * gains[step].to(tl.float32) + shifts[step].to(tl.float32)
        elif NORM == "rms_plus_one":
            x *= gains[step].to(tl.float32) + 1.0
        elif NORM == "rms":
            x *= gains[step].to(tl.float32)
        x_up = x
        if BLOCK > 0:
            at = step * BK + columns
            inside = at < K
            if GATED:
                x_up *= _scales(scale_ptr, n + tl.program_id(0) * BN, at, inside, K, BLOCK)
            x *= _scales(scale_ptr, tl.program_id(0) * BN, at, inside, K, BLOCK)
        acc += tiles[step].to(tl.float32) * x[None, :]
        if GATED:
            acc_up += ups[step].to(tl.float32) * x_up[None, :]
    y = tl.sum(acc, 1)
    y_up = tl.sum(acc_up, 1) if GATED else y
    if NORM == "rms" or NORM == "rms_plus_one":
        rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= rstd
        y_up *= rstd
    if BIAS:
        y += bias.to(tl.float32)
        if GATED:
            y_up += bias_up.to(tl.float32)
    y = activate(y, EPILOGUE)
    if GATED:
        y *= y_up
    if EPILOGUE == "residual":
        y += residual.to(tl.float32)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=outputs < n)


@triton.jit
def _read_ahead(w_ptr, n, K: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr):
    """Asks for the tiles of every AHEAD-th program after this one; a tile's rows lie side by side."""
    if tl.program_id(0) < AHEAD:
        lines = tl.arange(0, triton.next_power_of_2(BN * K // LINE)) * LINE
        last = n.to(tl.int64) * K - LINE
        for tile in range(tl.program_id(0) + AHEAD, tl.num_programs(0), AHEAD):
            prefetch(
                w_ptr + tl.minimum(tile.to(tl.int64) * (BN * K) + tl.minimum(lines, BN * K - LINE), last)
            )


@triton.jit
def _row(pointer, start: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    columns = start + tl.arange(0, BK)
    if start + BK <= K:
        return tl.load(pointer + columns)
    else:
        return tl.load(pointer + columns, mask=columns < K, other=0.0)


@triton.jit
def _tile(pointers, columns, start: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    if start + BK <= K:
        return tl.load(pointers + start, eviction_policy="evict_first")
    else:
        return tl.load(
            pointers + start, mask=(start + columns < K)[None, :], other=0.0, eviction_policy="evict_first"
        )


@triton.jit
def _scales(scale_ptr, row, columns, inside, K: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of ``columns`` in the block of ``row``: they may as well scale the inputs."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    return tl.load(scale_ptr + row // BLOCK * BLOCKS + columns // BLOCK, mask=inside, other=0.0).to(
        tl.float32
    )
