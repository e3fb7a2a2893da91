"""Who runs: the one place where sequences get and lose rows, leases and features."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kestrel.errors import KestrelError
from kestrel.lanes.cohort import Cohort
from kestrel.lanes.encoding import EncodeStage
from kestrel.lanes.events import Event, Failed, Finished
from kestrel.lanes.sequence import Phase, Prompt, Sequence
from kestrel.lanes.steps import Step
from kestrel.runner import Runner
from kestrel.sampling import Sampler, intersect
from kestrel.spi.driver import TokenSpec
from kestrel.state import Lease, StateCache
from kestrel.types import FinishReason

__all__ = ["Board", "Counters"]


@dataclass(slots=True)
class Counters:
    """What the lane has done since it was made."""

    steps: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    encoded_items: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    faults: int = 0


class Board:
    """The sequences of one token lane. Device thread only.

    ``prefilling`` is in order of admission; ``decoding`` and ``finishing`` by id, in order of entry. ``cohort``: those
    decoding, or None after a change. ``room``: something was given back since the queue's head last found none.
    ``on_end`` is called with every sequence that ends, while its phase still says where it was.
    """

    def __init__(
        self,
        spec: TokenSpec,
        cache: StateCache,
        sampler: Sampler,
        runner: Runner,
        encoder: EncodeStage,
        max_rows: int,
    ) -> None:
        self.spec, self.cache, self.sampler = spec, cache, sampler
        self.runner, self.encoder = runner, encoder
        self.sequences: dict[int, Sequence] = {}
        self.prefilling: list[Sequence] = []
        self.decoding: dict[int, Sequence] = {}
        self.finishing: dict[int, Sequence] = {}
        self.in_flight: deque[Step] = deque()
        self.events: list[Event] = []
        self.counters = Counters()
        self.cohort: Cohort | None = None
        self.room = True
        self.num_gated = 0
        self.on_end: Callable[[Sequence], None] = _ignore
        self._num_rows = max_rows
        self._free_rows = list(range(max_rows))

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self.prefilling) + len(self.decoding) + len(self.finishing)

    @property
    def is_still(self) -> bool:
        """Nobody holds a row and nothing is in flight, so nothing will ever be given back."""
        return not self.num_running and not self.in_flight

    @property
    def has_row(self) -> bool:
        """A row is free."""
        return bool(self._free_rows)

    # -- getting a row

    def start(self, seq: Sequence, lease: Lease) -> None:
        """Give ``seq`` a row; it begins to compute what its lease did not find in the cache, once it is equipped."""
        seq.lease = lease
        seq.row = heapq.heappop(self._free_rows)
        seq.phase = Phase.PREFILL
        seq.scheduled = lease.cached
        seq.sampled = len(seq.tokens)
        self.num_gated += seq.gated
        self.prefilling.append(seq)

    def equip(self, seq: Sequence) -> None:
        """Write the row of ``seq`` as its launches read it: what encoders do without, so after theirs."""
        work = seq.work
        self.runner.rows.bind(seq.row, seq.held_lease)
        if seq.prompt is None:
            seq.prompt = Prompt.of(work.layout, self.spec.aux_width, self.spec.position_rows)
        self.sampler.set_row(
            seq.row,
            work.params,
            seed=work.seed,
            choice=work.choice,
            prompt_ids=work.layout.tokens,
            history=seq.tokens,
        )
        self.show_rules(seq)

    def show_rules(self, seq: Sequence) -> None:
        """Let sampling know what the host rules of ``seq`` allow next."""
        if seq.host_rules:
            allowed = intersect([rule.allowed() for rule in seq.host_rules], self.spec.vocab_size)
            self.sampler.set_host_mask(seq.row, allowed)

    # -- between prefill and decode

    def to_decode(self, seq: Sequence) -> None:
        """The launch that yields a token of ``seq`` was made: it decodes next, or that was its last."""
        self.prefilling.remove(seq)
        seq.sampled += 1
        if seq.sampled >= seq.limit:
            seq.phase = Phase.LAST
            self.finishing[seq.id] = seq
            return
        seq.phase = Phase.DECODE
        self.decoding[seq.id] = seq
        self.disband()

    def to_last(self, seq: Sequence) -> None:
        """The last token that the limit of ``seq`` allows is under way."""
        self.disband()
        del self.decoding[seq.id]
        seq.phase = Phase.LAST
        self.finishing[seq.id] = seq

    def disband(self) -> None:
        """Who decodes is about to change: the cohort hands its counts back."""
        if self.cohort is not None:
            self.cohort.dissolve()
            self.cohort = None

    def to_prefill(self, seq: Sequence, computed: int) -> None:
        """Tokens of ``seq`` were forced: its state, at ``computed``, is behind them."""
        self.disband()
        self.decoding.pop(seq.id, None)
        self.finishing.pop(seq.id, None)
        seq.phase = Phase.PREFILL
        seq.scheduled = computed
        seq.sampled = len(seq.tokens)
        self.prefilling.append(seq)

    def settle(self, seq: Sequence, computed: int) -> None:
        """Positions of ``seq`` up to ``computed`` committed. Its pages may have moved to those the cache has."""
        seq.settle(computed)
        self.runner.rows.send(seq.row, seq.held_lease)

    # -- losing a row

    def finish(self, seq: Sequence, reason: FinishReason, now: float, *, computed: int, exact: bool) -> None:
        """A good end. ``exact``: the device consumed the ``computed`` positions of ``seq`` and no others."""
        if seq.lease is not None:
            seq.settle(computed)
            self._pin(seq)
            seq.lease.finish(exact=exact)
        probes = tuple(seq.probes[i] for i in range(len(seq.work.probes)))
        self._end(seq)
        self.counters.finished += 1
        self.events.append(
            Finished(work_id=seq.id, finish_reason=reason, metrics=seq.metrics(now), probes=probes)
        )

    def fail(self, seq: Sequence, error: BaseException, now: float) -> None:
        """A bad end: of what ``seq`` computed, only what committed before stays cached."""
        self._abandon(seq)
        self.counters.failed += 1
        self.events.append(Failed(work_id=seq.id, error=error, metrics=seq.metrics(now)))

    def cancel(self, seq: Sequence, now: float) -> None:
        """The caller gave up."""
        self._abandon(seq)
        self.counters.cancelled += 1
        self.events.append(Finished(work_id=seq.id, finish_reason="cancelled", metrics=seq.metrics(now)))

    def preempt(self, seq: Sequence) -> None:
        """Take the lease of a decoding or prefilling ``seq`` back; what it computed stays cached as long as it can.

        No step in flight names it. Its tokens, rules and acceptors stay as they are.
        """
        assert not any(step.names(seq) for step in self.in_flight)
        computed = seq.computed if seq.phase is Phase.DECODE else seq.scheduled
        seq.settle(computed)
        seq.held_lease.finish(exact=True)
        self._leave_row(seq)
        seq.phase = Phase.WAITING
        self.counters.preemptions += 1

    def _abandon(self, seq: Sequence) -> None:
        if seq.lease is not None:
            self._pin(seq)
            seq.lease.close()
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        self.on_end(seq)
        if seq.lease is not None:
            self._leave_row(seq)
        seq.phase = Phase.ENDED
        del self.sequences[seq.id]

    def _pin(self, seq: Sequence) -> None:
        """Steps that name the lease keep what it holds until they commit."""
        for step in self.in_flight:
            if step.names(seq):
                seq.held_lease.pin()
                step.pinned.append(seq.held_lease)

    def unpin(self, step: Step) -> None:
        """``step`` is over: what was closed while it ran can be freed."""
        for lease in step.pinned:
            lease.unpin()
            self.room = True

    def _leave_row(self, seq: Sequence) -> None:
        match seq.phase:
            case Phase.PREFILL:
                self.prefilling.remove(seq)
            case Phase.DECODE:
                self.disband()
                del self.decoding[seq.id]
            case Phase.LAST:
                del self.finishing[seq.id]
        self.encoder.drop(seq)
        self.runner.rows.unbind(seq.row)
        self.sampler.clear_row(seq.row)
        heapq.heappush(self._free_rows, seq.row)
        seq.row = -1
        seq.lease = None
        self.num_gated -= seq.gated
        self.room = True

    def check_empty(self) -> None:
        """Raise AssertionError unless no sequence, row or step is held."""
        held = {"running": self.num_running, "gated": self.num_gated, "in flight": len(self.in_flight)}
        held |= {"known": len(self.sequences), "rows": self._num_rows - len(set(self._free_rows))}
        assert not any(held.values()), f"the lane is not empty: {held}"

    # -- faults

    def fault(self, seq: Sequence, error: KestrelError, now: float) -> None:
        """A bad end that the model or a kernel is to blame for."""
        self.counters.faults += 1
        self.fail(seq, error, now)


def _ignore(seq: Sequence) -> None:
    pass
