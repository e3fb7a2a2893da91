"""Random workloads: what a call gives alone, it gives in any company, in any chunks, cached, preempted and resumed."""

import asyncio
import random

import pytest
from test_engine import chat, clip, create, picture, query, said, seen

ALONE = {"enable_prefix_cache": False, "max_batch_size": 1}
SAMPLED = {"temperature": 1.0, "top_p": 0.9}


def a_call(rng):
    """One random call: a question, a chat of one to three turns, or raw text; of words, pictures and clips."""
    settings = {"max_tokens": rng.choice([1, 80, 120]), "priority": rng.randint(0, 2)}
    if rng.random() < 0.3:
        settings |= {**SAMPLED, "seed": rng.randrange(1000)}
    reasoning = rng.random() < 0.4
    if reasoning and rng.random() < 0.5:
        settings["max_reasoning_tokens"] = rng.randint(0, 9)
    words = "word " * rng.randint(1, 12)
    match rng.choice(["query", "video", "chat", "chat", "generate"]):
        case "query":
            pictures = [picture(rng.randrange(3), 20 + 12 * i) for i in range(rng.randint(0, 2))]
            skill, inputs = query(pictures or None, words, reasoning=reasoning)
        case "video":
            skill, inputs = query(None, words, video=clip(rng.randint(1, 4)), reasoning=reasoning)
        case "chat":
            turns = [[said("look"), seen(picture(rng.randrange(2)))], "it is", words, "yes", "and?"]
            skill, inputs = chat(*turns[: rng.choice([1, 3, 5])], reasoning=reasoning)
        case _:
            settings.pop("max_reasoning_tokens", None)
            skill, inputs = (
                "generate",
                {"prompt": words * 3, "settings": {"ignore_eos": True, "temperature": 0}},
            )
    return skill, inputs | {"settings": inputs["settings"] | settings}


def crowded(rng):
    """A configuration in which sequences share rows, pages and steps, and pages are too few for all of them."""
    page_size = rng.choice([7, 16])
    return {
        "max_batch_size": 8, "max_batched_tokens": rng.choice([37, 64, 256]),
        "page_size": page_size, "kv_cache_bytes": None, "kv_cache_pages": 336 // page_size, "max_model_len": 320,
    }  # fmt: skip


async def one_after_the_other(directory, calls):
    async with await create(directory, **ALONE) as engine:
        return [await getattr(engine, skill)(**inputs) for skill, inputs in calls]


async def together(directory, calls, rng):
    """Results of ``calls``, arriving at random beside others that are dropped half-way; and how many were preempted."""

    async def dropped(engine, call):
        stream = await getattr(engine, call[0])(**call[1], stream=True)
        async for _ in stream:
            break
        await stream.aclose()

    async def arriving(engine, call, delay):
        await asyncio.sleep(delay)
        return await getattr(engine, call[0])(**call[1])

    async with await create(directory, **crowded(rng)) as engine:
        jobs = [arriving(engine, call, rng.uniform(0, 0.03)) for call in calls]
        others = [dropped(engine, call) for call in rng.sample(calls, 3)]
        results, _ = await asyncio.gather(asyncio.gather(*jobs), asyncio.gather(*others))
        (stats,) = engine.stats().values()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        return results, stats


@pytest.mark.parametrize("seed", [3, 6, 11])  # each preempts several times
def test_an_answer_is_that_of_the_call_alone_whatever_surrounds_it(pair, seed):
    rng = random.Random(seed)
    directory = pair(rng.choice(["dense", "moe, tied", "tied"])).directory
    calls = [a_call(rng) for _ in range(10)]
    alone = asyncio.run(one_after_the_other(directory, calls))
    results, stats = asyncio.run(together(directory, calls, rng))
    assert stats["preemptions"] > 0
    assert [(r.tokens, r.output) for r in results] == [(r.tokens, r.output) for r in alone]
