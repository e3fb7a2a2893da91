"""Conversations and raw prompts as a ``PromptFormat`` receives them: validated by the skill, media by place.

``Call.values["messages"]`` of the chat skill is a tuple of ``Message``, ``Call.values["tools"]`` one of ``Tool``;
``Call.values["parts"]`` of the generate skill is a tuple of ``Part``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MediaPart", "Message", "Part", "TextPart", "TokensPart", "Tool", "ToolCall"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text that the caller wrote; it never becomes control ids."""

    text: str


@dataclass(frozen=True, slots=True)
class TokensPart:
    """Token ids that the caller wrote (generate alone)."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MediaPart:
    """The media item ``call.prepared[item]``, given as ``call.media[item]``."""

    item: int


Part = TextPart | TokensPart | MediaPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the assistant asked for in an earlier turn."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. ``role`` is "system", "user", "assistant" or "tool"; only assistants have ``tool_calls``.

    ``tool_call_id`` names the call that a "tool" message answers. ``reasoning`` is what an assistant thought in an
    earlier turn, as text.
    """

    role: str
    parts: tuple[TextPart | MediaPart, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may ask for; ``parameters`` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
