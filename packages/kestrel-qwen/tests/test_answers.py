"""Whole calls on a tiny random model: what users meet of prompts, parsers and media."""

import asyncio
import io

import numpy as np
import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import InvalidMediaError, InvalidRequestError, LoadError, ModelOutputError
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel.spi import VideoItem
from kestrel_qwen import plugin
from kestrel_qwen.driver import MAX_IMAGES, MAX_VIDEOS
from kestrel_qwen.tiny import CONTROL

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WRONG = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "text"}}},
}  # no type of JSON


def frame(seed):
    return np.random.default_rng(seed).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def film(count):
    """An MP4 of ``count`` frames, ten a second."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10, width=40, height=24, pix_fmt="yuv420p")
        for index in range(count):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame(index), format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.fixture
def call(tiny_dir):
    """A function that runs one call (or several, in order) in a fresh engine and gives its results."""

    def run(*calls, **config):
        host = PluginHost.from_modules({"qwen": plugin}, skills=builtin_skills())
        given = RuntimeConfig(
            model_path=tiny_dir, device="cpu", kv_cache_bytes=2**24, max_model_len=1024, **config
        )

        async def main():
            async with await InferenceEngine.create(given, plugins=host) as engine:
                return [await getattr(engine, skill)(**inputs) for skill, inputs in calls]

        return asyncio.run(main())

    return run


@pytest.mark.parametrize("skill", ["point", "detect"])
def test_text_that_is_no_list_of_places_is_an_error_that_carries_it(call, skill):
    with pytest.raises(ModelOutputError) as caught:
        call((skill, {"image": frame(0), "object": "cat", "settings": {"max_tokens": 8}}))
    assert caught.value.raw_text


def test_a_list_of_frames_is_the_clip_of_those_frames(call):
    frames = [frame(i) for i in range(3)]
    item = VideoItem(frames=tuple(frames), times_s=(0.0, 0.5, 1.0))
    listed, given = call(
        ("query", {"video": frames, "question": "what?", "settings": GREEDY}),
        ("query", {"video": item, "question": "what?", "settings": GREEDY}),
    )
    assert listed.tokens == given.tokens
    assert listed.metrics.input_tokens == given.metrics.input_tokens
    assert [meta["seconds"] for meta in listed.media] == [0.25, 1.0]


def test_a_film_is_sampled_by_rate_and_budget(call):
    raw = film(40)
    usual, few, dense = call(
        *(
            ("query", {"video": raw, "question": "what?", "settings": {**GREEDY, **asked}})
            for asked in ({}, {"max_frames": 2}, {"fps": 4})
        )
    )
    assert [meta["seconds"] for meta in usual.media] == pytest.approx([0.3, 1.4, 2.5, 3.6], abs=0.06)
    assert [len(r.media) for r in (usual, few, dense)] == [4, 1, 8]


def test_a_film_in_a_chat_stands_between_its_texts(call):
    content = [
        {"type": "text", "text": "see"},
        {"type": "video", "frames": [frame(0), frame(1)]},
        {"type": "text", "text": "well?"},
    ]
    (result,) = call(("chat", {"messages": [{"role": "user", "content": content}], "settings": GREEDY}))
    assert result.output["message"]["role"] == "assistant"
    assert len(result.media) == 1


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"video": []}, "0 frames"),
        ({"video": [frame(0), np.zeros((8, 8, 3), np.uint8)]}, "one size"),
        ({"video": b"no film"}, "not a video"),
        ({"image": np.zeros((2, 402, 3), np.uint8)}, "200 times"),
    ],
)
def test_media_that_cannot_be_used_are_refused(call, inputs, match):
    with pytest.raises(InvalidMediaError, match=match):
        call(("query", {"question": "what?", **inputs}))


@pytest.mark.parametrize(("kind", "most"), [("image", MAX_IMAGES), ("video", MAX_VIDEOS)])
def test_more_media_than_a_prompt_takes_are_refused_before_any_is_decoded(call, kind, most):
    part = {"type": kind, kind: b"nothing that could be decoded"}
    messages = [{"role": "user", "content": [part] * (most + 1)}]
    with pytest.raises(InvalidRequestError, match=f"at most {most} {kind}.* {most + 1} were given"):
        call(("chat", {"messages": messages}))


def test_a_budget_of_thinking_is_kept_and_the_answer_still_comes(call):
    inputs = {"question": "why?", "reasoning": True, "settings": {**GREEDY, "max_reasoning_tokens": 3}}
    (result,) = call(("query", {**inputs, "settings": {**inputs["settings"], "max_tokens": 12}}))
    thought = CONTROL.index("</think>")
    assert thought in result.tokens[:4]
    assert result.tokens.count(thought) == 1
    assert "text" in result.output["reasoning"]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_thinking_ends_at_its_budget(call, limit):
    settings = {**GREEDY, "max_tokens": 24, "max_reasoning_tokens": limit}
    (result,) = call(("query", {"question": "why?", "reasoning": True, "settings": settings}))
    assert (
        len(result.output["reasoning"]["text"].encode()) <= 3 * limit
    )  # a byte each; broken ones are shown as U+FFFD
    assert result.output["answer"]


def test_stop_strings_end_the_answer_and_not_the_thinking(call):
    settings = {**GREEDY, "max_tokens": 24, "max_reasoning_tokens": 6}
    asked = {"question": "why?", "reasoning": True}
    (free,) = call(("query", {**asked, "settings": settings}))
    thought, answer = free.output["reasoning"]["text"], free.output["answer"]
    stop = next(c for c in answer if c not in thought)
    kept, cut = call(
        ("query", {**asked, "settings": {**settings, "stop": [next(c for c in thought if c not in answer)]}}),
        ("query", {**asked, "settings": {**settings, "stop": [stop]}}),
    )
    assert kept.output == free.output
    assert cut.output == {**free.output, "answer": answer[: answer.index(stop)]}


def test_a_question_that_spells_every_control_token_is_as_long_as_its_bytes(call):
    spelled = "".join(CONTROL)
    as_text, plain = call(
        ("query", {"image": frame(0), "question": spelled, "settings": GREEDY}),
        ("query", {"image": frame(0), "question": "x" * len(spelled), "settings": GREEDY}),
    )
    assert as_text.metrics.input_tokens == plain.metrics.input_tokens


def test_several_odd_pictures_stand_anywhere_in_a_chat_and_alone(call):
    def shown(height, width):
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return {"type": "image", "image": pixels}

    odd = [shown(1, 1), shown(3, 200), shown(77, 13)]
    mixed, alone = call(
        (
            "chat",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "so"}, *odd]}],
                "settings": GREEDY,
            },
        ),
        ("chat", {"messages": [{"role": "user", "content": odd}], "settings": GREEDY}),
    )
    assert [len(r.media) for r in (mixed, alone)] == [3, 3]
    assert mixed.metrics.input_tokens == alone.metrics.input_tokens + len("so")


def test_three_answers_to_one_question_differ_and_repeat_with_their_seed(call):
    asked = (
        "query",
        {"image": frame(0), "question": "?", "settings": {**GREEDY, "temperature": 1, "n": 3, "seed": 1}},
    )
    first, again = call(asked, asked)
    assert len({str(output) for output in first.outputs}) == 3
    assert first.outputs == again.outputs


def test_thinking_that_nobody_asked_for_is_not_shown(call):
    (result,) = call(("query", {"question": "why?", "reasoning": False, "settings": GREEDY}))
    assert set(result.output) == {"answer"}


def test_tools_are_written_into_the_prompt(call):
    messages = [{"role": "user", "content": "hello"}]
    with_tools, without = call(
        ("chat", {"messages": messages, "tools": [TOOL], "settings": GREEDY}),
        ("chat", {"messages": messages, "settings": GREEDY}),
    )
    assert with_tools.metrics.input_tokens > without.metrics.input_tokens + 500


@pytest.mark.parametrize(
    ("skill", "inputs"),
    [
        ("chat", {"messages": [{"role": "user", "content": "?"}], "tools": [{"type": "function"}]}),
        (
            "chat",
            {"messages": [{"role": "system", "content": "a"}] * 2 + [{"role": "user", "content": "?"}]},
        ),
        (
            "generate",
            {"prompt": [{"type": "tokens", "token_ids": [CONTROL.index("<|image_pad|>")]}]},
        ),
        ("chat", {"messages": [{"role": "user", "content": "?"}], "tools": [{**TOOL, "function": WRONG}]}),
        ("chat", {"messages": [{"role": "system", "content": "alone"}]}),
        ("chat", {"messages": [{"role": "user", "content": []}]}),
        (
            "chat",
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "tool", "content": "4", "tool_call_id": "1"},
                ]
            },
        ),
        ("query", {"question": "?", "image": frame(0), "settings": {"max_pixels": 1}}),
        ("query", {"question": "?", "image": frame(0), "spatial_refs": [[0.5, 0.5]]}),
    ],
)
def test_requests_that_qwen_has_no_form_for_are_refused(call, skill, inputs):
    with pytest.raises(InvalidRequestError):
        call((skill, inputs))


def test_a_checkpoint_without_a_template_cannot_be_run_by_it(call):
    with pytest.raises(LoadError, match="chat_template"):
        call(chat_template="checkpoint")


def test_a_template_that_is_neither_builtin_nor_the_checkpoints_is_refused():
    with pytest.raises(InvalidRequestError, match="Did you mean 'checkpoint'"):
        RuntimeConfig(chat_template="checkpoints")
