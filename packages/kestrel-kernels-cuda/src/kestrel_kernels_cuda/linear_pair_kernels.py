"""Products of one row, two at a time: of one normed input, or into one sum. As ``linear_gemv``, every program reads a
few rows of a weight, once, as wide loads that it asks for before the kernel before has finished."""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.linear_parts import activate, prefetch, start_next, wait_for_previous

__all__ = ["pair_kernel", "sum_kernel"]

LINE: tl.constexpr = tl.constexpr(128)  # bytes of a cache line


@triton.jit
def pair_kernel(
    x_ptr, gain_ptr, shift_ptr, w_ptr, bias_ptr, out_ptr, other_w_ptr, other_bias_ptr, other_out_ptr, n, other_n, eps,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [n] = W · h + b and ``other_out`` [other_n] = act(W' · h + b'), h the layer norm of ``x`` [K].

    Programs of W' come after those of W. Each norms ``x`` for itself while its rows are on their way.
    """
    first_programs = tl.cdiv(n, BN)
    is_other = tl.program_id(0) >= first_programs
    start = (tl.program_id(0) - tl.where(is_other, first_programs, 0)) * BN
    size = tl.where(is_other, other_n, n)
    weight = tl.where(is_other, other_w_ptr, w_ptr)
    outputs = start + tl.arange(0, BN)
    rows = tl.minimum(outputs, size - 1).to(tl.int64)
    columns = tl.arange(0, BK)
    pointers = weight + rows[:, None] * K + columns[None, :]
    start_next(PDL)
    tiles = ()
    gains = ()
    shifts = ()
    for at in tl.static_range(0, K, BK):
        tiles = tiles + (_tile(pointers, columns, at, K, BK),)  # noqa: RUF005 -- Triton has no stars
        gains = gains + (_part(gain_ptr, columns, at, K, BK),)  # noqa: RUF005
        shifts = shifts + (_part(shift_ptr, columns, at, K, BK),)  # noqa: RUF005
    bias = tl.load(tl.where(is_other, other_bias_ptr, bias_ptr) + rows).to(tl.float32)
    wait_for_previous(PDL)
    xs = ()
    total = tl.zeros([BK], tl.float32)
    for at in tl.static_range(0, K, BK):
        x = _part(x_ptr, columns, at, K, BK).to(tl.float32)
        total += x
        xs = xs + (x,)  # noqa: RUF005
    mean = tl.sum(total, 0) / K
    squares = tl.zeros([BK], tl.float32)
    for step in tl.static_range(0, (K + BK - 1) // BK):
        off = tl.where(step * BK + columns < K, xs[step] - mean, 0.0)
        squares += off * off
    rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    acc = tl.zeros([BN, BK], tl.float32)
    for step in tl.static_range(0, (K + BK - 1) // BK):
        normed = (xs[step] - mean) * rstd * gains[step].to(tl.float32) + shifts[step].to(tl.float32)
        acc += tiles[step].to(tl.float32) * normed[None, :]
    live = outputs < size
    y = tl.sum(acc, 1) + bias
    if is_other:
        y = activate(y, ACTIVATION)
    target = tl.where(is_other, other_out_ptr, out_ptr)
    tl.store(target + outputs, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def sum_kernel(
    x_ptr, w_ptr, bias_ptr, other_x_ptr, other_w_ptr, other_bias_ptr, residual_ptr, out_ptr, n,
    K: tl.constexpr, OTHER_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, READERS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [n] = ``residual`` + W · x + b + W' · x' + b'.

    The first READERS programs also bring AHEAD tiles each, of the programs that run after them, into the second-level
    cache while they wait for the kernel before.
    """
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(outputs, n - 1).to(tl.int64)
    columns = tl.arange(0, BK)
    pointers = w_ptr + rows[:, None] * K + columns[None, :]
    other_pointers = other_w_ptr + rows[:, None] * OTHER_K + columns[None, :]
    start_next(PDL)
    tiles = ()
    for at in tl.static_range(0, K, BK):
        tiles = tiles + (_tile(pointers, columns, at, K, BK),)  # noqa: RUF005 -- Triton has no stars
    for at in tl.static_range(0, OTHER_K, BK):
        tiles = tiles + (_tile(other_pointers, columns, at, OTHER_K, BK),)  # noqa: RUF005
    if PDL and AHEAD > 0:  # noqa: SIM102 -- one is a constant, the other is not
        if tl.program_id(0) < READERS:
            for i in tl.static_range(1, AHEAD + 1):
                tile = tl.program_id(0) + i * READERS
                _read_ahead(w_ptr, tile, n, K, BN)
                _read_ahead(other_w_ptr, tile, n, OTHER_K, BN)
    bias = tl.load(bias_ptr + rows).to(tl.float32) + tl.load(other_bias_ptr + rows).to(tl.float32)
    wait_for_previous(PDL)
    more = tl.load(residual_ptr + rows).to(tl.float32)
    acc = tl.zeros([BN, BK], tl.float32)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    for step in tl.static_range(0, STEPS):
        x = _part(x_ptr, columns, step * BK, K, BK)
        acc += tiles[step].to(tl.float32) * x.to(tl.float32)[None, :]
    for step in tl.static_range(0, (OTHER_K + BK - 1) // BK):
        x = _part(other_x_ptr, columns, step * BK, OTHER_K, BK)
        acc += tiles[STEPS + step].to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1) + bias + more
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=outputs < n)


@triton.jit
def _tile(pointers, columns, start: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Columns ``start`` on of rows of a weight, zero beyond the last."""
    if start + BK <= K:
        return tl.load(pointers + start, eviction_policy="evict_first")
    else:
        inside = (start + columns < K)[None, :]
        return tl.load(pointers + start, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _part(x_ptr, columns, start: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Elements ``start`` on of a vector, zero beyond the last."""
    if start + BK <= K:
        return tl.load(x_ptr + start + columns)
    else:
        return tl.load(x_ptr + start + columns, mask=start + columns < K, other=0.0)


@triton.jit
def _read_ahead(w_ptr, tile, n, K: tl.constexpr, BN: tl.constexpr):
    """Asks for the lines of a tile, whose rows lie side by side; again for the weight's last ones when it has none."""
    SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    ELEMENTS: tl.constexpr = LINE // SIZE
    lines = tl.arange(0, triton.next_power_of_2((BN * K + ELEMENTS - 1) // ELEMENTS)) * ELEMENTS
    last = n.to(tl.int64) * K - 1
    prefetch(w_ptr + tl.minimum(tile.to(tl.int64) * (BN * K) + tl.minimum(lines, BN * K - 1), last))
