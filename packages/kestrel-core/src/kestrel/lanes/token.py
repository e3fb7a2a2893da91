"""The token lane: everything autoregressive. A tick takes in, admits, launches the next step, commits the oldest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from kestrel.device.graphs import Graphs
from kestrel.errors import RequestTimeoutError
from kestrel.lanes.admission import Admission
from kestrel.lanes.board import Board
from kestrel.lanes.borrow import borrow_cross
from kestrel.lanes.cohort import Cohort
from kestrel.lanes.commit import Committer
from kestrel.lanes.deadlines import Deadlines
from kestrel.lanes.encoding import EncodeStage
from kestrel.lanes.events import Event
from kestrel.lanes.examples import example
from kestrel.lanes.faults import fault
from kestrel.lanes.lane import QueuedLane
from kestrel.lanes.launch import Launcher
from kestrel.lanes.limits import LaneConfig, LaneLimits
from kestrel.lanes.sequence import Sequence
from kestrel.lanes.steps import Step
from kestrel.lanes.work import Work
from kestrel.ops import OpTable
from kestrel.runner import Runner
from kestrel.sampling import Sampler
from kestrel.spi.batch import CrossView
from kestrel.spi.driver import TokenDriver
from kestrel.state import FeaturePool, Interner, StateCache
from kestrel.types import Prepared

__all__ = ["TokenLane"]


class TokenLane(QueuedLane[Sequence]):
    """Drives one ``TokenDriver``. ``submit``, ``cancel``, ``abort``, ``pause``, ``resume``, ``drain`` and ``stats`` on
    any thread; ``tick`` and ``recover`` on the device thread. ``sink`` gets each tick's events in one call."""

    def __init__(
        self,
        driver: TokenDriver,
        *,
        cache: StateCache,
        sampler: Sampler,
        features: FeaturePool | None,
        config: LaneConfig,
        device: torch.device,
        sink: Callable[[list[Event]], None],
        clock: Callable[[], float] = time.monotonic,
        ops: OpTable | None = None,
    ) -> None:
        super().__init__(config.max_queue)
        spec = driver.spec
        self.driver, self.cache, self.features, self.config = driver, cache, features, config
        self.sink = sink
        self._clock, self._device = clock, device
        self.limits = LaneLimits(spec, cache, config, 0 if features is None else features.rows)
        runner = Runner(
            driver,
            cache,
            sampler,
            features,
            max_rows=config.max_rows,
            max_len=max(1, min(self.limits.max_len, self.limits.pool_len)),
            overlaps=config.steps_in_flight > 1,
            device=device,
            pads=config.deterministic,
            ops=ops,
        )
        encoder = EncodeStage(runner, features, spec, alone=config.deterministic)
        self._board = Board(spec, cache, sampler, runner, encoder, config.max_rows)
        self._admission = Admission(
            self._board,
            self._intake,
            budget=config.max_batched_tokens,
            head_start=config.head_start,
            holds_siblings=config.prefix_cache,
        )
        self._launcher = Launcher(
            self._board,
            config.max_batched_tokens,
            self._admission.requeue,
            head_start=config.head_start,
            alone=config.deterministic,
        )
        self._committer = Committer(self._board, self._admission.prompt_cached)
        self._deadlines = Deadlines(self._board.sequences)
        self._arrivals = 0

    # -- any thread

    @property
    def interner(self) -> Interner:
        """What makes cache keys of this lane's prompts."""
        return self.cache.interner

    def submit(self, work: Work) -> None:
        """Take ``work``. Raises CapacityError or InvalidRequestError when it can never run, EngineBusyError when the
        queue is full, EngineStoppedError when the lane takes nothing any more."""
        limit = self.limits.output_limit(work)
        self._intake.submit(Sequence(work, 0, limit), exempt=work.exempt_queue)

    @property
    def is_idle(self) -> bool:
        board, intake = self._board, self._intake
        return intake.is_empty and not (intake.waiting or board.sequences or board.in_flight)

    def stats(self) -> dict[str, float]:
        """Gauges and counters, by name."""
        board, counters, cache = self._board, self._board.counters, self.cache.stats()
        return {
            "running": board.num_running,
            "waiting": self._intake.waiting,
            "cache_usage": cache.usage,
            "cache_queried_positions": cache.queried_positions,
            "cache_hit_positions": cache.cached_positions,
            "steps": counters.steps,
            "preemptions": counters.preemptions,
            "prefill_tokens": counters.prefill_tokens,
            "generated_tokens": counters.generated_tokens,
            "encoded_items": counters.encoded_items,
            "finished": counters.finished,
            "failed": counters.failed,
            "cancelled": counters.cancelled,
            "faults": counters.faults,
        }

    @property
    def in_flight(self) -> tuple[Step, ...]:
        """Steps launched and not committed, the oldest first. For tests."""
        return tuple(self._board.in_flight)

    @property
    def cohort(self) -> Cohort | None:
        """Who decodes together, or None before the next decode launch finds out. For tests."""
        return self._board.cohort

    def check_empty(self) -> None:
        """Raise AssertionError unless nothing is held. Not while the device thread ticks."""
        self._board.check_empty()
        assert not len(self._admission), "sequences wait"

    # -- device thread

    def warm_up(self) -> None:
        """Make a first launch of each kind, before the lane is ticked."""
        with torch.inference_mode():
            self._board.runner.warm_up()

    def capture(self, graphs: Graphs, *, decode: bool = True) -> None:
        """Capture programs: of decode for every batch size at once, of encoders as they come. After ``warm_up``, before
        the lane is ticked. Raises what a call raises that cannot be captured; decode then runs op by op."""
        with torch.inference_mode():
            self._board.runner.capture(graphs, decode=decode)

    def capture_prefill(self) -> None:
        """Capture prefill launches up to the lane's budget of tokens, after ``capture``, before the lane is ticked.
        Raises what a call raises that cannot be captured; prefill then runs op by op."""
        with torch.inference_mode():
            self._board.runner.capture_prefill(self.config.max_batched_tokens)

    def capture_encoders(self) -> None:
        """Capture launches of encoders whose items are all alike, after ``capture``, before the lane is ticked; others
        are captured as they come. Raises what a launch raises."""
        if not self._board.runner.captures:
            return
        with torch.inference_mode():
            for media in self.driver.spec.media:
                item = example(self.driver, media.kind) if media.into == "cross" else None
                if item is not None:
                    most = 1 if self.config.deterministic else max(1, media.max_cost // max(1, item.cost))
                    self._board.runner.capture_cross(item, most)

    @property
    def captured_prefills(self) -> tuple[int, ...]:
        """Numbers of tokens for which prefill programs are captured."""
        return self._board.runner.captured_prefills

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Numbers of rows for which decode programs are captured; none: every launch runs op by op."""
        return self._board.runner.captured_sizes

    def borrow_cross(self, item: Prepared, held: ExitStack) -> Mapping[str, CrossView]:
        """What the encoder made of ``item`` as views of one row, for a pass; held as long as ``held``."""
        board = self._board
        return borrow_cross(item, self.driver, board.runner, self.cache, held, self._device)

    def tick(self) -> bool:
        """One round. True while there is more to do without anything new coming in."""
        if not torch.is_inference_mode_enabled():  # on a device thread it is
            with torch.inference_mode():
                return self.tick()
        board = self._board
        if not self._intake.is_empty or self._aborted is not None:
            self._take_in()
        at = self._deadlines.next
        if at is not None:
            self._expire(at)
        launched = not self._paused and self._launch()
        self._commit(launched)
        if board.events:
            events, board.events = board.events, []
            self.sink(events)
        if board.in_flight or (board.sequences and not self._paused):
            return True
        self._came_to_rest()
        return False

    @property
    def next_deadline(self) -> float | None:
        """When a tick is due although nothing came in (``time.monotonic`` seconds)."""
        return self._deadlines.next

    def recover(self, error: BaseException) -> None:
        """A tick raised: end what runs with ``error``; what waits goes on."""
        board, now = self._board, self._clock()
        with torch.inference_mode():  # rows that are left are wiped in place
            for seq in [s for s in board.sequences.values() if s.lease is not None]:
                board.fault(seq, fault(seq.id, "the lane failed", error), now)
            while board.in_flight:
                board.unpin(board.in_flight.popleft())

    def _take_in(self) -> None:
        # Before the works: whoever cancelled one had submitted it, and nothing came in after an abort.
        board, aborted, cancelled = self._board, self._aborted, self._intake.cancelled()
        for seq in self._intake.submitted():
            self._arrivals += 1
            seq.arrival = self._arrivals
            board.sequences[seq.id] = seq
            self._deadlines.add(seq.id, seq.work.deadline)
            self._admission.enqueue(seq)
        now = self._clock()
        for work_id in cancelled:
            if work_id in board.sequences:
                board.cancel(board.sequences[work_id], now)
        if aborted is not None:
            for seq in list(board.sequences.values()):
                board.fail(seq, aborted, now)

    def _expire(self, at: float) -> None:
        now = self._clock()
        if now < at:
            return
        for work_id in self._deadlines.expired(now):
            seq = self._board.sequences.get(work_id)
            if seq is not None:
                waited = now - seq.work.submitted
                self._board.fail(
                    seq,
                    RequestTimeoutError(
                        f"work {seq.id} did not finish within {waited:.1f} s (queue time included), with "
                        f"{len(seq.tokens)} tokens so far. Retry, or raise timeout_s."
                    ),
                    now,
                )

    def _launch(self) -> bool:
        """Launch the next step; False when there is nothing to run now."""
        board = self._board
        depth = self._depth()
        while len(board.in_flight) >= depth:
            self._commit_oldest()
        now = self._clock()
        if len(self._admission) and (board.room or board.is_still):
            self._admission.admit(now)
        if board.prefilling:
            outcome = board.encoder.advance(board.prefilling)
            board.counters.encoded_items += outcome.items
            for seq, error in outcome.failed:
                board.fault(seq, error, now)
        self._admission.equip(now)
        step = Step(decode=self._launcher.decode(now) if board.decoding else None)
        if step.decode is not None:
            board.in_flight.append(step)
        if board.prefilling:
            rows = 0 if step.decode is None else len(step.decode.members)
            step.prefill = self._launcher.prefill(rows, now)
            if step.prefill is not None and step.decode is None:
                board.in_flight.append(step)
        launched = step.decode is not None or step.prefill is not None
        board.counters.steps += launched
        return launched

    def _depth(self) -> int:
        """Steps that may be in flight: one while the host has a say between the steps of some sequence."""
        return 1 if self._board.num_gated else self.config.steps_in_flight

    def _commit(self, launched: bool) -> None:
        in_flight = self._board.in_flight
        while in_flight and (not launched or len(in_flight) >= self._depth()):
            self._commit_oldest()

    def _commit_oldest(self) -> None:
        step = self._board.in_flight.popleft()
        self._committer.commit(step, self._clock)
