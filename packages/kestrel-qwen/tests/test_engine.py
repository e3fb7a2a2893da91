"""The family through the engine: answers of transformers, and the same answers however they are scheduled."""

import asyncio

import numpy as np
import pytest
import torch
from qwen_oracle import greedy

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel.spi import ImageItem, Recurrent, VideoItem
from kestrel_qwen import plugin
from kestrel_qwen.driver import QwenDriver

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def picture(seed, width=44, height=30):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def clip(frames):
    times = tuple(0.5 * i for i in range(frames))
    return VideoItem(frames=tuple(picture(i) for i in range(frames)), times_s=times)


def create(directory, **config):
    host = PluginHost.from_modules({"qwen": plugin}, skills=builtin_skills())
    given = {"device": "cpu", "kv_cache_bytes": 2**24, "max_batch_size": 8, "max_model_len": 640, **config}
    return InferenceEngine.create(RuntimeConfig(model_path=directory, **given), plugins=host)


@pytest.fixture
def ask():
    """A function that gives the results of calls, run at once in a fresh engine or one after the other; and its
    counters."""

    def run(directory, calls, *, at_once=False, **config):
        async def main():
            async with await create(directory, **config) as engine:
                jobs = [getattr(engine, skill)(**inputs) for skill, inputs in calls]
                results = await asyncio.gather(*jobs) if at_once else [await job for job in jobs]
                (stats,) = engine.stats().values()
                return results, stats

        return asyncio.run(main())

    return run


def query(image, question, **inputs):
    return "query", {"image": image, "question": question, "settings": GREEDY, **inputs}


def chat(*contents, reasoning=False, system=None, **settings):
    """A conversation of which ``contents`` are user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return "chat", {"messages": messages, "reasoning": reasoning, "settings": GREEDY | settings}


def seen(image):
    return {"type": "image", "image": image}


def said(text):
    return {"type": "text", "text": text}


CALLS = [
    query(picture(0), "what is this?"),
    query(picture(1, 60, 20), "what is this?"),
    query(None, "no picture at all"),
    query([picture(0), picture(2)], "both?", reasoning=True),
    ("caption", {"image": picture(1), "length": "short", "settings": GREEDY}),
    chat("hello", "hi", "and?", system="be brief"),
    chat([seen(picture(2)), said("look")], "a thing", [said("and this?"), seen(picture(0))]),
    query(picture(0), "a longer question " * 6),
    query(None, "and then?", video=clip(5)),
    ("generate", {"prompt": "once upon a time " * 5, "settings": GREEDY}),
]
WAYS = {
    "one after the other": {},
    "at once": {"at_once": True},
    "at once in chunks": {"at_once": True, "enable_prefix_cache": False, "max_batched_tokens": 48},
    "few rows, odd pages": {"at_once": True, "max_batched_tokens": 53, "page_size": 7, "max_batch_size": 3},
}


@pytest.fixture(scope="module")
def plain(pair):
    """What each call gives alone: whole prompts, no cache."""
    made = {}

    def of(shape):
        if shape not in made:
            results = run_alone(pair(shape).directory)
            made[shape] = [(r.tokens, r.output) for r in results]
        return made[shape]

    return of


def run_alone(directory):
    async def main():
        async with await create(directory, enable_prefix_cache=False) as engine:
            return [await getattr(engine, skill)(**inputs) for skill, inputs in CALLS]

    return asyncio.run(main())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", ["dense", "moe, tied"])
def test_answers_do_not_depend_on_batching_chunks_or_the_cache(ask, pair, plain, shape, way):
    results, _ = ask(pair(shape).directory, CALLS, **WAYS[way])
    assert [(r.tokens, r.output) for r in results] == plain(shape)


def test_preempted_answers_are_what_they_would_have_been(ask, pair):
    directory = pair("dense").directory
    calls = [chat(f"question {i} " * 6, max_tokens=60) for i in range(4)]
    alone, _ = ask(directory, calls, enable_prefix_cache=False)
    together, stats = ask(
        directory, calls, at_once=True, kv_cache_bytes=None, kv_cache_pages=26, max_model_len=320
    )
    assert stats["preemptions"] > 0
    assert [r.tokens for r in together] == [r.tokens for r in alone]


def test_asking_again_from_a_warm_cache_changes_nothing(ask, pair, plain):
    results, stats = ask(pair("dense").directory, [*CALLS, *CALLS], max_batch_size=16)
    assert [(r.tokens, r.output) for r in results] == plain("dense") * 2
    assert stats["cache_hit_positions"] > 0.8 * stats["cache_queried_positions"] / 2


def test_an_answer_about_a_picture_is_that_of_transformers(ask, pair):
    model = pair("dense")
    (result,), _ = ask(model.directory, [query(picture(0), "what?")])
    item = model.driver.prepare(ImageItem(pixels=picture(0)), {})
    encode = model.driver.tokenizer.encode
    image = [5] * item.num_positions
    ids = [1, *encode("user\n"), 3, *image, 4, *encode("what?"), 2, *encode("\n"), 1, *encode("assistant\n")]
    ids += [7, *encode("\n\n"), 8, *encode("\n\n")]
    kinds = torch.tensor([[int(i == 5) for i in ids]], dtype=torch.int32)
    media = {
        "pixel_values": item.tensors["patches"].float() / 127.5 - 1,
        "image_grid_thw": item.tensors["grid"],
        "mm_token_type_ids": kinds,
    }
    assert list(result.tokens) == greedy(model.hf, ids, 12, **media)
    assert result.metrics.input_tokens == len(ids)


@pytest.fixture
def encoded(monkeypatch):
    """How many items each encoder launch took."""
    seen = []
    original = QwenDriver.pack

    def pack(self, kind, packed):
        seen.append(len(packed))
        return original(self, kind, packed)

    monkeypatch.setattr(QwenDriver, "pack", pack)
    return seen


def test_a_second_question_about_a_picture_reuses_all_of_it(ask, pair, encoded):
    calls = [query(picture(0), "what?"), query(picture(0), "who is it?"), query(picture(1), "what?")]
    (first, second, other), _ = ask(pair("dense").directory, calls)
    opening = 1 + len("user\n") + 1
    positions = pair("dense").driver.prepare(ImageItem(pixels=picture(0)), {}).num_positions
    assert first.metrics.cached_tokens == 0
    assert second.metrics.cached_tokens == opening + positions
    assert other.metrics.cached_tokens <= opening
    assert encoded == [1, 1]


def test_a_chat_about_pictures_encodes_each_once(ask, pair, encoded):
    turns = [[seen(picture(0)), said("look")], "a thing", [said("and this?"), seen(picture(1))], "two", "so?"]
    calls = [chat(*turns[: 2 * i + 1], reasoning=True) for i in range(3)]
    results, _ = ask(pair("moe, tied").directory, calls)
    assert encoded == [1, 1]
    thought = len("\n") + 1  # what opens the thinking, which the next turn drops
    stable = [r.metrics.input_tokens - thought for r in results]
    assert [r.metrics.cached_tokens for r in results] == [0, *stable[:-1]]


@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("extra", range(16))
def test_every_turn_of_a_chat_begins_where_the_last_one_was_answered(pair, reasoning, extra):
    """All alignments of the prompt to a page of 16: what is cached reaches the last ``<|im_start|>assistant``."""

    async def main():
        async with await create(pair("tied").directory) as engine:
            talk, cached, stable = [], [], []
            for turn in range(3):
                talk.append("x" * extra + f"question {turn}")
                skill, inputs = chat(*talk, reasoning=reasoning)
                result = await getattr(engine, skill)(**inputs)
                talk.append(f"answer {turn}")
                cached.append(result.metrics.cached_tokens)
                stable.append(result.metrics.input_tokens - len(opening))
            return cached, stable

    opening = (
        [7, 10] if reasoning else [7, 10, 10, 8, 10, 10]
    )  # <think> and newlines, which the next turn drops
    cached, stable = asyncio.run(main())
    assert cached[0] == 0
    assert cached[1:] == stable[:-1]


def test_states_of_linear_attention_may_be_kept_in_half_the_memory(pair, load, ask):
    directory = pair("dense").directory
    (whole,), (half,) = (
        [s for s in load(directory, recurrent_dtype=dtype).main.spec.states if isinstance(s, Recurrent)]
        for dtype in ("float32", "bfloat16")
    )
    assert [part.dtype for part in whole.parts] == ["auto", "float32"]
    assert [part.dtype for part in half.parts] == ["auto", "bfloat16"]
    calls = [query(picture(i), "what?") for i in range(3)]
    alone, _ = ask(directory, calls, recurrent_dtype="bfloat16")
    together, _ = ask(directory, calls, at_once=True, recurrent_dtype="bfloat16")
    assert [r.output["answer"] for r in together] == [r.output["answer"] for r in alone]
