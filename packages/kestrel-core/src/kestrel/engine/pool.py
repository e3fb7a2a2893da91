"""The bounded pool for work that would hold up the event loop: decoding, tokenising, hashing."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kestrel.errors import EngineStoppedError

__all__ = ["WORKERS", "CpuPool", "on_thread"]

R = TypeVar("R")

WORKERS = 4  # four are faster than a GPU; more would only keep the interpreter from the thread that launches


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    """A function that waits for a thread: those of an earlier ``turn`` first, then as they came."""

    turn: float
    number: int
    fn: Callable[[], Any] = field(compare=False)
    done: Future[Any] = field(compare=False)


class CpuPool:
    """Runs functions on a few threads. Used on the event loop; once closed, all that has not begun is refused.

    A call needs the pool several times before a device has anything of it. What waits is begun in the order of the
    calls' ``turn``: of many calls that come at once the first are ready early, instead of all of them late.
    """

    def __init__(self, workers: int = WORKERS) -> None:
        self._executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="kestrel-cpu")
        self._closed = False
        self._waiting: list[_Job] = []
        self._changing = threading.Lock()
        self._numbers = itertools.count()

    async def run(self, fn: Callable[[], R], turn: float) -> R:
        """``fn()``; ``turn``: when the call that asks came in. A caller that is cancelled leaves a function that has
        begun to end by itself."""
        self._check()
        done: Future[R] = Future()
        with self._changing:
            heapq.heappush(self._waiting, _Job(turn, next(self._numbers), fn, done))
        del fn
        try:
            self._executor.submit(self._next)
        except RuntimeError as error:  # the interpreter is ending: no thread takes anything on any more
            raise EngineStoppedError(
                f"nothing new can be begun: {error}. Ask before the program ends"
            ) from error
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Refuse what is to come and what waits, with EngineStoppedError; what runs ends by itself. Idempotent."""
        self._closed = True
        self._executor.shutdown(wait=False)

    def _next(self) -> None:
        with self._changing:
            job = heapq.heappop(self._waiting)
        done, fns = job.done, [job.fn]
        del job
        if not done.set_running_or_notify_cancel():
            return
        try:
            self._check()
            done.set_result(fns.pop()())  # its caller hears once nothing here holds the function
        except BaseException as error:
            done.set_exception(error)
        finally:
            del done  # an error holds this frame, and through it itself

    def _check(self) -> None:
        if self._closed:
            raise EngineStoppedError("the engine was shut down before the request finished")


async def on_thread(fn: Callable[[], R]) -> R:
    """``fn()`` on some other thread; on this one when the interpreter is ending and there are no more.

    The thread has let go of ``fn``, and of what came of it, before the caller hears: models hang on them, and who
    unloads one collects what it held at once.
    """
    fns, results, errors = [fn], list[R](), list[BaseException]()
    del fn

    def run() -> None:
        try:
            results.append(fns.pop()())
        except BaseException as error:
            errors.append(error)

    try:
        begun = asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError:
        run()
    else:
        await begun
    if errors:
        raise errors.pop()
    return results.pop()
