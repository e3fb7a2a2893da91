"""What the next window is told of what was said before."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.skills import TranscribeOptions
from kestrel.spi import TextTokenizer
from kestrel_speech.whisper.session import Model

__all__ = ["History"]


class History:
    """Ids of what was said before, as the next window's prompt shows them: at most ``room``, the newest.

    Hotwords come first. The initial prompt is the oldest of the rest; when carried, it stays in front.
    """

    def __init__(
        self,
        room: int,
        tokenizer: TextTokenizer,
        *,
        initial: str | None = None,
        hotwords: str | None = None,
        carries: bool = False,
    ) -> None:
        self._room = room
        self._hotwords = tuple(tokenizer.encode(" " + hotwords))[:room] if hotwords else ()
        first = tuple(tokenizer.encode(" " + initial))[-room:] if initial else ()
        self._carried = first if carries else ()
        self._ids: list[int] = [] if carries else list(first)

    @classmethod
    def of(cls, options: TranscribeOptions, model: Model) -> History:
        """The history before the first window of a call."""
        return cls(
            model.config.text_context // 2 - 1,
            model.tokenizer,
            initial=options.initial_prompt,
            hotwords=None if options.prefix else options.hotwords,
            carries=options.carry_initial_prompt,
        )

    def add(self, ids: Sequence[int]) -> None:
        """What a window said, times included."""
        self._ids = [*self._ids, *ids][-self._room :]

    def forget(self) -> None:
        """Nothing said so far is shown any more."""
        self._ids = []

    def ids(self) -> tuple[int, ...]:
        """The prompt of the next window."""
        front = (*self._hotwords, *self._carried)[: self._room]
        newest = min(self._room - len(front), len(self._ids))
        return (*front, *self._ids[len(self._ids) - newest :])
