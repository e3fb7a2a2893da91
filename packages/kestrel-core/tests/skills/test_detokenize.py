"""Streaming text: joined deltas equal the full decode, whatever the cuts; stop strings end it at one place."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel.skills import Channels, Detokeniser, StopFilter, StopStrings
from kestrel.spi import Continue, Finish
from kestrel.testing.fakes import ByteTokenizer, MarkedParser
from kestrel.types import ChunkKind, Token

TOKENIZER = ByteTokenizer()
EOS, THINK, UNTHINK = (TOKENIZER.token_id(name) for name in ("<eos>", "<think>", "</think>"))

pieces = st.lists(st.binary(max_size=6) | st.text(max_size=4).map(str.encode), max_size=8)


class PieceTokenizer(ByteTokenizer):
    """Token i adds the bytes of piece i, as a trained vocabulary may split characters anywhere."""

    def __init__(self, vocabulary):
        super().__init__()
        self._vocabulary = vocabulary

    def token_bytes(self, token_id):
        return self._vocabulary[token_id]


@given(pieces)
def test_joined_deltas_equal_the_full_decode_at_every_cut(vocabulary):
    tokenizer = PieceTokenizer(vocabulary)
    for cut in range(len(vocabulary) + 1):
        decoder = Detokeniser(tokenizer)
        shown = "".join(decoder.feed([i]) for i in range(cut)) + decoder.finish()
        assert shown == tokenizer.decode(range(cut))


def test_characters_wait_for_their_last_byte_and_leading_spaces_stay():
    decoder = Detokeniser(TOKENIZER)

    deltas = [decoder.feed([byte]) for byte in " é€🙂".encode()]

    assert deltas == [" ", "", "é", "", "", "€", "", "", "", "🙂"]
    assert decoder.finish() == ""


def test_an_unfinished_character_ends_as_one_replacement():
    decoder = Detokeniser(TOKENIZER)

    assert (decoder.feed(list("🙂".encode())[:3]), decoder.finish()) == ("", "\ufffd")


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, looking at one character more at a time."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


few_letters = st.text(alphabet="ab\n", max_size=14)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@given(few_letters, stop_lists, st.lists(st.integers(0, 14), max_size=5))
def test_the_text_ends_before_the_first_complete_stop_string_whatever_the_cuts(text, stops, cuts):
    filter_ = StopFilter(stops)
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]

    shown = "".join(filter_.feed(text[a:b]) for a, b in itertools.pairwise(edges))
    shown += filter_.release()

    assert shown == cut_at_stop(text, stops)
    assert filter_.stopped == any(stop in text for stop in stops)


@given(few_letters, stop_lists)
def test_no_character_is_held_back_longer_than_it_can_still_match(text, stops):
    filter_ = StopFilter(stops)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += filter_.feed(text[end - 1])
        if filter_.stopped:
            break
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(
    st.lists(st.integers(97, 98) | st.sampled_from([THINK, UNTHINK, 0xC3, 0xA9, EOS]), max_size=14),
    st.lists(st.sampled_from(["a", "ab", "ba", "bb", "é"]), min_size=1, max_size=2),
    st.integers(0, 3),
)
def test_lane_and_reader_agree_on_the_token_that_completes_a_stop_string(ids, stops, min_tokens):
    acceptor = StopStrings(TOKENIZER, stops, parser=MarkedParser(TOKENIZER), min_tokens=min_tokens)
    reader = Channels(TOKENIZER, MarkedParser(TOKENIZER), stop=stops, min_tokens=min_tokens)
    shown = ""
    for token_id in ids:
        decision = acceptor.accept(Token(token_id))
        shown += "".join(c.text for c in reader.feed(Token(token_id)) if c.kind is ChunkKind.TEXT)
        assert isinstance(decision, Finish) == reader.stopped
        if reader.stopped:
            break
    shown += "".join(c.text for c in reader.finish("stop") if c.kind is ChunkKind.TEXT)

    assert shown == reader.text


def test_stop_strings_are_looked_for_in_the_answer_alone():
    ids = [THINK, *b"stop here", UNTHINK, *b" yes stop no"]
    acceptor = StopStrings(TOKENIZER, ["stop"], parser=MarkedParser(TOKENIZER))

    decisions = [acceptor.accept(Token(i)) for i in ids]

    ends = [place for place, decision in enumerate(decisions) if isinstance(decision, Finish)]
    assert ends[0] == len(ids) - len(" no") - 1
    assert decisions[3] == Continue()


def test_stop_strings_within_min_tokens_are_text():
    channels = Channels(TOKENIZER, stop=["ab"], min_tokens=3)

    shown = "".join(c.text for i in b"abxabx" for c in channels.feed(Token(i)))

    assert (shown, channels.stopped) == ("abx", True)


def test_nothing_is_shown_from_the_stop_string_on_even_inside_one_token():
    tokenizer = PieceTokenizer([b"Hello.\n", b"\nUser: more"])
    channels = Channels(tokenizer, stop=["\n\nUser"])

    shown = [c.text for i in (0, 1) for c in channels.feed(Token(i))]

    assert shown == ["Hello."]
    assert channels.finish("stop") == []


@pytest.mark.parametrize("end", ["stop", "length", "cancelled"])
def test_held_text_is_shown_when_the_end_comes_first(end):
    channels = Channels(TOKENIZER, stop=["<end>"])
    for byte in b"a <en":
        channels.feed(Token(byte))

    assert [c.text for c in channels.finish(end)] == ["<en"]
    assert channels.text == "a <en"
