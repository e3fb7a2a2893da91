"""What the host writes for a launch, brought to the device in one copy that nobody waits for.

A ring of pinned buffers is allocated once; on a CPU there is nothing to copy and nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

__all__ = ["RING", "RowTable", "Staging", "shares_host"]

RING = 4  # launches of two steps, a decode and a prefill part each, read theirs while the next is filled
LEAST_BYTES = 1 << 18  # a prefill of 2,048 tokens, or the changes of 256 rows
ALIGNMENT = 64


def shares_host(device: torch.device) -> bool:
    """Whether arrays of the host are the device's own memory."""
    return device.type == "cpu"


class Staging:
    """Arrays and table rows on their way to ``device``. For one thread. ``ring``: launches that read theirs while the
    next is filled."""

    def __init__(self, device: torch.device, *, least_bytes: int = LEAST_BYTES, ring: int = RING) -> None:
        self.device = device
        self._size = ring
        self.is_shared = shares_host(device)
        self._least = least_bytes
        self._ring: list[_Slot] = []
        self._turn = 0
        self._touched: list[RowTable] = []
        self._is_due = False  # something that was touched must go with the next send

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """Where ``array`` will be on the device once ``send`` ran, until ``ring`` more sends; on a CPU its memory."""
        return torch.from_numpy(array) if self.is_shared else self._slot().put(array)

    def put_all(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """As ``put``, of host tensors side by side along the first dimension; each is copied once."""
        if self.is_shared:
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return self._slot().put_all(parts)

    def table(self, shape: tuple[int, ...], dtype: DTypeLike, fill: float | Sequence[float] = 0) -> RowTable:
        """A table [rows, ...] on the device that the host writes by rows; ``fill`` is in every row at first."""
        return RowTable(self, shape, dtype, fill)

    def send(self) -> None:
        """Copy what was put, and write the rows that were touched, in stream order. Rows that can wait go with the
        first others."""
        if self.is_shared or not (self._is_due or (self._ring and self._ring[self._turn].used)):
            return
        self._is_due = False
        touched, self._touched = self._touched, []
        changes = [table.changes() for table in touched]
        self._slot().send()
        for table, (where, values) in zip(touched, changes, strict=True):
            table.flat.index_copy_(0, where, values)
        self._turn = (self._turn + 1) % self._size

    def touched(self, table: RowTable, *, is_first: bool, can_wait: bool) -> None:
        """``table`` has rows to send. For ``RowTable``."""
        if is_first:
            self._touched.append(table)
        self._is_due = self._is_due or not can_wait

    def flush(self) -> None:
        """Send, and let nothing wait."""
        self._is_due = bool(self._touched)
        self.send()

    def _slot(self) -> _Slot:
        if not self._ring:
            self._ring = [_Slot(self.device, self._least) for _ in range(self._size)]
        return self._ring[self._turn]


class RowTable:
    """``tensor`` [rows, ...] on the device; ``host`` what the host wrote there last: the same memory on a CPU.

    The device may write ``tensor`` too. ``touch`` a row after writing ``host[row]``: the next ``send`` of the staging
    brings it over, whatever the device has there.
    """

    __slots__ = ("_dirty", "_staging", "_width", "flat", "host", "tensor")

    def __init__(
        self, staging: Staging, shape: tuple[int, ...], dtype: DTypeLike, fill: float | Sequence[float]
    ) -> None:
        self.host: NDArray[Any] = np.empty(shape, dtype=dtype)
        self.host[...] = fill
        shared = torch.from_numpy(self.host)
        self.tensor = shared if staging.is_shared else shared.to(staging.device, copy=True)
        self.flat = self.tensor.view(-1)
        self._staging = staging
        self._width = int(np.prod(shape[1:], dtype=np.int64))
        self._dirty: dict[int, tuple[int, int]] = {}

    def touch(self, row: int, start: int = 0, stop: int | None = None, *, can_wait: bool = False) -> None:
        """The host wrote elements ``start`` to ``stop`` of ``row``, counted along the flattened row. ``can_wait``: no
        launch names the row before it is touched again."""
        if self._staging.is_shared:
            return
        self._staging.touched(self, is_first=not self._dirty, can_wait=can_wait)
        stop = self._width if stop is None else stop
        low, high = self._dirty.get(row, (start, stop))
        self._dirty[row] = (min(low, start), max(high, stop))

    def changes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in ``flat`` and their new values, put on the staging. For ``Staging.send``."""
        dirty, self._dirty, width = self._dirty, {}, self._width
        flat = self.host.reshape(-1)
        spans = [(row * width + low, row * width + high) for row, (low, high) in dirty.items()]
        where = np.concatenate([np.arange(low, high, dtype=np.int64) for low, high in spans])
        return self._staging.put(where), self._staging.put(flat[where])


class _Slot:
    """One launch's bytes: blocks of pinned memory, each with its twin on the device. The first one is large enough
    from the second time on."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call, unused-ignore]
        self._blocks = [_Block(device, num_bytes)]
        self._is_sent = False

    @property
    def used(self) -> bool:
        """Something was put since the last send."""
        return not self._is_sent and any(block.used for block in self._blocks)

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """The place of ``array`` on the device."""
        block, at = self._reserve(array.nbytes)
        block.bytes[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return block.view(torch.from_numpy(np.empty(0, array.dtype)).dtype, at, array.shape)

    def put_all(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The place of ``parts`` side by side on the device."""
        block, at = self._reserve(sum(part.nbytes for part in parts))
        start = at
        for part in parts:
            # NumPy's copy is one of memory; torch's wakes threads that cost more than they save.
            block.bytes[start : start + part.nbytes] = part.contiguous().view(-1).view(torch.uint8).numpy()
            start += part.nbytes
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return block.view(parts[0].dtype, at, shape)

    def send(self) -> None:
        """Copy every block in stream order."""
        for block in self._blocks:
            block.send()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        self._is_sent = True

    def _reserve(self, num_bytes: int) -> tuple[_Block, int]:
        if self._is_sent:
            self._reuse()
        block = self._blocks[-1]
        if block.used + num_bytes > block.size:
            block = _Block(self._device, max(num_bytes, 2 * block.size))
            self._blocks.append(block)
        return block, block.take(num_bytes)

    def _reuse(self) -> None:
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call, unused-ignore]
            self._event.synchronize()  # sync: the host is a whole ring ahead of the device
        if len(self._blocks) > 1:
            self._blocks = [_Block(self._device, sum(block.size for block in self._blocks))]
        self._blocks[0].used = 0
        self._is_sent = False


class _Block:
    """``size`` pinned bytes and their twin on the device."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.size = -(-size // ALIGNMENT) * ALIGNMENT
        self.used = 0
        self._is_pinned = device.type == "cuda"
        self.pinned = torch.empty(self.size, dtype=torch.uint8, pin_memory=self._is_pinned)
        self.bytes: NDArray[np.uint8] = self.pinned.numpy()
        self._twin = torch.empty(self.size, dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def take(self, num_bytes: int) -> int:
        """The start of ``num_bytes`` more bytes."""
        at = self.used
        self.used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return at

    def view(self, dtype: torch.dtype, at: int, shape: Sequence[int]) -> torch.Tensor:
        """The twin's bytes from ``at`` on as a tensor."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._twin.view(dtype)
        strides, step = [], 1
        for length in reversed(shape):
            strides.append(step)
            step *= length
        return typed.as_strided(tuple(shape), tuple(reversed(strides)), at // dtype.itemsize)

    def send(self) -> None:
        """Copy what is used."""
        if self.used:
            self._twin[: self.used].copy_(self.pinned[: self.used], non_blocking=self._is_pinned)
