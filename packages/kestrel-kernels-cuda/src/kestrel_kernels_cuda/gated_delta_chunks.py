"""Kernels of the gated delta rule over chunks of a sequence.

``solve_kernel`` takes each chunk alone. With γ_i the sum of its gates up to i and A_ij = β_i (k_i·k_j) e^(γ_i − γ_j)
for j < i, T = (I + A)⁻¹ gives U = T β v and W = T β k e^γ. ``scan_kernel`` goes over a sequence's chunks with the
state S: V = U − W S, outputs (q e^γ) S + P V with P_ij = (q_i·k_j) e^(γ_i − γ_j), S ← e^γ_C S + (k e^(γ_C − γ))ᵀ V.

Products take operands of the inputs' dtype and sum in float32. q, k and v enter them as they are: norms, gates and β
scale the other operand, or the sum, in float32. Rounded to the inputs' dtype are T (in two parts), U, W, P, V, and S
where it is an operand; S itself stays float32.

Source: Yang et al. 2024, arXiv 2412.06464, section 3 (chunkwise form).
Letters: T tokens, K key heads, H value heads, D key dim, E value dim, M stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.gated_delta_step import stores_of

__all__ = ["scan_kernel", "solve_kernel"]


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


@triton.jit(do_not_specialize=["rows", "tokens"])
def solve_kernel(
    q, k, v, gate, beta, cu_seqlens, chunk_row, chunk_first, w, u, p, factors, out,
    rows, tokens, q_stride, k_stride, v_stride, gate_stride, beta_stride, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``w`` [T, H, D], ``u`` [T, H, E], ``p`` [T, H, CHUNK] and ``factors`` float32 [3, H, T]: γ, and what normalises q
    and k. Tokens behind the last sequence get zeros in ``out`` [T, H, E]."""
    head, number = tl.program_id(0), tl.program_id(1)
    row = tl.load(chunk_row + number)
    first = tl.load(chunk_first + number).to(tl.int64)
    end = tl.load(cu_seqlens + row + 1, mask=row < rows, other=tokens)
    at, d, e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    token = first + at
    live = token < end
    keys, values = live[:, None] & (d < D)[None, :], live[:, None] & (e < E)[None, :]
    place = token * HEADS + head
    if row == rows:
        tl.store(
            out + place[:, None] * E + e[None, :],
            tl.zeros((CHUNK, BLOCK_E), out.dtype.element_ty),
            mask=values,
        )
        return

    key_head = head // (HEADS // KEY_HEADS)
    k_tile = tl.load(k + (token * k_stride + key_head * D)[:, None] + d[None, :], mask=keys, other=0.0)
    q_tile = tl.load(q + (token * q_stride + key_head * D)[:, None] + d[None, :], mask=keys, other=0.0)
    v_tile = tl.load(v + (token * v_stride + head * E)[:, None] + e[None, :], mask=values, other=0.0)
    step = tl.load(gate + token * gate_stride + head, mask=live, other=0.0).to(tl.float32)
    strength = tl.load(beta + token * beta_stride + head, mask=live, other=0.0).to(tl.float32)

    gamma = tl.cumsum(
        tl.maximum(step, -60.0), axis=0
    )  # e^-60 is nothing, and a sum without giants keeps its small terms
    wide_k, wide_q = k_tile.to(tl.float32), q_tile.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(wide_k * wide_k, axis=1) + 1e-6)
    q_norm = tl.rsqrt(tl.sum(wide_q * wide_q, axis=1) + 1e-6) * scale
    line = head.to(tl.int64) * tokens + token
    size = HEADS * tokens.to(tl.int64)
    tl.store(factors + line, gamma, mask=live)
    tl.store(factors + size + line, q_norm, mask=live)
    tl.store(factors + 2 * size + line, k_norm, mask=live)

    decay = tl.exp(tl.where(at[:, None] >= at[None, :], gamma[:, None] - gamma[None, :], float("-inf")))
    decay *= k_norm[None, :]
    turned = tl.trans(k_tile)
    seen = tl.dot(q_tile, turned, input_precision=PRECISION) * decay * q_norm[:, None]
    tl.store(p + (place * CHUNK)[:, None] + at[None, :], seen.to(p.dtype.element_ty), mask=live[:, None])
    system = tl.dot(k_tile, turned, input_precision=PRECISION) * decay * (k_norm * strength)[:, None]
    solved = inverse(tl.where(at[:, None] > at[None, :], system, 0.0), CHUNK, PRECISION)
    new = product(solved * strength[None, :], v_tile, PRECISION)
    tl.store(u + (place * E)[:, None] + e[None, :], new.to(u.dtype.element_ty), mask=values)
    old = product(solved * (strength * k_norm * tl.exp(gamma))[None, :], k_tile, PRECISION)
    tl.store(w + (place * D)[:, None] + d[None, :], old.to(w.dtype.element_ty), mask=keys)


@triton.jit(do_not_specialize=["tokens", "num_stores"])
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
    home = pool + (tl.load(slots + row) * HEADS + head) * (D * E)
    state = tl.load(home + tile, mask=inside, other=0.0).to(tl.float32)
    line = factors + head.to(tl.int64) * tokens
    size = HEADS * tokens.to(tl.int64)
    num_mine = stores_of(stores, num_stores, row) if HAS_STORES else 0
    for done in tl.range(0, end - begin, CHUNK, num_stages=STAGES):
        first = begin + done
        token = first.to(tl.int64) + at
        live = token < end
        keys, values = live[:, None] & (d < D)[None, :], live[:, None] & (e < E)[None, :]
        place = token * HEADS + head
        w_tile = tl.load(w + (place * D)[:, None] + d[None, :], mask=keys, other=0.0)
        q_tile = tl.load(q + (token * q_stride + key_head * D)[:, None] + d[None, :], mask=keys, other=0.0)
        k_tile = tl.load(k + (token * k_stride + key_head * D)[:, None] + d[None, :], mask=keys, other=0.0)
        p_tile = tl.load(p + (place * CHUNK)[:, None] + at[None, :], mask=live[:, None], other=0.0)
        u_tile = tl.load(u + (place * E)[:, None] + e[None, :], mask=values, other=0.0)
        gamma = tl.load(line + token, mask=live, other=0.0)
        q_norm = tl.load(line + size + token, mask=live, other=0.0)
        k_norm = tl.load(line + 2 * size + token, mask=live, other=0.0)
        gamma_end = tl.load(line + tl.minimum(first + CHUNK, end) - 1)

        operand = state.to(q_tile.dtype)
        new = u_tile.to(tl.float32) - tl.dot(w_tile, operand, input_precision=PRECISION)
        y = tl.dot(q_tile, operand, input_precision=PRECISION) * (q_norm * tl.exp(gamma))[:, None]
        y += tl.dot(p_tile, new.to(p_tile.dtype), input_precision=PRECISION)
        tl.store(out + (place * E)[:, None] + e[None, :], y.to(out.dtype.element_ty), mask=values)
        turned = tl.trans(k_tile)
        if HAS_STORES:  # noqa: SIM102 (compiled in or not, then decided at run time)
            if num_mine > 0:
                for m in range(num_stores):
                    count = tl.load(stores + m * 3 + 1) - done
                    if (tl.load(stores + m * 3) == row) & (count > 0) & (count <= CHUNK):
                        gamma_m = tl.load(line + first + count - 1)
                        weight = tl.where(at < count, k_norm * tl.exp(tl.minimum(gamma_m - gamma, 0.0)), 0.0)
                        added = (new * weight[:, None]).to(k_tile.dtype)
                        then = tl.dot(turned, added, state * tl.exp(gamma_m), input_precision=PRECISION)
                        target = pool + (tl.load(stores + m * 3 + 2) * HEADS + head) * (D * E)
                        tl.store(target + tile, then.to(pool.dtype.element_ty), mask=inside)
        weight = k_norm * tl.exp(tl.minimum(gamma_end - gamma, 0.0))
        state = tl.dot(
            turned,
            (new * weight[:, None]).to(k_tile.dtype),
            state * tl.exp(gamma_end),
            input_precision=PRECISION,
        )
    tl.store(home + tile, state.to(pool.dtype.element_ty), mask=inside)
