"""Word times: from an alignment to words, and what is known to go wrong with them put right.

All times are seconds on the clock of the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from kestrel.skills import SpokenWord
from kestrel.spi import TextTokenizer
from kestrel_speech.whisper.align import Alignment
from kestrel_speech.whisper.dtw import first_columns
from kestrel_speech.whisper.grouping import attach_marks, words_of
from kestrel_speech.whisper.segments import Piece
from kestrel_speech.whisper.tokens import SpecialIds

__all__ = ["Marks", "TimedWord", "time_words", "with_words"]

POSITIONS_PER_SECOND = 50
LONGEST_MEDIAN_S = 0.7
SENTENCE_ENDS = ".。!！?？"
TRUST_S = 0.5  # a segment's own time is believed against a word's by so much


@dataclass(frozen=True, slots=True)
class Marks:
    """Punctuation that joins the word behind it, and the word before it."""

    prepended: str
    appended: str


@dataclass(slots=True)
class TimedWord:
    """A word of ``count`` ids, from ``start`` to ``end`` seconds of the window."""

    text: str
    count: int
    start: float
    end: float
    probability: float

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.start


def time_words(
    text: Sequence[int], alignment: Alignment, tokenizer: TextTokenizer, language: str
) -> list[TimedWord]:
    """The words of ``text`` with the times of the path through its alignment; none for an empty text."""
    units = words_of(text, tokenizer, language)
    if not units:
        return []
    starts = first_columns(-alignment.matrix_TJ) / POSITIONS_PER_SECOND
    edges = [0, *accumulate(unit.count for unit in units)]
    return [
        TimedWord(
            unit.text,
            unit.count,
            float(starts[a]),
            float(starts[b]),  # where the next word begins; behind the last one, the end of the text
            float(np.mean(alignment.probabilities[a:b])),
        )
        for unit, (a, b) in zip(units, pairwise(edges), strict=True)
    ]


def with_words(
    pieces: Sequence[Piece],
    words: list[TimedWord],
    special: SpecialIds,
    marks: Marks,
    *,
    offset: float,
    last_speech: float,
) -> list[Piece]:
    """``pieces`` with their share of ``words``, whose times count from ``offset``; ``last_speech`` is when the speech
    before them ended."""
    typical = _typical_duration(words)
    _shorten_at_sentence_ends(words, 2 * typical)
    texts = [word.text for word in words]
    attach_marks(texts, marks.prepended, marks.appended)
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        wanted, taken = len(special.text_of(piece.ids)), 0
        mine: list[TimedWord] = []
        while at < len(words) and taken < wanted:
            word = words[at]
            if texts[at]:
                mine.append(
                    replace(word, text=texts[at], start=_at(offset, word.start), end=_at(offset, word.end))
                )
            taken += word.count
            at += 1
        piece = _settled(piece, mine, typical, last_speech) if mine else replace(piece, words=())
        if mine:
            last_speech = piece.end
        found.append(piece)
    return found


def _at(offset: float, seconds: float) -> float:
    return round(offset + seconds, 2)


def _typical_duration(words: Sequence[TimedWord]) -> float:
    durations = [word.duration for word in words if word.duration]
    return min(LONGEST_MEDIAN_S, float(np.median(durations))) if durations else 0.0


def _shorten_at_sentence_ends(words: Sequence[TimedWord], longest: float) -> None:
    """Pauses belong to no word: an over-long mark that ends a sentence is cut from its start, a word behind one from
    its end."""
    for before, word in pairwise(words):
        if word.duration > longest > 0:
            if word.text in SENTENCE_ENDS:
                word.end = word.start + longest
            elif before.text in SENTENCE_ENDS:
                word.start = word.end - longest


def _settled(piece: Piece, words: list[TimedWord], typical: float, last_speech: float) -> Piece:
    """``piece`` and its words agreeing on when they begin and end."""
    longest = 2 * typical
    first, last = words[0], words[-1]
    if first.end - last_speech > 4 * typical:
        _shorten_after_pause(words, longest)
    start = first.start
    if piece.start < first.end and piece.start - TRUST_S > first.start:
        first.start = max(0.0, min(first.end - typical, piece.start))
        start = piece.start
    end = last.end
    if piece.end > last.start and piece.end + TRUST_S < last.end:
        last.end = max(last.start + typical, piece.end)
        end = piece.end
    spoken = tuple(
        SpokenWord(word=word.text, start=word.start, end=word.end, probability=word.probability)
        for word in words
    )
    return replace(piece, start=start, end=end, words=spoken)


def _shorten_after_pause(words: list[TimedWord], longest: float) -> None:
    """The pause before the first word is not part of it, nor of the second."""
    first, second = words[0], words[1] if len(words) > 1 else None
    both = second is not None and second.end - first.start > 2 * longest
    if first.duration <= longest and not both:
        return
    if second is not None and second.duration > longest:
        boundary = max(second.end / 2, second.end - longest)
        first.end = second.start = boundary
    first.start = max(0.0, first.end - longest)
