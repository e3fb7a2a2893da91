"""Points and boxes out of the model's JSON, at every cut; what is no such list is an error with its text."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import ModelOutputError
from kestrel.spi import Found
from kestrel.types import Token
from kestrel_qwen.markup import Markers
from kestrel_qwen.parser import AnswerParser
from kestrel_qwen.places import BOX_KEY, POINT_KEY, PlaceParser

POINTS = '[{"point_2d": [250, 500], "label": "a"}, {"point_2d": [0, 1000], "label": "b"}]'
FOUND = [{"x": 0.25, "y": 0.5}, {"x": 0.0, "y": 1.0}]
BOXES = '[{"bbox_2d": [100, 200, 300, 400.5], "label": "cat ]"}]'


@pytest.fixture
def places(spelled, config):
    """A function from an output to its places; tokens are bytes, ``step`` of them fed before each look."""

    def read(text, key=POINT_KEY, limit=50, reason="stop"):
        parser = PlaceParser(AnswerParser(Markers(spelled, config), thinking=False), key, limit)
        pieces = [piece for i in spelled.encode(text) for piece in parser.feed(Token(i))]
        pieces += parser.finish(reason)
        assert all(isinstance(piece, Found) for piece in pieces)
        return [dict(piece.value) for piece in pieces]

    return read


@pytest.mark.parametrize(
    "text",
    [
        POINTS,
        f"```json\n{POINTS}\n```",
        f"```\n{POINTS}",
        f"```json {POINTS}```",
        f"Here they are:\n```json\n{POINTS}\n```\nAnything else?",
        POINTS.replace("}]", "},\n]"),
        POINTS[1:-1],
        POINTS[1:-1].replace("}, {", "}\n{"),
        f"\n \t{json.dumps(json.loads(POINTS), indent=4)}\n",
    ],
)
def test_a_list_of_points_is_read_with_and_without_a_fence(text, places):
    assert places(text) == FOUND


def test_boxes_become_shares_of_the_picture_with_ordered_corners(places):
    assert places(BOXES, BOX_KEY) == [{"x_min": 0.1, "y_min": 0.2, "x_max": 0.3, "y_max": 0.4005}]
    turned = '[{"bbox_2d": [300, 400, 100, 200]}]'
    assert places(turned, BOX_KEY) == [{"x_min": 0.1, "y_min": 0.2, "x_max": 0.3, "y_max": 0.4}]


def test_an_empty_list_says_that_there_is_nothing(places):
    assert places("[]") == []
    assert places("```json\n[ ]\n```") == []


def test_a_coordinate_just_outside_is_the_edge(places):
    assert places('[{"point_2d": [-3, 1004]}]') == [{"x": 0.0, "y": 1.0}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("There is no cat.", "stop"),
        ("", "stop"),
        ("null", "stop"),
        (POINTS[:-1], "stop"),
        (POINTS[:50], "length"),
        ("[", "length"),
        ('[{"point_2d": [1, 2]} {"point_2d": [1, 2]}]', "stop"),
        ('[{"point_2d": [1]}]', "stop"),
        ('[{"point_2d": [1, true]}]', "stop"),
        ('[{"point_2d": [1, NaN]}]', "stop"),
        ('[{"point_2d": [1, 4000]}]', "stop"),
        ('[{"point_2d": ["1", "2"]}]', "stop"),
        ('[{"bbox_2d": [1, 2, 3, 4]}]', "stop"),
        ("[[1, 2]]", "stop"),
        ('[{"point_2d": [1, 2}]', "stop"),
        (f"{POINTS}\n{POINTS}", "stop"),
        ('[{"point_2d": [1, 2]},' + "[" * 5000, "stop"),
        ('[{"a": ' + "[" * 5000 + "}", "stop"),
        ('{"point_2d": [1, 2]},', "stop"),
        ('{"point_2d": [1, 2]} and {"point_2d": [1, 2]}', "stop"),
    ],
)
def test_what_is_no_list_of_points_is_an_error_with_its_text(text, reason, places):
    with pytest.raises(ModelOutputError, match="point_2d") as caught:
        places(text, reason=reason)
    assert caught.value.raw_text == text


def test_a_list_cut_at_the_most_objects_is_no_error(places):
    assert places(POINTS[:40], limit=1, reason="length") == FOUND[:1]
    assert places(POINTS, limit=1) == FOUND[:1]


def test_tokens_that_come_in_larger_pieces_give_the_same(spelled, config):
    from test_parser import CutTokenizer

    tokenizer = CutTokenizer(spelled)
    parser = PlaceParser(AnswerParser(Markers(tokenizer, config), thinking=False), POINT_KEY, 50)
    found = [*parser.feed(Token(tokenizer.cut(POINTS.encode()))), *parser.finish("stop")]
    assert [dict(piece.value) for piece in found] == FOUND


PIECES = st.sampled_from(
    ["[", "]", "{", "}", ",", " ", "\n", "```", "json", POINTS, '{"point_2d": [1, 2]}', "x", '"']
)


@settings(max_examples=50)
@given(st.lists(PIECES, max_size=7).map("".join), st.lists(st.floats(0, 1), max_size=5))
def test_the_cut_of_the_stream_changes_nothing(spelled, config, text, cuts):
    from test_parser import CutTokenizer

    def outcome(places):
        tokenizer = CutTokenizer(spelled)
        parser = PlaceParser(AnswerParser(Markers(tokenizer, config), thinking=False), POINT_KEY, 50)
        raw = text.encode()
        edges = sorted({0, len(raw), *places})
        found = [piece for a, b in pairwise(edges) for piece in parser.feed(Token(tokenizer.cut(raw[a:b])))]
        try:
            found += parser.finish("stop")
        except ModelOutputError as error:
            return found, str(error), error.raw_text
        return found, None, None

    whole = outcome(())
    assert outcome(range(len(text.encode()))) == whole
    assert outcome([round(cut * len(text)) for cut in cuts]) == whole
