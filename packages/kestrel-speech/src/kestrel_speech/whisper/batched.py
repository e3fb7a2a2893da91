"""Long files by their speech: pieces of at most a window side by side, none knowing what the others say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kestrel.types import Prepared
from kestrel_speech.cuts import quiet_cut
from kestrel_speech.recording import SAMPLE_RATE, Recording
from kestrel_speech.speech import Joined, SpeechSpans
from kestrel_speech.vad import Span, VadOptions
from kestrel_speech.whisper.features import FRAMES_PER_SECOND, HOP
from kestrel_speech.whisper.guard import Surroundings, judge
from kestrel_speech.whisper.history import History
from kestrel_speech.whisper.segments import Piece, cut_window
from kestrel_speech.whisper.session import Session
from kestrel_speech.whisper.window import Attempt, WindowPrompt

__all__ = ["Batched"]

MIN_SILENCE_MS = 160  # between spans: pieces are short, so that any pause will do


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the recording, and what was found in it."""

    speech: Joined
    attempt: Attempt
    pieces: list[Piece]


class Batched:
    """Goes through recordings with ``batch_size`` windows under way at a time."""

    def __init__(self, session: Session, *, with_times: bool = True) -> None:
        self._session, self._with_times = session, with_times
        options, model = session.options, session.model
        self._window = model.config.num_frames * HOP
        self._prompt = History.of(options, model).ids()
        given = {
            "max_speech_duration_s": self._window / SAMPLE_RATE,
            "min_silence_duration_ms": MIN_SILENCE_MS,
        }
        self._vad = VadOptions.from_mapping({**given, **options.vad_parameters})

    async def run(self, recording: Recording) -> None:
        """Every piece of ``recording``, added in order."""
        under_way: deque[asyncio.Task[_Part]] = deque()
        try:
            async for spans in self._pieces(recording):
                speech = Joined(recording, spans)
                window = await self._session.prepare(await speech.read(0, self._window))
                recording.forget(spans[-1][1])
                if self._session.language is None:
                    await self._session.settle_language(window)
                if len(under_way) >= self._session.options.batch_size:
                    self._add(await under_way.popleft())
                under_way.append(asyncio.ensure_future(self._decode(speech, window)))
            while under_way:
                self._add(await under_way.popleft())
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _pieces(self, recording: Recording) -> AsyncIterator[list[Span]]:
        """Spans that fit one window together."""
        if self._session.options.vad_filter is False:
            async for span in self._cuts(recording):
                yield [span]
            return
        spans = SpeechSpans(recording, self._vad, self._session.infer)
        held: list[Span] = []
        while (found := await spans.more()) is not None:
            for span in found:
                if held and sum(end - start for start, end in held) + span[1] - span[0] > self._window:
                    yield held
                    held = []
                held.append((span[0], min(span[1], span[0] + self._window)))
            if not held:
                recording.forget(spans.pending)
        if held:
            yield held

    async def _cuts(self, recording: Recording) -> AsyncIterator[Span]:
        """All of the recording, cut at quiet places."""
        at = 0
        while len(samples := await recording.read(at, self._window + SAMPLE_RATE)):
            end = at + max(quiet_cut(samples, self._window), min(len(samples), self._window // 2))
            yield at, end
            at = end

    async def _decode(self, speech: Joined, window: Prepared) -> _Part:
        session = self._session
        size = (await speech.length_up_to(self._window)) // HOP
        prompt = WindowPrompt(
            task=session.options.task,
            language=session.language,
            history=self._prompt,
            with_times=self._with_times,
        )
        attempt = await session.decode(window, prompt)
        if attempt.is_silence(session.ladder):
            return _Part(speech, attempt, [])
        cut = cut_window(
            attempt.ids, session.model.special, size, with_times=self._with_times, keeps_rest=True
        )
        pieces = list(cut.pieces)
        if session.options.with_words:
            pieces = await session.words(pieces, window, prompt, size, offset=0.0, last_speech=0.0)
            pieces = self._believed(pieces, size)
        return _Part(speech, attempt, pieces)

    def _believed(self, pieces: list[Piece], size: int) -> list[Piece]:
        options = self._session.options
        threshold = options.hallucination_silence_threshold
        if threshold is None:
            return pieces
        around = Surroundings(
            start=0.0,
            sound_end=size / FRAMES_PER_SECOND,
            window_end=self._window / SAMPLE_RATE,
            last_speech=0.0,
            threshold=threshold,
            marks=options.prepend_punctuations + options.append_punctuations,
        )
        return list(judge(pieces, around).kept)

    def _add(self, part: _Part) -> None:
        session = self._session
        session.note(part.attempt)
        spoken = [p for p in part.pieces if p.start != p.end and session.text_of(p).strip()]
        length = part.speech.known_length or 0
        session.add(spoken, part.attempt, part.speech, length / SAMPLE_RATE)
        session.progress.completed = part.speech.seconds_at(length, is_end=True)
        session.show()
