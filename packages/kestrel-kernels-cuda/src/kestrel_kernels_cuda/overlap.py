"""Kernels that start while the one before finishes (programmatic dependent launch), for launches of this package.

A kernel with the constant ``PDL`` lets the next one begin at once, loads what no kernel writes (weights), and waits for
the one before ahead of everything else, its own writes included. Every program waits: the next kernel relies on it.

Source: CUDA C++ programming guide, "Programmatic dependent launch and synchronization".
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kestrel_kernels_cuda.launch import Launch
from kestrel_kernels_cuda.linear_launch import overlaps_on
from kestrel_kernels_cuda.linear_parts import start_next, wait_for_previous

__all__ = ["overlap", "overlapped", "start_next", "wait_for_previous"]


def overlap(device: torch.device) -> dict[str, bool]:
    """What a launch on ``device`` says of it."""
    return {"PDL": True, "launch_pdl": True} if overlaps_on(device) else {"PDL": False}


def overlapped(launch: Launch) -> Launch:
    """``launch`` as on a device where kernels overlap, for the compile test."""
    return replace(launch, meta={**launch.meta, "PDL": True, "launch_pdl": True})
