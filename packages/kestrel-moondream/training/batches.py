"""Packs many tasks about one picture behind one image prefix, in slots of fixed length.

A slot sees the prefix and its own earlier tokens. Positions restart after the prefix in every slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import phrases as p
from .captions import LONG_LENGTH, SHORT_LENGTH, brief_captions, long_captions, reasoned_counts
from .pieces import Sequences, Vocabulary
from .scenes import Sampler, Scenes
from .tasks import DETECT_LENGTH, POINT_LENGTH, QUERY_LENGTH, objects, queries

QUERIES, POINTS, DETECTS = 8, 2, 2
SLOTS = (
    [QUERY_LENGTH] * QUERIES
    + [POINT_LENGTH] * POINTS
    + [DETECT_LENGTH] * DETECTS
    + [SHORT_LENGTH, LONG_LENGTH]
)
TOTAL = sum(SLOTS)
SPATIAL_START = QUERY_LENGTH * QUERIES  # tokens from here on may have coordinates to predict
REASONING_SHARE = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Packed tasks of B pictures; ``weight`` is that of predicting each token from the one before it."""

    tokens: Tensor  # [B, TOTAL]
    weight: Tensor  # [B, TOTAL]
    values: Tensor  # [B, TOTAL, 2]
    kind: Tensor  # [B, QUERIES]

    def __getitem__(self, rows: slice) -> Tasks:
        return Tasks(
            tokens=self.tokens[rows], weight=self.weight[rows], values=self.values[rows], kind=self.kind[rows]
        )


def layout() -> tuple[Tensor, Tensor]:
    """Slot number and position within its slot of every packed token, each [TOTAL]."""
    slots = torch.cat([torch.full((length,), i) for i, length in enumerate(SLOTS)])
    return slots, torch.cat([torch.arange(length) for length in SLOTS])


def pack(scenes: Scenes, vocabulary: Vocabulary, sampler: Sampler) -> Tasks:
    b, device = len(scenes.kind), sampler.device
    weights = torch.tensor([p.QUESTION_WEIGHTS[name] for name in p.QUESTION_NAMES], device=device)

    def repeated(times: int) -> Scenes:
        return scenes[torch.arange(b, device=device).repeat_interleave(times)]

    query, kind = queries(repeated(QUERIES), vocabulary, sampler, weights)
    point, _ = objects(repeated(POINTS), vocabulary, sampler, "point")
    detect, _ = objects(repeated(DETECTS), vocabulary, sampler, "detect")
    brief = brief_captions(scenes, vocabulary, sampler)
    long, reasoned = long_captions(scenes, vocabulary), reasoned_counts(scenes, vocabulary, sampler)
    choice = sampler.rand(b, 1) < REASONING_SHARE
    mixed = Sequences(
        tokens=torch.where(choice, reasoned.tokens, long.tokens),
        weight=torch.where(choice, reasoned.weight, long.weight),
        values=torch.where(choice[..., None], reasoned.values, long.values),
        length=torch.where(choice[:, 0], reasoned.length, long.length),
    )
    parts = [query, point, detect, brief, mixed]
    return Tasks(
        tokens=torch.cat([part.tokens.reshape(b, -1) for part in parts], 1),
        weight=torch.cat([part.weight.reshape(b, -1) for part in parts], 1),
        values=torch.cat([part.values.reshape(b, -1, 2) for part in parts], 1),
        kind=kind.reshape(b, QUERIES),
    )
