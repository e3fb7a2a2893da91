"""Automata on the device: tables of every automaton in use, side by side, and the states of rows.

Shapes: A automata in use, S states of all automata, K ranges that a state bans, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.ops.sample_tables import AutomatonTables
from kestrel.sampling.ranges import Ranges, banned_ranges, ranges_of
from kestrel.spi.decoding import Automaton, TokenSet

__all__ = ["AutomatonBank"]

KEEP = 32  # automata without rows that stay; families share a handful
ROOM = {"base_A": 4, "classes_AV": 4, "offset_S": 256, "num_bounds_S": 256, "bounds_SK2": 256, "next": 1024}
LEAST_BOUNDS = 8

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
    ``generation`` moves when the tables do: with ``has_room`` they are larger than needed and seldom do.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, has_room: bool) -> None:
        self._vocab_size, self._device, self._has_room = vocab_size, device, has_room
        self._entries: dict[int, _Entry] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self.numbers: dict[int, int] = {}
        self.generation = 0
        self._insert(_FREE)
        self._entries[id(_FREE)].rows = 1
        self._upload()

    @property
    def tables(self) -> AutomatonTables:
        """The tables of this generation."""
        return AutomatonTables(**self._tensors)

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
        self._put("base_A", np.concatenate(([0], np.cumsum(sizes)[:-1])))
        self._put("offset_S", np.concatenate(offsets))
        self._put("next", np.concatenate([entry.next.ravel() for entry in entries]))
        self._put("classes_AV", np.stack([entry.classes_V for entry in entries]))
        masks = [mask for entry in entries for mask in entry.banned]
        self._put("num_bounds_S", np.array([len(mask) for mask in masks], dtype=np.int64))
        self._put("bounds_SK2", self._bounds(masks))

    def _bounds(self, masks: list[Ranges]) -> NDArray[np.int64]:
        """Banned ranges of every state; as many per state as any has, or as the tensor has room for."""
        most = max(map(len, masks)) or 1
        if self._has_room:
            held = self._tensors.get("bounds_SK2")
            most = max(1 << (most - 1).bit_length(), LEAST_BOUNDS if held is None else held.shape[1])
        bounds = np.full((len(masks), most, 2), self._vocab_size, dtype=np.int64)
        for state, mask in enumerate(masks):
            if mask:
                bounds[state, : len(mask)] = mask
        return bounds

    def _put(self, name: str, values: NDArray[np.generic]) -> None:
        """Write a table in stream order, into the tensor that holds it when it fits there."""
        shared = torch.from_numpy(np.ascontiguousarray(values))
        held = self._tensors.get(name)
        rest = shared.shape[1:]
        if not self._has_room:
            self._tensors[name] = shared.to(self._device)
            self.generation += 1
            return
        if held is None or held.shape[1:] != rest or held.shape[0] < len(shared):
            room = max(1 << (len(shared) - 1).bit_length(), ROOM[name])
            held = torch.zeros(room, *rest, dtype=shared.dtype, device=self._device)
            self._tensors[name] = held
            self.generation += 1
        if self._device.type == "cuda":
            shared = shared.pin_memory()  # the caching host allocator keeps it alive until the copy ran
        held[: len(shared)].copy_(shared, non_blocking=True)
