"""Speech by energy: a frame that is clearly louder than the quietest parts of the last minute.

The floor is the 2nd percentile of frame levels and loud is the 90th. Speech is 8 dB above the floor; where loud and
floor are closer than that nothing can be told apart, and everything is speech. Below −70 dB of full scale nothing is.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kestrel_speech.vad import SAMPLE_RATE, FrameModel, Samples

__all__ = ["EnergyModel", "is_silence"]

_HOP = SAMPLE_RATE // 50  # 20 ms
_SECOND = 50 * _HOP
_SILENCE_DB = -70.0
_CONTRAST_DB = 8.0
_SLOPE_DB = 2.0  # the level above the threshold that multiplies the odds of speech by e
_LOWEST_DB, _BIN_DB, _NUM_BINS = -100.0, 0.5, 220  # levels are kept as a histogram, up to +10 dB

_LAUNCH = 500  # frames judged together: 10 s
_REMEMBERED = 6  # launches


class EnergyModel(FrameModel):
    """Judges 10 s at a time, by their levels and those of the 50 s before."""

    hop = _HOP

    def __init__(self) -> None:
        self._pending: Samples = np.zeros(0, np.float32)
        self._histograms: deque[NDArray[np.int64]] = deque(maxlen=_REMEMBERED)

    def push(self, samples: Samples) -> NDArray[np.float32]:
        self._pending = np.concatenate([self._pending, samples])
        size = _LAUNCH * _HOP
        launches = len(self._pending) // size
        found = [self._judge(self._pending[i * size : (i + 1) * size]) for i in range(launches)]
        self._pending = self._pending[launches * size :]
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def flush(self) -> NDArray[np.float32]:
        rest, self._pending = self._pending, np.zeros(0, np.float32)
        return self._judge(rest) if len(rest) else np.zeros(0, np.float32)

    def _judge(self, samples: Samples) -> NDArray[np.float32]:
        levels = _levels(samples)
        bins = np.clip((levels - _LOWEST_DB) / _BIN_DB, 0, _NUM_BINS - 1).astype(np.int64)
        self._histograms.append(np.bincount(bins, minlength=_NUM_BINS))
        floor, loud = (max(self._percentile(share), _SILENCE_DB) for share in (0.02, 0.90))
        threshold = floor + _CONTRAST_DB if loud - floor >= _CONTRAST_DB else _SILENCE_DB
        odds = np.clip((levels - threshold) / _SLOPE_DB, -40.0, 40.0)
        return np.asarray(1.0 / (1.0 + np.exp(-odds)), dtype=np.float32)

    def _percentile(self, share: float) -> float:
        below = np.cumsum(np.sum(self._histograms, axis=0))
        return _LOWEST_DB + _BIN_DB * float(np.searchsorted(below, share * below[-1]))


def is_silence(samples: Samples) -> bool:
    """No 20 ms of ``samples`` reach −70 dB of full scale: digital silence, or a line that nothing is plugged into.

    Looks no further than the first second that has a louder frame: the event loop waits for it. Mostly a look at one
    frame is enough, and NumPy keeps the interpreter for so few numbers, which others would take.
    """
    if any(_levels(samples[at : at + _HOP]).max() >= _SILENCE_DB for at in range(0, len(samples), _SECOND)):
        return False
    seconds = (samples[start : start + _SECOND] for start in range(0, len(samples), _SECOND))
    return not any(_levels(second).max() >= _SILENCE_DB for second in seconds)


def _levels(samples: Samples) -> NDArray[np.float64]:
    """dB of full scale of each frame around its mean; a shorter last frame counts as it is."""
    whole = len(samples) // _HOP * _HOP
    deviations = samples[:whole].reshape(-1, _HOP).astype(np.float64).std(axis=1)
    if whole < len(samples):
        deviations = np.append(deviations, samples[whole:].astype(np.float64).std())
    return np.asarray(20.0 * np.log10(np.maximum(deviations, 1e-6)))
