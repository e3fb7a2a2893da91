"""From window to window through a recording, each beginning where the one before got to: OpenAI's rules.

Positions are mel frames of the recording (a clip, or the speech of one); times are seconds of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from kestrel.types import Prepared
from kestrel_speech.energy import is_silence
from kestrel_speech.recording import SAMPLE_RATE, Recording
from kestrel_speech.whisper.features import FRAMES_PER_SECOND, HOP
from kestrel_speech.whisper.guard import Surroundings, judge, last_word_end
from kestrel_speech.whisper.history import History
from kestrel_speech.whisper.segments import Cut, Piece, cut_window, with_longer_rest
from kestrel_speech.whisper.session import Heard, Session
from kestrel_speech.whisper.window import NOTHING, WindowPrompt

__all__ = ["Found", "Walk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Frames ``seek`` to ``seek + size`` of a recording, ready for the encoder, and what stands before its text."""

    recording: Recording
    seek: int
    size: int
    prepared: Prepared
    prompt: WindowPrompt
    probability: float | None

    @property
    def start(self) -> float:
        """Seconds."""
        return self.seek / FRAMES_PER_SECOND

    @property
    def end(self) -> float:
        """Seconds: where its sound ends."""
        return (self.seek + self.size) / FRAMES_PER_SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a window gave, and the frame at which the next one starts."""

    heard: Heard
    following: int


class Walk:
    """Walks through recordings with one history. ``shows``: text is shown while it is decoded. ``is_alone``: it is a
    piece, and nothing is read behind its end."""

    def __init__(
        self, session: Session, *, with_times: bool = True, shows: bool = True, is_alone: bool = False
    ) -> None:
        options, model = session.options, session.model
        self.session, self._with_times, self._shows = session, with_times, shows
        self._is_alone = is_alone
        self._history = History.of(options, model)
        prefix = model.tokenizer.encode(" " + options.prefix) if options.prefix else []
        self._prefix = tuple(prefix[: model.config.text_context // 2 - 1])
        self._last_speech = 0.0

    async def windows(self, recording: Recording) -> AsyncIterator[Found]:
        """Every window of ``recording``."""
        seek = 0
        self._last_speech = 0.0
        full = self.session.model.config.num_frames
        while size := max(0, await recording.length_up_to((seek + full) * HOP) // HOP - seek):
            found = await self.step(recording, seek, size)
            yield found
            seek = found.following

    async def step(self, recording: Recording, seek: int, size: int) -> Found:
        """Decode the window at ``seek`` for good, unless there is no sound in it."""
        session = self.session
        window = await self.open(recording, seek, size)
        if window is None:
            nothing = Heard(recording=recording, attempt=NOTHING, language=None, probability=None,
                            until=(seek + size) / FRAMES_PER_SECOND)  # fmt: skip
            return Found(heard=nothing, following=seek + size)
        attempt = await session.decode(window.prepared, window.prompt, shows=self._shows)
        heard = Heard(recording=recording, attempt=attempt, language=window.prompt.language, until=window.end,
                      probability=window.probability)  # fmt: skip
        if attempt.is_silence(session.ladder):
            return Found(heard=heard, following=seek + size)
        ids = (session.model.special.time_begin, *attempt.ids) if window.prompt.prefix else attempt.ids
        cut = cut_window(ids, session.model.special, size, with_times=self._with_times)
        if self._is_alone:
            cut = with_longer_rest(cut, size)
        pieces = [replace(p, start=p.start + window.start, end=p.end + window.start) for p in cut.pieces]
        following = seek + cut.advance
        if session.options.with_words:
            believed, following = await self._timed(window, pieces, cut)
            if believed is None:
                return Found(heard=heard, following=max(following, seek + 1))
            pieces = believed
        heard = self.keep(replace(heard, pieces=tuple(pieces)))
        return Found(heard=heard, following=following if following > seek else seek + size)

    async def open(self, recording: Recording, seek: int, size: int) -> Window | None:
        """The window's features and prompt; its language, unless that is settled. None for digital silence, for which
        models invent words."""
        session = self.session
        samples = await recording.read(seek * HOP, size * HOP)
        if is_silence(samples):
            return None
        prepared = await session.prepare(samples)
        language, probability = await session.listen(prepared, recording, seek)
        prompt = WindowPrompt(
            task=session.options.task,
            language=language,
            history=self._history.ids(),
            prefix=self._prefix if seek == 0 else (),
            with_times=self._with_times,
        )
        return Window(
            recording=recording,
            seek=seek,
            size=size,
            prepared=prepared,
            prompt=prompt,
            probability=probability,
        )

    def keep(self, heard: Heard) -> Heard:
        """``heard`` with the pieces that say something, which the next window's prompt remembers."""
        session, options = self.session, self.session.options
        spoken = tuple(p for p in heard.pieces if p.start != p.end and session.text_of(p).strip())
        self._history.add([i for piece in spoken for i in piece.ids])
        if (
            not options.condition_on_previous_text
            or heard.attempt.temperature > options.prompt_reset_on_temperature
        ):
            self._history.forget()
        return replace(heard, pieces=spoken)

    async def words(self, window: Window, pieces: Sequence[Piece]) -> list[Piece]:
        """``pieces`` of ``window`` with their words."""
        return await self.session.words(
            pieces,
            window.prepared,
            window.prompt,
            window.size,
            offset=window.start,
            last_speech=self._last_speech,
        )

    def spoke_until(self, pieces: Sequence[Piece]) -> None:
        """Remember when the speech of ``pieces`` ended."""
        end = last_word_end(pieces)
        if end is not None:
            self._last_speech = end

    async def _timed(
        self, window: Window, pieces: Sequence[Piece], cut: Cut
    ) -> tuple[list[Piece] | None, int]:
        """The pieces with words, as far as they are believed (None: look at none), and where the next window starts."""
        timed, following = await self.words(window, pieces), window.seek + cut.advance
        end = last_word_end(timed)
        goes_on = not cut.ends_single and end is not None and end > window.start
        if goes_on and end is not None:
            following = round(end * FRAMES_PER_SECOND)
        threshold = self.session.options.hallucination_silence_threshold
        if threshold is not None:
            around = self._surroundings(window, threshold)
            if goes_on and end is not None and around.end - end <= threshold:
                following = window.seek + window.size
            verdict = judge(timed, around)
            if verdict.restart is not None:
                following = round(verdict.restart * FRAMES_PER_SECOND)
            if verdict.is_empty:
                return None, following
            if verdict.dropped is not None:
                position = round((verdict.dropped.end + threshold) * SAMPLE_RATE)
                length = await window.recording.length_up_to(position)
                if length < position:  # too little is left to look at
                    following = max(following, length // HOP)
            timed = list(verdict.kept)
        self.spoke_until(timed)
        return timed, following

    def _surroundings(self, window: Window, threshold: float) -> Surroundings:
        options = self.session.options
        return Surroundings(
            start=window.start,
            end=window.end,
            last_speech=self._last_speech,
            threshold=threshold,
            marks=options.prepend_punctuations + options.append_punctuations,
        )
