"""What a family says about skills: prompts, decoding rules, parsers and defaults. No tensors, no engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kestrel.errors import InvalidRequestError
from kestrel.spi.decoding import Decoding
from kestrel.types import Segment, Token

if TYPE_CHECKING:
    from kestrel.spi.skill import Call, Completion, Infer

__all__ = [
    "Composition",
    "Found",
    "GroundClose",
    "GroundOpen",
    "GroundPoint",
    "Parser",
    "Piece",
    "PromptFormat",
    "Say",
    "SayText",
]


@dataclass(frozen=True, slots=True)
class Say:
    """Ids whose decoded text belongs to ``channel`` ("text" or "reasoning")."""

    ids: tuple[int, ...]
    channel: str = "text"


@dataclass(frozen=True, slots=True)
class SayText:
    """Literal text of ``channel``."""

    text: str
    channel: str = "text"


@dataclass(frozen=True, slots=True)
class Found:
    """A whole object of the skill's result (a point, a box, a tool call), complete and normalised.

    ``kind`` is "object" or "tool_call".
    """

    value: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "object"


@dataclass(frozen=True, slots=True)
class GroundOpen:
    """Grounded text starts here in the reasoning."""


@dataclass(frozen=True, slots=True)
class GroundPoint:
    """A point (0–1 of the upright original) that grounds the open text."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class GroundClose:
    """The grounded text ends here."""


Piece = Say | SayText | Found | GroundOpen | GroundPoint | GroundClose


class Parser(ABC):
    """Splits one sequence's generated tokens into pieces; the same at every cut of the stream.

    The final stop id is never fed. Prompt text is never fed.
    """

    @abstractmethod
    def feed(self, token: Token) -> Sequence[Piece]:
        """What ``token`` completes."""

    def finish(self, finish_reason: str) -> Sequence[Piece]:
        """What the end completes. Raises ModelOutputError when the whole cannot be read as what was asked."""
        return ()


Composition = Callable[["Call", "Infer"], Awaitable["dict[str, Any] | Completion"]]
"""Makes a call's output of many requests. With a ``Completion`` it also says how the whole ended; of a mere output
the finish reason is "cancelled" or "length" when any of its requests ended so, else "stop"."""


class PromptFormat(ABC):
    """A family's prompts. ``skills`` names the skills that the loaded model can do."""

    skills: frozenset[str]

    @abstractmethod
    def segments(self, skill: str, call: Call) -> list[Segment]:
        """The prompt of ``call``. Text from users goes into ``Text``, control ids into ``Tokens``."""

    @abstractmethod
    def decoding(self, skill: str, call: Call) -> Decoding:
        """How the answer is decoded."""

    def parser(self, skill: str, call: Call) -> Parser | None:
        """A fresh parser for one output, or None: every token is text."""
        return None

    def defaults(self, skill: str) -> Mapping[str, Any]:
        """Default settings of ``skill`` (``temperature``, ``max_tokens``, …, and ``reasoning``)."""
        return {}

    def validate(self, skill: str, call: Call) -> None:
        """Refuse a call that this model cannot do, before any media is decoded (InvalidRequestError)."""

    def run(self, skill: str) -> Composition | None:
        """The family's own composition of ``skill`` (many requests, passes), or None: one request."""
        return None

    def require(self, skill: str) -> None:
        """InvalidRequestError unless ``skill`` is one of ``skills``."""
        if skill not in self.skills:
            raise InvalidRequestError(
                f"this model has no skill {skill!r}; it has: {', '.join(sorted(self.skills))}"
            )
