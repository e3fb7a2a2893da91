"""What Whisper says about ``transcribe``: one window's prompt and rules, defaults, and the composition of windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrel.errors import InvalidRequestError, closest
from kestrel.media import MediaLimits
from kestrel.skills import TranscribeOptions, options_of
from kestrel.spi import Call, Composition, Decoding, PromptFormat, TextTokenizer
from kestrel.types import Media, Segment, Text, Tokens
from kestrel_speech.vad import VadOptions
from kestrel_speech.whisper.config import WhisperConfig
from kestrel_speech.whisper.defaults import DEFAULTS
from kestrel_speech.whisper.languages import language_code
from kestrel_speech.whisper.rules import WindowRules, rule_options
from kestrel_speech.whisper.session import Model
from kestrel_speech.whisper.tokens import SpecialIds
from kestrel_speech.whisper.transcribe import transcribe
from kestrel_speech.whisper.window import WindowPrompt

__all__ = ["WhisperPrompt"]

SKILL = "transcribe"


class WhisperPrompt(PromptFormat):
    """Prompts of one loaded checkpoint."""

    skills = frozenset({SKILL})

    def __init__(
        self, config: WhisperConfig, special: SpecialIds, tokenizer: TextTokenizer, limits: MediaLimits
    ) -> None:
        self._special = special
        self._rules = WindowRules(special)
        self._model = Model(
            config=config, special=special, rules=self._rules, tokenizer=tokenizer, limits=limits
        )

    def segments(self, skill: str, call: Call) -> list[Segment]:
        """The first window's prompt, the caller's text before it."""
        self.require(skill)
        options, special = options_of(call), self._special
        before: list[Segment] = []
        if options.initial_prompt:
            before = [Tokens((special.start_of_previous,)), Text(" " + options.initial_prompt)]
        prompt = WindowPrompt(task=options.task, language=self._language(options), with_times=True)
        windows: list[Segment] = [Media(item) for item in call.of_kind("audio")]
        return [*windows, *before, Tokens(prompt.ids(special))]

    def decoding(self, skill: str, call: Call) -> Decoding:
        self.require(skill)
        return self._rules.window(with_times=True, **rule_options(options_of(call)))

    def defaults(self, skill: str) -> Mapping[str, Any]:
        return DEFAULTS

    def validate(self, skill: str, call: Call) -> None:
        self.require(skill)
        options = options_of(call)
        if options.timestamps == "character":
            raise InvalidRequestError(
                "Whisper gives no times of characters; ask for timestamps 'word' or 'segment'"
            )
        VadOptions.from_mapping(options.vad_parameters)
        if not self._special.is_multilingual:
            _refuse_other_languages(options)
        elif options.language is not None:
            code = language_code(options.language)
            if code not in self._special.languages:
                raise InvalidRequestError(
                    f"this model does not know the language {code!r}. {closest(code, self._special.languages)}"
                )
        if options.suppress_tokens and max(options.suppress_tokens) >= self._special.vocab_size:
            raise InvalidRequestError(
                f"suppress_tokens holds {max(options.suppress_tokens)}; this model's ids go from 0 to "
                f"{self._special.vocab_size - 1}"
            )

    def run(self, skill: str) -> Composition | None:
        return lambda call, infer: transcribe(call, infer, self._model)

    def _language(self, options: TranscribeOptions) -> str | None:
        if not self._special.is_multilingual:
            return None
        return language_code(options.language) if options.language else next(iter(self._special.languages))


def _refuse_other_languages(options: TranscribeOptions) -> None:
    if options.language is not None and language_code(options.language) != "en":
        raise InvalidRequestError(
            f"language is {options.language!r}, and this is an English-only model. Leave it out, or load a "
            "multilingual model"
        )
    if options.task == "translate":
        raise InvalidRequestError("an English-only model translates nothing; load a multilingual model")
