"""What was said and when: the values that families fill and the result that users see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["SpokenSegment", "SpokenWord", "Transcript"]

DIGITS = 3  # of times, in results: milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenWord:
    """A word with the space before it, its times in seconds of the whole file, and how sure the model is of it."""

    word: str
    start: float
    end: float
    probability: float | None = None

    def as_output(self) -> dict[str, Any]:
        """As results show it."""
        found: dict[str, Any] = {"word": self.word, "start": _time(self.start), "end": _time(self.end)}
        if self.probability is not None:
            found["probability"] = round(self.probability, 4)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenSegment:
    """A stretch of speech. ``words`` None: not asked for. ``scores``: what the family adds, by name."""

    text: str
    start: float
    end: float
    words: tuple[SpokenWord, ...] | None = None
    scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    _output: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def as_output(self) -> dict[str, Any]:
        """As results show it. Always the same object: the snapshots of an hour would hold millions of words else."""
        if not self._output:
            self._output.update(text=self.text, start=_time(self.start), end=_time(self.end))
            if self.words is not None:
                self._output["words"] = [word.as_output() for word in self.words]
            self._output.update(self.scores)
        return self._output


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A transcription, whole or so far. ``clip_end`` and ``source_duration`` may be None while they are not known.

    ``tail``: text behind the segments that is still being decoded. ``with_segments`` False: text alone.
    """

    segments: tuple[SpokenSegment, ...]
    language: str | None
    task: str
    clip_start: float
    clip_end: float | None
    source_duration: float | None
    language_probability: float | None = None
    scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    tail: str = ""
    with_segments: bool = True

    def as_output(self) -> dict[str, Any]:
        """The result of transcribe."""
        text = "".join(segment.text for segment in self.segments) + self.tail
        duration = None if self.clip_end is None else max(0.0, self.clip_end - self.clip_start)
        found: dict[str, Any] = {
            "text": text.strip(),
            "language": self.language,
            "task": self.task,
            "duration_seconds": _time(duration),
            "source_duration_seconds": _time(self.source_duration),
            "clip_start_seconds": _time(self.clip_start),
            "clip_end_seconds": _time(self.clip_end),
            "segments": _outputs(self.segments) if self.with_segments else [],
        }
        if self.language_probability is not None:
            found["language_probability"] = round(self.language_probability, 4)
        return {**found, **self.scores}


def _outputs(segments: Iterable[SpokenSegment]) -> list[dict[str, Any]]:
    return [segment.as_output() for segment in segments]


def _time(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, DIGITS)
