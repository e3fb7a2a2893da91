"""Every built-in skill: what it refuses at the door, what it hands to the family, and the shape of its result."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError, PluginError
from kestrel.skills import builtin_skills
from kestrel.spi import (
    Call,
    Completion,
    Finish,
    Infer,
    MediaItem,
    MediaPart,
    Message,
    Request,
    TextPart,
    TokensPart,
    Tool,
    ToolCall,
)
from kestrel.testing.fakes import ByteTokenizer, EchoPromptFormat
from kestrel.types import Media, Prepared, StreamChunk, Text, Token, Tokens

TOKENIZER = ByteTokenizer()
PROMPT = EchoPromptFormat(TOKENIZER)
SKILLS = {skill.name: skill for skill in builtin_skills()}
PIXELS = np.zeros((2, 2, 3), np.uint8)
ITEM = Prepared(kind="image", digest=bytes(32), num_positions=4, tensors={})


def parse(skill: str, settings: dict[str, Any] | None = None, **inputs: Any) -> Call:
    return SKILLS[skill].parse(inputs, SKILLS[skill].settings(settings, {}))


def control(name: str, *bins: int) -> Token:
    token_id = TOKENIZER.token_id(name)
    assert token_id is not None
    return Token(token_id, bins)


def spelt(text: str) -> list[Token]:
    return [Token(byte) for byte in text.encode()]


class ScriptedInfer(Infer):
    """Answers each request with the next of ``scripts``, read by its reader."""

    tokenizer = TOKENIZER
    prompt = PROMPT

    def __init__(self, scripts: Sequence[Sequence[Token]], reasons: Sequence[str] = ()) -> None:
        self.scripts, self.reasons = list(scripts), list(reasons)
        self.requests: list[Request] = []
        self.chunks: list[StreamChunk] = []

    async def __call__(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        tokens, reason = self.scripts.pop(0), self.reasons.pop(0) if self.reasons else "stop"
        done = []
        for _ in range(request.settings.n):
            assert request.reader is not None
            reader = request.reader()
            self.chunks += [chunk for token in tokens for chunk in reader.feed(token)]
            chunks, output = reader.finish(reason)
            self.chunks += chunks
            done.append(Completion(tokens=tuple(tokens), finish_reason=reason, output=output))
        return done

    def stream(self, request: Request) -> AsyncIterator[Token]:
        raise NotImplementedError

    async def prepare(self, item: MediaItem) -> Prepared:
        raise NotImplementedError

    async def run_pass(self, name, inputs, media=()):
        raise NotImplementedError

    async def cpu(self, fn):
        return fn()

    def emit(self, chunk: StreamChunk) -> None:
        self.chunks.append(chunk)


async def answer(call: Call, *scripts: Sequence[Token], reasons: Sequence[str] = ()) -> list[Completion]:
    ready = call.with_prepared([ITEM] * len(call.media))
    return await SKILLS[call.skill].run(ready, ScriptedInfer(scripts, reasons), PROMPT, TOKENIZER)


REFUSED = [
    ("query", {}, "question is missing"),
    ("query", {"question": " \n "}, "question is empty"),
    ("query", {"question": 3}, "question is a int"),
    ("query", {"question": "\ud800"}, "lone surrogate"),
    ("query", {"qestion": "Why?"}, "Did you mean 'question'"),
    ("query", {"question": "Why?", "images": [PIXELS]}, "Did you mean 'image'"),
    ("query", {"question": "Why?", "image": []}, "empty list"),
    ("query", {"question": "Why?", "image": [PIXELS, None]}, "an image is a NoneType"),
    ("query", {"question": "Why?", "reasoning": "yes"}, "reasoning is 'yes'"),
    ("query", {"question": "Why?", "spatial_refs": [[0.1, 0.2]]}, "none was given"),
    ("caption", {}, "caption needs one image"),
    ("caption", {"image": [PIXELS, PIXELS]}, "was given 2"),
    ("caption", {"image": PIXELS, "length": "shrt"}, "Did you mean 'short'"),
    ("caption", {"image": PIXELS, "length": 3}, "length is 3"),
    ("caption", {"image": PIXELS, "length": 10**5000}, "length is a int that cannot be shown"),
    ("transcribe", {"audio": b"", "clip_timestamps": [10**400]}, "number of seconds"),
    ("transcribe", {"audio": b"", "logprob_threshold": 10**400}, "finite number"),
    ("transcribe", {"audio": b"", "language_detection_threshold": 10**400}, "must be"),
    ("point", {"object": "cat"}, "point needs one image"),
    ("point", {"image": PIXELS}, "object is missing"),
    ("detect", {"image": PIXELS, "object": ""}, "object is empty"),
    ("detect", {"image": PIXELS, "object": []}, "0 names"),
    ("detect", {"image": PIXELS, "object": ["cat", " "]}, r"object\[1\] is empty"),
    ("detect", {"image": PIXELS, "object": ["cat", "cat "]}, "twice"),
    ("detect", {"image": PIXELS, "object": "cat", "spatial_refs": [[0, 0]]}, "takes no input 'spatial_refs'"),
    ("segment", {"image": PIXELS, "object": None}, "object is missing"),
    ("generate", {}, "prompt is a NoneType"),
    ("generate", {"prompt": ""}, "prompt is empty"),
    ("generate", {"prompt": []}, "prompt is empty"),
    ("generate", {"prompt": [{"type": "tokens", "token_ids": []}]}, "prompt is empty"),
    ("generate", {"prompt": [{"type": "tokens", "token_ids": [1, -2]}]}, "holds -2"),
    ("generate", {"prompt": [{"type": "tokens", "token_ids": [True]}]}, "holds True"),
    ("generate", {"prompt": [{"type": "tokens", "token_ids": [-(10**5000)]}]}, "cannot be shown"),
    ("generate", {"prompt": [{"type": "txt", "text": "a"}]}, "Did you mean 'text'"),
    ("generate", {"prompt": [{"type": "text", "txt": "a"}]}, "unknown key 'txt'"),
    ("generate", {"prompt": [{"type": ["text"]}]}, "has type"),
    ("generate", {"prompt": [{"type": "video"}]}, "needs one of: video, frames"),
]


@pytest.mark.parametrize(("skill", "inputs", "message"), REFUSED)
def test_wrong_inputs_are_refused_and_named(skill, inputs, message):
    with pytest.raises(InvalidRequestError, match=message):
        parse(skill, **inputs)


@pytest.mark.parametrize(
    ("refs", "message"),
    [
        ("0.1,0.2", "spatial_refs is a str"),
        ([0.1, 0.2], r"spatial_refs\[0\] is 0.1"),
        ([[0.1]], r"spatial_refs\[0\]"),
        ([[0.1, 0.2], [0.1, 0.2, 0.3]], r"spatial_refs\[1\]"),
        ([[math.nan, 0.2]], "holds nan"),
        ([[0.1, 1.2]], "holds 1.2"),
        ([[-0.1, 0.2]], "holds -0.1"),
        ([["0", 0.2]], "holds '0'"),
        ([[True, 0.2]], "holds True"),
        ([[10**400, 0.2]], "holds 1000"),
        ([[10**5000, 0.2]], "holds a int that cannot be shown"),
        ([[0.5, 0.1, 0.4, 0.2]], "must not exceed"),
        ([[0.1, 0.5, 0.4, 0.2]], "must not exceed"),
    ],
)
def test_spatial_references_outside_the_image_are_refused(refs, message):
    with pytest.raises(InvalidRequestError, match=message):
        parse("point", image=PIXELS, object="cat", spatial_refs=refs)


def test_spatial_references_come_after_the_images_in_their_order():
    call = parse(
        "query", image=[PIXELS, "b.png"], question=" Why? ", spatial_refs=[(0, 1), [0.1, 0.2, 0.3, 0.2]]
    )

    assert [role for role, _ in call.media] == ["image", "image", "spatial", "spatial"]
    assert [raw for role, raw in call.media if role == "spatial"] == [(0.0, 1.0), (0.1, 0.2, 0.3, 0.2)]
    assert call.values == {"question": "Why?", "has_image": True}


@pytest.mark.parametrize(
    ("skill", "setting"),
    [("caption", "max_objects"), ("point", "stop"), ("query", "max_objects"), ("detect", "ignore_eos"),
     ("generate", "max_reasoning_tokens"), ("chat", "temprature")],
)  # fmt: skip
def test_settings_that_a_skill_does_not_take_are_refused(skill, setting):
    with pytest.raises(InvalidRequestError, match=setting):
        SKILLS[skill].settings({setting: 1}, {})


async def test_query_returns_its_answer_and_its_reasoning_when_on():
    script = [control("<think>"), *spelt("hm"), control("</think>"), *spelt(" Yes")]

    off = await answer(parse("query", question="Why?"), script)
    on = await answer(parse("query", question="Why?", reasoning=True), script)

    assert off[0].output == {"answer": " Yes"}
    assert on[0].output == {"answer": " Yes", "reasoning": {"text": "hm", "grounding": []}}


async def test_caption_returns_its_caption():
    call = parse("caption", image=PIXELS)

    assert call.values == {"length": "normal"}
    assert (await answer(call, spelt("A box.")))[0].output == {"caption": "A box."}


async def test_n_outputs_are_read_apart():
    done = await answer(parse("caption", {"n": 2}, image=PIXELS), spelt("A box."))

    assert [one.output for one in done] == [{"caption": "A box."}] * 2


@pytest.mark.parametrize(
    ("skill", "key"), [("point", "points"), ("detect", "objects"), ("segment", "segments")]
)
async def test_spatial_skills_return_their_objects(skill, key):
    done = await answer(parse(skill, image=PIXELS, object=" cat "), [control("<object>", 10, 20)])

    assert done[0].output == {key: [{"x": 0.1, "y": 0.2}]}


async def test_a_list_of_objects_is_one_request_each_with_labels_in_order():
    call = parse("detect", image=PIXELS, object=["cat", "dog"])
    infer = ScriptedInfer([[control("<object>", 1, 2)], [control("<object>", 3, 4)]], ["stop", "length"])

    (done,) = await SKILLS["detect"].run(call.with_prepared([ITEM]), infer, PROMPT, TOKENIZER)

    want = [{"x": 0.01, "y": 0.02, "label": "cat"}, {"x": 0.03, "y": 0.04, "label": "dog"}]
    assert done.output == {"objects": want}
    assert [chunk.value for chunk in infer.chunks] == want
    assert done.finish_reason == "length"
    assert len(done.tokens) == 2
    prompts = [
        segment.text
        for request in infer.requests
        for segment in request.segments
        if isinstance(segment, Text)
    ]
    assert ['"object": "cat"' in prompts[0], '"object": "dog"' in prompts[1]] == [True, True]


async def test_one_name_in_a_list_is_labelled_too():
    done = await answer(parse("point", image=PIXELS, object=["cat"]), [control("<object>", 1, 2)])

    assert done[0].output == {"points": [{"x": 0.01, "y": 0.02, "label": "cat"}]}


async def test_when_one_of_several_requests_fails_the_call_fails_with_it():
    class Failing(ScriptedInfer):
        async def __call__(self, request: Request) -> list[Completion]:
            raise InvalidRequestError("too long")

    call = parse("detect", image=PIXELS, object=["cat", "dog"])

    with pytest.raises(InvalidRequestError, match="too long"):
        await SKILLS["detect"].run(call, Failing([]), PROMPT, TOKENIZER)


def request(call: Call) -> Request:
    return SKILLS[call.skill].request(call.with_prepared([ITEM] * len(call.media)), PROMPT, TOKENIZER)


def test_a_spatial_request_ends_at_max_objects():
    one = request(parse("point", {"max_objects": 1}, image=PIXELS, object="cat"))

    assert one.decoding.acceptors[0]().accept(control("<object>", 1, 1)) == Finish("length")


def test_a_family_without_a_parser_for_its_spatial_skill_is_named():
    class Parserless(EchoPromptFormat):
        def parser(self, skill, call):
            return None

    one = SKILLS["point"].request(parse("point", image=PIXELS, object="a"), Parserless(TOKENIZER), TOKENIZER)

    with pytest.raises(PluginError, match="no parser"):
        one.reader()


def test_stop_strings_end_the_row_and_come_before_the_familys_acceptors():
    class Budgeted(EchoPromptFormat):
        def decoding(self, skill, call):
            return replace(super().decoding(skill, call), acceptors=(lambda: pytest.fail("second"),))

    call = parse("query", {"stop": ["ab"]}, question="Why?")
    one = SKILLS["query"].request(call, Budgeted(TOKENIZER), TOKENIZER)

    stops = one.decoding.acceptors[0]()
    assert len(one.decoding.acceptors) == 2
    assert [type(stops.accept(token)).__name__ for token in spelt("xab")] == [
        "Continue",
        "Continue",
        "Finish",
    ]
    assert not stops.may_force
    assert one.settings.stop == ("ab",)


async def test_the_answer_ends_before_the_stop_string():
    done = await answer(parse("query", {"stop": ["ab"]}, question="Why?"), spelt("xa xab"))

    assert done[0].output == {"answer": "xa x"}


async def test_generate_returns_text_and_ids_and_adds_nothing():
    call = parse(
        "generate",
        prompt=[
            {"type": "text", "text": " <bos>"}, {"type": "tokens", "token_ids": [256, 7]},
            {"type": "image", "image": PIXELS}, {"type": "video", "frames": [PIXELS]},
        ],
    )  # fmt: skip

    assert call.values["parts"] == (TextPart(" <bos>"), TokensPart((256, 7)), MediaPart(0), MediaPart(1))
    assert [role for role, _ in call.media] == ["image", "video"]
    assert request(call).segments == (Text(" <bos>"), Tokens((256, 7)), Media(ITEM), Media(ITEM))
    assert (await answer(call, spelt("é")))[0].output == {"text": "é", "token_ids": [0xC3, 0xA9]}


def test_generate_refuses_ids_outside_the_vocabulary():
    call = parse("generate", prompt=[{"type": "tokens", "token_ids": [TOKENIZER.vocab_size]}])

    with pytest.raises(InvalidRequestError, match="outside this model's vocabulary"):
        request(call)


USER = {"role": "user", "content": "Hi"}
ASKED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}


def test_messages_keep_their_order_and_their_media():
    call = parse(
        "chat",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
                {"type": "text", "text": " What? "}, {"type": "image", "image": b"png"},
            ]},
            {"role": "assistant", "content": "A box.", "reasoning": {"text": "hm"}, "refusal": None},
            {"role": "user", "content": [{"type": "image", "image": PIXELS}]},
        ],
    )  # fmt: skip

    messages = call.values["messages"]
    assert [m.role for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[1].parts == (MediaPart(0), TextPart(" What? "), MediaPart(1))
    assert messages[2] == Message(role="assistant", parts=(TextPart("A box."),), reasoning="hm")
    assert messages[3].parts == (MediaPart(2),)
    assert [raw for _, raw in call.media[:2]] == ["data:image/png;base64,AA==", b"png"]


def test_tool_calls_of_earlier_turns_are_read():
    call = parse("chat", messages=[USER, ASKED, {"role": "tool", "tool_call_id": "c1", "content": "1"}])

    asked, told = call.values["messages"][1:]
    assert asked.tool_calls == (ToolCall(name="add", arguments={"a": 1}, id="c1"),)
    assert (told.tool_call_id, told.text) == ("c1", "1")


async def test_chat_returns_a_message_that_the_next_turn_may_hold():
    call = parse("chat", messages=[USER], reasoning=True)
    script = [control("<think>"), control("<ground>"), *spelt("h"), control("<point>", 1, 2), control("</think>"),
              *spelt(" Hello")]  # fmt: skip

    output = (await answer(call, script))[0].output

    grounding = [{"start_idx": 0, "end_idx": 1, "points": [[0.01, 0.02]]}]
    message = {"role": "assistant", "content": " Hello", "reasoning": "h", "grounding": grounding}
    assert output == {"message": message, "finish_reason": "stop"}
    again = parse("chat", messages=[USER, output["message"], USER])
    assert again.values["messages"][1].reasoning == "h"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "non-empty list"),
        ([], "non-empty list"),
        ("Hi", "non-empty list"),
        (["Hi"], r"messages\[0\] is a str"),
        ([{"role": "usr", "content": "Hi"}], "Did you mean 'user'"),
        ([{"role": ["user"], "content": "Hi"}], "has role"),
        ([{"content": "Hi"}], "has role None"),
        ([{"role": "user", "contents": "Hi"}], "Did you mean 'content'"),
        ([{"role": "user", "content": " "}], "is empty"),
        ([{"role": "user"}], "is empty"),
        ([{"role": "user", "content": 3}], "content is a int"),
        ([{"role": "user", "content": [{"type": "txt", "text": "a"}]}], "Did you mean 'text'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "needs one of: image"),
        ([{"role": "user", "content": [{"type": "image", "image": [PIXELS]}]}], "one image per part"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "cat.png"}}]}],
            "starts with data:",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "needs a url"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "unknown key 'x'"),
        ([USER, {"role": "assistant", "content": "Hi"}], "last message has role 'assistant'"),
        ([{"role": "system", "content": "Hi"}], "last message has role 'system'"),
        ([USER, {"role": "system", "content": "Hi"}, USER], "put it first"),
        ([USER, {"role": "assistant"}, USER], "neither content nor tool_calls"),
        ([USER, {"role": "tool", "content": "1"}], "no assistant asked"),
        ([USER, ASKED, {"role": "tool", "content": "1", "tool_call_id": "c2"}], "Did you mean 'c1'"),
        ([{**USER, "tool_calls": []}], "only a message of role 'assistant'"),
        ([USER, {"role": "assistant", "content": [{"type": "image", "image": PIXELS}]}, USER], "may hold it"),
        (
            [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                USER,
            ],
            "JSON",
        ),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}, USER], r"tool_calls\[0\] must be"),
    ],
)
def test_wrong_messages_are_refused_and_named(messages, message):
    with pytest.raises(InvalidRequestError, match=message):
        parse("chat", messages=messages)


def test_tools_are_validated_and_passed_on():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "add", "description": "Adds.", "parameters": schema}

    call = parse("chat", messages=[USER], tools=[{"type": "function", "function": function}])

    assert call.values["tools"] == (Tool(name="add", description="Adds.", parameters=schema),)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "f"}, "tools is a dict"),
        ([{"name": "f"}], r"tools\[0\] must be"),
        ([{"type": "retrieval", "function": {"name": "f"}}], r"tools\[0\] must be"),
        ([{"function": {"name": "f g"}}], "name is 'f g'"),
        ([{"function": {"name": "f", "params": {}}}], "unknown key 'params'"),
        ([{"function": {"name": "f", "parameters": {"type": "array"}}}], "type 'object'"),
        ([{"function": {"name": "f", "parameters": {"x": math.nan}}}], "is not JSON"),
        ([{"function": {"name": "f"}}, {"function": {"name": "f"}}], "twice"),
    ],
)
def test_wrong_tools_are_refused(tools, message):
    with pytest.raises(InvalidRequestError, match=message):
        parse("chat", messages=[USER], tools=tools)


def test_builtin_skills_have_distinct_names_and_descriptions():
    assert list(SKILLS) == [
        "query",
        "caption",
        "point",
        "detect",
        "segment",
        "chat",
        "generate",
        "transcribe",
    ]
    assert all(skill.description for skill in SKILLS.values())
    assert isinstance(SKILLS["query"].settings(None, {"temperature": 0.2}), Settings)


def test_token_ids_of_numpy_are_taken():
    call = parse("generate", prompt=[{"type": "tokens", "token_ids": [np.int64(3), 4]}])
    assert call.values["parts"] == (TokensPart((3, 4)),)
