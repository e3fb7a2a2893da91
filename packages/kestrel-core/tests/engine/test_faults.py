"""What breaks inside: the requests that it touches fail, everything else goes on."""

import asyncio

import pytest
from engine_toys import LONG, idle, lanes, picture, until

from kestrel.errors import LoadError, ModelFaultError, UnknownModelError
from kestrel.testing.controlled import DRIVERS
from kestrel.testing.engines import ALPHABET, ToyPrompts
from kestrel.testing.fakes import MarkedParser

SHORTER = {**LONG, "max_tokens": 300}


async def test_a_failed_launch_fails_its_requests_and_the_engine_goes_on(toys):
    controls = toys.controls()
    controls.delay_s = 0.001
    async with toys.engine() as engine:
        running = [asyncio.ensure_future(engine.query(question="?", settings=LONG)) for _ in range(4)]
        await until(lambda: engine.stats()["toy"]["running"] == 4)
        waiting = asyncio.ensure_future(engine.query(question="waits"))
        await until(lambda: engine.stats()["toy"]["waiting"] == 1)
        controls.failure = RuntimeError("an illegal memory access")
        for task in running:
            with pytest.raises(ModelFaultError, match="an illegal memory access"):
                await task
        controls.failure = None
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}
        assert engine.stats()["toy"]["faults"] >= 4


async def test_a_failed_encoder_fails_those_that_wait_for_it(toys):
    controls = toys.controls()
    async with toys.engine() as engine:
        text = asyncio.ensure_future(engine.query(question="text only"))
        controls.encoder_failure = RuntimeError("no such convolution")
        with pytest.raises(ModelFaultError, match="the encoder failed on image"):
            await engine.query(picture(), "?")
        assert (await text).output == {"answer": ALPHABET}
        controls.encoder_failure = None
        assert (await engine.query(picture(), "?")).output == {"answer": ALPHABET}


async def test_a_failed_tick_fails_what_ran_and_the_thread_lives_on(toys, monkeypatch, caplog):
    async with toys.engine() as engine:
        (lane,) = lanes(engine)
        real = lane._launch

        def broken():
            monkeypatch.setattr(lane, "_launch", real)
            raise AssertionError("a bug in the scheduler")

        toys.controls().delay_s = 0.001
        task = asyncio.ensure_future(engine.query(question="?", settings=LONG))
        await until(lambda: engine.stats()["toy"]["generated_tokens"] > 3)
        monkeypatch.setattr(lane, "_launch", broken)
        with pytest.raises(ModelFaultError, match="a bug in the scheduler"):
            await task
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}
        await idle(engine)
    assert "a tick failed" in caplog.text


async def test_a_lane_beyond_repair_is_lost_alone_and_loaded_anew(toys, monkeypatch):
    async with toys.engine(toys.config("one"), toys.config("two")) as engine:
        for name in ("one", "two"):
            toys.controls(name).delay_s = 0.001
        jobs = [engine.model(name).query(question="?", settings=SHORTER) for name in ("one", "one", "two")]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        await until(lambda: all(stats["running"] for stats in engine.stats().values()))
        lane = lanes(engine)[0]

        def broken(*args):
            raise AssertionError("nothing works any more")

        monkeypatch.setattr(lane, "recover", broken)
        monkeypatch.setattr(lane, "tick", broken)
        for task in tasks[:2]:
            with pytest.raises(ModelFaultError, match=r"'one' broke down .*nothing works any more"):
                await task
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}
        assert (await tasks[2]).metrics.output_tokens == 300
    assert toys.family.num_built == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_device_thread_that_ends_loses_its_models_and_a_new_one_takes_over(toys):
    async with toys.engine() as engine:
        toys.controls().failure = SystemExit("a plugin that leaves")
        with pytest.raises(ModelFaultError, match="'toy' broke down"):
            await engine.query(question="?")
        toys.controls().failure = None
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}


async def test_a_reader_that_raises_ends_its_request_alone(toys):
    real = MarkedParser.feed

    def feed(self, token):
        if token.id == ord("m") and self._channel != "spared":
            raise LookupError("cannot read m")
        return real(self, token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MarkedParser, "feed", feed)
        async with toys.engine() as engine:
            bad = asyncio.ensure_future(engine.query(question="?", settings=LONG))
            good = asyncio.ensure_future(engine.generate("say: "))
            with pytest.raises(ModelFaultError, match="LookupError: cannot read m"):
                await bad
            assert (await good).output["text"] == ALPHABET
            await idle(engine)


async def test_one_output_that_fails_ends_its_siblings_at_once(toys, monkeypatch):
    real, first = MarkedParser.feed, []

    def feed(self, token):
        first.append(self)
        if self is not first[0]:
            raise LookupError("the second output cannot be read")
        return real(self, token)

    monkeypatch.setattr(MarkedParser, "feed", feed)
    toys.controls().delay_s = 0.002
    async with toys.engine(enable_prefix_cache=False) as engine:
        with pytest.raises(ModelFaultError, match="the second output"):
            await engine.query(question="?", settings={**LONG, "n": 2})
        assert engine.stats()["toy"]["generated_tokens"] < 900
        await idle(engine)


async def test_one_model_that_breaks_leaves_the_other_alone(toys):
    toys.controls("one").failure = RuntimeError("broken")
    async with toys.engine(toys.config("one"), toys.config("two")) as engine:
        jobs = [engine.query(question="?"), engine.model("two").query(question="?")]
        broken, whole = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(broken, ModelFaultError)
        assert whole.output == {"answer": ALPHABET}


async def test_an_observer_that_raises_is_logged_and_nothing_more(toys, caplog):
    def observe(record):
        raise LookupError("the observer is broken")

    from kestrel.engine import InferenceEngine
    from kestrel.testing.engines import toy_host

    host = toy_host(toys.family, observe=observe)
    async with await InferenceEngine.create(toys.config(), plugins=host) as engine:
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}
    assert "the observer is broken" in caplog.text


BROKEN = {
    "segments": (ToyPrompts, "segments"),
    "decoding": (ToyPrompts, "decoding"),
    "parser": (ToyPrompts, "parser"),
    "validate": (ToyPrompts, "validate"),
    "defaults": (ToyPrompts, "defaults"),
    "run": (ToyPrompts, "run"),
    "feed": (MarkedParser, "feed"),
    "finish": (MarkedParser, "finish"),
    "layout": (DRIVERS["talk"], "layout"),
    "prepare": (DRIVERS["talk"], "prepare"),
}


def raising(*given):
    raise LookupError("a bug of the package")


def nonsense(*given):
    return 5


@pytest.mark.parametrize("broken", [raising, nonsense])
@pytest.mark.parametrize("name", BROKEN)
async def test_whatever_a_family_trips_over_is_a_typed_error_of_its_request(toys, monkeypatch, name, broken):
    owner, attribute = BROKEN[name]
    async with toys.engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, broken)
            if (name, broken) != ("validate", nonsense):  # nobody reads what it gives
                with pytest.raises(ModelFaultError, match=r"toy.* alone is lost") as caught:
                    await engine.query(picture(), "?")
                assert caught.value.__cause__ is not None
                with pytest.raises(ModelFaultError):
                    await (await engine.query(picture(), "?", stream=True)).result()
        assert (await engine.query(picture(), "?")).output == {"answer": ALPHABET}
        await idle(engine)


@pytest.mark.parametrize("broken", [raising, nonsense])
async def test_a_picture_that_a_family_trips_over_is_a_typed_error(toys, monkeypatch, broken):
    monkeypatch.setattr(DRIVERS["talk"], "prepare", broken)
    async with toys.engine() as engine:
        with pytest.raises(ModelFaultError, match="prepare failed inside 'toy'"):
            await engine.prepare(picture())


@pytest.mark.parametrize(
    ("method", "error"), [("match", UnknownModelError), ("describe", LoadError), ("build", LoadError)]
)
@pytest.mark.parametrize("broken", [raising, nonsense])
async def test_a_family_that_cannot_load_is_named(toys, monkeypatch, method, error, broken):
    monkeypatch.setattr(toys.family, method, broken)
    with pytest.raises(error, match="toy") as caught:
        await toys.create()
    assert "a bug of the package" in str(caught.value) or "gave a int" in str(caught.value)
