"""The pool for work beside the event loop: whose turn it is, what a cancelled caller leaves, what closing refuses."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from kestrel.engine.pool import CpuPool, on_thread
from kestrel.errors import EngineStoppedError


@pytest.fixture
async def pool() -> AsyncIterator[CpuPool]:
    made = CpuPool(workers=1)
    yield made
    made.close()


async def _behind_something(pool: CpuPool) -> tuple[threading.Event, asyncio.Task[bool]]:
    """The pool's thread busy until the event is set."""
    gate, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def busy() -> bool:
        loop.call_soon_threadsafe(begun.set)
        return gate.wait(10)

    task = asyncio.ensure_future(pool.run(busy, 0.0))
    await begun.wait()
    return gate, task


async def test_what_waits_is_begun_in_the_order_of_calls_then_as_it_came(pool: CpuPool) -> None:
    gate, first = await _behind_something(pool)
    begun: list[str] = []
    waiting = [
        asyncio.ensure_future(pool.run(lambda name=name: begun.append(name), turn))  # type: ignore[misc]
        for name, turn in (("late", 3.0), ("early", 1.0), ("middle", 2.0), ("early again", 1.0))
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *waiting)
    assert begun == ["early", "early again", "middle", "late"]


async def test_a_cancelled_caller_takes_its_work_away_and_no_one_elses(pool: CpuPool) -> None:
    gate, first = await _behind_something(pool)
    begun: list[str] = []
    given_up = asyncio.ensure_future(pool.run(lambda: begun.append("given up"), 1.0))
    kept = asyncio.ensure_future(pool.run(lambda: begun.append("kept"), 2.0))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    gate.set()
    await asyncio.gather(first, kept)
    assert begun == ["kept"]


async def test_an_error_reaches_its_caller_and_the_pool_goes_on(pool: CpuPool) -> None:
    def fails() -> None:
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        await pool.run(fails, 1.0)
    assert await pool.run(lambda: 5, 2.0) == 5


async def test_a_closed_pool_refuses_what_waits_and_what_comes() -> None:
    pool = CpuPool(workers=1)
    gate, first = await _behind_something(pool)
    waits = asyncio.ensure_future(pool.run(lambda: 1, 1.0))
    await asyncio.sleep(0)
    pool.close()
    gate.set()
    assert await first
    with pytest.raises(EngineStoppedError):
        await waits
    with pytest.raises(EngineStoppedError):
        await pool.run(lambda: 2, 2.0)


class Model:
    """Something large, which a function holds."""

    def close(self) -> str:
        return "closed"

    def fail(self) -> str:
        raise ValueError("this one")


Run = Callable[[CpuPool, Callable[[], str]], Coroutine[None, None, str]]


@pytest.mark.parametrize("run", [lambda pool, fn: pool.run(fn, 1.0), lambda _, fn: on_thread(fn)])
async def test_a_thread_lets_go_of_what_it_ran_before_its_caller_hears(
    pool: CpuPool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    left, kept = weakref.ref(model), list[bool]()
    loop = asyncio.get_running_loop()
    tell = loop.call_soon_threadsafe

    def told(*args: Any, **named: Any) -> asyncio.Handle:
        kept.append(left() is not None)
        return tell(*args, **named)

    monkeypatch.setattr(loop, "call_soon_threadsafe", told)
    work = asyncio.ensure_future(run(pool, model.close))
    del model
    assert await work == "closed"
    assert kept == [False]


async def test_what_failed_on_a_thread_is_gone_with_its_error() -> None:
    model = Model()
    left = weakref.ref(model)
    try:
        await on_thread(model.fail)
    except ValueError:
        del model
    assert left() is None
