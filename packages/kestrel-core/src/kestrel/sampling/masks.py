"""What may not follow: ids that a row's Static windows, automata or host mask ban; then logit rules.

Masks are kept as the ranges that they ban, so intersecting what they allow is a union.
Shapes: N rows, V vocabulary, K ranges, A automata per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kestrel.sampling.automata import AutomatonBank
from kestrel.sampling.params import ALWAYS, Needs, SamplingParams
from kestrel.sampling.ranges import banned_ranges, covered_by, ranges_of
from kestrel.sampling.table import RowLists
from kestrel.spi.decoding import Automaton, LogitRule, TokenSet

__all__ = ["LogitRules", "Masks"]


class Masks:
    """The masks of every row and the automaton states behind them, on the device."""

    def __init__(self, vocab_size: int, rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._bank = AutomatonBank(vocab_size, device)
        off = (vocab_size, vocab_size)
        self._static = RowLists(rows, (*off, 0, 0), device=device)  # start, end, first, last
        self._host = RowLists(rows, off, device=device)
        self._automata = RowLists(rows, (0, 0), device=device)  # number in the bank, state
        self._held: dict[int, tuple[Automaton, ...]] = {}

    def set(self, row: int, params: SamplingParams, history: Sequence[int]) -> None:
        """Rules of a new row whose output so far is ``history``."""
        self._static.set(
            row,
            [
                (start, end, rule.first, ALWAYS if rule.last is None else rule.last)
                for rule in params.statics
                for start, end in banned_ranges(rule.allowed, self._vocab_size)
            ],
        )
        renumbered = self._bank.acquire(params.automata)
        self._held[row] = params.automata
        self._automata.set(row, [(self._number(a), self._bank.walk(a, history)) for a in params.automata])
        if renumbered:
            self._rewrite_numbers()

    def clear(self, row: int) -> None:
        """The row has no rules."""
        self._static.set(row, ())
        self._automata.set(row, ())
        self._host.set(row, ())
        self._bank.release(self._held.pop(row, ()))

    def set_host(self, row: int, allowed: TokenSet) -> None:
        """What the row's host rules allow next."""
        self._host.set(row, banned_ranges(allowed, self._vocab_size))

    def banned(self, rows: torch.Tensor, index_N: torch.Tensor, needs: Needs) -> torch.Tensor:
        """The ids [N, V] that a mask of the row bans at its output index.

        Only the kinds in ``needs`` are looked at; a row without masks of a kind bans nothing there.
        """
        parts = list(self._parts(rows, index_N, needs))
        if len(parts) == 1:
            return covered_by(*parts[0], self._vocab_size)
        is_on = [torch.ones_like(b[..., 0], dtype=torch.bool) if on is None else on for b, on in parts]
        return covered_by(torch.cat([b for b, _ in parts], 1), torch.cat(is_on, 1), self._vocab_size)

    def _parts(
        self, rows: torch.Tensor, index_N: torch.Tensor, needs: Needs
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Bounds [N, K, 2] per kind of mask, and which of them are on (None: all)."""
        if needs & Needs.STATIC:
            static_NK4 = self._static.of(rows)
            index_N1 = index_N[:, None]
            yield static_NK4[..., :2], (static_NK4[..., 2] <= index_N1) & (index_N1 < static_NK4[..., 3])
        if needs & Needs.AUTOMATA:
            yield self._bank.banned(*self._automata.of(rows).unbind(-1)), None
        if needs & Needs.HOST:
            yield self._host.of(rows), None

    def advance(self, rows: torch.Tensor, ids_N: torch.Tensor) -> None:
        """Automata take one token per row."""
        numbers_NA, states_NA = self._automata.of(rows).unbind(-1)
        self._automata.values[rows, :, 1] = self._bank.advance(numbers_NA, states_NA, ids_N)

    def _number(self, automaton: Automaton) -> int:
        return self._bank.numbers[id(automaton)]

    def _rewrite_numbers(self) -> None:
        for row, automata in self._held.items():
            for column, automaton in enumerate(automata):
                self._automata.values[row, column, 0] = self._number(automaton)


class LogitRules:
    """ "prefer_group" rules of every row, applied in order to the masked logits."""

    def __init__(self, vocab_size: int, rows: int, device: torch.device) -> None:
        self._vocab_size, self._rows, self._device = vocab_size, rows, device
        self._groups: list[RowLists] = []
        self._unless: list[RowLists] = []

    def set(self, row: int, rules: Sequence[LogitRule]) -> None:
        """Rules of a row (none: its logits stay as they are)."""
        while len(self._groups) < len(rules):
            off = (self._vocab_size, self._vocab_size)
            self._groups.append(RowLists(self._rows, off, device=self._device))
            self._unless.append(RowLists(self._rows, off, device=self._device))
        for place, (group, unless) in enumerate(zip(self._groups, self._unless, strict=True)):
            params = rules[place].params if place < len(rules) else {}
            group.set(row, ranges_of(params.get("group", TokenSet()), self._vocab_size))
            unless.set(row, ranges_of(params.get("unless", TokenSet()), self._vocab_size))

    def apply(self, logits_NV: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits with everything outside a preferred group masked; ``unless`` ids stay as they are."""
        for groups, unless in zip(self._groups, self._unless, strict=True):
            free_NV = self._member(unless, rows)
            inside_NV = self._member(groups, rows) & ~free_NV
            outside_NV = ~inside_NV & ~free_NV
            mass_N = logits_NV.masked_fill(~inside_NV, -torch.inf).logsumexp(1)
            best_N = logits_NV.masked_fill(~outside_NV, -torch.inf).amax(1)
            logits_NV = logits_NV.masked_fill(outside_NV & (mass_N > best_N)[:, None], -torch.inf)
        return logits_NV

    def _member(self, ranges: RowLists, rows: torch.Tensor) -> torch.Tensor:
        return covered_by(ranges.of(rows), None, self._vocab_size)
