"""One thread per device: ticks its lanes in turn, sleeps when none has anything to do."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from kestrel.errors import EngineStoppedError
from kestrel.lanes.lane import Lane

__all__ = ["DeviceThread"]

log = logging.getLogger("kestrel.lanes")

R = TypeVar("R")

LONGEST_SLEEP_S = 60.0
AT_EXIT_S = 10.0  # for the step that a thread is in when the interpreter ends


class DeviceThread:
    """Runs everything that touches one device. All methods may be called from any other thread.

    A lane whose tick raises loses what it runs (``Lane.recover``), never the thread. A lane that cannot recover is
    ticked no more, and ``on_lost`` is called with it and the error, on this thread; so for all if the thread ends.
    """

    def __init__(self, name: str = "device") -> None:
        self._lanes: list[Lane] = []
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._stirred = False
        self._paused = False
        self._stopping = False
        self._broke = False
        self._pid = os.getpid()
        self.on_lost: Callable[[Lane, BaseException], None] = _untold
        self._thread = threading.Thread(target=self._run, name=f"kestrel-{name}", daemon=True)

    # -- any thread

    def start(self) -> None:
        """Begin to tick. It ends with the interpreter, if nobody stops it before."""
        self._pid = os.getpid()
        self._thread.start()
        _running.add(self)

    @property
    def is_alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive() and not self._broke

    def is_of(self, pid: int) -> bool:
        """The thread was started in process ``pid``; forked ones have none of it, and perhaps a lock that it held."""
        return self._pid == pid

    def add(self, lane: Lane) -> None:
        """Tick ``lane`` from now on."""
        lane.wake = self.stir
        with self._changed:
            self._lanes = [*self._lanes, lane]
            if self._paused:
                lane.pause()
        self.stir()

    def remove(self, lane: Lane) -> None:
        """Tick ``lane`` until it has nothing in flight, then no more. Blocks; abort or drain it before.

        A paused lane is left as it is.
        """

        def last_ticks() -> None:
            self._tick(lane)
            with self._changed:
                self._lanes = [other for other in self._lanes if other is not lane]

        if self.is_alive and threading.current_thread() is not self._thread:
            self.call(last_ticks).result()
        else:
            last_ticks()

    def call(self, fn: Callable[[], R]) -> Future[R]:
        """Run ``fn`` on the device thread between two ticks; also while paused."""
        future: Future[R] = Future()
        with self._changed:
            if self._stopping or not self._thread.is_alive():
                future.set_exception(
                    EngineStoppedError("the device thread is stopped; nothing runs on it any more")
                )
                return future
            self._calls.append((future, fn))
        self.stir()
        return future

    def stir(self) -> None:
        """There may be something to do."""
        with self._changed:
            self._stirred = True
            self._changed.notify()

    def pause(self) -> None:
        """Stop launches on every lane; returns once no step is in flight. State stays."""
        with self._changed:
            self._paused = True
            for lane in self._lanes:
                lane.pause()
        if self.is_alive and threading.current_thread() is not self._thread:
            self.call(lambda: [self._tick(lane) for lane in self._lanes]).result()

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._paused = False
            for lane in self._lanes:
                lane.resume()
        self.stir()

    def stop(self, timeout_s: float | None = 30.0) -> None:
        """Abort what is left with EngineStoppedError, deliver it, and end the thread. Idempotent."""
        error = EngineStoppedError("the engine was stopped before the request finished")
        with self._changed:
            self._stopping = True
            for lane in self._lanes:
                lane.abort(error)
        self.stir()
        if self.is_alive and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # -- device thread

    def _run(self) -> None:
        try:
            with (
                torch.inference_mode()
            ):  # once: turned on in every tick, it costs as much as a row's whole step
                while not self._stopping:
                    busy = self._round()
                    if not busy:
                        self._sleep()
                self._round()
        except BaseException as cause:
            log.exception("the device thread ends: it met an error that belongs to no lane")
            self._broke = True
            for lane in self._lanes:
                self.on_lost(lane, cause)
            raise
        finally:
            with self._changed:  # who asks from now on is refused; who asked before is told below
                self._stopping = True
            while self._calls:
                future, _ = self._calls.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineStoppedError("the device thread has ended"))

    def _round(self) -> bool:
        """Calls, then one tick of every lane; True while one has more to do."""
        self._stirred = False
        while self._calls:
            self._answer_call()
        busy = False
        for lane in self._lanes:
            busy = self._tick(lane) or busy
        return busy

    def _answer_call(self) -> None:
        """Run the oldest call. What it holds is let go of before its caller hears: it may be a lane to be unloaded."""
        future, fn = self._calls.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = fn()
        except BaseException as error:
            del fn
            future.set_exception(error)
            return
        del fn
        future.set_result(result)

    def _tick(self, lane: Lane) -> bool:
        try:
            return lane.tick()
        except Exception as error:  # a lane's bug must not take the other models down
            log.exception("a tick failed; the requests that were running on its lane fail with it")
            return self._recover(lane, error)

    def _recover(self, lane: Lane, error: Exception) -> bool:
        try:
            lane.recover(error)
            return True
        except Exception:  # its state cannot be trusted any more; the other lanes' can
            log.exception("a lane could not recover; it is lost with all its requests")
            with self._changed:
                self._lanes = [other for other in self._lanes if other is not lane]
            self.on_lost(lane, error)
            return False

    def _sleep(self) -> None:
        now = time.monotonic()
        due = [at for lane in self._lanes if (at := lane.next_deadline) is not None]
        wait = min([LONGEST_SLEEP_S, *(max(0.0, at - now) for at in due)])
        with self._changed:
            self._changed.wait_for(lambda: self._stirred or self._stopping, wait)


_running: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


def _end_all() -> None:
    """A thread that is inside torch when the interpreter ends takes the process down with SIGABRT."""
    for thread in [thread for thread in _running if thread.is_of(os.getpid())]:
        thread.stop(AT_EXIT_S)


atexit.register(_end_all)


def _untold(lane: Lane, error: BaseException) -> None:
    pass
