"""Products of many rows: torch's (cuBLAS), then one kernel for what it cannot fuse."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kestrel_kernels_cuda.launch import Launch
from kestrel_kernels_cuda.linear_parts import activate
from kestrel_kernels_cuda.overlap import overlaps_on, start_next, wait_for_previous

__all__ = ["gate_launch", "product"]

GATE_BLOCK = 1024
ALIGNED = 8  # 16-bit numbers of a wide write
MANY = 4096  # outputs that only a vocabulary has in odd numbers; its readers take rows that lie apart


@triton.jit
def gate_kernel(y_ptr, out_ptr, half, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """``out`` [rows, half] = act(first half of ``y`` [rows, 2 · half]) · second half; one program per row and block."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < half
    gate = tl.load(y_ptr + row * 2 * half + columns, mask=live, other=0.0).to(tl.float32)
    up = tl.load(y_ptr + row * 2 * half + half + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * half + columns, (activate(gate, KIND) * up).to(out_ptr.dtype.element_ty), mask=live
    )


def gate_launch(y: torch.Tensor, kind: str) -> tuple[Launch, torch.Tensor]:
    """The launch that gates ``y`` [..., 2H] by its first half, and its output [..., H]."""
    half = y.shape[-1] // 2
    out = torch.empty((*y.shape[:-1], half), dtype=y.dtype, device=y.device)
    grid = (y.numel() // y.shape[-1], triton.cdiv(half, GATE_BLOCK))
    meta: dict[str, Any] = {"BLOCK": GATE_BLOCK, "KIND": kind, "num_warps": 4, "PDL": overlaps_on(y.device)}
    if meta["PDL"]:
        meta["launch_pdl"] = True
    return Launch(gate_kernel, grid, (y, out, half), meta), out


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """As ``kestrel.ops.linear.linear``."""
    n = weight.shape[0]
    if weight.shape[1] % ALIGNED and x.numel() >= MANY * weight.shape[1]:
        x, weight = _padded(x), _padded(weight)
    if bias is not None and x.is_cuda and _is_tanh(epilogue, x.dtype):
        flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
        return flat.view(*x.shape[:-1], n)
    if epilogue is None and bias is None and x.dim() == 2 and x.is_cuda and n > MANY and n % ALIGNED:
        return _aligned(x, weight)
    if epilogue == "accumulate" and bias is None:
        assert residual is not None, "the accumulate epilogue needs a residual"
        if residual.is_contiguous():
            residual.view(-1, n).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
            return residual
    y = F.linear(x, weight, bias)
    match epilogue:
        case "residual":
            assert residual is not None, "the residual epilogue needs a residual"
            return y.add_(residual)
        case "accumulate":
            assert residual is not None, "the accumulate epilogue needs a residual"
            return residual.add_(y)
        case "gelu_tanh":
            return F.gelu(y, approximate="tanh")
        case "gelu":
            return F.gelu(y)
        case "silu_mul" | "gelu_tanh_mul":
            launch, out = gate_launch(y, epilogue)
            launch.run()
            return out
        case _:
            return y


def _padded(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` [..., K] with zeros up to a multiple of ALIGNED columns: for others, as a patch of 588 pixels, cuBLAS
    falls back to narrow reads. For many rows a copy costs less than those."""
    return F.pad(matrix, (0, -matrix.shape[-1] % ALIGNED))


def _is_tanh(epilogue: str | None, dtype: torch.dtype) -> bool:
    """Whether cuBLAS computes the epilogue with the product.

    It has GELU by tanh alone, from unrounded sums: off the one by erf by 4.7e-4 at most, and less on average (1.3e-4
    of normal numbers) than rounding the sums to bfloat16 first, as a pass of its own reads them (1.3e-3).
    """
    return dtype != torch.float32 and (
        epilogue == "gelu_tanh" or (epilogue == "gelu" and dtype == torch.bfloat16)
    )


def _aligned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product [T, N] as a view of rows of a multiple of ALIGNED numbers, the last few outputs by themselves: for
    other numbers, as of Whisper's vocabulary, cuBLAS falls back to narrow reads and writes (79 µs instead of 43)."""
    rows, n = x.shape[0], weight.shape[0]
    whole = n - n % ALIGNED
    wide = torch.empty((rows, whole + ALIGNED), dtype=x.dtype, device=x.device)
    torch.mm(x, weight[:whole].t(), out=wide[:, :whole])
    torch.mm(x, weight[whole:].t(), out=wide[:, whole:n])
    return wide[:, :n]
