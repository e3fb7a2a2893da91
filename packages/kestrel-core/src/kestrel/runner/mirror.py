"""Host arrays that the device reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from kestrel.device import shares_host

__all__ = ["RING", "Mirror", "PackedMirror", "to_device"]

RING = 3  # pinned copies: two launches read theirs while the next is filled
ALIGNMENT = 16  # of a field, in bytes: what kernels load at once


class PackedMirror:
    """Arrays of several dtypes, written on the host (``host[name]``), read on the device (``tensor[name]``).

    ``fields``: shape and dtype by name. On a CPU both are one memory and ``push`` does nothing. Elsewhere ``push``
    copies all of them at once in stream order; the device's addresses never change.
    """

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], DTypeLike]], device: torch.device) -> None:
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (shape, dtype) in fields.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            places[name] = (start, end)
        self._bytes = np.zeros(end, dtype=np.uint8)
        self.host: dict[str, NDArray[Any]] = {
            name: self._bytes[start:end].view(fields[name][1]).reshape(fields[name][0])
            for name, (start, end) in places.items()
        }
        self.tensor = {name: torch.from_numpy(array) for name, array in self.host.items()}
        self._ring: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0
        if shares_host(device):
            return
        self._twin = torch.zeros(end, dtype=torch.uint8, device=device)
        for name, (start, stop) in places.items():
            like = self.tensor[name]
            self.tensor[name] = self._twin[start:stop].view(like.dtype).view(like.shape)
        self._device, self._is_pinned = device, device.type == "cuda"
        self._ring = [torch.zeros(end, dtype=torch.uint8, pin_memory=self._is_pinned) for _ in range(RING)]
        if self._is_pinned:
            self._events = [torch.cuda.Event() for _ in range(RING)]  # type: ignore[no-untyped-call, unused-ignore]

    def push(self) -> None:
        """Make the device see what the host wrote."""
        if not self._ring:
            return
        self._turn = (self._turn + 1) % RING
        staged, event = self._ring[self._turn], self._events[self._turn] if self._is_pinned else None
        if event is not None and not event.query():  # type: ignore[no-untyped-call, unused-ignore]
            event.synchronize()  # sync: chunks that yield no token are launched without a wait for those before
        staged.numpy()[...] = self._bytes
        self._twin.copy_(staged, non_blocking=self._is_pinned)
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))


class Mirror:
    """A ``PackedMirror`` of one array."""

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic], device: torch.device) -> None:
        self._packed = PackedMirror({"array": (shape, dtype)}, device)
        self.host, self.tensor = self._packed.host["array"], self._packed.tensor["array"]
        self.push = self._packed.push


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, copied in stream order; on a CPU the same memory. For what happens rarely: it pins."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # the caching host allocator keeps it alive until the copy ran
    return tensor.to(device, non_blocking=True)
