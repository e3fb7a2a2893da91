"""Long files window by window, each beginning where the one before got to: OpenAI's rules.

Positions are mel frames of the recording (a clip, or the speech of one); times are seconds of it.
"""

from __future__ import annotations

from dataclasses import replace

from kestrel.types import Prepared
from kestrel_speech.recording import SAMPLE_RATE, Recording
from kestrel_speech.whisper.features import FRAMES_PER_SECOND, HOP
from kestrel_speech.whisper.guard import Surroundings, judge, last_word_end
from kestrel_speech.whisper.history import History
from kestrel_speech.whisper.segments import Cut, Piece, cut_window
from kestrel_speech.whisper.session import Session
from kestrel_speech.whisper.window import Attempt, WindowPrompt

__all__ = ["Sequential"]


class Sequential:
    """Goes through recordings, one after the other, with one history."""

    def __init__(self, session: Session, *, with_times: bool = True) -> None:
        self._session = session
        options, model = session.options, session.model
        self._with_times = with_times
        self._history = History.of(options, model)
        prefix = model.tokenizer.encode(" " + options.prefix) if options.prefix else []
        self._prefix = tuple(prefix[: model.config.text_context // 2 - 1])
        self._last_speech = 0.0
        self._tail = ""  # said, and not settled

    async def run(self, recording: Recording) -> None:
        """Every window of ``recording``."""
        seek = 0
        self._last_speech = 0.0
        while size := await self._size(recording, seek):
            seek = await self._window(recording, seek, size)
            recording.forget(seek * HOP)
            self._show(recording, seek)

    async def _size(self, recording: Recording, seek: int) -> int:
        """Frames of the window at ``seek``: a full one, or what is left."""
        start, full = seek * HOP, self._session.model.config.num_frames * HOP
        return max(0, await recording.length_up_to(start + full) - start) // HOP

    async def _window(self, recording: Recording, seek: int, size: int) -> int:
        """Decode the window at ``seek``; where the next one starts."""
        session = self._session
        window = await session.prepare(await recording.read(seek * HOP, size * HOP))
        language, probability = await self._language(window)
        prompt = WindowPrompt(
            task=session.options.task,
            language=language,
            history=self._history.ids(),
            prefix=self._prefix if seek == 0 else (),
            with_times=self._with_times,
        )
        attempt = await session.decode(window, prompt, shows=True)
        session.note(attempt)
        if attempt.is_silence(session.ladder):
            return seek + size
        start = seek / FRAMES_PER_SECOND
        ids = (session.model.special.time_begin, *attempt.ids) if prompt.prefix else attempt.ids
        cut = cut_window(ids, session.model.special, size, with_times=self._with_times)
        pieces = [replace(p, start=p.start + start, end=p.end + start) for p in cut.pieces]
        following = seek + cut.advance
        if session.options.with_words:
            believed, following = await self._timed(recording, window, prompt, pieces, cut, seek, size)
            if believed is None:
                return max(following, seek + 1)
            pieces = believed
        self._keep(pieces, attempt, recording, start + size / FRAMES_PER_SECOND, language, probability)
        return following if following > seek else seek + size

    async def _language(self, window: Prepared) -> tuple[str, float | None]:
        """The language, if it is settled; else that of ``window``."""
        session = self._session
        if session.language is not None:
            return session.language, session.language_probability
        return await session.detect(window)

    def _keep(
        self,
        pieces: list[Piece],
        attempt: Attempt,
        recording: Recording,
        until: float,
        language: str,
        probability: float | None,
    ) -> None:
        """Add the pieces that say something, and remember them for the next window."""
        session = self._session
        spoken = [p for p in pieces if p.start != p.end and session.text_of(p).strip()]
        if spoken:
            session.language, session.language_probability = language, probability
        session.add(spoken, attempt, recording, until)
        self._history.add([i for piece in spoken for i in piece.ids])
        options = session.options
        if (
            not options.condition_on_previous_text
            or attempt.temperature > options.prompt_reset_on_temperature
        ):
            self._history.forget()

    async def _timed(
        self,
        recording: Recording,
        window: Prepared,
        prompt: WindowPrompt,
        pieces: list[Piece],
        cut: Cut,
        seek: int,
        size: int,
    ) -> tuple[list[Piece] | None, int]:
        """The pieces with words, as far as they are believed (None: look at none), and where the next window starts."""
        session = self._session
        start, following = seek / FRAMES_PER_SECOND, seek + cut.advance
        pieces = await session.words(
            pieces, window, prompt, size, offset=start, last_speech=self._last_speech
        )
        end = last_word_end(pieces)
        goes_on = not cut.ends_single and end is not None and end > start
        if goes_on and end is not None:
            following = round(end * FRAMES_PER_SECOND)
        threshold = session.options.hallucination_silence_threshold
        if threshold is not None:
            around = self._surroundings(start, size, threshold)
            if goes_on and end is not None and around.window_end - end <= threshold:
                following = seek + size
            verdict = judge(pieces, around)
            if verdict.restart is not None:
                following = round(verdict.restart * FRAMES_PER_SECOND)
            if verdict.is_empty:
                return None, following
            if verdict.dropped is not None:
                position = round((verdict.dropped.end + threshold) * SAMPLE_RATE)
                length = await recording.length_up_to(position)
                if length < position:  # too little is left to look at
                    following = max(following, length // HOP)
            pieces = list(verdict.kept)
        end = last_word_end(pieces)
        if end is not None:
            self._last_speech = end
        return pieces, following

    def _surroundings(self, start: float, size: int, threshold: float) -> Surroundings:
        options = self._session.options
        return Surroundings(
            start=start,
            sound_end=start + size / FRAMES_PER_SECOND,
            window_end=start + self._session.model.config.num_frames / FRAMES_PER_SECOND,
            last_speech=self._last_speech,
            threshold=threshold,
            marks=options.prepend_punctuations + options.append_punctuations,
        )

    def _show(self, recording: Recording, seek: int) -> None:
        session = self._session
        session.progress.completed = recording.seconds_at(seek * HOP)
        session.progress.attempt = 0
        session.show(self._tail)
        self._tail = ""
