"""One window: its prompt, its attempts down the ladder of temperatures, and what is thought of the result."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kestrel.config import Settings
from kestrel.errors import RequestCancelledError
from kestrel.skills import Ladder
from kestrel.spi import Completion, Decoding, Infer, Reader, Request, TextTokenizer
from kestrel.types import FinishReason, Media, Prepared, StreamChunk, Token, Tokens
from kestrel_speech.whisper.loops import LoopStop, without_loop
from kestrel_speech.whisper.tokens import SpecialIds

__all__ = ["NOTHING", "Attempt", "WindowDecoder", "WindowPrompt", "compression_ratio"]

Partial = Callable[[Sequence[int], int], list[StreamChunk]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPrompt:
    """What stands before a window's text. ``history``: ids of what was said before; ``prefix``: of how it begins."""

    task: str = "transcribe"
    language: str | None = None
    history: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    with_times: bool = True

    def ids(self, special: SpecialIds) -> tuple[int, ...]:
        """The prompt's ids."""
        opening = (
            *((special.start_of_previous, *self.history) if self.history else ()),
            *self.opening(special),
        )
        if not self.with_times:
            opening += (special.no_timestamps,)
        elif self.prefix:
            opening += (special.time_begin,)
        return opening + self.prefix

    def opening(self, special: SpecialIds) -> tuple[int, ...]:
        """The start of the transcript, its language and its task; English-only models have the first alone."""
        if not special.is_multilingual or self.language is None:
            return (special.sot,)
        task = special.translate if self.task == "translate" else special.transcribe
        return special.sot, special.languages[self.language], task

    def sot_at(self) -> int:
        """The position of the start of the transcript."""
        return 1 + len(self.history) if self.history else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A decoded window. ``ids`` without the end; ``avg_logprob`` counts it. ``is_loop``: it only repeated itself in
    the end, which was cut."""

    ids: tuple[int, ...]
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    is_loop: bool = False

    @property
    def scores(self) -> dict[str, float]:
        """As results show them."""
        return {
            "temperature": self.temperature,
            "avg_logprob": round(self.avg_logprob, 4),
            "compression_ratio": round(self.compression_ratio, 4),
            "no_speech_prob": round(self.no_speech_prob, 6),
        }

    def fails(self, ladder: Ladder) -> bool:
        """Another temperature is worth a try: the text repeats itself or is improbable, and this is no silence."""
        repeats = _exceeds(self.compression_ratio, ladder.compression_ratio_threshold)
        is_doubtful = self.is_loop or self._is_improbable(ladder)
        if is_doubtful and _exceeds(self.no_speech_prob, ladder.no_speech_threshold):
            return False
        return repeats or is_doubtful

    def is_silence(self, ladder: Ladder) -> bool:
        """Nothing was said: no speech is likely, and the text is not likely, or the same again and again. Of marks
        without a letter or digit one of the two is enough."""
        has_words = any(map(str.isalnum, self.text))
        if not _exceeds(self.no_speech_prob, ladder.no_speech_threshold):
            return not has_words and self._is_improbable(ladder)
        if self.is_loop or ladder.logprob_threshold is None or not has_words:
            return True
        return not self.avg_logprob > ladder.logprob_threshold

    def _is_improbable(self, ladder: Ladder) -> bool:
        return ladder.logprob_threshold is not None and self.avg_logprob < ladder.logprob_threshold


# What stands for a window without any sound, which is not decoded.
NOTHING = Attempt(
    ids=(), text="", temperature=0.0, avg_logprob=0.0, compression_ratio=0.0, no_speech_prob=1.0
)


def _exceeds(value: float, threshold: float | None) -> bool:
    return threshold is not None and value > threshold


def compression_ratio(text: str) -> float:
    """Bytes of ``text`` per byte of it compressed; repetition makes it large."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDecoder:
    """Decodes windows of one call. ``settings``: the call's."""

    infer: Infer
    special: SpecialIds
    tokenizer: TextTokenizer
    ladder: Ladder
    settings: Settings

    async def decode(
        self,
        window: Prepared,
        prompt: WindowPrompt,
        decoding: Decoding,
        partial: Partial | None = None,
        *,
        attempts: int | None = None,
    ) -> Attempt:
        """The first attempt that does not fail, else the last. ``partial`` makes chunks of ids so far (and the number
        of the attempt). Raises RequestCancelledError when the caller gives up."""
        made: Attempt | None = None
        no_speech = 0.0
        for number, temperature in enumerate(self.ladder.temperatures[:attempts]):
            request = self._request(window, prompt, decoding, number)
            if partial is not None and request.settings.n == 1:
                request = replace(request, reader=_reader(partial, number))
            outputs = await self.infer(request)
            if any(output.finish_reason == "cancelled" for output in outputs):
                raise RequestCancelledError("the transcription was cancelled")
            if made is None:
                no_speech = _probability(outputs[0])
            made = max(
                (self._attempt(output, temperature, no_speech) for output in outputs),
                key=lambda attempt: (not attempt.is_loop, attempt.avg_logprob),
            )
            if not made.fails(self.ladder):
                break
        assert made is not None, "a ladder has at least one temperature"
        return made

    def _request(
        self,
        window: Prepared,
        prompt: WindowPrompt,
        decoding: Decoding,
        number: int,
    ) -> Request:
        temperature = self.ladder.temperatures[number]
        settings = self.settings.with_(
            temperature=temperature,
            n=self.ladder.best_of if temperature > 0 else 1,
            seed=_seed_of(self.settings.seed, window, number),
            logprobs=True,
            extra={},
        )
        if self.ladder.compression_ratio_threshold is not None:  # repetition is looked at
            decoding = replace(decoding, acceptors=(lambda: LoopStop(self._is_text),))
        probe = (prompt.sot_at(), (self.special.no_speech,))
        return Request(
            segments=(Media(window), Tokens(prompt.ids(self.special))),
            decoding=decoding,
            settings=settings,
            probes=() if number else (probe,),
        )

    def _attempt(self, output: Completion, temperature: float, no_speech_prob: float) -> Attempt:
        ids = tuple(token.id for token in output.tokens)
        if ids and ids[-1] == self.special.eot:
            ids = ids[:-1]
        count = len(ids) + 1
        total = sum(token.logprobs.logprob for token in output.tokens if token.logprobs is not None)
        cut = None
        if self.ladder.compression_ratio_threshold is not None:
            cut = without_loop(ids, self._is_text)
            ids = ids if cut is None else cut
        text = self.tokenizer.decode(self.special.text_of(ids)).strip()
        return Attempt(
            ids=ids,
            text=text,
            temperature=temperature,
            avg_logprob=total / count,
            compression_ratio=compression_ratio(text),
            no_speech_prob=no_speech_prob,
            is_loop=cut is not None,
        )

    def _is_text(self, token_id: int) -> bool:
        return token_id < self.special.eot


def _seed_of(seed: int | None, window: Prepared, number: int) -> int | None:
    """The seed of attempt ``number`` at ``window``: each draws for itself, whatever else is under way."""
    if seed is None:
        return None
    mixed = hashlib.sha256(f"{seed} {number} ".encode() + window.digest).digest()
    return int.from_bytes(mixed[:8], "big") >> 1


def _probability(output: Completion) -> float:
    """What the probe said, as a probability."""
    return math.exp(output.probes[0][0]) if output.probes else 0.0


@dataclass(slots=True)
class _PartialReader(Reader):
    """Shows a window's ids as they come."""

    partial: Partial
    number: int
    ids: list[int] = field(default_factory=list)

    def feed(self, token: Token) -> list[StreamChunk]:
        self.ids.append(token.id)
        return self.partial(self.ids, self.number)

    def finish(self, finish_reason: FinishReason) -> tuple[list[StreamChunk], dict[str, object]]:
        return [], {}


def _reader(partial: Partial, number: int) -> Callable[[], Reader]:
    return lambda: _PartialReader(partial, number)
