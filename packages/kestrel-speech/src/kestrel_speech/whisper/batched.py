"""Long files by their speech: pieces of at most a window side by side, none knowing what the others say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from kestrel_speech.cuts import quiet_cut
from kestrel_speech.energy import is_silence
from kestrel_speech.recording import SAMPLE_RATE, Recording
from kestrel_speech.speech import Held, Joined, SpeechSpans
from kestrel_speech.vad import Span, VadOptions
from kestrel_speech.whisper.features import HOP
from kestrel_speech.whisper.session import Heard, Session
from kestrel_speech.whisper.walk import Walk

__all__ = ["batched"]

MIN_SILENCE_MS = 160  # between spans: pieces are short, so that any pause will do

Part = list[Heard]


async def batched(recording: Recording, session: Session, *, with_times: bool) -> None:
    """Transcribe ``recording`` with ``batch_size`` of its pieces under way at a time; results are added in order."""
    under_way: deque[tuple[asyncio.Task[Part], float]] = deque()

    async def finish() -> None:
        task, end = under_way.popleft()
        for heard in await task:
            session.accept(heard)
        session.reached(end)

    try:
        async for spans in _pieces(recording, session):
            speech = Joined(recording, spans)
            held = Held(await speech.read(0, speech.known_length or 0), speech)
            recording.forget(spans[-1][1])
            first = await held.read(0, _window(session))
            if session.language is None and not is_silence(first):
                prepared = await session.prepare(first)
                session.language, session.language_probability = await session.listen(prepared, held, 0)
            if len(under_way) >= session.options.batch_size:
                await finish()
            end = recording.seconds_at(spans[-1][1], is_end=True)
            walk = Walk(session, with_times=with_times, shows=False, is_alone=True)
            under_way.append((asyncio.ensure_future(_walk(held, walk)), end))
        while under_way:
            await finish()
    finally:
        for task, _ in under_way:
            task.cancel()
        await asyncio.gather(*(task for task, _ in under_way), return_exceptions=True)


async def _walk(held: Held, walk: Walk) -> Part:
    """All windows of a piece: one, but for what the model left unfinished."""
    return [found.heard async for found in walk.windows(held)]


def _window(session: Session) -> int:
    """Samples of a window."""
    return session.model.config.num_frames * HOP


async def _pieces(recording: Recording, session: Session) -> AsyncIterator[list[Span]]:
    """Spans that fit one window together."""
    window, options = _window(session), session.options
    if options.vad_filter is False:
        async for span in _cuts(recording, window):
            yield [span]
        return
    given = {"max_speech_duration_s": window / SAMPLE_RATE, "min_silence_duration_ms": MIN_SILENCE_MS}
    spans = SpeechSpans(
        recording, VadOptions.from_mapping({**given, **options.vad_parameters}), session.infer
    )
    held: list[Span] = []
    while (found := await spans.more()) is not None:
        for span in found:
            if held and sum(end - start for start, end in held) + span[1] - span[0] > window:
                yield held
                held = []
            held.append(span)
        if not held:
            recording.forget(spans.pending)
    if held:
        yield held


async def _cuts(recording: Recording, window: int) -> AsyncIterator[Span]:
    """All of the recording, cut at quiet places."""
    at = 0
    while count := len(samples := await recording.read(at, window + SAMPLE_RATE)):
        end = at + max(quiet_cut(samples, window), min(count, window // 2))
        yield at, end
        at = end
