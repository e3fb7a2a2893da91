"""The encoded bytes of a media item, from wherever the caller has them. What the bytes are is not decided here."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable
from urllib.parse import unquote_to_bytes

from kestrel.errors import InvalidMediaError, shown
from kestrel.media.limits import MediaLimits
from kestrel.media.remote import Fetcher

__all__ = ["BinaryFile", "Encoded", "open_encoded", "read_encoded"]

MAX_STREAM_BYTES = 64 * 2**20  # a recording that cannot be sought in is held whole
_STREAM_STEP = 2**20
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: one is a Windows drive


@runtime_checkable
class BinaryFile(Protocol):
    """A readable binary file object."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes."""


Encoded = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryFile


def read_encoded(
    source: Encoded, limits: MediaLimits, fetcher: Fetcher, *, what: str = "picture"
) -> tuple[bytes, str]:
    """The bytes of ``source``, which should be a ``what``, and how messages name it.

    A string is a data URI, a URL or a path. Raises InvalidMediaError for what is absent, empty or too large.
    """
    if isinstance(source, str) and source[:5].lower() == "data:":
        raw, label = _from_data_uri(source, limits), "the data URI"
    elif isinstance(source, str) and source.lower().startswith(("http://", "https://")):
        raw, label = fetcher.fetch(source, limits), f"the {what} at {source}"
    elif isinstance(source, str) and (scheme := _SCHEME.match(source)) and "://" in source:
        raise InvalidMediaError(
            f"{scheme[1]}: addresses are not supported. Give a path, a data URI or an http(s) URL"
        )
    elif isinstance(source, str | os.PathLike):
        path = _path(source)
        raw, label = _from_path(path, limits, what), _short(path)
    elif isinstance(source, bytes | bytearray | memoryview):
        raw, label = _bounded(_held(source), limits, "the given bytes"), "the given bytes"
    else:
        raw, label = _from_file(source, limits), "the given file object"
    if not raw:
        raise InvalidMediaError(f"{label} is empty (0 bytes). Give a complete {what}")
    return raw, label


def open_encoded(source: Encoded, limits: MediaLimits) -> tuple[BinaryIO, str]:
    """An open recording that can be read bit by bit, and how messages name it. Paths may be of any size.

    A file object is read from where it stands, to its end or ``MAX_STREAM_BYTES``. Raises InvalidMediaError.
    """
    if isinstance(source, str) and "://" in source:
        raise InvalidMediaError(f"{source[:60]!r} is an address; audio is not fetched. Give a path or bytes")
    if isinstance(source, str | os.PathLike):
        path = _path(source)
        return _opened(path), _short(path)
    if isinstance(source, bytes | bytearray | memoryview):
        raw, label = _bounded(_held(source), limits, "the given bytes"), "the given bytes"
    else:
        raw, label = _from_stream(source, limits), "the given file object"
    if not raw:
        raise InvalidMediaError(f"{label} is empty (0 bytes). Give a complete recording")
    return io.BytesIO(raw), label


def _opened(path: Path) -> BinaryIO:
    label = _short(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidMediaError(f"{label} is not a file. Give the path of a recording")
        if not path.stat().st_size:
            raise InvalidMediaError(f"{label} is empty (0 bytes). Give a complete recording")
        return path.open("rb")
    except FileNotFoundError as error:
        raise InvalidMediaError(f"{label} does not exist. Check the path") from error
    except OSError as error:
        raise InvalidMediaError(f"{label} cannot be read: {error.strerror}. Check the path") from error


def _from_stream(file: BinaryFile, limits: MediaLimits) -> bytes:
    limit = min(MAX_STREAM_BYTES, limits.max_media_bytes)
    raw = _read(file, limit + 1, step=_STREAM_STEP)
    if len(raw) > limit:
        raise InvalidMediaError(
            f"the given file object has more than {limit} bytes; only paths may be longer. Save it and give the path"
        )
    return raw


def _path(source: str | os.PathLike[str]) -> Path:
    try:
        name = os.fsdecode(source)
        os.fsencode(name)
    except Exception as error:  # somebody's __fspath__ raises, or the name cannot be one of a file
        raise InvalidMediaError(f"{shown(source)} is not a path: {error}. Check the path") from error
    if "\0" in name:
        raise InvalidMediaError("the path holds a NUL character. Check the path")
    return Path(name)


def _held(source: bytes | bytearray | memoryview) -> bytes:
    try:
        return bytes(source)
    except ValueError as error:
        raise InvalidMediaError(
            f"the given bytes cannot be read: {error}. Give them before they are released"
        ) from error


def _from_path(path: Path, limits: MediaLimits, what: str) -> bytes:
    label = _short(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidMediaError(f"{label} is not a file. Give the path of a {what}")
        with path.open("rb") as file:
            return _bounded(file.read(limits.max_media_bytes + 1), limits, label)
    except FileNotFoundError as error:
        raise InvalidMediaError(f"{label} does not exist. Check the path") from error
    except OSError as error:
        raise InvalidMediaError(f"{label} cannot be read: {error.strerror}. Check the path") from error


def _short(path: Path) -> str:
    """``path`` as messages show it; somebody may have given a picture's base64 instead."""
    text = str(path)
    return text if len(text) <= 300 else f"the path of {len(text)} characters {text[:60]!r}…"


def _from_file(file: BinaryFile, limits: MediaLimits) -> bytes:
    raw = _read(file, limits.max_media_bytes + 1, step=limits.max_media_bytes + 1)
    return _bounded(raw, limits, "the given file object")


def _read(file: BinaryFile, at_most: int, *, step: int) -> bytes:
    """Up to ``at_most`` bytes of ``file``, ``step`` at a time."""
    blocks, size = [], 0
    try:
        while size < at_most and (block := file.read(min(step, at_most - size))):
            if not isinstance(block, bytes):
                raise InvalidMediaError("the file object gives text. Open it in binary mode")
            blocks.append(block)
            size += len(block)
    except InvalidMediaError:
        raise
    except Exception as error:  # somebody's read() raises anything; only this item is at fault
        raise InvalidMediaError(
            f"the file object cannot be read: {str(error) or type(error).__name__}. Give an open binary file"
        ) from error
    return b"".join(blocks)


def _from_data_uri(uri: str, limits: MediaLimits) -> bytes:
    label, comma, body = uri.partition(",")
    if not uri.isascii():
        raise InvalidMediaError(
            "the data URI holds characters beyond ASCII. Write them as %XX, or use base64"
        )
    if not comma:
        raise InvalidMediaError("the data URI has no comma before its data. Write data:image/png;base64,…")
    if not label.lower().endswith(";base64"):
        return _bounded(unquote_to_bytes(body), limits, "the data URI")
    if len(body) * 3 // 4 > limits.max_media_bytes + 3:
        raise _too_large("the data URI", limits)
    try:
        raw = base64.b64decode(unquote_to_bytes(body).translate(None, b" \t\r\n"), validate=True)
    except binascii.Error as error:
        raise InvalidMediaError(
            f"the data URI is not base64: {error}. Encode the whole file as base64"
        ) from error
    return _bounded(raw, limits, "the data URI")


def _bounded(raw: bytes, limits: MediaLimits, label: str) -> bytes:
    if len(raw) > limits.max_media_bytes:
        raise _too_large(label, limits)
    return raw


def _too_large(label: str, limits: MediaLimits) -> InvalidMediaError:
    return InvalidMediaError(
        f"{label} has more than {limits.max_media_bytes} bytes (max_media_bytes). "
        "Send a smaller file or raise the limit"
    )
