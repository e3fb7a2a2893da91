"""Media items made ready for the encoder: crops of an image, exact floats of a spatial reference; and their digests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.media import begin_digest, content_digest
from kestrel.spi import FloatsItem, ImageItem
from kestrel.types import Prepared
from kestrel_moondream.config import VisionConfig
from kestrel_moondream.crops import cut, tiling
from kestrel_moondream.pictures import LARGEST_BYTES, picture_tensors

__all__ = ["BOX", "IMAGE", "POINT", "prepare_image", "prepare_spatial"]

IMAGE, POINT, BOX = "image", "point", "box"
VERSION = b"kestrel-moondream/3"  # raised when preparation changes what the encoder sees


def prepare_image(
    item: ImageItem,
    vision: VisionConfig,
    settings: Mapping[str, Any],
    *,
    by_device: bool = False,
    pins: bool = False,
) -> Prepared:
    """The crops of ``item``, or with ``by_device`` what a device cuts them from (``pins``: in memory that it reads by
    itself), unless it is very large.

    Raises InvalidMediaError for an array that is no image.
    """
    for name in ("min_pixels", "max_pixels"):
        if settings.get(name) is not None:
            raise InvalidRequestError(f"Moondream cuts every image into crops of one size; leave {name} out")
    pixels = item.pixels
    if (
        pixels.dtype != np.uint8
        or pixels.ndim != 3
        or pixels.shape[2] != vision.in_channels
        or not pixels.size
    ):
        raise InvalidMediaError(
            f"an image array is {pixels.dtype} {pixels.shape}; Moondream takes uint8 [height, width, 3], none of them 0"
        )
    height, width = pixels.shape[:2]
    if by_device and pixels.size <= LARGEST_BYTES:
        rows, columns = tiling(width, height, vision)
        digest = _begin_digest(np.ascontiguousarray(pixels), (rows, columns), vision)
        tensors = picture_tensors(pixels, vision, pins=pins)
        count = 1 if rows * columns == 1 else 1 + rows * columns
    else:
        crops = cut(pixels, vision)
        rows, columns, count = crops.rows, crops.columns, len(crops.pixels)
        digest = _begin_digest(crops.pixels, (rows, columns), vision)
        tensors = {"crops": torch.from_numpy(crops.pixels)}
    return Prepared(
        kind=IMAGE,
        digest=digest(),
        num_positions=vision.num_positions,
        tensors=tensors,
        meta={"width": width, "height": height, "tiling": (rows, columns), "crops": count},
        cost=count,
    )


def _begin_digest(
    content: NDArray[np.uint8], tiles: tuple[int, int], vision: VisionConfig
) -> Callable[[], bytes]:
    """What gives the digest of ``content``, whose shape and crops count too."""
    geometry = (content.shape, *tiles, vision.crop_size, vision.enc_patch_size, vision.overlap_margin)
    return begin_digest(VERSION, IMAGE.encode(), repr(geometry).encode(), content)


def prepare_spatial(item: FloatsItem) -> Prepared:
    """A point (x, y) or a box (x_min, y_min, x_max, y_max) as what stands in the prompt.

    ``values`` [n, 2] float64, one row per position: (x, ·) and (y, ·) of the point or the box's centre, then a box's
    (width, height).
    """
    values = item.values
    wanted = {POINT: 2, BOX: 4}[item.kind]
    if len(values) != wanted or not all(math.isfinite(v) and 0 <= v <= 1 for v in values):
        raise InvalidRequestError(f"a spatial {item.kind} is {values}; give {wanted} numbers from 0 to 1")
    if item.kind == POINT:
        rows = [(values[0], 0.0), (values[1], 0.0)]
    else:
        x0, y0, x1, y1 = values
        if x0 > x1 or y0 > y1:
            raise InvalidRequestError(f"a spatial box is {values}; give x_min <= x_max and y_min <= y_max")
        rows = [((x0 + x1) / 2, 0.0), ((y0 + y1) / 2, 0.0), (x1 - x0, y1 - y0)]
    tensor = torch.tensor(rows, dtype=torch.float64)
    return Prepared(
        kind=item.kind,
        digest=content_digest(VERSION, item.kind.encode(), tensor.numpy().tobytes()),
        num_positions=len(rows),
        tensors={"values": tensor},
        meta={"values": tuple(values)},
    )
