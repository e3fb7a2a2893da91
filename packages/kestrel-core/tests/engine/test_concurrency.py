"""Many at once give what each gives alone; nothing is left to the event loop to complain about."""

import asyncio
import gc
import random

import pytest
from engine_toys import idle, lanes, picture

SETTINGS = {"max_tokens": 10}
DRAWN = {"max_tokens": 10, "temperature": 8.0, "seed": 4}


def mixed(engine):
    """A request per kind, as functions that start it."""
    a, b = picture(0), picture(1, 9, 31)
    messages = [{"role": "user", "content": "hello"}]
    return [
        lambda: engine.query(a, "what?", settings=SETTINGS),
        lambda: engine.query(b, "what?", settings=DRAWN),
        lambda: engine.query(question="no picture", settings=DRAWN),
        lambda: engine.query([a, b], "both?", settings=SETTINGS),
        lambda: engine.query(a, "a long question " * 9, settings=SETTINGS),
        lambda: engine.caption(b, "short", settings=SETTINGS),
        lambda: engine.detect(a, ["dog", "cat"], settings=SETTINGS),
        lambda: engine.point(b, "dog", spatial_refs=[[0.2, 0.4]], settings=SETTINGS),
        lambda: engine.chat(messages, settings=DRAWN),
        lambda: engine.generate("once upon", settings={**DRAWN, "n": 2}),
        lambda: engine.query(a, "what?", stream=True, settings=DRAWN),
    ]


async def tokens_of(start):
    made = await start()
    result = made if hasattr(made, "tokens") else await made.result()
    return result.tokens, [str(output) for output in result.outputs]


@pytest.mark.parametrize("pages", [{"kv_cache_bytes": 2**21}, {"kv_cache_pages": 80}])
async def test_sixty_four_requests_of_all_kinds_give_what_each_gives_alone(toys, pages):
    async with toys.engine(driver="hybrid", max_model_len=512, enable_prefix_cache=False) as engine:
        alone = [await tokens_of(start) for start in mixed(engine)]
    async with toys.engine(
        toys.config(driver="hybrid", max_model_len=512, max_batch_size=16, max_batched_tokens=48, **pages)
    ) as engine:
        kinds = [i % len(alone) for i in range(64)]
        random.Random(1).shuffle(kinds)
        starts = mixed(engine)
        together = await asyncio.gather(*(tokens_of(starts[kind]) for kind in kinds))
        for kind, got in zip(kinds, together, strict=True):
            assert got == alone[kind], f"request of kind {kind}"
        await idle(engine)
        for lane in lanes(engine):
            lane.cache.check()


async def test_after_failures_of_every_kind_the_loop_has_nothing_to_complain_about(toys):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    async with toys.engine(max_queue=8) as engine:
        jobs = [engine.query(picture(i), f"{i}", settings={"timeout_s": 0.02 + i % 3}) for i in range(40)]
        jobs += [engine.query(b"bad", "?"), engine.query(question="")]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        await asyncio.sleep(0.01)
        for task in tasks[::5]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        streams = [await engine.query(question="?", stream=True) for _ in range(3)]
        await streams[0].aclose()
        del streams
        gc.collect()
    await asyncio.sleep(0.01)
    gc.collect()
    assert problems == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_loop_that_ends_before_its_engine_leaves_no_unseen_failure(toys, caplog):
    async def careless():
        engine = await toys.create()
        settings = {"max_tokens": 900, "ignore_eos": True}
        left = asyncio.ensure_future(engine.query(question="?", settings=settings))
        await engine.query(question="?", stream=True)
        await asyncio.sleep(0.01)
        assert not left.done()
        return engine

    engine = asyncio.run(careless())
    for thread in engine.fleet._threads.values():
        thread.stop()
    engine.fleet._shared.pool.close()
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
