"""Readers: one output's tokens to stream chunks, and at the end to the skill's result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kestrel.errors import ModelOutputError
from kestrel.skills.channels import Channels
from kestrel.spi.prompt import Found, Parser, Piece
from kestrel.spi.skill import Reader
from kestrel.types import ChunkKind, FinishReason, StreamChunk, Token

__all__ = ["ObjectReader", "TextReader", "reasoning_of"]

Shape = Callable[[Channels, FinishReason], dict[str, Any]]


class TextReader(Reader):
    """Text, and reasoning when ``with_reasoning``; ``shape`` makes the result of what was read."""

    def __init__(self, channels: Channels, shape: Shape, *, with_reasoning: bool = False) -> None:
        self._channels = channels
        self._shape = shape
        self._hidden = None if with_reasoning else ChunkKind.REASONING

    def feed(self, token: Token) -> list[StreamChunk]:
        return self._visible(self._channels.feed(token))

    def finish(self, finish_reason: FinishReason) -> tuple[list[StreamChunk], dict[str, Any]]:
        chunks = self._visible(self._channels.finish(finish_reason))
        return chunks, self._shape(self._channels, finish_reason)

    def _visible(self, chunks: list[StreamChunk]) -> list[StreamChunk]:
        return [chunk for chunk in chunks if chunk.kind is not self._hidden]


def reasoning_of(channels: Channels) -> dict[str, Any]:
    """Reasoning as results show it: its text, and points that ground parts of it by character offsets."""
    return {"text": channels.reasoning, "grounding": channels.grounding}


class ObjectReader(Reader):
    """Points, boxes or segments as ``{key: [...]}``: at most ``limit``, numbers inside the image, whole ones alone.

    ``label`` is added to each when several kinds of object were asked for.
    """

    def __init__(self, parser: Parser, key: str, limit: int, label: str | None = None) -> None:
        self._parser = parser
        self._key = key
        self._limit = limit
        self._label = label
        self._objects: list[dict[str, Any]] = []

    def feed(self, token: Token) -> list[StreamChunk]:
        return self._read(self._parser.feed(token))

    def finish(self, finish_reason: FinishReason) -> tuple[list[StreamChunk], dict[str, Any]]:
        try:
            chunks = self._read(self._parser.finish(finish_reason))
        except ModelOutputError:
            if finish_reason != "cancelled":
                raise
            chunks = []
        return chunks, {self._key: self._objects}

    def _read(self, pieces: Sequence[Piece]) -> list[StreamChunk]:
        chunks = []
        for piece in pieces:
            if isinstance(piece, Found) and piece.kind == "object" and len(self._objects) < self._limit:
                found = _inside_image(piece.value)
                if self._label is not None:
                    found["label"] = self._label
                self._objects.append(found)
                chunks.append(StreamChunk(ChunkKind.OBJECT, value=dict(found)))
        return chunks


_COORDINATES = frozenset({"x", "y", "x_min", "y_min", "x_max", "y_max"})


def _inside_image(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its coordinates clamped to 0–1. Raises ModelOutputError for one that is no number."""
    found = dict(value)
    for name in _COORDINATES & found.keys():
        number = found[name]
        if not math.isfinite(number):
            raise ModelOutputError(
                f"the model gave {name} = {number} for an object; ask again", raw_text=str(found)
            )
        found[name] = min(1.0, max(0.0, float(number)))
    return found
