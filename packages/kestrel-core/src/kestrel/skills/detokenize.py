"""Tokens to text as they come: joined deltas equal the full decode, and nothing from a stop string on is shown."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer

__all__ = ["Detokeniser", "StopFilter"]


class Detokeniser:
    """Streaming decode of one output. Bytes of an unfinished character wait; invalid UTF-8 becomes U+FFFD."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete."""
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids))

    def finish(self) -> str:
        """What is left of an unfinished character: at most one U+FFFD. A fresh text may follow."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class StopFilter:
    """Passes text on up to the first stop string, holding back what may still become one.

    The first stop string that is complete ends the text; of several complete at one character, the longest. So the
    cut does not depend on how the text was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What may be shown now; nothing once stopped."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = len(text) - self._hold(text)
        self._held = text[keep:]
        return text[:keep]

    def release(self) -> str:
        """What was held back: the end came, so it becomes no stop string."""
        held, self._held = self._held, ""
        return held

    def _hold(self, text: str) -> int:
        """How many characters at the end are the beginning of a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            if any(len(stop) > size and text.endswith(stop[:size]) for stop in self._stops):
                return size
        return 0
