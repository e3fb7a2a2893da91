"""Overlap crops: the tiling rule, batched crops on a device, and the same crops through Pillow for one picture."""

from __future__ import annotations

import math

import torch
from PIL import Image
from torch import Tensor

from .model import NanoConfig
from .render import resize


def tiling(height: int, width: int, c: NanoConfig) -> tuple[int, int]:
    """Rows and columns of local crops for a picture."""
    margins = 2 * c.overlap_margin * c.enc_patch_size
    window = c.crop_size - margins
    h, w = max(1, height - margins), max(1, width - margins)
    if h <= window or w <= window:
        return 1, 1
    rows, columns = math.ceil(h / window), math.ceil(w / window)
    if rows * columns > c.max_crops:
        shrink = math.sqrt(c.max_crops / (rows * columns))
        return max(1, math.floor(rows * shrink)), max(1, math.floor(columns * shrink))
    rows = max(rows, math.floor(math.sqrt(c.max_crops * h / w)))
    columns = max(columns, math.floor(math.sqrt(c.max_crops * w / h)))
    if rows * columns > c.max_crops:
        if columns > rows:
            columns = c.max_crops // rows
        else:
            rows = c.max_crops // columns
    return max(1, rows), max(1, columns)


def _tiled_size(tiles: tuple[int, int], c: NanoConfig) -> tuple[int, int]:
    margins = 2 * c.overlap_margin * c.enc_patch_size
    window = c.crop_size - margins
    return tiles[0] * window + margins, tiles[1] * window + margins


def _windows(image: Tensor, tiles: tuple[int, int], c: NanoConfig) -> list[Tensor]:
    window, side = c.crop_size - 2 * c.overlap_margin * c.enc_patch_size, c.crop_size
    places = [(i * window, j * window) for i in range(tiles[0]) for j in range(tiles[1])]
    return [image[..., y : y + side, x : x + side] for y, x in places]


def batch_crops(images: Tensor, c: NanoConfig) -> tuple[Tensor, tuple[int, int]]:
    """Crops [B, 1 or 1 + tiles, 3, side, side] in -1..1 of pictures [B, 3, H, W] in 0..1, and the tiling."""
    tiles = tiling(images.shape[-2], images.shape[-1], c)
    crops = [resize(images, c.crop_size, c.crop_size)]
    if tiles != (1, 1):
        crops += _windows(resize(images, *_tiled_size(tiles, c)), tiles, c)
    return torch.stack(crops, 1) * 2 - 1, tiles


def picture_crops(image: Image.Image, c: NanoConfig) -> tuple[Tensor, tuple[int, int]]:
    """Crops [1, 1 + tiles, 3, side, side] in -1..1 of one picture, resized by Pillow on 8 bits."""
    tiles = tiling(image.height, image.width, c)
    whole = _pixels(image.resize((c.crop_size, c.crop_size), Image.Resampling.LANCZOS))
    height, width = _tiled_size(tiles, c)
    local = _windows(_pixels(image.resize((width, height), Image.Resampling.LANCZOS)), tiles, c)
    return torch.stack([whole, *local])[None] / 255 * 2 - 1, tiles


def _pixels(image: Image.Image) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return pixels.reshape(image.height, image.width, 3).permute(2, 0, 1).float()
