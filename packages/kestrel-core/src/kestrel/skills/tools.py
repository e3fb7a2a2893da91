"""Tools that a chat model may ask for, as OpenAI's API spells them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kestrel.errors import InvalidRequestError, closest, shown
from kestrel.skills.inputs import is_list, plain_text
from kestrel.skills.schema import check_schema
from kestrel.spi.chat import Tool

__all__ = ["parse_tools"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # OpenAI's rule, and the dot of namespaced tools
_KEYS = ("name", "description", "parameters", "strict")


def parse_tools(value: Any) -> tuple[Tool, ...]:
    """Validated tools; none for None."""
    if value is None:
        return ()
    if not is_list(value):
        raise InvalidRequestError(f"tools is a {type(value).__name__}; give a list")
    tools = tuple(_tool(f"tools[{i}]", item) for i, item in enumerate(value))
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"tools names {name!r} twice; give each function once")
    return tools


def _tool(name: str, value: Any) -> Tool:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise InvalidRequestError(
            f"{name} must be {{'type': 'function', 'function': {{'name', 'parameters'}}}}"
        )
    for key in function:
        if key not in _KEYS:
            raise InvalidRequestError(
                f"{name}.function has an unknown key {shown(key)}. {closest(str(key), _KEYS)}"
            )
    title = function.get("name")
    if not isinstance(title, str) or not _NAME.fullmatch(title):
        raise InvalidRequestError(
            f"{name}.function.name is {shown(title)}; use up to 64 letters, digits, '_', '-', '.'"
        )
    return Tool(
        name=title,
        description=plain_text(f"{name}.function.description", function.get("description") or ""),
        parameters=_schema(f"{name}.function.parameters", function.get("parameters") or {}),
    )


def _schema(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or value.get("type", "object") != "object":
        raise InvalidRequestError(f"{name} must be a JSON schema of type 'object'")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is not JSON: {error}") from None
    check_schema(name, value)
    return value
