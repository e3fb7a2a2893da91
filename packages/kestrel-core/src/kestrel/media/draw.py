"""Draws results on a picture: points and boxes in 0–1 coordinates of the upright original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

__all__ = ["annotate"]

# Distinct on light and dark, for colour-blind eyes too. Source: Okabe & Ito 2008, "Color Universal Design".
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")


def annotate(
    pixels: NDArray[np.uint8],
    *,
    points: Sequence[Mapping[str, float]] = (),
    boxes: Sequence[Mapping[str, float]] = (),
    labels: Sequence[str] = (),
) -> Image.Image:
    """A copy of ``pixels`` [H, W, 3] with results drawn on it.

    ``points``: {"x", "y"}; ``boxes``: {"x_min", "y_min", "x_max", "y_max"}; all 0–1. ``labels``: one for each box, then
    for each point; fewer are fine, "" draws none. Equal labels have one colour. Sizes follow the picture's.
    """
    image = Image.fromarray(pixels).convert("RGB")
    draw = ImageDraw.Draw(image)
    named = [*labels, *[""] * (len(boxes) + len(points) - len(labels))]
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(dict.fromkeys(named))}
    unit = max(2, round(min(image.size) / 160))
    for box, label in zip(boxes, named, strict=False):
        _box(draw, image.size, box, label, colours[label], unit)
    for point, label in zip(points, named[len(boxes) :], strict=False):
        _point(draw, image.size, point, label, colours[label], unit)
    return image


def _box(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    box: Mapping[str, float],
    label: str,
    colour: str,
    unit: int,
) -> None:
    left, right = sorted(_at(box[side], size[0]) for side in ("x_min", "x_max"))
    top, bottom = sorted(_at(box[side], size[1]) for side in ("y_min", "y_max"))
    draw.rectangle((left, top, right, bottom), outline=colour, width=unit)
    _label(draw, size, (left, top), label, colour, unit)


def _point(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    point: Mapping[str, float],
    label: str,
    colour: str,
    unit: int,
) -> None:
    x, y = _at(point["x"], size[0]), _at(point["y"], size[1])
    radius = 2 * unit
    draw.ellipse(
        (x - radius, y - radius, x + radius, y + radius),
        fill=colour,
        outline="white",
        width=max(1, unit // 2),
    )
    _label(draw, size, (x + radius, y + radius), label, colour, unit)


def _label(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    at: tuple[float, float],
    label: str,
    colour: str,
    unit: int,
) -> None:
    if not label:
        return
    font = ImageFont.load_default(size=max(10, 5 * unit))
    left, top, right, bottom = draw.textbbox((0, 0), label, font=font)
    x = max(0.0, min(at[0], size[0] - (right - left) - 2 * unit))
    y = max(0.0, min(at[1], size[1] - (bottom - top) - 2 * unit))
    draw.rectangle((x, y, x + right - left + 2 * unit, y + bottom - top + 2 * unit), fill=colour)
    draw.text(
        (x + unit - left, y + unit - top), label, font=font, fill="black" if colour == "#F0E442" else "white"
    )


def _at(share: float, extent: int) -> float:
    return min(max(share, 0.0), 1.0) * (extent - 1)
