"""Pictures decoded in processes of their own, so that decoders and the device's thread never wait for one another's
hold on the interpreter. A decoder that crashes takes its picture with it, not the engine."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from kestrel.errors import EngineStoppedError, InvalidMediaError
from kestrel.media.image import NormalisedImage, decode_image
from kestrel.media.limits import MediaLimits
from kestrel.media.wire import receive, receive_into, send, widen

__all__ = ["DecoderProcesses"]

log = logging.getLogger("kestrel.media")

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kestrel.media.worker import main; main()"
)
_TRIES = 2  # processes that a picture may cost: it may not have been its fault


class DecoderProcesses:
    """At most ``count`` processes, started as pictures come. ``decode`` on several threads at once; it blocks."""

    def __init__(self, count: int) -> None:
        assert count > 0, "no processes were asked for"
        self._count = count
        self._changed = threading.Condition()
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []
        self._closed = False

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
                process = self._take()
            except OSError as error:
                log.warning("pictures are decoded on threads: no process can be started", exc_info=error)
                return decode_image(raw, label, limits, reserve)
            try:
                return process.decode(raw, label, limits, reserve)
            except (EOFError, OSError):
                if process.is_between:  # it was ``reserve`` that raised
                    raise
                if not self._closed:
                    log.warning("a process that decoded %s ended", label)
            finally:
                self._give_back(process)
        raise InvalidMediaError(
            f"{label} ended {_TRIES} processes that were decoding it: a fault of the decoder, or no memory. "
            "Save it anew, or give a smaller picture"
        )

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
            while not self._closed:
                if self._idle:
                    return self._idle.pop()
                if len(self._all) < self._count:
                    process = _Process()
                    self._all.add(process)
                    return process
                self._changed.wait()
        raise EngineStoppedError("the engine was shut down before the request finished")

    def _give_back(self, process: _Process) -> None:
        """``process`` is free for the next picture, or lost."""
        with self._changed:
            is_lost = self._closed or not process.is_between
            if is_lost:
                self._all.discard(process)
            else:
                self._idle.append(process)
            self._changed.notify()
        if is_lost:
            process.put_away()


class _Process:
    """One process. ``is_between``: it waits for a request."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path)]
        self._running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._requests, self._answers = self._running.stdin, self._running.stdout
        for pipe in (self._requests, self._answers):
            widen(_open(pipe))
        self.pid = self._running.pid
        self.is_between = True

    def decode(
        self, raw: bytes, label: str, limits: MediaLimits, reserve: Callable[[int], None]
    ) -> NormalisedImage:
        """As ``decode_image``. EOFError or OSError when the process ended."""
        requests, answers = _open(self._requests), _open(self._answers)
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

    def put_away(self) -> None:
        """End it, and close its pipes, which nobody uses any more."""
        self._running.kill()
        self._running.wait()
        for pipe in (self._requests, self._answers):
            try:
                _open(pipe).close()
            except OSError:  # what was still to be written has nobody to read it
                continue


def _open(pipe: IO[bytes] | None) -> Any:
    assert pipe is not None, "the process was started without pipes"
    return pipe
