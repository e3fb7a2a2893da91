"""The composition of ``transcribe``: open the recording, choose a way through it, and say what was found."""

from __future__ import annotations

from kestrel.errors import InvalidRequestError, RequestCancelledError
from kestrel.spi import Call, Completion, Infer
from kestrel.types import ChunkKind, FinishReason, StreamChunk, Token
from kestrel_speech.opening import open_source
from kestrel_speech.recording import SAMPLE_RATE, Clip, Recording, Source
from kestrel_speech.speech import SpeechOnly
from kestrel_speech.vad import VadOptions
from kestrel_speech.whisper.batched import batched
from kestrel_speech.whisper.features import HOP
from kestrel_speech.whisper.live import live
from kestrel_speech.whisper.session import Model, Session
from kestrel_speech.whisper.walk import Walk

__all__ = ["transcribe"]


async def transcribe(call: Call, infer: Infer, model: Model) -> Completion:
    """What was said in ``call``'s recording. A cancelled call gives what was found until then."""
    session = Session(call, infer, model)
    ahead = 0 if session.options.clips else model.config.num_frames * HOP + 1  # 1: to see whether that is all
    audio, rate = call.values["audio"], call.values["sample_rate"]
    source = await open_source(audio, rate, model.limits, infer, ahead=ahead)
    reason: FinishReason = "stop"
    try:
        await _run(session, source)
    except RequestCancelledError:
        reason = "cancelled"
    finally:
        await source.close()
    _note_length(session, source)
    output = session.transcript().as_output()
    if infer.is_watched:
        infer.emit(StreamChunk(ChunkKind.SNAPSHOT, value={**output, "provisional": False}))
    return Completion(
        output=output,
        finish_reason=reason,
        seed=call.settings.seed or 0,
        tokens=tuple(Token(i) for i in session.ids),
        warnings=source.warnings,
    )


async def _run(session: Session, source: Source) -> None:
    options = session.options
    window = session.model.config.num_frames * HOP
    clips = options.clips or ((0.0, None),)
    with_times = await _needs_times(session, source, window)
    walk = Walk(session, with_times=with_times)
    for start, end in clips:
        clip = await _clip(source, start, end)
        _note_length(session, source)
        is_long = source.is_live or await clip.length_up_to(window + 1) > window
        session.progress.is_long = session.progress.is_long or is_long
        if options.batch_size > 1 and not source.is_live:
            await batched(clip, session, with_times=with_times)
            continue
        speech: Recording = clip
        if options.vad_filter:
            speech = SpeechOnly(clip, VadOptions.from_mapping(options.vad_parameters), session.infer)
        await (live if source.is_live else sequential)(speech, walk)


async def _clip(source: Source, start: float, end: float | None) -> Clip:
    first = round(start * SAMPLE_RATE)
    source.forget(first)
    clip = Clip(source, first, None if end is None else round(end * SAMPLE_RATE))
    if not await clip.length_up_to(1):
        length = await source.length_up_to(first) / SAMPLE_RATE
        raise InvalidRequestError(
            f"the clip starts at {start:g} s but the recording ends at {length:g} s. Give a clip inside it"
        )
    return clip


async def sequential(recording: Recording, walk: Walk) -> None:
    """Transcribe ``recording`` window by window."""
    async for found in walk.windows(recording):
        walk.session.accept(found.heard)
        recording.forget(found.following * HOP)
        walk.session.reached(recording.seconds_at(found.following * HOP))


async def _needs_times(session: Session, source: Source, window: int) -> bool:
    """Whether windows are decoded with times: unless nobody wants them and all fits one window, where none is needed
    to find the next."""
    options = session.options
    if options.without_timestamps is not None:
        return not options.without_timestamps
    if options.timestamps != "none" or options.clips or source.is_live:
        return True
    return await source.length_up_to(window + 1) > window


def _note_length(session: Session, source: Recording) -> None:
    length = source.known_length
    if length is not None:
        session.source_duration = session.progress.total = length / SAMPLE_RATE
