"""Kernels that start while the one before finishes (programmatic dependent launch), for launches of this package.

A kernel with the constant ``PDL`` lets the next one begin at once, loads what no kernel writes (weights), and waits for
the one before ahead of everything else, its own writes included. Every program waits: the next kernel relies on it.

Source: CUDA C++ programming guide, "Programmatic dependent launch and synchronization".
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kestrel_kernels_cuda.devices import arch_of
from kestrel_kernels_cuda.launch import Launch

__all__ = ["overlap", "overlapped", "overlaps", "overlaps_on", "start_next", "wait_for_previous"]

OVERLAPS = True
"""Whether kernels may overlap at all, on sm_90 and newer. Set it to False before a model is loaded to look at kernels
one by one."""


def overlaps(arch: int) -> bool:
    """Whether kernels on ``arch`` start before the one before has finished."""
    return OVERLAPS and arch >= 90


def overlaps_on(device: torch.device) -> bool:
    """The same of ``device``."""
    return overlaps(arch_of(device))


def overlap(device: torch.device) -> dict[str, bool]:
    """What a launch on ``device`` says of it."""
    return {"PDL": True, "launch_pdl": True} if overlaps_on(device) else {"PDL": False}


def overlapped(launch: Launch) -> Launch:
    """``launch`` as on a device where kernels overlap, for the compile test."""
    return replace(launch, meta={**launch.meta, "PDL": True, "launch_pdl": True})


@triton.jit
def start_next(PDL: tl.constexpr):
    """Lets the next kernel begin with what does not depend on this one."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Returns when the kernel before has finished and its writes are visible. Weights may be read before."""
    if PDL:
        gdc_wait()
