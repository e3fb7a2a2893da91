"""Kernels of the gated delta rule over chunks of a sequence.

``solve_kernel`` takes each chunk alone. With γ_i the sum of its gates up to i and A_ij = β_i (k_i·k_j) e^(γ_i − γ_j)
for j < i, T = (I + A)⁻¹ gives U = T β v and W = T β k e^γ. ``scan_kernel`` goes over a sequence's chunks with the
state S: V = U − W S, outputs (q e^γ) S + P V with P_ij = (q_i·k_j) e^(γ_i − γ_j), S ← e^γ_C S + (k e^(γ_C − γ))ᵀ V.
For a checkpoint it leaves the state before the chunk that holds it, which ``store_kernel`` takes to the exact token.

Products take operands of the inputs' dtype and sum in float32. q, k and v enter them as they are: norms, gates and β
scale the other operand, or the sum, in float32. Rounded to the inputs' dtype are W, P, and V and S where outputs and
W S take them; T, and V where it enters S, are operands in two parts. U and S stay float32.

Source: Yang et al. 2024, arXiv 2412.06464, section 3 (chunkwise form).
Letters: T tokens, K key heads, H value heads, D key dim, E value dim, M stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["scan_kernel", "solve_kernel", "store_kernel"]


@triton.jit
def inverse_of_blocks(a, CHUNK: tl.constexpr):
    """(I + A)⁻¹ of the blocks of 16 on the diagonal of ``a``, which is strictly lower triangular; zero elsewhere."""
    SIZE: tl.constexpr = 16
    COUNT: tl.constexpr = CHUNK // SIZE
    block = tl.arange(0, COUNT)
    diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(a, (COUNT, SIZE, COUNT, SIZE)), 0.0), axis=2)
    at = tl.arange(0, SIZE)
    found = (
        tl.zeros((COUNT, SIZE, SIZE), tl.float32) + (at[:, None] == at[None, :]).to(tl.float32)[None, :, :]
    )
    for row in range(1, SIZE):
        here = (at == row)[None, :, None]
        factors = tl.sum(tl.where(here, blocks, 0.0), axis=1)
        found -= tl.where(here, tl.sum(factors[:, :, None] * found, axis=1)[:, None, :], 0.0)
    return tl.reshape(tl.where(diagonal, found[:, :, None, :], 0.0), (CHUNK, CHUNK))


@triton.jit
def inverse(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)⁻¹ for a strictly lower triangular ``a``.

    With B the inverse of the diagonal blocks and M = B (A − its diagonal blocks), I + A = B⁻¹ (I + M); M is strictly
    lower in blocks, of which there are four, so (I + M)⁻¹ = I − M + M² − M³ exactly.
    """
    at = tl.arange(0, CHUNK)
    blocks = inverse_of_blocks(a, CHUNK)
    below = tl.where(at[:, None] // 16 > at[None, :] // 16, a, 0.0)
    m = tl.dot(blocks, below, input_precision=PRECISION)
    square = tl.dot(m, m, input_precision=PRECISION)
    one = (at[:, None] == at[None, :]).to(tl.float32)
    series = one - m + square - tl.dot(m, square, input_precision=PRECISION)
    return tl.dot(series, blocks, input_precision=PRECISION)


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """``left`` (float32) times ``right``; a narrow ``right`` meets ``left`` in two parts of its dtype."""
    if right.dtype == tl.float32:
        return tl.dot(left, right, input_precision=PRECISION)
    high = left.to(right.dtype)
    low = (left - high.to(tl.float32)).to(right.dtype)
    return tl.dot(high, right, tl.dot(low, right))


@triton.jit
def add_product(total, left, right, PRECISION: tl.constexpr):
    """``total`` + ``left`` times ``right`` (float32), which a narrow ``left`` meets in two parts of its dtype."""
    if left.dtype == tl.float32:
        return tl.dot(left, right, total, input_precision=PRECISION)
    high = right.to(left.dtype)
    low = (right - high.to(tl.float32)).to(left.dtype)
    return tl.dot(left, low, tl.dot(left, high, total))


@triton.jit(do_not_specialize=["rows", "tokens"], do_not_specialize_on_alignment=["cu_seqlens"])
def solve_kernel(
    q, k, v, gate, beta, cu_seqlens, chunk_row, chunk_first, w, u, p, factors, out,
    rows, tokens, q_stride, k_stride, v_stride, gate_stride, beta_stride, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``w`` [T, H, D], ``u`` float32 [T, H, E], ``p`` [T, H, CHUNK], and ``factors`` float32 [3, H, T]: γ, and what
    normalises q and k. Tokens behind the last sequence get zeros in ``out`` [T, H, E]."""
    head, number = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    row = tl.load(chunk_row + number)
    first = tl.load(chunk_first + number)
    end = tl.load(cu_seqlens + row + 1, mask=row < rows, other=tokens)
    at, d, e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    live = at < end - first
    keys, values = live[:, None] & (d < D)[None, :], live[:, None] & (e < E)[None, :]
    first = first.to(tl.int64)
    home = first * HEADS + head  # offsets within a chunk need 32 bits, its place among all tokens 64
    to_keys, to_values = (at * (HEADS * D))[:, None] + d[None, :], (at * (HEADS * E))[:, None] + e[None, :]
    if row == rows:
        nothing = tl.zeros((CHUNK, BLOCK_E), out.dtype.element_ty)
        tl.store(out + home * E + to_values, nothing, mask=values)
        return

    k_place = k + first * k_stride + key_head * D + (at * k_stride)[:, None] + d[None, :]
    k_tile = tl.load(k_place, mask=keys, other=0.0)
    q_place = q + first * q_stride + key_head * D + (at * q_stride)[:, None] + d[None, :]
    q_tile = tl.load(q_place, mask=keys, other=0.0)
    step = tl.load(gate + first * gate_stride + head + at * gate_stride, mask=live, other=0.0).to(tl.float32)
    strength = tl.load(beta + first * beta_stride + head + at * beta_stride, mask=live, other=0.0).to(
        tl.float32
    )

    gamma = tl.cumsum(
        tl.maximum(step, -60.0), axis=0
    )  # e^-60 is nothing; a sum without giants keeps small terms
    wide_k, wide_q = k_tile.to(tl.float32), q_tile.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(wide_k * wide_k, axis=1) + 1e-6)
    q_norm = tl.rsqrt(tl.sum(wide_q * wide_q, axis=1) + 1e-6) * scale
    line = factors + head.to(tl.int64) * tokens + first + at
    size = HEADS * tokens.to(tl.int64)
    tl.store(line, gamma, mask=live)
    tl.store(line + size, q_norm, mask=live)
    tl.store(line + 2 * size, k_norm, mask=live)

    decay = tl.exp(tl.where(at[:, None] >= at[None, :], gamma[:, None] - gamma[None, :], float("-inf")))
    decay *= k_norm[None, :]
    turned = tl.trans(k_tile)
    seen = tl.dot(q_tile, turned, input_precision=PRECISION) * decay * q_norm[:, None]
    p_place = p + home * CHUNK + (at * (HEADS * CHUNK))[:, None] + at[None, :]
    tl.store(p_place, seen.to(p.dtype.element_ty), mask=live[:, None])
    system = tl.dot(k_tile, turned, input_precision=PRECISION) * decay * (k_norm * strength)[:, None]
    tl.static_assert(CHUNK == 64)
    solved = inverse(tl.where(at[:, None] > at[None, :], system, 0.0), CHUNK, PRECISION)
    v_place = v + first * v_stride + head * E + (at * v_stride)[:, None] + e[None, :]
    new = product(solved * strength[None, :], tl.load(v_place, mask=values, other=0.0), PRECISION)
    tl.store(u + home * E + to_values, new.to(u.dtype.element_ty), mask=values)
    old = product(solved * (strength * k_norm * tl.exp(gamma))[None, :], k_tile, PRECISION)
    tl.store(w + home * D + to_keys, old.to(w.dtype.element_ty), mask=keys)


@triton.jit
def chunk_of_next(stores, num_stores, row, done, CHUNK: tl.constexpr = 64):
    """Where the first chunk of ``row`` at or behind ``done`` that holds a checkpoint begins; -1: there is none."""
    found = tl.full((), 1 << 30, tl.int32)
    for first in range(0, num_stores, 32):
        at = first + tl.arange(0, 32)
        rows = tl.load(stores + at * 3, mask=at < num_stores, other=-1)
        counts = tl.load(stores + at * 3 + 1, mask=at < num_stores, other=0).to(tl.int32)
        found = tl.minimum(found, tl.min(tl.where((rows == row) & (counts > done), counts, 1 << 30)))
    return tl.where(found < 1 << 30, (found - 1) // CHUNK * CHUNK, -1)


@triton.jit(
    do_not_specialize=["tokens", "num_stores"],
    do_not_specialize_on_alignment=["slots", "cu_seqlens", "stores"],
)
def scan_kernel(
    q, k, w, u, p, factors, pool, slots, cu_seqlens, stores, out, tokens, q_stride, k_stride, num_stores,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    HAS_STORES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``out`` [T, H, E]; ``pool`` [slots, H, D, E] is updated in place. A program has BLOCK_E columns of one state."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    head, row = tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    begin, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    if begin == end:
        return
    at, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    inside = (d < D)[:, None] & (e < E)[None, :]
    tile = d[:, None] * E + e[None, :]
    state_home = pool + (tl.load(slots + row) * HEADS + head) * (D * E)
    state = tl.load(state_home + tile, mask=inside, other=0.0).to(tl.float32)
    size = HEADS * tokens.to(tl.int64)
    to_keys, to_values = (at * (HEADS * D))[:, None] + d[None, :], (at * (HEADS * E))[:, None] + e[None, :]
    next_store = chunk_of_next(stores, num_stores, row, 0) if HAS_STORES else 0
    for done in tl.range(0, end - begin, CHUNK, num_stages=STAGES):
        first = (begin + done).to(tl.int64)
        live = at < end - begin - done
        keys, values = live[:, None] & (d < D)[None, :], live[:, None] & (e < E)[None, :]
        home = first * HEADS + head
        w_tile = tl.load(w + home * D + to_keys, mask=keys, other=0.0)
        q_place = q + first * q_stride + key_head * D + (at * q_stride)[:, None] + d[None, :]
        q_tile = tl.load(q_place, mask=keys, other=0.0)
        k_place = k + first * k_stride + key_head * D + (at * k_stride)[:, None] + d[None, :]
        k_tile = tl.load(k_place, mask=keys, other=0.0)
        p_place = p + home * CHUNK + (at * (HEADS * CHUNK))[:, None] + at[None, :]
        p_tile = tl.load(p_place, mask=live[:, None], other=0.0)
        u_tile = tl.load(u + home * E + to_values, mask=values, other=0.0)
        line = factors + head.to(tl.int64) * tokens + first
        gamma = tl.load(line + at, mask=live, other=0.0)
        q_norm = tl.load(line + size + at, mask=live, other=0.0)
        k_norm = tl.load(line + 2 * size + at, mask=live, other=0.0)
        gamma_end = tl.load(line + tl.minimum(CHUNK, end - begin - done) - 1)

        if HAS_STORES:  # noqa: SIM102 (compiled in or not, then decided at run time)
            if done == next_store:
                for m in range(num_stores):
                    count = tl.load(stores + m * 3 + 1)
                    if (tl.load(stores + m * 3) == row) & (count > done) & (count <= done + CHUNK):
                        target = pool + (tl.load(stores + m * 3 + 2) * HEADS + head) * (D * E)
                        tl.store(target + tile, state.to(pool.dtype.element_ty), mask=inside)
                next_store = chunk_of_next(stores, num_stores, row, done + CHUNK)
        operand = state.to(q_tile.dtype)
        new = u_tile.to(tl.float32) - tl.dot(w_tile, operand, input_precision=PRECISION)
        y = tl.dot(q_tile, operand, input_precision=PRECISION) * (q_norm * tl.exp(gamma))[:, None]
        y += tl.dot(p_tile, new.to(p_tile.dtype), input_precision=PRECISION)
        tl.store(out + home * E + to_values, y.to(out.dtype.element_ty), mask=values)
        turned = tl.trans(k_tile)
        weight = k_norm * tl.exp(tl.minimum(gamma_end - gamma, 0.0))
        state = add_product(state * tl.exp(gamma_end), turned, new * weight[:, None], PRECISION)
    tl.store(state_home + tile, state.to(pool.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["cu_seqlens", "stores"])
def store_kernel(
    k, w, u, factors, pool, cu_seqlens, stores, tokens, k_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes each checkpoint of ``stores`` [M, 3] from the state before its chunk, which ``pool`` has, to its token."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    head, m = tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    row, total = tl.load(stores + m * 3), tl.load(stores + m * 3 + 1).to(tl.int32)
    if total == 0:
        return
    done = (total - 1) // CHUNK * CHUNK
    at, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    inside = (d < D)[:, None] & (e < E)[None, :]
    place = pool + (tl.load(stores + m * 3 + 2) * HEADS + head) * (D * E) + d[:, None] * E + e[None, :]
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    first = (tl.load(cu_seqlens + row) + done).to(tl.int64)
    count = total - done
    live = at < count
    keys, values = live[:, None] & (d < D)[None, :], live[:, None] & (e < E)[None, :]
    home = first * HEADS + head
    w_tile = tl.load(w + home * D + (at * (HEADS * D))[:, None] + d[None, :], mask=keys, other=0.0)
    k_place = k + first * k_stride + key_head * D + (at * k_stride)[:, None] + d[None, :]
    k_tile = tl.load(k_place, mask=keys, other=0.0)
    u_tile = tl.load(u + home * E + (at * (HEADS * E))[:, None] + e[None, :], mask=values, other=0.0)
    line = factors + head.to(tl.int64) * tokens + first
    gamma = tl.load(line + at, mask=live, other=0.0)
    k_norm = tl.load(line + 2 * HEADS * tokens.to(tl.int64) + at, mask=live, other=0.0)
    gamma_end = tl.load(line + count - 1)
    new = u_tile - tl.dot(w_tile, state.to(k_tile.dtype), input_precision=PRECISION)
    weight = k_norm * tl.exp(tl.minimum(gamma_end - gamma, 0.0))
    state = add_product(state * tl.exp(gamma_end), tl.trans(k_tile), new * weight[:, None], PRECISION)
    tl.store(place, state.to(pool.dtype.element_ty), mask=inside)
