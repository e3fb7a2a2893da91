"""Captions of three lengths, and counting with grounded reasoning, as token sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from . import phrases as p
from .pieces import (
    ANSWER,
    EOS,
    GROUND_CLOSE,
    GROUND_OPEN,
    SKILL_CLOSE,
    SKILL_OPEN,
    THINK,
    Piece,
    Sequences,
    Vocabulary,
    join,
)  # fmt: skip
from .scenes import E, Sampler, Scenes
from .tasks import Questions, located, position, question

SHORT_LENGTH, LONG_LENGTH = 48, 64
COMMA, AND = 1, 2
QUOTE_OPEN, QUOTE_CLOSE, STOP = 1, 2, 3
THE = p.COUNT_WORDS.index("the")


def captions(scenes: Scenes, v: Vocabulary, style: Tensor) -> list[Piece]:
    """Pieces of a caption; ``style`` [N]: 0 short, 1 normal (both name groups), 2 long (each object, its place)."""
    n, device = len(style), style.device
    used = scenes.kind >= 0
    same = (scenes.kind[:, :, None] == scenes.kind[:, None]) & (
        scenes.color[:, :, None] == scenes.color[:, None]
    )
    is_text = scenes.kind > p.BAR
    is_long = (style == 2)[:, None]
    same = torch.where(
        is_long[..., None] | is_text[..., None], torch.eye(E, device=device).bool(), same & used[:, None]
    )
    earlier = (same & torch.ones(E, E, device=device).tril(-1).bool()).any(2)
    first = used & ~earlier
    rank, count = first.cumsum(1) - 1, same.sum(2)
    last = first.sum(1, keepdim=True) - 1
    ok = first.any(1).float() * 0.5
    opening = style * 2 + scenes.is_chart.long()
    opens_itself = v.openings.length[opening] == 0
    prompts = torch.tensor([[SKILL_OPEN, *v.skill["describe"], SKILL_CLOSE, *v.skill[name], ANSWER]
                            for name in ("short", "normal", "long")], device=device)[style]  # fmt: skip
    pieces = [
        Piece(tokens=prompts, length=torch.full((n,), prompts.shape[1], device=device)),
        v.openings(opening, ok),
    ]
    for e in range(E):
        shown = first[:, e]
        separator = torch.where(rank[:, e] == 0, 0, torch.where(rank[:, e] == last[:, 0], AND, COMMA)) * shown
        open_vowel = scenes.color[:, e] == p.COLOR_NAMES.index("orange")
        word = torch.where(count[:, e] == 1, open_vowel.long(), count[:, e].clamp(max=8))
        word = torch.where(is_text[:, e], THE, word)
        word = word + torch.where((rank[:, e] == 0) & opens_itself, len(p.COUNT_WORDS), 0)
        pieces += _item(scenes, v, e, shown, separator, word, count[:, e] > 1, is_long[:, 0], ok)
    stop = v.quotes(torch.full((n,), STOP, device=device), ok)
    return [
        *pieces,
        stop,
        Piece(tokens=torch.full((n, 1), EOS, device=device), length=torch.ones_like(style), weight=ok),
    ]


def _item(
    scenes: Scenes, v: Vocabulary, e: int, shown: Tensor, separator: Tensor, word: Tensor, is_plural: Tensor,
    with_place: Tensor, ok: Tensor,
) -> list[Piece]:  # fmt: skip
    kind, color = scenes.kind[:, e], scenes.color[:, e]
    text_row = (kind == p.NUMBER).long()
    letters = (
        scenes.text[torch.arange(len(kind), device=kind.device), text_row] * ((kind > p.BAR) & shown)[:, None]
    )
    quoted = (kind > p.BAR) & shown
    counted = v.counts(word, ok)
    places = v.places(position(scenes.center[:, e]), ok)
    spelled = v.spelled(letters, 1.0)
    return [
        v.separators(separator, ok),
        Piece(tokens=counted.tokens, length=counted.length * shown, weight=ok),
        v.colors((color + 1) * (shown & (kind <= p.BAR)), ok),
        v.nouns((kind + 1 + len(p.KINDS + p.GENERIC) * is_plural) * shown, ok),
        v.quotes(QUOTE_OPEN * quoted.long(), ok),
        Piece(tokens=spelled.tokens, length=spelled.length, weight=ok),
        v.quotes(QUOTE_CLOSE * quoted.long(), ok),
        Piece(tokens=places.tokens, length=places.length * (shown & with_place), weight=ok),
    ]


def brief_captions(scenes: Scenes, v: Vocabulary, sampler: Sampler) -> Sequences:
    return join(captions(scenes, v, sampler.below(2, len(scenes.kind))), SHORT_LENGTH)


def long_captions(scenes: Scenes, v: Vocabulary) -> Sequences:
    return join(captions(scenes, v, torch.full((len(scenes.kind),), 2, device=v.device)), LONG_LENGTH)


def reasoned_counts(scenes: Scenes, v: Vocabulary, sampler: Sampler) -> Sequences:
    """Counting questions answered after pointing at each object: think, grounded phrase, answer."""
    q, n = Questions(scenes, v, sampler), len(scenes.kind)
    fields = q._complete(q._count())
    kind = torch.full((n,), p.QUESTION_NAMES.index("count"), device=v.device)
    meant = q.matching(fields["color1"], fields["noun1"])
    some = meant.any(1)
    is_plural = meant.sum(1) != 1
    pieces = [v.control(n, [SKILL_OPEN, *v.skill["query"], SKILL_CLOSE]), *question(fields, kind, v, sampler)]
    pieces += [v.control(n, [ANSWER, THINK]), v.reasoning(torch.where(some, 0, 1), 0.5)]
    pieces.append(v.control(n, [GROUND_OPEN], 0.5, some))
    phrase = v.noun_phrase(torch.zeros_like(kind), is_plural, fields["color1"], fields["noun1"], some & ~some)
    pieces += [Piece(tokens=part.tokens, length=part.length, weight=0.5) for part in phrase]
    pieces += [located(scenes.box[:, e], meant[:, e], with_size=False) for e in range(E)]
    pieces += [v.control(n, [GROUND_CLOSE], 1.0, some), v.reasoning(torch.full_like(kind, 2), 0.3)]
    pieces += [
        v.control(n, [ANSWER], 0.3),
        v.control(n, [ANSWER]),
        v.answers(fields["answer"], 1.0),
        v.control(n, [EOS], 0.3),
    ]
    return join(pieces, LONG_LENGTH)
