"""S for the sequences whose prompts a prefill launch ends: captured per number of rows and kind of sampling.

Op by op the host needs longer for it than the device for a short prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kestrel.device.graphs import Graphs, Program
from kestrel.runner.programs import Chosen, Programs
from kestrel.sampling import Sampler

__all__ = ["FirstTokens"]

log = logging.getLogger("kestrel.runner")

SIZES = (1, 2, 4, 8)  # rows that sample; launches of more keep the device busy meanwhile
MAX_PROGRAMS = 64


@dataclass(slots=True)
class _Size:
    """What the programs of one number of rows read: hidden states and rows. ``met``: kinds that ran once."""

    h_NC: torch.Tensor
    rows_N: torch.Tensor
    choices: dict[int, Program[Chosen]] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)


class FirstTokens:
    """The programs of one model. Results are gone with the next program that runs."""

    def __init__(self, graphs: Graphs, programs: Programs, sampler: Sampler) -> None:
        self._graphs, self._programs, self._sampler = graphs, programs, sampler
        self._sizes: dict[int, _Size] = {}
        self._generation = sampler.generation
        self._left = MAX_PROGRAMS

    def size(self, count: int) -> int:
        """For how many rows a program of ``count`` is made; 0 when there is none."""
        return next((size for size in SIZES if size >= count), 0)

    def launch(
        self, h_TC: torch.Tensor, places_N: torch.Tensor, rows_host: Sequence[int], rows_N: torch.Tensor
    ) -> Chosen:
        """A token after each of ``places_N`` for ``rows_N``, which are as many as ``size`` says."""
        entry = self._entry(h_TC, len(rows_host))
        torch.index_select(h_TC, 0, places_N, out=entry.h_NC)
        entry.rows_N.copy_(rows_N)
        if self._generation != self._sampler.generation:
            self._forget()
        needs = self._sampler.program_of(self._sampler.needs_of(rows_host))
        program = entry.choices.get(needs)
        if program is None:
            program = self._captured(entry, needs)
        return self._choice(entry, needs)() if program is None else program.replay()

    def _entry(self, h_TC: torch.Tensor, count: int) -> _Size:
        if count not in self._sizes:
            self._sizes[count] = _Size(
                h_TC.new_empty((count, *h_TC.shape[1:])),
                torch.zeros(count, dtype=torch.int64, device=h_TC.device),
            )
        return self._sizes[count]

    def _captured(self, entry: _Size, needs: int) -> Program[Chosen] | None:
        """A program for ``needs``, from the second time on: the first run compiles."""
        self._sampler.prepare(needs)
        if needs not in entry.met or not self._left:
            entry.met.add(needs)
            return None
        self._left -= 1
        try:
            program = self._graphs.capture(self._choice(entry, needs))
        except Exception as error:  # nothing ran, so the rows sample op by op
            log.warning("first tokens are sampled op by op: capturing that failed", exc_info=error)
            self._left = 0
            return None
        entry.choices[needs] = program
        return program

    def _choice(self, entry: _Size, needs: int) -> partial[Chosen]:
        return partial(self._programs.choose_packed, entry.h_NC, needs, entry.rows_N)

    def _forget(self) -> None:
        """Sampling's tables moved: programs over the old ones are stale."""
        for entry in self._sizes.values():
            entry.choices.clear()
        self._generation, self._left = self._sampler.generation, MAX_PROGRAMS
