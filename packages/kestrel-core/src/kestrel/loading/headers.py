"""The headers of safetensors files: names, shapes and dtypes, read and checked without torch and without the data.

Format: 8 bytes little-endian length, that many bytes of JSON, then the data, tensor after tensor without holes.
Source: the safetensors format description, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kestrel.errors import LoadError
from kestrel.spi import TensorInfo

__all__ = ["BITS", "read_header"]

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of ``path``, with its offsets checked against the file's size. LoadError for a damaged file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(
                    path, f"its {size} bytes end before the header does, or it is another kind of file"
                )
            raw = file.read(length)
    except OSError as error:
        raise LoadError(
            f"cannot read {path}: {error.strerror or error}. Check the path and its permissions"
        ) from error
    entries = _parse(path, raw)
    tensors = {name: _tensor(path, name, entry) for name, entry in entries.items()}
    _check_offsets(path, entries, tensors, size - 8 - length)
    return tensors


def _parse(path: Path, raw: bytes) -> dict[str, Mapping[str, Any]]:
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise _damaged(path, "its header is not a JSON object of objects")
    entries.pop("__metadata__", None)
    return entries


def _tensor(path: Path, name: str, entry: Mapping[str, Any]) -> TensorInfo:
    shape, dtype = entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise _damaged(path, f"tensor {name!r} has the shape {shape!r}")
    if dtype not in BITS:
        raise _damaged(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    return TensorInfo(tuple(shape), dtype, path.name)


def _check_offsets(
    path: Path, entries: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorInfo], available: int
) -> None:
    end_of_last = 0
    spans = []
    for name, entry in entries.items():
        offsets = entry.get("data_offsets")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(o, int) for o in offsets):
            raise _damaged(path, f"tensor {name!r} has the offsets {offsets!r}")
        spans.append((offsets[0], offsets[1], name))
    for start, end, name in sorted(spans):
        info = tensors[name]
        if start != end_of_last or (end - start) * 8 != math.prod(info.shape) * BITS[info.dtype]:
            raise _damaged(
                path, f"tensor {name!r} lies at bytes {start} to {end}, which does not fit its shape"
            )
        end_of_last = end
    if end_of_last != available:
        raise _damaged(path, f"its tensors take {end_of_last} bytes and {available} bytes are there")


def _damaged(path: Path, reason: str) -> LoadError:
    return LoadError(f"{path} is not a sound safetensors file: {reason}. Download or write it again")
