"""Prepared pictures: decoded and encoded once, used often, by the model that prepared them."""

import asyncio
import io
import threading

import pytest
from engine_toys import picture
from PIL import Image

from kestrel.engine.pool import WORKERS
from kestrel.errors import EngineBusyError, InvalidMediaError, InvalidRequestError
from kestrel.testing.engines import ALPHABET


async def test_a_prepared_picture_is_decoded_and_encoded_once(toys):
    async with toys.engine() as engine:
        prepared = await engine.prepare(picture())
        assert prepared.model_id == "toy"
        for verb in (engine.query(prepared, "?"), engine.query(prepared, "and?"), engine.caption(prepared)):
            assert ALPHABET in (await verb).output.values()
        stream = await engine.query([prepared, prepared], "?", stream=True)
        assert (await stream.result()).output == {"answer": ALPHABET}
        assert (toys.controls().prepared, toys.controls().encoded) == (1, 1)


async def test_a_prepared_picture_is_the_picture(toys):
    async with toys.engine(driver="hybrid") as engine:
        settings = {"max_tokens": 12}
        prepared = await engine.prepare(picture())
        assert (await engine.query(prepared, "?", settings=settings)).tokens == (
            await engine.query(picture(), "?", settings=settings)
        ).tokens


async def test_a_picture_prepared_for_another_model_is_refused(toys):
    async with toys.engine(toys.config("one"), toys.config("two")) as engine:
        prepared = await engine.model("two").prepare(picture())
        with pytest.raises(InvalidRequestError, match="prepared for 'two'; prepare it again for 'one'"):
            await engine.query(prepared, "?")
        assert (await engine.model("two").query(prepared, "?")).model_id == "two"


async def test_a_bad_picture_is_refused_when_it_is_prepared(toys):
    async with toys.engine() as engine:
        with pytest.raises(InvalidMediaError, match="does not exist"):
            await engine.prepare("nowhere.png")
        with pytest.raises(InvalidRequestError, match="unknown setting"):
            await engine.prepare(picture(), {"max_pixel": 5})


async def test_prepared_pictures_are_their_owners_and_fill_no_budget(toys):
    async with toys.engine(max_decoded_media_bytes=20 * 12 * 7) as engine:
        budget = engine.fleet._shared.media_budget
        prepared = await engine.prepare(picture())
        assert budget.held_bytes == 0
        with budget.hold() as hold:
            hold.grow(1)
            with pytest.raises(EngineBusyError):
                await engine.query(picture(), "?")
        assert (await engine.query(prepared, "?")).output == {"answer": ALPHABET}


async def test_pictures_are_decoded_in_processes_where_that_is_asked_for(toys):
    async with toys.engine(toys.config("one", media_processes=1), toys.config("two")) as engine:
        decoders = engine.fleet._shared.decoders
        assert decoders is not None
        assert decoders.pids == ()
        for model in ("one", "two"):
            assert (await engine.model(model).query(picture(), "?")).output == {"answer": ALPHABET}
        file = io.BytesIO()
        Image.new("RGB", (20, 12)).save(file, "PNG")
        assert (await engine.query(file.getvalue(), "?")).output == {"answer": ALPHABET}
        assert len(decoders.pids) == 1
        with pytest.raises(InvalidMediaError):
            await engine.query(file.getvalue()[:40], "?")
    assert decoders.pids == ()


async def test_all_processes_can_decode_at_once(toys):
    async with toys.engine(toys.config("one", media_processes=WORKERS + 2)) as engine:
        pool, all_there = engine.fleet._shared.pool, threading.Barrier(WORKERS + 2)
        waits = [pool.run(lambda: all_there.wait(10), 0.0) for _ in range(WORKERS + 2)]
        assert sorted(await asyncio.gather(*waits)) == list(range(WORKERS + 2))


async def test_a_call_with_one_picture_takes_one_turn_on_the_pool(toys, monkeypatch):
    async with toys.engine() as engine:
        pool, turns = engine.fleet._shared.pool, []
        run = pool.run

        async def counted(fn, turn):
            turns.append(turn)
            return await run(fn, turn)

        monkeypatch.setattr(pool, "run", counted)
        assert (await engine.query(picture(), "?")).output == {"answer": ALPHABET}
        assert len(turns) == 1
        await engine.query([picture(), picture()], "?")
        assert len(turns) == 1 + 3
