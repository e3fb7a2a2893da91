"""What a launch produced, on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.device import shares_host
from kestrel.sampling import Sampled, token_logprobs
from kestrel.types import TokenLogprobs

__all__ = ["Arrival", "Pending", "ResultRing", "Results", "pack"]

LEAST_BYTES = 1 << 12  # ids, ends and statuses of 400 rows

_NUMPY = {
    torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.bool: np.bool_,
    torch.uint8: np.uint8,
}  # fmt: skip


@dataclass(slots=True)
class Results:
    """Host values of the N rows of a launch, in its order. ``aux`` is None when no row asked for it."""

    ids: list[int]
    stopped: list[bool]
    status: list[int]
    aux: list[list[int]] | None = None
    logprob: list[float] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None

    def logprobs(self, index: int, count: int) -> TokenLogprobs | None:
        """The log-probabilities of row ``index`` with its ``count`` likeliest ids; None when no row asked."""
        if self.logprob is None:
            return None
        if self.top_ids is None or self.top_logprobs is None:
            return token_logprobs(self.logprob[index])
        return token_logprobs(self.logprob[index], self.top_ids[index], self.top_logprobs[index], count=count)


def pack(sampled: Sampled) -> torch.Tensor:
    """What the host wants to know of ``sampled``, in one piece of bytes. Device operations only: a captured program
    may end with it."""
    return _joined(_parts(sampled))


class ResultRing:
    """Pinned buffers that results are copied to: one per launch in flight, used again once it was read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_shared = shares_host(device)
        self._free: list[_Buffer] = []

    def pending(self, sampled: Sampled, packed: torch.Tensor | None = None) -> Pending:
        """``sampled`` on its way to the host; ``packed`` is ``pack`` of it, where a program did that, whose results are
        gone with the next one."""
        if self._is_shared:
            return Pending(sampled if packed is None else _kept(sampled), None)
        parts = _parts(sampled)
        return Pending(sampled, self._fetch(parts, _joined(parts) if packed is None else packed))

    def fetch(self, parts: Sequence[torch.Tensor]) -> Arrival:
        """``parts`` on their way to the host, in one copy; int64, int32, float32, bool or uint8, wider ones first."""
        if self._is_shared:
            return Arrival([part.numpy() for part in parts], None, None)
        return self._fetch(parts, _joined(parts))

    def give_back(self, buffer: _Buffer) -> None:
        """``buffer`` was read. For ``Arrival``."""
        self._free.append(buffer)

    def _fetch(self, parts: Sequence[torch.Tensor], packed: torch.Tensor) -> Arrival:
        buffer = self._take(packed.numel())
        buffer.fill(packed)
        arrays: list[NDArray[np.generic]] = []
        start = 0
        for part in parts:
            stop = start + part.nbytes
            arrays.append(buffer.bytes[start:stop].view(_NUMPY[part.dtype]).reshape(part.shape))
            start = stop
        return Arrival(arrays, buffer, self)

    def _take(self, num_bytes: int) -> _Buffer:
        for index, buffer in enumerate(self._free):
            if buffer.size >= num_bytes:
                return self._free.pop(index)
        if self._free:
            self._free.pop()  # too small for what is asked now: a larger one takes its place
        return _Buffer(self._device, max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length()))


class Arrival:
    """Arrays on their way to the host; ``read`` waits for them."""

    __slots__ = ("_arrays", "_buffer", "_ring")

    def __init__(
        self, arrays: list[NDArray[np.generic]], buffer: _Buffer | None, ring: ResultRing | None
    ) -> None:
        self._arrays, self._buffer, self._ring = arrays, buffer, ring

    def read(self) -> list[list[Any]]:
        """The host values, as (nested) lists; once. Raises what the device raised while computing them."""
        buffer, ring = self._buffer, self._ring
        if buffer is not None:
            buffer.wait()
        values: list[list[Any]] = [array.tolist() for array in self._arrays]
        if buffer is not None and ring is not None:
            self._arrays, self._buffer = [], None
            ring.give_back(buffer)
        return values


class Pending:
    """Sampled rows whose copy to the host is under way; ``read`` waits for it."""

    __slots__ = ("_arrival", "_sampled")

    def __init__(self, sampled: Sampled, arrival: Arrival | None) -> None:
        self._sampled, self._arrival = sampled, arrival

    def read(self) -> Results:
        """The host values, once. Raises what the device raised while computing them."""
        sampled = self._sampled
        if self._arrival is None:
            values: list[list[Any]] = [part.tolist() for part in _parts(sampled)]
        else:
            values = self._arrival.read()
        has_aux, has_logprobs = sampled.has_aux, sampled.logprob is not None
        return Results(
            ids=values[0],
            aux=values[1] if has_aux else None,
            top_ids=values[1 + has_aux] if has_logprobs else None,
            logprob=values[-4] if has_logprobs else None,
            top_logprobs=values[-3] if has_logprobs else None,
            stopped=values[-2],
            status=values[-1],
        )


def _parts(sampled: Sampled) -> list[torch.Tensor]:
    """What the host wants to know, wider numbers first: ids, bins, top ids, log-probabilities, ends, statuses."""
    parts = [sampled.ids]
    if sampled.has_aux:
        parts.append(sampled.aux)
    if sampled.logprob is not None:
        assert sampled.top_ids is not None, "a step with log-probabilities has the likeliest ids"
        assert sampled.top_logprobs is not None, (
            "a step with log-probabilities has those of the likeliest ids"
        )
        parts += [sampled.top_ids, sampled.logprob, sampled.top_logprobs]
    return [*parts, sampled.stopped, sampled.status]


def _kept(sampled: Sampled) -> Sampled:
    """A copy, for where the host reads results in place."""
    return replace(
        sampled,
        ids=sampled.ids.clone(),
        aux=sampled.aux.clone(),
        stopped=sampled.stopped.clone(),
        status=sampled.status.clone(),
        logprob=None if sampled.logprob is None else sampled.logprob.clone(),
        top_ids=None if sampled.top_ids is None else sampled.top_ids.clone(),
        top_logprobs=None if sampled.top_logprobs is None else sampled.top_logprobs.clone(),
    )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


class _Buffer:
    """``size`` pinned bytes, and the event after which they hold what was copied last."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.size = size
        self._device = device
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.bytes: NDArray[np.uint8] = self._pinned.numpy()
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call, unused-ignore]

    def fill(self, packed: torch.Tensor) -> None:
        """Copy ``packed`` here, in stream order."""
        self._pinned[: packed.numel()].copy_(packed, non_blocking=self._event is not None)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until it is here."""
        if self._event is not None:
            self._event.synchronize()  # sync: the host needs this step's tokens; the next step is queued already
