"""Kernels of gated_delta_step for many rows, in two launches.

``mix_kernel`` convolves each channel once, normalises q and k and computes the gates; ``rule_kernel`` then has nothing
to do but to stream states, in few registers, so that many of its programs share a multiprocessor.

Letters: B rows, K key heads, H value heads, D key dim, E value dim, C = 2KD + HE channels, W taps, M stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.linear_parts import start_next, wait_for_previous

__all__ = ["add_pairs", "add_triples", "inputs", "mix_kernel", "rule_kernel", "softplus", "stores_of"]


@triton.jit
def add_pairs(a, b, c, d):
    """Two sums at once."""
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Three sums at once."""
    return a + d, b + e, c + f


@triton.jit
def softplus(x):
    """log(1 + e^x), exact to float32 for small results too."""
    small = tl.exp(-tl.abs(x))
    log1p = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def stores_of(stores, num_stores, row):
    """How many checkpoints ``row`` has among ``stores`` [M, 3]."""
    found = tl.zeros((), tl.int32)
    for first in range(0, num_stores, 32):
        at = first + tl.arange(0, 32)
        inside = at < num_stores
        rows = tl.load(stores + at * 3, mask=inside, other=-1)
        counts = tl.load(stores + at * 3 + 1, mask=inside, other=0)
        found += tl.sum(((rows == row) & (counts > 0)).to(tl.int32))
    return found


@triton.jit
def inputs(x_row, tail, channels, mask, FIRST: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr):
    """Inputs FIRST to TAPS - 1 of ``channels`` [channels, WIDE], float32, zero beyond: those kept in ``tail``
    [C, TAPS - 1], oldest first, then this token's."""
    at = FIRST + tl.arange(0, WIDE)[None, :]
    place, mask = channels[:, None], mask[:, None]
    past = tl.load(tail + place * (TAPS - 1) + at, mask=mask & (at < TAPS - 1), other=0.0)
    now = tl.load(x_row + place + tl.zeros_like(at), mask=mask & (at == TAPS - 1), other=0.0)
    return past.to(tl.float32) + now.to(tl.float32)


@triton.jit
def convolve_and_keep(
    x_row, weight, pool, slot, stores, num_stores, row, channels, mask, CHANNELS, TAPS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """SiLU of the convolution at ``channels``, which no other program has. Writes what is kept, checkpoints too."""
    at = tl.arange(0, WIDE)[None, :]
    tail = pool + slot * (CHANNELS * (TAPS - 1))
    w = tl.load(weight + channels[:, None] * TAPS + at, mask=mask[:, None] & (at < TAPS), other=0.0).to(
        tl.float32
    )
    y = tl.sum(inputs(x_row, tail, channels, mask, 0, TAPS, WIDE) * w, axis=1)
    kept = inputs(x_row, tail, channels, mask, 1, TAPS, WIDE).to(pool.dtype.element_ty)
    place, inside = channels[:, None] * (TAPS - 1) + at, mask[:, None] & (at < TAPS - 1)
    tl.debug_barrier()  # every thread has read the old inputs
    tl.store(tail + place, kept, mask=inside)
    for m in range(num_stores):
        if (tl.load(stores + m * 3) == row) & (tl.load(stores + m * 3 + 1) > 0):
            tl.store(pool + tl.load(stores + m * 3 + 2) * (CHANNELS * (TAPS - 1)) + place, kept, mask=inside)
    return y * tl.sigmoid(y)


@triton.jit(do_not_specialize=["num_stores"], do_not_specialize_on_alignment=["slots", "stores"])
def mix_kernel(
    qkv, a, b, conv_weight, a_log, dt_bias, conv_pool, slots, stores, mixed, gates,
    qkv_stride, a_stride, b_stride, num_stores, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``mixed`` float32 [B, C]: q normalised and scaled, k normalised, v. ``gates`` float32 [B, 2H + K]: decay, beta,
    q·k. ``conv_pool`` [slots, C, W - 1] is updated in place. Rows of scratch slot 0 are dead and skipped."""
    start_next(PDL)
    KEYS: tl.constexpr = KEY_HEADS * D
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * E
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(PDL)
    slot = tl.load(slots + row)
    if slot == 0:
        return
    x_row, mixed_row, gates_row = (
        qkv + row * qkv_stride,
        mixed + row * CHANNELS,
        gates + row * (2 * HEADS + KEY_HEADS),
    )
    if number < KEY_HEADS:
        d = tl.arange(0, BLOCK_D)
        here = number * D + d
        q = convolve_and_keep(
            x_row, conv_weight, conv_pool, slot, stores, num_stores, row, here, d < D, CHANNELS, TAPS, WIDE
        )
        k = convolve_and_keep(
            x_row,
            conv_weight,
            conv_pool,
            slot,
            stores,
            num_stores,
            row,
            KEYS + here,
            d < D,
            CHANNELS,
            TAPS,
            WIDE,
        )
        from_q, from_k, overlap = tl.reduce((q * q, k * k, q * k), 0, add_triples)
        q_norm, k_norm = tl.rsqrt(from_q + 1e-6) * scale, tl.rsqrt(from_k + 1e-6)
        tl.store(mixed_row + here, q * q_norm, mask=d < D)
        tl.store(mixed_row + KEYS + here, k * k_norm, mask=d < D)
        tl.store(gates_row + 2 * HEADS + number, overlap * q_norm * k_norm)
    else:
        head, e = number - KEY_HEADS, tl.arange(0, BLOCK_E)
        here = 2 * KEYS + head * E + e
        v = convolve_and_keep(
            x_row, conv_weight, conv_pool, slot, stores, num_stores, row, here, e < E, CHANNELS, TAPS, WIDE
        )
        tl.store(mixed_row + here, v, mask=e < E)
        step = softplus(
            tl.load(a + row * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        )
        tl.store(gates_row + head, tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * step))
        tl.store(gates_row + HEADS + head, tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32)))


@triton.jit(do_not_specialize=["num_stores"], do_not_specialize_on_alignment=["slots", "stores"])
def rule_kernel(
    mixed, gates, z, norm_weight, state_pool, slots, stores, out, z_stride, num_stores, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [B, H, E] from what ``mix_kernel`` wrote; ``state_pool`` [slots, H, D, E] is updated in place. A program
    has one head, in ``TILES`` blocks of ``BLOCK_E`` columns. Rows of scratch slot 0 give zeros."""
    start_next(PDL)
    KEYS: tl.constexpr = KEY_HEADS * D
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    e = tl.arange(0, TILES)[:, None] * BLOCK_E + column[None, :]
    wait_for_previous(PDL)
    slot = tl.load(slots + row)
    y_place = out + (row * HEADS + head) * E + e
    if slot == 0:
        tl.store(y_place, tl.zeros((TILES, BLOCK_E), out.dtype.element_ty), mask=e < E)
        return
    key_head = head // (HEADS // KEY_HEADS)
    mixed_row, gates_row = mixed + row * (2 * KEYS + HEADS * E), gates + row * (2 * HEADS + KEY_HEADS)
    q = tl.load(mixed_row + key_head * D + d, mask=d < D, other=0.0)
    k = tl.load(mixed_row + KEYS + key_head * D + d, mask=d < D, other=0.0)
    decay, beta = tl.load(gates_row + head), tl.load(gates_row + HEADS + head)
    overlap = tl.load(gates_row + 2 * HEADS + key_head)

    home = state_pool + (slot * HEADS + head) * (D * E)
    place = d[:, None] * E + column[None, :]
    y = tl.zeros((TILES, BLOCK_E), tl.float32)
    for t in tl.range(0, TILES, num_stages=1):
        first = t * BLOCK_E
        in_e = first + column < E
        if D == BLOCK_D and E == TILES * BLOCK_E:
            state = tl.load(home + first + place, eviction_policy="evict_first").to(tl.float32)
        else:
            state = tl.load(home + first + place, mask=(d < D)[:, None] & in_e[None, :], other=0.0).to(
                tl.float32
            )
        v = tl.load(mixed_row + 2 * KEYS + head * E + first + column, mask=in_e, other=0.0)
        # S'ᵀq of the new state S' = decay S + k ⊗ delta needs the old state alone: one pass of sums instead of two.
        from_k, from_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, add_pairs)
        delta = beta * (v - decay * from_k)
        new = (decay * state + k[:, None] * delta[None, :]).to(state_pool.dtype.element_ty)
        if D == BLOCK_D and E == TILES * BLOCK_E:
            tl.store(home + first + place, new, eviction_policy="evict_first")
        else:
            tl.store(home + first + place, new, mask=(d < D)[:, None] & in_e[None, :])
        y = tl.where(e // BLOCK_E == t, (decay * from_q + overlap * delta)[None, :], y)

    gain = tl.load(norm_weight + e, mask=e < E, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(tl.sum(y * y, axis=1), axis=0) / E + eps) * gain
    y = y.to(out.dtype.element_ty).to(tl.float32)  # rounded before the gate, as the model was trained
    tl.store(y_place, (y * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=e < E)

    if num_stores > 0:  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if stores_of(stores, num_stores, row) > 0:
            tl.debug_barrier()  # every thread has written the new state
            for m in range(num_stores):
                if (tl.load(stores + m * 3) == row) & (tl.load(stores + m * 3 + 1) > 0):
                    away = state_pool + (tl.load(stores + m * 3 + 2) * HEADS + head) * (D * E)
                    for t in range(TILES):
                        inside = (d < D)[:, None] & (t * BLOCK_E + column < E)[None, :]
                        new = tl.load(home + t * BLOCK_E + place, mask=inside)
                        tl.store(away + t * BLOCK_E + place, new, mask=inside)
