"""The gated delta rule over the chunks of a sequence, from what ``gated_delta_chunks`` leaves of each.

``scan_kernel`` goes from chunk to chunk with the state S: R = v − (k e^γ) S, V = β R + N R, outputs (q e^γ) S + P V,
S ← e^γ_C S + (k e^(γ_C − γ))ᵀ V. It has everything turned (Sᵀ [E, D], Rᵀ [E, CHUNK]), so that the left operand of each
product is what the product before left in registers, and the right one a tile of the input as it was loaded.
For a checkpoint it leaves the state before the chunk that holds it, which ``store_kernel`` takes to the exact token.

Rounded to the inputs' dtype are N, P, R, S as an operand, and V for P V; V enters S in two parts. S stays float32. Both
terms of V take the rounded R: so its error is that of slightly other values, which later tokens overwrite like any.
A tile's addresses are one scalar plus offsets of 32 bits: as sums of tensors they took the registers of its state.
Letters: T tokens, K key heads, H value heads, D key dim, E value dim, M stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["scan_kernel", "store_kernel"]


@triton.jit
def add_product(total, left, right, PRECISION: tl.constexpr):
    """``total`` + ``left`` (float32) times ``right``; a narrow ``right`` meets ``left`` in two parts of its dtype."""
    if right.dtype == tl.float32:
        return tl.dot(left, right, total, input_precision=PRECISION)
    if (
        right.dtype == tl.bfloat16
    ):  # the first half of a float32's bits: what needs no rounding needs no conversion
        high = (left.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    else:
        high = left.to(right.dtype).to(tl.float32)
    total = tl.dot(high.to(right.dtype), right, total)
    return tl.dot((left - high).to(right.dtype), right, total)


@triton.jit
def turned(tile, one):
    """``tile`` transposed, in float32. A product with ``one``, the identity, reads it from where it was loaded."""
    if tile.dtype == tl.float32:
        return tl.trans(tile)
    return tl.dot(tl.trans(tile), one)


@triton.jit
def next_store(stores, num_stores, row, last):
    """The first checkpoint of ``row`` behind ``last``, as its count of tokens times ``num_stores`` plus its index."""
    nothing: tl.constexpr = 2**31 - 1
    found = tl.full((), nothing, tl.int32)
    for first in range(0, num_stores, 32):
        at = first + tl.arange(0, 32)
        rows = tl.load(stores + at * 3, mask=at < num_stores, other=-1)
        counts = tl.load(stores + at * 3 + 1, mask=at < num_stores, other=0).to(tl.int32)
        keys = counts * num_stores + at
        found = tl.minimum(
            found, tl.min(tl.where((rows == row) & (counts > 0) & (keys > last), keys, nothing))
        )
    return found


@triton.jit
def home_of(pool, slot, head, first_e, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """Where columns from ``first_e`` on of a head's state begin, in the slot whose number is at ``slot``."""
    return pool + (tl.load(slot) * HEADS + head) * (D * E) + first_e


@triton.jit(
    do_not_specialize=["tokens", "num_stores"],
    do_not_specialize_on_alignment=["slots", "cu_seqlens", "stores"],
)
def scan_kernel(
    q, k, v, n, p, factors, scales, pool, slots, cu_seqlens, stores, out,
    tokens, num_stores,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HAS_STORES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``out`` [T, H, E]; ``pool`` [slots, H, D, E] is updated in place. A program has BLOCK_E columns of one state."""
    first_e = tl.program_id(0) * BLOCK_E
    e = tl.arange(0, BLOCK_E)
    head, row = tl.program_id(1), tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    begin, end = tl.load(cu_seqlens + row), tl.load(cu_seqlens + row + 1)
    if begin == end:
        return
    at, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    one = (at[:, None] == at[None, :]).to(tl.float32).to(v.dtype.element_ty)
    inside = (e < E - first_e)[:, None] & (d < D)[None, :]
    tile = d[None, :].to(tl.int64) * E + e[:, None]
    state_home = home_of(pool, slots + row, head, first_e, HEADS, D, E)
    state = tl.load(state_home + tile, mask=inside, other=0.0).to(tl.float32)
    to_values = (at * (HEADS * E))[:, None] + e[None, :]
    to_chunk = (at * (HEADS * CHUNK))[:, None] + at[None, :]
    key = next_store(stores, num_stores, row, -1) if HAS_STORES else 0
    length = end - begin
    for done in tl.range(0, length, CHUNK, num_stages=STAGES):
        first = (begin + done).to(tl.int64)
        live = at < length - done
        keys, values = live[:, None] & (d < D)[None, :], live[:, None] & (e < E - first_e)[None, :]
        home = first * HEADS + head
        k_place = (k + first * K_STRIDE + key_head * D) + ((at * K_STRIDE)[:, None] + d[None, :])
        k_tile = tl.load(k_place, mask=keys, other=0.0)
        q_place = (q + first * Q_STRIDE + key_head * D) + ((at * Q_STRIDE)[:, None] + d[None, :])
        q_tile = tl.load(q_place, mask=keys, other=0.0)
        v_place = (v + first * V_STRIDE + head * E + first_e) + ((at * V_STRIDE)[:, None] + e[None, :])
        v_tile = tl.load(v_place, mask=values, other=0.0)
        n_tile = tl.load(n + home * CHUNK + to_chunk, mask=live[:, None], other=0.0)
        p_tile = tl.load(p + home * CHUNK + to_chunk, mask=live[:, None], other=0.0)
        line = head.to(tl.int64) * tokens + first
        fours = (scales + line * 4) + ((at * 4)[:, None] + tl.arange(0, 4)[None, :])
        four = tl.load(fours, mask=live[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(four, (CHUNK, 2, 2)))
        k_before, strength = tl.split(even)
        q_before, k_after = tl.split(odd)
        gamma_end = tl.load(factors + line + tl.minimum(CHUNK, length - done) - 1)

        if HAS_STORES:  # noqa: SIM102 (compiled in or not, then decided at run time)
            if key < (done + CHUNK + 1) * num_stores:
                while key < (done + CHUNK + 1) * num_stores:
                    target = home_of(pool, stores + key % num_stores * 3 + 2, head, first_e, HEADS, D, E)
                    tl.store(target + tile, state.to(pool.dtype.element_ty), mask=inside)
                    key = next_store(stores, num_stores, row, key)
        operand = state.to(k_tile.dtype)
        foreseen = tl.dot(operand, tl.trans(k_tile), input_precision=PRECISION)
        rest = (turned(v_tile, one) - foreseen * k_before[None, :]).to(n_tile.dtype)
        new = rest.to(tl.float32) * strength[None, :]
        new = tl.dot(rest, tl.trans(n_tile), new, input_precision=PRECISION)
        y = tl.dot(operand, tl.trans(q_tile), input_precision=PRECISION) * q_before[None, :]
        y = tl.dot(new.to(p_tile.dtype), tl.trans(p_tile), y, input_precision=PRECISION)
        tl.store((out + home * E + first_e) + to_values, tl.trans(y.to(out.dtype.element_ty)), mask=values)
        state = add_product(state * tl.exp(gamma_end), new * k_after[None, :], k_tile, PRECISION)
    state_home = home_of(pool, slots + row, head, first_e, HEADS, D, E)  # anew: registers are for the loop
    tl.store(state_home + tile, state.to(pool.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["cu_seqlens", "stores"])
def store_kernel(
    k, v, n, factors, scales, pool, cu_seqlens, stores, tokens, k_stride, v_stride,
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
    one = (at[:, None] == at[None, :]).to(tl.float32).to(v.dtype.element_ty)
    inside = (e < E)[:, None] & (d < D)[None, :]
    tile = d[None, :].to(tl.int64) * E + e[:, None]
    place = pool + (tl.load(stores + m * 3 + 2) * HEADS + head) * (D * E) + tile
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    first = (tl.load(cu_seqlens + row) + done).to(tl.int64)
    count = total - done
    live = at < count
    keys, values = live[:, None] & (d < D)[None, :], live[:, None] & (e < E)[None, :]
    home = first * HEADS + head
    k_place = k + first * k_stride + key_head * D + (at * k_stride)[:, None] + d[None, :]
    k_tile = tl.load(k_place, mask=keys, other=0.0)
    v_place = v + first * v_stride + head * E + (at * v_stride)[:, None] + e[None, :]
    v_tile = tl.load(v_place, mask=values, other=0.0)
    n_place = n + home * CHUNK + (at * (HEADS * CHUNK))[:, None] + at[None, :]
    n_tile = tl.load(n_place, mask=live[:, None], other=0.0)
    line = head.to(tl.int64) * tokens + first
    gamma = tl.load(factors + line + at, mask=live, other=0.0)
    k_norm = tl.load(factors + HEADS * tokens.to(tl.int64) + line + at, mask=live, other=0.0)
    gamma_end = tl.load(factors + line + count - 1)
    k_before = tl.load(scales + (line + at) * 4, mask=live, other=0.0)
    strength = tl.load(scales + (line + at) * 4 + 2, mask=live, other=0.0)
    foreseen = tl.dot(state.to(k_tile.dtype), tl.trans(k_tile), input_precision=PRECISION)
    rest = (turned(v_tile, one) - foreseen * k_before[None, :]).to(n_tile.dtype)
    new = rest.to(tl.float32) * strength[None, :]
    new = tl.dot(rest, tl.trans(n_tile), new, input_precision=PRECISION)
    new *= (k_norm * tl.exp(tl.minimum(gamma_end - gamma, 0.0)))[None, :]
    state *= tl.exp(gamma_end)
    state = add_product(state, new, k_tile, PRECISION)
    tl.store(place, state.to(pool.dtype.element_ty), mask=inside)
