"""The kernel of gated_delta_step: a program has one value head of one row.

It takes the head's state [D, E] through registers in tiles of columns, read once and written once: nearly all of the
traffic. What does not depend on the projection before (the state's first tile, kept inputs, weights) is asked for
before that has ended. Programs that share a key head convolve its channels each for itself; the last of them to have
read the old inputs writes the new ones (a counter says which).

Letters: B rows, K key heads, H value heads, D key dim, E value dim, C = 2KD + HE channels, W taps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.gated_delta_parts import add_pairs, add_triples, softplus
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["heads_kernel"]


@triton.jit
def past(tail, weight, channels, mask, TAPS: tl.constexpr):
    """(kept inputs at ``channels``, what they add to the convolution, the weights of this token's input)."""
    y = tl.zeros(channels.shape, tl.float32)
    kept = ()
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(tail + channels * (TAPS - 1) + tap, mask=mask, other=0.0)
        w = tl.load(weight + channels * TAPS + tap, mask=mask, other=0.0)
        y += value.to(tl.float32) * w.to(tl.float32)
        kept = kept + (value,)  # noqa: RUF005 (Triton unpacks no tuples)
    return kept, y, tl.load(weight + channels * TAPS + TAPS - 1, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def convolved(y, weight, x):
    """SiLU of the convolution, from what ``past`` gave and this token's input."""
    y += weight * x.to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def keep(tail, kept, x, channels, mask, TAPS: tl.constexpr):
    """Write to ``tail`` the inputs to keep behind this token."""
    for tap in tl.static_range(TAPS - 1):
        if tap < TAPS - 2:
            value = kept[tap + 1]
        else:
            value = x.to(tail.dtype.element_ty)
        tl.store(tail + channels * (TAPS - 1) + tap, value, mask=mask)


@triton.jit
def ask_for(start, BYTES: tl.constexpr, THREADS: tl.constexpr):
    """Have the second-level cache read ``BYTES`` (a multiple of 16) from ``start`` on, which one thread asks for."""
    thread = tl.arange(0, THREADS)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [start.to(tl.int64) + tl.zeros_like(thread), thread, tl.full((THREADS,), BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_tile(home, d, column, first, D: tl.constexpr, E: tl.constexpr, EVEN: tl.constexpr):
    """Columns ``first`` + ``column`` of a state, float32."""
    place = home + first + (d[:, None] * E + column[None, :])
    if EVEN:
        return tl.load(place, eviction_policy="evict_first").to(tl.float32)
    else:
        return tl.load(place, mask=(d < D)[:, None] & (first + column < E)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_tile(home, d, column, first, tile, D: tl.constexpr, E: tl.constexpr, EVEN: tl.constexpr):
    """The opposite of ``load_tile``."""
    place = home + first + (d[:, None] * E + column[None, :])
    tile = tile.to(home.dtype.element_ty)
    if EVEN:
        tl.store(place, tile, eviction_policy="evict_first")
    else:
        tl.store(place, tile, mask=(d < D)[:, None] & (first + column < E)[None, :])


@triton.jit(do_not_specialize=["early"], do_not_specialize_on_alignment=["slots"])
def heads_kernel(
    qkv, a, b, conv_weight, a_log, dt_bias, z, norm_weight, conv_pool, state_pool, slots, readers, out,
    qkv_stride, a_stride, b_stride, z_stride, early, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr,
    THREADS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [B, H, E]; ``conv_pool`` [slots, C, W - 1] and ``state_pool`` [slots, H, D, E] are updated in place.

    A state has TILES tiles of BLOCK_E columns; PREFETCH: all are asked for at once (where kernels overlap). Rows of
    scratch slot 0 give zeros. ``readers`` int32 [B, K] is zero before and after.

    ``early`` is 0 or 1. If 1, slots, states and kept inputs are read while the kernel before runs, which the first such
    launch of a step makes safe: it is not early, and lets no kernel begin before all of those before it have ended.
    """
    if early == 0:
        wait_for_previous(PDL)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * D
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * E
    EVEN: tl.constexpr = D == BLOCK_D and E == TILES * BLOCK_E
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    d, column, every_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, TILES * BLOCK_E)
    e = tl.arange(0, TILES)[:, None] * BLOCK_E + column[None, :]
    in_d, in_e = d < D, every_e < E
    q_channels, v_channels = key_head * D + d, 2 * KEYS + head * E + every_e
    k_channels = KEYS + q_channels

    slot = tl.load(slots + row)
    home = state_pool + (slot * HEADS + head) * (D * E)
    BYTES: tl.constexpr = D * E * state_pool.dtype.element_ty.primitive_bitwidth // 8
    if PREFETCH and PDL and BYTES % 16 == 0:
        ask_for(home, BYTES, THREADS)
    state = load_tile(home, d, column, 0, D, E, EVEN)
    tail = conv_pool + slot * (CHANNELS * (TAPS - 1))
    kept_q, past_q, last_q = past(tail, conv_weight, q_channels, in_d, TAPS)
    kept_k, past_k, last_k = past(tail, conv_weight, k_channels, in_d, TAPS)
    kept_v, past_v, last_v = past(tail, conv_weight, v_channels, in_e, TAPS)
    gain = tl.load(norm_weight + e, mask=e < E, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    wait_for_previous(PDL)
    # Not before: the next kernel asks for weights at once, and the projection's would come later.
    start_next(PDL)

    y_place = out + (row * HEADS + head) * E + e
    if slot == 0:
        tl.store(y_place, tl.zeros((TILES, BLOCK_E), out.dtype.element_ty), mask=e < E)
        return
    # The slot anew: of an address that it knows, the compiler would keep one for each row of a tile in registers.
    home = state_pool + (tl.load(slots + row) * HEADS + head) * (D * E)
    x_row = qkv + row * qkv_stride
    x_q = tl.load(x_row + q_channels, mask=in_d, other=0.0)
    x_k = tl.load(x_row + k_channels, mask=in_d, other=0.0)
    x_v = tl.load(x_row + v_channels, mask=in_e, other=0.0)
    step = tl.load(a + row * a_stride + head).to(tl.float32)
    beta = tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    gate = tl.load(z + row * z_stride + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    q, k = convolved(past_q, last_q, x_q), convolved(past_k, last_k, x_k)
    from_q, from_k, overlap = tl.reduce((q * q, k * k, q * k), 0, add_triples)
    q_norm, k_norm = tl.rsqrt(from_q + 1e-6) * scale, tl.rsqrt(from_k + 1e-6)
    overlap *= q_norm * k_norm
    if GROUP > 1:
        tl.debug_barrier()  # every thread has read the old inputs of q and k
        counter, thread = readers + row * KEY_HEADS + key_head, tl.arange(0, THREADS)
        ticket = tl.atomic_add(counter + thread, 1, mask=thread == 0, sem="relaxed")  # looked at much later
    # Gathered in the tiles' layout: the compiler would rather convolve again in that, sixteen times as often.
    q, k = tl.gather(q * q_norm, d, axis=0), tl.gather(k * k_norm, d, axis=0)
    decay = tl.exp(-rate * softplus(step + bias))
    all_v = convolved(past_v, last_v, x_v)

    y = tl.zeros((TILES, BLOCK_E), tl.float32)
    for t in tl.static_range(TILES):
        v = tl.gather(all_v, t * BLOCK_E + column, axis=0)
        # S'ᵀq of the new state S' = decay S + k ⊗ delta needs the old state alone: one pass of sums instead of two.
        seen_k, seen_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, add_pairs)
        delta = beta * (v - decay * seen_k)
        store_tile(home, d, column, t * BLOCK_E, decay * state + k[:, None] * delta[None, :], D, E, EVEN)
        y = tl.where(e // BLOCK_E == t, (decay * seen_q + overlap * delta)[None, :], y)
        if t + 1 < TILES:
            state = load_tile(home, d, column, (t + 1) * BLOCK_E, D, E, EVEN)

    tl.debug_barrier()  # every thread has read the old inputs
    keep(tail, kept_v, x_v, v_channels, in_e, TAPS)
    y *= tl.rsqrt(tl.sum(tl.sum(y * y, axis=1), axis=0) / E + eps) * gain
    y = y.to(out.dtype.element_ty).to(tl.float32)  # rounded before the gate, as the model was trained
    tl.store(y_place, (y * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=e < E)

    is_last = True
    if GROUP > 1:
        is_last = tl.sum(tl.where(thread == 0, ticket, 0), axis=0) == GROUP - 1
    if is_last:
        if GROUP > 1:
            tl.store(counter, 0)
        keep(tail, kept_q, x_q, q_channels, in_d, TAPS)
        keep(tail, kept_k, x_k, k_channels, in_d, TAPS)
