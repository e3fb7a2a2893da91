"""Host extents of a decode launch, made only when an op asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kestrel.spi.batch import RowExtent

__all__ = ["DecodeExtents"]


@lru_cache(maxsize=1 << 16)  # frozen values, made once: building them costs more than reading them
def _one_token(computed: int) -> RowExtent:
    return RowExtent(1, computed)


class DecodeExtents(Sequence[RowExtent]):
    """One token per sequence after ``computed`` positions, read from a live host array.

    Building 64 extents per step costs as much as the rest of the step's host work, and only reference ops look.
    """

    def __init__(self, computed: NDArray[np.int32]) -> None:
        self._computed = computed
        self._built: tuple[RowExtent, ...] | None = None

    def renew(self) -> None:
        """The array moved on."""
        self._built = None

    def _rows(self) -> tuple[RowExtent, ...]:
        if self._built is None:
            self._built = tuple([_one_token(n) for n in self._computed.tolist()])
        return self._built

    def __len__(self) -> int:
        return len(self._computed)

    @overload
    def __getitem__(self, index: int) -> RowExtent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RowExtent]: ...
    def __getitem__(self, index: int | slice) -> RowExtent | Sequence[RowExtent]:
        return self._rows()[index]

    def __iter__(self) -> Iterator[RowExtent]:
        return iter(self._rows())
