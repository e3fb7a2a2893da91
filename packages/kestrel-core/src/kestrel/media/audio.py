"""The one way in for sound: every recording becomes mono float32 at 16 kHz, in blocks, however long it is.

Order: the source opened and recognised by its content, decoded, channels averaged, resampled, cut to the clip. Nothing
is held but a block, so memory does not grow with the length. Live sound is in ``kestrel.media.live``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.media.containers import ContainerFeed
from kestrel.media.limits import MediaLimits
from kestrel.media.pcm import ArrayFeed, Feed, Samples, check_rate, is_pcm, pcm_array
from kestrel.media.resample import Resampler
from kestrel.media.source import BinaryFile, Encoded, open_encoded

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_SECONDS", "SAMPLE_RATE", "AudioSource", "AudioStream", "open_audio"]

AudioSource: TypeAlias = "Encoded | NDArray[Any] | torch.Tensor"

SAMPLE_RATE = 16_000
MAX_SECONDS = 24 * 3600
_BLOCK = SAMPLE_RATE  # one second
_SHORTFALL_S = 0.1  # less than the header says, by more than codecs' padding


class AudioStream:
    """One recording as blocks of mono float32 at 16 kHz; ``open_audio`` makes it. Close it, or use ``with``.

    ``warnings`` are for the user, complete once the blocks have been read.
    """

    def __init__(self, feed: Feed, label: str) -> None:
        self._feed = feed
        self._label = label
        self._num_samples = 0
        self._is_read = False
        self._ahead = self._counted()
        try:
            self._first = next(self._ahead, None)
            if self._first is None:
                raise InvalidMediaError(f"{label}: a recording of no samples. Give one that is not empty")
            _check_length(label, self._feed.duration_s if self._feed.is_exact else None)
        except BaseException:
            feed.close()
            raise

    @property
    def duration_s(self) -> float | None:
        """The length of the whole recording: counted once it is read, else what it says of itself, else None."""
        return self._num_samples / SAMPLE_RATE if self._is_read else self._feed.duration_s

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know (damaged parts, a recording that ends early)."""
        return tuple(self._feed.warnings)

    def blocks(self, start_s: float = 0.0, end_s: float | None = None) -> Iterator[Samples]:
        """The samples from ``start_s`` up to ``end_s`` (None: the end), one second per block, the last one shorter.

        Read once. Both times are rounded to samples; an ``end_s`` behind the end is the end. Raises InvalidMediaError
        where the recording cannot be decoded, InvalidRequestError when it ends before ``start_s``.
        """
        start, end = _sample_range(start_s, end_s)
        at = 0
        for block in self._seconds():
            part = block[max(0, start - at) : None if end is None else max(0, end - at)]
            at += len(block)
            if len(part):
                yield part
            if end is not None and at >= end:
                return
        if at <= start:
            raise InvalidRequestError(
                f"the clip starts at {start_s:g} s but {self._label} ends at {at / SAMPLE_RATE:g} s. "
                "Give a clip inside it"
            )

    def pieces(self) -> Iterator[Samples]:
        """All samples, as they come out of the decoder; instead of ``blocks``. Of a caller's float32 at 16 kHz they are
        the array itself: it must stay as it is while they are read."""
        while (piece := self._next()) is not None:
            yield piece

    def close(self) -> None:
        """Give back the file and the decoder; idempotent."""
        self._ahead.close()
        self._feed.close()

    def __enter__(self) -> AudioStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> Samples | None:
        first, self._first = self._first, None
        return next(self._ahead, None) if first is None else first

    def _seconds(self) -> Iterator[Samples]:
        """Blocks of one second."""
        held: list[Samples] = []
        size = 0
        for piece in self.pieces():
            held.append(piece)
            size += len(piece)
            if size >= _BLOCK:
                joined = np.concatenate(held)
                whole = size - size % _BLOCK
                yield from np.split(joined[:whole], whole // _BLOCK)
                held, size = [joined[whole:]], size - whole
        if size:
            yield np.concatenate(held)

    def _counted(self) -> Generator[Samples, None, None]:
        """What there is, as it comes; the recording's length is known at the end."""
        for piece in self._resampled():
            self._num_samples += len(piece)
            if self._num_samples > MAX_SECONDS * SAMPLE_RATE:
                _check_length(self._label, self._num_samples / SAMPLE_RATE)
            if len(piece):
                yield piece
        self._note_shortfall()
        self._is_read = True

    def _resampled(self) -> Iterator[Samples]:
        rate, resampler = 0, Resampler(SAMPLE_RATE, SAMPLE_RATE)
        for block_rate, block in self._feed.blocks():
            if block_rate != rate:  # chained recordings may change it
                yield resampler.flush()
                rate, resampler = block_rate, Resampler(block_rate, SAMPLE_RATE)
            yield resampler.push(block)
        yield resampler.flush()

    def _note_shortfall(self) -> None:
        stated, found = self._feed.duration_s, self._num_samples / SAMPLE_RATE
        if self._feed.is_exact and self._num_samples and stated is not None and stated - found > _SHORTFALL_S:
            self._feed.warnings.append(
                f"{self._label}: ends at {found:.1f} s of the {stated:.1f} s that it announces; it may be truncated"
            )


def open_audio(
    source: AudioSource, *, sample_rate: int | None = None, limits: MediaLimits | None = None
) -> AudioStream:
    """``source`` as a stream of mono float32 at 16 kHz.

    ``source``: a path (of any size), encoded bytes, a binary file (read from where it stands, at most 64 MiB), or a
    one-dimensional array or CPU tensor of PCM, which alone takes and needs ``sample_rate``. Raises InvalidMediaError
    for what is no audio, holds no samples or lasts more than 24 h; InvalidRequestError for a wrong ``sample_rate``.
    """
    limits = limits or MediaLimits()
    if is_pcm(source):
        if sample_rate is None:
            raise InvalidRequestError("raw PCM was given without sample_rate. Give its rate in Hz")
        return AudioStream(ArrayFeed(pcm_array(source), check_rate(sample_rate)), "the given array")
    if not _is_encoded(source):
        raise InvalidMediaError(
            f"a {type(source).__name__} is no recording. Give a path, bytes, a binary file, or an array of PCM with "
            "its sample_rate"
        )
    if sample_rate is not None:
        raise InvalidRequestError(
            f"sample_rate={sample_rate!r} was given with an encoded recording, which has its own. Leave it out"
        )
    file, label = open_encoded(source, limits)
    try:
        feed = ContainerFeed(file, label)
    except BaseException:
        file.close()
        raise
    return AudioStream(feed, label)


def _is_encoded(source: object) -> TypeGuard[Encoded]:
    return isinstance(source, str | os.PathLike | bytes | bytearray | memoryview | BinaryFile)


def _sample_range(start_s: float, end_s: float | None) -> tuple[int, int | None]:
    for name, value in (("start", start_s), ("end", end_s)):
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            raise InvalidRequestError(
                f"the clip's {name} is {value!r}; it must be a time in seconds from 0 on"
            )
    start, end = round(start_s * SAMPLE_RATE), None if end_s is None else round(end_s * SAMPLE_RATE)
    if end is not None and end <= start:
        raise InvalidRequestError(
            f"the clip starts at {start_s:g} s and ends at {end_s:g} s. Let it end later"
        )
    return start, end


def _check_length(label: str, seconds: float | None) -> None:
    if seconds is not None and seconds > MAX_SECONDS:
        raise InvalidMediaError(
            f"{label} lasts {seconds / 3600:.1f} h; {MAX_SECONDS // 3600} h are the most. Split it"
        )
