"""Token ids to words: ids are joined until their bytes are characters, those until a space or a mark begins a word."""

from __future__ import annotations

import codecs
import string
from collections.abc import Sequence
from dataclasses import dataclass

from kestrel.spi import TextTokenizer

__all__ = ["Unit", "attach_marks", "words_of"]

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # written without spaces between words


@dataclass(frozen=True, slots=True)
class Unit:
    """A word (or a mark) and how many ids it is made of."""

    text: str
    count: int


def words_of(ids: Sequence[int], tokenizer: TextTokenizer, language: str) -> list[Unit]:
    """The words of ``ids`` of text, spaces before them included; their counts sum to ``len(ids)``."""
    units = _characters(ids, tokenizer)
    if language in UNSPACED:
        return units
    words: list[Unit] = []
    for unit in units:
        begins = not words or unit.text.startswith(" ") or unit.text.strip() in string.punctuation
        if begins:
            words.append(unit)
        else:
            words[-1] = Unit(words[-1].text + unit.text, words[-1].count + unit.count)
    return words


def _characters(ids: Sequence[int], tokenizer: TextTokenizer) -> list[Unit]:
    """Shortest runs of ids that decode to whole characters; bytes that can never be one become U+FFFD at once."""
    units: list[Unit] = []
    raw, count = b"", 0
    for token_id in ids:
        raw += tokenizer.token_bytes(token_id)
        count += 1
        if not _is_cut(raw):
            units.append(Unit(raw.decode("utf-8", errors="replace"), count))
            raw, count = b"", 0
    if count:
        units.append(Unit(raw.decode("utf-8", errors="replace"), count))
    return units


def _is_cut(raw: bytes) -> bool:
    """Whether ``raw`` ends inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(raw)
    return bool(decoder.getstate()[0])


def attach_marks(texts: list[str], prepended: str, appended: str) -> None:
    """Join opening marks to the word behind them and closing marks to the word before, in place; what was joined
    elsewhere becomes empty."""
    following = len(texts) - 1
    for at in range(len(texts) - 2, -1, -1):
        if texts[at].startswith(" ") and texts[at].strip() in prepended:
            texts[following] = texts[at] + texts[following]
            texts[at] = ""
        else:
            following = at
    previous = 0
    for at in range(1, len(texts)):
        if not texts[previous].endswith(" ") and texts[at] in appended:
            texts[previous] += texts[at]
            texts[at] = ""
        else:
            previous = at
