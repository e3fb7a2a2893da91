"""One output being read: tokens in, stream chunks out, the reader's result at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kestrel.spi import Request
from kestrel.types import FinishReason, StreamChunk, Token

__all__ = ["Output"]


class Output:
    """Reads one output of ``request``. ``emit`` shows chunks to whoever streams the call; None when nobody does."""

    def __init__(self, request: Request, emit: Callable[[StreamChunk], None] | None) -> None:
        self._reader = None if request.reader is None else request.reader()
        self._emit = emit
        self._stops = request.decoding.stop_ids | set(request.settings.stop_token_ids)
        self.tokens: list[Token] = []
        self._held: Token | None = None

    def feed(self, tokens: Sequence[Token]) -> None:
        """Read ``tokens``. A stop id is held back: the final one is not for the reader, and may be this one."""
        self.tokens.extend(tokens)
        if self._reader is None:
            return
        for token in tokens:
            self._flush()
            if token.id in self._stops:
                self._held = token
            else:
                self._show(self._reader.feed(token))

    def finish(self, reason: FinishReason, output: Any) -> Any:
        """The reader's result; ``output`` (a step model's) when there is no reader."""
        if self._reader is None:
            return output
        if reason != "stop":
            self._flush()
        chunks, result = self._reader.finish(reason)
        self._show(chunks)
        return result

    def _flush(self) -> None:
        if self._held is not None and self._reader is not None:
            held, self._held = self._held, None
            self._show(self._reader.feed(held))

    def _show(self, chunks: Sequence[StreamChunk]) -> None:
        if self._emit is not None:
            for chunk in chunks:
                self._emit(chunk)
