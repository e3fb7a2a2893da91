"""Places that weights come from, by scheme (``hf:``, ``file:``, a plugin's own)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

__all__ = ["Source"]


class Source(ABC):
    """Finds a model's files under one scheme."""

    scheme: str

    @abstractmethod
    def locate(
        self,
        reference: str,
        *,
        revision: str | None,
        offline: bool,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Path:
        """A local directory (Hub layout) or safetensors file of ``reference`` (the part behind ``scheme:``).

        ``progress(file name, bytes done, bytes in all)`` is called while downloading. ``offline`` allows no
        connection at all. Raises UnknownModelError when nothing is there, LoadError when a download fails.
        """
