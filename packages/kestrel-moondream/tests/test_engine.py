"""The family through the engine: whole answers against the oracle, and the same answers however they are scheduled."""

import asyncio
import io
import json
import shutil

import numpy as np
import pytest
from moondream_oracle import Oracle
from PIL import Image
from safetensors.numpy import load_file, save_file

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import CapacityError, InvalidMediaError, InvalidRequestError
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel_moondream import plugin

GREEDY = {"temperature": 0, "max_tokens": 20}


def picture(seed, width=90, height=60):
    small = np.random.default_rng(seed).integers(0, 256, (height // 6 + 1, width // 6 + 1, 3), dtype=np.uint8)
    return np.kron(small, np.ones((6, 6, 1), dtype=np.uint8))[:height, :width]


@pytest.fixture(scope="module")
def talkative_dir(tiny_dir, tmp_path_factory):
    """A checkpoint that reasons with grounded points, in ASCII."""
    directory = tmp_path_factory.mktemp("talkative")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tiny_dir / name, directory)
    tensors = load_file(tiny_dir / "model.safetensors")
    bias = tensors["model.text.lm_head.bias"].copy()
    vocab = json.loads((tiny_dir / "tokenizer.json").read_text())["model"]["vocab"]
    foreign = [i for token, i in vocab.items() if i > 20 and not (token.isascii() and token.isalpha())]
    bias[[1, 2, 4, 8, *range(10, 21), *foreign]] -= 1000
    bias[[5, 7, 9]] += (10, 4, -4)  # tried out: reasoning then has grounded spans, and ends now and then
    tensors["model.text.lm_head.bias"] = bias
    save_file(tensors, directory / "model.safetensors")
    return directory


def create(directory, **config):
    host = PluginHost.from_modules({"moondream": plugin}, skills=builtin_skills())
    given = {"device": "cpu", "kv_cache_bytes": 2**23, "max_batch_size": 8, **config}
    return InferenceEngine.create(RuntimeConfig(model_path=directory, **given), plugins=host)


@pytest.fixture
def ask(tiny_dir):
    """A function that gives the outputs of several calls, run at once in a fresh engine, or one after the other."""

    def run(calls, *, directory=tiny_dir, at_once=False, **config):
        async def main():
            async with await create(directory, **config) as engine:
                jobs = [getattr(engine, skill)(**inputs) for skill, inputs in calls]
                if at_once:
                    return await asyncio.gather(*jobs)
                return [await job for job in jobs]

        return asyncio.run(main())

    return run


def query(image, question, **inputs):
    return "query", {"image": image, "question": question, "settings": GREEDY, **inputs}


def text_ids(text):
    """The tiny tokenizer has a token per byte, behind 21 control tokens, in the order of the GPT-2 alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = sorted(range(256), key=lambda b: chr(b) if b in printable else chr(0x100 + _rank(b, printable)))
    return [21 + order.index(b) for b in text.encode()]


def _rank(byte, printable):
    return sum(1 for b in range(byte) if b not in printable)


def test_a_query_gives_the_oracles_ids(ask, oracle):
    (result,) = ask([query(picture(0), "what?")])
    ids = [1, 14, 2, *text_ids("what?"), 3, 3]
    assert list(result.tokens) == oracle.greedy(*oracle.prompt(ids, [oracle.image(picture(0))]), 20)
    assert result.metrics.input_tokens == 1 + 49 + len(ids)


@pytest.mark.parametrize(
    ("skill", "key", "prefix"), [("point", "points", [17]), ("detect", "objects", [15, 16])]
)
def test_objects_are_those_of_the_plain_loop(ask, oracle, skill, key, prefix):
    things = ["dog", "cat", "a", "house"]
    settings = {"max_objects": 2}
    results = ask([(skill, {"image": picture(0), "object": t, "settings": settings}) for t in things])
    ends = set()
    for thing, result in zip(things, results, strict=True):
        ids = [1, *prefix, 2, *text_ids(" " + thing), 3]
        expected, ended = oracle.objects(*oracle.prompt(ids, [oracle.image(picture(0))]), skill, 2)
        assert [tuple(found.values()) for found in result.output[key]] == [pytest.approx(e) for e in expected]
        assert result.finish_reason == ("stop" if ended else "length")
        ends.add(result.finish_reason)
    assert ends == {"stop", "length"}, "the examples cover both ends"


def grounded(ids, values, letters):
    """Reasoning text, its grounding and the answer, read off ids as the specification says."""
    text, spans, span, answer = "", [], None, []
    values = iter(values)
    at = ids.index(3) if 3 in ids else len(ids)
    for i in ids[:at]:
        if i in (7, 9) and span is not None:
            spans.append({**span, "end_idx": len(text)})
            span = None
        if i == 7:
            span = {"start_idx": len(text), "points": []}
        elif i == 5:
            value = next(values)
            if span is not None:
                span["points"].append(value)
        elif i in letters:
            text += letters[i]
    if span is not None:
        spans.append({**span, "end_idx": len(text)})
    answer = "".join(letters.get(i, "") for i in ids[at:])
    whole = [
        {**s, "points": [[x, y] for x, y in zip(s["points"][::2], s["points"][1::2], strict=False)]}
        for s in spans
    ]
    return {"text": text, "grounding": [s for s in whole if s["points"]]}, answer


def test_reasoning_carries_its_grounding_and_ends_in_an_answer(ask, talkative_dir):
    config = json.loads((talkative_dir / "config.json").read_text())["config"]
    tensors = {
        n.removeprefix("model."): t.astype("float64")
        for n, t in load_file(talkative_dir / "model.safetensors").items()
    }
    oracle = Oracle(tensors, config)
    letters = {text_ids(c)[0]: c for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    questions = ["how?", "where?"]
    image = oracle.image(picture(0))
    calls = [
        query(picture(0), q, reasoning=True, settings={"temperature": 0, "max_tokens": 40}) for q in questions
    ]
    seen_points = seen_answers = 0
    for question, result in zip(questions, ask(calls, directory=talkative_dir), strict=True):
        prompt = [1, 14, 2, *text_ids(question), 3, 4]
        ids, values = oracle.reasoning(*oracle.prompt(prompt, [image]), 40)
        assert list(result.tokens) == ids
        reasoning, answer = grounded(ids, values, letters)
        assert result.output == {"answer": answer, "reasoning": reasoning}
        seen_points += len(reasoning["grounding"])
        seen_answers += bool(answer)
    assert seen_points, "some reasoning is grounded"
    assert seen_answers, "some reasoning ends in an answer"


def test_a_reasoning_budget_still_gets_an_answer(ask):
    settings = {"temperature": 0, "max_tokens": 20, "max_reasoning_tokens": 4}
    none = {**settings, "max_reasoning_tokens": 0}
    some, at_once = ask([query(picture(0), "why?", reasoning=True, settings=s) for s in (settings, none)])
    assert some.tokens[4:6] == (3, 3)
    assert len(some.tokens) > 6
    assert at_once.tokens[:2] == (3, 3)
    assert at_once.output["reasoning"]["text"] == ""


def calls_of_every_kind():
    a, b = picture(0), picture(1, 60, 200)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why?"}]
    return [
        query(a, "what?"),
        query(b, "what?"),
        query(None, "no picture at all"),
        query([a, b], "both?"),
        query(a, "here?", spatial_refs=[[0.25, 0.5], [0.1, 0.1, 0.9, 0.8]]),
        query(a, "why?", reasoning=True),
        ("caption", {"image": b, "length": "short", "settings": GREEDY}),
        ("detect", {"image": a, "object": "dog", "settings": {"max_objects": 3}}),
        (
            "point",
            {"image": b, "object": "dog", "spatial_refs": [[0.5, 0.5]], "settings": {"max_objects": 3}},
        ),
        query(a, "a longer question " * 10),
        ("chat", {"messages": messages, "settings": GREEDY}),
    ]


def test_answers_do_not_depend_on_batching_chunks_or_the_cache(ask):
    calls = calls_of_every_kind()
    plain = [(r.tokens, r.output) for r in ask(calls, enable_prefix_cache=False)]
    for how in (
        {"at_once": False},
        {"at_once": True},
        {"at_once": True, "enable_prefix_cache": False, "max_batched_tokens": 64},
        {"at_once": True, "max_batched_tokens": 53, "page_size": 7, "max_batch_size": 3},
    ):
        assert [(r.tokens, r.output) for r in ask(calls, **how)] == plain, how


def test_a_deterministic_engine_gives_the_same_bits_alone_and_batched(ask):
    settings = {**GREEDY, "ignore_eos": True, "logprobs": True}
    calls = [("generate", {"prompt": "abc " * (i + 1), "settings": settings}) for i in range(3)]
    calls += [("query", {"image": picture(i), "question": "Why?", "settings": settings}) for i in range(3)]
    config = {"deterministic": True, "enable_prefix_cache": False}
    alone, batched = ask(calls, **config), ask(calls, at_once=True, **config)
    assert [result.logprobs for result in batched] == [result.logprobs for result in alone]


def test_asking_twice_from_a_warm_cache_changes_nothing(ask):
    first, *_, again = ask(
        [query(picture(0), q) for q in ("what is in the picture?", "why?", "what is in the picture?")]
    )
    assert again.tokens == first.tokens
    assert again.metrics.cached_tokens >= 64, "the picture and a page of the question"


@pytest.fixture
def encodes(monkeypatch):
    """How many items each encoder launch took."""
    from kestrel_moondream.driver import MoondreamDriver

    seen = []
    original = MoondreamDriver.pack

    def pack(self, kind, packed):
        seen.append((kind, len(packed)))
        return original(self, kind, packed)

    monkeypatch.setattr(MoondreamDriver, "pack", pack)
    return seen


def test_a_second_question_about_a_picture_reuses_all_of_it(ask, encodes):
    calls = [
        query(picture(0), "what?"),
        ("detect", {"image": picture(0), "object": "dog"}),
        query(picture(1), "what?"),
    ]
    first, second, other = ask(calls)
    assert (first.metrics.cached_tokens, other.metrics.cached_tokens) == (0, 0)
    assert second.metrics.cached_tokens >= 1 + 49
    assert encodes == [("image", 1), ("image", 1)]


def test_one_picture_asked_about_at_once_is_encoded_once(ask, encodes):
    ask([query(picture(0), q) for q in ("what?", "why?", "who?", "how?")], at_once=True)
    assert sum(count for _, count in encodes) == 1


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
def test_a_picture_of_any_size_is_answered_from_all_its_vision_tokens(ask, size):
    pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    (result,) = ask([query(pixels, "what?")])
    assert result.metrics.input_tokens == 1 + 49 + 3 + len("what?") + 2
    assert result.media[0]["width"] == size[0]


def test_points_lie_in_the_upright_original(ask):
    upright = picture(2, 80, 48)
    lying = Image.fromarray(np.rot90(upright, 1))  # to be turned right by its EXIF tag
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = io.BytesIO()
    lying.save(stored, "PNG", exif=exif)
    objects = [("point", {"image": image, "object": "a"}) for image in (upright, stored.getvalue())]
    first, second = ask(objects)
    assert first.output == second.output
    assert first.output["points"]
    assert all(0 <= value <= 1 for point in first.output["points"] for value in point.values())
    assert second.metrics.cached_tokens >= 50, "the same pixels, so the same picture"


def test_a_stream_shows_the_answer_and_whole_objects(tiny_dir):
    async def main():
        async with await create(tiny_dir) as engine:
            stream = await engine.query(picture(0), "what?", stream=True, settings=GREEDY)
            text = "".join([chunk.text async for chunk in stream])
            boxes = await engine.detect(picture(0), "dog", stream=True, settings={"max_objects": 3})
            values = [chunk.value async for chunk in boxes]
            return text, await stream.result(), values, await boxes.result()

    text, result, values, boxes = asyncio.run(main())
    assert text == result.output["answer"]
    assert values == boxes.output["objects"]


def test_bad_calls_fail_alone(ask, tiny_dir):
    image = picture(0)
    wrong = [
        (query(image, "  "), InvalidRequestError),
        (query(image, "x" * 600), CapacityError),
        (query(b"not an image", "what?"), InvalidMediaError),
        (query(None, "what?", spatial_refs=[[0.5, 0.5]]), InvalidRequestError),
        (query(image, "what?", spatial_refs=[[0.5, 1.5]]), InvalidRequestError),
        (("caption", {"image": image, "length": "huge"}), InvalidRequestError),
        (("segment", {"image": image, "object": "dog"}), InvalidRequestError),
        (("caption", {"image": image, "settings": {"max_pixels": 100}}), InvalidRequestError),
        (("generate", {"prompt": [{"type": "tokens", "token_ids": [277]}]}), InvalidRequestError),
    ]

    async def main():
        async with await create(tiny_dir) as engine:
            jobs = [getattr(engine, skill)(**inputs) for (skill, inputs), _ in wrong]
            good = query(image, "what?")
            return await asyncio.gather(*jobs, engine.query(**good[1]), return_exceptions=True)

    *errors, good = asyncio.run(main())
    for (call, expected), error in zip(wrong, errors, strict=True):
        assert isinstance(error, expected), (call[0], error)
    assert good.tokens == ask([query(image, "what?")])[0].tokens
