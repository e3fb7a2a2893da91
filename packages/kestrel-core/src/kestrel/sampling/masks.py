"""What may follow: Static windows, automata and host masks of every row, intersected; then logit rules.

Shapes: N rows, V vocabulary, K ranges, A automata per row, M masks per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.sampling.automata import AutomatonBank
from kestrel.sampling.params import Needs, SamplingParams
from kestrel.sampling.ranges import allowed_by, ranges_of
from kestrel.sampling.table import RowLists
from kestrel.spi.decoding import Automaton, LogitRule, TokenSet

__all__ = ["LogitRules", "Masks"]

_ALWAYS = 2**62


class Masks:
    """The masks of every row and the automaton states behind them, on the device."""

    def __init__(self, vocab_size: int, rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._bank = AutomatonBank(vocab_size, device)
        off = (vocab_size, vocab_size)
        self._static_ranges = RowLists(rows, (*off, 0, 0), device=device)  # start, end, first, last
        self._windows = RowLists(rows, (0, 0), device=device)  # first, last
        self._host_ranges = RowLists(rows, off, device=device)
        self._automata = RowLists(rows, (0, 0), device=device)  # number in the bank, state
        self._held: dict[int, tuple[Automaton, ...]] = {}
        for row in range(rows):
            self.set_host(row, TokenSet.all())

    def set(self, row: int, params: SamplingParams, history: Sequence[int]) -> None:
        """Rules of a new row whose output so far is ``history``."""
        windows, ranges = [], []
        for rule in params.statics:
            window = (rule.first, _ALWAYS if rule.last is None else rule.last)
            windows.append(window)
            ranges += [(*pair, *window) for pair in ranges_of(rule.allowed, self._vocab_size)]
        self._windows.set(row, windows)
        self._static_ranges.set(row, ranges)
        renumbered = self._bank.acquire(params.automata)
        self._held[row] = params.automata
        self._automata.set(row, [(self._number(a), self._bank.walk(a, history)) for a in params.automata])
        if renumbered:
            self._rewrite_numbers()

    def clear(self, row: int) -> None:
        """The row has no rules."""
        self._windows.set(row, ())
        self._static_ranges.set(row, ())
        self._automata.set(row, ())
        self.set_host(row, TokenSet.all())
        self._bank.release(self._held.pop(row, ()))

    def set_host(self, row: int, allowed: TokenSet) -> None:
        """What the row's host rules allow next."""
        self._host_ranges.set(row, ranges_of(allowed, self._vocab_size))

    def allowed(self, rows: torch.Tensor, index_N: torch.Tensor, needs: Needs) -> torch.Tensor:
        """The ids [N, V] that every mask of the row allows at its output index.

        Only the kinds in ``needs`` are looked at; a row without masks of a kind allows everything there.
        """
        bounds, is_on, num_masks_N = [], [], torch.zeros_like(index_N)
        if needs & Needs.STATIC:
            static_NK4, windows_NM2 = self._static_ranges.values[rows], self._windows.values[rows]
            bounds.append(static_NK4[..., :2])
            is_on.append(_inside(index_N, static_NK4[..., 2:]))
            num_masks_N = num_masks_N + _inside(index_N, windows_NM2).sum(1)
        if needs & Needs.AUTOMATA:
            numbers_NA, states_NA = self._automata.values[rows].unbind(-1)
            bounds.append(self._bank.bounds(numbers_NA, states_NA))
            num_masks_N = num_masks_N + numbers_NA.shape[1]
        if needs & Needs.HOST:
            bounds.append(self._host_ranges.values[rows])
            num_masks_N = num_masks_N + 1
        is_on += [torch.ones_like(part[..., 0], dtype=torch.bool) for part in bounds[len(is_on) :]]
        return allowed_by(torch.cat(bounds, 1), torch.cat(is_on, 1), num_masks_N, self._vocab_size)

    def advance(self, rows: torch.Tensor, ids_N: torch.Tensor) -> None:
        """Automata take one token per row."""
        numbers_NA, states_NA = self._automata.values[rows].unbind(-1)
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
        bounds_NK2 = ranges.values[rows]
        is_on_NK = torch.ones_like(bounds_NK2[..., 0], dtype=torch.bool)
        return allowed_by(bounds_NK2, is_on_NK, torch.ones_like(rows), self._vocab_size)


def _inside(index_N: torch.Tensor, windows_NM2: torch.Tensor) -> torch.Tensor:
    """Whether the output index lies in each window, [N, M]."""
    return (windows_NM2[..., 0] <= index_N[:, None]) & (index_N[:, None] < windows_NM2[..., 1])
