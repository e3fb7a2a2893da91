"""PCM as it comes: sample values to float32, arrays of callers, and the interface of everything that gives PCM."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import InvalidMediaError, InvalidRequestError

if TYPE_CHECKING:
    import torch

__all__ = ["ArrayFeed", "Feed", "PcmArray", "Samples", "as_float", "check_rate", "is_pcm", "pcm_array"]

Samples = NDArray[np.float32]
PcmArray = NDArray[Any]

MIN_RATE, MAX_RATE = 1_000, 768_000
_TOLERANCE = 1e-6  # beyond ±1, for floats that were rounded on their way
_BLOCK = 1 << 16
_WHOLE = 1 << 21  # of what is float32 already: nothing is copied, and a look at all of it is quick


class Feed(ABC):
    """PCM of one recording, from its beginning: blocks of mono float32 with the rate that each one has.

    ``duration_s``: what the recording says of itself, None when it says nothing. ``is_exact``: whether less than that
    means that something is missing. ``warnings`` grow while blocks are read.
    """

    duration_s: float | None = None
    is_exact: bool = False

    def __init__(self) -> None:
        self.warnings: list[str] = []

    @abstractmethod
    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """(sample rate, samples [n] float32), in order; read once. InvalidMediaError where it cannot be decoded."""

    def close(self) -> None:
        """Give back files; idempotent."""


class ArrayFeed(Feed):
    """A caller's array, converted block by block."""

    is_exact = True

    def __init__(self, values: PcmArray, sample_rate: int) -> None:
        super().__init__()
        self._values = values
        self._rate = sample_rate
        self.duration_s = len(values) / sample_rate

    def blocks(self) -> Iterator[tuple[int, Samples]]:
        """As ``Feed.blocks``; floats must be finite and within ±1."""
        size = _WHOLE if self._values.dtype == np.float32 else _BLOCK
        for at in range(0, len(self._values), size):
            part = self._values[at : at + size]
            block = as_float(part)
            if part.dtype.kind == "f":
                _check_range(block, at)
            yield self._rate, block


def is_pcm(source: object) -> TypeGuard[PcmArray | torch.Tensor]:
    """Whether ``source`` is an array or tensor."""
    return isinstance(source, np.ndarray) or _is_tensor(source)


def _is_tensor(source: object) -> bool:
    torch = sys.modules.get(
        "torch"
    )  # whoever holds a tensor has imported it; nobody else should wait for that
    return torch is not None and isinstance(source, torch.Tensor)


def pcm_array(source: PcmArray | torch.Tensor, *, what: str = "the given array") -> PcmArray:
    """``source`` as a NumPy array [n] of a numeric type, without a copy where that is possible.

    InvalidMediaError for other shapes, types and devices, and for no samples.
    """
    values = source if isinstance(source, np.ndarray) else _from_tensor(source, what)
    shape = " × ".join(map(str, values.shape))
    if values.ndim != 1:
        raise InvalidMediaError(f"{what} is [{shape}]. Give one-dimensional mono PCM: average the channels")
    if values.dtype.kind not in "fiu":
        raise InvalidMediaError(f"{what} is {values.dtype} [{shape}]. Give floats within ±1, or integers")
    if not len(values):
        raise InvalidMediaError(f"{what} holds no samples. Give at least one")
    return values


def _from_tensor(tensor: torch.Tensor, what: str) -> PcmArray:
    if tensor.device.type != "cpu":
        raise InvalidMediaError(f"{what} is a tensor on {tensor.device}. Move it to the CPU")
    plain = tensor.detach()
    return np.asarray((plain.float() if str(plain.dtype) == "torch.bfloat16" else plain).numpy())


def as_float(values: PcmArray) -> Samples:
    """Samples as float32: integers over the larger magnitude of their range, unsigned ones centred first."""
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, dtype=np.float32)
    half = 2.0 ** (8 * values.dtype.itemsize - 1)
    centre = half if values.dtype.kind == "u" else 0.0
    wide = np.float32 if values.dtype.itemsize <= 2 else np.float64  # float32 holds 24 bits exactly
    return np.asarray((values.astype(wide) - wide(centre)) / wide(half), dtype=np.float32)


def _check_range(block: Samples, start: int) -> None:
    most = 1.0 + _TOLERANCE
    if not (block.min() >= -most and block.max() <= most):  # NaN compares false
        at = int((~(np.abs(block) <= most)).argmax())
        raise InvalidMediaError(
            f"sample {start + at} of the given array is {block[at]:g}; PCM floats are finite and within ±1. "
            "Scale them, or give integers"
        )


def check_rate(sample_rate: object) -> int:
    """``sample_rate`` if it is a whole number of Hz that audio has; InvalidRequestError otherwise."""
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, int | np.integer):
        raise InvalidRequestError(f"sample_rate is {sample_rate!r}; give a whole number of Hz")
    if not MIN_RATE <= sample_rate <= MAX_RATE:
        raise InvalidRequestError(
            f"sample_rate is {sample_rate}; it must be at least {MIN_RATE} and at most {MAX_RATE} Hz"
        )
    return int(sample_rate)
