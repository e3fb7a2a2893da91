"""How much memory a device has, in bytes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

__all__ = ["allocated_memory", "counts_peaks", "free_memory", "peak_memory", "reset_peak", "total_memory"]


def total_memory(device: torch.device) -> int:
    """Bytes of memory that ``device`` has in all. On MPS: what Metal recommends as a working set."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return _host_memory()[0]


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken without pushing out others. Memory that torch keeps for reuse counts as free."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return _host_memory()[1]


def counts_peaks(device: torch.device) -> bool:
    """Whether torch counts what is allocated on ``device``, so that ``peak_memory`` says something."""
    return device.type == "cuda"


def allocated_memory(device: torch.device) -> int:
    """Bytes that this process's tensors take on ``device`` now; 0 where nobody counts."""
    return int(torch.cuda.memory_allocated(device)) if counts_peaks(device) else 0


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors took at once since ``reset_peak``; 0 where nobody counts."""
    return int(torch.cuda.max_memory_allocated(device)) if counts_peaks(device) else 0


def reset_peak(device: torch.device) -> None:
    """Count peaks from now on."""
    if counts_peaks(device):
        torch.cuda.reset_peak_memory_stats(device)


def _host_memory() -> tuple[int, int]:
    """Total and available bytes of the host, a container's limit taken into account."""
    total, free = _windows_memory() if sys.platform == "win32" else _posix_memory()
    limit, used = _cgroup_memory()
    return min(total, limit), min(free, max(limit - used, 0))


def _posix_memory() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return total, int(line.split()[1]) * 1024
        return total, page * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError):  # macOS has neither; half of the memory is a guess on the safe side
        return total, total // 2


def _cgroup_memory() -> tuple[int, int]:
    """Limit and use in bytes of this process's control group; a limit of 2^62 when there is none."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return int(Path(limit_file).read_text()), int(Path(used_file).read_text())
        except (OSError, ValueError):  # no such group, or the limit reads "max"
            continue
    return 2**62, 0


def _windows_memory() -> tuple[int, int]:
    import ctypes

    class MemoryStatus(ctypes.Structure):
        _fields_ = [  # MEMORYSTATUSEX, learn.microsoft.com/windows/win32/api/sysinfoapi
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            ("total", ctypes.c_ulonglong),
            ("available", ctypes.c_ulonglong),
            ("page_total", ctypes.c_ulonglong),
            ("page_available", ctypes.c_ulonglong),
            ("virtual_total", ctypes.c_ulonglong),
            ("virtual_available", ctypes.c_ulonglong),
            ("extended", ctypes.c_ulonglong),
        ]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined,unused-ignore]
    return int(status.total), int(status.available)
