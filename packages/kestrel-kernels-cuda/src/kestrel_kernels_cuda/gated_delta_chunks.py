"""What the gated delta rule needs of each chunk of a sequence, whatever the state before it.

With γ_i the sum of a chunk's gates up to i and A_ij = β_i (k_i·k_j) e^(γ_i − γ_j) for j < i, the chunk's new values are
V = (I + A)⁻¹ β (v − k e^γ S), and its outputs (q e^γ) S + P V with P_ij = (q_i·k_j) e^(γ_i − γ_j) for j ≤ i.
``solve_kernel`` leaves N = ((I + A)⁻¹ − I) β and P of each chunk, in the inputs' dtype.

Products take operands of the inputs' dtype and sum in float32. q and k enter them as they are: norms, gates and β scale
the sums, in float32. Those of the inverse, whose numbers are of size one, take float16 for inputs of 16 bits.

Source: Yang et al. 2024, arXiv 2412.06464, section 3 (chunkwise form).
Letters: T tokens, K key heads, H value heads, D key dim, E value dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["solve_kernel"]


@triton.jit
def merge(found, minus_a, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """The inverse of the blocks of 2 · SIZE on the diagonal from ``found``, that of the blocks of SIZE: of
    [[X, 0], [L, Y]] it is [[X⁻¹, 0], [−Y⁻¹ L X⁻¹, Y⁻¹]]. ``minus_a``: −A in the dtype that products take."""
    half = tl.arange(0, CHUNK) // 2  # neighbours in a row share what is decided of them
    below = (half[:, None] ^ half[None, :]) // (SIZE // 2) == 1  # above the diagonal, the product is zero
    narrow = found.to(minus_a.dtype)
    inner = tl.where(below, tl.dot(narrow, minus_a, input_precision="tf32x3"), 0.0)
    return tl.dot(inner.to(minus_a.dtype), narrow, found, input_precision="tf32x3")


@triton.jit
def inverse(minus_a, NARROW: tl.constexpr, CHUNK: tl.constexpr):
    """(I + A)⁻¹ for a strictly lower triangular A, by doubling blocks: each step's numbers are those of an inverse,
    so none outgrows its like."""
    at = tl.arange(0, CHUNK)
    row, column = at[:, None], at[None, :]
    found = tl.where(row == column, 1.0, tl.where(row ^ column == 1, minus_a, 0.0))
    minus_a = minus_a.to(tl.float16) if NARROW else minus_a
    found = merge(found, minus_a, 2, CHUNK)
    found = merge(found, minus_a, 4, CHUNK)
    found = merge(found, minus_a, 8, CHUNK)
    found = merge(found, minus_a, 16, CHUNK)
    return merge(found, minus_a, 32, CHUNK)


@triton.jit
def likeness(
    q_home, k_home, live, q_stride, k_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(q kᵀ, k kᵀ, |q|², |k|²) of a chunk, summed by PIECE numbers of the key dim, which take few registers."""
    at, d = tl.arange(0, CHUNK), tl.arange(0, PIECE)
    seen, alike = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    q_square, k_square = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, BLOCK_D, PIECE):
        keys = live[:, None] & (d < D - start)[None, :]
        k_tile = tl.load((k_home + start) + ((at * k_stride)[:, None] + d[None, :]), mask=keys, other=0.0)
        q_tile = tl.load((q_home + start) + ((at * q_stride)[:, None] + d[None, :]), mask=keys, other=0.0)
        wide_k, wide_q = k_tile.to(tl.float32), q_tile.to(tl.float32)
        k_square += tl.sum(wide_k * wide_k, axis=1)
        q_square += tl.sum(wide_q * wide_q, axis=1)
        seen = tl.dot(q_tile, tl.trans(k_tile), seen, input_precision=PRECISION)
        alike = tl.dot(k_tile, tl.trans(k_tile), alike, input_precision=PRECISION)
    return seen, alike, q_square, k_square


@triton.jit(do_not_specialize=["rows", "tokens"], do_not_specialize_on_alignment=["cu_seqlens"])
def solve_kernel(
    q, k, gate, beta, cu_seqlens, chunk_row, chunk_first, n, p, factors, scales, out,
    rows, tokens, q_stride, k_stride, gate_stride, beta_stride, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """``n`` and ``p`` [T, H, CHUNK]; float32 ``factors`` [2, H, T]: γ, and what normalises k; ``scales`` [H, T, 4]: the
    scale of k for the state before, that of q, β, and the scale of k for the state after. Tokens behind the last
    sequence get zeros in ``out`` [T, H, E]."""
    head, number = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    row = tl.load(chunk_row + number)
    first = tl.load(chunk_first + number)
    end = tl.load(cu_seqlens + row + 1, mask=row < rows, other=tokens)
    at, d, e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    live = at < end - first
    first = first.to(tl.int64)
    home = first * HEADS + head  # offsets within a chunk need 32 bits, its place among all tokens 64
    if row == rows:
        values = live[:, None] & (e < E)[None, :]
        nothing = tl.zeros((CHUNK, BLOCK_E), out.dtype.element_ty)
        tl.store((out + home * E) + ((at * (HEADS * E))[:, None] + e[None, :]), nothing, mask=values)
        return

    k_home, q_home = k + first * k_stride + key_head * D, q + first * q_stride + key_head * D
    if PIECE < BLOCK_D:
        seen, alike, q_square, k_square = likeness(
            q_home, k_home, live, q_stride, k_stride, D, BLOCK_D, PIECE, CHUNK, PRECISION
        )
    else:
        keys = live[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_home + ((at * k_stride)[:, None] + d[None, :]), mask=keys, other=0.0)
        q_tile = tl.load(q_home + ((at * q_stride)[:, None] + d[None, :]), mask=keys, other=0.0)
    step = tl.load((gate + first * gate_stride + head) + at * gate_stride, mask=live, other=0.0)
    step = tl.maximum(step.to(tl.float32), -60.0)  # e^-60 is nothing; a sum without giants keeps small terms
    strength = tl.load((beta + first * beta_stride + head) + at * beta_stride, mask=live, other=0.0)
    strength = strength.to(tl.float32)

    gamma = tl.cumsum(step, axis=0)
    if PIECE == BLOCK_D:
        wide_k, wide_q = k_tile.to(tl.float32), q_tile.to(tl.float32)
        k_square, q_square = tl.sum(wide_k * wide_k, axis=1), tl.sum(wide_q * wide_q, axis=1)
    k_norm, q_norm = tl.rsqrt(k_square + 1e-6), tl.rsqrt(q_square + 1e-6) * scale
    line = head.to(tl.int64) * tokens + first
    tl.store((factors + line) + at, gamma, mask=live)
    tl.store((factors + HEADS * tokens.to(tl.int64) + line) + at, k_norm, mask=live)
    grown = tl.exp(gamma)
    left = tl.exp(tl.minimum(tl.sum(step, axis=0) - gamma, 0.0))
    tl.store((scales + line * 4) + at * 4, k_norm * grown, mask=live)
    tl.store((scales + line * 4) + (at * 4 + 1), q_norm * grown, mask=live)
    tl.store((scales + line * 4) + (at * 4 + 2), strength, mask=live)
    tl.store((scales + line * 4) + (at * 4 + 3), k_norm * left, mask=live)

    decay = tl.exp(tl.where(at[:, None] >= at[None, :], gamma[:, None] - gamma[None, :], float("-inf")))
    decay *= k_norm[None, :]
    to_chunk = (at * (HEADS * CHUNK))[:, None] + at[None, :]
    if PIECE == BLOCK_D:
        seen = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    seen = seen * decay * q_norm[:, None]
    tl.store((p + home * CHUNK) + to_chunk, seen.to(p.dtype.element_ty), mask=live[:, None])
    if PIECE == BLOCK_D:
        alike = tl.dot(k_tile, tl.trans(k_tile), input_precision=PRECISION)
    minus_a = alike * decay * (-k_norm * strength)[:, None]
    before = at[:, None] > at[None, :]
    tl.static_assert(CHUNK == 64)
    solved = inverse(tl.where(before, minus_a, 0.0), q.dtype.element_ty != tl.float32, CHUNK)
    solved = tl.where(before, solved * strength[None, :], 0.0)
    tl.store((n + home * CHUNK) + to_chunk, solved.to(n.dtype.element_ty), mask=live[:, None])
