"""The engine without ``await``: scripts, notebooks, threads."""

import asyncio
import concurrent.futures
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_toys import LONG, assert_threads_end, picture

from kestrel.engine import SyncEngine
from kestrel.errors import EngineStoppedError, InvalidRequestError, LoadError
from kestrel.testing.engines import ALPHABET


def test_every_verb_waits_for_its_answer(toys):
    with toys.sync_engine() as engine:
        assert engine.query(question="?").output == {"answer": ALPHABET}
        assert engine.caption(picture()).output == {"caption": ALPHABET}
        assert engine.generate("say: ").output["text"] == ALPHABET
        assert engine.chat([{"role": "user", "content": "?"}]).output["message"]["content"] == ALPHABET
        assert engine.point(picture(), "dog").output == {"points": []}
        assert engine.detect(picture(), "dog").output == {"objects": []}
        assert engine.segment(picture(), "dog").output == {"segments": []}
        with pytest.raises(InvalidRequestError):
            engine.transcribe(b"")


def test_the_synchronous_engine_has_every_public_method_of_the_asynchronous_one():
    from kestrel.engine import InferenceEngine, ModelHandle, SyncModel

    def public(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(InferenceEngine) - public(SyncEngine) <= {"create", "calls", "fleet"}
    assert public(ModelHandle) <= public(SyncModel)


def test_streams_iterate_and_have_a_result(toys):
    with toys.sync_engine() as engine:
        stream = engine.query(question="?", stream=True)
        assert "".join(chunk.text for chunk in stream) == ALPHABET
        assert stream.result().output == {"answer": ALPHABET}
        assert next(engine.stream("query", question="?", settings={"max_tokens": 1})).text == "a"


def test_leaving_a_stream_early_cancels_it(toys):
    with toys.sync_engine() as engine:
        stream = engine.query(question="?", stream=True, settings=LONG)
        for chunk in stream:
            assert chunk.text == "a"
            break
        assert stream.result().finish_reason == "cancelled"
        with engine.query(question="?", stream=True, settings=LONG) as closed:
            next(closed)
        assert closed.result().finish_reason == "cancelled"


def test_a_streams_result_outlives_the_engine(toys):
    with toys.sync_engine() as engine:
        stream = engine.query(question="?", stream=True)
    assert stream.result().output == {"answer": ALPHABET}
    stream.close()


async def test_it_works_inside_a_running_event_loop(toys):
    with toys.sync_engine() as engine:
        assert engine.query(question="?").output == {"answer": ALPHABET}
        assert "".join(chunk.text for chunk in engine.caption(picture(), stream=True)) == ALPHABET


def test_models_handles_and_prepared_media(toys):
    with toys.sync_engine(toys.config("one"), toys.config("two")) as engine:
        assert engine.models == ("one", "two")
        other = engine.model("two")
        assert (other.model_id, other.supports("query")) == ("two", True)
        assert other.info.family == "toy"
        assert "query" in other.skills
        assert other.query(other.prepare(picture()), "?").model_id == "two"
        assert engine.query(engine.prepare(picture()), "?").model_id == "one"
        assert set(engine.stats()) == {"one", "two"}


def test_pause_and_resume(toys):
    with toys.sync_engine() as engine, ThreadPoolExecutor(1) as threads:
        engine.pause()
        waiting = threads.submit(engine.query, question="?")
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(timeout=0.05)
        engine.resume()
        assert waiting.result().output == {"answer": ALPHABET}


def test_many_threads_share_one_engine(toys):
    with toys.sync_engine() as engine, ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda i: engine.query(picture(i % 3), "?").output["answer"], range(24))
        assert set(answers) == {ALPHABET}


def test_shutdown_ends_what_other_threads_wait_for(toys):
    toys.controls().delay_s = 0.002
    with ThreadPoolExecutor(10) as threads:
        engine = SyncEngine(toys.config(), plugins=toys.host)
        calls = [threads.submit(engine.query, question="?", settings=LONG) for _ in range(8)]
        while engine.stats()["toy"]["running"] < 4:
            time.sleep(0.001)
        stops = [threads.submit(engine.shutdown, drain=False), threads.submit(engine.shutdown, drain=False)]
        for call in calls:
            with pytest.raises(EngineStoppedError):
                call.result(timeout=10)
        for stop in stops:
            stop.result(timeout=10)
        assert_threads_end()
        with pytest.raises(EngineStoppedError, match="create a new one"):
            engine.query(question="?")
        engine.shutdown()


def test_an_engine_that_is_dropped_stops_by_itself_but_not_while_it_is_used(toys):
    handle = SyncEngine(toys.config(), plugins=toys.host).model()
    gc.collect()
    stream = handle.query(question="?", stream=True)
    del handle
    gc.collect()
    assert "".join(chunk.text for chunk in stream) == ALPHABET
    del stream
    gc.collect()
    assert_threads_end()


def test_a_failed_start_leaves_no_thread_and_a_second_one_works(toys):
    config = toys.config()
    weights = toys.directory / "toy" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(LoadError):
        SyncEngine(config, plugins=toys.host)
    assert_threads_end()
    weights.write_bytes(whole)
    with toys.sync_engine() as engine:
        assert engine.query(question="?").output == {"answer": ALPHABET}


def test_waiting_on_its_own_loop_is_refused(toys):
    toys.skills = ()
    with toys.sync_engine() as engine:

        async def inside():
            engine.query(question="?")

        with pytest.raises(InvalidRequestError, match="on its own event loop"):
            engine._loop.run(inside())


def test_an_interrupted_start_takes_everything_down(toys, monkeypatch):
    began = threading.Event()

    def progress(stage, done, total):
        began.set()
        time.sleep(0.05)

    from kestrel.engine import loop_thread

    real = loop_thread.asyncio.run_coroutine_threadsafe

    def interrupted(coroutine, loop):
        future = real(coroutine, loop)
        if "create" in coroutine.__qualname__:

            def result(timeout=None):
                began.wait()
                raise KeyboardInterrupt

            future.result = result
        return future

    monkeypatch.setattr(loop_thread.asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SyncEngine(toys.config(), plugins=toys.host, progress=progress)
    assert_threads_end()
    assert toys.family.num_built == 0


def test_what_does_not_end_by_itself_is_ended_with_the_loop(toys, monkeypatch):
    from kestrel.engine import loop_thread

    monkeypatch.setattr(loop_thread, "LAST_WAIT_S", 0.05)
    with ThreadPoolExecutor(1) as threads:
        engine = SyncEngine(toys.config(), plugins=toys.host)
        endless = threads.submit(engine._loop.run, asyncio.sleep(60))
        time.sleep(0.02)
        engine.shutdown()
        with pytest.raises(EngineStoppedError):
            endless.result(timeout=10)
    assert_threads_end()


def test_sync_calls_do_not_need_or_disturb_the_callers_loop(toys):
    async def main():
        with toys.sync_engine() as engine:
            ticking = asyncio.ensure_future(asyncio.sleep(0, "ticked"))
            assert engine.query(question="?").output == {"answer": ALPHABET}
            assert await ticking == "ticked"

    asyncio.run(main())


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "soon", True])
def test_a_shutdown_that_cannot_be_meant_is_refused_and_the_engine_goes_on(toys, timeout_s):
    with toys.sync_engine() as engine:
        with pytest.raises(InvalidRequestError, match="timeout_s is"):
            engine.shutdown(timeout_s=timeout_s)
        assert engine.query(question="?").output == {"answer": ALPHABET}
