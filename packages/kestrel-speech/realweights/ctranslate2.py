"""The weights of a CTranslate2 model: its binary file as named arrays.

Little-endian: version, name of the specification, revision, number of variables; per variable its name, rank, sizes,
type, number of bytes and values; then aliases. Strings are a length (16 bits, the NUL counts) and bytes.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Variables", "read_model"]

Variables = dict[str, NDArray[Any]]

_VERSION = 6
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def read_model(path: Path, specification: str) -> Variables:
    """Variable name to array (read-only, mapped from the file). ValueError when it is another kind of file."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(mapped)
    version, name = cursor.number("I"), cursor.text()
    if version != _VERSION or name != specification:
        raise ValueError(
            f"{path} is {name!r} of version {version}, not {specification!r} of version {_VERSION}"
        )
    cursor.number("I")  # the specification's revision
    return dict(cursor.variable() for _ in range(cursor.number("I")))


class _Cursor:
    """Reads one thing after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(f"<{code}")
        return int(value)

    def text(self) -> str:
        size = self.number("H")
        raw = self._content[self._at : self._at + size]
        self._at += size
        return raw.rstrip(b"\0").decode()

    def variable(self) -> tuple[str, NDArray[Any]]:
        name = self.text()
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype = np.dtype(_DTYPES[self.number("B")])
        num_bytes = self.number("I")
        values = np.frombuffer(self._content, dtype, num_bytes // dtype.itemsize, self._at).reshape(shape)
        self._at += num_bytes
        return name, values
