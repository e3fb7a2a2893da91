"""What a step's results mean: tokens for the callers, ends, forced tokens, cached prefixes."""

from __future__ import annotations

import math
from collections.abc import Callable

from kestrel.errors import ModelFaultError, PluginError
from kestrel.lanes.board import Board
from kestrel.lanes.events import TokensReady
from kestrel.lanes.faults import fault, own_error
from kestrel.lanes.sequence import Phase, Sequence
from kestrel.lanes.steps import ChunkEntry, DecodePart, PrefillPart, Step
from kestrel.runner import Results
from kestrel.sampling import RowStatus
from kestrel.spi.decoding import Continue, Finish, Force
from kestrel.spi.states import WindowKV
from kestrel.types import FinishReason, Token

__all__ = ["Committer"]

SETTLE_PAGES = 8  # nobody shares what is being generated; only windows have pages to give back on the way


class Committer:
    """Commits steps in the order of their launch. ``prompt_cached`` is told when a prompt has been computed whole."""

    def __init__(self, board: Board, prompt_cached: Callable[[Sequence], None]) -> None:
        self._board = board
        self._prompt_cached = prompt_cached
        has_windows = any(isinstance(state, WindowKV) for state in board.spec.states)
        self._settle_every = 1 if has_windows else SETTLE_PAGES * board.cache.page_size
        self._plain: dict[
            int, Token
        ] = {}  # a frozen Token costs more to make than the rest of a row's commit

    def commit(self, step: Step, now: Callable[[], float]) -> None:
        """Read the results of ``step``, the oldest in flight, and act on them."""
        if step.decode is not None:
            self._decode(step.decode, now)
        if step.prefill is not None:
            self._prefill(step.prefill, now)
        self._board.unpin(step)

    # -- decode

    def _decode(self, part: DecodePart, now: Callable[[], float]) -> None:
        try:
            results = part.pending.read()
        except Exception as error:  # the device reports a kernel's failure when it is read
            at = now()
            for seq in part.members:
                if seq.phase is not Phase.ENDED:
                    self._board.fault(seq, fault(seq.id, "a decode launch failed", error), at)
            return
        if part.is_plain and True not in results.stopped and not any(results.status):
            self._take_plain(part, results)
        else:
            at = now()
            for index, seq in enumerate(part.members):
                if seq.phase is not Phase.ENDED:
                    self._take(seq, results, index, at)
        for index in part.crossed:
            seq = part.members[index]
            if (seq.phase is Phase.DECODE or seq.phase is Phase.LAST) and seq.is_overdue(self._settle_every):
                self._board.settle(seq, seq.computed)
        for index in part.last:
            seq = part.members[index]
            if seq.phase is Phase.LAST:
                self._finish(seq, "length", now(), seq.computed)

    def _take_plain(self, part: DecodePart, results: Results) -> None:
        """The common case: every row goes on and nobody on the host has a say."""
        plain, ended, has_logprobs = self._plain, Phase.ENDED, results.logprob is not None
        events = self._board.events
        count = 0
        for index, (seq, token_id) in enumerate(zip(part.members, results.ids)):  # noqa: B905 - ids may be padded
            if seq.phase is ended:
                continue
            if has_logprobs and (params := seq.work.params).logprobs:
                token = Token(token_id, (), results.logprobs(index, params.top_logprobs))
            elif (known := plain.get(token_id)) is not None:
                token = known
            else:
                token = plain[token_id] = Token(token_id)
            seq.tokens.append(token)
            events.append(TokensReady(seq.id, [token]))
            count += 1
        self._board.counters.generated_tokens += count

    # -- prefill

    def _prefill(self, part: PrefillPart, now: Callable[[], float]) -> None:
        try:
            part.result.wait()
            results = None if part.result.pending is None else part.result.pending.read()
        except Exception as error:  # as in decode
            at = now()
            for entry in part.entries:
                if entry.seq.phase is not Phase.ENDED:
                    self._board.fault(entry.seq, fault(entry.seq.id, "a prefill launch failed", error), at)
            return
        at = now()
        sampled = probed = 0
        for entry in part.entries:
            values = part.result.probes[probed : probed + len(entry.probes)]
            probed += len(entry.probes)
            index, sampled = sampled, sampled + entry.samples
            if entry.seq.phase is Phase.ENDED:
                continue
            probes = [tuple(value) for value in values]
            if any(math.isnan(value) for probe in probes for value in probe):
                self._not_finite(entry.seq, RowStatus.NON_FINITE, at)
                continue
            entry.seq.probes.update(zip(entry.probes, probes, strict=True))
            self._computed(entry, results, index, at)

    def _computed(self, entry: ChunkEntry, results: Results | None, index: int, at: float) -> None:
        seq = entry.seq
        if entry.samples:
            assert results is not None
            if results.status[index]:
                self._not_finite(seq, results.status[index], at)
                return
        self._board.settle(seq, entry.end)
        if entry.end >= seq.prompt_len:
            self._prompt_cached(seq)
        if results is not None and entry.samples:
            if seq.first_token_at is None:
                seq.first_token_at = at
            self._take(seq, results, index, at)
            if seq.phase is Phase.LAST and len(seq.tokens) >= seq.limit:
                self._finish(seq, "length", at, seq.computed)

    # -- one row's token

    def _take(self, seq: Sequence, results: Results, index: int, at: float) -> None:
        """Commit the token of row ``index`` for ``seq`` and do what stop ids, rules and acceptors say."""
        board = self._board
        status = results.status[index]
        if status:
            self._not_finite(seq, status, at)
            return
        params = seq.work.params
        aux = tuple(results.aux[index]) if results.aux is not None and params.needs_aux else ()
        logprobs = results.logprobs(index, params.top_logprobs) if params.logprobs else None
        token = Token(results.ids[index], aux, logprobs)
        computed = seq.computed + 1  # this step computed the position before the token
        first = len(seq.tokens)
        reason: FinishReason | None = None
        forced: tuple[int, ...] = ()
        error: Exception | None = None
        try:
            reason, forced = self._accept(seq, token, results.stopped[index])
            if reason is None:
                if forced:
                    board.sampler.force(seq.row, forced)
                board.show_rules(seq)
        except Exception as raised:  # an acceptor or a grammar is the request's own
            error = raised
        new = seq.tokens[first:]
        board.counters.generated_tokens += len(new)
        board.events.append(TokensReady(seq.id, new))
        if error is not None:
            board.fail(seq, own_error(seq.id, "its decoding rules failed", error), at)
        elif reason is not None:
            self._finish(seq, reason, at, computed, is_dead=results.stopped[index])
        elif forced:
            board.to_prefill(seq, computed)

    def _accept(
        self, seq: Sequence, token: Token, stopped: bool
    ) -> tuple[FinishReason | None, tuple[int, ...]]:
        """Append ``token`` and what is forced after it; (how it ends or None, the forced ids)."""
        forced: list[int] = []
        ahead: list[int] = []
        while True:
            seq.tokens.append(token)
            for rule in seq.host_rules:
                rule.accept(token.id)
            verdicts = [acceptor.accept(token) for acceptor in seq.acceptors]
            verdict = next((v for v in verdicts if not isinstance(v, Continue)), None)
            if stopped:
                return "stop", ()
            if isinstance(verdict, Finish):
                return verdict.reason, ()
            if isinstance(verdict, Force):
                ahead = self._checked(verdict.ids)
            if not ahead:
                return None, tuple(forced)
            if len(seq.tokens) >= seq.limit:
                return "length", ()
            forced.append(ahead.pop(0))
            token = Token(forced[-1])
            stopped = token.id in seq.work.params.stop_ids

    def _checked(self, forced: tuple[int, ...]) -> list[int]:
        """``forced`` if they are ids of the model; others would break the launch that embeds them."""
        vocab_size = self._board.spec.vocab_size
        for token_id in forced:
            if not 0 <= token_id < vocab_size:
                raise PluginError(
                    f"an acceptor forces token {token_id}; the model's ids go from 0 to {vocab_size - 1}. "
                    "The family or skill that made it has a bug"
                )
        return list(forced)

    # -- ends

    def _finish(
        self, seq: Sequence, reason: FinishReason, at: float, computed: int, *, is_dead: bool = False
    ) -> None:
        """A good end. A row that S ended wrote nothing since; of others, steps in flight may have."""
        exact = is_dead or not any(step.names(seq) for step in self._board.in_flight)
        self._board.finish(seq, reason, at, computed=computed, exact=exact)

    def _not_finite(self, seq: Sequence, status: int, at: float) -> None:
        problem = RowStatus(status).problem
        self._board.fault(seq, ModelFaultError(f"work {seq.id}: {problem}. This request alone is lost."), at)
