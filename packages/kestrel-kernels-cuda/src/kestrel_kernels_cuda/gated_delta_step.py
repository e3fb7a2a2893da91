"""gated_delta_step: a gated DeltaNet mixer between its projections, one token per sequence.

For few rows it is one launch. A program has one value head of one row: the head's state [D, E] is read once into
registers and written once, which is nearly all of the traffic. Each program convolves the channels it needs; the query
and key channels of a key head are read by all its value heads, so the last of them to have read the old inputs writes
the new ones (a counter says which). For many rows it is two launches, see ``gated_delta_rows``.

Letters: B rows, K key heads, H value heads, D key dim, E value dim, C = 2KD + HE channels, W taps, M stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kestrel.ops.gated_delta_step import MixerWeights
from kestrel.ops.pages import once_per_launch
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel.spi.batch import RecurrentView
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.gated_delta_rows import (
    add_pairs,
    add_triples,
    inputs,
    mix_kernel,
    rule_kernel,
    softplus,
    stores_of,
)
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, power_of_two, refuse_dtype
from kestrel_kernels_cuda.linear_launch import overlaps_on
from kestrel_kernels_cuda.linear_parts import prefetch, start_next, wait_for_previous
from kestrel_kernels_cuda.recurrent_plan import meta_view

__all__ = ["IMPLS", "compile_cases", "gated_delta_step", "step_launches"]

LARGEST = 16384  # numbers of a head's state that a program holds in registers


@triton.jit
def convolve(x_row, weight, tail, channels, mask, TAPS: tl.constexpr, WIDE: tl.constexpr):
    """SiLU of the convolution at ``channels``."""
    at = tl.arange(0, WIDE)[None, :]
    w = tl.load(weight + channels[:, None] * TAPS + at, mask=mask[:, None] & (at < TAPS), other=0.0).to(
        tl.float32
    )
    y = tl.sum(inputs(x_row, tail, channels, mask, 0, TAPS, WIDE) * w, axis=1)
    return y * tl.sigmoid(y)


@triton.jit
def keep(target, kept, channels, mask, TAPS: tl.constexpr, WIDE: tl.constexpr):
    """Write the inputs behind this token, ``inputs`` from number 1 on, to ``target`` [C, TAPS - 1]."""
    at = tl.arange(0, WIDE)[None, :]
    place = target + channels[:, None] * (TAPS - 1) + at
    tl.store(place, kept.to(target.dtype.element_ty), mask=mask[:, None] & (at < TAPS - 1))


@triton.jit
def copy_state(home, away, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """Copy a head's state from ``home`` to ``away``."""
    d = tl.arange(0, BLOCK_D)[:, None]
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)[None, :]
        inside = (d < D) & (e < E)
        tl.store(away + d * E + e, tl.load(home + d * E + e, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_stores"], do_not_specialize_on_alignment=["slots", "stores"])
def step_kernel(
    qkv, a, b, conv_weight, a_log, dt_bias, z, norm_weight, conv_pool, state_pool, slots, stores, readers, out,
    qkv_stride, a_stride, b_stride, z_stride, num_stores, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [B, H, E]; ``conv_pool`` [slots, C, W - 1] and ``state_pool`` [slots, H, D, E] are updated in place.

    ``readers`` int32 [B, K] is zero before and after. Rows of scratch slot 0 are dead: they give zeros. A head's state
    is taken in ``TILES`` blocks of ``BLOCK_E`` columns. WIDE: TAPS, as a power of two.
    """
    start_next(PDL)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * D
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * E
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    d, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_d = d < D
    every_e = tl.arange(0, TILES * BLOCK_E)
    in_e = every_e < E
    q_channels, v_channels = key_head * D + d, 2 * KEYS + head * E + every_e
    k_channels = KEYS + q_channels
    if PDL:
        prefetch(conv_weight + q_channels * TAPS)
        prefetch(conv_weight + k_channels * TAPS)
        prefetch(conv_weight + v_channels * TAPS)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    wait_for_previous(PDL)
    slot = tl.load(slots + row)
    step = softplus(tl.load(a + row * a_stride + head).to(tl.float32) + bias)
    beta = tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    e = tl.arange(0, TILES)[:, None] * BLOCK_E + column[None, :]
    y_place = out + (row * HEADS + head) * E + e
    if slot == 0:
        tl.store(y_place, tl.zeros((TILES, BLOCK_E), out.dtype.element_ty), mask=e < E)
        return
    gate = tl.load(z + row * z_stride + head * E + e, mask=e < E, other=0.0)
    gain = tl.load(norm_weight + e, mask=e < E, other=0.0)

    x_row = qkv + row * qkv_stride
    tail = conv_pool + slot * (CHANNELS * (TAPS - 1))
    home = state_pool + (slot * HEADS + head) * (D * E)
    place = d[:, None] * E + column[None, :]
    q = convolve(x_row, conv_weight, tail, q_channels, in_d, TAPS, WIDE)
    k = convolve(x_row, conv_weight, tail, k_channels, in_d, TAPS, WIDE)
    all_v = convolve(x_row, conv_weight, tail, v_channels, in_e, TAPS, WIDE)
    kept_q = inputs(x_row, tail, q_channels, in_d, 1, TAPS, WIDE)
    kept_k = inputs(x_row, tail, k_channels, in_d, 1, TAPS, WIDE)
    kept_v = inputs(x_row, tail, v_channels, in_e, 1, TAPS, WIDE)
    decay = tl.exp(-rate * step)
    from_q, from_k, overlap = tl.reduce((q * q, k * k, q * k), 0, add_triples)
    q_norm, k_norm = tl.rsqrt(from_q + 1e-6) * scale, tl.rsqrt(from_k + 1e-6)
    q, k, overlap = q * q_norm, k * k_norm, overlap * q_norm * k_norm

    y = tl.zeros((TILES, BLOCK_E), tl.float32)
    for t in tl.range(0, TILES, num_stages=1):
        first = t * BLOCK_E
        inside = in_d[:, None] & (first + column < E)[None, :]
        if D == BLOCK_D and E == TILES * BLOCK_E:
            state = tl.load(home + first + place, eviction_policy="evict_first").to(tl.float32)
        else:
            state = tl.load(home + first + place, mask=inside, other=0.0).to(tl.float32)
        v = tl.gather(all_v, first + column, axis=0)
        # S'ᵀq of the new state S' = decay S + k ⊗ delta needs the old state alone: one pass of sums instead of two.
        seen_k, seen_q = tl.reduce((state * k[:, None], state * q[:, None]), 0, add_pairs)
        delta = beta * (v - decay * seen_k)
        new = (decay * state + k[:, None] * delta[None, :]).to(state_pool.dtype.element_ty)
        if D == BLOCK_D and E == TILES * BLOCK_E:
            tl.store(home + first + place, new, eviction_policy="evict_first")
        else:
            tl.store(home + first + place, new, mask=inside)
        y = tl.where(e // BLOCK_E == t, (decay * seen_q + overlap * delta)[None, :], y)

    # The sums took part of every thread's old inputs of q and k: they have been read.
    is_last = True
    if GROUP > 1:
        is_last = tl.atomic_add(readers + row * KEY_HEADS + key_head, 1, sem="relaxed") == GROUP - 1
    y *= tl.rsqrt(tl.sum(tl.sum(y * y, axis=1), axis=0) / E + eps) * gain.to(tl.float32)
    y = y.to(out.dtype.element_ty).to(tl.float32)  # rounded before the gate, as the model was trained
    wide = gate.to(tl.float32)
    tl.store(y_place, (y * wide * tl.sigmoid(wide)).to(out.dtype.element_ty), mask=e < E)

    tl.debug_barrier()  # every thread has read the old inputs and written the new state
    if num_stores > 0:  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if stores_of(stores, num_stores, row) > 0:
            for m in range(num_stores):
                if (tl.load(stores + m * 3) == row) & (tl.load(stores + m * 3 + 1) > 0):
                    target = tl.load(stores + m * 3 + 2)
                    copy_state(home, state_pool + (target * HEADS + head) * (D * E), D, E, BLOCK_D, BLOCK_E)
                    copy = conv_pool + target * (CHANNELS * (TAPS - 1))
                    keep(copy, kept_v, v_channels, in_e, TAPS, WIDE)
                    if is_last:
                        keep(copy, kept_q, q_channels, in_d, TAPS, WIDE)
                        keep(copy, kept_k, k_channels, in_d, TAPS, WIDE)
    keep(tail, kept_v, v_channels, in_e, TAPS, WIDE)
    if is_last:
        keep(tail, kept_q, q_channels, in_d, TAPS, WIDE)
        keep(tail, kept_k, k_channels, in_d, TAPS, WIDE)
        if GROUP > 1:
            tl.store(readers + row * KEY_HEADS + key_head, 0)


FEW = 132  # programs that leave multiprocessors of the largest device idle


def _config(key_dim: int, value_dim: int, programs: int, is_deterministic: bool) -> dict[str, int]:
    """For a few programs one launch, which has the whole head at once, read by many threads. For many programs two,
    which fit a multiprocessor several times, so that loads and stores overlap. Sums of the two differ in their order.
    """
    block_d, block_e = power_of_two(key_dim), power_of_two(value_dim)
    if programs <= FEW and not is_deterministic:
        return {"LAUNCHES": 1, "BLOCK_E": block_e, "num_warps": min(8, max(1, block_d * block_e // 1024))}
    block_e = min(64, block_e)
    return {"LAUNCHES": 2, "BLOCK_E": block_e, "num_warps": min(4, max(1, block_d * block_e // 1024))}


def step_launches(
    qkv_TC: torch.Tensor,
    z_THE: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: MixerWeights,
    key_heads: int,
    view: RecurrentView,
    layer: int,
    config: Mapping[str, int] | None = None,
) -> tuple[tuple[Launch, ...], torch.Tensor]:
    """The launches, in order, and their output [T, H, E]. ``config``: instead of the committed one."""
    tokens, heads, value_dim = z_THE.shape
    channels, taps = weights.conv_CW.shape
    key_dim = (channels - heads * value_dim) // (2 * key_heads)
    conv, state = view.parts["conv"][layer], view.parts["state"][layer]
    assert conv.is_contiguous(), "a layer's slots lie side by side"
    assert state.is_contiguous(), "a layer's slots lie side by side"
    device = qkv_TC.device
    qkv_TC, a_TH, b_TH = (x if x.stride(-1) == 1 else x.contiguous() for x in (qkv_TC, a_TH, b_TH))
    if z_THE.stride()[1:] != (value_dim, 1):
        z_THE = z_THE.contiguous()
    out_THE = torch.empty(tokens, heads, value_dim, dtype=qkv_TC.dtype, device=device)
    config = dict(config or _config(key_dim, value_dim, tokens * heads, view.limits.is_deterministic))
    launches, block_e = config.pop("LAUNCHES"), config["BLOCK_E"]
    shared: dict[str, Any] = {"KEY_HEADS": key_heads, "HEADS": heads, "D": key_dim, "E": value_dim}
    shared |= {"BLOCK_D": power_of_two(key_dim), "PDL": overlaps_on(device)}
    if shared["PDL"]:
        shared["launch_pdl"] = True
    window = {"TAPS": taps, "WIDE": power_of_two(taps)}
    tiles = {"TILES": power_of_two(value_dim) // block_e}
    sources = (qkv_TC, a_TH, b_TH, weights.conv_CW, weights.a_log_H, weights.dt_bias_H)
    strides, stores = (qkv_TC.stride(0), a_TH.stride(0), b_TH.stride(0)), view.stores
    if launches == 1:
        readers = once_per_launch(
            view, layer, f"gated_delta_step {key_heads}",
            lambda view: torch.zeros(tokens, key_heads, dtype=torch.int32, device=device),
        )  # fmt: skip
        step = Launch(
            step_kernel,
            (heads, tokens),
            (
                *sources, z_THE, weights.norm_E, conv, state, view.slots_B, stores, readers, out_THE,
                *strides, z_THE.stride(0), stores.shape[0], key_dim**-0.5, weights.eps,
            ),
            {**shared, **window, **tiles, **config},
        )  # fmt: skip
        return (step,), out_THE
    mixed = torch.empty(tokens, channels, dtype=torch.float32, device=device)
    gates = torch.empty(tokens, 2 * heads + key_heads, dtype=torch.float32, device=device)
    mix = Launch(
        mix_kernel,
        (key_heads + heads, tokens),
        (*sources, conv, view.slots_B, stores, mixed, gates, *strides, stores.shape[0], key_dim**-0.5),
        {**shared, **window, "BLOCK_E": power_of_two(value_dim), "num_warps": 4},
    )
    rule = Launch(
        rule_kernel,
        (heads, tokens),
        (
            mixed, gates, z_THE, weights.norm_E, state, view.slots_B, stores, out_THE,
            z_THE.stride(0), stores.shape[0], weights.eps,
        ),
        {**shared, **tiles, **config},
    )  # fmt: skip
    return (mix, rule), out_THE


def gated_delta_step(
    qkv_TC: torch.Tensor,
    z_THE: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: MixerWeights,
    key_heads: int,
    view: RecurrentView,
    layer: int,
) -> torch.Tensor:
    """As ``kestrel.ops.gated_delta_step``."""
    launches, out_THE = step_launches(qkv_TC, z_THE, a_TH, b_TH, weights, key_heads, view, layer)
    for launch in launches:
        launch.run()
    return out_THE


def supports(query: OpQuery) -> Yes | No:
    """Yes to heads whose state fits in the registers of one block."""
    if refused := refuse_dtype(query):
        return refused
    sizes = {name: query.get(name, 0) for name in ("key_heads", "heads", "key_dim", "value_dim")}
    if sizes["heads"] % max(1, sizes["key_heads"]):
        return No(
            f"deals whole groups of value heads to key heads, not {sizes['heads']} to {sizes['key_heads']}"
        )
    if power_of_two(sizes["key_dim"]) * power_of_two(sizes["value_dim"]) > LARGEST:
        return No(
            f"holds {LARGEST} numbers of a head's state in registers, not "
            f"{sizes['key_dim']} x {sizes['value_dim']}"
        )
    if query.get("taps", 4) < 2:
        return No("needs a convolution of at least 2 taps")
    return Yes()


def _bare_launches(
    key_heads: int, heads: int, key_dim: int, value_dim: int, taps: int, dtype: torch.dtype, rows: int
) -> tuple[Launch, ...]:
    """Launches of ``rows`` without memory."""
    keys, values = key_heads * key_dim, heads * value_dim

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    parts = {
        "conv": empty(1, 2, 2 * keys + values, taps - 1),
        "state": empty(1, 2, heads, key_dim, value_dim, dtype=torch.float32),
    }
    weights = MixerWeights(
        conv_CW=empty(2 * keys + values, taps),
        a_log_H=empty(heads, dtype=torch.float32),
        dt_bias_H=empty(heads),
        norm_E=empty(value_dim, dtype=torch.float32),
    )
    # The projections are parts of one tensor [qkv | z | b | a]: its width decides how rows are aligned.
    sizes = [2 * keys + values, values, heads, heads]
    qkv, z, b, a = empty(rows, sum(sizes)).split_with_sizes(sizes, dim=1)
    z_THE = z.unflatten(1, (heads, value_dim))
    return step_launches(qkv, z_THE, a, b, weights, key_heads, meta_view(parts, rows, rows), 0)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """A job for launches of many programs, and one for those of few where there are such."""
    key_heads, heads, *sizes = (
        query.get(name) for name in ("key_heads", "heads", "key_dim", "value_dim", "taps")
    )
    for rows in {1 if rows * heads <= FEW else FEW for rows in (*row_counts, FEW)}:
        for launch in _bare_launches(key_heads, heads, *sizes, dtype_of(query), rows):
            yield launch.compile


IMPLS: Mapping[str, Impl] = {"gated_delta_step": Impl(supports=supports, fn=gated_delta_step, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """The published head: few rows and many, and float32 without groups."""
    for name, key_heads, dtype, rows in (
        ("bf16, few", 16, torch.bfloat16, 1),
        ("bf16, many", 16, torch.bfloat16, 64),
        ("float32", 32, torch.float32, 64),
    ):
        for i, launch in enumerate(_bare_launches(key_heads, 32, 128, 128, 4, dtype, rows)):
            yield compile_case_of(f"gated_delta_step {name}, launch {i + 1}", launch)
