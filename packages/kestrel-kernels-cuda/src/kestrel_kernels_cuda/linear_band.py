"""Products of a few rows: one program per processor, each with an equal band of the weight, streamed once."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kestrel_kernels_cuda.linear_parts import finish, prefetch, start_next, wait_for_previous

__all__ = ["band_kernel"]

LINE: tl.constexpr = tl.constexpr(64)  # 16-bit numbers of a cache line


@triton.jit(do_not_specialize=["m"])
def band_kernel(
    x_tiles, w_tiles, rest_tiles, w_ptr, bias_ptr, residual_ptr, gain_ptr, out_ptr,
    partial_ptr, counter_ptr, m, n, residual_stride, out_stride, eps,
    K: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, REST: tl.constexpr,
    BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, AHEAD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [m, n] = epilogue(norm(``x`` [m, K]) · ``w`` [H, n, K] transposed), BN + REST outputs a program.

    H is 2 for a gated product, whose two halves are tiles side by side, else 1. A band of BN + REST rows, two powers
    of two, divides most weights evenly among the processors, where one power leaves many of them idle in the last
    round. m ≤ ROWS ≤ BM; rows of x that do not exist read as zero and cost nothing. ``SPLIT`` programs share a band's
    inputs; the last to finish adds all partial sums, always in the same order. Each band begins at another of its
    steps, so that not all programs ask for the same part of x at once. An RMS ``NORM`` scales x by its gain on the
    way, and the sums by the rows' roots at the end. ``AHEAD``: steps of BK inputs of the weight that come into the
    second-level cache while the kernel before finishes. ``LATE``: the next kernel is let in when the last tiles have
    been asked for, not at once.
    """
    H: tl.constexpr = 2 if EPILOGUE == "silu_mul" or EPILOGUE == "gelu_tanh_mul" else 1
    OTHER: tl.constexpr = REST if REST > 0 else 8
    STEPS: tl.constexpr = (K + BK - 1) // BK
    band = tl.program_id(0) * (BN + REST)
    part = tl.program_id(1)
    first = part * STEPS // SPLIT
    last = (part + 1) * STEPS // SPLIT
    turn = first + tl.program_id(0) * (last - first) // tl.num_programs(0)
    if not LATE:
        start_next(PDL)
    if PDL and AHEAD > 0:
        for half in tl.static_range(H):
            rows_ptr = w_ptr + n.to(tl.int64) * (half * K)
            _ask(rows_ptr, band, n, turn, last - first, last, BN, BK, K, AHEAD)
            if REST > 0:
                _ask(rows_ptr, band + BN, n, turn, last - first, last, REST, BK, K, AHEAD)
    if PDL and BIAS:
        for half in tl.static_range(H):
            prefetch(bias_ptr + half * n + tl.minimum(band + tl.arange(0, BN), n - 1))
    wait_for_previous(PDL)
    acc = tl.zeros([BM, H * BN], tl.float32)
    rest = tl.zeros([BM, H * OTHER], tl.float32)
    squares = tl.zeros([BM, BK], tl.float32)
    gain = _gain(gain_ptr, turn * BK, K, BK) if NORM != "none" else 0.0
    for step in tl.range(0, last - first, num_stages=STAGES):
        at = _turned(step + turn, last - first, last) * BK
        x = x_tiles.load([0, at])
        w = w_tiles.load([0, band, at]).reshape(H * BN, BK)
        if NORM != "none":
            wide = x.to(tl.float32)
            squares += wide * wide
            factor = gain + 1.0 if NORM == "rms_plus_one" else gain
            x = (wide * factor[None, :]).to(x.dtype)
            gain = _gain(
                gain_ptr, _turned(step + 1 + turn, last - first, last) * BK, K, BK
            )  # of the step after: it arrives meanwhile
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if REST > 0:
            w = rest_tiles.load([0, band + BN, at]).reshape(H * REST, BK)
            rest = tl.dot(x, tl.trans(w), rest, input_precision="ieee")
        if PDL and LATE:  # noqa: SIM102 -- known when compiling, unlike the next
            if step == last - first - STAGES:
                gdc_launch_dependents()
    rows = tl.arange(0, BM)
    if NORM != "none":
        rstd = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        acc *= rstd
        rest *= rstd
    if SPLIT > 1:
        WIDTH: tl.constexpr = BN + REST
        base = partial_ptr + tl.program_id(0).to(tl.int64) * (SPLIT * ROWS * WIDTH)
        mine = base + part * (ROWS * WIDTH) + rows[:, None] * WIDTH
        tl.store(mine + tl.arange(0, BN)[None, :], acc, mask=(rows < m)[:, None])
        if REST > 0:
            tl.store(mine + BN + tl.arange(0, REST)[None, :], rest, mask=(rows < m)[:, None])
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tl.program_id(0), 1, sem="acq_rel") != SPLIT - 1:
            return
        acc = _total(base, m, ROWS, BN, WIDTH, SPLIT)
        rest = _total(base + BN, m, ROWS, OTHER, WIDTH, SPLIT) if REST > 0 else acc
        tl.store(counter_ptr + tl.program_id(0), 0)
    _write(
        acc, band, bias_ptr, residual_ptr, out_ptr, m, n, residual_stride, out_stride,
        H, BM if SPLIT == 1 else ROWS, BN, EPILOGUE, BIAS,
    )  # fmt: skip
    if REST > 0:
        _write(
            rest, band + BN, bias_ptr, residual_ptr, out_ptr, m, n, residual_stride, out_stride,
            H, BM if SPLIT == 1 else ROWS, REST, EPILOGUE, BIAS,
        )  # fmt: skip


@triton.jit
def _turned(step, steps, last):
    """``step``, or the one as far behind the first when it is behind the last."""
    return tl.where(step < last, step, step - steps)


@triton.jit
def _ask(
    w_ptr, row, n, turn, steps, last, COUNT: tl.constexpr, BK: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Asks for AHEAD steps, from step ``turn`` on, of COUNT rows of the weight from ``row`` on."""
    rows = tl.minimum(row + tl.arange(0, COUNT), n - 1).to(tl.int64)
    lines = tl.arange(0, triton.next_power_of_2(AHEAD * BK // LINE))
    lines = tl.minimum(lines, AHEAD * BK // LINE - 1) * LINE
    columns = tl.minimum(_turned(turn + lines // BK, steps, last) * BK + lines % BK, K - 1)
    prefetch(w_ptr + rows[:, None] * K + columns[None, :])


@triton.jit
def _gain(gain_ptr, at, K: tl.constexpr, BK: tl.constexpr):
    columns = at + tl.arange(0, BK)
    return tl.load(gain_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def _total(base, m, ROWS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """The partial sums [SPLIT, ROWS, WIDTH] at ``base`` added up, COUNT columns of them: [ROWS, COUNT]."""
    rows = tl.arange(0, ROWS)
    places = rows[:, None] * WIDTH + tl.arange(0, COUNT)[None, :]
    live = (rows < m)[:, None]
    total = tl.zeros([ROWS, COUNT], tl.float32)
    if SPLIT * ROWS * COUNT <= 16384:  # all sums are asked for at once: their latency is paid once
        for part in tl.static_range(SPLIT):
            total += tl.load(
                base + part * (ROWS * WIDTH) + places, mask=live, other=0.0, cache_modifier=".cg"
            )
    else:
        for part in tl.range(0, SPLIT, num_stages=1):
            total += tl.load(
                base + part * (ROWS * WIDTH) + places, mask=live, other=0.0, cache_modifier=".cg"
            )
    return total


@triton.jit
def _write(
    y, column, bias_ptr, residual_ptr, out_ptr, m, n, residual_stride, out_stride,
    H: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The sums ``y`` [ROWS, H · COUNT] through the epilogue to ``column`` on."""
    up = y
    if H == 2:
        y, up = tl.split(y.reshape(ROWS, 2, COUNT).permute(0, 2, 1))
    rows = tl.arange(0, ROWS)
    columns = column + tl.arange(0, COUNT)
    safe = tl.minimum(columns, n - 1)[None, :]
    live = (rows < m)[:, None] & (columns < n)[None, :]
    places = rows.to(tl.int64)[:, None] * residual_stride + safe
    y = finish(y, up, bias_ptr, residual_ptr, safe, places, live, n, EPILOGUE, BIAS)
    places = rows.to(tl.int64)[:, None] * out_stride + safe
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=live)
