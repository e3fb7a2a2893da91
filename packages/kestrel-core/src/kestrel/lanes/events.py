"""What a lane tells its sink, once per tick: committed tokens, and exactly one end per work.

``TokensReady`` is not frozen: one is made per sequence and step, and a frozen dataclass costs four times as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kestrel.types import FinishReason, Metrics, Token

__all__ = ["Event", "Failed", "Finished", "TokensReady"]


@dataclass(slots=True)
class TokensReady:
    """Tokens of a work, in order, a final stop id included. ``frames`` and ``durations``: step models only."""

    work_id: int
    tokens: list[Token]
    frames: tuple[int, ...] = ()
    durations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A work's good end. ``probes``: natural-log probabilities per probe. ``output``: a step model's result.

    ``carried`` is the step model's state when the work asked to keep it (then its owner closes it).
    """

    work_id: int
    finish_reason: FinishReason
    metrics: Metrics = field(default_factory=Metrics)
    probes: tuple[tuple[float, ...], ...] = ()
    output: Any = None
    carried: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A work's bad end. ``metrics`` hold what it cost until then."""

    work_id: int
    error: BaseException
    metrics: Metrics = field(default_factory=Metrics)


Event = TokensReady | Finished | Failed
