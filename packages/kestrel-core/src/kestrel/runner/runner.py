"""Runs plans of one model: stages them, launches F and S, hands results back. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kestrel.runner.decode import DecodeStage
from kestrel.runner.mirror import to_device
from kestrel.runner.prefill import ChunkRun, prefill_batch
from kestrel.runner.programs import Programs
from kestrel.runner.results import Pending, on_host
from kestrel.runner.rows import RowTables
from kestrel.runner.states import StateMap
from kestrel.sampling import Sampler
from kestrel.spi.batch import CrossView, Limits
from kestrel.spi.driver import TokenDriver
from kestrel.state import FeaturePool, Lease, StateCache
from kestrel.types import Prepared

__all__ = ["PrefillResult", "Runner"]


@dataclass(slots=True)
class PrefillResult:
    """A prefill launch under way: ``pending`` rows are the chunks that sample, in order; ``probes`` hold, in order
    of chunk and probe, log-probabilities on their way to the host (complete when ``pending`` or ``event`` is)."""

    pending: Pending | None
    probes: list[torch.Tensor]
    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until everything is on the host."""
        if self.event is not None:
            self.event.synchronize()  # sync: probes are read after this


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
    ) -> None:
        spec = driver.spec
        self._driver, self._features, self._device = driver, features, device
        self._max_rows, self._max_len, self._overlaps, self._pads = max_rows, max_len, overlaps, pads
        self.states = StateMap.of(spec, cache)
        self.rows = RowTables(
            self.states, max_rows=max_rows, max_len=max_len, aux_width=spec.aux_width, device=device
        )
        self._programs = Programs(driver, sampler, self.rows, tracks_life=overlaps)
        self._stages: dict[int, DecodeStage] = {}

    # -- decode

    def stage(self, count: int) -> DecodeStage:
        """The buffers for ``count`` decoding rows (with ``pads`` always the same ones)."""
        size = self._max_rows if self._pads else count
        if size not in self._stages:
            self._stages[size] = DecodeStage(
                self.states,
                self.rows,
                size=size,
                position_rows=self._driver.spec.position_rows,
                max_len=self._max_len,
                tracks_life=self._overlaps,
                device=self._device,
                is_deterministic=self._pads,
            )
        return self._stages[size]

    def decode(self, stage: DecodeStage) -> Pending:
        """Launch one token for each row of ``stage``; then the stage stands one position further."""
        h_TC = self._programs.forward(stage.ready())
        pending = Pending(self._programs.sample(h_TC, stage.rows_host, stage.rows))
        stage.advance()
        return pending

    # -- prefill

    def prefill(self, chunks: Sequence[ChunkRun]) -> PrefillResult:
        """Launch ``chunks``; those that sample make their row alive."""
        features_RC = None if self._features is None else self._features.tensor
        h_TC = self._programs.forward(
            prefill_batch(chunks, self.states, self.rows, features_RC, self._device)
        )
        probes = self._probes(chunks, h_TC)
        pending = self._sample(chunks, h_TC)
        event = None
        if probes and self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record()
        return PrefillResult(pending, probes, event)

    def _sample(self, chunks: Sequence[ChunkRun], h_TC: torch.Tensor) -> Pending | None:
        ends = np.cumsum([len(chunk.ids) for chunk in chunks]) - 1
        picked = [(chunk.row, end) for chunk, end in zip(chunks, ends.tolist(), strict=True) if chunk.samples]
        if not picked:
            return None
        count = len(picked)
        if self._pads:
            picked += [(self.rows.scratch, picked[-1][1])] * (self._max_rows - count)
        rows_host = [row for row, _ in picked]
        index = to_device(np.array([end for _, end in picked], dtype=np.int64), self._device)
        rows_N = to_device(np.array(rows_host, dtype=np.int64), self._device)
        if self._overlaps:
            self.rows.live.index_fill_(0, rows_N[:count], 1)
        return Pending(self._programs.sample(h_TC.index_select(0, index), rows_host, rows_N))

    def _probes(self, chunks: Sequence[ChunkRun], h_TC: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        start = 0
        for chunk in chunks:
            for place, ids in chunk.probes:
                wanted = to_device(np.array(ids, dtype=np.int64), self._device)
                at = start + place
                found.append(on_host(self._programs.logprobs(h_TC[at : at + 1], wanted)[0]))
            start += len(chunk.ids)
        return found

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

    # -- media

    def encode(self, kind: str, items: Sequence[Prepared]) -> torch.Tensor:
        """Features of ``items``, concatenated."""
        return self._driver.encode(kind, items)

    def write_cross(self, items: Sequence[Prepared], leases: Sequence[Lease]) -> None:
        """Encode ``items`` of one kind, one per lease, and project each into its lease's cross entry."""
        encoded = self.encode(items[0].kind, items)
        share = encoded.shape[0] // len(items)
        lengths = [item.cross_positions or share for item in items]
        name = self.states.cross[0]
        entries = np.array([lease.cross_entry(name)[0] for lease in leases], dtype=np.int64)
        limits = Limits(
            max_rows=len(items),
            max_tokens=encoded.shape[0],
            max_query_len=max(lengths),
            max_context_len=max(lengths),
        )
        cu = to_device(np.cumsum([0, *lengths], dtype=np.int32), self._device)
        entries_B = to_device(entries, self._device)
        lens_B = to_device(np.array(lengths, dtype=np.int32), self._device)
        views: Mapping[str, CrossView] = {
            name: self.states.cross_view(name, entries_B, lens_B, cu, limits, None)
            for name in self.states.cross
        }
        self._driver.write_cross(encoded, items, views)
        for lease, length in zip(leases, lengths, strict=True):
            lease.cross_written(length)
