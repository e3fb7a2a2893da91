"""A family's own way to run a skill: many requests, passes, work on the pool, its own stream."""

import asyncio
import threading

import pytest
import torch
from engine_toys import LONG, idle, picture, until

from kestrel.config import Settings
from kestrel.errors import (
    EngineStoppedError,
    InvalidRequestError,
    ModelFaultError,
    RequestCancelledError,
    RequestTimeoutError,
)
from kestrel.spi import AudioItem, Call, Completion, Decoding, ImageItem, Request, SinglePassDriver, Skill
from kestrel.testing.engines import ALPHABET
from kestrel.types import ChunkKind, Media, StreamChunk, Text


class Plan(Skill):
    """A skill without a request of its own: only compositions do it."""

    name = "plan"

    def parse(self, inputs, settings):
        media = tuple(("image", image) for image in inputs.get("images", ()))
        return Call(skill=self.name, values=dict(inputs), media=media, settings=settings)

    def request(self, call, prompt, tokenizer):
        raise AssertionError("compositions make their own requests")


class Double(SinglePassDriver):
    """Doubles numbers, and adds up encoded media."""

    def __init__(self):
        self.threads = []
        self.failure = None

    def infer(self, inputs, encoded):
        self.threads.append(threading.current_thread().name)
        assert torch.is_inference_mode_enabled()
        if self.failure is not None:
            raise self.failure
        return [2 * item["x"] for item in inputs] + [tuple(x.shape) for x in encoded]


def ask(text="say: ", **settings):
    return Request(
        segments=(Text(text),), decoding=Decoding(stop_ids=frozenset({257})), settings=Settings(**settings)
    )


@pytest.fixture
def composed(toys):
    """Makes "plan" what a function of (call, infer) does, and gives an engine's context."""
    toys.skills = (Plan(),)
    toys.double = Double()
    toys.family.passes = {"double": toys.double}

    def of(composition, **settings):
        toys.family.compositions["plan"] = composition
        return toys.engine(**settings)

    return of


async def test_many_requests_make_one_result(composed):
    async def three(call, infer):
        answers = await asyncio.gather(*(infer(ask(max_tokens=n)) for n in (2, 3, 4)))
        return {"tokens": [len(a[0].tokens) for a in answers]}

    async with composed(three) as engine:
        result = await engine.run("plan", {"images": [picture()]})
        assert result.output == {"tokens": [2, 3, 4]}
        assert result.metrics.output_tokens == 9
        assert result.metrics.input_tokens == 3 * len("say: ")
        assert result.media == ({"rows": 4, "width": 20, "height": 12},)
        assert result.finish_reason == "length"
        assert result.tokens == ()


async def test_a_composition_ends_as_its_requests_did_unless_it_says_so(composed):
    async def mixed(call, infer):
        await infer(ask())
        if "short" in call.values:
            await infer(ask(max_tokens=1))
        if "own" in call.values:
            return Completion(output={"done": True}, finish_reason="stop")
        return {"done": True}

    async with composed(mixed) as engine:
        assert (await engine.run("plan", {})).finish_reason == "stop"
        assert (await engine.run("plan", {"short": 1})).finish_reason == "length"
        assert (await engine.run("plan", {"short": 1, "own": 1})).finish_reason == "stop"


async def test_warnings_of_its_media_reach_the_result(composed, tmp_path):
    from PIL import Image

    frames = [Image.fromarray(picture(i)) for i in range(2)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])

    async def nothing(call, infer):
        return {}

    async with composed(nothing) as engine:
        result = await engine.run("plan", {"images": [tmp_path / "a.gif"]})
        assert result.warnings == ("the picture has several frames; the first one is used",)
        assert result.metrics.output_tokens == 0


async def test_snapshots_are_shown_to_whoever_streams(composed):
    async def speak(call, infer):
        for n in (1, 2, 3):
            await infer(ask(max_tokens=1))
            infer.emit(StreamChunk(ChunkKind.SNAPSHOT, text="x" * n, value={"n": n}))
        return {"text": "xxx"}

    async with composed(speak) as engine:
        stream = await engine.model().stream("plan")
        shown = [chunk async for chunk in stream]
        assert [(c.kind, c.text, c.value) for c in shown] == [
            (ChunkKind.SNAPSHOT, "x" * n, {"n": n}) for n in (1, 2, 3)
        ]
        assert (await stream.result()).output == {"text": "xxx"}
        assert (await engine.run("plan", {})).output == {"text": "xxx"}


async def test_a_composition_knows_whether_anybody_watches(composed):
    async def seen(call, infer):
        return {"watched": infer.is_watched}

    async with composed(seen) as engine:
        assert (await engine.run("plan", {})).output == {"watched": False}
        async with await engine.stream("plan", {}) as stream:
            assert (await stream.result()).output == {"watched": True}


async def test_tokens_can_be_read_as_they_come(composed, toys):
    toys.controls().delay_s = 0.001

    async def first_letters(call, infer):
        seen = []
        async for token in infer.stream(ask(**LONG)):
            seen.append(token.id)
            if len(seen) == 4:
                break
        whole = [token.id async for token in infer.stream(ask())]
        return {"seen": bytes(seen).decode(), "whole": bytes(whole[:-1]).decode(), "end": whole[-1]}

    async with composed(first_letters) as engine:
        result = await engine.run("plan", {})
        assert result.output == {"seen": "abcd", "whole": ALPHABET, "end": 257}
        assert result.metrics.output_tokens >= 4 + 27
        await idle(engine)


async def test_a_token_stream_has_one_output(composed):
    async def two(call, infer):
        return {"all": [token async for token in infer.stream(ask(n=2))]}

    async with composed(two) as engine:
        with pytest.raises(InvalidRequestError, match="not n=2"):
            await engine.run("plan", {})


async def test_a_failure_inside_a_token_stream_is_raised_there(composed, toys):
    async def read(call, infer):
        seen = []
        try:
            async for token in infer.stream(ask(**LONG)):
                seen.append(token)
                toys.controls().failure = RuntimeError("broken")
        except ModelFaultError as error:
            toys.controls().failure = None
            return {"seen": bool(seen), "error": type(error).__name__}

    async with composed(read) as engine:
        assert (await engine.run("plan", {})).output == {"seen": True, "error": "ModelFaultError"}


async def test_children_are_not_stopped_by_a_full_queue(composed, toys):
    toys.controls().delay_s = 0.001

    async def five(call, infer):
        return {"n": len(await asyncio.gather(*(infer(ask(max_tokens=3)) for _ in range(5))))}

    async with composed(five, max_batch_size=1, max_queue=1) as engine:
        assert (await engine.run("plan", {})).output == {"n": 5}


async def test_children_inherit_deadline_priority_and_seed(composed, toys):
    seen = []

    async def look(call, infer):
        return {"tokens": (await infer(ask(**LONG, temperature=1.0)))[0].seed}

    async with composed(look) as engine:
        lane = engine.fleet.slot("toy").model.lane
        real = lane.submit
        lane.submit = lambda work: (seen.append(work), real(work))
        settings = {"timeout_s": 0.1, "priority": 3, "seed": 77}
        toys.controls().delay_s = 0.005
        with pytest.raises(RequestTimeoutError):
            await engine.run("plan", {}, settings)
        (work,) = seen
        assert (work.priority, work.seed) == (3, 77)
        assert work.deadline == pytest.approx(work.submitted + 0.1)
        del lane.submit


async def test_a_deadline_ends_a_composition_between_its_requests(composed):
    async def dawdle(call, infer):
        await asyncio.sleep(60)

    async with composed(dawdle) as engine:
        with pytest.raises(RequestTimeoutError):
            await engine.run("plan", {}, {"timeout_s": 0.05})


async def test_a_closed_stream_lets_no_further_request_through(composed, toys):
    toys.controls().delay_s = 0.001
    ends = []

    async def two(call, infer):
        ends.append((await infer(ask(**LONG)))[0].finish_reason)
        try:
            await infer(ask())
        except RequestCancelledError:
            ends.append("refused")
            raise

    async with composed(two) as engine:
        stream = await engine.model().stream("plan")
        await until(lambda: engine.stats()["toy"]["generated_tokens"] > 3)
        await stream.aclose()
        with pytest.raises(RequestCancelledError):
            await stream.result()
        assert ends == ["cancelled", "refused"]


async def test_children_that_are_left_behind_are_cancelled(composed, toys):
    toys.controls().delay_s = 0.001
    left = []

    async def careless(call, infer):
        left.append(asyncio.ensure_future(infer(ask(**LONG))))
        await asyncio.sleep(0.02)
        return {"done": True}

    async with composed(careless) as engine:
        assert (await engine.run("plan", {})).output == {"done": True}
        await idle(engine)
        with pytest.raises(asyncio.CancelledError):
            await left[0]


async def test_one_failing_child_is_raised_at_once(composed, toys):
    async def several(call, infer):
        jobs = [infer(ask(**LONG)), infer(ask(stop_token_ids=(9999,)))]
        await asyncio.gather(*jobs)

    toys.controls().delay_s = 0.002
    async with composed(several) as engine:
        with pytest.raises(InvalidRequestError, match="outside this model's vocabulary"):
            await asyncio.wait_for(engine.run("plan", {}), 1)
        await idle(engine)


async def test_work_on_the_pool_leaves_the_loop_free(composed):
    async def compute(call, infer):
        return {"thread": await infer.cpu(lambda: threading.current_thread().name)}

    async with composed(compute) as engine:
        assert (await engine.run("plan", {})).output["thread"].startswith("kestrel-cpu")


async def test_its_own_media_are_prepared_with_the_calls_settings(composed, toys, monkeypatch):
    seen = []

    async def look(call, infer):
        driver = infer._model.built.main
        real = driver.prepare
        monkeypatch.setattr(driver, "prepare", lambda item, s: (seen.append(dict(s)), real(item, s))[1])
        prepared = await infer.prepare(ImageItem(pixels=picture()))
        made = await infer(
            Request(segments=(Media(prepared), Text("say: ")), decoding=Decoding(), settings=call.settings)
        )
        return {"media": made[0].media}

    async with composed(look) as engine:
        result = await engine.run("plan", {}, {"max_pixels": 1000, "max_tokens": 2})
        assert result.output == {"media": ({"rows": 4},)}
        assert seen == [{"max_pixels": 1000}]


# -- passes


async def test_a_pass_runs_on_the_device_thread_with_encoded_media(composed, toys):
    async def double(call, infer):
        await infer(
            Request(
                segments=(Media(call.prepared[0]), Text("say: ")),
                decoding=Decoding(max_tokens=1),
                settings=call.settings,
            )
        )
        return {"out": await infer.run_pass("double", [{"x": 2}, {"x": 5}], call.prepared)}

    async with composed(double) as engine:
        result = await engine.run("plan", {"images": [picture(0), picture(1)]})
        assert result.output == {"out": [4, 10, (4, 1), (4, 1)]}
        assert toys.double.threads == ["kestrel-cpu"] == [f"kestrel-{engine.fleet.slot('toy').device}"]
        assert toys.controls().encoded == 2, "the first picture's features were in the pool"


async def test_a_pass_waits_while_the_engine_is_paused(composed, toys):
    async def double(call, infer):
        return {"out": await infer.run_pass("double", [{"x": 1}])}

    async with composed(double) as engine:
        await engine.pause()
        task = asyncio.ensure_future(engine.run("plan", {}))
        await asyncio.sleep(0.03)
        assert not toys.double.threads
        with pytest.raises(RequestTimeoutError):
            await engine.run("plan", {}, {"timeout_s": 0.02})
        await engine.resume()
        assert (await task).output == {"out": [2]}


async def test_a_pass_that_the_model_lacks_and_one_that_fails(composed, toys):
    async def run(call, infer):
        return {"out": await infer.run_pass(call.values["name"], [{"x": 1}])}

    async with composed(run) as engine:
        with pytest.raises(InvalidRequestError, match="toy has no pass 'align'; it has: double"):
            await engine.run("plan", {"name": "align"})
        toys.double.failure = RuntimeError("the kernel is broken")
        with pytest.raises(ModelFaultError, match=r"pass 'double' failed .RuntimeError in .*: the ker"):
            await engine.run("plan", {"name": "double"})
        toys.double.failure = None
        assert (await engine.run("plan", {"name": "double"})).output == {"out": [2]}


async def test_a_composition_at_shutdown_ends_with_the_engine(composed, toys):
    async def dawdle(call, infer):
        await asyncio.sleep(60)

    toys.family.compositions["plan"] = dawdle
    engine = await toys.create()
    task = asyncio.ensure_future(engine.run("plan", {}))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(engine.shutdown(drain=False), 5)
    with pytest.raises(EngineStoppedError):
        await task


async def test_a_step_models_frames_and_durations_reach_the_completion(toys):
    import numpy as np

    class Frames(Plan):
        name = "frames"

        def parse(self, inputs, settings):
            return Call(skill=self.name, media=(("audio", inputs["audio"]),), settings=settings)

    async def frames(call, infer):
        (made,) = await infer(
            Request(segments=(Media(call.prepared[0]),), decoding=Decoding(), settings=call.settings)
        )
        return {"frames": made.frames, "durations": made.durations, "output": made.output}

    toys.skills = (Frames(),)
    toys.family.compositions["frames"] = frames
    async with toys.engine(driver="step") as engine:
        clip = AudioItem(samples=np.ones(5, dtype=np.float32), sample_rate=16000)
        result = await engine.run("frames", {"audio": clip})
        assert result.output == {"frames": (0, 1, 2, 3, 4), "durations": (1,) * 5, "output": 5}
