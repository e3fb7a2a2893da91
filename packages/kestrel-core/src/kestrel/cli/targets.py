"""``--output``: a path for each file that something is written about."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kestrel.cli.inputs import Picture
from kestrel.errors import InvalidRequestError

__all__ = ["plan_paths"]


def plan_paths(target: str, inputs: Sequence[Picture], suffix: str, what: str = "picture") -> dict[str, Path]:
    """Input name to path for ``target``: a file (one input), a directory, or a pattern with ``{stem}`` or ``{index}``.

    In a directory a file is named after its input's stem, with ``suffix``. Raises InvalidRequestError when two
    inputs would share a path or an input would be overwritten.
    """
    paths: dict[str, Path] = {}
    for index, given in enumerate(inputs, start=1):
        path = _place(target, given, index, suffix)
        if path in paths.values():
            raise InvalidRequestError(
                f"--output {target!r} names {str(path)!r} for more than one {what}. "
                "Give a directory, or a pattern with {stem} or {index}"
            )
        if any(other.source == path for other in inputs):
            raise InvalidRequestError(
                f"--output would overwrite the input {str(path)!r}; choose another name"
            )
        paths[given.name] = path
    return paths


def _place(target: str, given: Picture, index: int, suffix: str) -> Path:
    if "{stem}" in target or "{index}" in target:
        return Path(target.replace("{stem}", given.stem).replace("{index}", str(index)))
    if target.endswith(("/", os.sep)) or Path(target).is_dir():
        return Path(target) / f"{given.stem}{suffix}"
    return Path(target)
