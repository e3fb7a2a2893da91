"""Where to cut a recording that is too long for one request: at a quiet place."""

from __future__ import annotations

import numpy as np

from kestrel_speech.vad import SAMPLE_RATE, Samples

__all__ = ["quiet_cut"]

_SEARCHED = 5 * SAMPLE_RATE
_WINDOW = SAMPLE_RATE // 10
_SHORTEST_TAIL = SAMPLE_RATE // 2


def quiet_cut(samples: Samples, longest: int) -> int:
    """Where to cut ``samples`` [n], at most at ``longest``: n when they fit.

    In the last 5 s before the latest possible cut, the 100 ms with the smallest sum of magnitudes, and in them the
    smallest sample; the first of equals. At least 0.5 s remain behind the cut. ``longest`` is at least 1 s.
    """
    assert longest >= SAMPLE_RATE, f"pieces of {longest} samples leave no room to search"
    if len(samples) <= longest:
        return len(samples)
    latest = min(longest, len(samples) - _SHORTEST_TAIL)
    start = max(0, latest - _SEARCHED)
    magnitudes = np.abs(samples[start:latest]).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(magnitudes)])
    window = int(np.argmin(sums[_WINDOW:] - sums[:-_WINDOW]))
    return start + window + int(np.argmin(magnitudes[window : window + _WINDOW]))
