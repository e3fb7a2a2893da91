"""Readers: channels, grounding, objects, and the same result at every cut of the stream."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kestrel.errors import ModelOutputError
from kestrel.skills import Channels, ObjectLimit, ObjectReader, ReasoningBudget, TextReader, reasoning_of
from kestrel.spi import Continue, Finish, Force, Found, Parser, Piece, SayText
from kestrel.testing.fakes import ByteTokenizer, MarkedParser
from kestrel.types import ChunkKind, Token

TOKENIZER = ByteTokenizer()


def control(name: str, *bins: int) -> Token:
    token_id = TOKENIZER.token_id(name)
    assert token_id is not None
    return Token(token_id, bins)


def spelt(text: str) -> list[Token]:
    return [Token(byte) for byte in text.encode()]


THOUGHT = [
    control("<think>"), *spelt("I sée "), control("<ground>"), *spelt("a dog"), control("<point>", 25, 75),
    control("<point>", 50, 50), control("</ground>"), *spelt("."), control("</think>"), *spelt(" A dög"),
]  # fmt: skip


def reader(with_reasoning: bool = True) -> TextReader:
    return TextReader(
        Channels(TOKENIZER, MarkedParser(TOKENIZER)),
        lambda channels, reason: {
            "answer": channels.text, "reasoning": reasoning_of(channels), "reason": reason
        },
        with_reasoning=with_reasoning,
    )  # fmt: skip


def test_reasoning_and_answer_are_channels_of_their_own():
    one = reader()

    chunks = [chunk for token in THOUGHT for chunk in one.feed(token)]
    last, result = one.finish("stop")

    by_kind = {kind: "".join(c.text for c in chunks + last if c.kind is kind) for kind in ChunkKind}
    assert by_kind[ChunkKind.TEXT] == " A dög" == result["answer"]
    assert by_kind[ChunkKind.REASONING] == "I sée a dog." == result["reasoning"]["text"]
    assert result["reason"] == "stop"


def test_grounding_is_given_by_character_offsets_into_the_reasoning():
    one = reader()
    for token in THOUGHT:
        one.feed(token)

    reasoning = one.finish("stop")[1]["reasoning"]

    assert reasoning["grounding"] == [{"start_idx": 6, "end_idx": 11, "points": [[0.25, 0.75], [0.5, 0.5]]}]
    (span,) = reasoning["grounding"]
    assert reasoning["text"][span["start_idx"] : span["end_idx"]] == "a dog"


def test_reasoning_that_nobody_asked_for_is_not_streamed():
    one = reader(with_reasoning=False)

    kinds = {chunk.kind for token in THOUGHT for chunk in one.feed(token)}

    assert kinds == {ChunkKind.TEXT}


@pytest.mark.parametrize("cut", range(len(THOUGHT) + 1))
def test_what_was_streamed_is_the_result_at_every_cut(cut):
    one = reader()

    chunks = [chunk for token in THOUGHT[:cut] for chunk in one.feed(token)]
    last, result = one.finish("length")

    streamed = {kind: "".join(c.text for c in chunks + last if c.kind is kind) for kind in ChunkKind}
    assert streamed[ChunkKind.TEXT] == result["answer"]
    assert streamed[ChunkKind.REASONING] == result["reasoning"]["text"]
    for span in result["reasoning"]["grounding"]:
        assert 0 <= span["start_idx"] <= span["end_idx"] <= len(result["reasoning"]["text"])


class ToolParser(Parser):
    """Every byte is a piece of literal text; the end finds a call."""

    def feed(self, token: Token) -> Sequence[Piece]:
        return (SayText(chr(token.id)),)

    def finish(self, finish_reason: str) -> Sequence[Piece]:
        return (Found({"name": "add", "arguments": {"a": 1, "b": "é"}}, "tool_call"),)


def test_tool_calls_take_openais_shape():
    channels = Channels(TOKENIZER, ToolParser())
    channels.feed(Token(ord("x")))

    (chunk,) = channels.finish("stop")

    assert chunk.kind is ChunkKind.TOOL_CALL
    assert channels.tool_calls == [chunk.value]
    assert chunk.value == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'},
    }


def objects(limit: int = 50, label: str | None = None, parser: Parser | None = None) -> ObjectReader:
    return ObjectReader(parser or MarkedParser(TOKENIZER), "objects", limit, label)


def test_objects_are_streamed_whole_and_listed_in_order():
    one = objects(label="cat")
    tokens = [control("<object>", 10, 20), *spelt("x"), control("<object>", 0, 5, 50, 60)]

    chunks = [chunk for token in tokens for chunk in one.feed(token)]
    last, result = one.finish("stop")

    want = [
        {"x": 0.1, "y": 0.2, "label": "cat"},
        {"x_min": 0.0, "y_min": 0.05, "x_max": 0.5, "y_max": 0.6, "label": "cat"},
    ]
    assert result == {"objects": want}
    assert [chunk.value for chunk in chunks] == want
    assert last == []
    assert {chunk.kind for chunk in chunks} == {ChunkKind.OBJECT}


def test_boxes_are_clamped_to_the_image():
    one = objects()
    one.feed(control("<object>", -5, 0, 140, 90))

    assert one.finish("stop")[1] == {"objects": [{"x_min": 0.0, "y_min": 0.0, "x_max": 1.0, "y_max": 0.9}]}


def test_objects_beyond_the_limit_are_dropped():
    one = objects(limit=2)
    for place in range(4):
        one.feed(control("<object>", place, place))

    assert len(one.finish("length")[1]["objects"]) == 2


class Unreadable(Parser):
    def feed(self, token: Token) -> Sequence[Piece]:
        return ()

    def finish(self, finish_reason: str) -> Sequence[Piece]:
        raise ModelOutputError("no list of boxes", raw_text="I cannot")


def test_output_that_cannot_be_read_is_an_error_but_for_a_cancelled_call():
    with pytest.raises(ModelOutputError) as caught:
        objects(parser=Unreadable()).finish("stop")
    assert caught.value.raw_text == "I cannot"
    assert objects(parser=Unreadable()).finish("cancelled") == ([], {"objects": []})
    with pytest.raises(ModelOutputError):
        Channels(TOKENIZER, Unreadable()).finish("length")
    assert Channels(TOKENIZER, Unreadable()).finish("cancelled") == []


def test_the_object_limit_ends_the_row_with_length():
    limit = ObjectLimit(MarkedParser(TOKENIZER), 2)

    decisions = [
        limit.accept(token) for token in (control("<object>", 1, 1), *spelt("a"), control("<object>", 2, 2))
    ]

    assert decisions == [Continue(), Continue(), Finish("length")]


def test_a_spent_reasoning_budget_forces_the_closing_ids_once():
    budget = ReasoningBudget(3, (9, 10))

    assert [budget.accept(Token(i)) for i in (1, 2, 3, 9, 10, 4)] == [
        Continue(), Continue(), Force((9, 10)), Continue(), Continue(), Continue(),
    ]  # fmt: skip
    assert budget.may_force


def test_reasoning_that_closes_itself_is_left_alone():
    budget = ReasoningBudget(3, (9,))

    assert {budget.accept(Token(i)) for i in (1, 9, 3, 4, 5)} == {Continue()}
