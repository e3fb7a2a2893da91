"""Turns the board into the next step: who decodes, whose chunks run, and whose pages they need."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kestrel.lanes.board import Board
from kestrel.lanes.cohort import Cohort
from kestrel.lanes.faults import fault
from kestrel.lanes.sequence import Sequence
from kestrel.lanes.steps import ChunkEntry, DecodePart, PrefillPart
from kestrel.plan import Candidate, Chunk, Prefill, choose_victim, plan_chunks
from kestrel.runner import ChunkRun

__all__ = ["Launcher"]


class Launcher:
    """Launches decode and prefill parts. ``preempted`` is told of sequences that have to wait again.

    ``head_start``: positions reserved ahead while the pool has them. ``alone``: one chunk per step, of a
    size that does not depend on who else runs (deterministic mode).
    """

    def __init__(
        self,
        board: Board,
        budget: int,
        preempted: Callable[[Sequence], None],
        *,
        head_start: int = 0,
        alone: bool = False,
    ) -> None:
        self._board, self._budget, self._head_start = board, budget, head_start
        self._preempted, self._alone = preempted, alone
        self._page_size = board.cache.page_size

    # -- decode

    def decode(self, now: float) -> DecodePart | None:
        """One token for every decoding sequence; None when none decodes, or pages are short until a step commits."""
        board = self._board
        cohort = self._cohort()
        while cohort is not None and cohort.short:
            if not self._provide(cohort):
                return None
            if board.cohort is cohort:
                break
            cohort = self._cohort()
        if cohort is None:
            return None
        members = cohort.members
        try:
            cohort.prepare()
            pending = board.runner.decode(cohort.stage)
        except Exception as error:  # a kernel's failure costs the sequences of its launch, not the lane
            board.disband()
            for seq in members:
                board.fault(seq, fault(seq.id, "a decode launch failed", error), now)
            return None
        cohort.launched()
        part = DecodePart(members, pending, cohort.is_plain)
        if cohort.crossed or cohort.last:
            part.crossed, part.last = cohort.crossed, cohort.last
            for i in part.last:
                board.to_last(members[i])
        return part

    def _cohort(self) -> Cohort | None:
        board = self._board
        if board.cohort is None and board.decoding:
            board.cohort = Cohort(list(board.decoding.values()), board.runner)
        return board.cohort

    def _provide(self, cohort: Cohort) -> bool:
        """Pages for the members that are short; True when they have them or somebody was preempted for them."""
        for i in cohort.short:
            seq, end = cohort.members[i], cohort.wanted(i)
            if end <= seq.held_lease.capacity:
                continue
            ahead = min(end + self._head_start, seq.prompt_len + seq.limit - 1)
            if ahead > end and seq.held_lease.reserve(ahead):
                continue
            if not self._reserve(seq, end):
                return False
            if self._board.cohort is not cohort:
                return True
        return True

    def _reserve(self, seq: Sequence, end: int) -> bool:
        """Room for ``seq`` up to ``end``, by preemption if need be (``seq`` itself may be the one); False when steps
        in flight have to commit first, since they may give pages back."""
        board = self._board
        while not seq.held_lease.reserve(end):
            if board.in_flight:
                return False
            running = [*board.prefilling, *board.decoding.values()]
            key = choose_victim(Candidate(s.id, s.work.priority, s.arrival) for s in running)
            victim = board.sequences[key]
            board.preempt(victim)
            self._preempted(victim)
            if victim is seq:
                break
        return True

    # -- prefill

    def prefill(self, decode_rows: int, now: float) -> PrefillPart | None:
        """The next chunks within what ``decode_rows`` leave of the budget."""
        board = self._board
        plans = self._plans()
        chunks = plan_chunks(
            plans if not self._alone else plans[:1],
            budget=self._budget,
            decode_rows=0 if self._alone else decode_rows,
            page_size=self._page_size,
        )
        entries: list[ChunkEntry] = []
        runs: list[ChunkRun] = []
        for chunk in chunks:
            seq = board.sequences[chunk.key]
            if seq.lease is None or not self._reserve(seq, chunk.end) or seq.lease is None:
                continue  # preempted by an earlier chunk of this step, or it waits for steps in flight
            board.runner.rows.send(seq.row, seq.lease)
            run, probes = self._run(seq, chunk)
            runs.append(run)
            entries.append(ChunkEntry(seq, chunk.end, run.samples, probes))
        alive = [i for i, entry in enumerate(entries) if entry.seq.lease is not None]
        if len(alive) < len(entries):  # a later chunk's pages came from an earlier chunk's sequence
            entries, runs = [entries[i] for i in alive], [runs[i] for i in alive]
        return self._launch(entries, runs, now) if entries else None

    def _launch(self, entries: list[ChunkEntry], runs: list[ChunkRun], now: float) -> PrefillPart | None:
        board = self._board
        try:
            result = board.runner.prefill(runs)
        except Exception as error:  # as in decode
            for entry in entries:
                board.fault(entry.seq, fault(entry.seq.id, "a prefill launch failed", error), now)
            return None
        for entry in entries:
            seq = entry.seq
            board.counters.prefill_tokens += entry.end - seq.scheduled
            seq.scheduled = entry.end
            board.encoder.passed(seq, entry.end)
            if entry.samples:
                board.to_decode(seq)
        return PrefillPart(entries, result)

    def _plans(self) -> list[Prefill]:
        """The prefilling sequences in order, as many as the budget can possibly reach."""
        plans: list[Prefill] = []
        reach = 0
        for seq in self._board.prefilling:
            barrier = self._board.encoder.barrier(seq)
            if barrier <= seq.scheduled:
                continue
            assert seq.keys is not None
            plans.append(
                Prefill(
                    key=seq.id,
                    start=seq.scheduled,
                    target=seq.known,
                    barrier=barrier,
                    marks=seq.keys.marks,
                    ranges=seq.keys.ranges,
                )
            )
            reach += min(seq.known, barrier) - seq.scheduled
            if reach >= 2 * self._budget:
                break
        return plans

    def _run(self, seq: Sequence, chunk: Chunk) -> tuple[ChunkRun, tuple[int, ...]]:
        prompt, lease, start, end = seq.prompt, seq.held_lease, chunk.start, chunk.end
        assert prompt is not None
        assert seq.keys is not None
        probes = tuple(
            i for i, (at, _) in enumerate(seq.work.probes) if start <= at < end and i not in seq.probes
        )
        run = ChunkRun(
            row=seq.row,
            lease=lease,
            start=start,
            ids=prompt.ids[start:end],
            aux=prompt.aux[start:end],
            positions=prompt.positions[:, start:end],
            media_rows=_media_rows(seq, start, end),
            ranges=tuple((a, b) for a, b in seq.keys.ranges if start <= a and b <= end),
            stores=lease.stores(start, end),
            samples=end == seq.known,
            probes=[(seq.work.probes[i][0] - start, seq.work.probes[i][1]) for i in probes],
        )
        if end > seq.prompt_len:
            _append_output(run, seq, max(start, seq.prompt_len), end)
        return run, probes


def _append_output(run: ChunkRun, seq: Sequence, start: int, end: int) -> None:
    """Add the generated tokens at positions ``start`` to ``end`` to a chunk that holds the prompt's part already."""
    prompt = seq.prompt
    assert prompt is not None
    tokens = seq.tokens[start - seq.prompt_len : end - seq.prompt_len]
    ids = np.array([token.id for token in tokens], dtype=np.int64)
    aux = np.zeros((len(tokens), prompt.aux.shape[1]), dtype=np.int64)
    for i, token in enumerate(tokens):
        if token.aux:
            aux[i] = token.aux
    positions = np.arange(start, end) + np.array(prompt.offsets, dtype=np.int64)[:, None]
    run.ids = np.concatenate([run.ids, ids])
    run.aux = np.concatenate([run.aux, aux])
    run.positions = np.concatenate([run.positions, positions], axis=1)
    if run.media_rows is not None:
        run.media_rows = np.concatenate([run.media_rows, np.full(len(tokens), -1, dtype=np.int64)])


def _media_rows(seq: Sequence, start: int, end: int) -> NDArray[np.int64] | None:
    """Feature rows of the prompt's positions in the chunk; None when no media item lies in it."""
    last = min(end, seq.prompt_len)
    rows: NDArray[np.int64] | None = None
    if seq.media is None:
        return None
    for span, features in seq.media.held.items():
        low, high = max(span.start, start), min(span.end, last)
        if low < high:
            if rows is None:
                rows = np.full(max(0, last - start), -1, dtype=np.int64)
            rows[low - start : high - start] = np.arange(high - low) + features.start + low - span.start
    return rows
