"""One transcription: what was asked, what was found so far, and the steps that every way through a file shares."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kestrel.media import MediaLimits
from kestrel.skills import SpokenSegment, SpokenWord, Transcript, ladder_of, options_of
from kestrel.spi import AudioItem, Call, Infer, TextTokenizer
from kestrel.types import ChunkKind, Prepared, StreamChunk
from kestrel_speech.recording import SAMPLE_RATE, Recording, Samples
from kestrel_speech.whisper.config import WhisperConfig
from kestrel_speech.whisper.features import HOP
from kestrel_speech.whisper.language import detect_language
from kestrel_speech.whisper.languages import language_code
from kestrel_speech.whisper.rules import WindowRules, rule_options
from kestrel_speech.whisper.segments import Piece
from kestrel_speech.whisper.tokens import SpecialIds
from kestrel_speech.whisper.window import Attempt, WindowDecoder, WindowPrompt
from kestrel_speech.whisper.words import Marks, time_words, with_words

__all__ = ["Heard", "Model", "Session"]

SHOW_EVERY_S = 0.1  # snapshots of a window in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded checkpoint, as transcriptions use it."""

    config: WhisperConfig
    special: SpecialIds
    rules: WindowRules
    tokenizer: TextTokenizer
    limits: MediaLimits


@dataclass(slots=True)
class _Scores:
    """Scores of windows, taken together: the highest temperature and ratio, means of the others by length."""

    temperature: float = 0.0
    ratio: float = 0.0
    no_speech: float = 0.0
    logprob: float = 0.0
    tokens: int = 0
    windows: int = 0

    def add(self, attempt: Attempt) -> None:
        count = len(attempt.ids) + 1
        self.temperature = max(self.temperature, attempt.temperature)
        self.ratio = max(self.ratio, attempt.compression_ratio)
        self.no_speech += attempt.no_speech_prob
        self.logprob += attempt.avg_logprob * count
        self.tokens += count
        self.windows += 1

    def as_output(self) -> Mapping[str, float]:
        if not self.windows:
            return {}
        return {
            "temperature": self.temperature,
            "avg_logprob": round(self.logprob / self.tokens, 4),
            "compression_ratio": round(self.ratio, 4),
            "no_speech_prob": round(self.no_speech / self.windows, 6),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one window gave: ``pieces`` that say something, their times in seconds of ``recording``, where the window's
    sound ends ``until``."""

    recording: Recording
    attempt: Attempt
    language: str | None
    probability: float | None
    until: float
    pieces: tuple[Piece, ...] = ()


@dataclass(slots=True)
class Progress:
    """How far a transcription got, in seconds of the whole file; ``total`` None while it is not known."""

    completed: float = 0.0
    total: float | None = None
    is_long: bool = False
    attempt: int = 0


class Session:
    """One call of ``transcribe``. Segments are added in the order of their times."""

    def __init__(self, call: Call, infer: Infer, model: Model) -> None:
        self.infer, self.model = infer, model
        self.options, self.ladder = options_of(call), ladder_of(call.settings)
        self.settings = call.settings
        self.decoder = WindowDecoder(
            infer=infer,
            special=model.special,
            tokenizer=model.tokenizer,
            ladder=self.ladder,
            settings=call.settings,
        )
        self.progress = Progress()
        self.segments: list[SpokenSegment] = []
        self.language = self._given_language()  # None until a window with speech has settled it
        self.language_probability: float | None = None
        self.source_duration: float | None = None
        self.ids: list[int] = []
        self._scores = _Scores()
        self._shown_at = 0.0
        self._clip = (
            (0.0, None) if not self.options.clips else (self.options.clips[0][0], self.options.clips[-1][1])
        )

    def _given_language(self) -> str | None:
        if not self.model.special.is_multilingual:
            return "en"
        return None if self.options.language is None else language_code(self.options.language)

    # -- steps

    async def prepare(self, samples: Samples) -> Prepared:
        """The features of a window."""
        return await self.infer.prepare(AudioItem(samples=samples, sample_rate=SAMPLE_RATE))

    async def listen(self, window: Prepared, recording: Recording, seek: int) -> tuple[str, float | None]:
        """The language of ``window``, which is at frame ``seek``: the settled one, else what it sounds like.

        With ``language_detection_segments`` above 1 several windows vote, and their choice is settled at once.
        """
        if self.language is not None:
            return self.language, self.language_probability
        found = await self._detect(window)
        if self.options.language_detection_segments > 1:
            found = await self._vote(recording, seek, *found)
            self.language, self.language_probability = found
        return found

    async def _detect(self, window: Prepared) -> tuple[str, float]:
        model = self.model
        return await detect_language(window, self.infer, model.special, model.rules.language, self.settings)

    async def _vote(
        self, recording: Recording, seek: int, code: str, probability: float
    ) -> tuple[str, float]:
        """The language of the first clear window, else the one that most of them seem to be in."""
        votes = {code: [probability]}
        samples = self.model.config.num_frames * HOP
        for ahead in range(1, self.options.language_detection_segments):
            if probability > self.options.language_detection_threshold:
                break
            part = await recording.read(seek * HOP + ahead * samples, samples)
            if len(part) < HOP:
                break
            code, probability = await self._detect(await self.prepare(part))
            votes.setdefault(code, []).append(probability)
        if probability > self.options.language_detection_threshold:
            return code, probability
        code = max(votes, key=lambda code: (len(votes[code]), sum(votes[code])))
        return code, max(votes[code])

    async def decode(
        self, window: Prepared, prompt: WindowPrompt, *, shows: bool = False, attempts: int | None = None
    ) -> Attempt:
        """The text of ``window``; ``shows``: as it comes. ``attempts``: how far down the ladder it may go."""
        rules = self.model.rules.window(
            with_times=prompt.with_times, goes_on=bool(prompt.prefix), **rule_options(self.options)
        )
        partial = self._partial if shows and self.infer.is_watched else None
        return await self.decoder.decode(window, prompt, rules, partial, attempts=attempts)

    async def words(
        self,
        pieces: Sequence[Piece],
        window: Prepared,
        prompt: WindowPrompt,
        num_frames: int,
        *,
        offset: float,
        last_speech: float,
    ) -> list[Piece]:
        """``pieces`` (from ``offset`` on) with their words."""
        special, options = self.model.special, self.options
        room = self.model.config.text_context - len(prompt.opening(special)) - 2
        text = tuple(i for piece in pieces for i in special.text_of(piece.ids))[:room]
        if not text:
            return list(pieces)
        given = {"opening": prompt.opening(special), "text": text, "num_frames": num_frames}
        (alignment,) = await self.infer.run_pass("align", [given], [window])
        language = "en" if options.task == "translate" else prompt.language or "en"
        timed = await self.infer.cpu(lambda: time_words(text, alignment, self.model.tokenizer, language))
        marks = Marks(options.prepend_punctuations, options.append_punctuations)
        return with_words(pieces, timed, special, marks, offset=offset, last_speech=last_speech)

    # -- results

    def text_of(self, piece: Piece) -> str:
        """The text of a piece, with the space before it."""
        return self.model.tokenizer.decode(self.model.special.text_of(piece.ids))

    def accept(self, heard: Heard) -> None:
        """Add what a window gave; its language is settled by the first that says something."""
        self._scores.add(heard.attempt)
        self.ids += heard.attempt.ids
        if not heard.pieces:
            return
        if self.language is None:
            self.language, self.language_probability = heard.language, heard.probability

        def at(seconds: float, *, is_end: bool = False) -> float:
            position = min(seconds, heard.until) * SAMPLE_RATE
            return heard.recording.seconds_at(position, is_end=is_end or seconds >= heard.until)

        for piece in heard.pieces:
            words = None
            if self.options.timestamps == "word":
                words = tuple(
                    SpokenWord(
                        word=w.word, start=at(w.start), end=at(w.end, is_end=True), probability=w.probability
                    )
                    for w in piece.words or ()
                )
            self.segments.append(
                SpokenSegment(
                    text=self.text_of(piece),
                    start=at(piece.start),
                    end=at(piece.end, is_end=True),
                    words=words,
                    scores=heard.attempt.scores,
                )
            )

    def transcript(self, tail: str = "") -> Transcript:
        """What was found so far; ``tail`` is still being decoded."""
        start, end = self._clip
        duration = self.source_duration
        if duration is not None:
            end = duration if end is None else min(end, duration)
        has_speech = bool(self.segments or tail)
        return Transcript(
            segments=tuple(self.segments),
            language=self.language if has_speech or self._given_language() else None,
            language_probability=self.language_probability if has_speech else None,
            task=self.options.task,
            clip_start=start,
            clip_end=end,
            source_duration=duration,
            scores=self._scores.as_output(),
            tail=tail,
            with_segments=self.options.timestamps != "none",
        )

    # -- progress

    def reached(self, seconds: float, tail: str = "") -> None:
        """Everything before ``seconds`` of the file is done; show it, and the ``tail`` behind that is not settled."""
        self.progress.completed = seconds
        self.progress.attempt = 0
        if self.infer.is_watched:
            self.infer.emit(self._snapshot(tail))

    def _snapshot(self, tail: str) -> StreamChunk:
        value = {**self.transcript(tail).as_output(), "provisional": True}
        progress = self.progress
        if progress.is_long:
            total = progress.total if progress.total is None else round(progress.total, 3)
            value |= {"completed_seconds": round(progress.completed, 3), "total_seconds": total}
        else:
            value |= {"attempt": progress.attempt + 1, "retrying": progress.attempt > 0}
        return StreamChunk(ChunkKind.SNAPSHOT, value=value)

    def _partial(self, ids: Sequence[int], attempt: int) -> list[StreamChunk]:
        self.progress.attempt = attempt
        now = time.monotonic()
        if now - self._shown_at < SHOW_EVERY_S:
            return []
        self._shown_at = now
        tail = self.model.tokenizer.decode(self.model.special.text_of(ids))
        return [self._snapshot(tail.rstrip("\ufffd"))]
