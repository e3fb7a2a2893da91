"""gated_norm and delta_gates: one pass each over what a projection made.

Letters: T tokens, H value heads, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.gated_delta_parts import softplus
from kestrel_kernels_cuda.launch import (
    Launch,
    compile_case_of,
    dtype_of,
    power_of_two,
    refuse_dtype,
    supports_dtypes,
)
from kestrel_kernels_cuda.overlap import overlap, start_next, wait_for_previous

__all__ = ["IMPLS", "compile_cases", "delta_gates", "gated_norm"]

WIDEST = 4096  # numbers of a head in registers
TILE = 2048  # numbers of one program


@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    o, z, weight, out, rows, heads, z_stride, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``o`` and ``out`` [T · H, E]; the heads of ``z`` lie side by side in its rows."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (e < DIM)
    x = tl.load(o + row * DIM + e, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + row // heads * z_stride + row % heads * DIM + e, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / DIM + eps)
    x *= tl.load(weight + e, mask=e < DIM, other=0.0).to(tl.float32)
    x = x.to(out.dtype.element_ty).to(tl.float32)  # rounded before the gate, as the model was trained
    tl.store(out + row * DIM + e, (x * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["numbers"])
def delta_gates_kernel(
    a,
    b,
    a_log,
    dt_bias,
    gate,
    beta,
    numbers,
    heads,
    a_stride,
    b_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``gate`` and ``beta`` float32, ``numbers`` = T · H."""
    start_next(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    token, head = place // heads, place % heads
    step = tl.load(a + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32))
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(gate + place, -rate * step, mask=inside)
    opening = tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + place, tl.sigmoid(opening), mask=inside)


def _norm_launch(
    o_THE: torch.Tensor, z_THE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[Launch, torch.Tensor]:
    tokens, heads, dim = o_THE.shape
    o_THE = o_THE.contiguous()
    z_THE = z_THE if z_THE.stride()[1:] == (dim, 1) else z_THE.contiguous()
    out_THE = torch.empty_like(o_THE)
    block = power_of_two(dim)
    per_program = max(1, TILE // block)
    launch = Launch(
        gated_norm_kernel,
        (triton.cdiv(tokens * heads, per_program),),
        (o_THE, z_THE, weight_E, out_THE, tokens * heads, heads, z_THE.stride(0), eps),
        {"DIM": dim, "BLOCK": block, "ROWS": per_program, "num_warps": 4, **overlap(o_THE.device)},
    )
    return launch, out_THE


def gated_norm(
    o_THE: torch.Tensor, z_THE: torch.Tensor, weight_E: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """As ``kestrel.ops.gated_norm``."""
    launch, out_THE = _norm_launch(o_THE, z_THE, weight_E, eps)
    launch.run()
    return out_THE


def _gates_launch(
    a_TH: torch.Tensor, b_TH: torch.Tensor, a_log_H: torch.Tensor, dt_bias_H: torch.Tensor
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    tokens, heads = a_TH.shape
    a_TH, b_TH = (x if x.stride(1) == 1 else x.contiguous() for x in (a_TH, b_TH))
    gate_TH, beta_TH = (torch.empty(tokens, heads, dtype=torch.float32, device=a_TH.device) for _ in range(2))
    launch = Launch(
        delta_gates_kernel,
        (triton.cdiv(tokens * heads, 512),),
        (
            a_TH, b_TH, a_log_H, dt_bias_H, gate_TH, beta_TH,
            tokens * heads, heads, a_TH.stride(0), b_TH.stride(0),
        ),
        {"BLOCK": 512, "num_warps": 4, **overlap(a_TH.device)},
    )  # fmt: skip
    return launch, gate_TH, beta_TH


def delta_gates(
    a_TH: torch.Tensor, b_TH: torch.Tensor, a_log_H: torch.Tensor, dt_bias_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.delta_gates``."""
    launch, gate_TH, beta_TH = _gates_launch(a_TH, b_TH, a_log_H, dt_bias_H)
    launch.run()
    return gate_TH, beta_TH


def supports_norm(query: OpQuery) -> Yes | No:
    """Yes to heads that registers hold."""
    if refused := refuse_dtype(query):
        return refused
    dim = query.get("dim", 0)
    return Yes() if dim <= WIDEST else No(f"holds a head of at most {WIDEST} numbers in registers, not {dim}")


def _bare_norm(dim: int, dtype: torch.dtype) -> Launch:
    o = torch.empty(2, 16, dim, dtype=dtype, device="meta")
    return _norm_launch(o, o, torch.empty(dim, dtype=torch.float32, device="meta"), 1e-6)[0]


def _bare_gates(heads: int, dtype: torch.dtype) -> Launch:
    x = torch.empty(2, 16 * heads, dtype=dtype, device="meta")[:, :heads]  # a slice of an aligned projection
    return _gates_launch(x, x, torch.empty(heads, dtype=torch.float32, device="meta"), x[0])[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    if query.op == "gated_norm":
        return (_bare_norm(query.get("dim"), dtype_of(query)).compile,)
    return (_bare_gates(query.get("heads"), dtype_of(query)).compile,)


IMPLS: Mapping[str, Impl] = {
    "gated_norm": Impl(supports=supports_norm, fn=gated_norm, warm=_warm),
    "delta_gates": Impl(supports=supports_dtypes, fn=delta_gates, warm=_warm),
}


def compile_cases() -> Iterator[CompileCase]:
    """As Qwen has them."""
    yield compile_case_of("gated_norm", _bare_norm(128, torch.bfloat16))
    yield compile_case_of("delta_gates", _bare_gates(32, torch.bfloat16))
