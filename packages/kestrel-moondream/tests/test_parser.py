import pytest

from kestrel.spi import Found, GroundClose, GroundOpen, GroundPoint, Say
from kestrel.types import Token
from kestrel_moondream.config import RegionConfig, TokenizerConfig
from kestrel_moondream.parser import BoxParser, Coordinates, PointParser, ReasoningParser

IDS = TokenizerConfig()
COORDINATES = Coordinates(RegionConfig())


def coord(model_bin: int) -> Token:
    """A coordinate token of the model's bin 0 … 1023."""
    return Token(5, (model_bin + 1, 0, 0))


def size(width_bin: int, height_bin: int) -> Token:
    return Token(6, (0, width_bin + 1, height_bin + 1))


def pieces(parser, *tokens):
    return [piece for token in tokens for piece in parser.feed(token)] + list(parser.finish("stop"))


def test_two_coordinates_are_a_point_in_parts_of_1024():
    found = pieces(PointParser(IDS, COORDINATES), coord(512), coord(0), coord(1023), coord(256))
    assert found == [Found({"x": 0.5, "y": 0.0}), Found({"x": 1023 / 1024, "y": 0.25})]


def test_a_point_cut_short_is_dropped():
    assert pieces(PointParser(IDS, COORDINATES), coord(1), coord(2), coord(3)) == [
        Found({"x": 1 / 1024, "y": 2 / 1024})
    ]


def test_a_box_lies_around_its_centre_with_log_scaled_sides():
    (found,) = pieces(BoxParser(IDS, COORDINATES), coord(512), coord(512), size(1023 * 9 // 10, 0))
    width = 2 ** ((1023 * 9 // 10) / 1023 * 10 - 10)
    assert found.value["x_max"] - found.value["x_min"] == pytest.approx(width)
    assert found.value["y_max"] - found.value["y_min"] == pytest.approx(1 / 1024)
    assert (found.value["x_min"] + found.value["x_max"]) / 2 == pytest.approx(0.5)


def test_a_box_is_clamped_to_the_image():
    (found,) = pieces(BoxParser(IDS, COORDINATES), coord(0), coord(1023), size(1023, 1023))
    assert found.value == {
        "x_min": 0.0,
        "y_min": pytest.approx(1023 / 1024 - 0.5),
        "x_max": 0.5,
        "y_max": 1.0,
    }


def test_a_box_without_its_size_is_dropped():
    assert pieces(BoxParser(IDS, COORDINATES), coord(1), coord(2)) == []


def test_reasoning_ends_at_the_answer_id_and_its_opener_is_not_text():
    got = pieces(ReasoningParser(IDS, COORDINATES), *(Token(i) for i in (100, 101, 3, 3, 102, 103)))
    assert got == [Say((100,), "reasoning"), Say((101,), "reasoning"), Say((102,)), Say((103,))]


def test_only_one_opener_is_swallowed():
    got = pieces(ReasoningParser(IDS, COORDINATES), *(Token(i) for i in (3, 3, 3, 102)))
    assert got == [Say((3,)), Say((102,))]


def test_grounded_text_carries_its_points():
    tokens = [
        Token(100),
        Token(7),
        Token(101),
        coord(0),
        coord(512),
        coord(256),
        coord(512),
        Token(9),
        Token(3),
    ]
    assert pieces(ReasoningParser(IDS, COORDINATES), *tokens) == [
        Say((100,), "reasoning"), GroundOpen(), Say((101,), "reasoning"), GroundPoint(0.0, 0.5),
        GroundPoint(0.25, 0.5), GroundClose(),
    ]  # fmt: skip


def test_a_lone_coordinate_and_one_outside_grounded_text_belong_to_nothing():
    tokens = [
        coord(1),
        coord(2),
        Token(7),
        coord(3),
        Token(9),
        Token(7),
        Token(100),
        coord(4),
        coord(5),
        Token(9),
    ]
    assert pieces(ReasoningParser(IDS, COORDINATES), *tokens) == [
        GroundOpen(), GroundClose(), GroundOpen(), Say((100,), "reasoning"), GroundPoint(4 / 1024, 5 / 1024),
        GroundClose(),
    ]  # fmt: skip


@pytest.mark.parametrize("last", [[], [Token(3)], [Token(7)]])
def test_open_grounding_is_closed_by_whatever_ends_it(last):
    got = pieces(ReasoningParser(IDS, COORDINATES), Token(7), Token(100), *last)
    assert got[:3] == [GroundOpen(), Say((100,), "reasoning"), GroundClose()]
    assert got.count(GroundOpen()) == got.count(GroundClose())


def test_reasoning_that_ran_out_of_budget_has_no_answer():
    parser = ReasoningParser(IDS, COORDINATES)
    assert [
        p for p in pieces(parser, Token(100), Token(101)) if isinstance(p, Say) and p.channel == "text"
    ] == []
