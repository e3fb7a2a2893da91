"""Progress of a download as plain calls, in the shape of the bars that huggingface_hub draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["progress_bars"]


def progress_bars(advance: Callable[[int], None]) -> Any:
    """A class that stands in for tqdm, draws nothing, and calls ``advance`` with each count of bytes received."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, iterable: Iterable[Any] | None = None, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(
                iterable, *args, **{k: v for k, v in options.items() if k != "name"} | {"disable": True}
            )
            if self._counts_bytes and (resumed := int(options.get("initial") or 0)):
                advance(resumed)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_bytes:
                advance(int(n or 0))
            return None

        def __iter__(self) -> Iterator[Any]:
            yield from self.iterable

    return Silent
