"""How a tokenizer spells bytes in the names of its tokens.

Three spellings: byte-level (each byte a printable character, as in GPT-2), metaspace ("▁" for a space, "<0x0A>" for a
lone byte, as in SentencePiece), and plain text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from kestrel.errors import LoadError

__all__ = ["Spelling", "byte_characters", "spelling_of"]

SPACE = "▁"  # U+2581, SentencePiece's mark of a space
LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(ABC):
    """The bytes behind token names."""

    @abstractmethod
    def piece(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary."""

    def added(self, content: str) -> bytes:
        """The bytes of an added token that is text."""
        return content.encode()


class ByteLevel(Spelling):
    """Each byte is one character."""

    def __init__(self) -> None:
        self._byte = {character: bytes([byte]) for byte, character in byte_characters().items()}

    def piece(self, token: str) -> bytes:
        """Characters outside the alphabet stand for themselves."""
        return b"".join(self._byte.get(character) or character.encode() for character in token)


class Metaspace(Spelling):
    """Text with marked spaces, and lone bytes where ``has_bytes``."""

    def __init__(self, has_bytes: bool) -> None:
        self._has_bytes = has_bytes

    def piece(self, token: str) -> bytes:
        if self._has_bytes and (lone := LONE_BYTE.fullmatch(token)):
            return bytes([int(lone[1], 16)])
        return token.replace(SPACE, " ").encode()

    def added(self, content: str) -> bytes:
        return content.replace(SPACE, " ").encode()


class Plain(Spelling):
    """Tokens are text as they are."""

    def piece(self, token: str) -> bytes:
        return token.encode()


def spelling_of(spec: Mapping[str, Any]) -> Spelling:
    """The spelling of a tokenizer.json. LoadError for a kind whose text cannot be put together again (WordPiece)."""
    parts = [
        *_parts(spec.get("pre_tokenizer")),
        *_parts(spec.get("normalizer")),
        *_parts(spec.get("decoder")),
    ]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return ByteLevel()
    if spec["model"].get("type") == "WordPiece":
        raise LoadError(
            "a WordPiece tokenizer does not keep spaces. Supported: byte-level BPE and SentencePiece kinds"
        )
    marks = any(part.get("type") == "Replace" and SPACE in str(part) for part in parts)
    if "Metaspace" in kinds or marks:
        return Metaspace(has_bytes=bool(spec["model"].get("byte_fallback")) or "ByteFallback" in kinds)
    return Plain()


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte: itself where printable, else the next one from U+0100.

    Source: the GPT-2 release, https://github.com/openai/gpt-2, ``encoder.py``: its table of bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable}
    return shown | {byte: chr(0x100 + i) for i, byte in enumerate(rest)}


def _parts(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if component is None:
        return
    yield component
    for key in ("pretokenizers", "normalizers", "decoders"):
        for part in component.get(key) or ():
            yield from _parts(part)
