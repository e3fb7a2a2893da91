"""Content parts as callers write them: text, images, videos, audio, token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrel.errors import InvalidRequestError, closest, shown
from kestrel.skills.inputs import Role, is_list, plain_text

__all__ = ["CHAT_TYPES", "PROMPT_TYPES", "media_part", "part_type"]

# type -> the keys that may hold its content; "image_url" is OpenAI's spelling of "image"
CHAT_TYPES: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("image",),
    "image_url": ("image_url",),
    "video": ("video", "frames"),
    "audio": ("audio",),
}
PROMPT_TYPES: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "tokens": ("token_ids",),
    "image": ("image",),
    "video": ("video", "frames"),
    "audio": ("audio",),
}


def part_type(name: str, value: Any, types: Mapping[str, tuple[str, ...]]) -> tuple[str, Any]:
    """The type of a part and its content. InvalidRequestError for unknown types and keys, naming the closest."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} is a {type(value).__name__}; give a mapping with 'type'")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in types:
        raise InvalidRequestError(f"{name} has type {shown(kind)}. {closest(shown(kind), types)}")
    keys = types[kind]
    for key in value:
        if key != "type" and key not in keys:
            raise InvalidRequestError(
                f"{name} has an unknown key {shown(key)}. {closest(str(key), ('type', *keys))}"
            )
    given = [value[key] for key in keys if value.get(key) is not None]
    if len(given) != 1:
        raise InvalidRequestError(f"{name} of type {kind!r} needs one of: {', '.join(keys)}")
    return kind, given[0]


def media_part(name: str, value: Any) -> str | Role:
    """A chat part: its text, or its media as ``(role, raw)``. A bare string is text."""
    if isinstance(value, str):
        return plain_text(name, value)
    kind, content = part_type(name, value, CHAT_TYPES)
    if kind == "text":
        return plain_text(f"{name}.text", content)
    if kind == "image_url":
        return "image", _url(f"{name}.image_url", content)
    if kind == "image" and (is_list(content) or isinstance(content, Mapping)):
        raise InvalidRequestError(f"{name}.image is a {type(content).__name__}; give one image per part")
    return kind, content


def _url(name: str, content: Any) -> Any:
    """OpenAI's ``{"url": ...}`` (its ``detail`` is taken and ignored), or the url alone."""
    if isinstance(content, Mapping):
        unknown = [key for key in content if key not in ("url", "detail")]
        if unknown:
            raise InvalidRequestError(f"{name} has an unknown key {unknown[0]!r}. Choices: detail, url")
        content = content.get("url")
    if not isinstance(content, str) or not content:
        raise InvalidRequestError(f"{name} needs a url: a data URI, or http(s) where the engine allows it")
    if not content.lower().startswith(("data:", "http://", "https://")):
        raise InvalidRequestError(
            f"{name} is {content[:60]!r}; a url starts with data:, http: or https:. For files use type 'image'"
        )
    return content
