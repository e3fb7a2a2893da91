"""Token pieces as tables on the device, and their concatenation for whole batches of prompts.

A piece starts where the tokenizer would split anyway, so joined pieces equal the encoding of the joined text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import phrases as p

EOS, SKILL_OPEN, SKILL_CLOSE, ANSWER, THINK, COORD, SIZE, GROUND_OPEN, GROUND_CLOSE = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    9,
)
ARTICLES = ["", " a", " an", " the"]
INDEFINITE, DEFINITE, NO_ARTICLE, BARE_COLOR = 1, 3, 0, -1
NUM_NOUNS = len(p.KINDS) + len(p.GENERIC)
GRAY = p.COLOR_NAMES.index("gray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens [N, M] of which the first ``length`` [N] count; ``weight`` of each as a target; values of 5 and 6."""

    tokens: Tensor
    length: Tensor
    weight: Tensor | float = 0.0
    values: Tensor | None = None  # [N, M, 2]: x or y in the first place, width and height for a size


class Table:
    """Strings encoded once; rows are looked up by index."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], device: torch.device) -> None:
        ids = [tokenizer.encode(s, add_special_tokens=False).ids for s in strings]
        self.tokens = torch.zeros(len(ids), max(1, *map(len, ids)), dtype=torch.long)
        for row, piece in enumerate(ids):
            self.tokens[row, : len(piece)] = torch.tensor(piece, dtype=torch.long)
        self.tokens = self.tokens.to(device)
        self.length = torch.tensor([len(piece) for piece in ids], device=device)

    def __call__(self, index: Tensor, weight: Tensor | float = 0.0) -> Piece:
        return Piece(tokens=self.tokens[index], length=self.length[index], weight=weight)


class Vocabulary:
    """All tables: question literals with their slots, articles, colours, nouns, answers, captions, letters."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device) -> None:
        def table(strings: Sequence[str]) -> Table:
            return Table(tokenizer, strings, device)

        def ids(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        self.device = device
        self.skill = {name: ids(name) for name in p.SKILLS}
        self.articles = table(ARTICLES)
        self.colors = table(["", *(f" {c}" for c in p.COLOR_NAMES), " grey"])
        nouns = [*p.KINDS, *p.GENERIC]
        self.nouns = table(["", *(f" {n}" for n in nouns), *(f" {p.plural(n)}" for n in nouns)])
        self.answer_names = ["", "yes", "no", *map(str, range(10)), *p.COLOR_NAMES, *p.KINDS, *p.POSITIONS]
        self.answers = table(self.answer_names)
        self.letters = torch.tensor([0, *(ids(c)[0] for c in p.LETTERS)], device=device)
        self.separators = table(["", ",", " and"])
        self.counts = table([*(f" {w}" for w in p.COUNT_WORDS), *(w.capitalize() for w in p.COUNT_WORDS)])
        self.openings = table(list(p.CAPTION_OPENINGS.values()))
        self.places = table([f" at {name}" for name in p.POSITIONS])
        self.quotes = table(["", ' "', '"', "."])
        self.reasoning = table(list(p.REASONING.values()))
        self._questions(table)

    def answer(self, name: str) -> int:
        return self.answer_names.index(name)

    def _questions(self, table: Callable[[Sequence[str]], Table]) -> None:
        literals: list[list[str]] = [[], [], []]
        modes: list[list[int]] = []
        plurals: list[list[bool]] = []
        bounds = []
        names = {"many": NO_ARTICLE, "one": NO_ARTICLE, "the": DEFINITE, "a": INDEFINITE, "is": BARE_COLOR}
        for templates in p.QUESTIONS.values():
            start = len(modes)
            for form in (form for template in templates for form in p.surface_forms(template)):
                parts = re.split(r" ?\{(\w+)\}", form)
                texts, slots = parts[::2], parts[1::2]
                for column in range(3):
                    literals[column].append(texts[column] if column < len(texts) else "")
                modes.append([names[s] for s in slots] + [0] * (2 - len(slots)))
                plurals.append([s == "many" for s in slots] + [False] * (2 - len(slots)))
            bounds.append((start, len(modes) - start))
        self.literals = [table(column) for column in literals]
        self.slot_mode = torch.tensor(modes, device=self.device)
        self.slot_plural = torch.tensor(plurals, device=self.device)
        self.question_start = torch.tensor([s for s, _ in bounds], device=self.device)
        self.question_forms = torch.tensor([n for _, n in bounds], device=self.device)

    def control(
        self, n: int, ids: Sequence[int], weight: float = 0.0, present: Tensor | None = None
    ) -> Piece:
        tokens = torch.tensor(list(ids), device=self.device).expand(n, -1)
        length = torch.full((n,), len(ids), device=self.device)
        return Piece(tokens=tokens, length=length if present is None else length * present, weight=weight)

    def noun_phrase(
        self, mode: Tensor, is_plural: Tensor, color: Tensor, noun: Tensor, grey: Tensor
    ) -> list[Piece]:
        """Article, colour and noun; ``color`` 0 and ``noun`` 0 are absent, else index + 1."""
        starts_open = torch.where(color > 0, color == p.COLOR_NAMES.index("orange") + 1,
                                  noun == 1 + len(p.KINDS) + p.GENERIC.index("object"))  # fmt: skip
        article = torch.where((mode == INDEFINITE) & starts_open, 2, mode.clamp(min=0))
        shown = torch.where((mode == BARE_COLOR) | (noun == 0), 0, noun + NUM_NOUNS * is_plural)
        hue = torch.where((color == GRAY + 1) & grey, len(p.COLORS) + 1, color)
        return [self.articles(article * (color + noun > 0)), self.colors(hue), self.nouns(shown)]

    def spelled(self, letters: Tensor, weight: float) -> Piece:
        """Letters [N, M] (0 past the end) as one token each."""
        return Piece(tokens=self.letters[letters], length=(letters > 0).sum(-1), weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """N token sequences padded to L: ids, target weights and values of coordinate and size tokens."""

    tokens: Tensor  # [N, L]
    weight: Tensor  # [N, L] weight of predicting this token
    values: Tensor  # [N, L, 2]
    length: Tensor  # [N]


def join(pieces: Sequence[Piece], limit: int) -> Sequences:
    """The pieces of each row one after another, padded to ``limit``; rows that do not fit get no weight."""
    n, device = len(pieces[0].length), pieces[0].tokens.device
    tokens = torch.zeros(n, limit + 1, dtype=torch.long, device=device)
    weight = torch.zeros(n, limit + 1, device=device)
    values = torch.zeros(n, limit + 1, 2, device=device)
    offset = torch.zeros(n, dtype=torch.long, device=device)
    for piece in pieces:
        m = piece.tokens.shape[1]
        column = torch.arange(m, device=device)
        target = torch.where(column < piece.length[:, None], offset[:, None] + column, limit).clamp(max=limit)
        tokens.scatter_(1, target, piece.tokens)
        share = torch.as_tensor(piece.weight, dtype=torch.float32, device=device)
        share = share[:, None] if share.dim() == 1 else share
        weight.scatter_(1, target, share.expand(n, m))
        if piece.values is not None:
            values.scatter_(1, target[..., None].expand(-1, -1, 2), piece.values)
        offset = offset + piece.length
    weight = weight * (offset <= limit)[:, None]
    return Sequences(
        tokens=tokens[:, :limit], weight=weight[:, :limit], values=values[:, :limit], length=offset
    )
