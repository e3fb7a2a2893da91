"""Thinking between ``<think>`` and ``</think>``: when the prompt opens it, and what closes it in time."""

from __future__ import annotations

from collections.abc import Callable

from kestrel.errors import InvalidRequestError
from kestrel.skills import ReasoningBudget
from kestrel.spi import Acceptor, Call
from kestrel_qwen.markup import THOUGHT, Markers

__all__ = ["REASONS", "budget_of", "thinks"]

REASONS = ("query", "chat")
AFTER = "\n\n"  # what the template puts between thinking and answer


def thinks(skill: str, call: Call) -> bool:
    """Whether the answer begins inside the thinking; a budget of 0 tokens closes it in the prompt."""
    return skill in REASONS and call.reasoning and call.settings.max_reasoning_tokens != 0


def budget_of(skill: str, call: Call, markers: Markers) -> tuple[Callable[[], Acceptor], ...]:
    """The acceptor that forces the closing tag after ``max_reasoning_tokens``, where the call sets them."""
    limit = call.settings.max_reasoning_tokens
    if limit is None or not thinks(skill, call):
        return ()
    if THOUGHT not in markers.ids:
        raise InvalidRequestError(
            f"max_reasoning_tokens needs the token {THOUGHT}, which this checkpoint's tokenizer lacks. Leave it out"
        )
    closing = (markers.ids[THOUGHT], *markers.tokenizer.encode(AFTER))
    return (lambda: ReasoningBudget(limit, closing),)
