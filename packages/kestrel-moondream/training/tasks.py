"""Tasks about scenes as token sequences, built in batches on the device: only unambiguous questions are asked.

Letters: N questions, E entities of a question's scene.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import phrases as p
from .pieces import ANSWER, COORD, EOS, SIZE, SKILL_CLOSE, SKILL_OPEN, Piece, Sequences, Vocabulary, join
from .scenes import MAX_LETTERS, E, Sampler, Scenes

NUM_SHAPES, NUM_COLORS = len(p.SHAPES), len(p.COLORS)
GENERIC_NOUN = len(p.KINDS) + 1  # noun index of the first generic noun
QUERY_LENGTH, POINT_LENGTH, DETECT_LENGTH = 22, 20, 28


class Questions:
    """Candidate questions of every kind for N scenes; ``ask`` picks one allowed kind per row."""

    def __init__(self, scenes: Scenes, vocabulary: Vocabulary, sampler: Sampler) -> None:
        self.scenes, self.vocabulary, self.s = scenes, vocabulary, sampler
        self.n = len(scenes.kind)
        valid = scenes.kind >= 0
        pairs = valid[:, :, None] & valid[:, None]
        same_kind = (scenes.kind[:, :, None] == scenes.kind[:, None]) & pairs
        same_color = (scenes.color[:, :, None] == scenes.color[:, None]) & pairs
        self.is_solid = valid & (scenes.kind <= p.BAR)  # shapes and bars
        solid_pairs = self.is_solid[:, :, None] & self.is_solid[:, None]
        self.lone_kind = same_kind.sum(2) == 1
        self.lone_color = (same_color & solid_pairs).sum(2) == 1
        self.lone_both = (same_kind & same_color).sum(2) == 1
        self.generic = GENERIC_NOUN + sampler.below(len(p.GENERIC), self.n)
        self.zero = torch.zeros(self.n, dtype=torch.long, device=sampler.device)
        self.no_text = self.zero[:, None].expand(-1, MAX_LETTERS)

    def at(self, values: Tensor, index: Tensor) -> Tensor:
        return values.gather(1, index[:, None])[:, 0]

    def coin(self, share: float = 0.5) -> Tensor:
        return self.s.rand(self.n) < share

    def candidates(self) -> list[dict[str, Tensor]]:
        """One dictionary per kind of question, in the order of ``phrases.QUESTION_NAMES``."""
        relation = [self._relation(axis, sign) for axis, sign in ((0, -1), (0, 1), (1, -1), (1, 1))]
        bars = self._bars()
        made = dict(zip(("left", "right", "above", "below"), relation, strict=True)) | bars | self._texts()
        made |= {
            "count": self._count(),
            "color": self._color(),
            "shape": self._shape(),
            "exists": self._exists(),
        }
        made |= {"where": self._where()} | self._here()
        return [self._complete(made[name]) for name in p.QUESTION_NAMES]

    def _complete(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("color1", "noun1", "color2", "noun2", "answer", "answer_noun", "ref")
        empty = dict.fromkeys(names, self.zero) | {"letters": self.no_text}
        return empty | fields

    def matching(self, color: Tensor, noun: Tensor) -> Tensor:
        """Entities [N, E] that a phrase means; ``color`` and ``noun`` are 1-based, 0 = any; generic = any shape."""
        kind = self.scenes.kind
        is_kind = torch.where(
            noun[:, None] >= GENERIC_NOUN, (kind >= 0) & (kind < NUM_SHAPES), kind == noun[:, None] - 1
        )
        return is_kind & ((color == 0)[:, None] | (self.scenes.color == color[:, None] - 1))

    def phrase(self, with_texts: bool, novelty: float) -> tuple[Tensor, Tensor]:
        """A phrase that usually means something: kind, colour and kind, colour, or everything of a scene."""
        entity = self.s.pick(self.scenes.kind >= 0 if with_texts else self.is_solid)
        color, kind = self.at(self.scenes.color, entity), self.at(self.scenes.kind, entity).clamp(min=0)
        other_kind = torch.where(self.scenes.is_chart, p.BAR, self.s.below(NUM_SHAPES, self.n))
        is_new = self.coin(novelty)
        kind = torch.where(is_new & self.coin(), other_kind, kind)
        color = torch.where(is_new & self.coin(), self.s.below(NUM_COLORS, self.n), color)
        form = self.s.rand(self.n)
        is_shape = kind < NUM_SHAPES
        noun = torch.where((form > 0.7) & is_shape, self.generic, kind + 1)
        color = torch.where((form < 0.35) | (form > 0.85) | (kind > p.BAR), 0, color + 1)
        return color, noun

    def _count(self) -> dict[str, Tensor]:
        color, noun = self.phrase(with_texts=False, novelty=0.12)
        count = self.matching(color, noun).sum(1)
        return {"valid": self.is_solid.any(1), "color1": color, "noun1": noun,
                "answer": self.vocabulary.answer("0") + count}  # fmt: skip

    def _exists(self) -> dict[str, Tensor]:
        color, noun = self.phrase(with_texts=False, novelty=0.0)
        specific = noun < GENERIC_NOUN
        missing = torch.zeros_like(specific)
        miss_color, miss_noun = color, noun
        for _ in range(3):  # an absent phrase near the scene: its colours and kinds crossed, or anything
            e1, e2 = self.s.pick(self.is_solid), self.s.pick(self.is_solid)
            kind = torch.where(
                self.coin(0.5), self.at(self.scenes.kind, e2), self.s.below(NUM_SHAPES, self.n)
            )
            hue = (
                torch.where(self.coin(0.7), self.at(self.scenes.color, e1), self.s.below(NUM_COLORS, self.n))
                + 1
            )
            hue = torch.where(self.coin(0.3), 0, hue)
            kind = torch.where(self.scenes.is_chart & self.coin(0.5), p.BAR, kind.clamp(min=0))
            miss_color = torch.where(missing, miss_color, hue)
            miss_noun = torch.where(missing, miss_noun, kind + 1)
            missing = missing | ~self.matching(hue, kind + 1).any(1)
        ask_absent = self.coin()
        color, noun = torch.where(ask_absent, miss_color, color), torch.where(ask_absent, miss_noun, noun)
        found = self.matching(color, noun).any(1)
        return {"valid": self.is_solid.any(1) & (specific | ask_absent), "color1": color, "noun1": noun,
                "answer": torch.where(found, self.vocabulary.answer("yes"), self.vocabulary.answer("no"))}  # fmt: skip

    def _color(self) -> dict[str, Tensor]:
        allowed = self.lone_kind & (self.scenes.kind >= 0) & (self.scenes.kind <= p.WORD + 1)
        allowed = allowed & ((self.scenes.kind < p.BAR) | (self.s.rand(self.n, 1) < 0.15))
        entity = self.s.pick(allowed)
        return {"valid": allowed.any(1), "noun1": self.at(self.scenes.kind, entity) + 1,
                "answer": self.vocabulary.answer("red") + self.at(self.scenes.color, entity)}  # fmt: skip

    def _shape(self) -> dict[str, Tensor]:
        allowed = self.lone_color & (self.scenes.kind >= 0) & (self.scenes.kind < NUM_SHAPES)
        entity = self.s.pick(allowed)
        return {"valid": allowed.any(1), "color1": self.at(self.scenes.color, entity) + 1, "noun1": self.generic,
                "answer": self.vocabulary.answer("circle") + self.at(self.scenes.kind, entity)}  # fmt: skip

    def _named(self, entity: Tensor) -> tuple[Tensor, Tensor]:
        """Colour and noun that mean one entity: the noun alone where it is the only one of its kind, half the time."""
        short = self.at(self.lone_kind, entity) & self.coin()
        return torch.where(short, 0, self.at(self.scenes.color, entity) + 1), self.at(
            self.scenes.kind, entity
        ) + 1

    def _relation(self, axis: int, sign: int) -> dict[str, Tensor]:
        allowed = self.lone_both & (self.scenes.kind >= 0) & (self.scenes.kind < NUM_SHAPES)
        first = self.s.pick(allowed)
        others = allowed & (torch.arange(E, device=self.s.device) != first[:, None])
        place = self.scenes.center[..., axis]
        difference = place - self.at(place, first)[:, None]
        others = others & (difference.abs() > 0.09)
        second = self.s.pick(others)
        holds = self.at(difference, second) * sign < 0
        color1, noun1 = self._named(first)
        color2, noun2 = self._named(second)
        return {"valid": others.any(1), "color1": color1, "noun1": noun1, "color2": color2, "noun2": noun2,
                "answer": torch.where(holds, self.vocabulary.answer("yes"), self.vocabulary.answer("no"))}  # fmt: skip

    def _texts(self) -> dict[str, dict[str, Tensor]]:
        text = self.scenes.text
        present = text[..., 0] > 0
        only = torch.where(present[:, :1], text[:, 0], text[:, 1])
        return {"word": {"valid": present[:, 0], "letters": text[:, 0]},
                "number": {"valid": present[:, 1], "letters": text[:, 1]},
                "text": {"valid": present.sum(1) == 1, "letters": only}}  # fmt: skip

    def _bars(self) -> dict[str, dict[str, Tensor]]:
        height, chart = self.scenes.bar_height, self.scenes.is_chart
        largest, smallest = height.argmax(1), torch.where(height > 0, height, 9.0).argmin(1)
        letters = F.pad(self.scenes.bar_letter[..., None], (0, MAX_LETTERS - 1))
        red = self.vocabulary.answer("red")
        made: dict[str, dict[str, Tensor]] = {}
        for name, entity in (("largest", largest), ("smallest", smallest)):
            spelled = letters.gather(1, entity[:, None, None].expand(-1, 1, MAX_LETTERS))[:, 0]
            made[name] = {"valid": chart, "letters": spelled}
            made[f"{name}_color"] = {"valid": chart, "answer": red + self.at(self.scenes.color, entity)}
        lone = self.lone_color & (self.scenes.kind == p.BAR)
        entity = self.s.pick(lone)
        spelled = letters.gather(1, entity[:, None, None].expand(-1, 1, MAX_LETTERS))[:, 0]
        noun = torch.full_like(self.zero, p.BAR + 1)
        made["bar_label"] = {"valid": lone.any(1), "letters": spelled, "noun1": noun,
                             "color1": self.at(self.scenes.color, entity) + 1}  # fmt: skip
        return made

    def _where(self) -> dict[str, Tensor]:
        clear = ((self.scenes.center * 3 + 0.5) % 1 - 0.5).abs().amin(2) > 0.12
        allowed = clear & self.lone_both & (self.scenes.kind >= 0) & (self.scenes.kind < NUM_SHAPES)
        entity = self.s.pick(allowed)
        color, noun = self._named(entity)
        center = self.scenes.center.gather(1, entity[:, None, None].expand(-1, 1, 2))[:, 0]
        return {"valid": allowed.any(1), "color1": color, "noun1": noun,
                "answer": self.vocabulary.answer("top left") + position(center)}  # fmt: skip

    def _here(self) -> dict[str, dict[str, Tensor]]:
        """Questions with a spatial reference: ``ref`` is 1 + entity."""
        allowed = (self.scenes.kind >= 0) & (self.scenes.kind < NUM_SHAPES)
        entity, valid = self.s.pick(allowed), allowed.any(1)
        color = self.vocabulary.answer("red") + self.at(self.scenes.color, entity)
        kind = self.at(self.scenes.kind, entity).clamp(min=0)
        base = {"valid": valid, "ref": entity + 1}
        return {"here": base | {"answer": color, "answer_noun": kind + 1}, "here_color": base | {"answer": color},
                "here_shape": base | {"answer": self.vocabulary.answer("circle") + kind}}  # fmt: skip

    def ask(self, weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The fields of one question per row, and its kind; ``weights`` [kinds] are relative frequencies."""
        made = self.candidates()
        allowed = torch.stack([fields["valid"] for fields in made], 1)
        gumbel = -(-self.s.between(1e-6, 1, *allowed.shape).log()).log()
        kind = torch.where(allowed & (weights > 0), weights.clamp(min=1e-9).log() + gumbel, -1e9).argmax(1)
        row = torch.arange(self.n, device=self.s.device)
        return {name: torch.stack([fields[name] for fields in made], 1)[row, kind] for name in made[0]}, kind


def position(center: Tensor) -> Tensor:
    """Index into ``phrases.POSITIONS`` of centres [..., 2]."""
    cell = (center * 3).long().clamp(0, 2)
    return cell[..., 1] * 3 + cell[..., 0]


def reference(scenes: Scenes, ref: Tensor, sampler: Sampler) -> Piece:
    """A point inside an entity (5 5) or its box (5 5 6); no tokens where ``ref`` is 0."""
    row = torch.arange(len(ref), device=ref.device)
    box = scenes.box[row, (ref - 1).clamp(min=0)]
    center, extent = (box[:, :2] + box[:, 2:]) / 2, box[:, 2:] - box[:, :2]
    is_box = sampler.rand(len(ref)) < 0.5
    jitter = sampler.between(-0.15, 0.15, len(ref), 2) * extent
    center = torch.where(is_box[:, None], center, center + jitter)
    tokens = torch.tensor([COORD, COORD, SIZE], device=ref.device).expand(len(ref), 3)
    values = torch.stack([center[:, :1].expand(-1, 2), center[:, 1:].expand(-1, 2), extent], 1)
    return Piece(tokens=tokens, length=(2 + is_box.long()) * (ref > 0), values=values)


def queries(
    scenes: Scenes, vocabulary: Vocabulary, sampler: Sampler, weights: Tensor
) -> tuple[Sequences, Tensor]:
    """One query per scene row (scenes may repeat) and its kind."""
    fields, kind = Questions(scenes, vocabulary, sampler).ask(weights)
    v, n = vocabulary, len(kind)
    ok = fields["valid"].float()
    pieces = [
        v.control(n, [SKILL_OPEN, *v.skill["query"], SKILL_CLOSE]),
        reference(scenes, fields["ref"], sampler),
    ]
    pieces += question(fields, kind, v, sampler)
    pieces += [v.control(n, [ANSWER, ANSWER]), v.answers(fields["answer"], ok),
               v.nouns(fields["answer_noun"], ok)]  # fmt: skip
    letters = v.spelled(fields["letters"], 1.0)
    pieces += [Piece(tokens=letters.tokens, length=letters.length, weight=ok), v.control(n, [EOS])]
    pieces[-1] = Piece(tokens=pieces[-1].tokens, length=pieces[-1].length, weight=0.4 * ok)
    return join(pieces, QUERY_LENGTH), kind


def question(fields: dict[str, Tensor], kind: Tensor, v: Vocabulary, sampler: Sampler) -> list[Piece]:
    """The words of a question in a random wording."""
    form = v.question_start[kind] + (sampler.rand(len(kind)) * v.question_forms[kind]).long()
    grey = sampler.rand(len(kind)) < 0.4
    pieces = [v.literals[0](form)]
    for slot in range(2):
        mode, is_plural = v.slot_mode[form, slot], v.slot_plural[form, slot]
        pieces += v.noun_phrase(mode, is_plural, fields[f"color{slot + 1}"], fields[f"noun{slot + 1}"], grey)
        pieces.append(v.literals[slot + 1](form))
    return pieces


def objects(scenes: Scenes, vocabulary: Vocabulary, sampler: Sampler, skill: str) -> tuple[Sequences, Tensor]:
    """Point or detect prompts with their answers in reading order, and which entities [N, E] are meant."""
    q, v, n = Questions(scenes, vocabulary, sampler), vocabulary, len(scenes.kind)
    color, noun = q.phrase(with_texts=True, novelty=0.12)
    meant = q.matching(color, noun)
    is_plural = (meant.sum(1) != 1) ^ (sampler.rand(n) < 0.12)
    article = torch.where(sampler.rand(n) < 0.2, 3, 0)
    pieces = [v.control(n, [SKILL_OPEN, *v.skill[skill], SKILL_CLOSE])]
    pieces += v.noun_phrase(article, is_plural, color, noun, sampler.rand(n) < 0.4)
    pieces.append(v.control(n, [ANSWER]))
    for entity in range(E):
        pieces.append(located(scenes.box[:, entity], meant[:, entity], with_size=skill == "detect"))
    pieces.append(v.control(n, [EOS], 1.0))
    return join(pieces, DETECT_LENGTH if skill == "detect" else POINT_LENGTH), meant


def located(box: Tensor, present: Tensor, *, with_size: bool, weight: float = 1.0) -> Piece:
    """Coordinate tokens (and a size) of the boxes' centres; y and size are forced, so they weigh little."""
    ids = [COORD, COORD, SIZE] if with_size else [COORD, COORD]
    center, extent = (box[:, :2] + box[:, 2:]) / 2, box[:, 2:] - box[:, :2]
    values = torch.stack([center[:, :1].expand(-1, 2), center[:, 1:].expand(-1, 2), extent], 1)[:, : len(ids)]
    tokens = torch.tensor(ids, device=box.device).expand(len(box), len(ids))
    shares = torch.tensor([weight, 0.1, 0.1][: len(ids)], device=box.device)
    return Piece(
        tokens=tokens,
        length=len(ids) * present.long(),
        weight=shares[None].expand(len(box), -1),
        values=values,
    )
