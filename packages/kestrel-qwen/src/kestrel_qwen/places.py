"""Points and boxes that the model writes as JSON: ``{"point_2d": [x, y]}``, ``{"bbox_2d": [x1, y1, x2, y2]}``.

Coordinates are thousandths of the picture and become 0 to 1. A list may stand in a code fence; whatever is not such a
list is an error that carries the text, never an empty result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kestrel.errors import ModelOutputError
from kestrel.spi import Found, Parser, Piece, SayText
from kestrel.types import Token
from kestrel_qwen.parser import AnswerParser

__all__ = ["BOX_KEY", "POINT_KEY", "PlaceParser"]

POINT_KEY, BOX_KEY = "point_2d", "bbox_2d"
SCALE = 1000
SLACK = 10  # a coordinate this far outside is a rounding of the edge; farther out, the model counts otherwise
_FENCE = re.compile(r"```[A-Za-z0-9_+-]*\s*(?=[\[{])")
_DECODER = json.JSONDecoder()


class _Unreadable(Exception):
    """Why the text is not a list of places."""


class PlaceParser(Parser):
    """Each place as soon as it is complete. At most ``limit``: what follows the last one is not looked at."""

    def __init__(self, answer: AnswerParser, key: str, limit: int) -> None:
        self._answer = answer
        self._list = _List(key)
        self._limit = limit
        self._found = 0

    def feed(self, token: Token) -> Sequence[Piece]:
        return self._read(self._answer.feed(token))

    def finish(self, finish_reason: str) -> Sequence[Piece]:
        found = self._read(self._answer.finish(finish_reason))
        problem = self._list.problem(is_cut=finish_reason == "length")
        if problem is not None and self._found < self._limit:
            raise ModelOutputError(
                f"the model was asked for a JSON list of {self._list.key} and {problem}. "
                "Ask again, or raise max_tokens if the list was cut",
                raw_text=self._list.text,
            )
        return found

    def _read(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        text = "".join(p.text for p in pieces if isinstance(p, SayText) and p.channel == "text")
        found = [Found(place) for place in self._list.feed(text)][: self._limit - self._found]
        self._found += len(found)
        return found


class _List:
    """The objects of a JSON list as they are completed; a few objects in a row count as a list."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.text = ""
        self._at = 0
        self._closed = 0  # behind the last "}" that was tried as the end of an object
        self._next: Callable[[], dict[str, float] | None] = self._begin
        self._bracketed = False
        self._error: str | None = None
        self._is_done = False

    def feed(self, text: str) -> list[dict[str, float]]:
        """The places that ``text`` completes."""
        self.text += text
        found: list[dict[str, float]] = []
        while text and not self._is_done and self._error is None:
            before = (self._at, self._next)
            try:
                place = self._next()
            except _Unreadable as error:
                self._error = str(error)
                break
            if place is not None:
                found.append(place)
            if before == (self._at, self._next):
                break
        return found

    def problem(self, *, is_cut: bool) -> str | None:
        """Why the whole text is no list of places, if it is none."""
        if self._error is not None:
            return self._error
        if self._next == self._begin:
            return "wrote none"
        is_complete = self._is_done or (not self._bracketed and self._next == self._separator)
        if not is_complete:
            return "was cut off in the middle of it" if is_cut else "left it unfinished"
        if self.key in self.text[self._at :]:
            return "wrote more than one"
        return None

    def _peek(self) -> str:
        """The next character that is not whitespace, or "" where the text ends so far."""
        while self._at < len(self.text) and self.text[self._at].isspace():
            self._at += 1
        return self.text[self._at : self._at + 1]

    def _begin(self) -> None:
        character = self._peek()
        if character not in ("", "[", "{"):
            fence = _FENCE.search(self.text, self._at)
            if fence is None:
                return
            self._at = fence.end()
            character = self._peek()
        if character == "[":
            self._at += 1
            self._bracketed = True
        if character:
            self._next = self._object

    def _object(self) -> dict[str, float] | None:
        character = self._peek()
        if character == "]" and self._bracketed:
            self._at += 1
            self._is_done = True
        elif character not in ("", "{"):
            raise _Unreadable(f"wrote {character!r} where an object belongs")
        elif character:
            return self._complete()
        return None

    def _complete(self) -> dict[str, float] | None:
        """The object that begins here, once one of the braces behind it ends it."""
        while (brace := self.text.find("}", max(self._at, self._closed))) >= 0:
            self._closed = brace + 1
            try:
                value, self._at = _DECODER.raw_decode(self.text[: self._closed], self._at)
            except (ValueError, RecursionError):  # not this one, or broken, which the end will show
                continue
            self._next = self._separator
            return _place(value, self.key)
        return None

    def _separator(self) -> None:
        character = self._peek()
        if character == ",":
            self._at += 1
            self._next = self._object
        elif character == "]" and self._bracketed:
            self._at += 1
            self._is_done = True
        elif character == "{" and not self._bracketed:
            self._next = self._object
        elif character:
            if self._bracketed:
                raise _Unreadable(f"wrote {character!r} between two objects")
            self._is_done = True


def _place(value: Mapping[str, Any], key: str) -> dict[str, float]:
    """A place in 0–1 of the picture."""
    numbers = value.get(key)
    wanted = 2 if key == POINT_KEY else 4
    if not isinstance(numbers, list) or len(numbers) != wanted:
        raise _Unreadable(f"gave an object without {wanted} numbers as {key}")
    shares = [_share(number, key) for number in numbers]
    if key == POINT_KEY:
        return {"x": shares[0], "y": shares[1]}
    (x_min, x_max), (y_min, y_max) = sorted(shares[0::2]), sorted(shares[1::2])
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}


def _share(number: Any, key: str) -> float:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if is_number and -SLACK <= number <= SCALE + SLACK:
        return float(min(1.0, max(0.0, number / SCALE)))
    raise _Unreadable(f"gave a coordinate of {key} that is no number from 0 to {SCALE}")
