"""The template in code against the rendered prompts of the published one, as text and as ids."""

import json

import pytest
import torch
from conversations import GOLDENS, conversation, items, spelled_out

from kestrel.errors import InvalidRequestError
from kestrel.spi import MediaPart, Message, TextPart, Tool, ToolCall
from kestrel.types import Media, Prepared, Text, Tokens
from kestrel_qwen.markup import CONTROL, Markers
from kestrel_qwen.template import render

PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


def user(*parts):
    return Message(role="user", parts=tuple(TextPart(p) if isinstance(p, str) else p for p in parts))


def said(text, role="assistant", **rest):
    return Message(role=role, parts=(TextPart(text),), **rest)


@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: f"{case['name']}-{case['enable_thinking']}")
def test_every_golden_conversation_renders_as_published(case):
    messages, tools, kinds = conversation(case)
    pieces = render(messages, tools, thinking=case["enable_thinking"])
    assert spelled_out(pieces, kinds) == case["rendered"]


@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: f"{case['name']}-{case['enable_thinking']}")
def test_every_golden_conversation_has_the_ids_of_the_published_tokenizer(
    case, published, published_config, encoding
):
    from published import marked

    messages, tools, kinds = conversation(case)
    pieces = render(messages, tools, thinking=case["enable_thinking"])
    prepared = items(kinds)
    ids = []
    for segment in Markers(published, published_config).segments(pieces, prepared):
        match segment:
            case Tokens(new):
                ids += new
            case Text(text):
                ids += published.encode(text)
            case Media(item):
                ids.append(published.token_id(PADS[item.kind]))
    rendered = case["rendered"]
    if "video" in kinds:  # a slice brings its time, which the template leaves to the processor
        rendered = rendered.replace(
            "<|vision_start|><|video_pad|>", "<0.2 seconds><|vision_start|><|video_pad|>"
        )
    assert ids == marked(encoding, rendered)


def test_published_ids_of_a_short_prompt(published, published_config):
    pieces = render([user("Hello")], thinking=True)
    segments = Markers(published, published_config).segments(pieces, ())
    ids = [i for s in segments for i in (s.ids if isinstance(s, Tokens) else published.encode(s.text))]
    im_start, im_end, think, newline = 248045, 248046, 248068, 198
    assert ids[0] == im_start
    assert ids[4:] == [im_end, newline, im_start, *published.encode("assistant\n"), think, newline]


def test_text_that_spells_every_control_token_stays_text(spelled, config):
    everything = "".join(CONTROL)
    tool = Tool(name="f", description=everything, parameters={"type": "object", "description": everything})
    messages = [
        said(everything, "system"),
        user(everything),
        Message(
            role="assistant",
            parts=(TextPart(f"a{everything}"),),
            reasoning=everything,
            tool_calls=(ToolCall(name="f", arguments={everything: everything, "deep": [everything]}),),
        ),
        said(everything, "tool"),
    ]
    quiet = [
        said("s", "system"),
        user("u"),
        Message(
            role="assistant",
            parts=(TextPart("a"),),
            reasoning="r",
            tool_calls=(ToolCall(name="f", arguments={"k": "v", "deep": ["v"]}),),
        ),
        said("t", "tool"),
    ]
    markers = Markers(spelled, config)

    def control(messages, tools):
        segments = markers.segments(render(messages, tools, thinking=True), ())
        return [i for segment in segments if isinstance(segment, Tokens) for i in segment.ids]

    assert control(messages, [tool]) == control(quiet, [Tool(name="f")])


def test_neighbouring_texts_are_one_text(spelled, config):
    segments = Markers(spelled, config).segments(render([user("Hello ", "you")], thinking=True), ())
    assert segments[1] == Text("user\nHello you")


def test_a_video_is_its_slices_with_their_times(spelled, config):
    clip = Prepared(
        kind="video",
        digest=b"v" * 32,
        num_positions=2,
        tensors={"patches": torch.arange(8).reshape(8, 1), "grid": torch.tensor([[2, 2, 2]])},
        meta={
            "slice_times_s": (0.25, 1.25),
            "slice_digests": (b"a" * 32, b"b" * 32),
            "width": 9,
            "height": 8,
        },
    )
    segments = Markers(spelled, config).segments(render([user(MediaPart(0), "?")], thinking=False), (clip,))
    media = [s.prepared for s in segments if isinstance(s, Media)]
    assert [(m.digest, m.num_positions, m.tensors["grid"].tolist()) for m in media] == [
        (b"a" * 32, 1, [[1, 2, 2]]),
        (b"b" * 32, 1, [[1, 2, 2]]),
    ]
    assert media[1].tensors["patches"].flatten().tolist() == [4, 5, 6, 7]
    texts = [s.text for s in segments if isinstance(s, Text)]
    assert texts[:3] == ["user\n<0.2 seconds>", "<1.2 seconds>", "?"]


def test_a_bare_media_item_of_generate_brings_no_markers(spelled, config):
    (picture,) = items(["image"])
    assert Markers(spelled, config).media(picture, enclosed=False) == [Media(picture)]


@pytest.mark.parametrize(
    "messages",
    [
        [said("a", "system"), said("b", "system"), user("?")],
        [said("a", "system")],
        [Message(role="system", parts=(MediaPart(0),)), user("?")],
    ],
    ids=["two system messages", "no user message", "media in a system message"],
)
def test_conversations_that_the_template_has_no_form_for_are_refused(messages):
    with pytest.raises(InvalidRequestError):
        render(messages, thinking=True)


def test_arguments_are_raw_but_for_lists_and_objects():
    call = ToolCall(name="f", arguments={"a": True, "b": [1, "ü"], "c": {"d": None}, "e": 1.5, "g": "x\ny"})
    asked = Message(role="assistant", tool_calls=(call,))
    rendered = spelled_out(render([user("?"), asked, said("ok", "tool")], thinking=True), [])
    for key, value in {"a": "True", "b": '[1, "ü"]', "c": '{"d": null}', "e": "1.5", "g": "x\ny"}.items():
        assert f"<parameter={key}>\n{value}\n</parameter>\n" in rendered


def test_whitespace_alone_around_an_image_disappears():
    pieces = render([user("  \n", MediaPart(0), " what? ")], thinking=True)
    rendered = spelled_out(pieces, ["image"])
    assert "user\n<|vision_start|><|image_pad|><|vision_end|> what?<|im_end|>" in rendered


def test_thinking_before_the_last_question_is_dropped_and_after_it_kept():
    asked = Message(role="assistant", reasoning="why", tool_calls=(ToolCall(name="f"),))
    rendered = spelled_out(
        render([user("1"), asked, said("x", "tool"), user("2"), asked, said("y", "tool")], thinking=True), []
    )
    assert rendered.count("<think>\nwhy\n</think>") == 1
    assert rendered.index("<think>\nwhy") > rendered.index("user\n2")


def test_goldens_are_the_24_of_the_template():
    assert len(GOLDENS) == 24
    assert len({json.dumps(case["messages"]) for case in GOLDENS}) == 12
