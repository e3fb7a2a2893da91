"""Pictures as rows of patches: resized, cut, in the order in which the tower merges them.

Values stay bytes; the driver scales them on its device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.spi import ImageItem
from kestrel.types import Prepared
from kestrel_qwen.resize import image_size, pixel_budget
from kestrel_qwen.slices import IMAGE, units

if TYPE_CHECKING:
    from kestrel_qwen.config import QwenConfig, VisionConfig

__all__ = ["check_pixels", "digest_of", "patch_rows", "prepare_image", "resized", "vision_of"]

VERSION = b"kestrel-qwen/1"  # raised when preparation changes what the tower sees


def prepare_image(item: ImageItem, settings: Mapping[str, Any], config: QwenConfig) -> Prepared:
    """The patches of ``item``: uint8 [h · w, C · T · p · p] and its grid (1, h, w).

    InvalidMediaError for an array that is no picture, or one too long and thin. InvalidRequestError for pixel
    limits that contradict each other.
    """
    vision = vision_of(config, IMAGE)
    check_pixels(item.pixels)
    low, high = pixel_budget(settings, config.images.min_pixels, config.images.max_pixels, vision.factor)
    height, width = item.pixels.shape[:2]
    size = image_size(height, width, vision.factor, low, high)
    pixels = resized(item.pixels, size)
    patches = patch_rows(np.stack([pixels] * vision.temporal_patch_size), vision)
    rows, columns = (side // vision.patch_size for side in size)
    return Prepared(
        kind=IMAGE,
        digest=digest_of(pixels),
        num_positions=rows * columns // vision.spatial_merge_size**2,
        tensors={"patches": torch.from_numpy(patches), "grid": torch.tensor([[1, rows, columns]])},
        meta={"width": width, "height": height, "resized": (size[1], size[0])},
        cost=units(rows * columns),
    )


def vision_of(config: QwenConfig, kind: str) -> VisionConfig:
    """The vision part of ``config``; InvalidRequestError for a text-only model."""
    if config.vision is None:
        raise InvalidRequestError(f"this Qwen is a text-only model; it was given {kind!r}. Leave it out")
    return config.vision


def check_pixels(pixels: NDArray[np.uint8]) -> None:
    """InvalidMediaError unless ``pixels`` are uint8 [H, W, 3] and not empty."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise InvalidMediaError(
            f"a picture is an array {pixels.dtype} {list(pixels.shape)}; Qwen takes uint8 [height, width, 3], none of "
            "them 0"
        )


def resized(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """``pixels`` at ``size`` (height, width), bicubic and antialiased, rounded to bytes."""
    if pixels.shape[:2] == size:
        return pixels
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BICUBIC))


def patch_rows(frames: NDArray[np.uint8], vision: VisionConfig) -> NDArray[np.uint8]:
    """Patches [t · h · w, C · T · p · p] of ``frames`` [t · T, H, W, C], merged block by merged block.

    A row holds one patch as (channel, frame, pixel row, pixel column); rows go by (slice, block row, block column,
    row in block, column in block).
    """
    count, height, width, channels = frames.shape
    span, side, merge = vision.temporal_patch_size, vision.patch_size, vision.spatial_merge_size
    rows, columns = height // (side * merge), width // (side * merge)
    blocks = frames.reshape(count // span, span, rows, merge, side, columns, merge, side, channels)
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    patches: NDArray[np.uint8] = ordered.reshape(-1, channels * span * side * side)
    return patches


def digest_of(pixels: NDArray[np.uint8]) -> bytes:
    """SHA-256 over resized pixels (from which patches follow), their shape, and the version of the preparation."""
    found = hashlib.sha256(VERSION)
    found.update(repr(pixels.shape).encode())
    found.update(np.ascontiguousarray(pixels).data)
    return found.digest()
