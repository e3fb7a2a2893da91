"""Messages between an engine and the processes that decode for it: a JSON header and bytes. Nothing is unpickled."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

__all__ = ["expect_ready", "receive", "receive_into", "say_ready", "send", "widen"]

_SIZES = struct.Struct("<IQ")  # bytes of the header, bytes behind it

_READY = b"kestrel decodes\n"  # the first that a process says: whatever else was started says something else

_PIPE_BYTES = 1 << 20  # most pictures pass in two turns then, instead of in twenty


def widen(pipe: BinaryIO) -> None:
    """Let ``pipe`` hold more, where the system can do that."""
    if sys.platform == "linux":
        import fcntl

        try:
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:  # the user's pipes are at their limit: it works as it is
            return


def say_ready(file: BinaryIO) -> None:
    """Write what ``expect_ready`` waits for."""
    file.write(_READY)
    file.flush()


def expect_ready(file: BinaryIO) -> None:
    """Wait for the other side's first word. EOFError when it ends, or says anything else."""
    found = _exactly(file, len(_READY))
    if found != _READY:
        raise EOFError(f"the other side is no decoder: it said {found!r}")


def send(file: BinaryIO, header: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
    """Write one message. OSError when nobody reads any more."""
    text = json.dumps(header).encode()
    file.write(_SIZES.pack(len(text), len(data)) + text)
    if len(data):
        file.write(data)
    file.flush()


def receive(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The next message's header, and how many bytes follow it. EOFError when there is none."""
    header_size, size = _SIZES.unpack(_exactly(file, _SIZES.size))
    return json.loads(_exactly(file, header_size)), size


def receive_into(file: BinaryIO, data: memoryview) -> None:
    """Fill ``data`` with the bytes behind a header. EOFError when they end before."""
    at = 0
    while at < len(data):
        count = file.readinto(data[at:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the other side ended in a message")
        at += count


def _exactly(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise EOFError("the other side ended")
    return found
