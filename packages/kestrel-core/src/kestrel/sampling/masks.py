"""What may not follow: ids that a row's Static windows, automata or host mask ban; and groups preferred to the rest.

Masks are kept as the ranges that they ban, so intersecting what they allow is a union. Here they are written; the ops
apply them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.ops.sample_tables import RowList
from kestrel.sampling.automata import AutomatonBank
from kestrel.sampling.params import ALWAYS, SamplingParams
from kestrel.sampling.ranges import banned_ranges, ranges_of
from kestrel.sampling.records import Field, Records
from kestrel.spi.decoding import Automaton, LogitRule, TokenSet

__all__ = ["LogitRules", "Masks"]


class Masks:
    """The masks of every row: their ranges in ``records``, their automata in ``bank``."""

    def __init__(self, vocab_size: int, records: Records, bank: AutomatonBank) -> None:
        self._vocab_size, self._records, self._bank = vocab_size, records, bank
        self._held: dict[int, tuple[Automaton, ...]] = {}

    def set(self, row: int, params: SamplingParams, history: Sequence[int]) -> None:
        """Rules of a new row whose output so far is ``history``."""
        statics = [
            (start, end, rule.first, ALWAYS if rule.last is None else rule.last)
            for rule in params.statics
            for start, end in banned_ranges(rule.allowed, self._vocab_size)
        ]
        self._records.put(row, "statics", statics)
        if not params.automata:
            return
        renumbered = self._bank.acquire(params.automata)
        self._held[row] = params.automata
        self._records.put(row, "states", [(self._bank.walk(a, history),) for a in params.automata])
        if renumbered:
            for other in self._held:
                self._number(other)
        else:
            self._number(row)

    def clear(self, row: int) -> None:
        """The row has given its automata back."""
        self._bank.release(self._held.pop(row, ()))

    def set_host(self, row: int, allowed: TokenSet) -> None:
        """What the row's host rules allow next."""
        self._records.put(row, "hosts", banned_ranges(allowed, self._vocab_size))

    def _number(self, row: int) -> None:
        self._records.put(row, "automata", [(self._bank.numbers[id(a)],) for a in self._held[row]])


class LogitRules:
    """ "prefer_group" rules of every row, applied in order to the masked logits; each place has two lists."""

    def __init__(self, vocab_size: int, records: Records, *, places: int, width: int) -> None:
        self._vocab_size, self._records, self._width = vocab_size, records, width
        self._places = 0
        for _ in range(places):
            self._add()

    def set(self, row: int, rules: Sequence[LogitRule]) -> None:
        """Rules of a row (none: its logits stay as they are)."""
        while self._places < len(rules):
            self._add()
        for place, rule in enumerate(rules):
            for part in ("group", "unless"):
                tokens = rule.params.get(part, TokenSet())
                self._records.put(row, f"{part} {place}", ranges_of(tokens, self._vocab_size))

    @property
    def lists(self) -> tuple[tuple[RowList, RowList], ...]:
        """Groups and what they leave alone, by place."""
        places = range(self._places)
        return tuple((self._records.list(f"group {p}"), self._records.list(f"unless {p}")) for p in places)

    def _add(self) -> None:
        off = Field((self._vocab_size, self._vocab_size), self._width)
        self._records.add({f"group {self._places}": off, f"unless {self._places}": off})
        self._places += 1
