"""A product's tensors and its launch: one function for those that run and those that compile ahead."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kestrel_kernels_cuda.attention_hopper import IS_KNOWN
from kestrel_kernels_cuda.devices import arch_of
from kestrel_kernels_cuda.launch import Launch, Launches
from kestrel_kernels_cuda.linear_config import BLAS, BLOCK, Config, Product, choose, is_gated
from kestrel_kernels_cuda.linear_gemm import gemm_kernel
from kestrel_kernels_cuda.linear_gemv import gemv_kernel
from kestrel_kernels_cuda.linear_operands import Norm, Operands
from kestrel_kernels_cuda.linear_scratch import counters
from kestrel_kernels_cuda.linear_stream import stream_launches
from kestrel_kernels_cuda.overlap import overlaps_on

__all__ = ["READERS", "Norm", "Operands", "arch_of", "config_for", "launch", "overlaps_on", "run"]

READERS = 528  # programs: four to a processor of an H200
CACHED = 24_000_000  # bytes of a weight that the second-level cache holds beside what else is in use


def config_for(x: torch.Tensor, weight: torch.Tensor, epilogue: str | None) -> Config:
    """The configuration that the rows of ``x`` [..., K] fall into."""
    n, k = weight.shape
    wanted = Product.of(
        n, k, x.numel() // k, epilogue, wide=x.dtype == torch.float32, scaled=weight.itemsize == 1
    )
    chosen = choose(wanted, arch_of(x.device))
    if chosen.kernel == "stream" and not (IS_KNOWN and all(map(_is_described, (x, weight)))):
        return BLAS
    return chosen


def _is_described(matrix: torch.Tensor) -> bool:
    """Whether the memory unit finds blocks of ``matrix`` [..., K]: rows side by side, at multiples of 16 bytes."""
    return matrix.is_contiguous() and not (matrix.data_ptr() | matrix.stride(-2) * matrix.itemsize) % 16


def run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str | None,
    residual: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output [..., outputs] of ``config`` (not "blas") on ``x`` [..., K]."""
    rows = None if residual is None else _rows_of(residual)
    operands = Operands(
        x=_rows_of(x), weight=weight, bias=bias, residual=rows, epilogue=epilogue, norm=norm, scale=scale
    )
    started, out = launch(config, operands, overlaps=overlaps_on(x.device))
    if x.numel():
        started.run()
    if epilogue != "accumulate":
        return out.view(*x.shape[:-1], operands.outputs)
    assert residual is not None, "the accumulate epilogue needs a residual"
    if out.data_ptr() != residual.data_ptr():
        residual.copy_(out.view(residual.shape))
    return residual


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def launch(config: Config, operands: Operands, *, overlaps: bool) -> tuple[Launch | Launches, torch.Tensor]:
    """The launch of ``config`` (not "blas"), and its output [rows, outputs]: a new tensor, or the residual when
    that is accumulated into. ``overlaps``: see ``overlap.OVERLAPS``."""
    o, norm = operands, operands.norm
    if config.kernel == "stream":
        return stream_launches(config, o, overlaps=overlaps)
    rows = o.x.shape[0]
    out = o.output()
    meta: dict[str, Any] = {
        "K": o.weight.shape[1], "BN": config.bn, "BK": config.bk,
        "EPILOGUE": "residual" if o.epilogue == "accumulate" else o.epilogue or "none", "BIAS": o.bias is not None,
        "BLOCK": 0 if o.scale is None else BLOCK, "PDL": overlaps, "num_warps": config.warps,
    }  # fmt: skip
    if overlaps:
        meta["launch_pdl"] = True
    inputs = (o.x, o.weight, _or(o.scale, o.x), _or(o.bias, o.x), _or(o.residual, o.x))
    columns = triton.cdiv(o.outputs, config.bn)
    if config.kernel == "gemv":
        gain, shift = (None, None) if norm is None else (norm.gain, norm.shift)
        meta |= {"NORM": "none" if norm is None else norm.kind, "AHEAD": _ahead(o) if overlaps else 0}
        args = (*inputs, _or(gain, o.x), _or(shift, o.x), out, o.outputs, 0.0 if norm is None else norm.eps)
        return Launch(gemv_kernel, (columns,), args, meta), out
    assert norm is None, "only products of one row take the norm before them"
    meta |= {
        "BM": config.bm,
        "SPLIT": config.split,
        "SWAP": config.swap,
        "STAGES": config.stages,
        "TMA": config.tma,
    }
    bands = triton.cdiv(rows, config.bm)
    scratch = _scratch(config, o, bands * columns)
    strides = o.x.stride(0), 0 if o.residual is None else o.residual.stride(0)
    tiles = (
        (_tiles(o.x, config.bm, config.bk), _tiles(o.weight, config.bn, config.bk))
        if config.tma
        else (o.x, o.x)
    )
    args = (*tiles, *inputs, out, *scratch, rows, o.outputs, *strides)
    return Launch(gemm_kernel, (bands, columns, config.split), args, meta), out


def _scratch(config: Config, o: Operands, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial sums, and counters; stand-ins when nothing is split."""
    if config.split == 1:
        return o.x, o.x
    halves = 2 if is_gated(o.epilogue) else 1
    size = tiles * config.split * halves * config.bm * config.bn
    return torch.empty(size, dtype=torch.float32, device=o.x.device), counters(o.x.device, tiles)


def _ahead(o: Operands) -> int:
    """How many programs of a product of one row read ahead for the others: as many as run at once, when the weight
    stays in the second-level cache and the product ends a mixer, whose kernels leave the memory idle."""
    ends_mixer = o.epilogue in ("residual", "accumulate")
    size = o.weight.numel() * o.weight.itemsize
    return READERS if ends_mixer and o.weight.shape[1] >= 1024 and size <= CACHED else 0


def _tiles(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """How the tensor memory unit finds tiles of ``matrix``; what lies outside reads as zero."""
    if matrix.data_ptr() % 16 or matrix.stride(0) * matrix.itemsize % 16:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A kernel takes a pointer even where it reads nothing."""
    return other if tensor is None else tensor
