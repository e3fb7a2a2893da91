"""Logits to token ids, aux bins and log-probabilities, for every row of a step at once.

Per-row state lives on the device, keyed by row, and is written by ``set_row``, ``clear_row``, ``force`` and by
sampling itself; nothing here waits for the device. A row's result depends on its own parameters and history alone,
never on its neighbours.

Shapes: N rows of a step, V vocabulary, W aux width, C hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kestrel.config import MAX_TOP_LOGPROBS
from kestrel.device import Staging
from kestrel.ops import OpTable
from kestrel.sampling.host_draw import draw_on_host
from kestrel.sampling.host_process import process_on_host
from kestrel.sampling.params import Needs, SamplingParams
from kestrel.sampling.rows import SampleRows
from kestrel.sampling.sample_ops import SampleOps
from kestrel.sampling.sampled import RowStatus, Sampled
from kestrel.spi.decoding import TokenSet
from kestrel.spi.driver import TokenSpec
from kestrel.types import Token

__all__ = ["Sampler"]

AuxFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_FILTERS = Needs.SORT | Needs.MIN_P  # few tokens are left to draw from
_CAN_EMPTY = Needs.STATIC | Needs.AUTOMATA | Needs.HOST | Needs.BIAS | Needs.LOGIT_RULES
_CHANGED = _CAN_EMPTY | Needs.PENALTIES  # the logits are not the model's
_PLAIN = Needs.STOP | Needs.AUX  # a row that needs no more is an argmax


class _Blank(NamedTuple):
    """Zeros for N rows, shared by steps in which no row has bins, stop ids or faults."""

    aux_NW: torch.Tensor
    stopped_N: torch.Tensor
    status_N: torch.Tensor


class Sampler:
    """Sampling of one model. Row ``max_rows`` is scratch: padding of a step may name it, any number of times.

    What the host writes reaches the device with ``staging.send()``, once before each launch. ``branch_free``: no
    value is looked at, as captured programs need it; else (the default on a CPU) looks save operations.
    ``logits_dtype``, when it is known, resolves the ops of ``ops`` now.
    """

    def __init__(
        self,
        spec: TokenSpec,
        max_rows: int,
        device: torch.device,
        *,
        ops: OpTable | None = None,
        staging: Staging | None = None,
        branch_free: bool | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        rows = max_rows + 1
        self._spec, self._device = spec, device
        self.staging = Staging(device) if staging is None else staging
        self._looks = device.type == "cpu" if branch_free is None else not branch_free
        # Bits of Needs by row: plain numbers are joined over the rows in a tenth of the time.
        self._needs = [0] * rows
        self._in_use: set[int] = set()
        self._with_hosts: set[int] = set()
        self._rows = SampleRows(spec.vocab_size, rows, self.staging, has_room=not self._looks)
        self._top_count = min(MAX_TOP_LOGPROBS, spec.vocab_size)
        self._ops = SampleOps(ops, vocab_size=spec.vocab_size, top_count=self._top_count)
        if logits_dtype is not None:
            self._ops.resolve(logits_dtype)
        self._all_blank = _Blank(
            torch.zeros(rows, spec.aux_width, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
            torch.zeros(rows, dtype=torch.uint8, device=device),
        )
        self._blanks: dict[int, _Blank] = {}

    # -- rows

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        choice: int = 0,
        prompt_ids: Sequence[int] = (),
        history: Sequence[Token] = (),
    ) -> None:
        """Give ``row`` to a sequence. ``history`` is its output so far (replay after a preemption).

        ``prompt_ids`` count for the repetition penalty. ``choice`` numbers the outputs of one request.
        """
        if row in self._in_use:
            self.clear_row(row)
        self._in_use.add(row)
        self._needs[row] = int(params.needs)
        written = [token.id for token in history]
        self._rows.set(row, params, seed=seed, choice=choice, prompt_ids=prompt_ids, written=written)
        if params.hosts:
            self._with_hosts.add(row)

    def clear_row(self, row: int) -> None:
        """Take ``row`` back. Steps in flight that name it sample garbage that nobody reads."""
        self._needs[row] = 0
        self._rows.clear(row)
        self._with_hosts.discard(row)
        self._in_use.discard(row)

    def host_rows(self) -> frozenset[int]:
        """Rows whose next sampling waits for ``set_host_mask``."""
        return frozenset(self._with_hosts)

    def set_host_mask(self, row: int, allowed: TokenSet) -> None:
        """What the host rules of ``row`` allow as its next token."""
        self._rows.set_host(row, allowed)

    def force(self, row: int, ids: Sequence[int]) -> None:
        """Advance ``row`` by forced tokens, as if they had been sampled."""
        row_1, ids_K = (self._sent(values) for values in ([row], ids))
        self.staging.send()
        needs = Needs(self._needs[row])
        for place in range(len(ids)):
            self._ops.advance(ids_K[place : place + 1], row_1, self._rows.tables, needs)

    # -- what captured programs ask

    @property
    def generation(self) -> int:
        """Moves when a tensor that sampling reads or writes was replaced: programs captured before are stale."""
        return self._rows.generation

    def needs_of(self, rows_host: Sequence[int]) -> int:
        """Bits of what these rows need, joined."""
        bits = 0
        for row in rows_host:
            bits |= self._needs[row]
        return bits

    def program_of(self, needs: int) -> int:
        """``needs`` rounded up, so that few programs serve every mix of rows; a row's result is the same in all."""
        bits = Needs(needs) | Needs.STOP
        if bits & Needs.DRAW and bits & _FILTERS:
            bits |= _FILTERS
        if bits & _CAN_EMPTY:
            bits |= Needs.BIAS | Needs.STATIC | Needs.AUTOMATA
        return int(bits)

    def kind_of(self, rows_host: Sequence[int]) -> int:
        """What a step of these rows runs as, captured or not: what they need, rounded up as ``program_of`` where
        ``branch_free``, so that it is a kind that kernels were compiled for."""
        needs = self.needs_of(rows_host)
        return needs if self._looks else self.program_of(needs)

    def prepare(self, needs: int) -> None:
        """Make what ``sample_as`` reads for ``needs`` and only some rows have; before a program is captured."""
        self._rows.prepare(Needs(needs))

    # -- a step

    def sample(
        self,
        logits_NV: torch.Tensor,
        rows_host: Sequence[int],
        rows: torch.Tensor,
        h_NC: torch.Tensor | None = None,
        aux_fn: AuxFn | None = None,
    ) -> Sampled:
        """One token per row, as ``sample_as`` for what the rows need; what the host wrote is sent before."""
        self.staging.send()
        return self.sample_as(logits_NV, self.needs_of(rows_host), rows, h_NC, aux_fn)

    def sample_as(
        self,
        logits_NV: torch.Tensor,
        needs: int,
        rows: torch.Tensor,
        h_NC: torch.Tensor | None = None,
        aux_fn: AuxFn | None = None,
    ) -> Sampled:
        """One token for each of ``rows`` (on the device, distinct but for the scratch row; at most as many as there
        are rows), by the stages in ``needs``; rows may need fewer.

        ``aux_fn(h_NC, ids_N)`` gives bin logits [N, W, cardinality]; it runs when ``needs`` names aux outputs. The
        logits are not changed. Branches on ``needs`` and shapes alone when ``branch_free``.
        """
        blank = self._blank(len(rows))
        if self._looks and not needs & ~int(Needs.STOP):
            return self._plain(logits_NV, needs, rows, blank)
        bits, ops, tables = Needs(needs), self._ops, self._rows.tables
        processed_NV, ids_N, best_N, first_N = self._processed(logits_NV, rows, bits)
        if bits & Needs.DRAW:
            ids_N = self._draw(processed_NV, best_N, ids_N, rows, bits)
        top = ops.logprobs(processed_NV, ids_N, bits) if bits & Needs.LOGPROBS else (None, None, None)
        stopped_N, status_N = ops.commit(
            ids_N, first_N, best_N, rows, tables, bits, advances=bool(bits & ~_PLAIN), dtype=logits_NV.dtype
        )
        has_aux = bool(self._spec.aux_width and bits & Needs.AUX)
        if has_aux:
            aux_NW, is_fault_N = self._aux(ids_N, rows, h_NC, aux_fn)
            status_N = status_N.masked_fill(is_fault_N & (status_N == RowStatus.OK), RowStatus.NON_FINITE)
        return Sampled(
            ids=ids_N,
            aux=aux_NW if has_aux else blank.aux_NW,
            stopped=stopped_N,
            status=status_N,
            has_aux=has_aux,
            logprob=top[0],
            top_ids=top[1],
            top_logprobs=top[2],
        )

    def _processed(
        self, logits_NV: torch.Tensor, rows: torch.Tensor, needs: Needs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits after all rules, the ids and values of their largest, and the largest before any rule."""
        if not needs & _CHANGED:
            ids_N, best_N = self._ops.argmax(logits_NV)
            return logits_NV, ids_N, best_N, best_N
        process = process_on_host if self._looks else self._ops.process
        processed_NV, ids_N, best_N, first_N = process(logits_NV, rows, self._rows.tables, needs)
        return processed_NV, ids_N, best_N, first_N

    def _plain(self, logits_NV: torch.Tensor, needs: int, rows: torch.Tensor, blank: _Blank) -> Sampled:
        """A step of greedy rows on a CPU, where a look costs less than three operations."""
        best_N, ids_N = logits_NV.max(dim=1)  # the first of equals wins; a NaN anywhere is the best
        stopped_N, status_N = blank.stopped_N, blank.status_N
        if not all(map(math.isfinite, best_N.tolist())):
            status_N = (best_N - best_N).ne(0).view(torch.uint8)
        if needs:
            stops_NK = self._rows.tables.stops.items_RKD.index_select(0, rows)[..., 0]
            stopped_N = (stops_NK == ids_N[:, None]).any(dim=1)
        return Sampled(ids=ids_N, aux=blank.aux_NW, stopped=stopped_N, status=status_N)

    def _blank(self, count: int) -> _Blank:
        if count not in self._blanks:
            self._blanks[count] = _Blank(*(zeros[:count] for zeros in self._all_blank))
        return self._blanks[count]

    def _draw(
        self,
        processed_NV: torch.Tensor,
        best_N: torch.Tensor,
        greedy_N: torch.Tensor,
        rows: torch.Tensor,
        needs: Needs,
    ) -> torch.Tensor:
        """Drawn ids [N]; rows of temperature 0 keep ``greedy``."""
        tables = self._rows.tables
        if not self._looks or not needs & _FILTERS:
            return self._ops.draw(processed_NV, best_N, greedy_N, rows, tables, needs)
        floats_N3 = tables.floats_R6.index_select(0, rows)[:, :3]
        top_k_N, seed_N, choice_N, _ = tables.ints_R4.index_select(0, rows).unbind(1)
        counters_N3 = torch.stack((seed_N, tables.index_R.index_select(0, rows), choice_N), dim=1)
        tensors = (processed_NV.float(), best_N, greedy_N, floats_N3, top_k_N, counters_N3)
        return draw_on_host(*(tensor.numpy() for tensor in tensors))

    def _aux(
        self,
        ids_N: torch.Tensor,
        rows: torch.Tensor,
        h_NC: torch.Tensor | None,
        aux_fn: AuxFn | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bins [N, W], the largest of each column that the id names, 0 elsewhere; rows [N] where one is not finite."""
        assert h_NC is not None, "a row needs aux outputs and the step brought no hidden states"
        assert aux_fn is not None, "a row needs aux outputs and the step brought no way to compute them"
        is_fault_N = torch.zeros_like(ids_N, dtype=torch.bool)
        needs_aux_N = self._rows.tables.ints_R4.index_select(0, rows)[:, 3].ne(0)
        bins_NWK = aux_fn(h_NC, ids_N)
        columns: list[torch.Tensor] = []
        for output in self._spec.aux:
            named_N = needs_aux_N
            if output.token_id is not None:
                named_N = named_N & (ids_N == output.token_id)
            for _ in range(output.width):
                best_N, bin_N = bins_NWK[:, len(columns), : output.cardinality].max(dim=1)
                columns.append(bin_N * named_N)
                is_fault_N = is_fault_N | (named_N & ~best_N.isfinite())
        return torch.stack(columns, dim=1), is_fault_N

    def _sent(self, values: Sequence[int]) -> torch.Tensor:
        """``values`` on the device, once what was put is sent."""
        return self.staging.put(np.array(values, dtype=np.int64))
