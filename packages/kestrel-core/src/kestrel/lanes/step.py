"""The step lane: transducers, detectors, embedders. States are started, stepped together and closed exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kestrel.errors import CapacityError, RequestTimeoutError
from kestrel.lanes.deadlines import Deadlines
from kestrel.lanes.events import Event, Failed, Finished, TokensReady
from kestrel.lanes.faults import fault, own_error
from kestrel.lanes.lane import QueuedLane
from kestrel.lanes.work import StepWork
from kestrel.plan import WaitQueue
from kestrel.spi.driver import Progress, StepDriver
from kestrel.types import Metrics

__all__ = ["StepLane"]


@dataclass(slots=True, eq=False)
class _Item:
    """A work on its way; ``state`` is the driver's: the one carried in until it is started."""

    work: StepWork
    cost: int
    arrival: int = 0
    state: Any = None
    num_tokens: int = 0
    admitted_at: float | None = None
    first_at: float | None = None


@dataclass(slots=True)
class _Counters:
    steps: int = 0
    generated_tokens: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    faults: int = 0


@dataclass(slots=True)
class _Board:
    known: dict[int, _Item] = field(default_factory=dict)
    running: list[_Item] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    counters: _Counters = field(default_factory=_Counters)


class StepLane(QueuedLane[_Item]):
    """Drives one ``StepDriver`` within its ``max_rows`` and ``max_units``; threads as for ``TokenLane``."""

    def __init__(
        self,
        driver: StepDriver,
        *,
        sink: Callable[[list[Event]], None],
        max_queue: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_queue)
        self.driver, self.sink = driver, sink
        self._clock = clock
        self._queue: WaitQueue[_Item] = WaitQueue()
        self._board = _Board()
        self._deadlines = Deadlines(self._board.known)
        self._arrivals = 0

    # -- any thread

    def submit(self, work: StepWork) -> None:
        """Take ``work``. Raises CapacityError when its item alone exceeds a launch, EngineBusyError when the queue is
        full, EngineStoppedError when the lane takes nothing any more."""
        cost, most = self.driver.cost(work.prepared), self.driver.spec.max_units
        if cost > most:
            raise CapacityError(
                f"the item costs {cost} units, a launch takes {most}. Give a shorter or smaller item."
            )
        self._intake.submit(_Item(work, cost, state=work.carried), exempt=work.exempt_queue)

    @property
    def is_idle(self) -> bool:
        return self._intake.is_empty and not self._intake.waiting and not self._board.known

    def stats(self) -> dict[str, float]:
        """Gauges and counters, by name."""
        counters = self._board.counters
        return {
            "running": len(self._board.running),
            "waiting": self._intake.waiting,
            "steps": counters.steps,
            "generated_tokens": counters.generated_tokens,
            "finished": counters.finished,
            "failed": counters.failed,
            "cancelled": counters.cancelled,
            "faults": counters.faults,
        }

    # -- device thread

    @property
    def next_deadline(self) -> float | None:
        """When a tick is due although nothing came in."""
        return self._deadlines.next

    def tick(self) -> bool:
        """One round: take in, start what fits, advance every state once."""
        board = self._board
        with torch.inference_mode():
            self._take_in()
            self._expire()
            if not self._paused:
                self._start()
                self._step()
        if board.events:
            events, board.events = board.events, []
            self.sink(events)
        if board.known and not self._paused:
            return True
        self._came_to_rest()
        return False

    def recover(self, error: BaseException) -> None:
        """A tick raised: end what runs with ``error``."""
        for item in list(self._board.running):
            self._fail(item, fault(item.work.id, "the lane failed", error))

    def _take_in(self) -> None:
        # Before the works, as in the token lane: a cancellation or an abort never overtakes a work.
        known, aborted, cancelled = self._board.known, self._aborted, self._intake.cancelled()
        for item in self._intake.submitted():
            self._arrivals += 1
            item.arrival = self._arrivals
            work = item.work
            known[work.id] = item
            self._deadlines.add(work.id, work.deadline)
            self._queue.push(
                work.id, item, priority=work.priority, submitted=work.submitted, arrival=item.arrival
            )
        for work_id in cancelled:
            if work_id in known:
                item = known[work_id]
                self._board.counters.cancelled += 1
                self._end(
                    item, Finished(work_id=work_id, finish_reason="cancelled", metrics=self._metrics(item))
                )
        if aborted is not None:
            for item in list(known.values()):
                self._fail(item, aborted)

    def _expire(self) -> None:
        at = self._deadlines.next
        if at is None or self._clock() < at:
            return
        for work_id in self._deadlines.expired(self._clock()):
            item = self._board.known.get(work_id)
            if item is not None:
                error = RequestTimeoutError(
                    f"work {work_id} did not finish in time (queue time included). Retry, or raise timeout_s."
                )
                self._fail(item, error)

    def _start(self) -> None:
        """Start waiting items, in order, while rows and units last; encoded together."""
        spec, running = self.driver.spec, self._board.running
        rows = spec.max_rows - len(running)
        units = spec.max_units - sum(item.cost for item in running)
        chosen: list[_Item] = []
        while len(chosen) < rows and (item := self._queue.peek()) is not None and item.cost <= units:
            chosen.append(self._queue.pop())
            units -= item.cost
        if not chosen:
            return
        self._intake.left_queue(len(chosen))
        now = self._clock()
        for item in chosen:
            item.admitted_at = now
        running += chosen
        self._begin(chosen)

    def _begin(self, chosen: list[_Item]) -> None:
        """Make the states of ``chosen``: together, or where that fails one by one, so that none fails for another."""
        try:
            states = self.driver.start(
                [item.work.prepared for item in chosen], [item.work.carried for item in chosen]
            )
            assert len(states) == len(chosen), f"{len(states)} states came for {len(chosen)} items"
        except Exception as error:
            if len(chosen) == 1:
                self._isolate(chosen, "starting failed", error)
                return
            for item in chosen:
                self._begin([item])
            return
        for item, state in zip(chosen, states, strict=True):
            carried, item.state = item.state, state
            if carried is not None and carried is not state:  # its clip goes on in the new state
                self._close_carried(item, carried)

    def _close_carried(self, item: _Item, carried: Any) -> None:
        try:
            self.driver.close(carried)
        except Exception as error:
            self._isolate([item], "closing the state it carried failed", error)

    def _isolate(self, chosen: list[_Item], what: str, error: Exception) -> None:
        for item in chosen:
            self._board.counters.faults += 1
            self._fail(item, own_error(item.work.id, what, error))

    def _step(self) -> None:
        running = list(self._board.running)
        if not running:
            return
        self._board.counters.steps += 1
        try:
            progress = self.driver.step([item.state for item in running])
            assert len(progress) == len(running), (
                f"progress of {len(progress)} came for {len(running)} states"
            )
        except Exception as error:  # as in start
            self._isolate(running, "a step failed", error)
            return
        now = self._clock()
        for item, made in zip(running, progress, strict=True):
            self._take(item, made, now)

    def _take(self, item: _Item, made: Progress, now: float) -> None:
        board, work = self._board, item.work
        if made.tokens:
            item.first_at = item.first_at or now
            item.num_tokens += len(made.tokens)
            board.counters.generated_tokens += len(made.tokens)
            board.events.append(TokensReady(work.id, list(made.tokens), made.frames, made.durations))
        if made.done:
            carried = item.state if work.keep_state else None
            board.counters.finished += 1
            end = Finished(
                work_id=work.id,
                finish_reason="stop",
                metrics=self._metrics(item),
                output=made.output,
                carried=carried,
            )
            self._end(item, end, closes=not work.keep_state)

    def _fail(self, item: _Item, error: BaseException) -> None:
        self._board.counters.failed += 1
        self._end(item, Failed(work_id=item.work.id, error=error, metrics=self._metrics(item)))

    def _end(self, item: _Item, event: Event, *, closes: bool = True) -> None:
        board = self._board
        del board.known[item.work.id]
        if self._queue.remove(item.work.id) is not None:
            self._intake.left_queue()
        elif item in board.running:
            board.running.remove(item)
        board.events.append(event)
        state, item.state = item.state, None
        if closes and state is not None:
            try:
                self.driver.close(state)
            except Exception as error:  # told already; a state that cannot be closed is lost
                board.counters.faults += 1
                board.events[-1] = Failed(
                    work_id=item.work.id, error=own_error(item.work.id, "closing its state failed", error)
                )

    def _metrics(self, item: _Item) -> Metrics:
        now, submitted = self._clock(), item.work.submitted
        admitted = now if item.admitted_at is None else item.admitted_at
        first = now if item.first_at is None else item.first_at
        return Metrics(
            output_tokens=item.num_tokens,
            queue_time_ms=(admitted - submitted) * 1e3,
            prefill_time_ms=(first - admitted) * 1e3,
            decode_time_ms=(now - first) * 1e3,
            ttft_ms=(first - submitted) * 1e3 if item.first_at is not None else 0.0,
        )
