"""The guard against invented text: segments whose words look wrong and that silence surrounds are not believed.

Times are seconds on the clock of the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kestrel.skills import SpokenWord
from kestrel_speech.whisper.segments import Piece

__all__ = ["Surroundings", "Verdict", "last_word_end", "judge"]

UNLIKELY = 0.15  # a probability
SHORT_S, SHORT_WEIGHT, LONG_S = 0.133, 15.0, 2.0
WORDS_SEEN = 8
ANOMALY = 3.0
EDGE_S = 2.0  # silence is assumed this close to an edge of the window
LEAST_STEP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """A window: where it starts and where its sound ends; when the speech before it ended."""

    start: float
    end: float
    last_speech: float
    threshold: float
    marks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is believed. ``restart``: where the next window starts instead (None: where it would); ``dropped``: the
    first piece that is not believed, its followers neither; ``is_empty``: the whole window is decoded again."""

    kept: tuple[Piece, ...]
    restart: float | None = None
    dropped: Piece | None = None
    is_empty: bool = False


def judge(pieces: Sequence[Piece], around: Surroundings) -> Verdict:
    """What of ``pieces`` (with words) to believe."""
    spoken = [piece for piece in pieces if piece.words]
    if spoken and _is_anomalous(spoken[0], around.marks):
        gap = spoken[0].start - around.start
        if gap > around.threshold:  # silence comes first: look again where the sound begins
            return Verdict(kept=(), restart=around.start + gap, is_empty=True)
    last_end = around.last_speech
    for at, piece in enumerate(pieces):
        if not piece.words:
            continue
        if _is_anomalous(piece, around.marks) and _is_surrounded(piece, pieces[at + 1 :], last_end, around):
            restart = max(around.start + LEAST_STEP_S, piece.start)
            return Verdict(kept=tuple(pieces[:at]), restart=restart, dropped=piece)
        last_end = piece.end
    return Verdict(kept=tuple(pieces))


def last_word_end(pieces: Sequence[Piece]) -> float | None:
    """When the last word ends; without words, the last piece; None without pieces."""
    for piece in reversed(pieces):
        if piece.words:
            return piece.words[-1].end
    return pieces[-1].end if pieces else None


def _is_surrounded(piece: Piece, rest: Sequence[Piece], last_end: float, around: Surroundings) -> bool:
    following = next((other for other in rest if other.words), None)
    next_start = following.words[0].start if following is not None and following.words else around.end
    before = (
        piece.start - last_end > around.threshold
        or piece.start < around.threshold
        or piece.start - around.start < EDGE_S
    )
    after = (
        next_start - piece.end > around.threshold
        or (following is not None and _is_anomalous(following, around.marks))
        or around.end - piece.end < EDGE_S
    )
    return before and after


def _is_anomalous(piece: Piece, marks: str) -> bool:
    """Its first words are improbable, or too short or long to be spoken."""
    words = [word for word in piece.words or () if word.word not in marks][:WORDS_SEEN]
    if not piece.words:
        return False
    score = sum(_strangeness(word) for word in words)
    return score >= ANOMALY or score + 0.01 >= len(words)


def _strangeness(word: SpokenWord) -> float:
    duration = word.end - word.start
    score = 1.0 if (word.probability or 0.0) < UNLIKELY else 0.0
    if duration < SHORT_S:
        score += (SHORT_S - duration) * SHORT_WEIGHT
    if duration > LONG_S:
        score += duration - LONG_S
    return score
