"""What media may cost: bytes to read, pixels to decode, time to fetch, and the memory that decoded media hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kestrel.config import RuntimeConfig
from kestrel.errors import CapacityError, EngineBusyError

__all__ = ["MediaBudget", "MediaHold", "MediaLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits of one media item. ``allowed_domains`` empty: nothing is fetched; "*" allows any host, "*.example.org"
    the hosts below a domain. ``fetch_timeout_s`` bounds a download with all its redirects."""

    max_image_pixels: int = 100_000_000
    max_media_bytes: int = 100 * 2**20
    allowed_domains: tuple[str, ...] = ()
    fetch_timeout_s: float = 30.0
    max_redirects: int = 5

    @classmethod
    def of(cls, config: RuntimeConfig) -> MediaLimits:
        """The limits that ``config`` sets."""
        return cls(
            max_image_pixels=config.max_image_pixels,
            max_media_bytes=config.max_media_bytes,
            allowed_domains=tuple(config.allowed_media_domains),
        )


class MediaBudget:
    """Bytes of decoded media held at one time, over all requests. Safe to use from several threads; never waits."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held

    def acquire(self, nbytes: int) -> None:
        """Count ``nbytes`` as held.

        Raises EngineBusyError when others hold too much, CapacityError when ``nbytes`` can never fit.
        """
        if nbytes > self._max_bytes:
            raise CapacityError(
                f"this media item decodes to {nbytes} bytes; max_decoded_media_bytes is {self._max_bytes}. "
                "Send a smaller one or raise the limit"
            )
        with self._lock:
            if self._held + nbytes > self._max_bytes:
                raise EngineBusyError(
                    f"decoded media hold {self._held} of {self._max_bytes} bytes and {nbytes} more are needed. "
                    "Retry later or raise max_decoded_media_bytes"
                )
            self._held += nbytes

    def release(self, nbytes: int) -> None:
        """Give ``nbytes`` back."""
        with self._lock:
            assert nbytes <= self._held, f"{nbytes} bytes released of {self._held} held"
            self._held -= nbytes

    @contextmanager
    def hold(self) -> Iterator[MediaHold]:
        """A hold of nothing yet; what it grows to is released at the end of the ``with`` block."""
        hold = MediaHold(self)
        try:
            yield hold
        finally:
            hold.close()


class MediaHold:
    """Bytes of a budget that one owner holds. It may grow on another thread than the one that closes it."""

    def __init__(self, budget: MediaBudget) -> None:
        self._budget = budget
        self._changing = threading.Lock()
        self._is_closed = False
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Hold ``nbytes`` more, or nothing once it is closed; raises as ``MediaBudget.acquire`` does and holds what it
        held."""
        with self._changing:
            if not self._is_closed:
                self._budget.acquire(nbytes)
                self.nbytes += nbytes

    def close(self) -> None:
        """Give all back, for good. Idempotent."""
        with self._changing:
            self._is_closed = True
            nbytes, self.nbytes = self.nbytes, 0
        self._budget.release(nbytes)
