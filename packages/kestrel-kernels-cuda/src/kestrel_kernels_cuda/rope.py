"""rope: every head of a token rotated by the token's angles.

Letters: T tokens, H heads, D head dim, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, OpQuery
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, power_of_two, supports_dtypes
from kestrel_kernels_cuda.overlap import overlap, start_next, wait_for_previous
from kestrel_kernels_cuda.rotation import partner, rotated

__all__ = ["IMPLS", "compile_cases", "rope"]

TILE = 1024  # numbers of one program


@triton.jit(do_not_specialize=["heads"])
def rope_kernel(
    x, cos, sin, out, heads, stride_xt, stride_xh, stride_cos, stride_sin,
    DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [T, H, D], contiguous."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (dim < DIM)
    row = x + token * stride_xt + head * stride_xh
    value = tl.load(row + dim, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + partner(dim, ROTATED), mask=inside & (dim < ROTATED), other=0.0).to(tl.float32)
    turned = rotated(value, other, cos, sin, token, stride_cos, stride_sin, dim, ROTATED)
    tl.store(out + (token * heads + head) * DIM + dim, turned.to(out.dtype.element_ty), mask=inside)


def _config(dim: int) -> dict[str, int]:
    block = power_of_two(dim)
    return {"BLOCK": block, "HEADS": max(1, TILE // block)}


def _launch(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> tuple[Launch, torch.Tensor]:
    tokens, heads, dim = x_THD.shape
    x_THD, cos_TR, sin_TR = (t if t.stride(-1) == 1 else t.contiguous() for t in (x_THD, cos_TR, sin_TR))
    out = torch.empty((tokens, heads, dim), dtype=x_THD.dtype, device=x_THD.device)
    config = _config(dim)
    launch = Launch(
        rope_kernel,
        (tokens, triton.cdiv(heads, config["HEADS"])),
        (x_THD, cos_TR, sin_TR, out, heads, *x_THD.stride()[:2], cos_TR.stride(0), sin_TR.stride(0)),
        {"DIM": dim, "ROTATED": cos_TR.shape[1], "num_warps": 4, **config, **overlap(x_THD.device)},
    )
    return launch, out


def rope(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """As ``kestrel.ops.rope.rope``."""
    launch, out = _launch(x_THD, cos_TR, sin_TR)
    launch.run()
    return out


def _meta(dim: int, turned: int, dtype: torch.dtype) -> Launch:
    x = torch.empty((2, 2, dim), dtype=dtype, device="meta")
    angles = torch.empty((2, turned), dtype=torch.float32, device="meta")
    return _launch(x, angles, angles)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """One job, for heads whose strides are as aligned as their width."""
    return (_meta(query.get("head_dim"), query.get("rot_dim"), dtype_of(query)).compile,)


IMPLS: Mapping[str, Impl] = {"rope": Impl(supports=supports_dtypes, fn=rope, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """A vision tower's head (72 of 128 places used) and the largest."""
    for dim, turned in ((72, 72), (512, 128)):
        yield compile_case_of(f"rope {dim}", _meta(dim, turned, torch.bfloat16))
