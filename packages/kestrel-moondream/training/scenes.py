"""Scenes as batched tensors: what is drawn where, sampled on any device.

Letters in names: B scenes, S drawn shape slots, E entities (two texts, then S shapes or bars), in reading order.
Centres and boxes are fractions of the picture; half sizes are pixels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from . import phrases as p
from .glyphs import CELL_H, CELL_W, shape_hulls

S = 6
E = S + 2
MAX_LETTERS = 5
LINE_CELLS = 10
# (height, width) of pictures; of the elongated ones, the last two fall into two tiles.
COMPACT = [(196, 196), (224, 224), (256, 256), (192, 256), (256, 192), (240, 320), (320, 240), (144, 288), (288, 144),
            (168, 224), (320, 320), (160, 256)]  # fmt: skip
ELONGATED = [(224, 448), (448, 224), (208, 512), (480, 240)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Constant tensors on the sampling device."""

    rgb: Tensor  # [colours, 3], 0..1
    hulls: Tensor  # [shapes, points, 2]
    words: Tensor  # [words, MAX_LETTERS] lower-case letters 0..25, -1 past the end

    @classmethod
    def on(cls, device: torch.device) -> Tables:
        rgb = torch.tensor([p.COLORS[name] for name in p.COLOR_NAMES], dtype=torch.float32) / 255
        words = torch.full((len(p.WORDS), MAX_LETTERS), -1)
        for row, word in enumerate(p.WORDS):
            words[row, : len(word)] = torch.tensor([ord(c) - ord("a") for c in word])
        return cls(rgb=rgb.to(device), hulls=shape_hulls().to(device), words=words.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenes:
    """B scenes; kind and colour are indices into ``phrases.KINDS`` and ``COLOR_NAMES``, kind -1 is an empty slot."""

    size: Tensor  # [B, 2] height, width
    is_chart: Tensor  # [B]
    background: Tensor  # [B, 2, 3] two ends of a gradient
    shape_kind: Tensor  # [B, S] in drawing order
    shape_rgb: Tensor  # [B, S, 3]
    shape_center: Tensor  # [B, S, 2] x, y
    shape_half: Tensor  # [B, S, 2]
    shape_angle: Tensor  # [B, S]
    line_box: Tensor  # [B, 2, 4] x0 y0 x1 y1
    line_letters: Tensor  # [B, 2, LINE_CELLS] 0 blank, else 1 + index into LETTERS
    line_cells: Tensor  # [B, 2], 0 draws nothing
    line_bold: Tensor  # [B, 2]
    line_rgb: Tensor  # [B, 2, 3]
    kind: Tensor  # [B, E]
    color: Tensor  # [B, E]
    center: Tensor  # [B, E, 2]
    box: Tensor  # [B, E, 4]
    text: Tensor  # [B, 2, MAX_LETTERS] word and number as LINE letters, 0 past the end
    bar_letter: Tensor  # [B, E] label under a bar, 0 for others
    bar_height: Tensor  # [B, E], 0 for others

    def __getitem__(self, rows: slice | Tensor) -> Scenes:
        return Scenes(**{f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)})

    def to(self, device: torch.device) -> Scenes:
        return Scenes(**{f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self)})


class Sampler:
    """Draws scenes with one generator; the same seed, device and call order give the same scenes."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.tables = Tables.on(device)
        self.rng = torch.Generator(device).manual_seed(seed)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.rng, device=self.device)

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * self.rand(*shape)

    def below(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self.rng, device=self.device)

    def pick(self, allowed: Tensor) -> Tensor:
        """A random index of a true entry in the last dimension (0 when there is none)."""
        return (allowed.float() * self.between(0.1, 1, *allowed.shape)).argmax(-1)

    def scenes(self, sizes: Tensor) -> Scenes:
        """One scene per row of ``sizes`` [B, 2] (height, width)."""
        b = len(sizes)
        sizes = sizes.to(self.device).float()
        is_chart = self.rand(b) < 0.22
        background, contrast = self._backgrounds(b)
        lines, line_half, text = self._texts(sizes, is_chart)
        shapes = _where(
            is_chart,
            self._bars(sizes, contrast),
            self._shapes(sizes, contrast, lines["cells"] > 0, line_half),
        )
        labels = self._labels(shapes, sizes, is_chart)
        line_center = torch.where(is_chart[:, None, None], labels["center"], shapes["line_center"])
        line_half = torch.where(is_chart[:, None, None], labels["half"], line_half)
        letters = torch.where(is_chart[:, None, None], labels["letters"], lines["letters"])
        cells = torch.where(is_chart[:, None], labels["cells"], lines["cells"] * shapes["line_fits"])
        text = text * (shapes["line_fits"] * ~is_chart[:, None])[..., None]
        line_color = self.pick(contrast[:, None].expand(b, 2, -1))
        line_box = torch.cat([line_center - line_half, line_center + line_half], -1)
        placed = Scenes(
            size=sizes, is_chart=is_chart, background=background, shape_kind=shapes["kind"],
            shape_rgb=self._shades(shapes["color"]), shape_center=shapes["center"], shape_half=shapes["half"],
            shape_angle=shapes["angle"], line_box=line_box, line_letters=letters, line_cells=cells,
            line_bold=self.below(2, b, 2), line_rgb=self._shades(line_color),
            kind=torch.cat([torch.where(text[..., 0] > 0, torch.tensor([p.WORD, p.NUMBER], device=self.device), -1),
                            shapes["kind"]], 1),
            color=torch.cat([line_color, shapes["color"]], 1),
            center=torch.cat([line_center, shapes["center"]], 1),
            box=torch.cat([line_box, self._tight_boxes(shapes, sizes)], 1), text=text,
            bar_letter=torch.cat([torch.zeros_like(text[..., 0]), shapes["letter"]], 1),
            bar_height=torch.cat([torch.zeros_like(line_center[..., 0]), shapes["height"]], 1),
        )  # fmt: skip
        return _reading_order(placed)

    def _backgrounds(self, b: int) -> tuple[Tensor, Tensor]:
        """Gradient ends [B, 2, 3] and which colours stand out against them [B, colours]."""
        style = self.below(4, b)[:, None]
        light, dark, any_ = self.between(0.72, 1, b, 3), self.between(0, 0.28, b, 3), self.rand(b, 3)
        gray = self.rand(b, 1).expand(b, 3) * 0.9 + 0.05
        start = torch.where(
            style == 0, light, torch.where(style == 1, dark, torch.where(style == 2, any_, gray))
        )
        reach = self.rand(b, 1) * (self.rand(b, 1) < 0.6) * 0.3
        end = (start + reach * self.between(-1, 1, b, 3)).clamp(0, 1)
        ends = torch.stack([start, end], 1)
        distance = (ends[:, :, None] - self.tables.rgb).norm(dim=-1).amin(1)
        return ends, (distance > 0.48) | (distance >= distance.topk(4, -1).values[:, 3:])

    def _shades(self, color: Tensor) -> Tensor:
        jitter = self.between(-0.045, 0.045, *color.shape, 3) + self.between(-0.035, 0.035, *color.shape, 1)
        return (self.tables.rgb[color] + jitter).clamp(0, 1)

    def _texts(self, sizes: Tensor, is_chart: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """A word and a number per scene: line letters, half sizes as fractions, and their letters."""
        b = len(sizes)
        listed = self.tables.words[self.below(len(self.tables.words), b)]
        length = 2 + self.below(4, b, 1)
        invented = torch.where(
            torch.arange(MAX_LETTERS, device=self.device) < length, self.below(26, b, MAX_LETTERS), -1
        )
        word = torch.where(self.rand(b, 1) < 0.65, listed, invented)
        style = self.below(4, b, 1)  # two in four are capitals, one lower case, one capitalised
        first = torch.arange(MAX_LETTERS, device=self.device) == 0
        lower = (style == 0) | ((style == 1) & ~first)
        word = torch.where(word < 0, 0, 1 + word + torch.where(lower, 26, 0))
        digits = 1 + self.below(3, b)
        value = (self.rand(b) * 10.0**digits).long()
        places = torch.tensor([100, 10, 1], device=self.device)
        number = (value[:, None] // places) % 10
        count = (value[:, None] >= places).sum(1).clamp(min=1)
        number = torch.where(
            torch.arange(3, device=self.device) < count[:, None],
            number.gather(1, (torch.arange(3, device=self.device) + 3 - count[:, None]).clamp(max=2)),
            -1,
        )
        number = torch.nn.functional.pad(torch.where(number < 0, 0, 53 + number), (0, MAX_LETTERS - 3))  # fmt: skip
        text = torch.stack([word, number], 1)
        cells = (text > 0).sum(-1)
        present = (self.rand(b, 2) < 0.38) & ~is_chart[:, None]
        scale = sizes.prod(1).sqrt()[:, None]
        height = scale * self.between(0.12, 0.22, b, 2)
        width = height * CELL_W / CELL_H * cells * self.between(0.85, 1.1, b, 2)
        fit = (0.9 * sizes[:, 1:] / width).clamp(max=1)
        half = torch.stack([width * fit / sizes[:, 1:], height * fit.clamp(min=0.8) / sizes[:, :1]], -1) / 2
        letters = torch.nn.functional.pad(text, (0, LINE_CELLS - MAX_LETTERS))
        return {"letters": letters, "cells": cells * present}, half, text * present[..., None]

    def _shapes(
        self, sizes: Tensor, contrast: Tensor, has_line: Tensor, line_half: Tensor
    ) -> dict[str, Tensor]:
        """Free shapes, placed one after the other where they fit (texts first)."""
        b, scale = len(sizes), sizes.prod(1).sqrt()
        wanted = 1 + self.below(S, b)
        radius = scale[:, None] * self.between(0.065, 0.15, b, 1) * self.between(0.75, 1.3, b, S)
        half_px = torch.minimum(radius, 0.3 * sizes.amin(1)[:, None])[..., None].expand(b, S, 2)
        halves = torch.cat([line_half, half_px / sizes.flip(1)[:, None]], 1)
        present = torch.cat([has_line, torch.arange(S, device=self.device) < wanted[:, None]], 1)
        slack = torch.where(self.rand(b) < 0.3, 0.72, 1.04)[:, None]
        centers, fits = self._place(halves, present, slack)
        palette = contrast[:, None].expand(b, S, -1)
        color, kind = self.pick(palette), self.below(len(p.SHAPES), b, S)
        # Repeats make counting worth asking: some shapes copy the first one's kind or colour.
        color = torch.where(self.rand(b, S) < self.between(0, 0.7, b, 1), color[:, :1], color)
        kind = torch.where(self.rand(b, S) < self.between(0, 0.7, b, 1), kind[:, :1], kind)
        zeros = torch.zeros(b, S, device=self.device)
        return {"kind": torch.where(fits[:, 2:], kind, -1), "color": color, "center": centers[:, 2:], "half": half_px,
                "angle": self.between(-0.26, 0.26, b, S) * (self.rand(b, 1) < 0.5), "height": zeros,
                "letter": zeros.long(), "line_center": centers[:, :2], "line_fits": fits[:, :2]}  # fmt: skip

    def _place(
        self, halves: Tensor, present: Tensor, slack: Tensor, tries: int = 20
    ) -> tuple[Tensor, Tensor]:
        """Centres [B, E, 2] and who found a place [B, E]; boxes shrunk by ``slack`` do not overlap."""
        b, e = present.shape
        centers = torch.zeros(b, e, 2, device=self.device)
        fits = torch.zeros(b, e, dtype=torch.bool, device=self.device)
        for i in range(e):
            room = (0.5 - halves[:, None, i] - 0.01).clamp(min=0)
            tried = 0.5 + (self.rand(b, tries, 2) * 2 - 1) * room
            apart = (tried[:, :, None] - centers[:, None]).abs() > (
                (halves + halves[:, i : i + 1]) * slack[..., None]
            )[:, None]
            free = (apart.any(-1) | ~fits[:, None]).all(-1)
            best = free.float().argmax(1)
            centers[:, i] = tried[torch.arange(b, device=self.device), best]
            fits[:, i] = present[:, i] & free.any(1)
        return centers, fits

    def _bars(self, sizes: Tensor, contrast: Tensor) -> dict[str, Tensor]:
        b = len(sizes)
        number = 3 + self.below(3, b)
        slot = torch.arange(S, device=self.device)
        used = slot < number[:, None]
        left, base = self.between(0.05, 0.15, b, 1), self.between(0.78, 0.86, b, 1)
        pitch = (self.between(0.85, 0.95, b, 1) - left) / number[:, None]
        rank = (self.rand(b, S) + ~used * 2).argsort(1).argsort(1)
        share = (rank + self.between(0, 0.7, b, S)) / number[:, None]
        height = (0.08 + share * self.between(0.45, 0.58, b, 1)) * used
        half = torch.stack([pitch.expand(b, S) * self.between(0.28, 0.4, b, 1), height / 2], -1)
        center = torch.stack([left + pitch * (slot + 0.5), base - height / 2], -1)
        shuffled = (self.rand(b, len(p.COLORS)) + 2.0 * ~contrast).argsort(1)[:, :S]
        number_of_colors = contrast.sum(1, keepdim=True).clamp(max=S)
        color = shuffled.gather(1, slot % number_of_colors)
        color = torch.where(self.rand(b, 1) < 0.25, color[:, :1], color)
        letters = torch.where(self.rand(b, 1) < 0.6, slot + 1, 1 + self.rand(b, 26).argsort(1)[:, :S])
        zeros = torch.zeros(b, 2, device=self.device)
        return {"kind": torch.where(used, p.BAR, -1), "color": color, "center": center,
                "half": half * sizes.flip(1)[:, None], "angle": torch.zeros(b, S, device=self.device),
                "height": height, "letter": letters * used, "line_center": zeros[..., None].expand(b, 2, 2),
                "line_fits": zeros.bool()}  # fmt: skip

    def _labels(self, bars: dict[str, Tensor], sizes: Tensor, is_chart: Tensor) -> dict[str, Tensor]:
        """The line of letters under the bars: two cells a bar, a letter and a blank."""
        b = len(sizes)
        number = (bars["letter"] > 0).sum(1)
        pitch = bars["center"][:, 1, 0] - bars["center"][:, 0, 0]
        letters = torch.zeros(b, LINE_CELLS, dtype=torch.long, device=self.device)
        letters[:, ::2] = bars["letter"][:, : LINE_CELLS // 2]
        height = torch.minimum(
            pitch / 2 * sizes[:, 1] * CELL_H / CELL_W / sizes[:, 0], torch.full_like(pitch, 0.13)
        )
        base = bars["center"][:, 0, 1] + bars["height"][:, 0] / 2
        left = bars["center"][:, 0, 0] - pitch / 4
        width = number * pitch
        center = torch.stack([left + width / 2, base + 0.01 + height / 2], -1)
        half = torch.stack([width / 2, height / 2], -1)
        empty = torch.zeros_like(number)
        return {"center": torch.stack([center, torch.zeros_like(center)], 1), "half": torch.stack([half, half], 1),
                "letters": torch.stack([letters, torch.zeros_like(letters)], 1),
                "cells": torch.stack([number * 2 * is_chart, empty], 1)}  # fmt: skip

    def _tight_boxes(self, shapes: dict[str, Tensor], sizes: Tensor) -> Tensor:
        hull = self.tables.hulls[shapes["kind"].clamp(0, len(p.SHAPES) - 1)]
        cos, sin = shapes["angle"].cos()[..., None], shapes["angle"].sin()[..., None]
        x, y = hull[..., 0] * cos - hull[..., 1] * sin, hull[..., 0] * sin + hull[..., 1] * cos
        points = torch.stack([x, y], -1) * shapes["half"][:, :, None] / sizes.flip(1)[:, None, None]
        corner = shapes["half"] / sizes.flip(1)[:, None]
        is_bar = (shapes["kind"] == p.BAR)[..., None]
        low = shapes["center"] + torch.where(is_bar, -corner, points.amin(2))
        high = shapes["center"] + torch.where(is_bar, corner, points.amax(2))
        return torch.cat([low, high], -1)


def _where(condition: Tensor, yes: dict[str, Tensor], no: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: torch.where(condition.reshape(-1, *[1] * (yes[k].dim() - 1)), yes[k], no[k]) for k in yes}


def _reading_order(scenes: Scenes) -> Scenes:
    """The same scenes with entities sorted by the top-to-bottom, then left-to-right order of their centres."""
    bars_by_x = scenes.is_chart[:, None]
    key = torch.where(bars_by_x, scenes.center[..., 0], scenes.center[..., 1] + 0.05 * scenes.center[..., 0])
    order = (key + 10.0 * (scenes.kind < 0)).argsort(1)
    wide = order[..., None]
    return dataclasses.replace(
        scenes,
        kind=scenes.kind.gather(1, order), color=scenes.color.gather(1, order),
        center=scenes.center.gather(1, wide.expand(-1, -1, 2)), box=scenes.box.gather(1, wide.expand(-1, -1, 4)),
        bar_letter=scenes.bar_letter.gather(1, order), bar_height=scenes.bar_height.gather(1, order),
    )  # fmt: skip
