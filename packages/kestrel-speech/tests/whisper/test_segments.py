"""Ids to segments and to the next window, and what guards against invented text."""

import pytest

from kestrel.skills import SpokenWord
from kestrel_speech.whisper.guard import Surroundings, judge, last_word_end
from kestrel_speech.whisper.segments import Piece, cut_window, with_longer_rest
from kestrel_speech.whisper.tokens import SpecialIds

SPECIAL = SpecialIds(
    vocab_size=421, eot=256, sot=257, translate=264, transcribe=265, start_of_lm=266, start_of_previous=267,
    no_speech=268, no_timestamps=269, is_multilingual=True, languages={"en": 258}, non_speech=(), blanks=(),
)  # fmt: skip


def ids(*parts):
    """Ids of text and, for floats, of times in seconds."""
    return [270 + round(part * 50) if isinstance(part, float) else part for part in parts]


def cut(*parts, frames=300, **options):
    made = cut_window(ids(*parts), SPECIAL, frames, **options)
    return [(p.start, p.end, SPECIAL.text_of(p.ids)) for p in made.pieces], made.advance, made.ends_single


@pytest.mark.parametrize(
    ("parts", "segments", "advance"),
    [
        ((0.0, 1, 2, 1.0, 1.0, 3, 2.0), [(0.0, 1.0, [1, 2]), (1.0, 2.0, [3])], 300),
        ((0.0, 1, 1.0, 1.2, 2, 2.0, 2.4, 3), [(0.0, 1.0, [1]), (1.2, 2.0, [2])], 200),
        ((0.0, 1, 2.5), [(0.0, 2.5, [1])], 300),
        ((0.0, 1), [(0.0, 3.0, [1])], 300),
        ((0.0, 1, 2.0, 2.2), [(0.0, 2.0, [1])], 200),
        ((0.0, 0.0, 1), [(0.0, 0.0, [])], 300),
        ((), [(0.0, 3.0, [])], 300),
    ],
)
def test_pairs_of_times_end_segments(parts, segments, advance):
    found, frames, _ = cut(*parts)
    assert found == segments
    assert frames == advance


def test_a_lone_last_time_ends_the_window():
    assert cut(0.0, 1, 1.0, 1.0, 2, 2.0)[2] is True
    assert cut(0.0, 1, 1.0, 1.0, 2)[2] is False


def test_a_short_window_moves_by_what_there_is():
    assert cut(0.0, 1, 0.5, frames=80)[1] == 80


def test_what_is_unfinished_is_kept_where_nothing_follows():
    found, _, _ = cut(0.0, 1, 1.0, 1.2, 2, keeps_rest=True)
    assert found == [(0.0, 1.0, [1]), (1.2, 3.0, [2])]


def test_a_very_short_rest_takes_the_last_segment_along():
    def longer(*parts):
        made = with_longer_rest(cut_window(ids(*parts), SPECIAL, 600), 600)
        return [(p.start, p.end) for p in made.pieces], made.advance

    assert longer(0.0, 1, 1.5, 2.0, 2, 4.8, 4.8) == ([(0.0, 1.5)], 200)
    assert longer(0.0, 1, 1.5, 2.0, 2, 3.8, 3.8) == ([(0.0, 1.5), (2.0, 3.8)], 380), "2.2 s are enough"
    assert longer(0.0, 1, 1.5, 1.5, 2, 6.0) == ([(0.0, 1.5), (1.5, 6.0)], 600), "nothing is left"
    assert longer(0.0, 1, 4.8, 4.8) == ([(0.0, 4.8)], 480), "there is nothing to begin with instead"


def test_without_times_a_window_is_one_segment():
    assert cut(1, 1.0, 1.0, 2, with_times=False)[0] == [(0.0, 3.0, [1, 2])]


def piece(start, end, *, probability=0.9, count=4, length=0.3):
    step = (end - start) / count
    words = tuple(
        SpokenWord(
            word=f" w{i}", start=start + i * step, end=start + i * step + length, probability=probability
        )
        for i in range(count)
    )
    return Piece(ids=(1,) * count, start=start, end=end, words=words)


AROUND = Surroundings(start=30.0, end=60.0, last_speech=30.0, threshold=2.0, marks=".,")
GOOD, BAD = piece(31.0, 33.0), piece(44.0, 46.0, probability=0.05)


def test_likely_words_are_believed():
    verdict = judge([GOOD, piece(34.0, 36.0)], AROUND)
    assert (len(verdict.kept), verdict.restart, verdict.is_empty) == (2, None, False)


def test_an_unlikely_first_segment_behind_silence_is_looked_at_again():
    verdict = judge([BAD], AROUND)
    assert verdict.is_empty
    assert verdict.restart == 44.0


def test_an_unlikely_segment_between_silences_is_dropped_with_what_follows():
    verdict = judge([GOOD, BAD, piece(50.0, 52.0)], AROUND)
    assert verdict.kept == (GOOD,)
    assert verdict.dropped == BAD
    assert verdict.restart == 44.0


def test_an_unlikely_segment_at_the_end_of_the_recording_is_dropped():
    end = Surroundings(start=60.0, end=60.3, last_speech=47.8, threshold=2.0, marks=".,")
    odd = piece(60.0, 60.26, probability=0.01, length=0.0)
    assert judge([odd], end).dropped == odd


def test_an_unlikely_segment_among_speech_stays():
    close = piece(33.5, 35.0, probability=0.05)
    assert len(judge([GOOD, close, piece(36.0, 38.0)], AROUND).kept) == 3


def test_words_too_short_or_too_long_are_unlikely():
    for odd in (piece(44.0, 46.0, length=0.01), piece(44.0, 47.0, length=3.5, count=2)):
        assert judge([GOOD, odd, piece(55.0, 57.0)], AROUND).dropped == odd


def test_the_last_word_says_when_speech_ended():
    assert last_word_end([GOOD]) == GOOD.words[-1].end
    assert last_word_end([Piece(ids=(1,), start=0.0, end=5.0)]) == 5.0
    assert last_word_end([]) is None
