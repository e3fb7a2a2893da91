"""An image as the crops that the vision encoder sees: one of the whole, and overlapping windows of an enlarged copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kestrel_moondream.config import VisionConfig

__all__ = ["Crops", "cut", "enlarged", "tiling", "window_corners"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crops:
    """``pixels`` [N, S, S, 3] uint8: the global crop, then ``rows`` × ``columns`` local ones, row by row.

    A 1 × 1 tiling has no local crops: its only one would be the global crop again, pixel for pixel.
    """

    pixels: NDArray[np.uint8]
    rows: int
    columns: int


def tiling(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Rows and columns of local crops for an image of ``width`` × ``height`` pixels.

    Source: the published Moondream 2 code; at most ``max_crops`` tiles, chosen along the image's aspect.
    """
    margins, window = _extents(vision)
    limit = vision.max_crops
    inner_h, inner_w = max(1, height - margins), max(1, width - margins)
    if inner_h <= window or inner_w <= window:
        return 1, 1
    least_h, least_w = math.ceil(inner_h / window), math.ceil(inner_w / window)
    if least_h * least_w > limit:
        shrink = math.sqrt(limit / (least_h * least_w))
        return max(1, math.floor(least_h * shrink)), max(1, math.floor(least_w * shrink))
    rows = max(least_h, math.floor(math.sqrt(limit * inner_h / inner_w)))
    columns = max(least_w, math.floor(math.sqrt(limit * inner_w / inner_h)))
    if rows * columns > limit:
        if columns > rows:
            columns = limit // rows
        else:
            rows = limit // columns
    return max(1, rows), max(1, columns)


def cut(pixels_HW3: NDArray[np.uint8], vision: VisionConfig) -> Crops:
    """The crops of an upright RGB image. Resizing is Lanczos on uint8; the aspect is not kept."""
    height, width = pixels_HW3.shape[:2]
    size = vision.crop_size
    rows, columns = tiling(width, height, vision)
    image = Image.fromarray(np.ascontiguousarray(pixels_HW3))
    views = [_resized(image, size, size)]
    if (rows, columns) != (1, 1):
        whole = _resized(image, *enlarged(rows, columns, vision))
        views += [
            whole[top : top + size, left : left + size] for top, left in window_corners(rows, columns, vision)
        ]
    return Crops(pixels=np.stack(views), rows=rows, columns=columns)


def enlarged(rows: int, columns: int, vision: VisionConfig) -> tuple[int, int]:
    """Width and height of the copy that ``rows`` × ``columns`` local crops are cut from."""
    margins, window = _extents(vision)
    return columns * window + margins, rows * window + margins


def window_corners(rows: int, columns: int, vision: VisionConfig) -> list[tuple[int, int]]:
    """Top and left of each local crop in that copy, row by row."""
    _, window = _extents(vision)
    return [(i * window, j * window) for i in range(rows) for j in range(columns)]


def _extents(vision: VisionConfig) -> tuple[int, int]:
    """Pixels of both margins together, and of the window between them."""
    margins = 2 * vision.overlap_margin * vision.enc_patch_size
    return margins, vision.crop_size - margins


def _resized(image: Image.Image, width: int, height: int) -> NDArray[np.uint8]:
    """Width first, as ``ops.resize_crops``: Pillow 13 sometimes goes height first, and then rounds otherwise."""
    wide = image.resize((width, image.height), Image.Resampling.LANCZOS)
    return np.asarray(wide.resize((width, height), Image.Resampling.LANCZOS))
