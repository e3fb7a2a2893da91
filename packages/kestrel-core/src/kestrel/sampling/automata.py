"""Automata on the device: tables of every automaton in use, side by side, and the states of rows.

Shapes: N rows, A automata per row, S states of all automata, K ranges that a state bans, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.sampling.ranges import Ranges, banned_ranges, ranges_of
from kestrel.spi.decoding import Automaton, TokenSet

__all__ = ["AutomatonBank"]

KEEP = 32  # automata without rows that stay; families share a handful

_FREE = Automaton(classes=(), next=((0,),), mask=(TokenSet.all(),))


@dataclass(slots=True, eq=False)
class _Entry:
    """One automaton as flat host tables. ``classes_V``: the class of each id; ``next``: [states, width]."""

    source: Automaton
    classes_V: NDArray[np.int32]
    next: NDArray[np.int32]
    banned: list[Ranges]
    rows: int = 0


class AutomatonBank:
    """Device tables of automata, one copy per distinct object. Entry 0 allows everything: it fills unused columns.

    Adding an automaton renumbers entries only when old ones are dropped; ``numbers`` says what each is called now.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._entries: dict[int, _Entry] = {}
        self.numbers: dict[int, int] = {}
        self._insert(_FREE)
        self._entries[id(_FREE)].rows = 1
        self._upload()

    def acquire(self, automata: Iterable[Automaton]) -> bool:
        """Hold ``automata`` for one row; True when entries were renumbered."""
        wanted = list(automata)
        for automaton in wanted:
            if id(automaton) not in self._entries:
                self._insert(automaton)
        for automaton in wanted:  # once none of them can fail any more
            self._entries[id(automaton)].rows += 1
        missing = [a for a in wanted if id(a) not in self.numbers]
        if not missing:
            return False
        dropped = self._drop_idle()
        self._upload()
        return dropped

    def release(self, automata: Iterable[Automaton]) -> None:
        """A row gives its automata back; their tables stay for the next one."""
        for automaton in automata:
            self._entries[id(automaton)].rows -= 1

    def walk(self, automaton: Automaton, ids: Iterable[int]) -> int:
        """The state after ``ids``, on the host (replay of a preempted row)."""
        entry = self._entries[id(automaton)]
        state = automaton.start
        for token_id in ids:
            state = int(entry.next[state, entry.classes_V[token_id]])
        return state

    def banned(self, numbers_NA: torch.Tensor, states_NA: torch.Tensor) -> torch.Tensor:
        """Bounds [N, A·K, 2] of what may not follow in each state."""
        return self._banned_SK2[self._base[numbers_NA] + states_NA].flatten(1, 2)

    def advance(self, numbers_NA: torch.Tensor, states_NA: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        """States [N, A] after one more token per row."""
        classes_NA = self._classes[numbers_NA, ids_N[:, None]]
        return self._next[self._offset_S[self._base[numbers_NA] + states_NA] + classes_NA].long()

    def _insert(self, automaton: Automaton) -> None:
        width = len(automaton.classes) + 1
        classes_V = np.full(self._vocab_size, width - 1, dtype=np.int32)
        for number in reversed(range(width - 1)):  # the first set that holds an id wins
            for start, end in ranges_of(automaton.classes[number], self._vocab_size):
                classes_V[start:end] = number
        self._entries[id(automaton)] = _Entry(
            source=automaton,
            classes_V=classes_V,
            next=np.asarray(automaton.next, dtype=np.int32).reshape(len(automaton.mask), width),
            banned=[banned_ranges(mask, self._vocab_size) for mask in automaton.mask],
        )

    def _drop_idle(self) -> bool:
        idle = [key for key, entry in self._entries.items() if entry.rows == 0]
        for key in idle[: max(len(idle) - KEEP, 0)]:
            del self._entries[key]
        return len(idle) > KEEP

    def _upload(self) -> None:
        entries = list(self._entries.values())
        self.numbers = {key: number for number, key in enumerate(self._entries)}
        sizes = [len(entry.banned) for entry in entries]
        bases = np.concatenate(([0], np.cumsum([entry.next.size for entry in entries])[:-1]))
        offsets = [
            base + np.arange(size) * entry.next.shape[1]
            for base, size, entry in zip(bases, sizes, entries, strict=True)
        ]
        most = max(len(mask) for entry in entries for mask in entry.banned) or 1
        bounds = np.full((sum(sizes), most, 2), self._vocab_size, dtype=np.int64)
        for state, mask in enumerate(mask for entry in entries for mask in entry.banned):
            if mask:
                bounds[state, : len(mask)] = mask
        self._base = self._tensor(np.concatenate(([0], np.cumsum(sizes)[:-1])))
        self._offset_S = self._tensor(np.concatenate(offsets))
        self._next = self._tensor(np.concatenate([entry.next.ravel() for entry in entries]))
        self._classes = self._tensor(np.stack([entry.classes_V for entry in entries]))
        self._banned_SK2 = self._tensor(bounds)

    def _tensor(self, values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
