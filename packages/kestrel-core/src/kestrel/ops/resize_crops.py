"""resize_crops: pieces of resized pictures, straight from the pictures' bytes.

Letters: N bytes, M crops, F fields, S outputs of all tables, K taps. Tables: ``kestrel.ops.resampling``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.resampling import PRECISION, CropPlan, crop_tables

__all__ = ["RESIZE_CROPS", "resize_crops"]


def resize_crops(
    pixels_N: torch.Tensor,
    crops_MF: torch.Tensor,
    starts_S: torch.Tensor,
    weights_KS: torch.Tensor,
    size: tuple[int, int],
) -> torch.Tensor:
    """Crops uint8 [M, height, width, 3] of ``size`` (height, width).

    ``pixels_N`` uint8: the bytes of RGB pictures, row by row, one behind another. ``crops_MF`` int64 has
    ``resampling.CROP_FIELDS`` per crop: where its picture begins, the picture's height and width, where the crop's
    first row and first column stand in the tables, and how many taps they have at most. Output s is the sum of the
    pixels from ``starts_S[s]`` on (int32) times ``weights_KS[:, s]`` (int32, units of 2^−22). Columns first, then
    rows, each rounded to a byte, in integers alone: results are exact. Device only: nothing is read on the host.

    Source: the integer arithmetic of Pillow's ``Image.resize``. Its two passes made one by one (the width, then the
    height) give the same bytes; Pillow 13 may pass over the height first, which rounds differently.
    """
    height, width = size
    offset, rows, columns, row, column = (crops_MF[:, i].view(-1, 1, 1, 1) for i in range(5))
    device = pixels_N.device
    down_MH = row + torch.arange(height, device=device).view(1, -1, 1, 1)
    across_MW = column + torch.arange(width, device=device).view(1, 1, -1, 1)
    channel = torch.arange(3, device=device)
    total = torch.full((len(crops_MF), height, width, 3), 1 << (PRECISION - 1), device=device)
    for j in range(weights_KS.shape[0]):
        y = torch.minimum(starts_S[down_MH] + j, rows - 1)
        line = torch.full_like(total, 1 << (PRECISION - 1))
        for i in range(weights_KS.shape[0]):
            x = torch.minimum(starts_S[across_MW] + i, columns - 1)
            line += pixels_N[offset + (y * columns + x) * 3 + channel] * weights_KS[i][across_MW].long()
        total += (line >> PRECISION).clamp_(0, 255) * weights_KS[j][down_MH].long()
    return (total >> PRECISION).clamp_(0, 255).to(torch.uint8)


_WHOLE = (0, 0)
_SHAPES: dict[str, tuple[list[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]], tuple[int, int]]] = {
    # per crop: the picture's size, what it is resized to, the crop's corner; then the crops' size
    "smallest": ([((1, 1), (1, 1), _WHOLE)], (1, 1)),
    "odd, as it is": ([((5, 7), (5, 7), _WHOLE)], (5, 7)),
    "odd, smaller": ([((37, 53), (11, 9), _WHOLE)], (11, 9)),
    "larger": ([((6, 5), (17, 21), _WHOLE)], (17, 21)),
    "much smaller": ([((90, 3), (2, 5), _WHOLE)], (2, 5)),
    "a whole and windows of an enlarged one": (
        [((31, 40), (14, 14), _WHOLE), ((31, 40), (24, 34), _WHOLE), ((31, 40), (24, 34), (10, 20))],
        (14, 14),
    ),
    "two pictures": ([((23, 18), (12, 12), _WHOLE), ((9, 41), (20, 22), (8, 3))], (12, 12)),
    "none": ([], (4, 4)),
}


def _make(name: str, kernel: str, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    crops, size = _SHAPES[name]
    offsets: dict[tuple[int, int], int] = {}
    total = 0
    for source, _, _ in crops:
        if source not in offsets:
            offsets[source] = total
            total += source[0] * source[1] * 3
    plans = [
        CropPlan(source=source, resized=resized, top=top, left=left, offset=offsets[source])
        for source, resized, (top, left) in crops
    ]
    tables = crop_tables(plans, kernel)
    drawn = torch.randint(0, 256, (total,), generator=torch.Generator().manual_seed(seed), device="cpu")
    arrays = (torch.from_numpy(a.copy()) for a in (tables.crops_MF, tables.starts_S, tables.weights_KS))
    return Inputs(args=(drawn.to(device, torch.uint8), *(a.to(device) for a in arrays), size))


def _cases() -> Sequence[Case]:
    return [
        Case(op="resize_crops", name=f"{name}, {kernel}", make=partial(_make, name, kernel))
        for name in _SHAPES
        for kernel in ("lanczos", "bicubic")
    ]


RESIZE_CROPS = Op(
    name="resize_crops",
    reference=resize_crops,
    cases=_cases,
    tolerances={"float32": Tolerance(0.0, 0.0)},  # integers; the dtype is that of nothing
    facts={},
)
