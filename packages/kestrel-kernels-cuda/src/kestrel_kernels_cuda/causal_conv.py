"""causal_conv: one launch over ragged sequences that reads and writes their kept inputs without a race.

Two kinds of programs share the grid. One per sequence has its first W - 1 tokens, which alone read the kept inputs, and
all writing of kept inputs; the others have blocks of tokens further in, which read the input alone.

Letters: B sequences, T tokens, C channels, W taps, M stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel.spi.batch import RecurrentView
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.gated_delta_parts import stores_of
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, refuse_dtype
from kestrel_kernels_cuda.recurrent_plan import meta_view, plan_of

__all__ = ["IMPLS", "causal_conv", "compile_cases", "conv_launch"]

CONFIG = {"TOKENS": 16, "BLOCK": 256, "num_warps": 4}  # measured on an H200


@triton.jit
def past_input(x_first, stride, tail, index, channels, mask, TAPS: tl.constexpr):
    """Number ``index`` of a sequence's kept inputs [C, TAPS - 1] followed by its tokens, in float32."""
    KEPT: tl.constexpr = TAPS - 1
    kept = tl.load(tail + channels * KEPT + index, mask=mask & (index < KEPT), other=0.0)
    fresh = tl.load(x_first + (index - KEPT) * stride + channels, mask=mask & (index >= KEPT), other=0.0)
    return kept.to(tl.float32) + fresh.to(tl.float32)


@triton.jit
def finish(y, bias, channels, mask, SILU: tl.constexpr):
    """Bias and activation."""
    if bias is not None:
        y += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def keep(x_first, stride, tail, count, target, channels, mask, TAPS: tl.constexpr):
    """Write to ``target`` the kept inputs after ``count`` tokens."""
    for tap in tl.static_range(TAPS - 1):
        value = past_input(x_first, stride, tail, count + tap, channels, mask, TAPS)
        tl.store(target + channels * (TAPS - 1) + tap, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def start_of_sequence(
    x, weight, bias, pool, slots, cu_seqlens, stores, out, row, channels, mask, stride, num_stores, C,
    TAPS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Outputs of the first tokens of sequence ``row``, its checkpoints and its kept inputs."""
    KEPT: tl.constexpr = TAPS - 1
    first = tl.load(cu_seqlens + row).to(tl.int64)
    length = tl.load(cu_seqlens + row + 1).to(tl.int64) - first
    if length > 0:
        tail = pool + tl.load(slots + row) * (C * KEPT)
        x_first = x + first * stride
        for place in tl.static_range(KEPT):
            y = tl.zeros(channels.shape, tl.float32)
            for tap in tl.static_range(TAPS):
                w = tl.load(weight + channels * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
                y += w * past_input(
                    x_first, stride, tail, place + tap, channels, mask & (place < length), TAPS
                )
            y = finish(y, bias, channels, mask, SILU).to(out.dtype.element_ty)
            tl.store(out + (first + place) * C + channels, y, mask=mask & (place < length))
        if stores_of(stores, num_stores, row) > 0:
            for m in range(num_stores):
                count = tl.load(stores + m * 3 + 1)
                if (tl.load(stores + m * 3) == row) & (count > 0):
                    target = pool + tl.load(stores + m * 3 + 2) * (C * KEPT)
                    keep(x_first, stride, tail, count, target, channels, mask, TAPS)
        tl.debug_barrier()  # every thread has read the kept inputs before any is overwritten
        keep(x_first, stride, tail, length, tail, channels, mask, TAPS)


@triton.jit(
    do_not_specialize=["rows", "tokens", "num_stores"],
    do_not_specialize_on_alignment=["slots", "cu_seqlens", "stores"],
)
def conv_kernel(
    x, weight, bias, pool, slots, cu_seqlens, places, stores, out, rows, tokens, stride, num_stores, C,
    TAPS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out`` [T, C]; ``pool`` [slots, C, W - 1] is updated in place. ``places`` as ``Plan.place_T``."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < C
    number = tl.program_id(1)
    if number < rows:
        start_of_sequence(
            x, weight, bias, pool, slots, cu_seqlens, stores, out, number, channels, inside, stride, num_stores, C,
            TAPS, SILU,
        )  # fmt: skip
    else:
        token = ((number - rows) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        place = tl.load(places + token, mask=token < tokens, other=0)
        mine = (place >= TAPS - 1)[:, None] & inside[None, :]
        y = tl.zeros((TOKENS, BLOCK), tl.float32)
        for tap in tl.static_range(TAPS):
            w = tl.load(weight + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            source = token + tap - (TAPS - 1)
            value = tl.load(
                x + source[:, None] * stride + channels[None, :],
                mask=mine & (source >= 0)[:, None],
                other=0.0,
            )
            y += w[None, :] * value.to(tl.float32)
        y = finish(y, bias, channels[None, :], inside[None, :], SILU)
        tl.store(out + token[:, None] * C + channels[None, :], y.to(out.dtype.element_ty), mask=mine)


def conv_launch(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    view: RecurrentView,
    layer: int,
    part: str = "conv",
    activation: str | None = "silu",
    config: Mapping[str, int] | None = None,
) -> tuple[Launch, torch.Tensor]:
    """The launch and its output [T, C]. ``config``: instead of the committed one."""
    tokens, channels = x_TC.shape
    pool_SCW = view.parts[part][layer]
    assert pool_SCW.is_contiguous(), "a layer's slots lie side by side"
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    out_TC = torch.empty(tokens, channels, dtype=x_TC.dtype, device=x_TC.device)
    rows, config = view.slots_B.shape[0], config or CONFIG
    launch = Launch(
        conv_kernel,
        (triton.cdiv(channels, config["BLOCK"]), (rows + triton.cdiv(tokens, config["TOKENS"])) * bool(tokens)),
        (
            x_TC, weight_CW, bias_C, pool_SCW, view.slots_B, view.cu_seqlens,
            plan_of(view, layer, tokens).place_T, view.stores, out_TC,
            rows, tokens, x_TC.stride(0), view.stores.shape[0], channels,
        ),
        {"TAPS": weight_CW.shape[1], "SILU": activation == "silu", **config},
    )  # fmt: skip
    return launch, out_TC


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    view: RecurrentView,
    layer: int,
    part: str = "conv",
    activation: str | None = "silu",
) -> torch.Tensor:
    """As ``kestrel.ops.causal_conv``."""
    assert activation in ("silu", None), f"activation {activation!r} is neither 'silu' nor None"
    launch, out_TC = conv_launch(x_TC, weight_CW, bias_C, view, layer, part, activation)
    launch.run()
    return out_TC


def supports(query: OpQuery) -> Yes | No:
    """Yes to every convolution of two taps or more, in both modes."""
    if refused := refuse_dtype(query):
        return refused
    if query.get("activation") not in ("silu", None):
        return No(f"applies SiLU or nothing, not {query.get('activation')}")
    return Yes() if query.get("taps", 4) >= 2 else No("needs at least 2 taps")


def _bare_launch(taps: int, activation: str | None, dtype: torch.dtype) -> Launch:
    """A launch without memory. It depends on neither tokens nor channels, if those are a multiple of 16."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    view = meta_view({"conv": empty(1, 2, 64, taps - 1)}, 2, 32)
    bias = None if activation else empty(64)
    return conv_launch(empty(32, 64), empty(64, taps), bias, view, 0, activation=activation)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return (_bare_launch(query.get("taps"), query.get("activation"), dtype_of(query)).compile,)


IMPLS: Mapping[str, Impl] = {"causal_conv": Impl(supports=supports, fn=causal_conv, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Four taps with SiLU as Qwen has them, two with a bias."""
    yield compile_case_of("causal_conv 4 taps bf16", _bare_launch(4, "silu", torch.bfloat16))
    yield compile_case_of("causal_conv 2 taps float32", _bare_launch(2, None, torch.float32))
