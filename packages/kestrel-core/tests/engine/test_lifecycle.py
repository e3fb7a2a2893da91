"""Starting, pausing, stopping: nothing hangs, nothing is left, and a second start is a fresh one."""

import asyncio
import json
import threading

import pytest
from engine_toys import LONG, assert_threads_end, idle, kestrel_threads, picture, until
from safetensors.torch import load_file, save_file

from kestrel.errors import (
    EngineStoppedError,
    InvalidRequestError,
    LoadError,
    UnknownModelError,
)
from kestrel.testing.engines import ALPHABET, ToyControls, write_toy

# -- starting


async def test_a_load_tells_device_and_dtype_in_one_log_line(toys, caplog):
    with caplog.at_level("INFO", logger="kestrel.engine"):
        async with toys.engine():
            pass
    told = [record.getMessage() for record in caplog.records if " runs on " in record.getMessage()]
    assert len(told) == 1
    assert "runs on cpu as float32" in told[0]


# -- pausing


async def test_nothing_is_launched_while_paused_and_state_is_kept(toys):
    controls = toys.controls()
    controls.delay_s = 0.001
    async with toys.engine() as engine:
        task = asyncio.ensure_future(engine.query(question="?", settings={**LONG, "max_tokens": 100}))
        await until(lambda: engine.stats()["toy"]["generated_tokens"] > 5)
        await engine.pause()
        at, usage = controls.launches, engine.stats()["toy"]["cache_usage"]
        late = asyncio.ensure_future(engine.query(picture(), "?"))
        await asyncio.sleep(0.05)
        assert controls.launches == at
        assert engine.stats()["toy"]["cache_usage"] == usage > 0
        assert not task.done()
        await engine.resume()
        assert (await task).output["answer"].startswith(ALPHABET * 3)
        assert (await late).output == {"answer": ALPHABET}
        assert (await task).metrics.output_tokens == 100


async def test_pausing_twice_needs_one_resume(toys):
    async with toys.engine() as engine:
        await asyncio.gather(engine.pause(), engine.pause())
        await engine.resume()
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}


# -- shutting down


async def outcomes(tasks):
    return [
        type(o).__name__ if isinstance(o, BaseException) else o.finish_reason
        for o in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    ]


def load(engine):
    """Requests at every stage: decoding media, queued, running, streamed, of several objects."""

    async def streamed():
        stream = await engine.query(question="?", stream=True)
        return await stream.result()

    jobs = [engine.query(question=f"{i}") for i in range(6)]
    jobs += [engine.query(picture(i), "?") for i in range(3)]
    jobs += [streamed(), engine.detect(picture(), ["dog", "cat"], settings={"max_tokens": 20})]
    return [asyncio.ensure_future(job) for job in jobs]


async def test_draining_answers_everything(toys):
    toys.controls().delay_s = 0.001
    engine = await toys.create()
    tasks = load(engine)
    await until(lambda: engine.stats()["toy"]["running"])
    stopping = asyncio.ensure_future(engine.shutdown())
    await asyncio.sleep(0)
    with pytest.raises(EngineStoppedError, match="create a new one"):
        await engine.query(question="too late")
    assert set(await outcomes(tasks)) == {"stop", "length"}
    await stopping
    assert_threads_end()


async def test_aborting_ends_everything_at_once(toys):
    toys.controls().delay_s = 0.005
    engine = await toys.create()
    tasks = load(engine)
    await until(lambda: engine.stats()["toy"]["running"] == 4)
    await asyncio.wait_for(engine.shutdown(drain=False), 5)
    assert set(await outcomes(tasks)) == {"EngineStoppedError"}
    assert_threads_end()


async def test_a_drain_that_takes_too_long_aborts(toys):
    toys.controls().delay_s = 0.005
    engine = await toys.create()
    task = asyncio.ensure_future(engine.query(question="?", settings=LONG))
    await until(lambda: engine.stats()["toy"]["running"])
    await asyncio.wait_for(engine.shutdown(timeout_s=0.05), 5)
    assert await outcomes([task]) == ["EngineStoppedError"]
    assert_threads_end()


async def test_an_abort_overtakes_a_drain(toys):
    toys.controls().delay_s = 0.005
    engine = await toys.create()
    task = asyncio.ensure_future(engine.query(question="?", settings=LONG))
    await until(lambda: engine.stats()["toy"]["running"])
    draining = asyncio.ensure_future(engine.shutdown())
    await asyncio.sleep(0.02)
    await asyncio.wait_for(engine.shutdown(drain=False), 5)
    await asyncio.wait_for(draining, 5)
    assert await outcomes([task]) == ["EngineStoppedError"]
    assert_threads_end()


async def test_media_that_are_still_being_prepared_do_not_hold_up_an_abort(toys):
    controls = toys.controls()
    controls.prepare_gate.clear()
    engine = await toys.create()
    tasks = [asyncio.ensure_future(engine.query(picture(i), "?")) for i in range(12)]
    await asyncio.sleep(0.02)
    preparing = asyncio.ensure_future(engine.prepare(picture(20)))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(engine.shutdown(drain=False), 5)
    assert set(await outcomes(tasks)) == {"EngineStoppedError"}
    controls.prepare_gate.set()
    with pytest.raises(EngineStoppedError):
        await preparing
    assert_threads_end()


@pytest.mark.parametrize("drain", [True, False])
async def test_a_paused_engine_shuts_down(toys, drain):
    engine = await toys.create()
    await engine.pause()
    task = asyncio.ensure_future(engine.query(question="?"))
    await until(lambda: engine.stats()["toy"]["waiting"])
    await asyncio.wait_for(engine.shutdown(drain=drain), 5)
    assert await outcomes([task]) == ["stop" if drain else "EngineStoppedError"]
    assert_threads_end()


async def test_shutting_down_twice_and_using_it_afterwards(toys):
    engine = await toys.create()
    await asyncio.gather(engine.shutdown(), engine.shutdown())
    await engine.shutdown(drain=False)
    for use in (
        lambda: engine.query(question="?"),
        lambda: engine.query(question="?", stream=True),
        lambda: engine.prepare(picture()),
        lambda: engine.model("toy").caption(picture()),
        engine.pause,
        engine.resume,
    ):
        with pytest.raises(EngineStoppedError):
            await use()
    assert engine.stats() == {}
    assert engine.models == ("toy",)


async def test_an_error_inside_the_with_block_aborts(toys):
    toys.controls().delay_s = 0.005
    tasks = []

    async def body():
        async with await toys.create() as engine:
            tasks.append(asyncio.ensure_future(engine.query(question="?", settings=LONG)))
            await until(lambda: engine.stats()["toy"]["running"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    assert await outcomes(tasks) == ["EngineStoppedError"]
    assert_threads_end()


async def test_a_stream_that_is_read_ends_with_the_engine(toys):
    toys.controls().delay_s = 0.002
    engine = await toys.create()
    stream = await engine.query(question="?", stream=True, settings=LONG)
    await anext(stream)
    await engine.shutdown(drain=False)
    with pytest.raises(EngineStoppedError):
        [chunk async for chunk in stream]


# -- starting


def corrupt(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def lacking(path, name):
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if key != name}, path)


def reconfigured(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


BROKEN = {
    "nothing there": (lambda d: (d / "model.safetensors").unlink(), LoadError, r"no \*.safetensors"),
    "corrupt": (lambda d: corrupt(d / "model.safetensors"), LoadError, "model.safetensors"),
    "another family's": (lambda d: reconfigured(d, model_type="other"), UnknownModelError, "Installed: toy"),
    "no config": (lambda d: (d / "config.json").unlink(), UnknownModelError, "no installed family"),
    "a tensor missing": (
        lambda d: lacking(d / "model.safetensors", "first.bias"),
        LoadError,
        "first.bias",
    ),
    "a config it cannot read": (lambda d: reconfigured(d, max_positions="many"), LoadError, "cannot"),
    "a kind it does not know": (lambda d: reconfigured(d, driver="sing"), LoadError, "KeyError: 'sing'"),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_failed_start_leaves_nothing_and_the_next_one_is_fresh(toys, fault):
    breaking, kind, words = BROKEN[fault]
    good, bad = toys.config("good"), toys.config("bad")
    breaking(toys.directory / "bad")
    with pytest.raises(kind, match=words):
        await toys.create(good, bad)
    assert_threads_end()
    write_toy(toys.directory / "bad")
    async with toys.engine(good, bad) as engine:
        assert (await engine.model("bad").query(question="?")).output == {"answer": ALPHABET}


async def test_a_missing_shard_is_named(toys):
    write_toy(toys.directory / "toy", shards=2)
    async with toys.engine() as engine:
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}
    (toys.directory / "toy" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-00002-of-00002\.safetensors"):
        await toys.create()
    assert_threads_end()


async def test_a_path_that_does_not_exist(toys):
    config = toys.config()
    (toys.directory / "toy").rename(toys.directory / "elsewhere")
    with pytest.raises(UnknownModelError, match="the path does not exist"):
        await toys.create(type(config)(model_path=toys.directory / "toy", device="cpu"))
    assert_threads_end()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 2000}, "max_model_len is 2000; toy has a context of 1024"),
        ({"adapters": ["some/adapter"]}, "adapters are not supported yet"),
        ({"decode_path": "generated"}, "decode_path is 'generated', and programs are captured on CUDA"),
        ({"recurrent_dtype": "bfloat16"}, "recurrent_dtype 'bfloat16' was asked for, and .* keeps no state"),
        ({"prefill_dtype": "fp8_e4m3"}, "prefill_dtype 'fp8_e4m3' was asked for, and .* does not multiply"),
    ],
)
async def test_settings_that_the_model_cannot_have_are_refused(toys, settings, words):
    with pytest.raises(InvalidRequestError, match=words):
        await toys.create(toys.config(**settings))
    assert_threads_end()


async def test_hosted_adapters_are_refused_for_now(toys):
    with pytest.raises(InvalidRequestError, match="adapters are not supported yet"):
        await toys.create(toys.config(), api_key="secret")


async def test_progress_counts_the_bytes_of_a_load(toys):
    seen = []
    async with await toys.create(progress=lambda *report: seen.append(report)):
        pass
    loads = [(done, total) for stage, done, total in seen if stage == "load"]
    done = [count for count, _ in loads]
    assert done[0] == 0
    assert done == sorted(done)
    assert done[-1] == loads[-1][1] == 4 * (2 * 3 + 3 + 3 * 2 + 2)
    assert seen[len(loads) :] == [("warm-up", 0, 2), ("warm-up", 1, 2), ("warm-up", 2, 2)]


async def test_a_first_launch_that_fails_is_logged_and_left_to_the_requests(toys, caplog):
    toys.controls().failure = RuntimeError("no such kernel")
    async with toys.engine() as engine:
        assert "the first launch" in caplog.text
        assert "no such kernel" in caplog.text
        toys.controls().failure = None
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}


async def test_a_start_that_is_cancelled_takes_everything_down(toys):
    began, go_on = threading.Event(), threading.Event()

    def progress(stage, done, total):
        began.set()
        go_on.wait()

    task = asyncio.ensure_future(toys.create(toys.config("one"), toys.config("two"), progress=progress))
    await until(began.is_set)
    task.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_threads_end()
    assert toys.family.num_built == 0
    async with toys.engine(toys.config("one")) as engine:
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}


async def test_a_progress_callback_that_raises_fails_the_start(toys):
    def progress(stage, done, total):
        raise LookupError("the bar is gone")

    with pytest.raises(LoadError, match="the bar is gone"):
        await toys.create(progress=progress)
    assert_threads_end()


async def test_engines_follow_each_other_and_live_side_by_side(toys):
    for _ in range(2):
        async with toys.engine() as engine:
            assert (await engine.query(question="?")).output == {"answer": ALPHABET}
    async with await toys.create() as one, await toys.create() as other:
        answers = await asyncio.gather(one.query(question="?"), other.query(question="?"))
        assert [answer.output["answer"] for answer in answers] == [ALPHABET] * 2
        await idle(one)
        await idle(other)
    assert_threads_end()
    assert not kestrel_threads()


async def test_controls_are_made_per_model(toys):
    async with toys.engine(toys.config("one"), toys.config("two")):
        assert isinstance(toys.controls("one"), ToyControls)
        assert toys.controls("one") is not toys.controls("two")
