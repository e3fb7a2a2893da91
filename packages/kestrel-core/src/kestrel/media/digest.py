"""The digest of a media item's content: large arrays are hashed in pieces, on several threads at once."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["WHOLE_BYTES", "begin_digest", "content_digest"]

WHOLE_BYTES = 1 << 19  # up to which a content is worth no other thread
PIECES = 4  # of a larger one

_pool: ThreadPoolExecutor | None = None


def content_digest(*parts: bytes | NDArray[Any]) -> bytes:
    """SHA-256 over the sizes and contents of ``parts``, 32 bytes; of an array beyond ``WHOLE_BYTES`` the digests of
    ``PIECES`` pieces stand for it. Arrays count as their bytes in C order. On any thread."""
    return begin_digest(*parts)()


def begin_digest(*parts: bytes | NDArray[Any]) -> Callable[[], bytes]:
    """What gives ``content_digest`` of ``parts``, once; large arrays are hashed on other threads until then."""
    contents = [memoryview(part) if isinstance(part, bytes) else _bytes_of(part) for part in parts]
    under_way = [[_begun(piece) for piece in _pieces(content)] for content in contents]

    def digest() -> bytes:
        whole = hashlib.sha256()
        for content, pieces in zip(contents, under_way, strict=True):
            whole.update(len(content).to_bytes(8, "little"))
            for ended in pieces:
                whole.update(ended())
            if not pieces:
                whole.update(content)
        return whole.digest()

    return digest


def _pieces(content: memoryview) -> list[memoryview]:
    """What of ``content`` is hashed apart: nothing of a small one."""
    if len(content) <= WHOLE_BYTES:
        return []
    size = -(-len(content) // PIECES)
    return [content[start : start + size] for start in range(0, len(content), size)]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _hashed(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _begun(piece: memoryview) -> Callable[[], bytes]:
    """What gives the digest of ``piece``, by another thread or, before one has begun with it, by whoever asks."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(PIECES, thread_name_prefix="kestrel-hash")
    try:
        hashed = _pool.submit(_hashed, piece)
    except RuntimeError:  # the interpreter ends and starts none
        return partial(_hashed, piece)
    return lambda: _hashed(piece) if hashed.cancel() else hashed.result()


def _forget() -> None:
    """A forked process has none of its parent's threads."""
    global _pool
    _pool = None


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
