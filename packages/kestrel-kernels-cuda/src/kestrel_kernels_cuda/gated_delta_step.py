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


@triton.jit(do_not_specialize=["num_stores"])
def step_kernel(
    qkv, z, a, b, conv_weight, a_log, dt_bias, norm_weight, conv_pool, state_pool, slots, stores, readers, out,
    qkv_stride, z_stride, a_stride, b_stride, num_stores, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """``out`` [B, H, E]; ``conv_pool`` [slots, C, W - 1] and ``state_pool`` [slots, H, D, E] are updated in place.

    ``readers`` int32 [B, K] is zero before and after. Rows of scratch slot 0 are dead: they give zeros. A head's state
    is taken in ``TILES`` blocks of ``BLOCK_E`` columns, the next being read while one is computed.
    """
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * D + HEADS * E
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    d, column, tile = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, TILES)
    in_d = d < D
    e = tile[:, None] * BLOCK_E + column[None, :]
    y_place = out + (row * HEADS + head) * E + e
    slot = tl.load(slots + row)
    if slot == 0:
        tl.store(y_place, tl.zeros((TILES, BLOCK_E), out.dtype.element_ty), mask=e < E)
        return

    home = state_pool + (slot * HEADS + head) * (D * E)
    place = d[:, None] * E + column[None, :]
    coming = tl.load(home + place, mask=in_d[:, None] & (column < E)[None, :], other=0.0)

    x_row = qkv + row * qkv_stride
    tail = conv_pool + slot * (CHANNELS * (TAPS - 1))
    q_channels = key_head * D + d
    k_channels = KEY_HEADS * D + q_channels
    v_channels = 2 * KEY_HEADS * D + head * E + column
    q = convolve(x_row, conv_weight, tail, q_channels, in_d, TAPS)
    k = convolve(x_row, conv_weight, tail, k_channels, in_d, TAPS)
    v_coming = convolve(x_row, conv_weight, tail, v_channels, column < E, TAPS)
    tl.debug_barrier()  # every thread has read the old inputs of q and k before any is overwritten
    is_last = True
    if GROUP > 1:
        is_last = tl.atomic_add(readers + row * KEY_HEADS + key_head, 1) == GROUP - 1

    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    overlap = tl.sum(q * k)
    step = softplus(
        tl.load(a + row * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    )
    decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * step)
    beta = tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))

    y = tl.zeros((TILES, BLOCK_E), tl.float32)
    for t in range(TILES):
        state, v = coming.to(tl.float32), v_coming
        after = t * BLOCK_E + BLOCK_E
        in_after = after + column < E
        if TILES > 1:
            coming = tl.load(home + after + place, mask=in_d[:, None] & in_after[None, :], other=0.0)
            v_coming = convolve(x_row, conv_weight, tail, v_channels + after, in_after, TAPS)
        # S'ᵀq of the new state S' = decay S + k ⊗ delta needs the old state alone: one pass of sums instead of two.
        from_k = tl.sum(state * k[:, None], axis=0)
        from_q = tl.sum(state * q[:, None], axis=0)
        delta = beta * (v - decay * from_k)
        y = tl.where((tile == t)[:, None], (decay * from_q + overlap * delta)[None, :], y)
        new = (decay * state + k[:, None] * delta[None, :]).to(state_pool.dtype.element_ty)
        inside = in_d[:, None] & (t * BLOCK_E + column < E)[None, :]
        tl.store(home + t * BLOCK_E + place, new, mask=inside)

    square = tl.sum(tl.sum(y * y, axis=1), axis=0)
    y *= tl.rsqrt(square / E + eps) * tl.load(norm_weight + e, mask=e < E, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + head * E + e, mask=e < E, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty).to(tl.float32)  # rounded before the gate, as the model was trained
    tl.store(y_place, (y * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=e < E)

    all_v = 2 * KEY_HEADS * D + head * E + e
    tl.debug_barrier()  # every thread has read the old inputs of v, and has written the new state
    if stores_of(stores, num_stores, row) > 0:
        for m in range(num_stores):
            if (tl.load(stores + m * 3) == row) & (tl.load(stores + m * 3 + 1) > 0):
                target = tl.load(stores + m * 3 + 2)
                away = state_pool + (target * HEADS + head) * (D * E)
                for t in range(TILES):
                    inside = in_d[:, None] & (t * BLOCK_E + column < E)[None, :]
                    new = tl.load(home + t * BLOCK_E + place, mask=inside)
                    tl.store(away + t * BLOCK_E + place, new, mask=inside)
                copy = conv_pool + target * (CHANNELS * (TAPS - 1))
                shift(x_row, tail, copy, all_v, e < E, TAPS)
                if is_last:
                    shift(x_row, tail, copy, q_channels, in_d, TAPS)
                    shift(x_row, tail, copy, k_channels, in_d, TAPS)
    shift(x_row, tail, tail, all_v, e < E, TAPS)
    if is_last:
        shift(x_row, tail, tail, q_channels, in_d, TAPS)
        shift(x_row, tail, tail, k_channels, in_d, TAPS)
        if GROUP > 1:
            tl.store(readers + row * KEY_HEADS + key_head, 0)


def _config(key_dim: int, value_dim: int) -> dict[str, int]:
    """32 numbers of a tile a thread, twice: several programs fit a multiprocessor, so loads and stores overlap."""
    block_d, block_e = power_of_two(key_dim), min(32, power_of_two(value_dim))
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
    config = dict(config or _config(key_dim, value_dim))
    sizes = {
        "KEY_HEADS": key_heads,
        "HEADS": heads,
        "D": key_dim,
        "E": value_dim,
        "BLOCK_D": power_of_two(key_dim),
    }
    tiles = {"TILES": power_of_two(value_dim) // config["BLOCK_E"], "TAPS": weights.conv_CW.shape[1]}
    launch = Launch(
        step_kernel,
        (heads, tokens),
        (
            qkv_TC, z_THE, a_TH, b_TH, weights.conv_CW, weights.a_log_H, weights.dt_bias_H, weights.norm_E,
            conv, state, view.slots_B, view.stores, readers, out_THE,
            qkv_TC.stride(0), z_THE.stride(0), a_TH.stride(0), b_TH.stride(0),
            view.stores.shape[0], key_dim**-0.5, weights.eps,
        ),
        {**sizes, **tiles, **config},
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
    key_heads: int, heads: int, key_dim: int, value_dim: int, taps: int, dtype: torch.dtype
) -> Launch:
    """A launch without memory. It does not depend on the number of rows."""
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
    qkv, z, b, a = empty(2, sum(sizes)).split_with_sizes(sizes, dim=1)
    z_THE = z.unflatten(1, (heads, value_dim))
    return step_launch(qkv, z_THE, a, b, weights, key_heads, meta_view(parts, 2, 2), 0)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    sizes = [query.get(name) for name in ("key_heads", "heads", "key_dim", "value_dim", "taps")]
    return (_bare_launch(*sizes, dtype_of(query)).compile,)


IMPLS: Mapping[str, Impl] = {"gated_delta_step": Impl(supports=supports, fn=gated_delta_step, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """The published head, grouped and not, in the two widths of input."""
    for name, key_heads, dtype in (("grouped bf16", 16, torch.bfloat16), ("float32", 32, torch.float32)):
        launch = _bare_launch(key_heads, 32, 128, 128, 4, dtype)
        yield compile_case_of(f"gated_delta_step {name}", launch)
