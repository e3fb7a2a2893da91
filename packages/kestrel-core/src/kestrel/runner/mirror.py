"""Host arrays that the device reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["RING", "Mirror", "to_device"]

RING = 3  # pinned copies: two steps in flight read theirs while the next is filled


class Mirror:
    """An array written on the host (``host``) and read on the device (``tensor``), of one shape.

    On a CPU both are one memory and ``push`` does nothing. Elsewhere ``push`` copies all of it in stream order.
    """

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic], device: torch.device) -> None:
        self.host: NDArray[Any] = np.zeros(shape, dtype=dtype)
        shared = torch.from_numpy(self.host)
        self._ring: list[torch.Tensor] = []
        self._turn = 0
        if device.type == "cpu":
            self.tensor = shared
            return
        self.tensor = torch.zeros(shape, dtype=shared.dtype, device=device)
        pinned = device.type == "cuda"
        self._ring = [torch.zeros(shape, dtype=shared.dtype, pin_memory=pinned) for _ in range(RING)]

    def push(self) -> None:
        """Make the device see what the host wrote."""
        if not self._ring:
            return
        self._turn = (self._turn + 1) % len(self._ring)
        staged = self._ring[self._turn]
        staged.numpy()[...] = self.host
        self.tensor.copy_(staged, non_blocking=True)


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, copied in stream order; on a CPU the same memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # the caching host allocator keeps it alive until the copy ran
    return tensor.to(device, non_blocking=True)
