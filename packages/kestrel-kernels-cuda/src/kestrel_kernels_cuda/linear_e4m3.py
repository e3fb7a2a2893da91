"""e4m3_cast and e4m3_linear: numbers made floats of 8 bits by one kernel, and multiplied by torch (cuBLAS)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from kestrel.ops.e4m3 import e4m3_linear as reference
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, refuse_dtype, refuse_e4m3
from kestrel_kernels_cuda.linear_parts import activate
from kestrel_kernels_cuda.overlap import overlap, overlapped, start_next, wait_for_previous

__all__ = ["IMPLS", "compile_cases", "e4m3_cast", "e4m3_linear"]

BLOCK = 4096  # numbers of a program, 16 of each thread: e4m3 ones are written 16 bytes at a time
WARPS = 8
ALIGNED = 16  # numbers of 8 bits: what products need of inputs and outputs
META = torch.device("meta")


@triton.jit
def cast_kernel(
    x_ptr, out_ptr, count, factor, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``out`` [count] e4m3 is the activation of ``x`` times ``factor``, BLOCK numbers a program."""
    start_next(PDL)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = places < count
    wait_for_previous(PDL)
    x = tl.load(x_ptr + places, mask=live, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = activate(x, ACTIVATION) * factor
    tl.store(out_ptr + places, y.to(tl.float8e4nv), mask=live)  # which cuts at ±448


def _launch(x: torch.Tensor, factor: float, activation: str | None) -> tuple[Launch, torch.Tensor]:
    """The launch, and its output."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    meta = {"BLOCK": BLOCK, "ACTIVATION": activation or "none", "num_warps": WARPS, **overlap(x.device)}
    args = (x.contiguous(), out, x.numel(), factor)
    return Launch(cast_kernel, (triton.cdiv(x.numel(), BLOCK),), args, meta), out


def e4m3_cast(x: torch.Tensor, factor: float, activation: str | None = None) -> torch.Tensor:
    """As ``kestrel.ops.e4m3.e4m3_cast``."""
    launch, out = _launch(x, factor, activation)
    launch.run()
    return out


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def e4m3_linear(
    values: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As ``kestrel.ops.e4m3.e4m3_linear``."""
    if not values.is_cuda or not values.numel():  # torch multiplies these on CUDA alone
        return reference(values, weight, scale, bias, residual, dtype=dtype)
    flat = torch._scaled_mm(
        values.reshape(-1, values.shape[-1]), weight.t(), scale_a=_one(values.device), scale_b=scale, bias=bias,
        out_dtype=dtype, use_fast_accum=True,
    )  # fmt: skip
    out = flat.view(*values.shape[:-1], len(weight))
    return out if residual is None else out.add_(residual)


def supports(query: OpQuery) -> Yes | No:
    """Yes where there are floats of 8 bits."""
    return refuse_dtype(query) or refuse_e4m3() or Yes()


def supports_linear(query: OpQuery) -> Yes | No:
    """Yes to what cuBLAS multiplies."""
    if refused := refuse_e4m3():
        return refused
    if query.get("dtype") not in ("bfloat16", "float16"):
        return No(f"gives bfloat16 or float16, not {query.get('dtype')}")
    if query.get("k") % ALIGNED or query.get("n") % ALIGNED:
        return No(f"needs multiples of {ALIGNED}, not {query.get('k')} inputs and {query.get('n')} outputs")
    return Yes()


def _meta(query: OpQuery, rows: int) -> Launch:
    """A launch of tensors that take no memory."""
    x = torch.empty(rows, query.get("k"), dtype=dtype_of(query), device=META)
    return _launch(x, 1.0, query.get("activation"))[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """The kernels for these numbers of rows, which are one for counts of multiples of 16."""
    return [_meta(query, rows).compile for rows in row_counts]


IMPLS: Mapping[str, Impl] = {
    "e4m3_cast": Impl(supports=supports, fn=e4m3_cast, warm=_warm),
    "e4m3_linear": Impl(supports=supports_linear, fn=e4m3_linear),
}


def compile_cases() -> Iterator[CompileCase]:
    """What Moondream 2 casts."""
    for activation in (None, "gelu_tanh", "gelu"):
        query = OpQuery.of("e4m3_cast", k=4304, activation=activation, dtype="bfloat16")
        launch = _meta(query, 729)
        yield compile_case_of(f"e4m3_cast {activation}", launch, (89, 90))
        yield compile_case_of(f"e4m3_cast {activation} overlapped", overlapped(launch))
