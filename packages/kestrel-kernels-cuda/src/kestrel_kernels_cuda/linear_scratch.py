"""Counters of finished programs, for products whose inputs are split among programs. They are zero between launches.

A captured launch keeps counters of its own, since graphs may be replayed on several streams at once.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["Counters", "counters"]

EAGER, CAPTURED = 1 << 14, 1 << 20


class Counters:
    """One arena per device for captured launches, one per device and stream for others. Used from any thread."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._eager: dict[tuple[int, int], torch.Tensor] = {}
        self._captured: dict[int, tuple[torch.Tensor, int]] = {}

    def of(self, device: torch.device, count: int) -> torch.Tensor:
        """``count`` int32 zeros on ``device``, which the kernel that counts with them leaves at zero."""
        if device.type != "cuda":
            return torch.zeros(count, dtype=torch.int32, device=device)
        index = torch.cuda.current_device() if device.index is None else device.index
        with self._changing:
            if torch.cuda.is_current_stream_capturing():
                return self._slice(device, index, count)
            if index not in self._captured:
                self._captured[index] = torch.zeros(CAPTURED, dtype=torch.int32, device=device), 0
            key = index, torch.cuda.current_stream(device).cuda_stream
            if key not in self._eager or len(self._eager[key]) < count:
                self._eager[key] = torch.zeros(max(EAGER, count), dtype=torch.int32, device=device)
            return self._eager[key]

    def _slice(self, device: torch.device, index: int, count: int) -> torch.Tensor:
        """Counters that no other launch uses; zeroed by the graph itself when none are left."""
        if index not in self._captured:
            return torch.zeros(count, dtype=torch.int32, device=device)
        arena, used = self._captured[index]
        if used + count > len(arena):
            return torch.zeros(count, dtype=torch.int32, device=device)
        self._captured[index] = arena, used + count
        return arena[used : used + count]


counters = Counters().of  # of this process: kernels are launched by plain functions
