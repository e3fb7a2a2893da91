"""Decoding rules of a window: what is never written, what not at first, and how times open and close segments.

Times are ids too. The automaton's state is where the last ids stand and the latest time:

    start      nothing yet                          a time of at most ``max_initial``
    opened k   time k opened a segment              anything but a time
    text k     text behind time k                   text, the end, or a later time
    closed k   time k closed text                   the end, or a time from k on, which opens the next segment
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel.skills import TranscribeOptions
from kestrel.spi import Automaton, Decoding, LogitRule, Rule, Static, TokenSet
from kestrel_speech.whisper.tokens import SpecialIds

__all__ = ["TIMES_PER_SECOND", "WindowRules", "rule_options"]

TIMES_PER_SECOND = 50

KEPT = 16  # variants of rules that stay, since the sampler keeps a copy per distinct object
KEPT_AUTOMATA = 4  # of 27 MB each


class WindowRules:
    """Rules of one checkpoint. Equal questions get the same objects."""

    def __init__(self, ids: SpecialIds) -> None:
        self._ids = ids
        self._next: NDArray[np.int32] | None = None
        self._classes = tuple(TokenSet.of((ids.time_begin + k,)) for k in range(ids.num_times))
        self._prefer = LogitRule(
            op="prefer_group", params={"group": TokenSet.span(ids.time_begin, ids.vocab_size)}
        )
        self._times = lru_cache(maxsize=KEPT_AUTOMATA)(self._automaton)
        self.window = lru_cache(maxsize=KEPT)(self._window)
        self.language = self._language()

    def _window(
        self,
        *,
        with_times: bool,
        suppress: tuple[int, ...] | None = None,
        suppress_blank: bool = True,
        max_initial: int | None = 50,
        goes_on: bool = False,
    ) -> Decoding:
        """How a window is decoded. ``suppress`` None: the checkpoint's own list. ``max_initial``: the highest time
        that may come first. ``goes_on``: the prompt ends in text of this window, behind 0.00."""
        ids = self._ids
        never = {*(ids.non_speech if suppress is None else suppress), *ids.control}
        if with_times:
            never.add(ids.no_timestamps)
        rules: list[Rule] = [Static(allowed=TokenSet.of(never).but())]
        if suppress_blank:
            rules.append(Static(allowed=TokenSet.of(ids.blanks).but(), last=1))
        if with_times:
            rules += [self._times(max_initial, goes_on), self._prefer]
        return Decoding(rules=tuple(rules), stop_ids=frozenset({ids.eot}))

    def _language(self) -> Decoding:
        """One id: the language."""
        allowed = TokenSet.of(self._ids.languages.values())
        return Decoding(rules=(Static(allowed=allowed),), greedy=True, max_tokens=1)

    def _automaton(self, max_initial: int | None, goes_on: bool) -> Automaton:
        ids, count = self._ids, self._ids.num_times
        begin, end = ids.time_begin, ids.vocab_size
        first = count if max_initial is None else min(count, max_initial + 1)
        words = (0, begin)
        masks = [TokenSet.span(begin, begin + first)]
        masks += [TokenSet((words,))] * count
        masks += [_joined(words, (begin + k + 1, end)) for k in range(count)]
        masks += [_joined((ids.eot, begin), (begin + k, end)) for k in range(count)]
        if self._next is None:
            self._next = _table(count)
        return Automaton(
            classes=self._classes,
            next=self._next,
            mask=masks,
            start=1 + count if goes_on else 0,
        )


def rule_options(options: TranscribeOptions) -> dict[str, Any]:
    """What ``WindowRules.window`` takes of a call's options."""
    return {
        "suppress": options.suppress_tokens,
        "suppress_blank": options.suppress_blank,
        "max_initial": round(options.max_initial_timestamp * TIMES_PER_SECOND),
    }


def _joined(first: tuple[int, int], second: tuple[int, int]) -> TokenSet:
    """Two spans, the first below the second."""
    if second[0] >= second[1]:
        return TokenSet((first,))
    if first[1] == second[0]:
        return TokenSet(((first[0], second[1]),))
    return TokenSet((first, second))


def _table(count: int) -> NDArray[np.int32]:
    """The following state of every state, by class: a time's own, or the last for all else."""
    opened, text, closed = 1, 1 + count, 1 + 2 * count
    times = np.arange(count, dtype=np.int32)
    table = np.empty((1 + 3 * count, count + 1), dtype=np.int32)
    table[:text, :count] = opened + times
    table[text:closed, :count] = closed + times
    table[closed:, :count] = opened + times
    table[0, count] = text
    for first in (opened, text, closed):
        table[first : first + count, count] = text + times
    return table
