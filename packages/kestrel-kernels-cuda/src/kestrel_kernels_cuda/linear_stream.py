"""Launching the kernel of products of a few rows for sm_90, which is written in Gluon (see ``attention_hopper``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, Launches, compile_case_of
from kestrel_kernels_cuda.linear_config import Config, Product, choose
from kestrel_kernels_cuda.linear_operands import Operands
from kestrel_kernels_cuda.linear_parts import finish
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["stream_cases", "stream_launches"]

SUMS = 512  # outputs that a program adds up


@triton.jit(do_not_specialize=["m"])
def parts_kernel(
    partial_ptr, bias_ptr, residual_ptr, out_ptr, m, n, residual_stride,
    SPLIT: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [m, n] = epilogue(sum of ``partial`` [SPLIT, m, n]), always in the same order."""
    start_next(PDL)
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < n
    wait_for_previous(PDL)
    y = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        y += tl.load(partial_ptr + (part * m + row) * n + columns, mask=live, other=0.0)
    places = row * residual_stride + columns
    y = finish(y, y, bias_ptr, residual_ptr, tl.minimum(columns, n - 1), places, live, n, EPILOGUE, BIAS)
    tl.store(out_ptr + row * n + columns, y.to(out_ptr.dtype.element_ty), mask=live)


def stream_launches(config: Config, o: Operands, *, overlaps: bool) -> tuple[Launches, torch.Tensor]:
    """The launches of a "stream" ``config`` and their output [rows, outputs]."""
    from kestrel_kernels_cuda.linear_stream_kernel import stream_kernel

    out, rows = o.output(), o.x.shape[0]
    bias, residual = o.x if o.bias is None else o.bias, o.x if o.residual is None else o.residual
    stride = 0 if o.residual is None else o.residual.stride(0)
    into = out
    if config.split > 1:
        into = torch.empty((config.split, rows, o.outputs), dtype=torch.float32, device=o.x.device)
    meta: dict[str, Any] = {
        "SPLIT": config.split, "BIAS": o.bias is not None,
        "EPILOGUE": "residual" if o.epilogue == "accumulate" else o.epilogue or "none", "PDL": overlaps,
    }  # fmt: skip
    if overlaps:
        meta["launch_pdl"] = True
    others = bias, residual, into, rows, o.outputs, stride
    tiles = _described(o.weight, config.bn, config.bk), _described(o.x, config.bm, config.bk)
    shape = {"K": o.weight.shape[1], "STAGES": config.stages, "num_warps": config.warps}
    grid = triton.cdiv(o.outputs, config.bn), config.split
    stream = Launch(stream_kernel, grid, (*tiles, *others), meta | shape)
    if config.split == 1:
        return Launches((stream,)), out
    args = into, bias, residual, out, rows, o.outputs, stride
    shape = {"BLOCK": SUMS, "num_warps": 4}
    return Launches(
        (stream, Launch(parts_kernel, (rows, triton.cdiv(o.outputs, SUMS)), args, meta | shape))
    ), out


def _described(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Blocks of ``matrix`` as tensor cores read them; what lies outside reads as zero."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns], layout)


def stream_cases(shapes: Iterable[tuple[int, int, int, str | None]]) -> Iterator[CompileCase]:
    """Products of bfloat16 as they are configured on sm_90: rows of the input, outputs and inputs of the weight,
    epilogue (GELU after a bias). Those that are not streamed there are left out."""
    for rows, n, k, epilogue in shapes:
        config = choose(Product.of(n, k, rows, epilogue), 90)
        if config.kernel != "stream":
            continue
        empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
        residual = empty((rows, n)) if epilogue == "accumulate" else None
        operands = Operands(
            x=empty((rows, k)),
            weight=empty((n, k)),
            bias=empty(n) if epilogue == "gelu_tanh" else None,
            residual=residual,
            epilogue=epilogue,
            norm=None,
        )
        for part in stream_launches(config, operands, overlaps=True)[0].parts:
            yield compile_case_of(f"linear {part.kernel.__name__} {n}x{k} {rows}", part, (90,))
