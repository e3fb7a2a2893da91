"""The bounded pool for work that would hold up the event loop: decoding, tokenising, hashing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kestrel.errors import EngineStoppedError

__all__ = ["CpuPool", "on_thread"]

R = TypeVar("R")

WORKERS = 8


class CpuPool:
    """Runs functions on a few threads. Used on the event loop; once closed, all that has not begun is refused."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="kestrel-cpu")
        self._closed = False

    async def run(self, fn: Callable[[], R]) -> R:
        """``fn()``. A caller that is cancelled leaves a function that has begun to end by itself."""
        self._check()
        try:
            begun = self._executor.submit(self._begin, fn)
        except RuntimeError as error:  # the interpreter is ending: no thread takes anything on any more
            raise EngineStoppedError(
                f"nothing new can be begun: {error}. Ask before the program ends"
            ) from error
        return await asyncio.wrap_future(begun)

    def close(self) -> None:
        """Refuse what is to come and what waits, with EngineStoppedError; what runs ends by itself. Idempotent."""
        self._closed = True
        self._executor.shutdown(wait=False)

    def _begin(self, fn: Callable[[], R]) -> R:
        self._check()
        return fn()

    def _check(self) -> None:
        if self._closed:
            raise EngineStoppedError("the engine was shut down before the request finished")


async def on_thread(fn: Callable[[], R]) -> R:
    """``fn()`` on some other thread; on this one when the interpreter is ending and there are no more."""
    try:
        begun = asyncio.get_running_loop().run_in_executor(None, fn)
    except RuntimeError:
        return fn()
    return await begun
