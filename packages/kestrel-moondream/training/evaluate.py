"""Scores a model on fresh scenes through a plain interface: query, caption, point and detect on PIL pictures.

    python -m training.evaluate --backend decoder --scenes 1000 --seed 9001
    python -m training.evaluate --backend engine

Questions, pictures and truth come from the training generator with a seed of its own. Equal shares per kind.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from . import phrases as p
from . import tokenizer as nano_tokenizer
from .decoder import GreedyDecoder
from .export import read
from .pieces import ANSWER, COORD, SKILL_CLOSE, Vocabulary
from .render import Renderer
from .scenes import COMPACT, ELONGATED, E, Sampler, Scenes
from .tasks import objects, queries

GROUPS = {name: name for name in p.QUESTION_NAMES} | {"left": "relation", "right": "relation", "above": "relation",
          "below": "relation", "largest_color": "bar_color", "smallest_color": "bar_color", "here": "spatial",
          "here_color": "spatial", "here_shape": "spatial"}  # fmt: skip


class Answerer(Protocol):
    """What is scored."""

    def query(
        self, image: Image.Image, question: str, spatial_refs: Sequence[Sequence[float]] = ()
    ) -> dict[str, Any]: ...
    def caption(self, image: Image.Image, length: str) -> dict[str, Any]: ...
    def point(self, image: Image.Image, name: str) -> dict[str, Any]: ...
    def detect(self, image: Image.Image, name: str) -> dict[str, Any]: ...


class EngineAnswerer:
    """The shipped model through the synchronous engine, greedily."""

    def __init__(self) -> None:
        from kestrel.config import RuntimeConfig
        from kestrel.engine import SyncEngine

        self.engine = SyncEngine(RuntimeConfig(model="kestrel/nano"))

    def query(
        self, image: Image.Image, question: str, spatial_refs: Sequence[Sequence[float]] = ()
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"spatial_refs": [list(r) for r in spatial_refs]} if spatial_refs else {}
        return dict(self.engine.query(image, question, settings={"temperature": 0.0}, **options).output)

    def caption(self, image: Image.Image, length: str) -> dict[str, Any]:
        return dict(self.engine.caption(image, length=length, settings={"temperature": 0.0}).output)

    def point(self, image: Image.Image, name: str) -> dict[str, Any]:
        return dict(self.engine.point(image, name).output)

    def detect(self, image: Image.Image, name: str) -> dict[str, Any]:
        return dict(self.engine.detect(image, name).output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One picture and one thing to ask about it, with the truth as the generator knows it."""

    kind: str
    image: Image.Image
    text: str  # question, object name or caption length
    answer: str = ""
    refs: tuple[tuple[float, ...], ...] = ()
    boxes: tuple[tuple[float, ...], ...] = ()
    inventory: Counter[str] = field(default_factory=Counter)


class Cases:
    """Fresh cases of one seed, of any kind, on the CPU."""

    def __init__(self, seed: int, per_call: int = 16) -> None:
        self.per_call = per_call
        self.sampler = Sampler(torch.device("cpu"), seed)
        self.renderer = Renderer(self.sampler)
        self.tokenizer = nano_tokenizer.load()
        self.vocabulary = Vocabulary(self.tokenizer, self.sampler.device)

    def scenes(self) -> Iterator[tuple[Scenes, Callable[[int], Image.Image]]]:
        """Groups of scenes of one picture size, and a function that gives the picture of one."""
        menu = [size for size in COMPACT for _ in range(2)] + ELONGATED
        while True:
            height, width = menu[int(self.sampler.below(len(menu), 1))]
            scenes = self.sampler.scenes(torch.tensor([[height, width]] * self.per_call))
            images = self.renderer.draw(scenes, height, width)
            yield scenes, lambda row, images=images: picture(images[row])  # type: ignore[misc]

    def questions(self, kind: str, count: int) -> Iterator[Case]:
        members = [name for name in p.QUESTION_NAMES if GROUPS[name] == kind]
        weights = torch.tensor([float(name in members) for name in p.QUESTION_NAMES])
        left = count
        for scenes, image in self.scenes():
            made, asked = queries(scenes, self.vocabulary, self.sampler, weights)
            for row in range(self.per_call):
                if not weights[asked[row]]:  # the scene allows no question of this kind
                    continue
                yield self._query(kind, made.tokens[row], made.values[row], int(made.length[row]), image(row))
                left -= 1
                if not left:
                    return

    def _query(self, kind: str, tokens: Tensor, values: Tensor, length: int, image: Image.Image) -> Case:
        ids = tokens[:length].tolist()
        start = ids.index(SKILL_CLOSE) + 1
        refs: tuple[tuple[float, ...], ...] = ()
        if ids[start] == COORD:
            x, y = float(values[start, 0]), float(values[start + 1, 0])
            refs = ((min(1.0, max(0.0, x)), min(1.0, max(0.0, y))),)
            start += 2
            if ids[start] == 6:
                w, h = values[start].tolist()
                refs = (tuple(min(1.0, max(0.0, v)) for v in (x - w / 2, y - h / 2, x + w / 2, y + h / 2)),)
                start += 1
        end = len(ids) - 1 - ids[::-1].index(ANSWER)
        text = self.tokenizer.decode(ids[start : end - 1])
        return Case(
            kind=kind, image=image, text=text, answer=self.tokenizer.decode(ids[end + 1 : -1]), refs=refs
        )

    def located(self, skill: str, count: int) -> Iterator[Case]:
        left = count
        for scenes, image in self.scenes():
            made, meant = objects(scenes, self.vocabulary, self.sampler, skill)
            for row in range(self.per_call):
                ids = made.tokens[row].tolist()
                name = self.tokenizer.decode(ids[ids.index(SKILL_CLOSE) + 1 : ids.index(ANSWER)]).strip()
                boxes = tuple(tuple(scenes.box[row, e].tolist()) for e in range(E) if meant[row, e])
                yield Case(kind=skill, image=image(row), text=name, boxes=boxes)
                left -= 1
                if not left:
                    return

    def captions(self, count: int) -> Iterator[Case]:
        left = count
        for scenes, image in self.scenes():
            for row in range(self.per_call):
                length = ("short", "normal", "long")[left % 3]
                yield Case(
                    kind=f"caption {length}", image=image(row), text=length, inventory=inventory(scenes, row)
                )
                left -= 1
                if not left:
                    return


def picture(image: Tensor) -> Image.Image:
    """An 8-bit RGB picture of [3, H, W] in 0..1."""
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    return Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), bytes(pixels.flatten().tolist()))


def letters(row: Tensor) -> str:
    return "".join(p.LETTERS[i - 1] for i in row.tolist() if i > 0)


def inventory(scenes: Scenes, row: int) -> Counter[str]:
    """What a caption of this scene should name, with multiplicity."""
    items: Counter[str] = Counter()
    for e in range(E):
        kind = int(scenes.kind[row, e])
        if 0 <= kind <= p.BAR:
            items[f"{p.COLOR_NAMES[int(scenes.color[row, e])]} {p.KINDS[kind]}"] += 1
        elif kind > p.BAR:
            items[f"{p.KINDS[kind]} {letters(scenes.text[row, kind - p.WORD])}"] += 1
    return items


def named(caption: str) -> Counter[str]:
    """What a caption names, with multiplicity."""
    items: Counter[str] = Counter()
    numbers = {word: max(1, i) for i, word in enumerate(p.COUNT_WORDS[:9])}
    plurals = {p.plural(k): k for k in p.KINDS}
    words = "|".join(numbers)
    for count, color, noun in re.findall(
        rf"\b({words}) ({'|'.join(p.COLOR_NAMES)}) (\w+)", caption, re.IGNORECASE
    ):
        items[f"{color} {plurals.get(noun, noun)}"] += numbers[count.lower()]
    for noun, text in re.findall(r'\b(word|number) "(\w+)"', caption):
        items[f"{noun} {text}"] += 1
    return items


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(0.0, w) * max(0.0, h)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both + 1e-12)


def matched(truth: Sequence[Sequence[float]], found: Sequence[Any], fits: Callable[[Any, Any], bool]) -> int:
    """How many found things fit a true box of their own."""
    free, hits = list(truth), 0
    for thing in found:
        hit = next((box for box in free if fits(box, thing)), None)
        if hit is not None:
            free.remove(hit)
            hits += 1
    return hits


class Scores:
    """Sums by kind."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.misses: list[str] = []

    def add(self, name: str, hits: float, total: float) -> None:
        self.sums[name][0] += hits
        self.sums[name][1] += total

    def share(self, name: str) -> float:
        hits, total = self.sums[name]
        return hits / total if total else 0.0

    def score(self, case: Case, model: Answerer) -> None:
        if case.kind == "point":
            points = [(q["x"], q["y"]) for q in model.point(case.image, case.text)["points"]]
            inside = matched(case.boxes, points, lambda b, q: b[0] <= q[0] <= b[2] and b[1] <= q[1] <= b[3])
            self.add("points inside", inside, max(len(points), len(case.boxes)))
            self.add("point count", len(points) == len(case.boxes), 1)
        elif case.kind == "detect":
            keys = ("x_min", "y_min", "x_max", "y_max")
            boxes = [[box[k] for k in keys] for box in model.detect(case.image, case.text)["objects"]]
            self.add(
                "detect F1",
                2 * matched(case.boxes, boxes, lambda b, q: iou(b, q) >= 0.5),
                len(boxes) + len(case.boxes),
            )
        elif case.kind.startswith("caption"):
            said = named(model.caption(case.image, case.text)["caption"])
            right = (said & case.inventory).total()
            self.add("caption objects", 2 * right, said.total() + case.inventory.total())
            self.add(f"  {case.kind}", 2 * right, said.total() + case.inventory.total())
        else:
            answer = model.query(case.image, case.text, spatial_refs=case.refs)["answer"].strip()
            self.add(f"  query {case.kind}", answer == case.answer, 1)
            self.add("query exact", answer == case.answer, 1)
            if answer != case.answer:
                self.misses.append(f"{case.kind}: {case.text!r} -> {answer!r}, not {case.answer!r}")


def evaluate(model: Answerer, scenes: int, seed: int, *, only_queries: bool = False) -> Scores:
    """Scores of ``scenes`` queries (equal shares per kind), and as many points, detections and captions."""
    scores, cases = Scores(), Cases(seed)
    kinds = sorted(set(GROUPS.values()))
    for kind in kinds:
        for case in cases.questions(kind, max(1, scenes // len(kinds))):
            scores.score(case, model)
    if only_queries:
        return scores
    for source in (cases.located("point", scenes), cases.located("detect", scenes), cases.captions(scenes)):
        for case in source:
            scores.score(case, model)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["decoder", "engine"], default="decoder")
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=9001)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only-queries", action="store_true")
    parser.add_argument("--misses", type=int, default=0, help="print this many wrong answers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model: Answerer = EngineAnswerer() if args.backend == "engine" else GreedyDecoder(
        read(dtype=getattr(torch, args.dtype)), nano_tokenizer.load())  # fmt: skip
    try:
        scores = evaluate(model, args.scenes, args.seed, only_queries=args.only_queries)
    finally:
        if isinstance(model, EngineAnswerer):
            model.engine.shutdown(drain=False)
    for name, (hits, total) in scores.sums.items():
        print(f"{name:24s} {100 * hits / max(1, total):6.2f} %  ({hits:.0f} / {total:.0f})")
    print("\n".join(scores.misses[: args.misses]))
    print(json.dumps({name.strip(): round(scores.share(name), 4) for name in scores.sums}))


if __name__ == "__main__":
    main()
