"""A recording by sample positions, decoded as far as somebody asked and forgotten behind what is still needed.

All positions count samples at 16 kHz. ``Source`` reads what callers give; ``Clip`` is a part of it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kestrel.media.audio import AudioStream
from kestrel.media.live import LiveAudio
from kestrel.spi import Infer

__all__ = ["Blocks", "Clip", "FileBlocks", "LiveBlocks", "Recording", "SAMPLE_RATE", "Samples", "Source"]

SAMPLE_RATE = 16_000
LARGE = 5 * SAMPLE_RATE  # what takes longer to copy than a pool thread to wake
MOST_AT_ONCE = 60 * SAMPLE_RATE  # so that what is skipped is forgotten as it comes

Samples = NDArray[np.float32]


class Blocks(ABC):
    """Samples in order, some at a time."""

    @property
    @abstractmethod
    def duration_s(self) -> float | None:
        """The length of the whole recording, where it is known."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the recording, complete once it is read."""
        return ()

    @property
    def is_over(self) -> bool:
        """Nothing follows, as far as that is known already."""
        return False

    @abstractmethod
    async def more(self, count: int) -> list[Samples]:
        """The next blocks, at least ``count`` samples in all; fewer at the end, none behind it."""

    async def joined(self, parts: list[Samples]) -> Samples:
        """``parts``, at least one, as one array."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @abstractmethod
    async def close(self) -> None:
        """Give the file or iterator back. Idempotent."""


class FileBlocks(Blocks):
    """Blocks of a decoder, which runs on a pool thread. ``ahead``: samples that are decoded at once and come as one
    block; make it on a pool thread."""

    def __init__(self, stream: AudioStream, infer: Infer, *, ahead: int = 0) -> None:
        self._stream, self._infer = stream, infer
        self._pieces = stream.pieces()
        self._is_over = False
        self._first: list[Samples] = self._pull(ahead) if ahead else []

    @property
    def duration_s(self) -> float | None:
        return self._stream.duration_s

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._stream.warnings

    @property
    def is_over(self) -> bool:
        return self._is_over and not self._first

    async def more(self, count: int) -> list[Samples]:
        first, self._first = self._first, []
        return first or await self._infer.cpu(lambda: self._pull(count))

    async def joined(self, parts: list[Samples]) -> Samples:
        if len(parts) == 1 or sum(map(len, parts)) < LARGE:
            return await super().joined(parts)
        return await self._infer.cpu(lambda: np.concatenate(parts))

    async def close(self) -> None:
        self._stream.close()

    def _pull(self, count: int) -> list[Samples]:
        """At least ``count`` samples as one block, which is the caller's own memory where it can be."""
        found: list[Samples] = []
        have = 0
        while have < count:
            piece = next(self._pieces, None)
            if piece is None:
                self._is_over = True
                break
            found.append(piece)
            have += len(piece)
        return [np.concatenate(found)] if len(found) > 1 else found


class LiveBlocks(Blocks):
    """Blocks of an async iterator, which ``close`` ends."""

    def __init__(self, live: LiveAudio) -> None:
        self._live, self._blocks = live, live.blocks()

    @property
    def duration_s(self) -> float | None:
        return None

    async def more(self, count: int) -> list[Samples]:
        found: list[Samples] = []
        have = 0
        while have < count:
            try:
                block = await self._blocks.__anext__()
            except StopAsyncIteration:
                break
            found.append(block)
            have += len(block)
        return found

    async def close(self) -> None:
        await self._blocks.aclose()
        await self._live.aclose()  # of a generator that never began, nothing has run


class Recording(ABC):
    """Samples by position; positions behind ``forget`` cannot be read any more."""

    @abstractmethod
    async def read(self, start: int, count: int) -> Samples:
        """Samples ``start`` to ``start + count``; fewer where the recording ends."""

    @abstractmethod
    async def length_up_to(self, position: int) -> int:
        """The recording's length if it ends before ``position``, else ``position``."""

    @abstractmethod
    def forget(self, before: int) -> None:
        """Samples before ``before`` are not needed any more."""

    @abstractmethod
    def seconds_at(self, position: float, *, is_end: bool = False) -> float:
        """The time of a position on the whole file's clock; ``is_end``: of the sample before it."""

    @property
    @abstractmethod
    def known_length(self) -> int | None:
        """The length in samples, as far as it is known."""


class Source(Recording):
    """The whole of what a caller gave."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._held: deque[Samples] = deque()
        self._start = self._end = 0  # positions of what is held
        self._floor = 0  # what is before is not needed
        self._is_whole = False
        self._lock = asyncio.Lock()

    async def read(self, start: int, count: int) -> Samples:
        assert start >= self._start, f"samples from {start} are gone; {self._start} is the first held"
        await self._pull(start + count)
        parts, at = [], self._start
        for block in self._held:
            low, high = max(start - at, 0), min(start + count - at, len(block))
            if low < high:
                parts.append(block[low:high])
            at += len(block)
        return await self._blocks.joined(parts) if parts else np.zeros(0, dtype=np.float32)

    async def length_up_to(self, position: int) -> int:
        await self._pull(position)
        return min(position, self._end)

    def forget(self, before: int) -> None:
        self._floor = max(self._floor, before)
        self._drop()

    def seconds_at(self, position: float, *, is_end: bool = False) -> float:
        return position / SAMPLE_RATE

    @property
    def known_length(self) -> int | None:
        if self._is_whole:
            return self._end
        duration = self._blocks.duration_s
        return None if duration is None else round(duration * SAMPLE_RATE)

    @property
    def is_live(self) -> bool:
        """It is still going on, for all that is known."""
        return isinstance(self._blocks, LiveBlocks)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the recording."""
        return self._blocks.warnings

    async def close(self) -> None:
        """Give the file or iterator back."""
        await self._blocks.close()

    async def _pull(self, end: int) -> None:
        async with self._lock:
            while self._end < end and not self._is_whole:
                blocks = await self._blocks.more(min(end - self._end, MOST_AT_ONCE))
                for block in blocks:
                    self._held.append(block)
                    self._end += len(block)
                self._is_whole = not blocks or self._blocks.is_over
                self._drop()

    def _drop(self) -> None:
        while self._held and self._start + len(self._held[0]) <= self._floor:
            self._start += len(self._held.popleft())


class Clip(Recording):
    """Samples ``start`` to ``end`` (None: to the end) of another recording, counted from 0."""

    def __init__(self, whole: Recording, start: int, end: int | None) -> None:
        self._whole, self._start = whole, start
        self._length = None if end is None else end - start

    async def read(self, start: int, count: int) -> Samples:
        if self._length is not None:
            count = max(0, min(count, self._length - start))
        return await self._whole.read(self._start + start, count)

    async def length_up_to(self, position: int) -> int:
        if self._length is not None:
            position = min(position, self._length)
        return max(0, await self._whole.length_up_to(self._start + position) - self._start)

    def forget(self, before: int) -> None:
        self._whole.forget(self._start + before)

    def seconds_at(self, position: float, *, is_end: bool = False) -> float:
        return self._whole.seconds_at(self._start + position, is_end=is_end)

    @property
    def known_length(self) -> int | None:
        whole = self._whole.known_length
        left = None if whole is None else max(0, whole - self._start)
        if self._length is None or left is None:
            return self._length if left is None else left
        return min(left, self._length)
