"""Streams: what they show, how they end, and what leaving them early frees."""

import asyncio
import gc

import pytest
from engine_toys import LONG, idle, lanes, picture, until

from kestrel.engine.streams import ChunkQueue
from kestrel.errors import InvalidRequestError, ModelFaultError, RequestCancelledError
from kestrel.testing.engines import ALPHABET
from kestrel.types import ChunkKind, StreamChunk


async def read(stream, seen):
    async for chunk in stream:
        seen.append(chunk)


async def test_joined_text_is_the_answer_whatever_the_bytes(toys):
    async with toys.engine(driver="hybrid") as engine:
        for question in ("a", "b", "c"):
            settings = {"max_tokens": 24, "temperature": 1.0, "seed": 3}
            stream = await engine.query(picture(), question, stream=True, settings=settings)
            shown = [chunk async for chunk in stream]
            result = await stream.result()
            assert "".join(chunk.text for chunk in shown) == result.output["answer"]
            assert result.output == (await engine.query(picture(), question, settings=settings)).output


async def test_chunks_come_while_the_model_is_still_writing(toys):
    toys.controls().delay_s = 0.002
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True, settings=LONG)
        assert [(await anext(stream)).text for _ in range(3)] == ["a", "b", "c"]
        assert not stream.is_done
        await stream.aclose()


async def test_a_result_needs_no_reading(toys):
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True)
        assert (await stream.result()).output == {"answer": ALPHABET}
        assert (await stream.result()).request_id == stream.request_id
        assert "".join([chunk.text async for chunk in stream]) == ALPHABET


async def test_a_stream_is_not_restarted_by_a_second_loop(toys):
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True)
        assert len([chunk async for chunk in stream]) == len(ALPHABET)
        assert [chunk async for chunk in stream] == []


async def test_anext_ends_with_stop_async_iteration(toys):
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True, settings={"max_tokens": 1})
        assert (await anext(stream)).text == "a"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert await anext(stream, "none") == "none"


async def test_aclose_gives_what_was_generated_and_frees_everything(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True, settings=LONG)
        for _ in range(5):
            await anext(stream)
        await stream.aclose()
        (lane,) = lanes(engine)
        assert lane.stats()["running"] == 0
        result = await stream.result()
        assert result.finish_reason == "cancelled"
        assert result.output["answer"].startswith("abcde")
        assert result.metrics.output_tokens == len(result.tokens) >= 5
        assert result.metrics.input_tokens > 0
        await stream.aclose()
        async for _ in stream:
            pass
    assert [(r.status, r.finish_reason) for r in toys.records] == [("cancelled", "cancelled")]


async def test_leaving_the_loop_early_cancels_within_two_ticks(toys):
    toys.controls().delay_s = 0.003
    async with toys.engine() as engine:
        (lane,) = lanes(engine)
        stream = await engine.query(question="?", stream=True, settings=LONG)
        async for _ in stream:
            break
        await until(lambda: stream._was_closed)
        at = toys.controls().launches
        await until(lambda: not lane.stats()["running"])
        assert toys.controls().launches - at <= 2
        await idle(engine)


async def test_a_context_manager_closes_its_stream(toys):
    async with toys.engine() as engine:
        async with await engine.query(question="?", stream=True, settings=LONG) as stream:
            await anext(stream)
        assert (await stream.result()).finish_reason == "cancelled"


async def test_dropping_a_stream_cancels_its_request(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True, settings=LONG)
        await anext(stream)
        del stream
        gc.collect()
        await until(lambda: toys.records)
    assert toys.records[0].status == "cancelled"


async def test_a_closed_stream_that_had_not_begun_says_that_it_was_cancelled(toys):
    toys.controls().prepare_gate.clear()
    async with toys.engine() as engine:
        stream = await engine.query(picture(), "?", stream=True)
        await asyncio.sleep(0.01)
        await stream.aclose()
        with pytest.raises(RequestCancelledError):
            await stream.result()
        assert [chunk async for chunk in stream] == []
        toys.controls().prepare_gate.set()


async def test_an_error_comes_out_of_the_stream_after_what_came_before_it(toys):
    async with toys.engine() as engine:
        controls = toys.controls()
        stream = await engine.query(question="?", stream=True, settings=LONG)
        seen = [await anext(stream)]
        controls.failure = RuntimeError("the kernel is broken")
        with pytest.raises(ModelFaultError, match="the kernel is broken"):
            await read(stream, seen)
        assert "".join(chunk.text for chunk in seen).startswith("a")
        with pytest.raises(ModelFaultError):
            await stream.result()
        controls.failure = None


async def test_a_failed_stream_that_nobody_reads_is_no_unseen_exception(toys):
    toys.controls().failure = RuntimeError("broken")
    async with toys.engine() as engine:
        streams = [await engine.query(question="?", stream=True)]
        await until(lambda: toys.records)
        streams.clear()
        gc.collect()
    assert toys.records[0].error_type == "ModelFaultError"


async def test_wrong_requests_are_refused_before_there_is_a_stream(toys):
    async with toys.engine() as engine:
        with pytest.raises(InvalidRequestError, match="a stream shows one output; n is 2"):
            await engine.query(question="?", stream=True, settings={"n": 2})
        with pytest.raises(InvalidRequestError, match="question is empty"):
            await engine.query(question=" ", stream=True)
    assert [(r.status, r.streamed) for r in toys.records] == [("failed", True)] * 2


async def test_a_cancelled_reader_cancels_the_request(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True, settings=LONG)
        reader = asyncio.ensure_future(read(stream, []))
        await until(lambda: engine.stats()["toy"]["generated_tokens"] > 3)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert (await stream.result()).finish_reason == "cancelled"


async def test_a_waiter_for_the_result_may_give_up_alone(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine() as engine:
        stream = await engine.query(question="?", stream=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.result(), 0.003)
        assert (await stream.result()).output == {"answer": ALPHABET}


async def test_a_snapshot_replaces_one_that_nobody_has_read():
    queue = ChunkQueue()
    text = StreamChunk(ChunkKind.TEXT, text="a")
    first, second, third = (StreamChunk(ChunkKind.SNAPSHOT, value=i) for i in range(3))
    for chunk in (first, second, text, third):
        queue.put(chunk)
    assert [await queue.get() for _ in range(3)] == [second, text, third]
    reader = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    queue.put(first)
    assert await reader == first
    queue.put(second)
    queue.close()
    queue.put(third)
    assert [await queue.get() for _ in range(3)] == [second, None, None]
