"""The speech of a recording: spans of it joined, with the silence between them left out.

Positions are samples of the joined speech; they map back to the clock of the whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

import numpy as np

from kestrel.spi import Infer
from kestrel_speech.recording import SAMPLE_RATE, Recording, Samples
from kestrel_speech.vad import Span, SpeechDetector, VadOptions

__all__ = ["Held", "Joined", "SpeechOnly", "SpeechSpans"]

STEP = 10 * SAMPLE_RATE  # samples that the detector hears at a time
LONGEST_SPAN_S = 600.0  # a longer one is cut at a pause, so that it need not be held whole


class SpeechSpans:
    """Spans of speech of a recording, in order, found as far as somebody asks."""

    def __init__(self, whole: Recording, options: VadOptions, infer: Infer) -> None:
        longest = min(options.max_speech_duration_s, LONGEST_SPAN_S)
        self._whole, self._infer = whole, infer
        self._detector = SpeechDetector(replace(options, max_speech_duration_s=longest))
        self._heard = 0
        self._is_over = False

    @property
    def pending(self) -> int:
        """No span that is still to come begins before this sample of the whole."""
        return self._detector.pending

    async def more(self) -> list[Span] | None:
        """The spans that the next seconds complete; None when the recording is over."""
        if self._is_over:
            return None
        samples = await self._whole.read(self._heard, STEP)
        self._heard += len(samples)
        if len(samples):
            return await self._infer.cpu(lambda: self._detector.push(samples))
        self._is_over = True
        return await self._infer.cpu(self._detector.flush)


class Joined(Recording):
    """Given spans of ``whole``, one behind the other."""

    def __init__(self, whole: Recording, spans: list[Span]) -> None:
        self._whole = whole
        self._starts: list[int] = []  # of spans in ``whole``
        self._begins: list[int] = []  # of spans in what is joined
        self._length = 0
        self.append(spans)

    def append(self, spans: list[Span]) -> None:
        """Add spans behind those that are there."""
        for start, end in spans:
            self._starts.append(start)
            self._begins.append(self._length)
            self._length += end - start

    @property
    def known_length(self) -> int | None:
        return self._length

    async def read(self, start: int, count: int) -> Samples:
        parts, end = [], min(start + count, await self.length_up_to(start + count))
        at = start
        while at < end:
            span = self._span_at(at)
            stop = min(end, self._end_of(span))
            parts.append(await self._whole.read(self._starts[span] + at - self._begins[span], stop - at))
            at = stop
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)

    async def length_up_to(self, position: int) -> int:
        return min(position, self._length)

    def forget(self, before: int) -> None:
        if self._begins:
            self._whole.forget(int(self._position(before, is_end=before >= self._length)))

    def seconds_at(self, position: float, *, is_end: bool = False) -> float:
        if not self._begins:
            return self._whole.seconds_at(position, is_end=is_end)
        return self._whole.seconds_at(self._position(position, is_end=is_end), is_end=is_end)

    def _position(self, position: float, *, is_end: bool) -> float:
        """Where ``position`` lies in the whole."""
        span = max(0, bisect_left(self._begins, position) - 1) if is_end else self._span_at(position)
        return self._starts[span] + position - self._begins[span]

    def _span_at(self, position: float) -> int:
        return max(0, bisect_right(self._begins, position) - 1)

    def _end_of(self, span: int) -> int:
        return self._begins[span + 1] if span + 1 < len(self._begins) else self._length


class Held(Recording):
    """Samples that are in memory, on the clock of the recording that they come from."""

    def __init__(self, samples: Samples, origin: Recording) -> None:
        self._samples, self._origin = samples, origin

    @property
    def known_length(self) -> int | None:
        return len(self._samples)

    async def read(self, start: int, count: int) -> Samples:
        return self._samples[start : start + count]

    async def length_up_to(self, position: int) -> int:
        return min(position, len(self._samples))

    def forget(self, before: int) -> None:
        """Nothing: all of it goes at once."""

    def seconds_at(self, position: float, *, is_end: bool = False) -> float:
        return self._origin.seconds_at(position, is_end=is_end)


class SpeechOnly(Joined):
    """All speech of ``whole``, found as far as it is read."""

    def __init__(self, whole: Recording, options: VadOptions, infer: Infer) -> None:
        super().__init__(whole, [])
        self._spans = SpeechSpans(whole, options, infer)
        self._floor = 0
        self._is_over = False

    @property
    def known_length(self) -> int | None:
        return self._length if self._is_over else None

    async def length_up_to(self, position: int) -> int:
        while self._length < position and not self._is_over:
            found = await self._spans.more()
            self._is_over = found is None
            self.append(found or [])
            self.forget(self._floor)
        return min(position, self._length)

    def forget(self, before: int) -> None:
        self._floor = max(self._floor, before)
        if self._floor < self._length:
            super().forget(self._floor)
        else:  # all that was found has been read: what is not speech is not needed either
            self._whole.forget(self._spans.pending)
