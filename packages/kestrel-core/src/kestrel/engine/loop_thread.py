"""An event loop on a thread of its own, for callers that have none, or that must not block theirs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kestrel.errors import EngineStoppedError, InvalidRequestError

__all__ = ["LoopThread", "check_process"]

R = TypeVar("R")

LAST_WAIT_S = 30.0  # for coroutines that are still cleaning up when the loop is told to stop


class LoopThread:
    """Runs coroutines for any number of other threads until ``stop``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="kestrel-sync", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """The coroutine's result. Ctrl-C here cancels it there; EngineStoppedError after ``stop``."""
        try:
            future = self._submit(coroutine)
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._is_stopping:
                raise _stopped() from None
            raise
        except BaseException:
            future.cancel()
            raise

    def _submit(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        check_process(self._pid)
        if threading.current_thread() is self._thread:
            raise InvalidRequestError(
                "the synchronous engine was called on its own event loop, where waiting would never end. "
                "Use the asynchronous engine inside skills and callbacks"
            )
        if sys.is_finalizing():  # the loop's thread runs no more: waiting for it would never end
            raise _stopped()
        with self._lock:  # what was taken before ``stop`` is known to it
            if self._is_stopping:
                raise _stopped()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """End the loop: what runs on it may finish cleaning up, then it is cancelled. Idempotent; any other thread."""
        if os.getpid() != self._pid:  # a forked process has nothing of it to end
            return
        with self._lock:
            is_first, self._is_stopping = not self._is_stopping, True
        if is_first:
            asyncio.run_coroutine_threadsafe(_wind_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if is_first:
            self._loop.close()

    def abandon(self, last: Callable[[bool], Coroutine[Any, Any, None]]) -> None:
        """Run ``last(False)``, then ``stop``, without waiting for it."""
        if os.getpid() != self._pid:
            return
        threading.Thread(target=self._end, args=(last,), name="kestrel-sync-end", daemon=True).start()

    def _end(self, last: Callable[[bool], Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(EngineStoppedError):
            self.run(last(False))
        self.stop()


async def _wind_down() -> None:
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, tasks = await asyncio.wait(tasks, timeout=LAST_WAIT_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def check_process(pid: int) -> None:
    """EngineStoppedError outside process ``pid``: threads do not survive a fork."""
    if os.getpid() != pid:
        raise EngineStoppedError(
            f"the engine was created in process {pid} and is used in a process forked from it, where none of its "
            "threads run. Create an engine in each process, or start processes with multiprocessing's spawn"
        )


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("the engine is stopped; create a new one")
