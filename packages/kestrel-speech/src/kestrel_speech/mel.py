"""Mel filter banks on Slaney's scale, shared by the speech families."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["mel_filters"]

LINEAR_BELOW_HZ = 1000.0
LINEAR_MEL = 15.0  # the mel of 1 kHz: 3 per 200 Hz
LOG_STEP = math.log(6.4) / 27.0


@lru_cache(maxsize=8)
def mel_filters(num_mels: int, n_fft: int, sample_rate: int = 16_000) -> NDArray[np.float32]:
    """Triangles [num_mels, n_fft / 2 + 1] from 0 Hz to half the sample rate, each of area 1 over its frequencies.

    Mel is linear below 1 kHz and logarithmic above (Slaney, Auditory Toolbox). Read-only: it is shared.
    """
    highest = sample_rate / 2
    edges = _hz(np.linspace(0.0, float(_mel(np.array(highest))), num_mels + 2))
    bins = np.linspace(0.0, highest, n_fft // 2 + 1)
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (right - left))
    found: NDArray[np.float32] = filters.astype(np.float32)
    found.flags.writeable = False
    return found


def _mel(hz: NDArray[np.float64]) -> NDArray[np.float64]:
    above = LINEAR_MEL + np.log(np.maximum(hz, LINEAR_BELOW_HZ) / LINEAR_BELOW_HZ) / LOG_STEP
    return np.where(hz < LINEAR_BELOW_HZ, hz * LINEAR_MEL / LINEAR_BELOW_HZ, above)


def _hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = LINEAR_BELOW_HZ * np.exp((mel - LINEAR_MEL) * LOG_STEP)
    return np.where(mel < LINEAR_MEL, mel * LINEAR_BELOW_HZ / LINEAR_MEL, above)
