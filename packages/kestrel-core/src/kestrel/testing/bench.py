"""Drives a token lane by hand: submit, tick until idle, see what each work got and that nothing leaked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kestrel.config import Settings
from kestrel.device.graphs import Graphs
from kestrel.lanes import Event, Failed, Finished, TokensReady, Work
from kestrel.lanes.limits import LaneConfig
from kestrel.lanes.token import TokenLane
from kestrel.sampling import Sampler, SamplingParams
from kestrel.spi.decoding import Decoding
from kestrel.spi.driver import TokenDriver
from kestrel.spi.states import WindowKV
from kestrel.state import FeaturePool, KeyRun, PoolSizes, StateCache
from kestrel.testing.invariants import check_idle, check_running
from kestrel.types import Layout, Token

__all__ = ["CPU", "Bench", "Clock", "Outcome"]

CPU = torch.device("cpu")


@dataclass
class Outcome:
    """What one work got."""

    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None
    error: BaseException | None = None

    @property
    def ids(self) -> list[int]:
        """The generated ids."""
        return [token.id for token in self.tokens]

    @property
    def ended(self) -> bool:
        """Its last event came."""
        return self.finished is not None or self.error is not None


class Clock:
    """A clock that moves when told to, and a microsecond at each look."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Bench:
    """A token lane over a toy driver, and the outcomes of its works."""

    def __init__(
        self,
        driver: TokenDriver,
        *,
        pages: int = 64,
        page_size: int = 4,
        max_rows: int = 4,
        budget: int = 16,
        depth: int = 1,
        prefix_cache: bool = True,
        max_queue: int = 100_000,
        feature_rows: int = 32,
        deterministic: bool = False,
        window_pages: int | None = None,
        checkpoints: int = 8,
        entries: int = 4,
        max_len: int = 256,
        head_start: int = 8,
        device: torch.device = CPU,
        graphs: Graphs | None = None,
    ) -> None:
        """``graphs``: programs are captured with them; None: every launch runs op by op."""
        spec = driver.spec
        windows = {s.window: window_pages or pages for s in spec.states if isinstance(s, WindowKV)}
        self.cache = StateCache(
            spec,
            device=device,
            dtype=torch.float32,
            page_size=page_size,
            sizes=PoolSizes(
                pages=pages,
                window_pages=windows,
                live_slots=max_rows,
                checkpoint_slots=checkpoints,
                cross_entries=entries,
            ),
            max_ahead=depth * (budget + 1),
            prefix_cache=prefix_cache,
        )
        features = None
        if spec.media:
            features = FeaturePool(feature_rows, spec.hidden_size, device=device, dtype=torch.float32)
        self.clock = Clock()
        self.driver = driver
        self.outcomes: dict[int, Outcome] = {}
        self.lane = TokenLane(
            driver,
            cache=self.cache,
            sampler=Sampler(spec, max_rows, device, branch_free=graphs is not None or None),
            features=features,
            config=LaneConfig(
                max_rows=max_rows,
                max_batched_tokens=budget,
                max_len=max_len,
                steps_in_flight=depth,
                max_queue=max_queue,
                prefix_cache=prefix_cache,
                head_start=head_start,
                deterministic=deterministic,
            ),
            device=device,
            sink=self.take,
            clock=self.clock,
        )
        self._next = 0
        if graphs is not None:
            self.lane.warm_up()
            self.lane.capture(graphs)
            self.lane.capture_prefill()

    def take(self, events: Sequence[Event]) -> None:
        """The lane's sink."""
        for event in events:
            outcome = self.outcomes[event.work_id]
            assert not outcome.ended, f"an event after the end: {event}"
            match event:
                case TokensReady(tokens=tokens):
                    assert tokens
                    outcome.tokens += tokens
                case Finished():
                    outcome.finished = event
                case Failed(error=error):
                    outcome.error = error

    def work(
        self,
        layout: Layout | Sequence[int],
        *,
        max_tokens: int | None = 8,
        decoding: Decoding | None = None,
        stop: Sequence[int] = (),
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> Work:
        """A work with a fresh id: greedy unless ``settings`` say otherwise, ended by ``stop`` ids."""
        if not isinstance(layout, Layout):
            layout = Layout(tokens=tuple(layout))
        decoding = decoding or Decoding(stop_ids=frozenset(stop))
        resolved = Settings(max_tokens=max_tokens, temperature=0.0).with_(**(settings or {}))
        self._next += 1
        more.setdefault("submitted", self.clock())
        return Work(
            id=self._next,
            layout=layout,
            keys=KeyRun.of(layout, self.lane.interner),
            params=SamplingParams.resolve(resolved, decoding, self.driver.spec),
            decoding=decoding,
            seed=more.pop("seed", 1),
            **more,
        )

    def submit(self, layout: Work | Layout | Sequence[int], **more: Any) -> int:
        """Submit a work (or what ``work`` makes of the arguments); its id."""
        work = layout if isinstance(layout, Work) else self.work(layout, **more)
        self.lane.submit(work)  # a work that is refused has no outcome
        self.outcomes[work.id] = Outcome()
        return work.id

    def tick(self, count: int = 1) -> bool:
        """``count`` ticks, each followed by the checks that hold at any time; what the last one returned."""
        more = True
        for _ in range(count):
            more = self.lane.tick()
            check_running(self.lane)
        return more

    def run(self, until: Callable[[], bool] | None = None, limit: int = 5000) -> None:
        """Tick until ``until`` holds, or until nothing is left to do: then nothing may be held."""
        for _ in range(limit):
            if until is not None and until():
                return
            if not self.tick():
                break
        else:
            raise AssertionError("the lane does not come to rest")
        if until is None:
            check_idle(self.lane)
            assert all(outcome.ended for outcome in self.outcomes.values())

    def generate(self, layout: Work | Layout | Sequence[int], **more: Any) -> Outcome:
        """Submit one work and run until the lane is idle."""
        work_id = self.submit(layout, **more)
        self.run()
        return self.outcomes[work_id]
