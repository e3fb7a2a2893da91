"""Fakes without a model: a byte-level tokenizer and a prompt format that spells calls out as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kestrel.spi import (
    Call,
    Decoding,
    Found,
    GroundClose,
    GroundOpen,
    GroundPoint,
    MediaPart,
    Parser,
    Piece,
    PromptFormat,
    Say,
    TextPart,
    TokensPart,
)
from kestrel.types import Media, Segment, Text, Token, Tokens

__all__ = ["ByteTokenizer", "EchoPromptFormat", "MarkedParser"]

CONTROL = ("<bos>", "<eos>", "<think>", "</think>", "<ground>", "<point>", "</ground>", "<object>")


class ByteTokenizer:
    """A ``TextTokenizer``: ids 0 to 255 are bytes, then control tokens that add no text."""

    def __init__(self, control: Sequence[str] = CONTROL) -> None:
        self._control = {name: 256 + place for place, name in enumerate(control)}
        self.vocab_size = 256 + len(control)

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``; a control token's name is text like any other."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, invalid UTF-8 as U+FFFD."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One byte, or none for a control token."""
        return bytes([token_id]) if token_id < 256 else b""

    def token_id(self, token: str) -> int | None:
        """The id of a control token by its name."""
        return self._control.get(token)


class MarkedParser(Parser):
    """Pieces by control tokens: text between ``<think>`` and ``</think>`` is reasoning; ``<point>`` with two bins
    out of 100 grounds it; ``<object>`` with two or four bins is an object."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._names = {tokenizer.token_id(name): name for name in CONTROL}
        self._channel = "text"

    def feed(self, token: Token) -> Sequence[Piece]:
        values = [bin_ / 100 for bin_ in token.aux]
        match self._names.get(token.id):
            case "<think>":
                self._channel = "reasoning"
            case "</think>":
                self._channel = "text"
            case "<ground>":
                return (GroundOpen(),)
            case "</ground>":
                return (GroundClose(),)
            case "<point>":
                return (GroundPoint(values[0], values[1]),)
            case "<object>":
                names = ("x", "y") if len(values) == 2 else ("x_min", "y_min", "x_max", "y_max")
                return (Found(dict(zip(names, values, strict=True))),)
            case _:
                return (Say((token.id,), self._channel),)
        return ()


class EchoPromptFormat(PromptFormat):
    """Every skill's prompt is ``<bos>``, the call's media, its values as JSON; answers end at ``<eos>``.

    ``generate`` gets its parts as they are. Parsers are ``MarkedParser`` but for raw text.
    """

    def __init__(self, tokenizer: ByteTokenizer, defaults: Mapping[str, Any] | None = None) -> None:
        self.skills = frozenset({"query", "caption", "point", "detect", "segment", "chat", "generate"})
        self._tokenizer = tokenizer
        self._defaults = dict(defaults or {})

    def segments(self, skill: str, call: Call) -> list[Segment]:
        self.require(skill)
        if skill == "generate":
            return [_segment(part, call) for part in call.values["parts"]]
        spelt = json.dumps({"skill": skill, **call.values}, default=repr, sort_keys=True)
        media: list[Segment] = [Media(item) for item in call.prepared]
        return [Tokens((self._id("<bos>"),)), *media, Text(spelt)]

    def decoding(self, skill: str, call: Call) -> Decoding:
        return Decoding(stop_ids=frozenset({self._id("<eos>")}))

    def parser(self, skill: str, call: Call) -> Parser | None:
        return None if skill == "generate" else MarkedParser(self._tokenizer)

    def defaults(self, skill: str) -> Mapping[str, Any]:
        return self._defaults

    def _id(self, name: str) -> int:
        token_id = self._tokenizer.token_id(name)
        assert token_id is not None, f"the tokenizer has no {name}"
        return token_id


def _segment(part: TextPart | TokensPart | MediaPart, call: Call) -> Segment:
    match part:
        case TextPart(text):
            return Text(text)
        case TokensPart(ids):
            return Tokens(ids)
        case MediaPart(item):
            return Media(call.prepared[item])
