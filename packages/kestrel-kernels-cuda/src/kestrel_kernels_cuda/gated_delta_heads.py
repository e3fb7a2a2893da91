"""The kernel of gated_delta_step: a program has some value heads of one key head of one row.

It takes each head's state [D, E] through registers in tiles of columns, the next tile on its way while one is worked
on: nearly all of the traffic. What does not depend on the projection before (state, kept inputs, weights) is asked for
before that has ended. Where programs share a key head, the last of them to have read the old inputs of its query and
key channels writes the new ones (a counter says which).

Letters: B rows, K key heads, H value heads, D key dim, E value dim, C = 2KD + HE channels, W taps, M stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kestrel_kernels_cuda.gated_delta_rows import add_pairs, add_triples, softplus, stores_of
from kestrel_kernels_cuda.linear_parts import start_next, wait_for_previous

__all__ = ["heads_kernel"]


@triton.jit
def past(tail, weight, channels, mask, TAPS: tl.constexpr):
    """(kept inputs at ``channels``, what they add to the convolution, the weights of this token's input)."""
    y = tl.zeros(channels.shape, tl.float32)
    kept = ()
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(tail + channels * (TAPS - 1) + tap, mask=mask, other=0.0)
        y += value.to(tl.float32) * tl.load(weight + channels * TAPS + tap, mask=mask, other=0.0).to(
            tl.float32
        )
        kept = kept + (value,)  # noqa: RUF005 (Triton unpacks no tuples)
    return kept, y, tl.load(weight + channels * TAPS + TAPS - 1, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def convolved(y, weight, x):
    """SiLU of the convolution, from what ``past`` gave and this token's input."""
    y += weight * x.to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def asked(x_row, z_row, a_row, b_row, head, channels, in_e, e, E: tl.constexpr):
    """What the projection before gives a value head: inputs of v, the output's gate, the gates before their bias."""
    x = tl.load(x_row + channels, mask=in_e, other=0.0)
    gate = tl.load(z_row + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    return x, gate, tl.load(a_row + head).to(tl.float32), tl.sigmoid(tl.load(b_row + head).to(tl.float32))


@triton.jit
def keep(
    pool, slot, stores, num_stores, row, kept, x, channels, mask,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_STORES: tl.constexpr,
):  # fmt: skip
    """Write the inputs to keep behind this token, in the row's checkpoints too."""
    place = channels * (TAPS - 1)
    for tap in tl.static_range(TAPS - 1):
        if tap < TAPS - 2:
            value = kept[tap + 1]
        else:
            value = x.to(pool.dtype.element_ty)
        tl.store(pool + slot * (CHANNELS * (TAPS - 1)) + place + tap, value, mask=mask)
        if HAS_STORES:
            for m in range(num_stores):
                if (tl.load(stores + m * 3) == row) & (tl.load(stores + m * 3 + 1) > 0):
                    away = pool + tl.load(stores + m * 3 + 2) * (CHANNELS * (TAPS - 1))
                    tl.store(away + place + tap, value, mask=mask)


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


@triton.jit(do_not_specialize=["num_stores", "early"], do_not_specialize_on_alignment=["slots", "stores"])
def heads_kernel(
    qkv, a, b, conv_weight, a_log, dt_bias, z, norm_weight, conv_pool, state_pool, slots, stores, readers, out,
    qkv_stride, a_stride, b_stride, z_stride, num_stores, early, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr, HAS_STORES: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [B, H, E]; ``conv_pool`` [slots, C, W - 1] and ``state_pool`` [slots, H, D, E] are updated in place.

    PARTS programs share the value heads of a key head; unless that is one, ``readers`` int32 [B, K] is zero before and
    after. A state has TILES tiles of BLOCK_E columns; AHEAD: the next is asked for before one is worked on. Rows of
    scratch slot 0 give zeros.

    ``early`` is 0 or 1. If 1, slots, states and kept inputs are read while the kernel before runs, which the first such
    launch of a step makes safe: it is not early, and lets no kernel begin before all of those before it have ended.
    """
    if early == 0:
        wait_for_previous(PDL)
    start_next(PDL)
    OWN: tl.constexpr = HEADS // KEY_HEADS // PARTS
    KEYS: tl.constexpr = KEY_HEADS * D
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * E
    EVEN: tl.constexpr = D == BLOCK_D and E == TILES * BLOCK_E
    first_head, row = tl.program_id(0) * OWN, tl.program_id(1).to(tl.int64)
    key_head = tl.program_id(0) // PARTS
    d, column, every_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, TILES * BLOCK_E)
    e = tl.arange(0, TILES)[:, None] * BLOCK_E + column[None, :]
    in_d, in_e = d < D, every_e < E
    q_channels, k_channels = key_head * D + d, KEYS + key_head * D + d

    slot = tl.load(slots + row)
    home = state_pool + (slot * HEADS + first_head) * (D * E)
    state = load_tile(home, d, column, 0, D, E, EVEN)
    tail = conv_pool + slot * (CHANNELS * (TAPS - 1))
    kept_q, past_q, last_q = past(tail, conv_weight, q_channels, in_d, TAPS)
    kept_k, past_k, last_k = past(tail, conv_weight, k_channels, in_d, TAPS)
    kept_v, past_v, last_v = past(tail, conv_weight, 2 * KEYS + first_head * E + every_e, in_e, TAPS)
    gain = tl.load(norm_weight + e, mask=e < E, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + first_head).to(tl.float32))
    bias = tl.load(dt_bias + first_head).to(tl.float32)
    wait_for_previous(PDL)

    x_row = qkv + row * qkv_stride
    y_row, z_row = out + row * (HEADS * E), z + row * z_stride
    if slot == 0:
        for own in tl.static_range(OWN):
            nothing = tl.zeros((TILES, BLOCK_E), out.dtype.element_ty)
            tl.store(y_row + (first_head + own) * E + e, nothing, mask=e < E)
        return
    a_row, b_row = a + row * a_stride, b + row * b_stride
    x_v, gate, step, beta = asked(
        x_row, z_row, a_row, b_row, first_head, 2 * KEYS + first_head * E + every_e, in_e, e, E
    )
    x_q = tl.load(x_row + q_channels, mask=in_d, other=0.0)
    x_k = tl.load(x_row + k_channels, mask=in_d, other=0.0)
    q, k = convolved(past_q, last_q, x_q), convolved(past_k, last_k, x_k)
    from_q, from_k, overlap = tl.reduce((q * q, k * k, q * k), 0, add_triples)
    q_norm, k_norm = tl.rsqrt(from_q + 1e-6) * scale, tl.rsqrt(from_k + 1e-6)
    overlap *= q_norm * k_norm
    if PARTS > 1:
        tl.debug_barrier()  # every thread has read the old inputs of q and k
        counter = readers + row * KEY_HEADS + key_head
        at = tl.arange(0, THREADS)
        ticket = tl.atomic_add(counter + at, 1, mask=at == 0, sem="relaxed")
    # Gathered in the tiles' layout: the compiler would rather convolve again in that, sixteen times as often.
    q, k = tl.gather(q * q_norm, d, axis=0), tl.gather(k * k_norm, d, axis=0)

    for own in tl.static_range(OWN):
        head = first_head + own
        v_channels = 2 * KEYS + head * E + every_e
        if own > 0:
            kept_v, past_v, last_v = past(tail, conv_weight, v_channels, in_e, TAPS)
            rate = tl.exp(tl.load(a_log + head).to(tl.float32))
            bias = tl.load(dt_bias + head).to(tl.float32)
            x_v, gate, step, beta = asked(x_row, z_row, a_row, b_row, head, v_channels, in_e, e, E)
        decay = tl.exp(-rate * softplus(step + bias))
        all_v = convolved(past_v, last_v, x_v)

        y = tl.zeros((TILES, BLOCK_E), tl.float32)
        for t in tl.static_range(TILES):
            here = home + own * (D * E)
            if AHEAD and t + 1 < TILES:
                coming = load_tile(here, d, column, (t + 1) * BLOCK_E, D, E, EVEN)
            elif AHEAD and own + 1 < OWN:
                coming = load_tile(here + D * E, d, column, 0, D, E, EVEN)
            v = tl.gather(all_v, t * BLOCK_E + column, axis=0)
            # S'ᵀq of the new state S' = decay S + k ⊗ delta needs the old state alone: one pass of sums, not two.
            seen_k, seen_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, add_pairs)
            delta = beta * (v - decay * seen_k)
            store_tile(here, d, column, t * BLOCK_E, decay * state + k[:, None] * delta[None, :], D, E, EVEN)
            y = tl.where(e // BLOCK_E == t, (decay * seen_q + overlap * delta)[None, :], y)
            if AHEAD and (t + 1 < TILES or own + 1 < OWN):
                state = coming
            elif t + 1 < TILES:
                state = load_tile(here, d, column, (t + 1) * BLOCK_E, D, E, EVEN)
            elif own + 1 < OWN:
                state = load_tile(here + D * E, d, column, 0, D, E, EVEN)

        if own == 0:
            tl.debug_barrier()  # every thread has read the old inputs
            if PARTS == 1:
                keep(
                    conv_pool,
                    slot,
                    stores,
                    num_stores,
                    row,
                    kept_q,
                    x_q,
                    q_channels,
                    in_d,
                    CHANNELS,
                    TAPS,
                    HAS_STORES,
                )
                keep(
                    conv_pool,
                    slot,
                    stores,
                    num_stores,
                    row,
                    kept_k,
                    x_k,
                    k_channels,
                    in_d,
                    CHANNELS,
                    TAPS,
                    HAS_STORES,
                )
        keep(
            conv_pool,
            slot,
            stores,
            num_stores,
            row,
            kept_v,
            x_v,
            v_channels,
            in_e,
            CHANNELS,
            TAPS,
            HAS_STORES,
        )
        y *= tl.rsqrt(tl.sum(tl.sum(y * y, axis=1), axis=0) / E + eps) * gain
        y = y.to(out.dtype.element_ty).to(tl.float32)  # rounded before the gate, as the model was trained
        y *= gate * tl.sigmoid(gate)
        tl.store(y_row + head * E + e, y.to(out.dtype.element_ty), mask=e < E)

    if PARTS > 1:
        if tl.sum(tl.where(at == 0, ticket, 0), axis=0) == PARTS - 1:
            tl.store(counter, 0)
            keep(
                conv_pool,
                slot,
                stores,
                num_stores,
                row,
                kept_q,
                x_q,
                q_channels,
                in_d,
                CHANNELS,
                TAPS,
                HAS_STORES,
            )
            keep(
                conv_pool,
                slot,
                stores,
                num_stores,
                row,
                kept_k,
                x_k,
                k_channels,
                in_d,
                CHANNELS,
                TAPS,
                HAS_STORES,
            )
    if HAS_STORES:  # noqa: SIM102 (compiled in or not, then decided at run time)
        if stores_of(stores, num_stores, row) > 0:
            tl.debug_barrier()  # every thread has written the new states
            for m in range(num_stores):
                if (tl.load(stores + m * 3) == row) & (tl.load(stores + m * 3 + 1) > 0):
                    away = state_pool + (tl.load(stores + m * 3 + 2) * HEADS + first_head) * (D * E)
                    for n in range(OWN * TILES):
                        offset, first = n // TILES * (D * E), n % TILES * BLOCK_E
                        tile = load_tile(home + offset, d, column, first, D, E, EVEN)
                        store_tile(away + offset, d, column, first, tile, D, E, EVEN)
