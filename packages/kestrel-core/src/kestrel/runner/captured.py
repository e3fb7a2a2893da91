"""Decode programs captured per number of rows: F once (and once for rows with bins), S once per kind of sampling.

All of a model's programs share a pool of memory and one stream. F leaves hidden states where every S of its size finds
them; an S leaves its results until the next program runs, so they are sent to the host at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from kestrel.device.graphs import Graphs, Program
from kestrel.runner.decode import DecodeStage
from kestrel.runner.programs import Chosen, Programs
from kestrel.sampling import Sampler
from kestrel.sampling.params import Needs

__all__ = ["DecodePrograms"]

log = logging.getLogger("kestrel.runner")

T = TypeVar("T")

MAX_CHOICES = 256  # programs of rare kinds of sampling; what comes after runs op by op


@dataclass(slots=True, kw_only=True)
class _Size:
    """The programs of one number of rows. ``forwards``: F by whether a row may have bins. ``met``: kinds of sampling
    that ran op by op once."""

    stage: DecodeStage
    forwards: dict[bool, Program[torch.Tensor]] = field(default_factory=dict)
    choices: dict[int, Program[Chosen]] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)


class DecodePrograms:
    """Captured decode steps of one model, for stages of the sizes that ``capture`` was given."""

    def __init__(self, graphs: Graphs, programs: Programs, sampler: Sampler, *, has_aux: bool) -> None:
        self._graphs, self._programs, self._sampler = graphs, programs, sampler
        self._has_aux = has_aux
        self._common = sorted({sampler.program_of(needs) for needs in _common_needs(has_aux)})
        self._sizes: dict[int, _Size] = {}
        self._generation = 0
        self._num_rare = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows for which there are programs, ascending."""
        return tuple(sorted(self._sizes))

    def capture(self, sizes: Sequence[int], make_stage: Callable[[int], DecodeStage]) -> None:
        """Capture F and the common kinds of S for each of ``sizes``; whatever runs meanwhile runs on scratch.

        The largest comes first: the others then fit into the memory that it took.
        """
        for needs in self._common:
            self._sampler.prepare(needs)
        self._generation = self._sampler.generation
        for size in sorted(sizes, reverse=True):
            entry = _Size(stage=make_stage(size))
            entry.stage.blank()
            entry.stage.push()
            for needs in self._common:
                h_NC = self._hidden(entry, self._shows_aux(needs))
                entry.choices[needs] = self._captured(self._choice(h_NC, needs, entry.stage.rows))
                entry.choices[needs].replay()
            self._sizes[size] = entry

    def _hidden(self, entry: _Size, has_aux: bool) -> torch.Tensor:
        """What F of ``entry`` leaves, captured now if it was not."""
        if has_aux not in entry.forwards:
            entry.forwards[has_aux] = self._captured(partial(self._forward, entry.stage, has_aux))
            entry.stage.forget()
        return entry.forwards[has_aux].replay()

    def stage(self, count: int) -> DecodeStage:
        """The stage of the smallest program for ``count`` rows."""
        return self._sizes[min(size for size in self._sizes if size >= count)].stage

    def launch(self, stage: DecodeStage) -> Chosen:
        """Replay F and S of ``stage``, whose rows were pushed. The results are gone with the next launch."""
        entry = self._sizes[stage.size]
        if self._generation != self._sampler.generation:
            self._forget_choices()
        if stage.needs is None:
            stage.needs = self._sampler.program_of(self._sampler.needs_of(stage.rows_host))
        needs = stage.needs
        h_NC = entry.forwards[self._shows_aux(needs)].replay()
        program = entry.choices.get(needs)
        if program is None:
            program = self._rare(entry, h_NC, needs)
        return self._choice(h_NC, needs, stage.rows)() if program is None else program.replay()

    def _rare(self, entry: _Size, h_NC: torch.Tensor, needs: int) -> Program[Chosen] | None:
        """A program for what no program was captured for, from the second time on: the first run compiles."""
        if needs not in entry.met or self._num_rare >= MAX_CHOICES:
            entry.met.add(needs)
            self._sampler.prepare(needs)
            return None
        self._num_rare += 1
        self._sampler.prepare(needs)
        try:
            program = self._graphs.capture(self._choice(h_NC, needs, entry.stage.rows))
        except Exception as error:  # nothing ran, so the rows sample op by op as they did before
            log.warning("rare kinds of sampling run op by op: capturing one failed", exc_info=error)
            self._num_rare = MAX_CHOICES
            return None
        entry.choices[needs] = program
        return program

    def _forget_choices(self) -> None:
        """Sampling's tables moved: what was captured over the old ones reads memory that is no longer theirs. What is
        still asked for is captured again when it is."""
        for entry in self._sizes.values():
            entry.met.update(entry.choices)
            entry.choices.clear()
        self._generation = self._sampler.generation
        self._num_rare = 0

    def _captured(self, run: Callable[[], T]) -> Program[T]:
        for _ in range(2):  # the first makes what is made once, the second what it left to the next
            self._graphs.rehearse(run)
        return self._graphs.capture(run)

    def _shows_aux(self, needs: int) -> bool:
        return self._has_aux and bool(needs & Needs.AUX)

    def _forward(self, stage: DecodeStage, has_aux: bool) -> torch.Tensor:
        return self._programs.forward(stage.take_in(has_aux))

    def _choice(self, h_NC: torch.Tensor, needs: int, rows_N: torch.Tensor) -> Callable[[], Chosen]:
        return partial(self._programs.choose_packed, h_NC, needs, rows_N)


def _common_needs(has_aux: bool) -> list[int]:
    """The kinds of sampling that nearly all requests are of: greedy, drawn, drawn from a few; with masks; with bins."""
    kinds = [Needs.STOP, Needs.STOP | Needs.DRAW, Needs.STOP | Needs.DRAW | Needs.SORT | Needs.MIN_P]
    kinds += [kind | Needs.BIAS for kind in kinds]
    if has_aux:
        kinds += [kind | Needs.AUX for kind in kinds]
    return [int(kind) for kind in kinds]
