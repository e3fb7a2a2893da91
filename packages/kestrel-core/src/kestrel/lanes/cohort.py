"""The sequences that decode together, and how long they can go on without the host changing anything."""

from __future__ import annotations

import numpy as np

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
        self._left = np.array([seq.limit - seq.sampled for seq in members])
        entries = []
        for seq in members:
            assert seq.prompt is not None
            computed = seq.prompt_len + seq.sampled - 1
            entries.append(DecodeRow(seq.row, computed, seq.prompt.offsets, seq.held_lease))
        self.short = [i for i, entry in enumerate(entries) if entry.computed >= entry.lease.capacity]
        self._entries = entries
        self._is_filled = False
        self._quiet = 0
        self.crossed: list[int] = []
        self.last: list[int] = []

    def wanted(self) -> list[tuple[int, int]]:
        """(member, positions it needs room for) of those that may lack pages for the next launch."""
        if self._is_filled:
            return [(i, int(self.stage.computed[i]) + 1) for i in self.short]
        return [(i, self._entries[i].computed + 1) for i in self.short]

    def prepare(self) -> None:
        """Everybody has pages: make the stage ready for the next launch."""
        for seq in [self.members[i] for i in self.short] if self._is_filled else self.members:
            self._runner.rows.send(seq.row, seq.held_lease)
        if not self._is_filled:
            self.stage.fill(self._entries)
            self._is_filled = True
            self._count_quiet()
        elif self.crossed:
            self.stage.place(np.array(self.crossed))
        self.short = self.crossed = []

    def launched(self) -> None:
        """The stage stands one position further; find out for whom that matters."""
        self._steps += 1
        self._quiet -= 1
        if self._quiet > 0:
            return
        computed = self.stage.computed
        self.crossed = np.flatnonzero(computed % self._page_size == 0).tolist()
        self.last = np.flatnonzero(self._left == self._steps).tolist()
        self.short = self.crossed
        self._count_quiet()

    def _count_quiet(self) -> None:
        """Launches until somebody fills a page or reaches its limit."""
        to_boundary = self._page_size - self.stage.computed % self._page_size
        self._quiet = int(min(to_boundary.min(), (self._left - self._steps).min()))

    def dissolve(self) -> None:
        """Hand the launches made back to the members."""
        for seq in self.members:
            seq.sampled += self._steps
        self._steps = 0
