"""Where speech is: spans of a recording, found block by block, by energy or by a Silero model.

A detector of either kind gives a probability per frame; ``_Spans`` makes spans of them. What comes out does not depend
on how the recording is cut into blocks, and nothing is held but a few seconds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel.errors import InvalidRequestError, closest

__all__ = ["SAMPLE_RATE", "FrameModel", "Span", "SpeechDetector", "VadOptions", "speech_spans"]

SAMPLE_RATE = 16_000

Samples = NDArray[np.float32]
Span = tuple[int, int]  # samples, the end exclusive

_HYSTERESIS = 0.15  # speech goes on down to this far below the threshold
_CUTTABLE_MS = 98  # a pause this long is a place to cut speech that is too long


@dataclass(frozen=True, slots=True, kw_only=True)
class VadOptions:
    """What counts as speech. Names and defaults as users of faster-whisper know them.

    A frame is speech from probability ``threshold`` on, and speech goes on down to ``neg_threshold`` (None: 0.15 less).
    Spans are apart when ``min_silence_duration_ms`` lie between them, shorter ones than ``min_speech_duration_ms`` are
    dropped, longer ones than ``max_speech_duration_s`` cut, and each grows by ``speech_pad_ms`` on both sides.
    ``model_path``: Silero's 16 kHz weights (safetensors); None is the detector by energy.
    """

    threshold: float = 0.5
    neg_threshold: float | None = None
    min_speech_duration_ms: float = 0.0
    max_speech_duration_s: float = math.inf
    min_silence_duration_ms: float = 2000.0
    speech_pad_ms: float = 400.0
    model_path: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("threshold", "neg_threshold"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 < value < 1.0):
                raise InvalidRequestError(f"{name} is {value!r}; it must be a number above 0 and below 1")
        for name in ("min_speech_duration_ms", "min_silence_duration_ms", "speech_pad_ms"):
            value = getattr(self, name)
            if not (_is_number(value) and 0.0 <= value < math.inf):
                raise InvalidRequestError(
                    f"{name} is {value!r}; it must be a number of milliseconds, at least 0"
                )
        longest = self.max_speech_duration_s
        if not (_is_number(longest) and longest * 1000 > 2 * self.speech_pad_ms):
            raise InvalidRequestError(
                f"max_speech_duration_s is {longest!r}; it must be a number of seconds above twice the padding"
            )

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> VadOptions:
        """From names to values, None counting as not given; InvalidRequestError for an unknown name."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise InvalidRequestError(f"unknown VAD parameter {name!r}. {closest(str(name), known)}")
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def low_threshold(self) -> float:
        """Where speech ends."""
        return max(self.threshold - _HYSTERESIS, 0.01) if self.neg_threshold is None else self.neg_threshold


class FrameModel(ABC):
    """Gives a probability of speech for each frame of ``hop`` samples, in order."""

    hop: int

    @abstractmethod
    def push(self, samples: Samples) -> NDArray[np.float32]:
        """Probabilities of the frames that can be judged now; often none."""

    @abstractmethod
    def flush(self) -> NDArray[np.float32]:
        """Those of the remaining frames; the last one may be shorter than ``hop``."""


class SpeechDetector:
    """Finds the speech in one recording, which is pushed block by block (mono float32 at 16 kHz)."""

    def __init__(self, options: VadOptions | None = None) -> None:
        options = options or VadOptions()
        self._model = _model(options)
        self._spans = _Spans(options, self._model.hop)
        self._num_samples = 0

    @property
    def pending(self) -> int:
        """No span that is still to come begins before this sample."""
        return self._spans.pending

    def push(self, samples: Samples) -> list[Span]:
        """Spans that ended within what was pushed so far, in order, each once."""
        self._num_samples += len(samples)
        return self._spans.feed(self._model.push(samples))

    def flush(self) -> list[Span]:
        """The remaining spans. The recording is over."""
        return [*self._spans.feed(self._model.flush()), *self._spans.finish(self._num_samples)]


def speech_spans(
    recording: Samples | Iterable[Samples], options: VadOptions | None = None
) -> list[tuple[float, float]]:
    """(start, end) of every span of speech in seconds. ``recording``: samples [n] at 16 kHz, or blocks of them."""
    detector = SpeechDetector(options)
    blocks = [recording] if isinstance(recording, np.ndarray) else recording
    spans = [span for block in blocks for span in detector.push(block)]
    return [(start / SAMPLE_RATE, end / SAMPLE_RATE) for start, end in [*spans, *detector.flush()]]


def _model(options: VadOptions) -> FrameModel:
    if options.model_path is None:
        from kestrel_speech.energy import EnergyModel

        return EnergyModel()
    from kestrel_speech.silero import SileroModel

    return SileroModel(options.model_path)


class _Spans:
    """Makes spans of frame probabilities: hysteresis, shortest silence and speech, cuts, padding."""

    def __init__(self, options: VadOptions, hop: int) -> None:
        def samples(milliseconds: float) -> float:
            return milliseconds * SAMPLE_RATE / 1000

        self._options = options
        self._hop = hop
        self._at = 0
        self._start: int | None = None
        self._silence: int | None = None  # where the pause inside the open span began
        self._cut: Span | None = None  # the last pause at which the open span may be cut
        self._closed: Span | None = None  # padded in front; its end waits for what follows
        self._min_silence = samples(options.min_silence_duration_ms)
        self._min_speech = samples(options.min_speech_duration_ms)
        self._cuttable = min(samples(_CUTTABLE_MS), self._min_silence)
        self._pad = round(samples(options.speech_pad_ms))
        self._longest = options.max_speech_duration_s * SAMPLE_RATE - 2 * self._pad

    @property
    def pending(self) -> int:
        """Where the next span begins at the earliest."""
        if self._closed is not None:
            return self._closed[0]
        return max(0, (self._at if self._start is None else self._start) - self._pad)

    def feed(self, probabilities: NDArray[np.float32]) -> list[Span]:
        """Spans whose extent is certain now."""
        found: list[Span] = []
        for probability in probabilities.tolist():
            found += self._frame(probability)
        return found

    def finish(self, num_samples: int) -> list[Span]:
        """The rest, inside the recording's ``num_samples``."""
        found = [] if self._start is None else self._end(min(self._silence or num_samples, num_samples))
        if self._closed is not None:
            found.append((self._closed[0], min(num_samples, self._closed[1] + self._pad)))
        return found

    def _frame(self, probability: float) -> list[Span]:
        found: list[Span] = []
        if probability >= self._options.threshold:
            if self._start is None:
                self._start = self._at
            elif self._silence is not None and self._at - self._silence >= self._cuttable:
                self._cut = (self._silence, self._at)
            self._silence = None
        elif self._start is not None and probability < self._options.low_threshold:
            self._silence = self._at if self._silence is None else self._silence
        self._at += self._hop
        if self._start is not None:
            if self._silence is not None and self._at - self._silence >= max(self._min_silence, 1):
                found = self._end(self._silence)
            elif self._at - self._start >= self._longest:
                found = self._cut_open()
        elif self._closed is not None and self._at >= self._closed[1] + 2 * self._pad:
            found = [(self._closed[0], self._closed[1] + self._pad)]
            self._closed = None
        return found

    def _cut_open(self) -> list[Span]:
        """The open span is too long: it ends at its last pause, or here, and goes on behind."""
        end, begin = self._cut or (self._silence or self._at, self._at)
        silence = self._silence
        found = self._end(end)
        if silence is None or silence > begin:
            self._start, self._silence = begin, silence
        return found

    def _end(self, end: int) -> list[Span]:
        """Close the open span at ``end``; what was closed before it is certain now."""
        assert self._start is not None
        start = self._start
        self._start = self._silence = self._cut = None
        if end - start < max(self._min_speech, 1):
            return []
        if self._closed is None:
            self._closed = (max(0, start - self._pad), end)
            return []
        first, last = self._closed
        gap = start - last
        pads = (self._pad, self._pad) if gap >= 2 * self._pad else (gap // 2, gap - gap // 2)
        self._closed = (start - pads[1], end)
        return [(first, last + pads[0])]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
