"""OpenAI-style messages to ``Message`` values: roles and turns checked, media taken out in order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kestrel.errors import InvalidRequestError, closest, shown
from kestrel.skills.inputs import Role, is_list, plain_text
from kestrel.skills.parts import media_part
from kestrel.spi.chat import MediaPart, Message, TextPart, ToolCall

__all__ = ["parse_messages"]

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {"developer": "system"}
KEYS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning",
    "reasoning_content",
    "grounding",
)
WITH_MEDIA = ("user", "tool")


def parse_messages(value: Any) -> tuple[tuple[Message, ...], tuple[Role, ...]]:
    """The conversation and its media, in order. InvalidRequestError names the message that is wrong."""
    if not is_list(value) or not value:
        raise InvalidRequestError("messages must be a non-empty list of {'role', 'content'} mappings")
    media: list[Role] = []
    messages = tuple(_message(f"messages[{i}]", item, media) for i, item in enumerate(value))
    _check_turns(messages)
    return messages, tuple(media)


def _message(name: str, value: Any, media: list[Role]) -> Message:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} is a {type(value).__name__}; give a mapping with role and content")
    fields = {key: item for key, item in value.items() if item is not None}
    for key in fields:
        if key not in KEYS:
            raise InvalidRequestError(f"{name} has an unknown key {shown(key)}. {closest(str(key), KEYS)}")
    role = fields.get("role")
    role = ALIASES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{name} has role {shown(role)}. {closest(shown(role), ROLES)}")
    for key, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if key in fields and role != owner:
            raise InvalidRequestError(f"{name} has {key}; only a message of role {owner!r} may")
    message = Message(
        role=role,
        parts=_content(name, fields.get("content"), role, media),
        tool_calls=_tool_calls(name, fields.get("tool_calls", ())),
        tool_call_id=plain_text(f"{name}.tool_call_id", fields.get("tool_call_id", "")),
        name=plain_text(f"{name}.name", fields.get("name", "")),
        reasoning=_reasoning(name, fields.get("reasoning", fields.get("reasoning_content", ""))),
    )
    if (
        role == "user"
        and not message.text.strip()
        and not any(isinstance(p, MediaPart) for p in message.parts)
    ):
        raise InvalidRequestError(f"{name} is empty; a user's message needs text or an image")
    if role == "assistant" and "content" not in fields and not message.tool_calls:
        raise InvalidRequestError(f"{name} has neither content nor tool_calls")
    return message


def _content(name: str, content: Any, role: str, media: list[Role]) -> tuple[TextPart | MediaPart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(plain_text(f"{name}.content", content)),)
    if not is_list(content):
        raise InvalidRequestError(
            f"{name}.content is a {type(content).__name__}; give a string or a list of parts"
        )
    parts: list[TextPart | MediaPart] = []
    for place, item in enumerate(content):
        part_name = f"{name}.content[{place}]"
        found = media_part(part_name, item)
        if isinstance(found, str):
            parts.append(TextPart(found))
            continue
        if role not in WITH_MEDIA:
            raise InvalidRequestError(
                f"{part_name} is media; only messages of role 'user' or 'tool' may hold it"
            )
        parts.append(MediaPart(len(media)))
        media.append(found)
    return tuple(parts)


def _reasoning(name: str, value: Any) -> str:
    """Reasoning of an earlier turn: text, or the mapping that query returns."""
    if isinstance(value, Mapping):
        value = value.get("text", "")
    return plain_text(f"{name}.reasoning", value)


def _tool_calls(name: str, value: Any) -> tuple[ToolCall, ...]:
    if not is_list(value):
        raise InvalidRequestError(f"{name}.tool_calls is a {type(value).__name__}; give a list")
    return tuple(_tool_call(f"{name}.tool_calls[{i}]", item) for i, item in enumerate(value))


def _tool_call(name: str, value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"{name} must be {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{name}.function.arguments is not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"{name}.function.arguments must be a JSON object")
    return ToolCall(
        name=function["name"], arguments=arguments, id=plain_text(f"{name}.id", value.get("id") or "")
    )


def _check_turns(messages: Sequence[Message]) -> None:
    """System messages come first, tool messages answer a call, and somebody waits for an answer."""
    asked: set[str] = set()
    calls_open = False
    for i, message in enumerate(messages):
        if message.role == "system" and i and messages[i - 1].role != "system":
            raise InvalidRequestError(f"messages[{i}] is a system message after other turns; put it first")
        if message.role == "assistant":
            calls_open = bool(message.tool_calls)
            asked |= {call.id for call in message.tool_calls}
        elif message.role == "user":
            calls_open = False
        elif message.role == "tool":
            if not calls_open:
                raise InvalidRequestError(
                    f"messages[{i}] is a tool message and no assistant asked for a tool"
                )
            if message.tool_call_id and message.tool_call_id not in asked:
                raise InvalidRequestError(
                    f"messages[{i}] answers tool call {shown(message.tool_call_id)}. "
                    f"{closest(message.tool_call_id, asked)}"
                )
    if messages[-1].role not in ("user", "tool"):
        raise InvalidRequestError(
            f"the last message has role {messages[-1].role!r}; a model answers a 'user' or a 'tool' message"
        )
