"""The kernel of vision attention: a tile of queries of one head against all keys of its item.

A head dim that is no power of two is cut into two parts that are (72 = 64 + 8, padded to 64 + 16), so that little is
multiplied by zeros. Letters: N items, S positions of each, H heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.attention_parts import softmax_step
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["vision_kernel"]


@triton.jit
def part(base, rows, live, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, IS_FULL: tl.constexpr):
    """Numbers FIRST to FIRST + WIDTH of each head at offsets ``rows``; zeros beyond D and where not ``live``."""
    at_d = FIRST + tl.arange(0, WIDTH)
    at = base + rows[:, None] + at_d[None, :]
    if FIRST + WIDTH > D:
        inside = (at_d < D)[None, :]
        return tl.load(at, mask=inside if IS_FULL else inside & live[:, None], other=0.0)
    if IS_FULL:
        return tl.load(at)
    return tl.load(at, mask=live[:, None], other=0.0)


@triton.jit
def vision_tiles(
    q1, q2, acc1, acc2, top, total, k, v, stride_k, stride_v, low, high, length, post,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_N: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Keys ``low`` to ``high`` added to a tile of queries."""
    at_n = tl.arange(0, BLOCK_N)
    for at in range(low, high, BLOCK_N):
        position = at + at_n
        live = position < length
        k_rows, v_rows = position.to(tl.int64) * stride_k, position.to(tl.int64) * stride_v
        scores = tl.dot(q1, tl.trans(part(k, k_rows, live, 0, D1, D, IS_FULL)), input_precision="ieee")
        if D2:
            k2 = tl.trans(part(k, k_rows, live, D1, D2, D, IS_FULL))
            scores = tl.dot(q2, k2, scores, input_precision="ieee")
        if not IS_FULL:
            scores = tl.where(live[None, :], scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total, post, False)
        weights = weights.to(q1.dtype)
        v1 = part(v, v_rows, live, 0, D1, D, IS_FULL)
        acc1 = tl.dot(weights, v1, acc1 * shrink[:, None], input_precision="ieee")
        if D2:
            v2 = part(v, v_rows, live, D1, D2, D, IS_FULL)
            acc2 = tl.dot(weights, v2, acc2 * shrink[:, None], input_precision="ieee")
    return acc1, acc2, top, total


@triton.jit
def described_tiles(
    q1, q2, acc1, acc2, top, total, k1, k2, v1, v2, row, column, high, post, D2: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Keys 0 to ``high`` added to a tile of queries, read through descriptors from ``row`` and ``column`` on. The
    second part ends in numbers of the next head: they meet zeros of the queries, and outputs that are not written."""
    for at in range(0, high, BLOCK_N):
        scores = tl.dot(q1, tl.trans(k1.load([row + at, column])), input_precision="ieee")
        if D2:
            scores = tl.dot(q2, tl.trans(k2.load([row + at, column + 64])), scores, input_precision="ieee")
        weights, shrink, top, total = softmax_step(scores, top, total, post, False)
        weights = weights.to(q1.dtype)
        acc1 = tl.dot(weights, v1.load([row + at, column]), acc1 * shrink[:, None], input_precision="ieee")
        if D2:
            tail = v2.load([row + at, column + 64])
            acc2 = tl.dot(weights, tail, acc2 * shrink[:, None], input_precision="ieee")
    return acc1, acc2, top, total


@triton.jit(do_not_specialize=["length"])
def vision_kernel(
    q, k, v, out, k1, k2, v1, v2, post, length,
    stride_qn, stride_qs, stride_kn, stride_ks, stride_vn, stride_vs,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head of one item. Strides between heads are constants, as Triton has to see that 72
    numbers are a multiple of 16 bytes."""
    start_next(PDL)
    wait_for_previous(PDL)
    head, item = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = query < length
    wide = query.to(tl.int64)
    q += item * stride_qn + head * Q_HEAD
    k += item * stride_kn + head * K_HEAD
    v += item * stride_vn + head * V_HEAD
    q1 = part(q, wide * stride_qs, live, 0, D1, D, False)
    q2 = q1
    acc1 = tl.zeros([BLOCK_M, D1], tl.float32)
    acc2 = acc1
    if D2:
        q2 = part(q, wide * stride_qs, live, D1, D2, D, False)
        acc2 = tl.zeros([BLOCK_M, D2], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    clear = length // BLOCK_N * BLOCK_N
    if k1 is not None:
        row, column = tl.program_id(2) * length, tl.program_id(1) * D
        acc1, acc2, top, total = described_tiles(
            q1, q2, acc1, acc2, top, total, k1, k2, v1, v2, row, column, clear, post, D2, BLOCK_N
        )
    else:
        acc1, acc2, top, total = vision_tiles(
            q1, q2, acc1, acc2, top, total, k, v, stride_ks, stride_vs, 0, clear, length, post,
            D, D1, D2, BLOCK_N, True,
        )  # fmt: skip
    acc1, acc2, top, total = vision_tiles(
        q1, q2, acc1, acc2, top, total, k, v, stride_ks, stride_vs, clear, length, length, post,
        D, D1, D2, BLOCK_N, False,
    )  # fmt: skip
    scale = 1.0 / total
    rows = out + ((item * length + wide) * HEADS + head)[:, None] * D
    at_d = tl.arange(0, D1)
    kind = out.dtype.element_ty
    tl.store(rows + at_d[None, :], (acc1 * scale[:, None]).to(kind), mask=live[:, None] & (at_d < D)[None, :])
    if D2:
        at_d = D1 + tl.arange(0, D2)
        mask = live[:, None] & (at_d < D)[None, :]
        tl.store(rows + at_d[None, :], (acc2 * scale[:, None]).to(kind), mask=mask)
