"""Sizes that pictures and frames are resized to: multiples of a position's side, within a budget of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kestrel.errors import InvalidMediaError, InvalidRequestError

__all__ = ["clip_size", "image_size", "pixel_budget"]

MAX_ASPECT = 200  # published preprocessing refuses what is longer


def pixel_budget(settings: Mapping[str, Any], low: int, high: int, factor: int) -> tuple[int, int]:
    """Least and most pixels: the request's, else the checkpoint's ``low`` and ``high``, which give way to them."""
    asked_low, asked_high = settings.get("min_pixels"), settings.get("max_pixels")
    if asked_high is not None and asked_high < factor * factor:
        raise InvalidRequestError(
            f"max_pixels is {asked_high}; this model's smallest picture has {factor} × {factor} = {factor * factor} "
            "pixels. Raise it"
        )
    if asked_low is not None and asked_high is not None and asked_low > asked_high:
        raise InvalidRequestError(
            f"min_pixels is {asked_low}, more than max_pixels {asked_high}. Change one of them"
        )
    if asked_low is not None and asked_high is None and asked_low > high:
        raise InvalidRequestError(
            f"min_pixels is {asked_low}, more than the {high} pixels that the checkpoint resizes to at most. "
            "Lower it, or give max_pixels too"
        )
    high = high if asked_high is None else asked_high
    return (min(low, high) if asked_low is None else asked_low), high


def image_size(height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """Height and width of a resized picture: multiples of ``factor``, ``low`` to ``high`` pixels where possible.

    Raises InvalidMediaError for a picture more than 200 times as long as wide. Halves round to even.
    """
    _check_aspect(height, width)
    return _fitted(1, 1, height, width, factor, low, high)


def clip_size(frames: int, height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """As ``image_size`` for every frame of a clip, whose pixels are counted over all ``frames`` (at least 2)."""
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    return _fitted(frames, 2 * round(frames / 2), height, width, factor, low, high)


def _fitted(
    frames: int, rounded_frames: int, height: int, width: int, factor: int, low: int, high: int
) -> tuple[int, int]:
    rounded = [round(side / factor) * factor for side in (height, width)]
    pixels = rounded_frames * math.prod(rounded)
    if pixels > high:
        shrink = math.sqrt(frames * height * width / high)
        rounded = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif pixels < low:
        grow = math.sqrt(low / (frames * height * width))
        rounded = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return rounded[0], rounded[1]


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidMediaError(
            f"the picture is {width} × {height}, more than {MAX_ASPECT} times as long as wide. Crop it"
        )
