"""The sequences that decode together, and how long they can go on without the host changing anything."""

from __future__ import annotations

from collections import defaultdict

from kestrel.lanes.sequence import Sequence
from kestrel.runner import DecodeRow, DecodeStage, Runner

__all__ = ["Cohort"]


class Cohort:
    """``members`` in the columns of ``stage``.

    All advance by one position per launch, so what will happen to whom is known in advance: ``crossed`` members enter
    a new page with the next launch, ``short`` ones may lack it, ``last`` ones have had their last token.
    """

    def __init__(self, members: list[Sequence], runner: Runner) -> None:
        self.members = members
        self.is_plain = all(seq.is_plain for seq in members)
        self.stage: DecodeStage = runner.stage(len(members))
        self._runner = runner
        self._page_size = runner.states.page_size
        self._steps = 0
        self._computed = [seq.prompt_len + seq.sampled - 1 for seq in members]
        self._crossing: defaultdict[int, list[int]] = defaultdict(list)  # by launches made, modulo page size
        self._ending: defaultdict[int, list[int]] = defaultdict(list)  # by launches made
        for i, seq in enumerate(members):
            self._crossing[-self._computed[i] % self._page_size].append(i)
            self._ending[seq.limit - seq.sampled].append(i)
        self.short = [i for i, seq in enumerate(members) if self._computed[i] >= seq.held_lease.capacity]
        self.crossed: list[int] = []
        self.last: list[int] = []
        self._is_filled = False

    def wanted(self, member: int) -> int:
        """Positions that ``member`` needs room for in the next launch."""
        return self._computed[member] + self._steps + 1

    def prepare(self) -> None:
        """Everybody has pages: make the stage ready for the next launch."""
        rows = self._runner.rows
        if not self._is_filled:
            for seq in self.members:
                rows.send(seq.row, seq.held_lease)
            self.stage.fill([self._entry(i) for i in range(len(self.members))])
            self._is_filled = True
        elif self.crossed:
            for i in self.crossed:
                rows.send(self.members[i].row, self.members[i].held_lease)
            self.stage.enter_pages(self.crossed)
        self.short = self.crossed = []

    def _entry(self, member: int) -> DecodeRow:
        seq = self.members[member]
        assert seq.prompt is not None
        needs_aux = seq.work.params.needs_aux
        return DecodeRow(seq.row, self._computed[member], seq.prompt.offsets, seq.held_lease, needs_aux)

    def launched(self) -> None:
        """The stage stands one position further; find out for whom that matters."""
        self._steps += 1
        self.crossed = self.short = self._crossing.get(self._steps % self._page_size, [])
        self.last = self._ending.get(self._steps, [])

    def dissolve(self) -> None:
        """Hand the launches made back to the members."""
        for seq in self.members:
            seq.sampled += self._steps
        self._steps = 0
