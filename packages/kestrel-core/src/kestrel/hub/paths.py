"""File names that come from outside (an index, an adapter id, a reference) stay inside their root."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

from kestrel.errors import LoadError

__all__ = ["inside"]


def inside(root: Path, name: str) -> Path:
    """``root / name``. LoadError when ``name`` is absolute, has a drive, or climbs out with "..".

    Symbolic links inside the root are followed: the hub's cache is made of them.
    """
    parts = PurePosixPath(name).parts + PureWindowsPath(name).parts
    leaves = not name or "\0" in name or ".." in parts
    if leaves or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        raise LoadError(
            f"the file name {name!r} leads out of {root}. Names must be relative and must not contain '..'"
        )
    return root / name
