"""Streaming resampling of mono float32 audio: windowed-sinc, zero phase, the same output however the input is cut.

An output sample at n·M/L input samples (L/M the reduced ratio of the rates) is a weighted sum of the inputs around it.
Work is done in launches of one fixed shape, whatever comes in, so that not even rounding depends on the blocks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Resampler"]

Samples = NDArray[np.float32]

# 128 zero crossings at 0.96 of the lower Nyquist frequency, Kaiser β 9 (90 dB): at 16 kHz the passband ends at
# 7.3 kHz and the stop band begins at 8.0 kHz, so nothing aliases.
_CROSSINGS = 64  # on each side
_ROLLOFF = 0.96
_KAISER_BETA = 9.0
_LAUNCH = 4096  # output samples, roughly
_MAX_MATRIX = 2**22  # elements; ratios whose matrix is larger compute their weights anew
_TABLE_STEPS = 2048  # per zero crossing; linear interpolation is exact to 1e-7


class Resampler:
    """Resamples one stream from ``source_rate`` to ``target_rate``. ⌈N·L/M⌉ samples come out for N that went in."""

    def __init__(self, source_rate: int, target_rate: int) -> None:
        common = math.gcd(source_rate, target_rate)
        self._up, self._down = target_rate // common, source_rate // common
        self._num_in = 0
        self._num_out = 0
        self._core = None if self._up == self._down else _core(self._up, self._down)
        before = 0 if self._core is None else self._core.reach - 1
        self._pending: Samples = np.zeros(before, np.float32)

    def push(self, block: Samples) -> Samples:
        """What can be computed now that ``block`` [n] is there; often empty for small blocks."""
        self._num_in += len(block)
        if self._core is None:
            self._num_out += len(block)
            return block
        self._pending = np.concatenate([self._pending, block])
        return self._launch(self._core)

    def flush(self) -> Samples:
        """The rest, as if silence followed. The stream is over."""
        total = -(-self._num_in * self._up // self._down)
        if self._core is None or total == self._num_out:
            return np.zeros(0, np.float32)
        missing, made = total - self._num_out, []
        while self._num_out < total:
            self._pending = np.pad(self._pending, (0, max(0, self._core.num_in - len(self._pending))))
            made.append(self._launch(self._core))
        self._num_out = total
        return np.concatenate(made)[:missing]

    def _launch(self, core: _Core) -> Samples:
        made, at = [], 0
        while at + core.num_in <= len(self._pending):
            window = self._pending[at : at + core.num_in]
            at += core.step
            made.append(core.compute(window))
        self._pending = self._pending[at:]
        self._num_out += sum(map(len, made))
        return np.concatenate(made) if made else np.zeros(0, np.float32)


class _Core(ABC):
    """One launch computes outputs from ``num_in`` inputs; the next one begins ``step`` inputs later (both as they are
    before ``compute``). ``reach``: inputs that an output depends on, on either side."""

    num_in: int
    step: int
    reach: int

    @abstractmethod
    def compute(self, x: Samples) -> Samples:
        """The outputs of one launch; input ``reach - 1`` is where the first one lies."""


def _core(up: int, down: int) -> _Core:
    kernel = _Kernel(up, down)
    group = -(-64 // up)  # periods per matrix: at least 64 columns keep the product efficient
    rows_in, columns = group * down + 2 * kernel.reach, group * up
    return _Dense(kernel, group) if rows_in * columns <= _MAX_MATRIX else _Sparse(kernel)


class _Kernel:
    """The weights of the inputs around an output, by distance in input samples."""

    def __init__(self, up: int, down: int) -> None:
        self.up, self.down = up, down
        self._scale = min(1.0, up / down)
        self.reach = math.ceil(_CROSSINGS / self._scale)

    def exact(self, distance: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weights at ``distance`` (any shape, input samples), float64."""
        x = distance * self._scale
        inside = np.clip(1.0 - (x / _CROSSINGS) ** 2, 0.0, None)
        window = np.i0(_KAISER_BETA * np.sqrt(inside)) / np.i0(_KAISER_BETA)
        cutoff = _ROLLOFF * self._scale
        return np.asarray(cutoff * np.sinc(_ROLLOFF * x) * np.where(np.abs(x) <= _CROSSINGS, window, 0.0))

    def table(self) -> NDArray[np.float64]:
        """Weights at distances 0, 1/2048, … of a zero crossing, up to the window's end and a little beyond."""
        return self.exact(np.arange(_CROSSINGS * _TABLE_STEPS + 4) / (_TABLE_STEPS * self._scale))

    @property
    def steps_per_sample(self) -> float:
        """Entries of ``table`` per input sample."""
        return _TABLE_STEPS * self._scale


class _Dense(_Core):
    """Common ratios: whole periods (L outputs from M inputs) as one matrix product."""

    def __init__(self, kernel: _Kernel, group: int) -> None:
        columns, period_in = group * kernel.up, group * kernel.down
        self.reach = kernel.reach
        self._periods = max(1, _LAUNCH // columns)
        self._period_in = period_in
        self._span = period_in + 2 * self.reach
        self.step = self._periods * period_in
        self.num_in = self.step + 2 * self.reach
        at = np.arange(columns) * kernel.down / kernel.up + (self.reach - 1)
        weights = kernel.exact(np.arange(self._span)[:, None] - at[None, :])
        self._weights = (weights / weights.sum(axis=0)).astype(
            np.float32
        )  # constant input stays exactly constant

    def compute(self, x: Samples) -> Samples:
        windows = np.lib.stride_tricks.sliding_window_view(x, self._span)[:: self._period_in][: self._periods]
        return np.asarray(np.ascontiguousarray(windows) @ self._weights).reshape(-1)


class _Sparse(_Core):
    """Odd ratios (44 099 Hz): each output's weights are looked up, since a table of all phases would be huge."""

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel = kernel
        self._table = kernel.table()
        self._phase = 0  # how far the first output lies behind its input, in 1/L samples
        self.reach = kernel.reach
        self._num_out = max(16, min(_LAUNCH, 2**20 // (2 * self.reach)))
        self._advance()

    def _advance(self) -> None:
        """Sizes of the next launch: it may skip an input more or less than the one before."""
        self.step = (self._phase + self._num_out * self._kernel.down) // self._kernel.up
        self.num_in = self.step + 2 * self.reach + 1

    def compute(self, x: Samples) -> Samples:
        at = self._phase + np.arange(self._num_out, dtype=np.int64) * self._kernel.down
        whole, rest = at // self._kernel.up, at % self._kernel.up
        offsets = np.arange(2 * self.reach) - (self.reach - 1)
        place = np.abs(offsets[None, :] - rest[:, None] / self._kernel.up) * self._kernel.steps_per_sample
        place = np.minimum(place, len(self._table) - 1.5)  # zero from the window's end on
        index = place.astype(np.int64)
        weights = self._table[index] + (self._table[index + 1] - self._table[index]) * (place - index)
        weights /= weights.sum(axis=1, keepdims=True)
        windows = np.lib.stride_tricks.sliding_window_view(x, 2 * self.reach)[whole]
        y: NDArray[Any] = np.einsum("ij,ij->i", windows, weights.astype(np.float32))
        self._phase = int((self._phase + self._num_out * self._kernel.down) % self._kernel.up)
        self._advance()
        return y
