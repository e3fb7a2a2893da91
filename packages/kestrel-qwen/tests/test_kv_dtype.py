"""Keys and values in 8 bits: the first token is that of the whole ones, the others come close, however scheduled."""

import asyncio

import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel_qwen import plugin

GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "logprobs": True}
EIGHT = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.fixture
def ask(pair):
    """A function that gives the results of prompts and the counters of the engine."""

    def run(prompts, *, at_once=True, **config):
        host = PluginHost.from_modules({"qwen": plugin}, skills=builtin_skills())
        sizes = {
            "device": "cpu",
            "kv_cache_bytes": 2**24,
            "max_batch_size": 8,
            "max_model_len": 320,
            **config,
        }

        async def main():
            config = RuntimeConfig(model_path=pair("dense").directory, **sizes)
            async with await InferenceEngine.create(config, plugins=host) as engine:
                jobs = [engine.generate(prompt=prompt, settings=GREEDY) for prompt in prompts]
                results = await asyncio.gather(*jobs) if at_once else [await job for job in jobs]
                (stats,) = engine.stats().values()
                return results, stats

        return asyncio.run(main())

    return run


PROMPTS = [f"question {i} " * 6 for i in range(4)]


def assert_close(kept, whole):
    """Log-probabilities stay close as long as the tokens are the same, which they are at first."""
    for a, b in zip(kept, whole, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), 60)
        assert same > 0
        found, wanted = ([x.logprob for x in result.logprobs[:same]] for result in (a, b))
        assert found == pytest.approx(wanted, abs=0.3)  # of 8 bits, in a model of random weights


def test_tokens_come_close_to_those_of_whole_keys(ask):
    (whole, _), (kept, _) = ask(PROMPTS), ask(PROMPTS, **EIGHT)
    assert_close(kept, whole)
    first = [(result.logprobs[0].logprob) for result in kept]
    assert first == pytest.approx(
        [result.logprobs[0].logprob for result in whole], abs=1e-5
    )  # a prefill is exact


def test_a_cached_prefix_and_a_preemption_come_close_too(ask):
    whole, _ = ask(PROMPTS)
    twice, stats = ask(PROMPTS * 2, at_once=False, **EIGHT)
    assert stats["cache_hit_positions"] > 0
    assert_close(twice, whole * 2)
    few, stats = ask(PROMPTS, kv_cache_bytes=None, kv_cache_pages=22, max_model_len=144, **EIGHT)
    assert stats["preemptions"] > 0
    assert_close(few, whole)
