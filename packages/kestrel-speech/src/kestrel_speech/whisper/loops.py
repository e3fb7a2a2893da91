"""Repetition: a model that is lost says the same again and again. Found while it does, and cut from what it said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kestrel.spi import Acceptor, Continue, Finish, Force
from kestrel.types import Token

__all__ = ["LoopFinder", "LoopStop", "without_loop"]

REPEATS = 20
LONGEST = 20  # ids of what is repeated


class LoopFinder:
    """Follows ids of text; ``period`` is the length of what they repeat, 0 while they repeat nothing often enough."""

    def __init__(self, is_text: Callable[[int], bool]) -> None:
        self._is_text = is_text
        self._ids: list[int] = []
        self._runs = [0] * (LONGEST + 1)  # how many of the last ids equal the one that far before them
        self.period = 0

    def feed(self, token_id: int) -> bool:
        """Whether the ids, with this one, end in a loop."""
        if not self._is_text(token_id):
            return bool(self.period)
        ids, runs = self._ids, self._runs
        ids.append(token_id)
        self.period = 0
        for period in range(min(LONGEST, len(ids) - 1), 0, -1):
            runs[period] = runs[period] + 1 if ids[-1 - period] == token_id else 0
            if runs[period] >= period * (REPEATS - 1):
                self.period = period
        return bool(self.period)


class LoopStop(Acceptor):
    """Ends a sequence that only repeats itself."""

    def __init__(self, is_text: Callable[[int], bool]) -> None:
        self._finder = LoopFinder(is_text)

    def accept(self, token: Token) -> Continue | Force | Finish:
        return Finish("length") if self._finder.feed(token.id) else Continue()


def without_loop(ids: Sequence[int], is_text: Callable[[int], bool]) -> tuple[int, ...] | None:
    """``ids`` up to the first time that they said, whole, what they repeat at their end; None when they end in no
    loop."""
    finder = LoopFinder(is_text)
    for token_id in ids:
        finder.feed(token_id)
    if not finder.period:
        return None
    places = [at for at, token_id in enumerate(ids) if is_text(token_id)]
    text = [ids[at] for at in places]
    first = len(text) - finder.period
    while first > 0 and text[first - 1] == text[first - 1 + finder.period]:
        first -= 1
    again = (len(text) - first - finder.period) // finder.period
    return tuple(ids[: places[len(text) - 1 - again * finder.period] + 1])
