"""Launching the kernel of vision attention for sm_90, which is written in Gluon, Triton's language of explicit layouts.

Gluon changes between versions of Triton, and Triton's interpreter does not know it: elsewhere, and for what is not
served here, the kernel of ``attention_vision_kernels`` runs.

Letters: N items, S positions of each, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from kestrel_kernels_cuda.attention_configs import multiprocessors
from kestrel_kernels_cuda.attention_parts import scale_factors
from kestrel_kernels_cuda.launch import Launch

__all__ = ["MEASURED", "PAIRS", "HopperConfig", "hopper_config", "hopper_launch", "is_served", "trios_of"]

VERSION = "3.6."  # of Triton, whose Gluon the kernel was written and measured with
IS_KNOWN = triton.__version__.startswith(VERSION)
ROWS, FIRST, WIDEST = 64, 64, 96
MEASURED = frozenset({64, 72, 80, 88, 96})
"""Head dims where the kernel was measured to be faster than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig:
    """Groups of four warps that attend from 64 queries each, keys of a block, and blocks that are loaded ahead;
    whether groups take turns at the tensor cores."""

    groups: int
    block_n: int
    stages: int
    takes_turns: bool = False


PAIRS = HopperConfig(groups=2, block_n=128, stages=2, takes_turns=True)
TRIOS = HopperConfig(groups=3, block_n=64, stages=4, takes_turns=True)
SLIM_TRIOS = HopperConfig(groups=3, block_n=128, stages=2)  # for heads of one part


def trios_of(dim: int) -> tuple[HopperConfig, float]:
    """Three groups for heads of ``dim``, and how much faster a multiprocessor works with them than with two."""
    return (SLIM_TRIOS, 1.12) if dim == FIRST else (TRIOS, 1.06)


def hopper_config(items: int, length: int, heads: int, dim: int, processors: int) -> HopperConfig:
    """The configuration that is done first with the longest queue of groups on a multiprocessor."""

    def queue(groups: int) -> int:
        return groups * triton.cdiv(items * heads * triton.cdiv(length, groups * ROWS), processors)

    trios, gain = trios_of(dim)
    return trios if queue(3) <= queue(2) * gain else PAIRS


def is_served(arch: int, *tensors: torch.Tensor) -> bool:
    """Whether the kernel takes these [N, S, H, D]: 16-bit heads of 64 to 96 at distances that descriptors can name."""
    dim = tensors[0].shape[3]
    if not (IS_KNOWN and arch == 90 and FIRST <= dim <= WIDEST and dim % 8 == 0 and tensors[0].numel()):
        return False
    return all(_is_described(x) for x in tensors)


def _is_described(x_NSHD: torch.Tensor) -> bool:
    *others, last = x_NSHD.stride()
    is_aligned = not (x_NSHD.data_ptr() % 16 or any(stride % 8 for stride in others))
    return is_aligned and last == 1 and x_NSHD.element_size() == 2


def hopper_launch(
    q_NSHD: torch.Tensor, k_NSHD: torch.Tensor, v_NSHD: torch.Tensor, scale: float, config: HopperConfig
) -> tuple[torch.Tensor, Launch]:
    """Outputs [N, S, H, D], and what computes them."""
    from kestrel_kernels_cuda.attention_hopper_kernel import hopper_kernel

    items, length, heads, dim = q_NSHD.shape
    second = 0 if dim == FIRST else 16 if dim <= FIRST + 16 else 32
    out = torch.empty((items, length, heads, dim), dtype=q_NSHD.dtype, device=q_NSHD.device)
    tiles = triton.cdiv(length, config.groups * ROWS)
    units = items * heads * tiles
    described: list[Any] = []
    for x, rows in ((q_NSHD, ROWS), (k_NSHD, config.block_n), (v_NSHD, config.block_n), (out, ROWS)):
        described += [_described(x, rows, FIRST), _described(x, rows, second) if second else None]
    args = (*described, scale_factors(scale, None)[1], length, tiles, heads, units)
    meta = {
        "SECOND": second, "GROUPS": config.groups, "BLOCK_N": config.block_n,
        "STAGES": config.stages, "TAKES_TURNS": config.takes_turns, "num_warps": 4,
    }  # fmt: skip
    programs = min(units, multiprocessors(q_NSHD.device))
    return out, Launch(hopper_kernel, (programs,), args, meta)


def _described(x_NSHD: torch.Tensor, rows: int, width: int) -> Any:
    """Blocks of ``rows`` by ``width`` of one head; beyond the tensor they read as zeros and write nothing."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=2 * width, element_bitwidth=16, rank=4)
    return TensorDescriptor(x_NSHD, list(x_NSHD.shape), list(x_NSHD.stride()), [1, rows, 1, width], layout)
