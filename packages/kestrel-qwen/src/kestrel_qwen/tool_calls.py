"""Qwen's own format of tool calls, written and read.

``<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n…</function>\\n</tool_call>``: values are raw
text, lists and objects are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kestrel.errors import InvalidRequestError
from kestrel.spi import Tool, ToolCall
from kestrel.types import Text
from kestrel_qwen.markup import Markup, Piece

__all__ = ["read_call", "tool_block", "written_call"]

_NAME = re.compile(r"\s*<function=([^<>\n]+)>")
_KEY = re.compile(r"\s*<parameter=([^<>\n]+)>")
_END_OF_VALUE = re.compile(r"</parameter>(?=\s*<(?:parameter=|/function>))")
_END = re.compile(r"\s*</function>\s*")

_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
# The wording is the published template's: the model was trained on it.
_TAIL = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested "
    "within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, "
    "but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do "
    "not tell the user about function calls\n</IMPORTANT>"
)


def tool_block(tools: Sequence[Tool]) -> list[Piece]:
    """What a system turn says of ``tools``."""
    listed = "".join("\n" + json.dumps(as_json(tool), ensure_ascii=False) for tool in tools)
    return [Markup(_HEAD), Text(listed), Markup(_TAIL)]


def as_json(tool: Tool) -> dict[str, Any]:
    """``tool`` as OpenAI's API spells it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def written_call(call: ToolCall) -> Iterator[Piece]:
    """A call of an earlier turn as the model would have written it."""
    yield Markup("<tool_call>\n<function=")
    yield Text(call.name)
    yield Markup(">\n")
    for key, value in call.arguments.items():
        yield Markup("<parameter=")
        yield Text(f"{key}>\n{_written(value)}\n")
        yield Markup("</parameter>\n")
    yield Markup("</function>\n</tool_call>")


def _written(value: Any) -> str:
    if not isinstance(value, Mapping | list | tuple):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"an argument of an earlier tool call is not JSON: {error}. Send it as it was returned"
        ) from error


def read_call(block: str, tools: Sequence[Tool]) -> dict[str, Any] | None:
    """The call that stands between the tags as ``{"name", "arguments"}``; None when it is none.

    None too for a function that was not offered, a key given twice, and anything after the function's end.
    """
    head = _NAME.match(block)
    tool = None if head is None else next((t for t in tools if t.name == head[1].strip()), None)
    if head is None or tool is None:
        return None
    arguments: dict[str, Any] = {}
    at = head.end()
    while not _END.fullmatch(block, at):
        key = _KEY.match(block, at)
        end = None if key is None else _END_OF_VALUE.search(block, key.end())
        if key is None or end is None or key[1] in arguments:
            return None
        arguments[key[1]] = _value(_unframed(block[key.end() : end.start()]), _declared(tool, key[1]))
        at = end.end()
    return {"name": tool.name, "arguments": arguments}


def _unframed(raw: str) -> str:
    """A value without the line breaks that the format puts around it."""
    return raw.removeprefix("\n").removesuffix("\n")


_TYPES: Mapping[str, tuple[type, ...]] = {
    "array": (list,), "object": (dict,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip
_SPELLED = {"True": True, "False": False, "None": None}  # as the template writes them


def _declared(tool: Tool, key: str) -> tuple[str, ...] | None:
    """The JSON types that the tool's schema allows for an argument, or None where it does not say."""
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(kind, str):
        return (kind,)
    return tuple(kind) if isinstance(kind, list | tuple) else None


def _value(raw: str, kinds: tuple[str, ...] | None) -> Any:
    """``raw`` as one of the declared types; as text where text is allowed or nothing else fits.

    An argument without a declared type is a list or an object if it is written as one, else text.
    """
    if kinds is None:
        kinds = ("array", "object")
    elif "string" in kinds:
        return raw
    value = _parsed(raw)
    for kind in kinds:
        if isinstance(value, _TYPES.get(kind, ())) and isinstance(value, bool) <= (kind == "boolean"):
            return value
    return raw


def _parsed(raw: str) -> Any:
    """JSON, or one of Python's three constants; the text itself when it is neither."""
    text = raw.strip()
    if text in _SPELLED:
        return _SPELLED[text]
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return raw


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
