"""Options of transcribe, checked; other engines' spellings mean the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kestrel.checks import is_finite
from kestrel.errors import InvalidRequestError, closest, shown
from kestrel.skills.clips import Clip, clips_of
from kestrel.skills.inputs import flag, is_list, plain_text

__all__ = ["OPTION_NAMES", "TASKS", "TIMESTAMPS", "TranscribeOptions"]

TASKS = ("transcribe", "translate")
TIMESTAMPS = ("none", "segment", "word", "character")
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"
MAX_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeOptions:
    """What a caller may ask of a transcription. Times in seconds of the whole file.

    ``language``: a code, or None to detect it. ``clips``: the parts to transcribe, in order; none: all of it.
    ``hotwords``, ``initial_prompt``: context for the first window, the latter for all with ``carry_initial_prompt``.
    ``prefix``: text that the first window is known to begin with. ``suppress_tokens`` None: the model's own list.
    ``batch_size`` above 1: speech segments side by side, each without the text before it. ``vad_parameters``: of the
    detector of speech, which ``vad_filter`` turns on.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: str = "segment"
    initial_prompt: str | None = None
    carry_initial_prompt: bool = False
    hotwords: str | None = None
    prefix: str | None = None
    condition_on_previous_text: bool = True
    prompt_reset_on_temperature: float = 0.5
    clips: tuple[Clip, ...] = ()
    vad_filter: bool | None = None
    vad_parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    batch_size: int = 1
    without_timestamps: bool | None = None
    hallucination_silence_threshold: float | None = None
    suppress_blank: bool = True
    suppress_tokens: tuple[int, ...] | None = None
    max_initial_timestamp: float = 1.0
    prepend_punctuations: str = PREPENDED
    append_punctuations: str = APPENDED
    language_detection_threshold: float = 0.5
    language_detection_segments: int = 1

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TranscribeOptions:
        """From inputs by name, None counting as not given. InvalidRequestError for a value that cannot be."""
        values = {name: value for name, value in given.items() if value is not None}
        found: dict[str, Any] = {"clips": clips_of(values)}
        if flag("word_timestamps", values.pop("word_timestamps", None)):
            values["timestamps"] = "word"
        for name, value in values.items():
            found[name] = _CHECKS[name](name, value)
        return cls(**found)

    @property
    def with_words(self) -> bool:
        """Word times are needed: asked for, or by the guard against invented text."""
        return self.timestamps == "word" or self.hallucination_silence_threshold is not None


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise InvalidRequestError(f"{name} is {shown(value)}. {closest(shown(value), choices)}")
        return str(value)

    return check


def _number(low: float, high: float = math.inf) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        is_number = is_finite(value)
        if not is_number or not low <= value <= high:
            bound = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
            raise InvalidRequestError(f"{name} is {shown(value)}; it must be a number {bound}")
        return float(value)

    return check


def _whole(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequestError(
                f"{name} is {shown(value)}; it must be a whole number from {low} to {high}"
            )
        return value

    return check


def _text(name: str, value: Any) -> str | None:
    return plain_text(name, value).strip() or None


def _ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Token ids as a list or as "1,2,3"; −1 alone is the model's own list."""
    parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    try:
        ids = tuple(int(part) for part in parts) if is_list(parts) else None
    except (TypeError, ValueError):
        ids = None
    if ids is None or any(i < -1 for i in ids) or (-1 in ids and len(ids) > 1):
        raise InvalidRequestError(
            f"{name} is {shown(value)}; give a list of token ids, or [-1] for the model's own"
        )
    return None if ids == (-1,) else ids


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} is a {type(value).__name__}; give a mapping of names to values")
    return MappingProxyType(dict(value))


def _language(name: str, value: Any) -> str | None:
    language = _text(name, value)
    return None if language is not None and language.lower() == "auto" else language


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "language": _language,
    "task": _choice(*TASKS),
    "timestamps": _choice(*TIMESTAMPS),
    "initial_prompt": _text,
    "carry_initial_prompt": flag,
    "hotwords": _text,
    "prefix": _text,
    "condition_on_previous_text": flag,
    "prompt_reset_on_temperature": _number(0, 1),
    "vad_filter": flag,
    "vad_parameters": _mapping,
    "batch_size": _whole(1, MAX_BATCH),
    "without_timestamps": flag,
    "hallucination_silence_threshold": _number(0),
    "suppress_blank": flag,
    "suppress_tokens": _ids,
    "max_initial_timestamp": _number(0, 30),
    "prepend_punctuations": plain_text,
    "append_punctuations": plain_text,
    "language_detection_threshold": _number(0, 1),
    "language_detection_segments": _whole(1, 64),
}
OPTION_NAMES = (
    *_CHECKS, "word_timestamps", "clip_start_seconds", "clip_end_seconds", "clip_timestamps"
)  # fmt: skip
