"""Pictures decoded in processes of their own, so that decoders and the device's thread never wait for one another's
hold on the interpreter. A decoder that crashes takes its picture with it, not the engine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from kestrel.errors import EngineStoppedError, InvalidMediaError
from kestrel.media.image import NormalisedImage, decode_image
from kestrel.media.limits import MediaLimits
from kestrel.media.wire import expect_ready, receive, receive_into, send, widen

__all__ = ["DecoderProcesses"]

log = logging.getLogger("kestrel.media")

_PROGRAM = (  # Ctrl-C is for the engine, whose end is the end of the input
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1]); from kestrel.media.worker import main; main()"
)
_START_S = 60.0  # until a process takes requests; what takes longer is another program, and waits
_TRIES = 2  # processes that a picture may cost: it may not have been its fault


class _NotStartedError(Exception):
    """A process could not be started, or ended before it was ready."""


class DecoderProcesses:
    """At most ``count`` processes, started as pictures come. ``decode`` on several threads at once; it blocks."""

    def __init__(self, count: int) -> None:
        assert count > 0, "no processes were asked for"
        self._count = count
        self._changed = threading.Condition()
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []
        self._closed = False
        self._has_started: bool | None = None  # whether any ever did; None: not tried

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that run now."""
        with self._changed:
            return tuple(process.pid for process in self._all)

    def decode(
        self, raw: bytes, label: str, limits: MediaLimits, reserve: Callable[[int], None]
    ) -> NormalisedImage:
        """What ``decode_image`` gives and raises; InvalidMediaError as well where the picture ends its process twice.

        EngineStoppedError once this is closed. Where no process can be started, this thread decodes.
        """
        for _ in range(_TRIES):
            try:
                done = self._by_process(raw, label, limits, reserve)
            except _NotStartedError as error:
                self._warn(error)
                return decode_image(raw, label, limits, reserve)
            if done is not None:
                return done
        raise InvalidMediaError(
            f"{label} ended {_TRIES} processes that were decoding it: a fault of the decoder, or no memory. "
            "Save it anew, or give a smaller picture"
        )

    def _by_process(
        self, raw: bytes, label: str, limits: MediaLimits, reserve: Callable[[int], None]
    ) -> NormalisedImage | None:
        """What a process decodes; None when it ended meanwhile."""
        process = self._take()
        try:
            process.await_ready()
            self._has_started = True
            return process.decode(raw, label, limits, reserve)
        except _NotStartedError:
            self._check()
            raise
        except (EOFError, OSError):
            if process.is_between:  # it was ``reserve`` that raised
                raise
            self._check()
            log.warning("a process that decoded %s ended", label)
            return None
        finally:
            self._give_back(process)

    def _warn(self, error: Exception) -> None:
        """Say that a thread decodes. Where not even the first process came up, none is tried again."""
        if self._has_started is None:
            self._has_started = False
            log.warning("pictures are decoded on threads from now on: no process can be started (%s)", error)
        elif self._has_started:
            log.warning("a picture is decoded on a thread: no process can be started (%s)", error)

    def close(self) -> None:
        """End all processes at once, whatever they do. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for process in self._all:
                process.kill()
            self._all.difference_update(idle)
            self._changed.notify_all()
        for process in idle:  # the others are put away by who waits for their answers
            process.put_away()

    def _take(self) -> _Process:
        with self._changed:
            while True:
                self._check()
                if self._has_started is False:
                    raise _NotStartedError("none ever did")
                if self._idle:
                    process = self._idle.pop()
                    if process.runs:
                        return process
                    self._all.discard(process)  # it was ended while it had nothing to do
                    process.put_away()
                elif len(self._all) < self._count:
                    process = _Process()
                    self._all.add(process)
                    return process
                else:
                    self._changed.wait()

    def _check(self) -> None:
        if self._closed:
            raise EngineStoppedError("the engine was shut down before the request finished")

    def _give_back(self, process: _Process) -> None:
        """``process`` is free for the next picture, or lost."""
        with self._changed:
            is_lost = self._closed or not process.is_between
            if is_lost:
                self._all.discard(process)
            else:
                self._idle.append(process)
            self._changed.notify_all()
        if is_lost:
            process.put_away()


class _Process:
    """One process. ``is_between``: it waits for a request. It ends with this object, at the latest."""

    def __init__(self) -> None:
        running = _started()
        self._running = running
        self._requests, self._answers = _pipe(running.stdin), _pipe(running.stdout)
        self.put_away = weakref.finalize(self, _end, running, os.getpid())
        self.pid = running.pid
        self.is_between = False
        self._is_ready = False

    @property
    def runs(self) -> bool:
        """Whether it did not end yet."""
        return self._running.poll() is None

    def await_ready(self) -> None:
        """Wait until it takes requests. _NotStartedError when it ended instead, or is no decoder."""
        if self._is_ready:
            return
        too_late = threading.Timer(_START_S, self.kill)
        too_late.daemon = True
        too_late.start()
        try:
            expect_ready(self._answers)
        except (EOFError, OSError) as error:
            raise _NotStartedError(f"{sys.executable}: {error}") from error
        finally:
            too_late.cancel()
        self._is_ready = self.is_between = True

    def decode(
        self, raw: bytes, label: str, limits: MediaLimits, reserve: Callable[[int], None]
    ) -> NormalisedImage:
        """As ``decode_image``. EOFError or OSError when the process ended."""
        requests, answers = self._requests, self._answers
        self.is_between = False
        send(requests, {"label": label, "max_image_pixels": limits.max_image_pixels}, raw)
        header, size = receive(answers)
        if "reserve" in header:
            try:
                reserve(header["reserve"])
            except BaseException:
                send(requests, {"go": False})
                self.is_between = True
                raise
            send(requests, {"go": True})
            header, size = receive(answers)
        if "error" in header:
            self.is_between = True
            raise InvalidMediaError(header["error"])
        pixels = np.empty(header["shape"], dtype=np.uint8)
        assert pixels.nbytes == size, f"{size} bytes came for {header['shape']}"
        receive_into(answers, pixels.data.cast("B"))
        self.is_between = True
        width, height = header["original_size"]
        return NormalisedImage(
            pixels=pixels, warnings=tuple(header["warnings"]), original_size=(width, height)
        )

    def kill(self) -> None:
        """End it now; who waits for an answer hears that there is none. On any thread."""
        self._running.kill()


def _started() -> subprocess.Popen[bytes]:
    """A process of this interpreter. _NotStartedError where there is none: what a frozen program names as its
    interpreter is itself, and it would begin anew."""
    is_frozen = getattr(sys, "frozen", False)  # set by those that freeze programs, by nobody else
    if is_frozen or not sys.executable:
        raise _NotStartedError("this program has no interpreter of its own to start")
    paths = json.dumps([path for path in sys.path if isinstance(path, str)])  # Python looks at no others
    command = [sys.executable, "-I", "-c", _PROGRAM, paths]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise _NotStartedError(str(error)) from error


def _pipe(pipe: Any) -> Any:
    assert pipe is not None, "the process was started without pipes"
    widen(pipe)
    return pipe


def _end(running: subprocess.Popen[bytes], owner: int) -> None:
    """End a process, and close its pipes, which nobody uses any more. Nothing in a fork of its owner."""
    if os.getpid() != owner:
        return
    running.kill()
    running.wait()
    for pipe in (running.stdin, running.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
                pipe.close()
