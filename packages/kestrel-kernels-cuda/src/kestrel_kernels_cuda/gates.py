"""output_gate: a product with σ(gate), and a residual, in one pass.

Letters: T tokens, H heads (1 where x is [T, C]), D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, OpQuery
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, supports_dtypes
from kestrel_kernels_cuda.overlap import overlap, start_next, wait_for_previous

__all__ = ["IMPLS", "compile_cases", "output_gate"]

BLOCK = 1024  # numbers of one program


@triton.jit(do_not_specialize=["width"])
def output_gate_kernel(
    x, gate, residual, out, width,
    stride_xt, stride_xh, stride_gt, stride_gh, stride_rt, stride_rh,
    DIM: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (token, block of its ``width`` = H · D numbers); ``residual`` may be None."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    head, dim = place // DIM, place % DIM
    value = tl.load(x + token * stride_xt + head * stride_xh + dim, mask=inside, other=0.0).to(tl.float32)
    if PER_TOKEN:
        opening = tl.load(gate + token * stride_gt).to(tl.float32)
    else:
        opening = tl.load(gate + token * stride_gt + head * stride_gh + dim, mask=inside, other=0.0).to(
            tl.float32
        )
    value *= tl.sigmoid(opening)
    if residual is not None:
        kept = tl.load(residual + token * stride_rt + head * stride_rh + dim, mask=inside, other=0.0)
        value += kept.to(tl.float32)
    tl.store(out + token * width + place, value.to(out.dtype.element_ty), mask=inside)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """``x`` as [T, H, D] with adjacent numbers in a head."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x if x.dim() == 3 else x.unsqueeze(1)


def _launch(
    x_TC: torch.Tensor, gate_TC: torch.Tensor, residual_TC: torch.Tensor | None
) -> tuple[Launch, torch.Tensor]:
    out = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    per_token = gate_TC.shape != x_TC.shape
    x, gate = _heads(x_TC), _heads(gate_TC)
    residual = None if residual_TC is None else _heads(residual_TC)
    tokens, heads, dim = x.shape
    launch = Launch(
        output_gate_kernel,
        (tokens, triton.cdiv(heads * dim, BLOCK)),
        (
            x, gate, residual, out, heads * dim,
            *x.stride()[:2], *gate.stride()[:2], *((0, 0) if residual is None else residual.stride()[:2]),
        ),
        {"DIM": dim, "PER_TOKEN": per_token, "BLOCK": BLOCK, "num_warps": 4, **overlap(x.device)},
    )  # fmt: skip
    return launch, out


def output_gate(
    x_TC: torch.Tensor, gate_TC: torch.Tensor, residual_TC: torch.Tensor | None = None
) -> torch.Tensor:
    """As ``kestrel.ops.output_gate``."""
    launch, out = _launch(x_TC, gate_TC, residual_TC)
    launch.run()
    return out


def _meta(dim: int, per_token: bool, residual: bool, dtype: torch.dtype) -> Launch:
    x = torch.empty((2, dim) if per_token else (2, 2, dim), dtype=dtype, device="meta")
    gate = torch.empty((2, 1) if per_token else (2, 2, 2, dim), dtype=dtype, device="meta")
    gate = gate if per_token else gate.select(-2, 1)
    return _launch(x, gate, x if residual else None)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """One job per query that says its width."""
    if query.get("dim") is None:
        return ()
    launch = _meta(query.get("dim"), query.get("per_token"), query.get("residual"), dtype_of(query))
    return (launch.compile,)


IMPLS: Mapping[str, Impl] = {"output_gate": Impl(supports=supports_dtypes, fn=output_gate, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Attention's gate, and a shared expert's with the routed ones added."""
    yield compile_case_of("output_gate", _meta(256, False, False, torch.bfloat16))
    yield compile_case_of("output_gate per token", _meta(2048, True, True, torch.bfloat16))
