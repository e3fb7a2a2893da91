"""Draws the demonstration pictures of ``examples/images`` and what is in them (``truth.json``).

python -m training.pictures --folder ../../examples/images
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import phrases as p
from .evaluate import letters, picture
from .render import Renderer
from .scenes import E, Sampler, Scenes, Tables

CANDIDATES = 20_000


def count(scenes: Scenes, kind: str, color: str | None = None) -> Tensor:
    """How many of a kind (and colour) each scene has [B]."""
    is_kind = scenes.kind == p.KINDS.index(kind)
    return (is_kind & ((scenes.color == p.COLOR_NAMES.index(color)) if color else True)).sum(1)


def light(scenes: Scenes) -> Tensor:
    return scenes.background.mean(2).amin(1) > 0.75


def solid(scenes: Scenes) -> Tensor:
    return ((scenes.kind >= 0) & (scenes.kind < p.BAR)).sum(1)


def is_listed(scenes: Scenes) -> Tensor:
    """Whether the word of each scene is in the word list [B]."""
    letters_1 = torch.where(scenes.text[:, 0] > 26, scenes.text[:, 0] - 26, scenes.text[:, 0]) - 1
    words = Tables.on(letters_1.device).words
    return (letters_1[:, None] == words).all(2).any(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A file, its picture's size, and which sampled scenes will do; the first one is drawn."""

    file: str
    height: int
    width: int
    suits: Callable[[Scenes], Tensor]


WISHES = (
    Wish(file="shapes.png", height=480, width=640, suits=lambda s: light(s) & (count(s, "circle", "red") == 2)
         & (count(s, "word") == 0) & (count(s, "square") == 1) & (count(s, "triangle", "green") == 1)),
    Wish(file="bars.png", height=480, width=640, suits=lambda s: light(s) & s.is_chart & (count(s, "bar") == 4)
         & (count(s, "bar", "blue") == 1) & (count(s, "bar", "orange") == 1)),
    Wish(file="words.jpg", height=360, width=480, suits=lambda s: (count(s, "word") == 1) & (count(s, "number") == 1)
         & is_listed(s) & (s.text[:, 0, 3] > 0) & (s.text[:, 1, 1] > 0) & (solid(s) == 2)),
    Wish(file="hearts.jpg", height=400, width=400, suits=lambda s: (count(s, "heart") == 3) & (count(s, "star") == 2)
         & (count(s, "heart", "pink") == 2) & (count(s, "word") == 0)),
    Wish(file="wide.jpg", height=320, width=640, suits=lambda s: (solid(s) == 5) & (count(s, "ring") == 2)
         & (count(s, "cross") == 1)),
    Wish(file="tall.jpg", height=560, width=320, suits=lambda s: (solid(s) == 4) & (count(s, "diamond") == 2)
         & (count(s, "number") == 1)),
    Wish(file="chart-dark.png", height=320, width=480, suits=lambda s: s.is_chart & (count(s, "bar") == 5)
         & (s.background.amax((1, 2)) < 0.3)),
)  # fmt: skip


def truth(scenes: Scenes, row: int) -> list[dict[str, Any]]:
    """Every entity in reading order: kind, colour, box in 0..1, and text or label."""
    found = []
    for e in range(E):
        kind = int(scenes.kind[row, e])
        if kind < 0:
            continue
        item: dict[str, Any] = {"kind": p.KINDS[kind], "color": p.COLOR_NAMES[int(scenes.color[row, e])]}
        item["box"] = [round(v, 4) for v in scenes.box[row, e].tolist()]
        if kind > p.BAR:
            item["text"] = letters(scenes.text[row, kind - p.WORD])
        elif kind == p.BAR:
            item["label"] = letters(scenes.bar_letter[row, e : e + 1])
        found.append(item)
    return found


def find(sampler: Sampler, wish: Wish) -> tuple[Scenes, int]:
    """Scenes with a row that suits; raises LookupError after a million of them."""
    for _ in range(1_000_000 // CANDIDATES):
        scenes = sampler.scenes(torch.tensor([[wish.height, wish.width]]).expand(CANDIDATES, 2))
        rows = wish.suits(scenes).nonzero()
        if len(rows):
            return scenes, int(rows[0])
    raise LookupError(f"No sampled scene suits {wish.file}; relax its wish.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", help="draw this file alone and keep the others")
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "truth.json"
    answers = json.loads(path.read_text()) if path.exists() else {}
    for number, wish in enumerate(WISHES):
        if args.only not in (None, wish.file):
            continue
        sampler = Sampler(torch.device("cpu"), args.seed + number)
        scenes, row = find(sampler, wish)
        image = picture(Renderer(sampler).draw(scenes[row : row + 1], wish.height, wish.width)[0])
        options = {"quality": 90} if wish.file.endswith(".jpg") else {"optimize": True}
        image.save(args.folder / wish.file, **options)
        answers[wish.file] = truth(scenes, row)
    path.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()
