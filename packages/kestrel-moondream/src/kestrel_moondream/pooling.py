"""The map of an image's local crops, pooled to the size of one crop.

Local crops overlap: where two meet, each loses ``margin`` patches, so that every patch of the map has seen its
surroundings. A pooled patch is the mean of a window of the map, as adaptive average pooling cuts it.

Letters: N crops, S patches of a crop, G = √S, C width of the features.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

__all__ = ["Pooling", "windows"]

Windows = tuple[NDArray[np.int32], NDArray[np.int32]]


class Pooling:
    """Pools without making the map: where each window's patches lie is kept on the device, by tiling."""

    def __init__(self, grid: int, margin: int) -> None:
        self._grid, self._margin = grid, margin
        self._windows: dict[tuple[int, int, torch.device], tuple[torch.Tensor, ...]] = {}

    def __call__(self, local_NSC: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[S, C] of the features of ``rows`` × ``columns`` local crops; sums in float32."""
        places, starts = self._on(local_NSC.device, rows, columns)
        out: torch.Tensor = F.embedding_bag(places, local_NSC.flatten(0, 1), starts, mode="mean")
        return out

    def _on(self, device: torch.device, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
        key = rows, columns, device
        found = self._windows.get(key)
        if found is None:  # before anything is captured: a tiling's first launch is not
            arrays = windows(rows, columns, self._grid, self._margin)
            found = self._windows[key] = tuple(_sent(array, device) for array in arrays)
        return found


def windows(rows: int, columns: int, grid: int, margin: int) -> Windows:
    """The places of all windows' patches among those of ``rows`` × ``columns`` crops, window after window, and where
    each window begins; int32."""
    down, across = (_kept(count, grid, margin) for count in (rows, columns))
    tile_y, y = np.divmod(down, grid)
    tile_x, x = np.divmod(across, grid)
    place = (tile_y[:, None] * columns + tile_x) * grid**2 + y[:, None] * grid + x
    bands, stripes = (_cuts(len(kept), grid) for kept in (down, across))
    found = [place[band, stripe].ravel() for band in bands for stripe in stripes]
    starts = np.cumsum([0, *(len(one) for one in found[:-1])])
    return np.concatenate(found).astype(np.int32), starts.astype(np.int32)


def _kept(count: int, grid: int, margin: int) -> NDArray[np.int64]:
    """The rows, or columns, of the map, counted through ``count`` crops that lie side by side."""
    first = [0 if tile == 0 else margin for tile in range(count)]
    end = [grid if tile == count - 1 else grid - margin for tile in range(count)]
    return np.concatenate([tile * grid + np.arange(first[tile], end[tile]) for tile in range(count)])


def _cuts(length: int, pieces: int) -> list[slice]:
    return [slice(i * length // pieces, -(-(i + 1) * length // pieces)) for i in range(pieces)]


def _sent(array: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
