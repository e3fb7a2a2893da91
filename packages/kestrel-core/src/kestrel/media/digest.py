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
    """What gives ``content_digest`` of ``parts``, once; most of a large array is hashed on other threads until then."""
    contents = [memoryview(part) if isinstance(part, bytes) else _bytes_of(part) for part in parts]
    cut = [_pieces(content) for content in contents]
    under_way = [[_begun(partial(_hashed, piece)) for piece in others] for _, *others in cut]

    def digest() -> bytes:
        whole = hashlib.sha256()
        for content, (first, *_), others in zip(contents, cut, under_way, strict=True):
            whole.update(len(content).to_bytes(8, "little"))
            whole.update(_hashed(first) if others else content)
            for ended in others:
                whole.update(ended())
        return whole.digest()

    return digest


def _pieces(content: memoryview) -> list[memoryview]:
    """What of ``content`` is hashed apart."""
    if len(content) <= WHOLE_BYTES:
        return [content]
    size = -(-len(content) // PIECES)
    return [content[start : start + size] for start in range(0, len(content), size)]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _hashed(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _begun(job: Callable[[], bytes]) -> Callable[[], bytes]:
    """What waits for ``job`` on another thread; ``job`` itself where the interpreter ends and starts none."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(PIECES - 1, thread_name_prefix="kestrel-hash")
    try:
        return _pool.submit(job).result
    except RuntimeError:
        return job


def _forget() -> None:
    """A forked process has none of its parent's threads."""
    global _pool
    _pool = None


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
