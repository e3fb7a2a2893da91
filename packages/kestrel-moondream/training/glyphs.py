"""Atlases of signed distances: one sprite per shape and per letter, negative inside.

Shape sprites span [-EXTENT, EXTENT] of the shape's half size; their distances are in half sizes.
Letters come from Pillow's built-in font (Aileron, CC0); their distances are in atlas pixels.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .phrases import LETTERS, SHAPES

SPRITE = 64
EXTENT = 1.3
CELL_H, CELL_W = 40, 32
FINE = 4  # letters are drawn this much larger before their distances are taken


def _outline(kind: str) -> Tensor:
    """Polygon [N, 2] of a shape in half sizes, y down."""
    if kind == "square":
        return 0.88 * torch.tensor([[-1.0, -1], [1, -1], [1, 1], [-1, 1]])
    if kind == "triangle":
        return torch.tensor([[0.0, -1], [1, 0.85], [-1, 0.85]])
    if kind == "diamond":
        return torch.tensor([[0.0, -1], [0.68, 0], [0, 1], [-0.68, 0]])
    if kind == "cross":
        w = 0.32
        corners = [(-w, -1), (w, -1), (w, -w), (1, -w), (1, w), (w, w), (w, 1), (-w, 1), (-w, w), (-1, w), (-1, -w),
                   (-w, -w)]  # fmt: skip
        return torch.tensor(corners)
    if kind == "star":
        angles = torch.arange(10) * math.pi / 5 - math.pi / 2
        radius = torch.where(torch.arange(10) % 2 == 0, 1.0, 0.42)
        return torch.stack([radius * angles.cos(), radius * angles.sin()], 1)
    t = torch.linspace(0, 2 * math.pi, 129)[:-1]
    if kind == "heart":
        x = 16 * t.sin() ** 3
        y = 13 * t.cos() - 5 * (2 * t).cos() - 2 * (3 * t).cos() - (4 * t).cos()
        return torch.stack([x / 17, -(y + 2.5) / 15], 1)
    return torch.stack([t.cos(), t.sin()], 1)


def _polygon_sdf(points: Tensor, polygon: Tensor) -> Tensor:
    """Signed distances [P] of points [P, 2] to a closed polygon (even-odd rule inside)."""
    a, b = polygon, polygon.roll(-1, 0)
    edge, rel = (b - a)[None], points[:, None] - a[None]
    t = ((rel * edge).sum(-1) / (edge * edge).sum(-1)).clamp(0, 1)
    distance = (rel - t[..., None] * edge).norm(dim=-1).amin(1)
    px, py = points[:, None, 0], points[:, None, 1]
    crosses = (a[:, 1] > py) != (b[:, 1] > py)
    x_at = a[:, 0] + (py - a[:, 1]) * (b[:, 0] - a[:, 0]) / (b[:, 1] - a[:, 1] + 1e-9)
    inside = (crosses & (px < x_at)).sum(1) % 2 == 1
    return torch.where(inside, -distance, distance)


@lru_cache(maxsize=1)
def shape_sprites() -> Tensor:
    """Signed distances [shapes, SPRITE, SPRITE]."""
    axis = ((torch.arange(SPRITE) + 0.5) / SPRITE * 2 - 1) * EXTENT
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(-1, 2)
    sprites = []
    for kind in SHAPES:
        sdf = (
            (points.norm(dim=-1) - 0.78).abs() - 0.22
            if kind == "ring"
            else _polygon_sdf(points, _outline(kind))
        )
        sprites.append(sdf.reshape(SPRITE, SPRITE))
    return torch.stack(sprites)


def shape_hulls() -> Tensor:
    """Outline points [shapes, 128, 2] in half sizes, for tight boxes of rotated shapes."""
    hulls = []
    for kind in SHAPES:
        polygon = _outline(kind)
        hulls.append(polygon.repeat(math.ceil(128 / len(polygon)), 1)[:128])
    return torch.stack(hulls)


def _letter(char: str, font: ImageFont.FreeTypeFont, bold: int) -> Tensor:
    height, width = CELL_H * FINE, CELL_W * FINE
    image = Image.new("L", (width, height))
    draw = ImageDraw.Draw(image)
    draw.text((width / 2, height * 0.78), char, fill=255, font=font, anchor="ms", stroke_width=bold)
    mask = torch.tensor(list(image.tobytes()), dtype=torch.uint8).reshape(height, width) > 127
    padded = torch.nn.functional.pad(mask, (1, 1, 1, 1))
    core = padded[1:-1, 1:-1]
    same = (padded[:-2, 1:-1] == core) & (padded[2:, 1:-1] == core)
    same &= (padded[1:-1, :-2] == core) & (padded[1:-1, 2:] == core)
    edges = (~same).nonzero().float() + 0.5
    ys = (torch.arange(CELL_H).float() + 0.5) * FINE
    xs = (torch.arange(CELL_W).float() + 0.5) * FINE
    points = torch.stack(torch.meshgrid(ys, xs, indexing="ij"), -1).reshape(-1, 2)
    distance = torch.cdist(points, edges).amin(1).reshape(CELL_H, CELL_W) / FINE
    inside = mask.reshape(CELL_H, FINE, CELL_W, FINE).float().mean((1, 3)) > 0.5
    return torch.where(inside, -distance, distance)


@lru_cache(maxsize=1)
def letter_sprites() -> Tensor:
    """Signed distances [2 weights, 1 + letters, CELL_H, CELL_W]; index 0 is blank, weight 1 is bold."""
    font = ImageFont.load_default(size=36 * FINE)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError(
            "Pillow was built without FreeType, so it has no scalable font; install a full Pillow."
        )
    blank = torch.full((CELL_H, CELL_W), 20.0)
    faces = [torch.stack([blank, *(_letter(c, font, bold * FINE) for c in LETTERS)]) for bold in (0, 1)]
    return torch.stack(faces)
