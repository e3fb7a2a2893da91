"""What a result holds: outputs, seeds, log-probabilities, metrics, ids."""

import asyncio
import json
import math
from dataclasses import asdict

import pytest
from engine_toys import picture

from kestrel.errors import ModelFaultError
from kestrel.testing.engines import IMAGE_POSITIONS

DRAWN = {"temperature": 8.0, "max_tokens": 10}  # the toy is sure of itself


async def test_n_outputs_are_listed_and_the_first_is_the_output(toys):
    async with toys.engine(driver="hybrid") as engine:
        result = await engine.query(question="?", settings={**DRAWN, "n": 3, "seed": 1})
        assert len(result.outputs) == 3
        assert result.output == result.outputs[0]
        assert len({output["answer"] for output in result.outputs}) > 1
        single = await engine.query(question="?", settings=DRAWN)
        assert single.outputs == (single.output,)


async def test_n_outputs_pay_for_their_prompt_once(toys):
    async with toys.engine(driver="hybrid") as engine:
        alone = await engine.query(question="how much?", settings=DRAWN | {"ignore_eos": True})
        result = await engine.query(question="how much?", settings={**DRAWN, "n": 3, "ignore_eos": True})
        assert result.metrics.input_tokens == alone.metrics.input_tokens
        assert result.metrics.output_tokens == 30


async def test_a_seed_repeats_an_answer_and_the_returned_one_does_too(toys):
    async with toys.engine(driver="hybrid") as engine:
        first = await engine.query(question="?", settings={**DRAWN, "seed": 11})
        assert first.seed == 11
        assert (await engine.query(question="?", settings={**DRAWN, "seed": 11})).tokens == first.tokens
        other = await engine.query(question="?", settings={**DRAWN, "seed": 12})
        assert other.tokens != first.tokens
        free = [await engine.query(question="?", settings=DRAWN) for _ in range(4)]
        assert len({result.seed for result in free}) == 4
        again = await engine.query(question="?", settings={**DRAWN, "seed": free[0].seed})
        assert again.tokens == free[0].tokens


async def test_a_seed_does_not_depend_on_neighbours(toys):
    async with toys.engine(driver="hybrid") as engine:
        settings = {**DRAWN, "seed": 5}
        alone = await engine.query(question="?", settings=settings)
        crowd = await asyncio.gather(*(engine.query(question="?", settings=settings) for _ in range(4)))
        assert {result.tokens for result in crowd} == {alone.tokens}


async def test_log_probabilities_are_one_per_token_and_strict_json(toys):
    async with toys.engine(driver="hybrid") as engine:
        settings = {"max_tokens": 6, "logprobs": True, "top_logprobs": 3, "logit_bias": {"65": -100}}
        result = await engine.query(picture(), "?", settings=settings)
        assert len(result.logprobs) == len(result.tokens) == 6
        for token_id, found in zip(result.tokens, result.logprobs, strict=True):
            assert found.logprob <= 0
            assert len(found.top) == 3
            assert found.top[0] == (token_id, pytest.approx(found.logprob)), "greedy takes the likeliest"
            assert sum(math.exp(value) for _, value in found.top) <= 1 + 1e-5
        json.dumps(asdict(result), allow_nan=False)
        assert (await engine.query(question="?", settings={"max_tokens": 2})).logprobs is None


async def test_forced_tokens_have_a_log_probability_too(toys):
    from kestrel.spi import Acceptor, Continue, Force
    from kestrel.testing.engines import ToyPrompts

    class Forcing(Acceptor):
        may_force = True

        def accept(self, token):
            return Force(tuple(b"!!")) if token.id == ord("b") else Continue()

    real = ToyPrompts.decoding

    def decoding(self, skill, call):
        from dataclasses import replace

        return replace(real(self, skill, call), acceptors=(Forcing,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyPrompts, "decoding", decoding)
        async with toys.engine() as engine:
            result = await engine.query(question="?", settings={"max_tokens": 6, "logprobs": True})
            assert result.output["answer"].startswith("ab!!")
            assert len(result.logprobs) == len(result.tokens)
            assert [found.logprob for found in result.logprobs[2:4]] == [0.0, 0.0]


async def test_metrics_add_up(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine() as engine:
        metrics = (await engine.query(picture(), "?")).metrics
        assert metrics.output_tokens == 27
        assert metrics.cached_tokens == 0
        assert metrics.ttft_ms == pytest.approx(metrics.queue_time_ms + metrics.prefill_time_ms, abs=0.5)
        assert metrics.decode_time_ms >= 26
        objects = await engine.detect(picture(), ["dog", "cat"], settings={"max_tokens": 5})
        one = await engine.detect(picture(), "dog", settings={"max_tokens": 5})
        assert objects.metrics.output_tokens == 10
        assert objects.metrics.input_tokens > 1.9 * one.metrics.input_tokens


async def test_a_second_question_finds_its_picture_in_the_cache(toys):
    async with toys.engine(driver="hybrid") as engine:
        first = await engine.query(picture(), "what is it?", settings={"max_tokens": 3})
        second = await engine.query(picture(), "and why?", settings={"max_tokens": 3})
        other = await engine.query(picture(1), "and why?", settings={"max_tokens": 3})
        assert first.metrics.cached_tokens == 0
        assert second.metrics.cached_tokens >= 1 + IMAGE_POSITIONS
        assert other.metrics.cached_tokens < 1 + IMAGE_POSITIONS
        assert toys.controls().encoded == 2


async def test_request_ids_are_unique_and_those_of_the_records(toys):
    async with toys.engine() as engine:
        results = await asyncio.gather(*(engine.query(question="?") for _ in range(5)))
        assert len({result.request_id for result in results}) == 5
    assert {record.request_id for record in toys.records} == {result.request_id for result in results}


async def test_media_and_warnings_reach_the_result(toys, tmp_path):
    from PIL import Image

    frames = [Image.fromarray(picture(i)) for i in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    async with toys.engine() as engine:
        result = await engine.query(tmp_path / "a.gif", "?")
        assert result.media == ({"rows": 4, "width": 20, "height": 12},)
        assert result.warnings == ("the picture has several frames; the first one is used",)
        prepared = await engine.prepare(tmp_path / "a.gif")
        assert (await engine.caption(prepared)).warnings == result.warnings


async def test_a_sequence_that_is_poisoned_fails_alone(toys):
    async with toys.engine(driver="hybrid") as engine:
        jobs = [engine.generate(text, settings={"max_tokens": 8}) for text in ("fine", "poison \x03", "too")]
        fine, poisoned, too = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(poisoned, ModelFaultError)
        assert (fine.metrics.output_tokens, too.metrics.output_tokens) == (8, 8)


@pytest.mark.parametrize(
    ("settings", "answer", "reason"),
    [
        ({"max_tokens": 3}, "abc", "length"),
        ({"stop": ["ef"]}, "abcd", "stop"),
        ({"stop_token_ids": [ord("d")]}, "abc", "stop"),
        ({"min_tokens": 30, "max_tokens": 28}, None, None),
    ],
)
async def test_ends_are_told(toys, settings, answer, reason):
    async with toys.engine() as engine:
        if answer is None:
            with pytest.raises(ValueError, match="min_tokens is 30"):
                await engine.query(question="?", settings=settings)
            return
        result = await engine.query(question="?", settings=settings)
        assert (result.output["answer"], result.finish_reason) == (answer, reason)
