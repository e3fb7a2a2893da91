"""The device that kernels are configured for: its architecture and multiprocessors, or those of a stand-in.

Where there is no GPU (interpreted kernels) it counts as the oldest architecture that the package serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

__all__ = [
    "E4M3",
    "SHARED_LIMIT",
    "Device",
    "arch_of",
    "as_if",
    "family_of",
    "known_arch",
    "multiprocessors",
    "shared_limit",
]

SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may have, by architecture (CUDA C++ programming guide, table of compute
capabilities: the size per multiprocessor less the 1 KiB that the system keeps per block)."""

META = torch.device("meta")
E4M3 = 89  # the first architecture that converts 8-bit floats by itself


@dataclass(frozen=True, slots=True)
class Device:
    """``arch``: 90 for compute capability 9.0."""

    arch: int
    multiprocessors: int = 132


_stand_in: ContextVar[Device | None] = ContextVar("kestrel_kernels_cuda.stand_in", default=None)


@contextmanager
def as_if(device: Device) -> Iterator[None]:
    """Inside, launches are configured as on ``device``, whatever is there: to compile for devices that are not."""
    token = _stand_in.set(device)
    try:
        yield
    finally:
        _stand_in.reset(token)


def arch_of(device: torch.device) -> int:
    """90 for compute capability 9.0. Of the current CUDA device for tensors that take no memory."""
    return _of(device).arch


def multiprocessors(device: torch.device) -> int:
    """How many ``device`` has."""
    return _of(device).multiprocessors


def family_of(arch: int) -> str:
    """The architecture whose tiles ``arch`` uses: "small" for those with little shared memory."""
    return "sm_90" if 90 <= arch < 120 else "sm_80" if arch in (80, 87) else "small"


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that a block may have on ``arch``."""
    return SHARED_LIMIT[{"sm_90": 90, "sm_80": 80, "small": 86}[family_of(arch)]]


def known_arch() -> int | None:
    """The architecture of the current device, None where kernels are interpreted."""
    return arch_of(META) if _stand_in.get() is not None or torch.cuda.is_available() else None


def _of(device: torch.device) -> Device:
    stand_in = _stand_in.get()
    if stand_in is not None:
        return stand_in
    if device.type == "cpu" or not torch.cuda.is_available():
        return Device(80)
    return _found(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _found(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    return Device(found.major * 10 + found.minor, found.multi_processor_count)
