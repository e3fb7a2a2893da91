"""Logits to token ids, aux bins and log-probabilities, for every row of a step at once.

Per-row state lives on the device, keyed by row, and is written by ``set_row``, ``clear_row``, ``force`` and by
sampling itself; ``sample`` never waits for the device. A row's result depends on its own parameters and history
alone, never on its neighbours.

Shapes: N rows of a step, V vocabulary, W aux width, C hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kestrel.config import MAX_TOP_LOGPROBS
from kestrel.sampling.biases import Biases
from kestrel.sampling.draw import draw
from kestrel.sampling.host_draw import draw_on_host
from kestrel.sampling.masks import LogitRules, Masks
from kestrel.sampling.params import Needs, SamplingParams
from kestrel.sampling.penalties import Penalties
from kestrel.sampling.philox import Gumbel
from kestrel.sampling.sampled import RowStatus, Sampled
from kestrel.sampling.table import RowLists
from kestrel.spi.decoding import TokenSet
from kestrel.spi.driver import TokenSpec
from kestrel.types import Token

__all__ = ["Sampler"]

AuxFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_FILTERS = Needs.SORT | Needs.MIN_P  # few tokens are left to draw from
_MASKED = Needs.STATIC | Needs.AUTOMATA | Needs.HOST
_CAN_EMPTY = _MASKED | Needs.BIAS | Needs.LOGIT_RULES
_CHANGED = _CAN_EMPTY | Needs.PENALTIES  # the logits are not the model's
_PLAIN = Needs.STOP | Needs.AUX  # a row that needs no more is an argmax
_MORE_THAN_ARGMAX = ~int(Needs.STOP)


class _Blank(NamedTuple):
    """Zeros for N rows, shared by steps in which no row has bins, stop ids or faults."""

    aux_NW: torch.Tensor
    stopped_N: torch.Tensor
    status_N: torch.Tensor


class Sampler:
    """Sampling of one model. Row ``max_rows`` is scratch: padding of a step may name it, any number of times."""

    def __init__(self, spec: TokenSpec, max_rows: int, device: torch.device) -> None:
        rows = max_rows + 1
        self._spec, self._device = spec, device
        self._needs = [
            0
        ] * rows  # bits of Needs: plain numbers are joined over the rows in a tenth of the time
        self._in_use: set[int] = set()
        self._with_hosts: set[int] = set()
        self._floats = torch.zeros(rows, 3, device=device)  # temperature, top_p, min_p
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._needs_aux = torch.zeros(rows, dtype=torch.bool, device=device)
        self._counters = torch.zeros(rows, 3, dtype=torch.int64, device=device)  # seed, output index, choice
        self._noise = Gumbel(spec.vocab_size, device)
        self._stops = RowLists(rows, (-1,), device=device)
        self._all_blank = _Blank(
            torch.zeros(rows, spec.aux_width, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
            torch.zeros(rows, dtype=torch.uint8, device=device),
        )
        self._blanks: dict[int, _Blank] = {}
        self._on_host = device.type == "cpu"
        self._ones = torch.ones(rows, dtype=torch.int64, device=device)
        self._biases = Biases(rows, device)
        self._penalties = Penalties(spec.vocab_size, rows, device)
        self._masks = Masks(spec.vocab_size, rows, device)
        self._logit_rules = LogitRules(spec.vocab_size, rows, device)

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
        written = [token.id for token in history]
        self._needs[row] = int(params.needs)
        self._floats[row] = self._tensor((params.temperature, params.top_p, params.min_p), torch.float32)
        self._top_k[row] = params.top_k
        self._needs_aux[row] = params.needs_aux
        self._counters[row] = self._tensor((seed, len(written), choice), torch.int64)
        self._stops.set(row, [(i,) for i in sorted(params.stop_ids)])
        self._biases.set(row, params.biases)
        if params.needs & Needs.PENALTIES:
            self._penalties.set(row, params, prompt_ids, written)
        self._masks.set(row, params, written)
        self._logit_rules.set(row, params.logit_rules)
        if params.hosts:
            self._with_hosts.add(row)

    def clear_row(self, row: int) -> None:
        """Take ``row`` back. Steps in flight that name it sample garbage that nobody reads."""
        if self._needs[row] & Needs.PENALTIES:
            self._penalties.clear(row)
        self._needs[row] = 0
        self._floats[row] = 0.0
        self._needs_aux[row] = False
        self._stops.set(row, ())
        self._biases.set(row, ())
        self._masks.clear(row)
        self._logit_rules.set(row, ())
        self._with_hosts.discard(row)
        self._in_use.discard(row)

    def host_rows(self) -> frozenset[int]:
        """Rows whose next sampling waits for ``set_host_mask``."""
        return frozenset(self._with_hosts)

    def set_host_mask(self, row: int, allowed: TokenSet) -> None:
        """What the host rules of ``row`` allow as its next token."""
        self._masks.set_host(row, allowed)

    def force(self, row: int, ids: Sequence[int]) -> None:
        """Advance ``row`` by forced tokens, as if they had been sampled."""
        rows = torch.tensor([row], device=self._device)
        for token_id in ids:
            self._advance(rows, torch.tensor([token_id], device=self._device), Needs(self._needs[row]))

    def sample(
        self,
        logits_NV: torch.Tensor,
        rows_host: Sequence[int],
        rows: torch.Tensor,
        h_NC: torch.Tensor | None = None,
        aux_fn: AuxFn | None = None,
    ) -> Sampled:
        """One token per row. ``rows`` are ``rows_host`` on the device, distinct but for the scratch row; at most as
        many as there are rows.

        ``aux_fn(h_NC, ids_N)`` gives bin logits [N, W, cardinality]; it runs when a row needs aux outputs. The
        logits are not changed.
        """
        bits = 0
        for row in rows_host:
            bits |= self._needs[row]
        best_N, ids_N = logits_NV.max(dim=1)  # the first of equals wins; a NaN anywhere is the best
        blank = self._blank(len(rows_host))
        status_N = self._faults(best_N, blank)
        if not bits & _MORE_THAN_ARGMAX:
            return Sampled(
                ids=ids_N,
                aux=blank.aux_NW,
                stopped=self._stopped(ids_N, rows) if bits else blank.stopped_N,
                status=status_N,
            )
        needs = Needs(bits)
        logprob_NV: torch.Tensor | None = None
        if needs & ~_PLAIN:
            processed_NV = logits_NV.float()
            if needs & _CHANGED:
                processed_NV = self._processed(processed_NV, rows, needs)
                best_N, ids_N = processed_NV.max(dim=1)
            if needs & _CAN_EMPTY:
                is_empty_N = best_N.isneginf() & (status_N == RowStatus.OK)
                status_N = status_N.masked_fill(is_empty_N, RowStatus.EMPTY_MASK)
            if needs & Needs.DRAW:
                ids_N = self._draw(processed_NV, best_N, ids_N, rows, needs)
            if needs & Needs.LOGPROBS:
                logprob_NV = processed_NV.log_softmax(1)
            self._advance(rows, ids_N, needs)
        top_k = min(MAX_TOP_LOGPROBS, logits_NV.shape[1])
        top = None if logprob_NV is None else logprob_NV.topk(top_k, dim=1)
        has_aux = bool(self._spec.aux_width and needs & Needs.AUX)
        if has_aux:
            aux_NW, is_fault_N = self._aux(ids_N, rows, h_NC, aux_fn)
            status_N = status_N.masked_fill(is_fault_N & (status_N == RowStatus.OK), RowStatus.NON_FINITE)
        return Sampled(
            ids=ids_N,
            aux=aux_NW if has_aux else blank.aux_NW,
            stopped=self._stopped(ids_N, rows) if needs & Needs.STOP else blank.stopped_N,
            status=status_N,
            has_aux=has_aux,
            logprob=None if logprob_NV is None else logprob_NV.gather(1, ids_N[:, None]).squeeze(1),
            top_ids=None if top is None else top.indices,
            top_logprobs=None if top is None else top.values,
        )

    def _blank(self, count: int) -> _Blank:
        if count not in self._blanks:
            self._blanks[count] = _Blank(*(zeros[:count] for zeros in self._all_blank))
        return self._blanks[count]

    def _faults(self, best_N: torch.Tensor, blank: _Blank) -> torch.Tensor:
        """Status [N] of rows by their best logit, which is a finite number unless the model failed."""
        if self._on_host and all(
            map(math.isfinite, best_N.tolist())
        ):  # a look costs less than three operations
            return blank.status_N
        return (best_N - best_N).ne(0).view(torch.uint8)

    def _processed(self, logits_NV: torch.Tensor, rows: torch.Tensor, needs: Needs) -> torch.Tensor:
        """float32 logits after penalties, bias, masks and logit rules."""
        if needs & Needs.PENALTIES:
            logits_NV = self._penalties.apply(logits_NV, rows)
        if needs & Needs.BIAS:
            logits_NV = self._biases.apply(logits_NV, rows, self._counters[rows, 1])
        if needs & _MASKED:
            banned_NV = self._masks.banned(rows, self._counters[rows, 1], needs)
            logits_NV = logits_NV.masked_fill(banned_NV, -torch.inf)
        if needs & Needs.LOGIT_RULES:
            logits_NV = self._logit_rules.apply(logits_NV, rows)
        return logits_NV

    def _draw(
        self,
        processed_NV: torch.Tensor,
        best_N: torch.Tensor,
        greedy_N: torch.Tensor,
        rows: torch.Tensor,
        needs: Needs,
    ) -> torch.Tensor:
        """Drawn ids [N]; rows of temperature 0 keep ``greedy``."""
        floats_N3, top_k_N = self._floats.index_select(0, rows), self._top_k.index_select(0, rows)
        counters_N3 = self._counters.index_select(0, rows)
        if self._on_host and needs & _FILTERS:
            tensors = (processed_NV, best_N, greedy_N, floats_N3, top_k_N, counters_N3)
            return draw_on_host(*(tensor.numpy() for tensor in tensors))
        temperature_N, top_p_N, min_p_N = floats_N3.unbind(1)
        noise_NV = self._noise(*counters_N3.unbind(1))
        drawn_N = draw(processed_NV, best_N, noise_NV, temperature_N, top_k_N, top_p_N, min_p_N, needs)
        return torch.where(temperature_N == 0, greedy_N, drawn_N)

    def _advance(self, rows: torch.Tensor, ids_N: torch.Tensor, needs: Needs) -> None:
        self._counters[:, 1].index_add_(0, rows, self._ones[: len(rows)])
        if needs & Needs.PENALTIES:
            self._penalties.advance(rows, ids_N)
        if needs & Needs.AUTOMATA:
            self._masks.advance(rows, ids_N)

    def _stopped(self, ids_N: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (self._stops.of(rows)[..., 0] == ids_N[:, None]).any(dim=1)

    def _aux(
        self,
        ids_N: torch.Tensor,
        rows: torch.Tensor,
        h_NC: torch.Tensor | None,
        aux_fn: AuxFn | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bins [N, W], the largest of each column that the id names, 0 elsewhere; rows [N] where one is not finite."""
        is_fault_N = torch.zeros_like(ids_N, dtype=torch.bool)
        assert h_NC is not None, "a row needs aux outputs and the step brought no hidden states"
        assert aux_fn is not None, "a row needs aux outputs and the step brought no way to compute them"
        bins_NWK = aux_fn(h_NC, ids_N)
        columns: list[torch.Tensor] = []
        for output in self._spec.aux:
            named_N = self._needs_aux[rows]
            if output.token_id is not None:
                named_N = named_N & (ids_N == output.token_id)
            for _ in range(output.width):
                best_N, bin_N = bins_NWK[:, len(columns), : output.cardinality].max(dim=1)
                columns.append(bin_N * named_N)
                is_fault_N = is_fault_N | (named_N & ~best_N.isfinite())
        return torch.stack(columns, dim=1), is_fault_N

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
