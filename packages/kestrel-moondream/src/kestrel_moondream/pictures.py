"""Pictures that the device cuts into crops itself: their bytes, and tables that say what to make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.ops.resampling import CropPlan, crop_tables
from kestrel.spi import OpCall
from kestrel.types import Prepared
from kestrel_moondream.config import VisionConfig
from kestrel_moondream.crops import enlarged, tiling, window_corners

__all__ = ["LARGEST_BYTES", "crops_of", "inputs_of", "picture_tensors"]

LARGEST_BYTES = 3 << 25  # 33 megapixels; larger pictures are cut on the host, for they fill pinned memory
LARGEST_PINNED = 1 << 23
"""Bytes beyond which pinning takes longer than the copy that it saves; and what was pinned is kept."""

# Lengths are rounded up to these, so that pictures of like sizes share a program.
BYTE_STEP, TAP_STEP = 1 << 18, 8


def picture_tensors(
    pixels_HW3: NDArray[np.uint8], vision: VisionConfig, *, pins: bool = False
) -> dict[str, torch.Tensor]:
    """``pixels`` uint8 [N], filled up, and ``whole`` [1, F], ``local`` [rows, columns, F] (absent for a 1 × 1 tiling),
    ``starts`` [S] and ``weights`` [K, S] as ``ops.resize_crops`` takes them. Pictures of one size share the latter.
    ``pins``: in memory that a GPU reads by itself, unless it is a large one."""
    height, width = pixels_HW3.shape[:2]
    size = -(-pixels_HW3.size // BYTE_STEP) * BYTE_STEP
    pixels = torch.empty(size, dtype=torch.uint8, pin_memory=pins and size <= LARGEST_PINNED)
    pixels.numpy()[: pixels_HW3.size].reshape(pixels_HW3.shape)[...] = pixels_HW3
    pixels.numpy()[pixels_HW3.size :] = 0
    return {"pixels": pixels, **_tables(height, width, vision, pins=pins)}


@lru_cache(maxsize=64)
def _tables(height: int, width: int, vision: VisionConfig, *, pins: bool) -> Mapping[str, torch.Tensor]:
    size = vision.crop_size
    rows, columns = tiling(width, height, vision)
    plans = [CropPlan(source=(height, width), resized=(size, size))]
    if (rows, columns) != (1, 1):
        wide, high = enlarged(rows, columns, vision)
        plans += [
            CropPlan(source=(height, width), resized=(high, wide), top=top, left=left)
            for top, left in window_corners(rows, columns, vision)
        ]
    tables = crop_tables(plans, "lanczos")
    num_taps = -(-len(tables.weights_KS) // TAP_STEP) * TAP_STEP
    weights = torch.zeros(num_taps, len(tables.starts_S), dtype=torch.int32)
    weights[: len(tables.weights_KS)] = torch.from_numpy(tables.weights_KS)
    fields = torch.from_numpy(tables.crops_MF)
    found = {"starts": torch.from_numpy(tables.starts_S), "weights": weights, "whole": fields[:1]}
    if len(plans) > 1:
        found["local"] = fields[1:].unflatten(0, (rows, columns))
    return {name: table.contiguous().pin_memory() for name, table in found.items()} if pins else found


def inputs_of(item: Prepared) -> list[list[torch.Tensor]]:
    """What the encoder gets of one picture. Shapes say all that it has to know: the crops themselves as [1, …] and
    [rows, columns, …]; or bytes, ``starts``, ``weights``, and the fields of the crops in those two shapes."""
    tensors: Mapping[str, torch.Tensor] = item.tensors
    if "pixels" in tensors:
        return [
            [tensors[name]] for name in ("pixels", "starts", "weights", "whole", "local") if name in tensors
        ]
    crops = tensors["crops"]
    local = [[crops[1:].unflatten(0, item.meta["tiling"])]] if len(crops) > 1 else []
    return [[crops[:1]], *local]


def crops_of(
    inputs: Sequence[torch.Tensor], size: int, resize: OpCall | None
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """The crops [N, size, size, 3] of all pictures, and each one's tiling, of the inputs that ``inputs_of`` made."""
    crops: list[torch.Tensor] = []
    tilings: list[tuple[int, int]] = []
    at = 0
    while at < len(inputs):
        is_bytes = inputs[at].dim() == 1
        step = 4 if is_bytes else 1
        whole = inputs[at + step - 1]
        has_local = at + step < len(inputs) and inputs[at + step].dim() == whole.dim() + 1
        local = inputs[at + step] if has_local else None
        parts = [whole] if local is None else [whole, local.flatten(0, 1)]
        if is_bytes:
            assert resize is not None, "pictures were left to a device that cannot resize them"
            pixels, starts, weights = inputs[at : at + 3]
            crops.append(resize(pixels, torch.cat(parts), starts, weights, (size, size)))
        else:
            crops += parts
        tilings.append((1, 1) if local is None else (local.shape[0], local.shape[1]))
        at += step + has_local
    return torch.cat(crops), tilings
