"""Pictures from scenes: [B, 3, H, W] in 0..1, rounded to 8 bits, and the crops that the model sees.

Everything is drawn from signed distances with one pixel of smoothing. All scenes of a call share one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import phrases as p
from .glyphs import CELL_H, CELL_W, EXTENT, letter_sprites, shape_sprites
from .scenes import LINE_CELLS, S, Sampler, Scenes

LUMA_TABLE = [
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51,
    87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103, 99,
]  # fmt: skip  # ITU-T T.81, table K.1
Paint = Callable[..., Tensor]
YCC = [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]]  # ITU-T T.871
RGB = [[1.0, 0.0, 1.402], [1.0, -0.344136, -0.714136], [1.0, 1.772, 0.0]]


class Renderer:
    """Draws scenes on one device; textures and artefacts come from the sampler's generator.

    ``compiled`` fuses the painting functions below; the pictures are the same up to rounding.
    """

    def __init__(self, sampler: Sampler, *, compiled: bool = False) -> None:
        self.sampler, device = sampler, sampler.device
        self.shapes, self.letters = shape_sprites().to(device), letter_sprites().to(device)
        k = torch.arange(8, dtype=torch.float32)
        dct = (math.pi / 8 * (k[None] + 0.5) * k[:, None]).cos() * torch.where(k == 0, 0.125, 0.25).sqrt()[
            :, None
        ]
        self.dct = torch.kron(dct, dct).to(device)
        self.table = torch.tensor(LUMA_TABLE, dtype=torch.float32, device=device)

        self.grids: dict[tuple[int, int], tuple[Tensor, ...]] = {}

        def maybe(function: Paint) -> Paint:
            return torch.compile(function, dynamic=True) if compiled else function

        self.paint_background, self.paint_shape = maybe(paint_background), maybe(paint_shape)
        self.paint_line, self.quantise = maybe(paint_line), maybe(quantise)

    def draw(self, scenes: Scenes, height: int, width: int) -> Tensor:
        """Pictures [B, 3, height, width] with values k/255; ``scenes.size`` must be (height, width)."""
        s, b = self.sampler, len(scenes.size)
        size, x, y = self._pixels(height, width)
        image = self._background(scenes, height, width, x, y)
        for i in range(S):
            kind = scenes.shape_kind[:, i].contiguous()
            sprite = self.shapes[kind.clamp(0, len(p.SHAPES) - 1)][:, None]
            look = torch.stack([s.between(-0.12, 0.12, b), (s.rand(b) < 0.25) * 0.45], 1)
            place = torch.cat(
                [scenes.shape_center[:, i] * size, scenes.shape_half[:, i], scenes.shape_angle[:, i, None]], 1
            )
            image = self.paint_shape(
                image, sprite, kind, scenes.shape_rgb[:, i].contiguous(), place, look, x, y
            )
        on_axis = (x > width * 0.04) & (x < width * 0.96)
        for i in range(2):
            glyphs = self.letters[scenes.line_bold[:, i, None], scenes.line_letters[:, i]]
            strip = glyphs.permute(0, 2, 1, 3).reshape(b, 1, CELL_H, LINE_CELLS * CELL_W)
            base = torch.where(scenes.is_chart & (i == 0), scenes.box[:, 0, 3] * height, -9.0)
            box = scenes.line_box[:, i] * size.repeat(2)
            share = scenes.line_cells[:, i] / LINE_CELLS
            image = self.paint_line(
                image, strip, share, box, scenes.line_rgb[:, i].contiguous(), base, on_axis, x, y
            )
        return self._artefacts(image.unflatten(2, (height, width)))

    def _pixels(self, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Size (width, height) and the x and y [P] of pixel centres, kept on the device per size."""
        if (height, width) not in self.grids:
            rows, columns = torch.arange(height).float() + 0.5, torch.arange(width).float() + 0.5
            y, x = torch.meshgrid(rows, columns, indexing="ij")
            parts = (torch.tensor([width, height]), x.flatten(), y.flatten())
            self.grids[height, width] = tuple(part.to(self.sampler.device) for part in parts)
        size, x, y = self.grids[height, width]
        return size, x, y

    def _background(self, scenes: Scenes, height: int, width: int, x: Tensor, y: Tensor) -> Tensor:
        b, s = len(scenes.size), self.sampler
        photo = s.rand(b, 1, 1, 1) < 0.35
        textures = []
        for cells, strength in ((3, 0.16), (9, 0.10), (40, 0.07)):
            gray = s.rand(b, 1, 1, 1) < 0.5
            noise = s.between(-1, 1, b, 3, cells, cells)
            noise = torch.where(gray, noise[:, :1], noise) * (strength * s.rand(b, 1, 1, 1) * photo)
            textures.append(F.interpolate(noise, (height, width), mode="bilinear").flatten(2).clone())
        angle = s.rand(b) * 2 * math.pi
        u, v = x / width - 0.5, y / height - 0.5
        return self.paint_background(
            scenes.background.contiguous(), angle, u, v, textures[0], textures[1], textures[2]
        )

    def _artefacts(self, image: Tensor) -> Tensor:
        """Sensor noise, then 8×8 DCT quantisation as JPEG does, each on a share of the pictures."""
        s, (b, _, height, width) = self.sampler, image.shape
        sigma = s.rand(b) * 0.045 * (s.rand(b) < 0.5)
        quality = s.between(25, 92, b)
        factor = torch.where(quality < 50, 50 / quality, 2 - quality / 50) / 255
        factor = torch.where(s.rand(b) < 0.5, factor, 1e-3)
        image = F.pad(image, (0, -width % 8, 0, -height % 8), mode="replicate")
        blocks = image.unflatten(2, (-1, 8)).unflatten(4, (-1, 8)).permute(0, 1, 2, 4, 3, 5)
        grid = blocks.shape[2:4]
        blocks = blocks.reshape(b, 3, -1, 64)
        noise = torch.randn(blocks.shape, generator=s.rng, device=s.device)
        planes = (
            self.quantise(blocks, noise, sigma, factor, self.dct, self.table)
            .unflatten(2, grid)
            .unflatten(4, (8, 8))
        )
        return planes.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)[..., :height, :width]


# The painting functions work on pixels [B, 3, P] in one row, so that one compilation serves every picture size.


def paint_background(
    ends: Tensor, angle: Tensor, u: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """A gradient between two colours [B, 2, 3] along ``angle`` plus three textures."""
    angle = angle[:, None, None]
    t = (0.5 + 0.7 * (u * angle.cos() + v * angle.sin())).clamp(0, 1)
    start, end = ends[:, 0, :, None], ends[:, 1, :, None]
    return start + t * (end - start) + a + b + c


def paint_shape(
    image: Tensor,
    sprite: Tensor,
    kind: Tensor,
    rgb: Tensor,
    place: Tensor,
    look: Tensor,
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """The picture with one shape or bar each: ``place`` [B, 5] is centre, half sizes (pixels) and angle.

    ``look`` [B, 2] is the shading from top to bottom and the darkness of a border.
    """
    cx, cy, half_x, half_y, angle = place[..., None].unbind(1)
    half_x, half_y = half_x.clamp(min=0.5), half_y.clamp(min=0.5)
    dx, dy = x - cx, y - cy
    u, v = (dx * angle.cos() + dy * angle.sin()) / half_x, (dy * angle.cos() - dx * angle.sin()) / half_y
    grid = (torch.stack([u, v], -1) / EXTENT)[:, None]
    distance = F.grid_sample(sprite, grid, padding_mode="border", align_corners=False)[:, 0, 0] * half_x
    box = torch.maximum((u.abs() - 1) * half_x, (v.abs() - 1) * half_y)
    distance = torch.where((kind == p.BAR)[:, None], box, distance)
    alpha = ((0.5 - distance).clamp(0, 1) * (kind >= 0)[:, None])[:, None]
    shading = 1 + look[:, 0, None, None] * v[:, None].clamp(-1, 1)
    border = look[:, 1, None, None] * (distance[:, None] + 1.6).clamp(0, 1)
    return image + alpha * (rgb[..., None] * shading * (1 - border) - image)


def paint_line(
    image: Tensor, strip: Tensor, share: Tensor, box: Tensor, rgb: Tensor, base: Tensor, on_axis: Tensor, x: Tensor,
    y: Tensor,
) -> Tensor:  # fmt: skip
    """The picture with the first ``share`` of a strip of letters in ``box`` (pixels), and an axis below ``base``."""
    x0, y0, x1, y1 = box[..., None].unbind(1)
    across, down = (x - x0) / (x1 - x0).clamp(min=1), (y - y0) / (y1 - y0).clamp(min=1)
    inside = (across > 0) & (across < 1) & (down > 0) & (down < 1)
    grid = torch.stack([across * share[:, None] * 2 - 1, down * 2 - 1], -1)[:, None]
    distance = F.grid_sample(strip, grid, padding_mode="border", align_corners=False)[:, 0, 0]
    alpha = (0.5 - distance * (y1 - y0) / CELL_H).clamp(0, 1) * inside
    axis = ((y - base[:, None] - 1).abs() < 1) & on_axis
    alpha = torch.where(axis, 1.0, alpha)[:, None]
    return image + alpha * (rgb[..., None] - image)


def quantise(
    blocks: Tensor, noise: Tensor, sigma: Tensor, factor: Tensor, dct: Tensor, table: Tensor
) -> Tensor:
    """8×8 blocks [B, 3, N, 64] with noise of ``sigma`` [B], DCT coefficients rounded to ``factor`` [B] × ``table``."""
    ycc = _mix(YCC, blocks + sigma[:, None, None, None] * noise)
    step = factor[:, None, None, None] * table
    ycc = ((ycc @ dct.T / step).round() * step) @ dct
    return (_mix(RGB, ycc).clamp(0, 1) * 255).round() / 255


def _mix(matrix: list[list[float]], image: Tensor) -> Tensor:
    r, g, b = image.unbind(1)
    return torch.stack([row[0] * r + row[1] * g + row[2] * b for row in matrix], 1)


@lru_cache(maxsize=64)
def lanczos(size: int, target: int, device: torch.device) -> Tensor:
    """Resize weights [target, size] of the Lanczos filter (a = 3), widened when shrinking."""
    scale = max(size / target, 1.0)
    centers = (torch.arange(target, dtype=torch.float64) + 0.5) * size / target
    t = (torch.arange(size, dtype=torch.float64)[None] + 0.5 - centers[:, None]) / scale
    weights = torch.where(t.abs() < 3, torch.sinc(t) * torch.sinc(t / 3), 0.0)
    return (weights / weights.sum(1, keepdim=True)).float().to(device)


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """Lanczos resize of [B, 3, H, W] with values rounded to k/255 after each pass, as 8-bit images are."""
    if image.shape[-1] != width:
        weights = lanczos(image.shape[-1], width, image.device)
        image = ((image @ weights.T).clamp(0, 1) * 255).round() / 255
    if image.shape[-2] != height:
        weights = lanczos(image.shape[-2], height, image.device)
        image = ((weights @ image).clamp(0, 1) * 255).round() / 255
    return image
