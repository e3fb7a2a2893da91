"""Products of one row, two at a time: of one normed input, or into one sum.

All programs run at once and read their rows of the weights piece by piece, each piece asked for while the one before is
summed up, the first ones before the kernel before has finished: the memory never rests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.linear_parts import activate
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["pair_kernel", "sum_kernel"]


@triton.jit
def pair_kernel(
    x_ptr, gain_ptr, shift_ptr, w_ptr, bias_ptr, out_ptr, other_w_ptr, other_bias_ptr, other_out_ptr, n, other_n, eps,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, PROGRAMS: tl.constexpr,
    DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [n] = W · h + b and ``other_out`` [other_n] = act(W' · h + b'), h the layer norm of ``x`` [K].

    A piece is BN rows of W or of W'; every PROGRAMS-th is one program's, and DEPTH (1 or 2) of these
    are on their way while one is summed up.
    """
    columns = tl.arange(0, BK)
    inside = columns < K
    first = tl.cdiv(n, BN)
    pieces = first + tl.cdiv(other_n, BN)
    start_next(PDL)
    piece = tl.program_id(0)
    w = _rows(piece, first, w_ptr, n, other_w_ptr, other_n, columns, K, BN, BK)
    next_w = w
    if DEPTH > 1:
        next_w = _rows(piece + PROGRAMS, first, w_ptr, n, other_w_ptr, other_n, columns, K, BN, BK)
    gain = tl.load(gain_ptr + columns, mask=inside, other=0.0)
    shift = tl.load(shift_ptr + columns, mask=inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    h = x * rstd * gain.to(tl.float32) + shift.to(tl.float32)
    for piece in range(tl.program_id(0), pieces, PROGRAMS):
        later_w = _rows(piece + DEPTH * PROGRAMS, first, w_ptr, n, other_w_ptr, other_n, columns, K, BN, BK)
        y = tl.sum(w.to(tl.float32) * h[None, :], 1)
        is_other = piece >= first
        outputs = (piece - tl.where(is_other, first, 0)) * BN + tl.arange(0, BN)
        live = outputs < tl.where(is_other, other_n, n)
        y += tl.load(tl.where(is_other, other_bias_ptr, bias_ptr) + outputs, mask=live, other=0.0).to(
            tl.float32
        )
        if is_other:
            y = activate(y, ACTIVATION)
        tl.store(
            tl.where(is_other, other_out_ptr, out_ptr) + outputs, y.to(out_ptr.dtype.element_ty), mask=live
        )
        w = next_w if DEPTH > 1 else later_w
        next_w = later_w


@triton.jit
def _rows(
    piece, first, w_ptr, n, other_w_ptr, other_n, columns, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """The rows [BN, BK] of a piece; zero, and nothing is read, beyond the last."""
    is_other = piece >= first
    rows = (piece - tl.where(is_other, first, 0)) * BN + tl.arange(0, BN)
    live = rows < tl.where(is_other, other_n, n)
    pointers = tl.where(is_other, other_w_ptr, w_ptr) + rows.to(tl.int64)[:, None] * K + columns[None, :]
    mask = live[:, None] if BK == K else live[:, None] & (columns < K)[None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def sum_kernel(
    x_ptr, w_ptr, bias_ptr, other_x_ptr, other_w_ptr, other_bias_ptr, residual_ptr, out_ptr, n,
    K: tl.constexpr, OTHER_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [n] = ``residual`` + W · x + b + W' · x' + b', BN outputs a program.

    A piece is BK inputs of the rows, first of W, then of W'; DEPTH of them are on their way at a time.
    """
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    live = outputs < n
    rows = tl.minimum(outputs, n - 1).to(tl.int64)
    PIECES: tl.constexpr = (K + BK - 1) // BK + (OTHER_K + BK - 1) // BK
    start_next(PDL)
    pieces = ()
    for piece in tl.static_range(0, DEPTH):
        pieces = pieces + (_inputs(piece, w_ptr, other_w_ptr, rows, K, OTHER_K, BK),)  # noqa: RUF005
    bias = tl.load(bias_ptr + rows).to(tl.float32) + tl.load(other_bias_ptr + rows).to(tl.float32)
    wait_for_previous(PDL)
    residual = tl.load(residual_ptr + rows).to(tl.float32)
    acc = tl.zeros([BN, BK // 8], tl.float32)
    for piece in tl.static_range(0, PIECES):
        if piece + DEPTH < PIECES:
            pieces = pieces + (_inputs(piece + DEPTH, w_ptr, other_w_ptr, rows, K, OTHER_K, BK),)  # noqa: RUF005
        x = _vector(piece, x_ptr, other_x_ptr, K, OTHER_K, BK).to(tl.float32)
        acc += tl.sum((pieces[piece].to(tl.float32) * x[None, :]).reshape(BN, BK // 8, 8), 2)
    y = tl.sum(acc, 1) + bias + residual
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _inputs(
    piece: tl.constexpr, w_ptr, other_w_ptr, rows, K: tl.constexpr, OTHER_K: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Piece ``piece`` of the rows [BN, BK], zero beyond a weight's last input."""
    columns = tl.arange(0, BK)
    OWN: tl.constexpr = (K + BK - 1) // BK
    if piece < OWN:
        return _piece(w_ptr + rows[:, None] * K, columns, piece * BK, K, BK)
    else:
        return _piece(other_w_ptr + rows[:, None] * OTHER_K, columns, (piece - OWN) * BK, OTHER_K, BK)


@triton.jit
def _piece(row_ptrs, columns, start: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    if start + BK <= K:
        return tl.load(row_ptrs + start + columns[None, :], eviction_policy="evict_first")
    else:
        inside = (start + columns < K)[None, :]
        return tl.load(
            row_ptrs + start + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        )


@triton.jit
def _vector(
    piece: tl.constexpr, x_ptr, other_x_ptr, K: tl.constexpr, OTHER_K: tl.constexpr, BK: tl.constexpr
):
    """The inputs [BK] of piece ``piece``, zero beyond the last."""
    columns = tl.arange(0, BK)
    OWN: tl.constexpr = (K + BK - 1) // BK
    if piece < OWN:
        return tl.load(x_ptr + piece * BK + columns, mask=piece * BK + columns < K, other=0.0)
    else:
        start: tl.constexpr = (piece - OWN) * BK
        return tl.load(other_x_ptr + start + columns, mask=start + columns < OTHER_K, other=0.0)
