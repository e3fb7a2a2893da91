"""Prefill launches: chunks of one or several sequences side by side, and the tokens that some of them yield."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import torch

from kestrel.device import Staging
from kestrel.runner.chunks import ChunkArrays, ChunkRun, arrays_of
from kestrel.runner.first_tokens import FirstTokens
from kestrel.runner.prefill_programs import PrefillPrograms
from kestrel.runner.programs import Programs
from kestrel.runner.results import Arrival, Pending, ResultRing
from kestrel.runner.rows import RowTables
from kestrel.runner.states import Places, StateMap
from kestrel.spi.batch import Batch, Limits
from kestrel.state import FeaturePool

__all__ = ["PrefillResult", "Prefiller"]

PROBED_AT_ONCE = 32  # positions: each has a row of the whole vocabulary in float32


@dataclass(slots=True)
class PrefillResult:
    """A prefill launch under way: ``pending`` rows are the chunks that sample, in order; ``probes``, once ``wait``
    has returned, are log-probabilities in order of chunk and probe. ``asked``: how many ids each probe names."""

    pending: Pending | None
    probes: list[list[float]]
    arrival: Arrival | None = None
    asked: Sequence[int] = ()

    def wait(self) -> None:
        """Until the probes are on the host."""
        if self.arrival is not None:
            values = iter([value for part in self.arrival.read() for value in part])
            self.probes = [list(islice(values, count)) for count in self.asked]
            self.arrival = None


@dataclass(slots=True)
class _Probes:
    """Probes that are answered together: the P places of their hidden states, and for each of all their ids which of
    these it is about."""

    places_P: torch.Tensor
    which_K: torch.Tensor
    ids_K: torch.Tensor
    counts: list[int]


@dataclass(slots=True)
class _Sampling:
    """Who samples: rows on the host and the device, and the places of their hidden states. ``alive``: the rows in
    front of the padding."""

    rows_host: list[int]
    rows_N: torch.Tensor
    places_N: torch.Tensor
    alive: int


class Prefiller:
    """Launches chunks. ``overlaps``: steps overlap, so rows that sample become alive here. ``pads``: always as many
    rows sample. ``captured`` and ``first_tokens``: programs for launches that have one; the others run op by op."""

    def __init__(
        self,
        programs: Programs,
        states: StateMap,
        rows: RowTables,
        results: ResultRing,
        staging: Staging,
        features: FeaturePool | None,
        *,
        max_rows: int,
        overlaps: bool,
        pads: bool,
    ) -> None:
        self._programs, self._states, self._rows = programs, states, rows
        self._results, self._staging, self._features = results, staging, features
        self._max_rows, self._overlaps, self._pads = max_rows, overlaps, pads
        self.captured: PrefillPrograms | None = None
        self.first_tokens: FirstTokens | None = None

    def launch(self, chunks: Sequence[ChunkRun]) -> PrefillResult:
        """Launch ``chunks``; those that sample make their row alive. What the host changed since the last launch
        goes to the device with what they bring."""
        arrays = arrays_of(chunks, self._states, self._rows)
        sampling = self._sampling(chunks)
        probes = self._probes(chunks)
        h_TC = self._captured_states(arrays)
        if h_TC is None:
            staged = self._put(arrays)
            self._staging.send()
            h_TC = self._programs.forward(self._batch(arrays, staged))
        answers = [
            self._programs.logprobs(h_TC.index_select(0, group.places_P), group.which_K, group.ids_K)
            for group in probes
        ]
        pending = None if sampling is None else self._sample(h_TC, sampling)
        arrival = self._results.fetch(answers) if answers else None
        return PrefillResult(pending, [], arrival, [count for group in probes for count in group.counts])

    def _captured_states(self, arrays: ChunkArrays) -> torch.Tensor | None:
        """Hidden states by a captured program; None where there is none, and nothing was done."""
        if self.captured is None or not self.captured.has(arrays):
            return None
        self._staging.send()
        return self.captured.launch(arrays)

    # -- what goes to the device

    def _put(self, arrays: ChunkArrays) -> dict[str, torch.Tensor]:
        put = self._staging.put
        staged = {name: put(array) for name, array in (arrays.tokens | arrays.sequences).items()}
        staged["aux"] = put(arrays.aux)
        staged["cu"] = put(np.cumsum([0, *arrays.lengths], dtype=np.int32))
        staged["stores"] = put(np.array(arrays.stores, dtype=np.int64).reshape(-1, 3))
        return staged

    def _sampling(self, chunks: Sequence[ChunkRun]) -> _Sampling | None:
        ends = np.cumsum([len(chunk.ids) for chunk in chunks]) - 1
        picked = [(chunk.row, end) for chunk, end in zip(chunks, ends.tolist(), strict=True) if chunk.samples]
        if not picked:
            return None
        alive = len(picked)
        if self.first_tokens is not None and (size := self.first_tokens.size(alive)):
            picked += [(self._rows.scratch, picked[-1][1])] * (size - alive)
        elif self._pads:
            picked += [(self._rows.scratch, picked[-1][1])] * (self._max_rows - alive)
        table = np.array(picked, dtype=np.int64).T
        put = self._staging.put
        return _Sampling([row for row, _ in picked], put(table[0].copy()), put(table[1].copy()), alive)

    def _probes(self, chunks: Sequence[ChunkRun]) -> list[_Probes]:
        starts = accumulate((len(chunk.ids) for chunk in chunks), initial=0)
        found = [
            (start + place, ids)
            for start, chunk in zip(starts, chunks, strict=False)
            for place, ids in chunk.probes
        ]
        groups = [found[at : at + PROBED_AT_ONCE] for at in range(0, len(found), PROBED_AT_ONCE)]
        put = self._staging.put
        return [
            _Probes(
                put(np.array([place for place, _ in group], dtype=np.int64)),
                put(np.repeat(np.arange(len(group), dtype=np.int64), [len(ids) for _, ids in group])),
                put(np.array([i for _, ids in group for i in ids], dtype=np.int64)),
                [len(ids) for _, ids in group],
            )
            for group in groups
        ]

    # -- on the device

    def _batch(self, arrays: ChunkArrays, staged: dict[str, torch.Tensor]) -> Batch:
        limits = Limits(
            max_rows=len(arrays.lengths),
            max_tokens=sum(arrays.lengths),
            max_query_len=max(arrays.lengths),
            max_context_len=arrays.longest,
        )
        width = -(-arrays.longest // self._states.page_size)
        places = Places(
            computed_B=staged["computed"],
            cu_seqlens=staged["cu"],
            limits=limits,
            extents=arrays.extents,
            slots=list(staged["slots"].unbind(0)),
            tables=[table[:, :width].index_select(0, staged["rows"]) for table in self._rows.tables],
            state_slots_B=staged["state_slots"],
            entries_B=staged["entries"],
            lens_B=staged["cross_lens"],
            stores=staged["stores"],
            host_stores=arrays.stores,
            bidirectional_end_T=staged.get("range_ends"),
        )
        return Batch(
            ids_T=staged["ids"],
            aux_TW=staged["aux"],
            media_rows_T=staged["media_rows"],
            positions_PT=staged["positions"],
            cu_seqlens=staged["cu"],
            states=self._states.views(places),
            adapter_slots_B=staged["adapters"],
            limits=limits,
            features_RC=self._features.tensor if self._features is not None and arrays.has_media else None,
            extents=arrays.extents,
            has_aux=bool(arrays.aux.any()),
        )

    def _sample(self, h_TC: torch.Tensor, sampling: _Sampling) -> Pending:
        rows_N = sampling.rows_N
        if self._overlaps:
            self._rows.live.index_fill_(0, rows_N[: sampling.alive], 1)
        if self.first_tokens is not None and self.first_tokens.size(len(sampling.rows_host)):
            chosen = self.first_tokens.launch(h_TC, sampling.places_N, sampling.rows_host, rows_N)
            return self._results.pending(*chosen)
        h_NC = h_TC.index_select(0, sampling.places_N)
        return self._results.pending(self._programs.sample(h_NC, sampling.rows_host, rows_N))
