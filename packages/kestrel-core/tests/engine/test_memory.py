"""Memory: what a model may use, who makes room for whom, and when idle models go."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from engine_toys import assert_threads_end, lanes, picture, until

from kestrel.config import RuntimeConfig
from kestrel.engine import memory
from kestrel.errors import CapacityError, InvalidRequestError, LoadError, RequestTimeoutError
from kestrel.spi import TensorInfo
from kestrel.testing.engines import ALPHABET

ENDLESS = {"ignore_eos": True, "max_tokens": 250}


@pytest.fixture
def free(monkeypatch):
    """A device with room for ``free.room`` toy models; each loaded one takes its place."""

    class Free:
        room = 10
        fleet = None

        def __call__(self, device):
            loaded = [] if self.fleet is None else [s for s in self.fleet._slots.values() if s.model]
            return (self.room - len(loaded)) * 100  # a toy's weights are 68 bytes

    free = Free()
    monkeypatch.setattr(memory, "free_memory", free)
    return free


@pytest.fixture
def crowded(toys, free, monkeypatch):
    """Creates an engine of models that share memory for ``room`` of them."""
    from kestrel.engine import fleet as fleet_module

    real = fleet_module.Fleet.start

    async def start(fleet):
        free.fleet = fleet
        await real(fleet)

    monkeypatch.setattr(fleet_module.Fleet, "start", start)

    def create(*names, room, **settings):
        free.room = room
        configs = [toys.config(name, kv_cache_pages=40, **settings) for name in names]
        return toys.engine(*configs)

    return create


async def test_too_small_a_cache_says_how_much_is_needed_and_what_to_change(toys):
    with pytest.raises(
        CapacityError,
        match=r"need 2,208 bytes of state in pages of 8 positions, kv_cache_bytes gives 100 bytes. Raise",
    ):
        await toys.create(toys.config(driver="hybrid", kv_cache_bytes=100))
    assert_threads_end()
    with pytest.raises(CapacityError, match="one sequence of 1024 positions"):
        await toys.create(toys.config("other", driver="hybrid", kv_cache_bytes=20_000, max_model_len=1024))


async def test_a_small_cache_limits_the_context_and_says_so(toys, caplog):
    async with toys.engine(driver="hybrid", kv_cache_bytes=30_000) as engine:
        (lane,) = lanes(engine)
        assert 8 <= lane.limits.max_len < 1024
        with pytest.raises(CapacityError, match=f"the context of {lane.limits.max_len}"):
            await engine.query(question="x" * lane.limits.max_len)
    assert "is limited to" in caplog.text
    assert "by kv_cache_bytes" in caplog.text


async def test_more_state_than_there_is_memory_is_refused_with_the_numbers(toys, free):
    with pytest.raises(CapacityError, match=r"kv_cache_bytes is 2.0 MiB, and cpu has .* left"):
        await toys.create()
    assert_threads_end()


async def test_more_pages_than_there_is_memory_for_are_refused_with_the_numbers(toys):
    for sizes in ({"kv_cache_pages": 2**40}, {"kv_cache_pages": 1, "max_batch_size": 2**40}):
        with pytest.raises(
            CapacityError, match=r"kv_cache_pages is .* GiB of state, and cpu has .* GiB free"
        ):
            await toys.create(toys.config(driver="hybrid", **sizes))
        assert_threads_end()


async def test_weights_that_do_not_fit_are_refused_with_the_numbers(toys, free):
    free.room = 0.5
    with pytest.raises(CapacityError, match=r"'toy' needs .* for its weights as float32, and cpu has"):
        await toys.create(toys.config(kv_cache_pages=40))
    assert_threads_end()


def test_matrices_that_prefill_multiplies_in_8_bits_count_as_kept_both_ways():
    def taken(**settings):
        tensors = {"matrix": TensorInfo((4, 6), "BF16", "it"), "norm": TensorInfo((6,), "BF16", "it")}
        config = RuntimeConfig(model="toy", **settings)
        blueprint = SimpleNamespace(config=config, card=SimpleNamespace(tensors=tensors))
        return memory._weight_bytes(blueprint, torch.bfloat16, torch.device("cpu"))

    assert taken() == 2 * (24 + 6)
    assert taken(prefill_dtype="fp8_e4m3") == 2 * (24 + 6) + 24


async def test_an_idle_model_makes_room_and_comes_back_when_it_is_asked(toys, crowded, caplog):
    caplog.set_level("INFO", "kestrel.engine")
    async with crowded("one", "two", room=1) as engine:
        assert set(engine.stats()) == {"two"}
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}
        assert set(engine.stats()) == {"one"}
        assert (await engine.model("two").query(question="?")).model_id == "two"
        assert set(engine.stats()) == {"two"}
    assert "model one is unloaded to make room for two" in caplog.text
    assert toys.family.num_built == 4


async def test_the_model_unused_for_the_longest_time_goes_first(toys, crowded):
    async with crowded("one", "two", "three", room=2) as engine:
        assert set(engine.stats()) == {"two", "three"}
        await engine.model("two").query(question="?")
        await engine.model("one").query(question="?")
        assert set(engine.stats()) == {"one", "two"}


async def test_busy_models_stay_and_the_newcomer_is_told(toys, crowded):
    toys.controls("two").delay_s = 0.001
    async with crowded("one", "two", room=1) as engine:
        busy = asyncio.ensure_future(engine.model("two").query(question="?", settings=ENDLESS))
        await until(lambda: engine.stats()["two"]["running"])
        with pytest.raises(CapacityError, match="In use beside it: two"):
            await engine.query(question="?")
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        assert (await engine.query(question="?")).model_id == "one"
    assert [r.error_type for r in toys.records if r.status == "failed"] == ["CapacityError"]


async def test_requests_that_wait_for_a_model_load_it_once(toys, crowded):
    async with crowded("one", "two", room=1) as engine:
        answers = await asyncio.gather(*(engine.query(question=f"{i}") for i in range(5)))
        assert {answer.model_id for answer in answers} == {"one"}
    assert toys.family.num_built == 3


async def test_a_request_that_waits_for_a_model_can_give_up_alone(toys, crowded, monkeypatch):
    from kestrel.engine import fleet

    go_on = threading.Event()
    real = fleet.load_model

    def slow(*args):
        go_on.wait()
        return real(*args)

    async with crowded("one", "two", room=1) as engine:
        monkeypatch.setattr(fleet, "load_model", slow)
        cancelled = asyncio.ensure_future(engine.query(question="?"))
        patient = asyncio.ensure_future(engine.query(question="?"))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(RequestTimeoutError):
            await engine.query(question="?", settings={"timeout_s": 0.02})
        with pytest.raises(InvalidRequestError, match="temperature is -1"):
            await engine.query(question="?", settings={"temperature": -1})
        go_on.set()
        assert (await patient).model_id == "one"
        assert len(engine.fleet._threads) == 1
    assert toys.family.num_built == 3


async def test_a_load_that_nobody_waits_for_any_more_is_kept(toys, crowded):
    async with crowded("one", "two", room=1) as engine:
        task = asyncio.ensure_future(engine.query(question="?"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: set(engine.stats()) == {"one"})
        assert (await engine.query(question="?")).model_id == "one"
    assert toys.family.num_built == 3


async def test_a_model_that_cannot_be_loaded_again_fails_its_requests_and_no_others(toys, crowded):
    async with crowded("one", "two", room=1) as engine:
        path = toys.directory / "one" / "model.safetensors"
        whole = path.read_bytes()
        path.write_bytes(b"")
        jobs = [engine.query(question="?"), engine.query(question="?")]
        for failed in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(failed, LoadError)
        assert (await engine.model("two").query(question="?")).model_id == "two"
        path.write_bytes(whole)
        assert (await engine.query(question="?")).model_id == "one"


async def test_a_prepared_picture_survives_the_model_that_prepared_it(toys, crowded):
    async with crowded("one", "two", room=1) as engine:
        prepared = await engine.prepare(picture())
        await engine.model("two").query(question="?")
        assert (await engine.query(prepared, "?")).output == {"answer": ALPHABET}


async def test_an_unloaded_models_memory_is_given_back(toys, crowded):
    import gc
    import weakref

    async with crowded("one", "two", room=2) as engine:
        slot = engine.fleet.slot("one")
        await engine.query(picture(), "?")
        cache = weakref.ref(slot.model.lane.cache)
        gc.disable()  # but for the one collection that an unload makes
        try:
            async with engine.fleet._change:
                await engine.fleet._unload(slot, "for a test")
            assert cache() is None
        finally:
            gc.enable()


async def test_a_model_that_is_idle_for_long_goes_and_comes_back(toys):
    async with toys.engine(idle_unload_s=0.05) as engine:
        assert set(engine.stats()) == {"toy"}
        await until(lambda: not engine.stats())
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}
        assert set(engine.stats()) == {"toy"}
        await until(lambda: not engine.stats())
    assert toys.family.num_built == 2


async def test_a_model_in_use_does_not_go(toys):
    toys.controls().delay_s = 0.002
    async with toys.engine(idle_unload_s=0.03) as engine:
        stream = await engine.query(question="?", stream=True, settings={**ENDLESS, "max_tokens": 60})
        assert (await stream.result()).metrics.output_tokens == 60
    assert toys.family.num_built == 1


async def test_shutdown_while_a_model_is_about_to_go(toys):
    for _ in range(3):
        async with await toys.create(toys.config(idle_unload_s=0.001)):
            await asyncio.sleep(0.002)
        assert_threads_end()


async def test_an_allocator_that_runs_out_is_a_capacity_error(toys, monkeypatch):
    from kestrel.engine import building

    def build(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(building, "build_token_lane", build)
    with pytest.raises(CapacityError, match=r"ran out of memory on cpu.*Lower .*max_batched_tokens"):
        await toys.create()
    assert_threads_end()


async def test_answers_do_not_depend_on_the_page_size(toys):
    answers = set()
    for page_size in (1, 5, 16):
        async with toys.engine(driver="hybrid", page_size=page_size) as engine:
            for _ in range(2):
                answers.add((await engine.query(picture(), "what?", settings={"max_tokens": 12})).tokens)
    assert len(answers) == 1
