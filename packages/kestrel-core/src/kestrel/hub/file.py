"""The scheme ``file:``: models that are on this machine already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kestrel.errors import UnknownModelError
from kestrel.spi import Source

__all__ = ["FileSource"]


class FileSource(Source):
    """Local directories in Hub layout and safetensors files."""

    scheme = "file"

    def locate(
        self,
        reference: str,
        *,
        revision: str | None = None,
        offline: bool = True,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Path:
        """The path itself, "~" expanded. UnknownModelError when nothing is there."""
        path = Path(reference).expanduser()
        if "\0" in reference or not path.exists():
            raise UnknownModelError(
                f"there is no model at {reference!r}: the path does not exist. "
                "Give a directory in Hub layout or a safetensors file"
            )
        return path
