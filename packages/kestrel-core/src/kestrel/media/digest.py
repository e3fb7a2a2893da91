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

__all__ = ["WHOLE_BYTES", "content_digest"]

WHOLE_BYTES = 1 << 19  # up to which a content is worth no other thread
PIECES = 4  # of a larger one

_pool: ThreadPoolExecutor | None = None


def content_digest(*parts: bytes | NDArray[Any]) -> bytes:
    """SHA-256 over the sizes and contents of ``parts``, 32 bytes; of an array beyond ``WHOLE_BYTES`` the digests of
    ``PIECES`` pieces stand for it. Arrays count as their bytes in C order. On any thread."""
    whole = hashlib.sha256()
    for part in parts:
        content = memoryview(part) if isinstance(part, bytes) else _bytes_of(part)
        whole.update(len(content).to_bytes(8, "little"))
        if len(content) <= WHOLE_BYTES:
            whole.update(content)
            continue
        size = -(-len(content) // PIECES)
        first, *others = (content[start : start + size] for start in range(0, len(content), size))
        under_way = [_begun(partial(_hashed, piece)) for piece in others]
        whole.update(_hashed(first))
        for ended in under_way:
            whole.update(ended())
    return whole.digest()


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
