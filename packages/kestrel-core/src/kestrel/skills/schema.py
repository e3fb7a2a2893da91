"""Whether a value is a JSON schema: the shapes of its keywords. Other keywords are annotations and pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kestrel.errors import InvalidRequestError, closest

__all__ = ["TYPES", "check_schema"]

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
MAX_DEPTH = 100

# Source: JSON Schema 2020-12, core and validation vocabularies, with the older spellings that tools still send.
_SCHEMAS = frozenset(
    "additionalItems additionalProperties contains else if not propertyNames then unevaluatedItems "
    "unevaluatedProperties".split()
)
_MAPS = frozenset("$defs definitions dependentSchemas patternProperties properties".split())
_LISTS = frozenset("allOf anyOf oneOf prefixItems".split())
_TEXTS = frozenset("$id $ref $schema description format pattern title".split())
_COUNTS = frozenset(
    "maxContains maxItems maxLength maxProperties minContains minItems minLength minProperties".split()
)
_NUMBERS = frozenset("exclusiveMaximum exclusiveMinimum maximum minimum multipleOf".split())


def check_schema(name: str, value: Any, depth: int = 0) -> None:
    """InvalidRequestError unless ``value`` is a JSON schema; ``name`` is how the message names it."""
    if isinstance(value, bool):
        return
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a JSON schema: a mapping, true or false")
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"{name[:80]}… is nested more than {MAX_DEPTH} deep. Flatten it")
    for key, item in value.items():
        _check_keyword(f"{name}.{key}", key, item, depth)


def _check_keyword(name: str, key: Any, item: Any, depth: int) -> None:
    if key == "type":
        _check_type(name, item)
    elif key in _SCHEMAS or (key == "items" and not isinstance(item, list | tuple)):
        check_schema(name, item, depth + 1)
    elif key in _MAPS:
        _require(name, item, "a mapping of names to schemas", lambda v: isinstance(v, Mapping))
        for inner, schema in item.items():
            check_schema(f"{name}.{inner}", schema, depth + 1)
    elif key in _LISTS or key == "items":
        _require(name, item, "a list of schemas", lambda v: _is_list(v) and (len(v) > 0 or key == "items"))
        for place, schema in enumerate(item):
            check_schema(f"{name}[{place}]", schema, depth + 1)
    elif key == "required":
        _require(name, item, "a list of names, each once", _is_names)
    elif key == "enum":
        _require(name, item, "a list of values", _is_list)
    elif key in _TEXTS:
        _require(name, item, "a string", lambda v: isinstance(v, str))
    elif key in _COUNTS:
        _require(name, item, "a whole number from 0", lambda v: _is_number(v) and v >= 0 and int(v) == v)
    elif key in _NUMBERS:
        _require(name, item, "a number", _is_number)


def _check_type(name: str, item: Any) -> None:
    listed = item if _is_list(item) and item else (item,)
    for kind in listed:
        if not isinstance(kind, str) or kind not in TYPES:
            raise InvalidRequestError(f"{name} is {str(kind)[:80]!r}. {closest(str(kind)[:80], TYPES)}")


def _require(name: str, item: Any, what: str, holds: Callable[[Any], bool]) -> None:
    if not holds(item):
        raise _wrong(name, item, what)


def _wrong(name: str, item: Any, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {str(item)[:80]!r}; it must be {what}")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_names(value: Any) -> bool:
    return _is_list(value) and all(isinstance(n, str) for n in value) and len(set(value)) == len(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
