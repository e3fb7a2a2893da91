"""Launching the kernel of products of a few rows for sm_90, which is written in Gluon (see ``attention_hopper``)."""

from __future__ import annotations

from typing import Any

import torch
import triton

from kestrel_kernels_cuda.launch import Launch
from kestrel_kernels_cuda.linear_config import Config
from kestrel_kernels_cuda.linear_launch import Operands, output_of
from kestrel_kernels_cuda.linear_scratch import counters

__all__ = ["stream_launch"]


def stream_launch(config: Config, o: Operands, *, overlaps: bool) -> tuple[Launch, torch.Tensor]:
    """The launch of a "stream" ``config``, and its output [rows, outputs]."""
    from kestrel_kernels_cuda.linear_stream_kernel import stream_kernel

    out = output_of(o)
    tiles = triton.cdiv(o.outputs, config.bn)
    partial, counted = o.x, o.x
    if config.split > 1:
        size = tiles * config.split * config.bm * config.bn
        partial = torch.empty(size, dtype=torch.float32, device=o.x.device)
        counted = counters(o.x.device, tiles)
    args = (
        _described(o.weight, config.bn, config.bk), _described(o.x, config.bm, config.bk),
        o.x if o.bias is None else o.bias, o.x if o.residual is None else o.residual, out, partial, counted,
        o.x.shape[0], o.outputs, 0 if o.residual is None else o.residual.stride(0),
    )  # fmt: skip
    meta: dict[str, Any] = {
        "K": o.weight.shape[1], "SPLIT": config.split, "STAGES": config.stages,
        "EPILOGUE": "residual" if o.epilogue == "accumulate" else o.epilogue or "none", "BIAS": o.bias is not None,
        "PDL": overlaps, "num_warps": config.warps,
    }  # fmt: skip
    if overlaps:
        meta["launch_pdl"] = True
    return Launch(stream_kernel, (tiles, config.split), args, meta), out


def _described(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Blocks of ``matrix`` as tensor cores read them; what lies outside reads as zero."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns], layout)
