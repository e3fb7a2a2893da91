"""The product of one row: every program reads a few rows of the weight, once, as wide loads, and sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.linear_parts import finish, start_next, wait_for_previous

__all__ = ["gemv_kernel"]


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, gain_ptr, shift_ptr, out_ptr, n, eps,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [n] = epilogue(``w`` [n or 2n, K] · norm(``x`` [K])): BN outputs a program, BK inputs at a time.

    An RMS norm costs no pass of its own: the sum of squares is taken on the way and scales the sums at the end.
    ``BLOCK``: rows and columns of an 8-bit weight that share a scale (BN divides it), 0 for one without scales.
    """
    GATED: tl.constexpr = EPILOGUE == "silu_mul" or EPILOGUE == "gelu_tanh_mul"
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(outputs, n - 1).to(tl.int64)  # reading the last row again costs less than a mask
    columns = tl.arange(0, BK)
    w_ptrs = w_ptr + rows[:, None] * K + columns[None, :]
    up_ptrs = w_ptrs + n.to(tl.int64) * K
    start_next(PDL)
    # All of the weight is asked for before the first sum, and before the kernel that makes x has finished.
    tiles = ()
    ups = ()
    for start in tl.static_range(0, K, BK):
        tiles = tiles + (_tile(w_ptrs, columns, start, K, BK),)  # noqa: RUF005 -- Triton has no stars
        if GATED:
            ups = ups + (_tile(up_ptrs, columns, start, K, BK),)  # noqa: RUF005
    wait_for_previous(PDL)
    mean = 0.0
    rstd = 1.0
    if NORM == "layer":
        mean, rstd = _moments(x_ptr, eps, K, BK)
    acc = tl.zeros([BN, BK], tl.float32)
    acc_up = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for step in tl.static_range(0, (K + BK - 1) // BK):
        at = step * BK + columns
        inside = at < K
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if NORM == "layer":
            x = (x - mean) * rstd
        elif NORM != "none":
            squares += x * x
        if NORM != "none":
            gain = tl.load(gain_ptr + at, mask=inside, other=0.0).to(tl.float32)
            x *= gain + 1.0 if NORM == "rms_plus_one" else gain
        if NORM == "layer":
            x += tl.load(shift_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x_up = x
        if BLOCK > 0:
            x *= _scales(scale_ptr, tl.program_id(0) * BN, at, inside, K, BLOCK)
            if GATED:
                x_up *= _scales(scale_ptr, n + tl.program_id(0) * BN, at, inside, K, BLOCK)
        acc += tiles[step].to(tl.float32) * x[None, :]
        if GATED:
            acc_up += ups[step].to(tl.float32) * x_up[None, :]
    y = tl.sum(acc, 1)
    y_up = tl.sum(acc_up, 1) if GATED else y
    if NORM == "rms" or NORM == "rms_plus_one":
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
        y_up *= scale
    live = outputs < n
    y = finish(y, y_up, bias_ptr, residual_ptr, rows, rows, live, n, EPILOGUE, BIAS)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=live)


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


@triton.jit
def _moments(x_ptr, eps, K: tl.constexpr, BK: tl.constexpr):
    """Mean and 1 / sqrt(variance + eps) of ``x`` [K], in two passes: the row is small and stays in the cache."""
    columns = tl.arange(0, BK)
    total = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        total += tl.load(x_ptr + start + columns, mask=start + columns < K, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / K
    squares = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        inside = start + columns < K
        x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32) - mean
        squares += tl.where(inside, x * x, 0.0)
    return mean, tl.rsqrt(tl.sum(squares, 0) / K + eps)
