"""One output's tokens as the channels that users see: text, reasoning with its grounding, objects, tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kestrel.errors import ModelOutputError
from kestrel.skills.detokenize import Detokeniser, StopFilter
from kestrel.spi.prompt import (
    Found,
    GroundClose,
    GroundOpen,
    GroundPoint,
    Parser,
    Piece,
    Say,
    SayText,
)
from kestrel.types import ChunkKind, FinishReason, StreamChunk, Token

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer

__all__ = ["Channels"]

REASONING = "reasoning"


class Channels:
    """Reads tokens through a family's parser (None: every token is text).

    Stop strings are looked for in the text channel, in what comes after the first ``min_tokens`` tokens; once one is
    complete, ``stopped`` is true and nothing more is read. The same in the lane, where it ends the row, and in the
    reader, where it cuts the text.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        parser: Parser | None = None,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._decoders: dict[str, Detokeniser] = {}
        self._filter = StopFilter(stop)
        self._unstoppable = min_tokens
        self._shown: dict[str, list[str]] = {"text": [], REASONING: []}
        self._reasoning_length = 0
        self._open: dict[str, Any] | None = None
        self.token_ids: list[int] = []
        self.grounding: list[dict[str, Any]] = []
        self.objects: list[dict[str, Any]] = []
        self.tool_calls: list[dict[str, Any]] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._filter.stopped

    @property
    def text(self) -> str:
        """The text channel so far, as shown."""
        return "".join(self._shown["text"])

    @property
    def reasoning(self) -> str:
        """The reasoning channel so far, as shown."""
        return "".join(self._shown[REASONING])

    def feed(self, token: Token) -> list[StreamChunk]:
        """What ``token`` completes."""
        if self.stopped:
            return []
        self.token_ids.append(token.id)
        pieces: Iterable[Piece] = (Say((token.id,)),) if self._parser is None else self._parser.feed(token)
        chunks = self._read(pieces)
        if self._unstoppable:
            self._unstoppable -= 1
        return chunks

    def finish(self, reason: FinishReason) -> list[StreamChunk]:
        """What the end completes. Raises ModelOutputError as the parser does, unless the caller cancelled."""
        chunks: list[StreamChunk] = []
        if not self.stopped:
            chunks += self._read(self._last_pieces(reason))
        for channel, decoder in self._decoders.items():
            chunks += self._say(channel, decoder.finish())
        if not self.stopped:
            chunks += self._show("text", self._filter.release())
        self._close()
        return chunks

    def _last_pieces(self, reason: FinishReason) -> Sequence[Piece]:
        if self._parser is None:
            return ()
        try:
            return self._parser.finish(reason)
        except ModelOutputError:
            if reason == "cancelled":
                return ()
            raise

    def _read(self, pieces: Iterable[Piece]) -> list[StreamChunk]:
        chunks: list[StreamChunk] = []
        for piece in pieces:
            if self.stopped:
                break
            match piece:
                case Say(ids, channel):
                    chunks += self._say(channel, self._decoder(channel).feed(ids))
                case SayText(text, channel):
                    chunks += self._say(channel, self._decoder(channel).finish() + text)
                case Found():
                    chunks.append(self._found(piece))
                case GroundOpen():
                    self._close()
                    self._open = {"start_idx": self._reasoning_length, "end_idx": 0, "points": []}
                case GroundPoint(x, y):
                    if self._open is not None:
                        self._open["points"].append([x, y])
                case GroundClose():
                    self._close()
        return chunks

    def _decoder(self, channel: str) -> Detokeniser:
        decoder = self._decoders.get(channel)
        if decoder is None:
            decoder = self._decoders[channel] = Detokeniser(self._tokenizer)
        return decoder

    def _say(self, channel: str, text: str) -> list[StreamChunk]:
        if channel == REASONING:
            self._reasoning_length += len(text)
        elif self._unstoppable:
            text = self._filter.release() + text
        else:
            text = self._filter.feed(text)
        return self._show(channel, text)

    def _show(self, channel: str, text: str) -> list[StreamChunk]:
        if not text:
            return []
        self._shown[channel].append(text)
        return [StreamChunk(ChunkKind(channel), text)]

    def _found(self, found: Found) -> StreamChunk:
        if found.kind == "tool_call":
            call = _tool_call(found.value, len(self.tool_calls))
            self.tool_calls.append(call)
            return StreamChunk(ChunkKind.TOOL_CALL, value=call)
        self.objects.append(dict(found.value))
        return StreamChunk(ChunkKind.OBJECT, value=dict(found.value))

    def _close(self) -> None:
        """End the open grounded span; a span without points grounds nothing."""
        span, self._open = self._open, None
        if span is not None and span["points"]:
            self.grounding.append({**span, "end_idx": self._reasoning_length})


def _tool_call(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    """OpenAI's shape of a call that a parser found as ``{"name", "arguments"}``."""
    arguments = value.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": value.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": value["name"], "arguments": text},
    }
