"""Runs plans of one model: stages them, launches F and S, hands results back. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kestrel.device.graphs import Graphs
from kestrel.ops import OpTable, resolve_ops
from kestrel.runner.chunks import ChunkRun
from kestrel.runner.decode import DecodeStage
from kestrel.runner.decoder import Decoder
from kestrel.runner.encoders import Encoders
from kestrel.runner.first_tokens import FirstTokens
from kestrel.runner.prefill import Prefiller, PrefillResult
from kestrel.runner.prefill_programs import PrefillPrograms
from kestrel.runner.programs import Programs
from kestrel.runner.results import Pending, ResultRing
from kestrel.runner.rows import RowTables
from kestrel.runner.states import StateMap
from kestrel.sampling import Sampler
from kestrel.spi.backend import OpQuery
from kestrel.spi.driver import TokenDriver
from kestrel.state import FeaturePool, Lease, StateCache
from kestrel.types import Prepared

__all__ = ["Runner"]


class Runner:
    """Everything between a plan and the driver. ``overlaps``: steps are launched before earlier ones are read."""

    def __init__(
        self,
        driver: TokenDriver,
        cache: StateCache,
        sampler: Sampler,
        features: FeaturePool | None,
        *,
        max_rows: int,
        max_len: int,
        overlaps: bool,
        device: torch.device,
        pads: bool = False,
        ops: OpTable | None = None,
    ) -> None:
        """``ops``: who serves what launches begin and end with; None: the references."""
        spec = driver.spec
        self._driver, self._sampler, self._device, self._features = driver, sampler, device, features
        self._max_rows, self._max_len, self._overlaps, self._pads = max_rows, max_len, overlaps, pads
        self.states = StateMap.of(spec, cache)
        self.staging = sampler.staging
        self.rows = RowTables(
            self.states, self.staging, max_rows=max_rows, max_len=max_len, aux_width=spec.aux_width
        )
        ops = resolve_ops() if ops is None else ops
        self._row_inputs = ops.resolve(OpQuery.of("row_inputs"))
        self._programs = Programs(driver, sampler, self.rows, ops, tracks_life=overlaps)
        self._results = ResultRing(device)
        self._prefiller = Prefiller(
            self._programs,
            self.states,
            self.rows,
            self._results,
            self.staging,
            features,
            max_rows=max_rows,
            overlaps=overlaps,
            pads=pads,
        )
        self._encoders = Encoders(driver, self.states, self.staging)
        self._decoder = Decoder(
            self._programs,
            sampler,
            self._results,
            self._make_stage,
            max_rows=max_rows,
            pads=pads,
            device=device,
        )

    # -- decode

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Numbers of rows for which decode programs are captured; none: every launch runs op by op."""
        return self._decoder.captured_sizes

    @property
    def captured_prefills(self) -> tuple[int, ...]:
        """Numbers of tokens for which prefill programs are captured."""
        return () if self._prefiller.captured is None else self._prefiller.captured.sizes

    def stage(self, count: int) -> DecodeStage:
        """The buffers for ``count`` decoding rows (with ``pads`` always the same ones)."""
        return self._decoder.stage(count)

    def _make_stage(self, size: int, captured: bool) -> DecodeStage:
        return DecodeStage(
            self.states,
            self.rows,
            size=size,
            position_rows=self._driver.spec.position_rows,
            max_len=self._max_len,
            tracks_life=self._overlaps,
            device=self._device,
            row_inputs=self._row_inputs,
            is_deterministic=self._pads,
            captured=captured,
        )

    def decode(self, stage: DecodeStage) -> Pending:
        """Launch one token for each row of ``stage``; then the stage stands one position further."""
        self.staging.send()
        return self._decoder.launch(stage)

    # -- prefill

    def prefill(self, chunks: Sequence[ChunkRun]) -> PrefillResult:
        """Launch ``chunks``; those that sample make their row alive."""
        return self._prefiller.launch(chunks)

    # -- before the first request

    def warm_up(self) -> None:
        """Launch a prompt of two tokens and its continuation on scratch: nobody's, and nothing is kept of it.

        What a device, its libraries and their thread pools do at their first launch is then done.
        """
        spec, scratch = self._driver.spec, self.rows.scratch
        prompt = ChunkRun(
            row=scratch,
            lease=None,
            start=0,
            ids=np.zeros(2, dtype=np.int64),
            aux=np.zeros((2, spec.aux_width), dtype=np.int64),
            positions=np.tile(np.arange(2, dtype=np.int64), (spec.position_rows, 1)),
            samples=True,
        )
        stage = self.stage(1)
        stage.blank()
        for pending in (self.prefill([prompt]).pending, self.decode(stage)):
            assert pending is not None
            pending.read()
        self.rows.unbind(scratch)

    def capture(self, graphs: Graphs, *, decode: bool = True) -> None:
        """Let encoders be captured as they come, and capture ``decode`` now: after ``warm_up``, before the first
        sequence. Raises what a call raises that cannot be captured; decode launches then run op by op, as before."""
        self._encoders.graphs = graphs
        if not decode:
            return
        try:
            self.staging.send()
            self._decoder.capture(graphs, has_aux=self._driver.spec.aux_width > 0)
        finally:
            self.rows.unbind(self.rows.scratch)

    def capture_prefill(self, max_tokens: int) -> None:
        """Capture prefill launches of up to ``max_tokens``, after ``capture``, which says with what. Raises as that."""
        spec, graphs = self._driver.spec, self._encoders.graphs
        assert graphs is not None, "capture comes first"
        captured = PrefillPrograms(
            graphs=graphs,
            programs=self._programs,
            states=self.states,
            rows=self.rows,
            features=self._features,
            aux_width=spec.aux_width,
            position_rows=spec.position_rows,
            max_len=self._max_len,
            device=self._device,
        )
        self.staging.send()
        try:
            captured.capture(max_tokens)
        finally:
            graphs.tidy()
        self._prefiller.captured = captured
        if not self._pads:  # else as many rows sample whatever comes
            self._prefiller.first_tokens = FirstTokens(graphs, self._programs, self._sampler)

    @property
    def captures(self) -> bool:
        """Whether launches are captured at all."""
        return self._encoders.graphs is not None

    def capture_cross(self, item: Prepared, max_items: int) -> None:
        """Capture encoder launches of up to ``max_items`` items like ``item``, which go to cross entries; after
        ``capture``. Raises what a launch raises."""
        self._encoders.capture_cross(item, max_items)

    # -- media

    def encode(self, kind: str, items: Sequence[Prepared]) -> torch.Tensor:
        """Features of ``items``, concatenated."""
        return self._encoders.encode(kind, items)

    def write_cross(self, items: Sequence[Prepared], leases: Sequence[Lease]) -> None:
        """Encode ``items`` of one kind, one per lease, and project each into its lease's cross entry."""
        self._encoders.write_cross(items, leases)
