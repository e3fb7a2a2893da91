"""How a line of pixels becomes one of another length: the taps of each output, computed on the host in the integers
that Pillow uses, so that resized pictures can be equal to Pillow's.

Letters: S outputs of all tables together, K taps, M crops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["CROP_FIELDS", "PRECISION", "CropPlan", "CropTables", "Taps", "crop_tables", "taps"]

PRECISION = 22  # bits of a weight behind the point: 8 for the pixel and 2 against overflow are left of 32
CROP_FIELDS = ("offset", "height", "width", "row", "column", "row_taps", "column_taps")


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sinc function under the middle of one three times as wide."""
    return np.where(np.abs(x) < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cubic convolution with a = −0.5. Source: Keys 1981, "Cubic convolution interpolation"."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_KERNELS: Mapping[str, tuple[Callable[[NDArray[np.float64]], NDArray[np.float64]], float]] = {
    "lanczos": (_lanczos, 3.0),  # the kernel, and how far it reaches
    "bicubic": (_bicubic, 2.0),
}


@dataclass(frozen=True, slots=True)
class Taps:
    """``starts_S`` int32: the first input of each output. ``weights_KS`` int32: of the inputs from there on, in units
    of 2^−22; they sum to 1 within rounding. Zero where an output has fewer inputs. Both are read-only."""

    starts_S: NDArray[np.int32]
    weights_KS: NDArray[np.int32]


@lru_cache(maxsize=256)
def taps(source: int, target: int, kernel: str) -> Taps:
    """The taps of a line of ``source`` pixels resized to ``target``. ``kernel``: "lanczos" or "bicubic".

    A line that shrinks is smoothed: the kernel widens by the ratio. Outside the line nothing counts, and what is left
    is normalised.
    """
    weigh, reach = _KERNELS[kernel]
    ratio = source / target
    widening = max(ratio, 1.0)
    reach *= widening
    centre = (np.arange(target) + 0.5) * ratio
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + reach + 0.5).astype(np.int64), source)
    tap = np.arange(math.ceil(reach) * 2 + 1)[:, None]
    weights = weigh((tap + first - centre + 0.5) / widening)
    weights = np.where(tap < end - first, weights, 0.0)
    scaled = weights / weights.sum(axis=0) * (1 << PRECISION)
    whole = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32)
    whole = whole[: int((end - first).max())]
    starts = first.astype(np.int32)
    for array in (starts, whole):
        array.setflags(write=False)
    return Taps(starts, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class CropPlan:
    """A crop with its corner at (``top``, ``left``) of a picture of ``source`` (height, width) resized to ``resized``.

    ``offset``: where the picture's bytes begin among all.
    """

    source: tuple[int, int]
    resized: tuple[int, int]
    top: int = 0
    left: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CropTables:
    """What ``ops.resize_crops`` reads: ``crops_MF`` int64, ``starts_S`` int32, ``weights_KS`` int32."""

    crops_MF: NDArray[np.int64]
    starts_S: NDArray[np.int32]
    weights_KS: NDArray[np.int32]


def crop_tables(crops: Sequence[CropPlan], kernel: str) -> CropTables:
    """The tables of ``crops``; sides resized alike share theirs. The shape of the tables follows from the sides."""
    sides: dict[tuple[int, int], tuple[int, Taps]] = {}
    total = 0
    for plan in crops:
        for side in zip(plan.source, plan.resized, strict=True):
            if side not in sides:
                sides[side] = total, taps(*side, kernel)
                total += side[1]
    most = max((found.weights_KS.shape[0] for _, found in sides.values()), default=0)
    starts, weights = np.zeros(total, np.int32), np.zeros((most, total), np.int32)
    for at, found in sides.values():
        count, length = found.weights_KS.shape
        starts[at : at + length] = found.starts_S
        weights[:count, at : at + length] = found.weights_KS
    rows = np.zeros((len(crops), len(CROP_FIELDS)), np.int64)
    for m, plan in enumerate(crops):
        (row, down), (column, across) = (sides[side] for side in zip(plan.source, plan.resized, strict=True))
        counts = down.weights_KS.shape[0], across.weights_KS.shape[0]
        rows[m] = plan.offset, *plan.source, row + plan.top, column + plan.left, *counts
    return CropTables(rows, starts, weights)
