"""gated_delta_step: a gated DeltaNet mixer between its projections, one token per sequence, in one launch.

A program has one value head of one row: the head's state [D, E] is read once into registers and written once, which is
nearly all of the traffic. Each program convolves the channels it needs; the query and key channels of a key head are
read by all its value heads, so the last of them to have read the old inputs writes the new ones (a counter says which).

Letters: B rows, K key heads, H value heads, D key dim, E value dim, C = 2KD + HE channels, W taps, M stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.ops.gated_delta_step import MixerWeights
from kestrel.ops.pages import once_per_launch
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel.spi.batch import RecurrentView
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, power_of_two, refuse_dtype
from kestrel_kernels_cuda.linear_launch import overlaps_on
from kestrel_kernels_cuda.linear_parts import prefetch, start_next, wait_for_previous
from kestrel_kernels_cuda.recurrent_plan import meta_view

__all__ = ["IMPLS", "compile_cases", "gated_delta_step", "step_launch"]

LARGEST = 16384  # numbers of a head's state that a program holds in registers


@triton.jit
def softplus(x):
    """log(1 + e^x), exact to float32 for small results too."""
    small = tl.exp(-tl.abs(x))
    log1p = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def add_pairs(a, b, c, d):
    """Two sums at once."""
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Three sums at once."""
    return a + d, b + e, c + f


@triton.jit
def convolve(x_row, weight, tail, channels, mask, TAPS: tl.constexpr):
    """SiLU of the convolution at ``channels``: the inputs before come from ``tail`` [C, TAPS - 1]."""
    now = tl.load(x_row + channels, mask=mask, other=0.0).to(tl.float32)
    y = now * tl.load(weight + channels * TAPS + TAPS - 1, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        past = tl.load(tail + channels * (TAPS - 1) + tap, mask=mask, other=0.0).to(tl.float32)
        y += past * tl.load(weight + channels * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def shift(x_row, source, target, channels, mask, TAPS: tl.constexpr):
    """Write the inputs behind this token to ``target``: ``source`` without its oldest, then the token's own."""
    for tap in tl.static_range(TAPS - 2):
        past = tl.load(source + channels * (TAPS - 1) + tap + 1, mask=mask, other=0.0)
        tl.store(target + channels * (TAPS - 1) + tap, past, mask=mask)
    now = tl.load(x_row + channels, mask=mask, other=0.0)
    tl.store(target + channels * (TAPS - 1) + TAPS - 2, now.to(target.dtype.element_ty), mask=mask)


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
def copy_away(
    home, tail, x_row, state_pool, conv_pool, stores, num_stores, row, head, q_channels, v_first, is_last,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Make ``row``'s checkpoints: the new state at ``home`` and the inputs behind this token."""
    d, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for m in range(num_stores):
        if (tl.load(stores + m * 3) == row) & (tl.load(stores + m * 3 + 1) > 0):
            target = tl.load(stores + m * 3 + 2)
            away = state_pool + (target * HEADS + head) * (D * E)
            copy = conv_pool + target * (CHANNELS * (TAPS - 1))
            for t in range(TILES):
                e = t * BLOCK_E + column
                place, inside = d[:, None] * E + e[None, :], (d < D)[:, None] & (e < E)[None, :]
                tl.store(away + place, tl.load(home + place, mask=inside), mask=inside)
                shift(x_row, tail, copy, v_first + e, e < E, TAPS)
            if is_last:
                shift(x_row, tail, copy, q_channels, d < D, TAPS)
                shift(x_row, tail, copy, KEYS + q_channels, d < D, TAPS)


@triton.jit(do_not_specialize=["num_stores"])
def step_kernel(
    qkv, z, a, b, conv_weight, a_log, dt_bias, norm_weight, conv_pool, state_pool, slots, stores, readers, out,
    qkv_stride, z_stride, a_stride, b_stride, num_stores, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [B, H, E]; ``conv_pool`` [slots, C, W - 1] and ``state_pool`` [slots, H, D, E] are updated in place.

    ``readers`` int32 [B, K] is zero before and after. Rows of scratch slot 0 are dead: they give zeros. A head's state
    is taken in ``TILES`` blocks of ``BLOCK_E`` columns.
    """
    start_next(PDL)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * D
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * E
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    d, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_d = d < D
    q_channels, v_first = key_head * D + d, 2 * KEYS + head * E
    if PDL:
        prefetch(conv_weight + q_channels * TAPS)
        prefetch(conv_weight + (KEYS + q_channels) * TAPS)
        prefetch(conv_weight + (v_first + tl.arange(0, TILES * BLOCK_E)) * TAPS)
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
    q = convolve(x_row, conv_weight, tail, q_channels, in_d, TAPS)
    k = convolve(x_row, conv_weight, tail, KEYS + q_channels, in_d, TAPS)
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
        v = convolve(x_row, conv_weight, tail, v_first + first + column, first + column < E, TAPS)
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

    tl.debug_barrier()
    if num_stores > 0:  # noqa: SIM102 (Triton evaluates both sides of an "and")
        if stores_of(stores, num_stores, row) > 0:
            copy_away(
                home, tail, x_row, state_pool, conv_pool, stores, num_stores, row, head, q_channels, v_first, is_last,
                HEADS, CHANNELS, KEYS, D, E, BLOCK_D, BLOCK_E, TILES, TAPS,
            )  # fmt: skip
    shift(x_row, tail, tail, v_first + e, e < E, TAPS)
    if is_last:
        shift(x_row, tail, tail, q_channels, in_d, TAPS)
        shift(x_row, tail, tail, KEYS + q_channels, in_d, TAPS)
        if GROUP > 1:
            tl.store(readers + row * KEY_HEADS + key_head, 0)


FEW = 132  # programs that leave multiprocessors of the largest device idle


def _config(key_dim: int, value_dim: int, programs: int, is_deterministic: bool) -> dict[str, int]:
    """Tiles whose programs fit a multiprocessor several times, so that loads and stores overlap; for a few programs the
    whole head at once, read by many threads. Sums of the two differ in their order."""
    block_d, block_e = power_of_two(key_dim), power_of_two(value_dim)
    if programs <= FEW and not is_deterministic:
        return {"BLOCK_E": block_e, "num_warps": min(16, max(1, block_d * block_e // 1024))}
    block_e = min(32, block_e)
    return {"BLOCK_E": block_e, "num_warps": min(4, max(1, block_d * block_e // 1024))}


def step_launch(
    qkv_TC: torch.Tensor,
    z_THE: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: MixerWeights,
    key_heads: int,
    view: RecurrentView,
    layer: int,
    config: Mapping[str, int] | None = None,
) -> tuple[Launch, torch.Tensor]:
    """The launch and its output [T, H, E]. ``config``: instead of the committed one."""
    tokens, heads, value_dim = z_THE.shape
    key_dim = (qkv_TC.shape[1] - heads * value_dim) // (2 * key_heads)
    conv, state = view.parts["conv"][layer], view.parts["state"][layer]
    assert conv.is_contiguous(), "a layer's slots lie side by side"
    assert state.is_contiguous(), "a layer's slots lie side by side"
    qkv_TC, a_TH, b_TH = (x if x.stride(-1) == 1 else x.contiguous() for x in (qkv_TC, a_TH, b_TH))
    if z_THE.stride()[1:] != (value_dim, 1):
        z_THE = z_THE.contiguous()
    readers = once_per_launch(
        view, layer, f"gated_delta_step {key_heads}",
        lambda view: torch.zeros(tokens, key_heads, dtype=torch.int32, device=qkv_TC.device),
    )  # fmt: skip
    out_THE = torch.empty(tokens, heads, value_dim, dtype=qkv_TC.dtype, device=qkv_TC.device)
    config = dict(config or _config(key_dim, value_dim, tokens * heads, view.limits.is_deterministic))
    sizes = {
        "KEY_HEADS": key_heads,
        "HEADS": heads,
        "D": key_dim,
        "E": value_dim,
        "BLOCK_D": power_of_two(key_dim),
    }
    tiles = {"TILES": power_of_two(value_dim) // config["BLOCK_E"], "TAPS": weights.conv_CW.shape[1]}
    overlaps = {"PDL": True, "launch_pdl": True} if overlaps_on(qkv_TC.device) else {"PDL": False}
    launch = Launch(
        step_kernel,
        (heads, tokens),
        (
            qkv_TC, z_THE, a_TH, b_TH, weights.conv_CW, weights.a_log_H, weights.dt_bias_H, weights.norm_E,
            conv, state, view.slots_B, view.stores, readers, out_THE,
            qkv_TC.stride(0), z_THE.stride(0), a_TH.stride(0), b_TH.stride(0),
            view.stores.shape[0], key_dim**-0.5, weights.eps,
        ),
        {**sizes, **tiles, **overlaps, **config},
    )  # fmt: skip
    return launch, out_THE


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
    launch, out_THE = step_launch(qkv_TC, z_THE, a_TH, b_TH, weights, key_heads, view, layer)
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


def _bare_launch(
    key_heads: int, heads: int, key_dim: int, value_dim: int, taps: int, dtype: torch.dtype, rows: int
) -> Launch:
    """A launch of ``rows`` without memory."""
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
    return step_launch(qkv, z_THE, a, b, weights, key_heads, meta_view(parts, rows, rows), 0)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """A job for launches of many programs, and one for those of few where there are such."""
    key_heads, heads, *sizes = (
        query.get(name) for name in ("key_heads", "heads", "key_dim", "value_dim", "taps")
    )
    for rows in {1 if rows * heads <= FEW else FEW for rows in (*row_counts, FEW)}:
        yield _bare_launch(key_heads, heads, *sizes, dtype_of(query), rows).compile


IMPLS: Mapping[str, Impl] = {"gated_delta_step": Impl(supports=supports, fn=gated_delta_step, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """The published head: few rows and many, and float32 without groups."""
    for name, key_heads, dtype, rows in (
        ("bf16, few", 16, torch.bfloat16, 1),
        ("bf16, many", 16, torch.bfloat16, 64),
        ("float32", 32, torch.float32, 64),
    ):
        launch = _bare_launch(key_heads, 32, 128, 128, 4, dtype, rows)
        yield compile_case_of(f"gated_delta_step {name}", launch)
