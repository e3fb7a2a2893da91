"""What is refused, what is too late, what is full, and who comes first. Others never notice."""

import asyncio
import io
import struct
import time
import zlib

import numpy as np
import pytest
from engine_toys import idle, lanes, picture, until
from PIL import Image

from kestrel.errors import (
    CapacityError,
    EngineBusyError,
    InvalidMediaError,
    InvalidRequestError,
    RequestTimeoutError,
    UnknownModelError,
)
from kestrel.testing.engines import ALPHABET

LONG = {"ignore_eos": True, "max_tokens": 300}


def png(width=8, height=8):
    buffer = io.BytesIO()
    Image.fromarray(picture(1, width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def png_header(width, height):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )


BAD = {
    "not an image": ({"image": b"just some text"}, {}, InvalidMediaError, "is not a picture"),
    "truncated": ({"image": png(64, 64)[:-200]}, {}, InvalidMediaError, "cannot be decoded"),
    "empty bytes": ({"image": b""}, {}, InvalidMediaError, "empty"),
    "missing file": ({"image": "nowhere.png"}, {}, InvalidMediaError, "does not exist"),
    "huge header": ({"image": png_header(20_000, 20_000)}, {}, InvalidMediaError, "max_image_pixels"),
    "wrong array": (
        {"image": np.zeros((4, 4), np.float32)},
        {},
        InvalidMediaError,
        "layout is never guessed",
    ),
    "not media": ({"image": 3}, {}, InvalidRequestError, "an image is a int"),
    "unknown setting": ({}, {"max_token": 3}, InvalidRequestError, "Did you mean 'max_tokens'"),
    "temperature": ({}, {"temperature": -1}, InvalidRequestError, "temperature is -1"),
    "max_tokens": ({}, {"max_tokens": 0}, InvalidRequestError, "max_tokens is 0"),
    "top_p": ({}, {"top_p": 0}, InvalidRequestError, "top_p is 0"),
    "stop id": ({}, {"stop_token_ids": [9999]}, InvalidRequestError, "outside this model's vocabulary"),
    "empty question": ({"question": " "}, {}, InvalidRequestError, "question is empty"),
    "no question": ({"question": None}, {}, InvalidRequestError, "question is missing"),
    "long prompt": ({"question": "x" * 2000}, {}, CapacityError, r"has 20\d\d tokens; the context of 1024"),
    "too many tokens": ({}, {"max_tokens": 9, "min_tokens": 10}, InvalidRequestError, "min_tokens is 10"),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_fail_alone_with_typed_errors(toys, stream):
    toys.controls().delay_s = 0.001

    async def ask(engine, inputs, settings):
        given = {"question": "?", **inputs}
        if not stream:
            return await engine.query(**given, settings=settings)
        return await (await engine.query(**given, settings=settings, stream=True)).result()

    async with toys.engine() as engine:
        neighbour = asyncio.ensure_future(engine.query(question="me too", settings=LONG))
        await until(lambda: engine.stats()["toy"]["running"])
        for name, (inputs, settings, kind, words) in BAD.items():
            with pytest.raises(kind, match=words):
                await ask(engine, inputs, settings)
            assert not neighbour.done(), name
        answer = await neighbour
        assert (answer.metrics.output_tokens, answer.finish_reason) == (300, "length")
    failed = [record for record in toys.records if record.status == "failed"]
    assert [record.error_type for record in failed] == [kind.__name__ for _, _, kind, _ in BAD.values()]


async def test_an_unknown_model_fails_alone(toys):
    async with toys.engine() as engine:
        with pytest.raises(UnknownModelError):
            await engine.model("other").query(question="?")
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}


async def test_the_smallest_picture_is_answered_from_all_its_positions(toys):
    async with toys.engine() as engine:
        for pixels in (picture(0, 1, 1), png(1, 1)):
            result = await engine.query(pixels, "?")
            small = await engine.query(question="?")
            extra = len('"has_image": true') - len('"has_image": false')
            assert result.metrics.input_tokens == small.metrics.input_tokens + extra + 4


async def test_a_prompt_that_fills_the_context_still_gets_its_token(toys):
    async with toys.engine() as engine:
        room = 1024 - (await engine.query(question="?")).metrics.input_tokens
        result = await engine.query(question="x" * room, settings={"max_tokens": 50})
        assert (result.metrics.output_tokens, result.finish_reason) == (1, "length")


# -- time


async def test_a_timeout_counts_the_time_in_the_queue(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine(max_batch_size=1) as engine:
        first = asyncio.ensure_future(engine.query(question="?", settings=LONG))
        await until(lambda: engine.stats()["toy"]["running"])
        began = time.monotonic()
        with pytest.raises(RequestTimeoutError, match=r"within timeout_s=0.05 s .queue time included."):
            await engine.query(question="?", settings={"timeout_s": 0.05})
        assert 0.04 < time.monotonic() - began < 0.5
        assert (await first).metrics.output_tokens == 300


async def test_a_timeout_ends_a_running_request_and_frees_it(toys):
    toys.controls().delay_s = 0.002
    async with toys.engine() as engine:
        with pytest.raises(RequestTimeoutError):
            await engine.query(question="?", settings={**LONG, "timeout_s": 0.1})
        await idle(engine)
    (record,) = toys.records
    assert (record.status, record.error_type) == ("failed", "RequestTimeoutError")
    assert record.metrics.output_tokens > 3


async def test_a_timeout_counts_the_preparation_of_media(toys):
    toys.controls().prepare_gate.clear()
    async with toys.engine() as engine:
        began = time.monotonic()
        with pytest.raises(RequestTimeoutError):
            await engine.query(picture(), "?", settings={"timeout_s": 0.05})
        assert time.monotonic() - began < 0.5
        toys.controls().prepare_gate.set()


async def test_a_timeout_passes_while_paused(toys):
    async with toys.engine() as engine:
        await engine.pause()
        with pytest.raises(RequestTimeoutError):
            await engine.query(question="?", settings={"timeout_s": 0.05})
        await engine.resume()


async def test_a_stream_ends_with_its_timeout(toys):
    toys.controls().delay_s = 0.002
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True, settings={**LONG, "timeout_s": 0.1})
        with pytest.raises(RequestTimeoutError):
            [chunk async for chunk in stream]


async def test_a_request_in_time_is_not_disturbed(toys):
    async with toys.engine() as engine:
        assert (await engine.query(question="?", settings={"timeout_s": 60})).output == {"answer": ALPHABET}


# -- queues


async def test_a_full_queue_refuses_with_a_time_to_retry(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine(max_batch_size=1, max_queue=2) as engine:
        first = asyncio.ensure_future(engine.query(question="?", settings=LONG))
        await until(lambda: engine.stats()["toy"]["running"])
        queued = [asyncio.ensure_future(engine.query(question="?")) for _ in range(2)]
        await until(lambda: engine.stats()["toy"]["waiting"] == 2)
        with pytest.raises(EngineBusyError, match="2 requests wait; max_queue is 2") as caught:
            await engine.query(question="?")
        assert caught.value.retry_after_s > 0
        for answer in await asyncio.gather(first, *queued):
            assert answer.output["answer"].startswith(ALPHABET)
    assert [record.error_type for record in toys.records if record.status == "failed"] == ["EngineBusyError"]


async def test_media_are_not_decoded_for_a_queue_that_is_full(toys):
    controls = toys.controls()
    controls.prepare_gate.clear()
    async with toys.engine(max_queue=2) as engine:
        first = [asyncio.ensure_future(engine.query(picture(i), "?")) for i in range(2)]
        await asyncio.sleep(0.02)
        with pytest.raises(EngineBusyError):
            await engine.query(picture(2), "?")
        controls.prepare_gate.set()
        await asyncio.gather(*first)
        assert controls.prepared == 2


async def test_outputs_and_objects_of_one_call_take_one_place_in_the_queue(toys):
    async with toys.engine(max_batch_size=1, max_queue=1) as engine:
        result = await engine.query(question="?", settings={"n": 3, "temperature": 1.0, "max_tokens": 3})
        assert len(result.outputs) == 3
        found = await engine.detect(picture(), ["dog", "cat", "cow"], settings={"max_tokens": 3})
        assert found.output == {"objects": []}


async def test_decoded_media_have_a_limit_while_they_are_held(toys):
    controls = toys.controls()
    async with toys.engine(max_decoded_media_bytes=200 * 100 * 7 + 40) as engine:
        budget = engine.fleet._shared.media_budget
        await engine.pause()
        holding = asyncio.ensure_future(engine.query(picture(0, 200, 100), "?"))
        await until(lambda: controls.prepared == 1 and engine.stats()["toy"]["waiting"])
        assert budget.held_bytes == 4 * 3 * 4, "what is prepared is held until the request ends"
        with pytest.raises(EngineBusyError, match="max_decoded_media_bytes"):
            await engine.query(picture(1, 200, 100), "?")
        with pytest.raises(CapacityError, match="max_decoded_media_bytes"):
            await engine.query(picture(1, 400, 100), "?")
        await engine.resume()
        await holding
        assert budget.held_bytes == 0


async def test_a_higher_priority_goes_first(toys):
    toys.controls().delay_s = 0.001
    order = []

    async def ask(engine, name, priority):
        await engine.query(question=name, settings={"priority": priority})
        order.append(name)

    async with toys.engine(max_batch_size=1) as engine:
        (lane,) = lanes(engine)
        jobs = [asyncio.ensure_future(ask(engine, "first", 0))]
        await until(lambda: lane.stats()["running"])
        for name, priority in (("low", -1), ("normal", 0), ("high", 5)):
            jobs.append(asyncio.ensure_future(ask(engine, name, priority)))
            await until(lambda: lane.stats()["waiting"] == len(jobs) - 1)
        await asyncio.gather(*jobs)
    assert order == ["first", "high", "normal", "low"]
