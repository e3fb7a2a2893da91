"""Thinking, answers and tool calls: the same for every way to cut an output into tokens."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.skills import Channels
from kestrel.spi import Tool
from kestrel.types import Token
from kestrel_qwen.markup import CONTROL, Markers, split_control
from kestrel_qwen.parser import AnswerParser
from kestrel_qwen.tool_calls import read_call

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "rate": {"type": "number"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
        "maybe": {"type": ["integer", "null"]},
    },
}
WEATHER = Tool(name="get_weather", parameters=SCHEMA)
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"


class CutTokenizer:
    """A token for every piece of text it is shown; control tokens keep their ids."""

    vocab_size = 1_000_000

    def __init__(self, spelled):
        self._spelled = spelled
        self._pieces = []

    def cut(self, data):
        self._pieces.append(data)
        return 10_000 + len(self._pieces) - 1

    def encode(self, text):
        return [self.cut(text.encode())] if text else []

    def decode(self, ids):
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id):
        return self._pieces[token_id - 10_000] if token_id >= 10_000 else b""

    def token_id(self, token):
        return self._spelled.token_id(token)


def read(text, spelled, config, *, cuts=(), thinking=False, tools=(), reason="stop"):
    """(text, reasoning, calls) of an output; text between control tokens is cut at ``cuts`` (shares of its bytes)."""
    tokenizer = CutTokenizer(spelled)
    ids = []
    for part in split_control(text):
        if part in CONTROL:
            ids.append(tokenizer.token_id(part))
            continue
        raw = part.encode()
        places = sorted({0, len(raw), *(round(cut * len(raw)) for cut in cuts)})
        ids += [tokenizer.cut(raw[a:b]) for a, b in pairwise(places)]
    parser = AnswerParser(Markers(tokenizer, config), thinking=thinking, tools=tools)
    channels = Channels(tokenizer, parser)
    shown = [chunk for i in ids for chunk in channels.feed(Token(i))]
    shown += channels.finish(reason)
    streamed = "".join(chunk.text for chunk in shown if chunk.kind.value == "text")
    assert streamed == channels.text
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in channels.tool_calls]
    return channels.text, channels.reasoning, calls


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("I add.\nTwice.\n</think>\n\n4", ("4", "I add.\nTwice.", [])),
        ("</think>\n\n4\n", ("4\n", "", [])),
        ("never closed\n", ("", "never closed\n", [])),
        ("a</think>b<think>\nc\n</think>\n\nd", ("bd", "ac", [])),
        ("<think>\na\n</think>\n\nb", ("b", "a", [])),
        ("a\n</think>\n\nb </think> c", ("b </think> c", "a", [])),
    ],
)
def test_thinking_and_answer_are_told_apart(output, expected, spelled, config):
    assert read(output, spelled, config, thinking=True) == expected


def test_an_output_without_thinking_is_shown_as_it_is(spelled, config):
    assert read("\n\n 4 \n", spelled, config) == ("\n\n 4 \n", "", [])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (CALL, ("", "", [("get_weather", '{"city": "Bern"}')])),
        (f"Let me look.\n\n{CALL}", ("Let me look.", "", [("get_weather", '{"city": "Bern"}')])),
        (f"{CALL}\n{CALL}\n", ("", "", [("get_weather", '{"city": "Bern"}')] * 2)),
        (f"{CALL}\nDone. ", ("Done. ", "", [("get_weather", '{"city": "Bern"}')])),
        ("no call \n", ("no call \n", "", [])),
    ],
)
def test_calls_are_found_and_the_space_around_them_dropped(output, expected, spelled, config):
    assert read(output, spelled, config, tools=[WEATHER]) == expected


@pytest.mark.parametrize(
    "output",
    [
        CALL.replace("get_weather", "format_disk"),
        CALL.removesuffix("</tool_call>"),
        CALL[:60],
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call></tool_call>",
        CALL.replace("</function>", "</function> and more"),
        CALL.replace("</parameter>", ""),
        CALL.replace("<function=get_weather>", "<function=>"),
        CALL.replace("</function>", "<parameter=city>\nBonn\n</parameter>\n</function>"),
        "</tool_call> <tool_response> x",
    ],
)
def test_what_is_no_call_that_was_offered_is_text_as_written(output, spelled, config):
    assert read(output, spelled, config, tools=[WEATHER]) == (output, "", [])


def test_without_tools_a_call_is_text(spelled, config):
    assert read(CALL, spelled, config) == (CALL, "", [])


def test_a_call_that_begins_anew_is_read_from_its_second_beginning(spelled, config):
    text, _, calls = read(f"<tool_call>\n<func\n{CALL}", spelled, config, tools=[WEATHER])
    assert (text, len(calls)) == ("<tool_call>\n<func", 1)


def test_a_call_that_is_spelled_in_plain_text_is_text(spelled, config):
    tokenizer = CutTokenizer(spelled)
    parser = AnswerParser(Markers(tokenizer, config), thinking=False, tools=[WEATHER])
    channels = Channels(tokenizer, parser)
    channels.feed(Token(tokenizer.cut(CALL.encode())))
    channels.finish("stop")
    assert (channels.text, channels.tool_calls) == (CALL, [])


def test_thinking_tags_inside_a_value_are_kept(spelled, config):
    asked = CALL.replace("Bern", "<think>Bern</think>")
    assert read(asked, spelled, config, tools=[WEATHER])[2] == [
        ("get_weather", '{"city": "<think>Bern</think>"}')
    ]


OUTPUTS = st.lists(
    st.one_of(
        st.sampled_from(
            [CALL, *CONTROL, "<function=get_weather>", "</function>", "<parameter=city>", "</parameter>"]
        ),
        st.text("a\n <>ü😀{", max_size=6),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=50)
@given(OUTPUTS, st.lists(st.floats(0, 1), max_size=8), st.booleans(), st.booleans())
def test_the_cut_of_the_stream_changes_nothing(spelled, config, output, cuts, thinking, with_tools):
    options = {"thinking": thinking, "tools": [WEATHER] if with_tools else ()}
    whole = read(output, spelled, config, **options)
    assert read(output, spelled, config, cuts=cuts, **options) == whole
    assert read(output, spelled, config, cuts=[i / 99 for i in range(100)], **options) == whole


def arguments(**written):
    block = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    found = read_call(f"\n<function=get_weather>\n{block}</function>\n", [WEATHER])
    return None if found is None else found["arguments"]


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ({"city": "[Bern]"}, "[Bern]"),
        ({"city": "3"}, "3"),
        ({"city": ""}, ""),
        ({"city": "\na\n\n"}, "\na\n\n"),
        ({"days": "3"}, 3),
        ({"days": "3.5"}, "3.5"),
        ({"days": "three"}, "three"),
        ({"days": "true"}, "true"),
        ({"rate": "1e3"}, 1000.0),
        ({"rate": "NaN"}, "NaN"),
        ({"exact": "True"}, True),
        ({"exact": "false"}, False),
        ({"exact": "1"}, "1"),
        ({"tags": '["a", 1]'}, ["a", 1]),
        ({"tags": "a, b"}, "a, b"),
        ({"maybe": "None"}, None),
        ({"maybe": "7"}, 7),
        ({"other": "7"}, "7"),
        ({"other": '{"a": [1]}'}, {"a": [1]}),
        ({"other": "{a}"}, "{a}"),
        ({"other": "true"}, "true"),
        ({"city": "see </parameter> and </function>"}, "see </parameter> and </function>"),
    ],
)
def test_values_are_read_as_the_tool_declares_them(written, read_as):
    found = list(arguments(**written).values())
    assert found == [read_as]
    assert type(found[0]) is type(read_as)


def test_a_call_without_arguments_is_a_call():
    assert read_call("<function=get_weather></function>", [WEATHER]) == {
        "name": "get_weather",
        "arguments": {},
    }


def test_a_value_that_is_nested_too_deep_is_text():
    assert arguments(other="[" * 100_000) == {"other": "[" * 100_000}
