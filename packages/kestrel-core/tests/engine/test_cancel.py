"""Giving up at every stage; nothing stays behind."""

import asyncio
import random
import threading

import pytest
from engine_toys import LONG, idle, lanes, picture, until

from kestrel.testing.engines import ALPHABET


async def given_up(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 2)


def start(engine, **inputs):
    return asyncio.ensure_future(engine.query(**{"question": "?", **inputs}))


async def test_while_its_picture_is_decoded(toys):
    controls = toys.controls()
    controls.prepare_gate.clear()
    async with toys.engine() as engine:
        before = controls.launches
        task = start(engine, image=picture())
        await asyncio.sleep(0.02)
        await given_up(task)
        controls.prepare_gate.set()
        await until(lambda: controls.prepared)
        await until(lambda: engine.fleet._shared.media_budget.held_bytes == 0)
    assert controls.launches == before


@pytest.mark.parametrize("step", ["works", "submit"])
async def test_while_a_thread_brings_it_to_the_lane(toys, step):
    toys.controls().delay_s = 0.001
    entered, gate = threading.Event(), threading.Event()
    async with toys.engine() as engine:
        model = engine.fleet.slot("toy").model
        inner = getattr(model, step)

        def held_up(*given):
            entered.set()
            assert gate.wait(5)
            return inner(*given)

        setattr(model, step, held_up)
        task = start(engine, settings=LONG)
        await until(entered.is_set)
        await given_up(task)
        gate.set()
        await until(lambda: engine.stats()["toy"]["cancelled"])
        await idle(engine)
        assert engine.stats()["toy"]["generated_tokens"] < 900
        assert not model.router._receivers


@pytest.mark.parametrize("submitted", [False, True])
async def test_a_stream_closed_while_a_thread_brings_it_to_the_lane_has_a_result(
    toys, monkeypatch, submitted
):
    toys.controls().delay_s = 0.001
    entered, gate = threading.Event(), threading.Event()
    async with toys.engine() as engine:
        model = engine.fleet.slot("toy").model
        submit = model.submit

        def held_up(work):
            if submitted:
                submit(work)
            entered.set()
            assert gate.wait(5)
            if not submitted:
                submit(work)

        monkeypatch.setattr(model, "submit", held_up)
        stream = await engine.query(question="?", stream=True, settings=LONG)
        await until(entered.is_set)
        closing = asyncio.ensure_future(stream.aclose())
        await asyncio.sleep(0)
        gate.set()
        await closing
        assert (await stream.result()).finish_reason == "cancelled"
        await idle(engine)
        assert engine.stats()["toy"]["generated_tokens"] < 900


async def test_while_its_picture_is_decoded_it_leaves_its_place_once(toys):
    """The call and the thread that decodes for it both give the place up, in either order or at once."""
    async with toys.engine(max_queue=1) as engine:
        for _ in range(20):
            toys.controls().prepare_gate.clear()
            task = start(engine, image=picture())
            await asyncio.sleep(0.001)
            toys.controls().prepare_gate.set()
            await given_up(task)
            await until(lambda: engine.fleet._shared.media_budget.held_bytes == 0)
            await idle(engine)
        assert (await engine.query(picture(), "?")).output == {"answer": ALPHABET}


async def test_while_it_is_queued(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine(max_batch_size=1) as engine:
        first = start(engine, settings=LONG)
        await until(lambda: engine.stats()["toy"]["running"])
        second = start(engine)
        await until(lambda: engine.stats()["toy"]["waiting"])
        await given_up(second)
        await until(lambda: not engine.stats()["toy"]["waiting"])
        assert engine.stats()["toy"]["running"] == 1
        await given_up(first)


async def test_while_it_prefills(toys):
    controls = toys.controls()
    async with toys.engine(max_batched_tokens=8) as engine:
        controls.gate.clear()
        task = start(engine, question="long " * 20)
        await until(lambda: controls.launches)
        await given_up(task)
        launches = controls.launches
        controls.gate.set()
        await idle(engine)
        assert controls.launches - launches <= 2
        assert engine.stats()["toy"]["generated_tokens"] == 0


async def test_while_it_decodes(toys):
    controls = toys.controls()
    controls.delay_s = 0.001
    async with toys.engine() as engine:
        task = start(engine, settings=LONG)
        await until(lambda: engine.stats()["toy"]["generated_tokens"] > 5)
        await given_up(task)
        await idle(engine)
    (record,) = toys.records
    assert (record.status, record.error_type) == ("cancelled", "CancelledError")
    assert record.metrics.output_tokens >= 5


async def test_with_all_its_outputs(toys):
    toys.controls().delay_s = 0.001
    async with toys.engine() as engine:
        task = start(engine, settings={**LONG, "n": 4, "temperature": 1.0})
        await until(lambda: engine.stats()["toy"]["running"] == 4)
        await given_up(task)
        await idle(engine)
        assert engine.stats()["toy"]["running"] == 0
    (record,) = toys.records
    assert (record.status, record.error_type) == ("cancelled", "CancelledError")


async def test_with_all_its_objects(toys):
    toys.controls().delay_s = 0.005
    async with toys.engine(max_batch_size=2) as engine:
        names = ["dog", "cat", "house", "tree"]
        task = asyncio.ensure_future(engine.detect(picture(), names))
        await until(lambda: engine.stats()["toy"]["running"] == 2)
        await given_up(task)
        await idle(engine)
        stream = await engine.detect(picture(), names, stream=True)
        await until(lambda: (lambda toy: toy["running"] == toy["waiting"] == 2)(engine.stats()["toy"]))
        await stream.aclose()
        assert (await stream.result()).finish_reason == "cancelled"


async def test_while_paused(toys):
    async with toys.engine() as engine:
        await engine.pause()
        task = start(engine)
        await until(lambda: engine.stats()["toy"]["waiting"])
        await given_up(task)
        await idle(engine)
        stream = await engine.query(question="?", stream=True)
        await until(lambda: engine.stats()["toy"]["waiting"])
        await stream.aclose()
        assert (await stream.result()).finish_reason == "cancelled"
        await engine.resume()


async def test_a_step_model(toys):
    import numpy as np

    from kestrel.spi import AudioItem, Call, Decoding, Request, Skill
    from kestrel.types import Media

    class Clip(Skill):
        name = "clip"

        def parse(self, inputs, settings):
            return Call(skill=self.name, media=(("audio", inputs["audio"]),), settings=settings)

        def request(self, call, prompt, tokenizer):
            return Request(segments=(Media(call.prepared[0]),), decoding=Decoding(), settings=call.settings)

    toys.skills, toys.family.more_skills = (Clip(),), ("clip",)
    toys.controls().delay_s = 0.002
    async with toys.engine(driver="step") as engine:
        clip = AudioItem(samples=np.ones(40, dtype=np.float32), sample_rate=16000)
        assert (await engine.run("clip", {"audio": clip})).output == 40
        assert len((await engine.run("clip", {"audio": clip})).tokens) == 40
        task = asyncio.ensure_future(engine.run("clip", {"audio": clip}))
        await until(lambda: engine.stats()["toy"]["running"])
        await given_up(task)
        states = lanes(engine)[0].driver.states
        await until(lambda: all(state.is_closed for state in states))


async def test_a_storm_of_aborts_leaves_the_pools_idle(toys):
    rng = random.Random(0)
    async with toys.engine(driver="hybrid", max_batch_size=8, kv_cache_bytes=2**19) as engine:
        (lane,) = lanes(engine)
        settings = {"ignore_eos": True, "max_tokens": 200}

        async def one(i):
            picked = picture(i % 5) if i % 2 else None
            if i % 3:
                task = start(engine, image=picked, question=f"number {i % 7}", settings=settings)
                await asyncio.sleep(rng.random() * 0.3)
                task.cancel()
                return await asyncio.gather(task, return_exceptions=True)
            stream = await engine.query(picked, f"number {i % 7}", stream=True, settings=settings)
            await asyncio.sleep(rng.random() * 0.3)
            return await stream.aclose()

        await asyncio.gather(*(one(i) for i in range(200)))
        await idle(engine)
        assert lane.cache.stats().pages_live == 0
        last = await engine.query(question="still there?", settings={"max_tokens": 4})
        assert last.metrics.output_tokens == 4
    assert len(toys.records) == 201


async def test_neighbours_of_a_cancelled_request_notice_nothing(toys):
    async with toys.engine() as engine:
        tasks = [start(engine, question=f"{i}") for i in range(4)]
        await asyncio.sleep(0.005)
        tasks[1].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [a.output["answer"] for i, a in enumerate(answers) if i != 1] == [ALPHABET] * 3
