"""Control ids of a Whisper tokenizer, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kestrel.errors import LoadError
from kestrel.spi import TextTokenizer
from kestrel_speech.whisper.config import GenerationConfig, WhisperConfig
from kestrel_speech.whisper.languages import LANGUAGES
from kestrel_speech.whisper.suppressed import non_speech

__all__ = ["SpecialIds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """``time_begin`` is 0.00 s; the ids from there to ``vocab_size`` are times in steps of 0.02 s.

    ``non_speech``: ids never to be sampled unless a caller says otherwise; ``blanks``: not as the first id.
    """

    vocab_size: int
    eot: int
    sot: int
    translate: int
    transcribe: int
    start_of_lm: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    is_multilingual: bool
    languages: Mapping[str, int]
    non_speech: tuple[int, ...]
    blanks: tuple[int, ...]

    @property
    def time_begin(self) -> int:
        """The id of 0.00 s."""
        return self.no_timestamps + 1

    @property
    def num_times(self) -> int:
        """How many ids are times."""
        return self.vocab_size - self.time_begin

    @property
    def control(self) -> tuple[int, ...]:
        """Ids that are never sampled: what opens a prompt."""
        return (
            self.sot, self.translate, self.transcribe, self.start_of_lm, self.start_of_previous, self.no_speech
        )  # fmt: skip

    def is_time(self, token_id: int) -> bool:
        """Whether ``token_id`` is a time."""
        return token_id >= self.time_begin

    def text_of(self, ids: Sequence[int]) -> list[int]:
        """The ids of text among ``ids``."""
        return [i for i in ids if i < self.eot]

    @classmethod
    def of(cls, tokenizer: TextTokenizer, config: WhisperConfig, generation: GenerationConfig) -> SpecialIds:
        """The ids of ``tokenizer``. LoadError when it is no Whisper tokenizer, or another model's."""
        no_timestamps = _id(tokenizer, "notimestamps")
        languages = {code: i for code in LANGUAGES if (i := tokenizer.token_id(f"<|{code}|>")) is not None}
        found = cls(
            vocab_size=config.vocab_size,
            eot=_id(tokenizer, "endoftext"),
            sot=_id(tokenizer, "startoftranscript"),
            translate=_id(tokenizer, "translate"),
            transcribe=_id(tokenizer, "transcribe"),
            start_of_lm=_id(tokenizer, "startoflm"),
            start_of_previous=_id(tokenizer, "startofprev"),
            no_speech=_id(tokenizer, "nospeech", "nocaptions"),  # older tokenizers have the second name
            no_timestamps=no_timestamps,
            is_multilingual=generation.is_multilingual,
            languages=dict(generation.languages) or languages,
            non_speech=non_speech(generation),
            blanks=_blanks(tokenizer, generation),
        )
        if found.num_times < 2:
            raise LoadError(
                f"the tokenizer's times begin at {found.time_begin} and the model has {config.vocab_size} ids. Give "
                "the tokenizer that the model was trained with as tokenizer_path."
            )
        return found


def _id(tokenizer: TextTokenizer, *names: str) -> int:
    for name in names:
        found = tokenizer.token_id(f"<|{name}|>")
        if found is not None:
            return found
    raise LoadError(
        f"the tokenizer has no <|{names[0]}|>, so it is not Whisper's. Put the model's tokenizer.json beside the "
        "weights, or set tokenizer_path."
    )


def _blanks(tokenizer: TextTokenizer, generation: GenerationConfig) -> tuple[int, ...]:
    if generation.begin_suppress is not None:
        return generation.begin_suppress
    return (*tokenizer.encode(" "), _id(tokenizer, "endoftext"))
