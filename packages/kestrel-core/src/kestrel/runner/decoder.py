"""Launches decode steps: captured programs where there are any, else op by op."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kestrel.device.graphs import Graphs
from kestrel.runner.buckets import row_buckets
from kestrel.runner.captured import DecodePrograms
from kestrel.runner.decode import DecodeStage
from kestrel.runner.programs import Programs
from kestrel.runner.results import Pending, ResultRing
from kestrel.sampling import Sampler

__all__ = ["Decoder"]


class Decoder:
    """The decode steps of one model of up to ``max_rows`` rows. ``make_stage(size, captured)`` makes buffers.

    ``pads``: all launches have ``max_rows`` rows, however few decode.
    """

    def __init__(
        self,
        programs: Programs,
        sampler: Sampler,
        ring: ResultRing,
        make_stage: Callable[[int, bool], DecodeStage],
        *,
        max_rows: int,
        pads: bool,
        device: torch.device,
    ) -> None:
        self._programs, self._sampler, self._ring, self._make_stage = programs, sampler, ring, make_stage
        self._max_rows, self._pads, self._device = max_rows, pads, device
        self._stages: dict[int, DecodeStage] = {}
        self._captured: DecodePrograms | None = None

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Numbers of rows for which programs are captured; none: every launch runs op by op."""
        return () if self._captured is None else self._captured.sizes

    def capture(self, graphs: Graphs, *, has_aux: bool) -> None:
        """Capture programs for every number of rows. Raises what a call raises that cannot be captured."""
        sizes = (self._max_rows,) if self._pads else row_buckets(self._max_rows)
        captured = DecodePrograms(graphs, self._programs, self._sampler, has_aux=has_aux)
        try:
            captured.capture(sizes, lambda size: self._make_stage(size, True))
        finally:
            graphs.tidy()
        self._captured = captured
        self._stages.clear()

    def stage(self, count: int) -> DecodeStage:
        """The buffers for ``count`` decoding rows."""
        if self._captured is not None:
            return self._captured.stage(count)
        size = self._max_rows if self._pads else count
        if size not in self._stages:
            self._stages[size] = self._make_stage(size, False)
        return self._stages[size]

    def launch(self, stage: DecodeStage) -> Pending:
        """One token for each row of ``stage``; then the stage stands one position further."""
        if self._captured is not None and stage.is_captured:
            stage.push()
            sampled, packed = self._captured.launch(stage)
            pending = self._ring.pending(sampled, packed)
        else:
            h_TC = self._programs.forward(stage.ready())
            pending = self._ring.pending(self._programs.sample(h_TC, stage.rows_host, stage.rows))
        stage.advance()
        return pending
