"""JSON schemas of tools: every keyword has its shape."""

import pytest

from kestrel.errors import InvalidRequestError
from kestrel.skills.schema import check_schema
from kestrel.skills.tools import parse_tools

GOOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "description": "d",
    "properties": {
        "city": {"type": "string", "minLength": 1, "pattern": "^[A-Z]", "enum": ["Bern", "Basel"]},
        "days": {"type": ["integer", "null"], "minimum": 1, "exclusiveMaximum": 8, "default": 3},
        "at": {"$ref": "#/$defs/place"},
        "any": True,
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3, "uniqueItems": True},
        "pair": {"type": "array", "items": [{"type": "number"}, {}], "additionalItems": False},
        "properties": {"anyOf": [{"type": "null"}, {"const": 3}], "x-note": object},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"not": {"type": "string"}}},
}


def test_a_schema_of_every_shape_passes():
    check_schema("schema", GOOD)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "strng"}, r"schema\.type is 'strng'. Did you mean 'string'"),
        ({"type": []}, r"schema\.type"),
        ({"type": ["string", 3]}, r"schema\.type is '3'"),
        ({"properties": ["city"]}, r"schema\.properties is .* names to schemas"),
        ({"properties": {"city": "string"}}, r"schema\.properties\.city is 'string'"),
        ({"properties": {"a": {"items": 3}}}, r"schema\.properties\.a\.items"),
        ({"required": "city"}, r"schema\.required"),
        ({"required": ["a", "a"]}, r"schema\.required"),
        ({"required": [1]}, r"schema\.required"),
        ({"enum": "a"}, r"schema\.enum"),
        ({"anyOf": []}, r"schema\.anyOf"),
        ({"allOf": [{}, 1]}, r"schema\.allOf\[1\]"),
        ({"minLength": -1}, r"schema\.minLength"),
        ({"maxItems": 1.5}, r"schema\.maxItems"),
        ({"minimum": "0"}, r"schema\.minimum"),
        ({"description": 3}, r"schema\.description"),
        ([], "schema is"),
    ],
)
def test_what_is_no_schema_is_refused_by_name(schema, named):
    with pytest.raises(InvalidRequestError, match=named):
        check_schema("schema", schema)


def test_a_schema_that_never_ends_is_refused():
    deep = {}
    for _ in range(200):
        deep = {"not": deep}
    with pytest.raises(InvalidRequestError, match="deep"):
        check_schema("schema", deep)


def test_a_tool_whose_parameters_are_no_schema_is_refused():
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "text"}}}},
    }
    with pytest.raises(InvalidRequestError, match=r"tools\[0\].function.parameters.properties.a.type"):
        parse_tools([tool])


def test_parameters_nested_beyond_json_are_refused():
    deep = {}
    for _ in range(5000):
        deep = {"not": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": deep}}}
    with pytest.raises(InvalidRequestError, match="parameters"):
        parse_tools([tool])
