"""A loaded model: its drivers, its lane, and what a call needs of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kestrel.engine.decode_path import DecodePath
from kestrel.engine.loading import Blueprint
from kestrel.engine.media import MediaIntake
from kestrel.engine.pool import CpuPool
from kestrel.engine.router import Router
from kestrel.errors import EngineBusyError, InvalidRequestError, KestrelError
from kestrel.lanes import DeviceThread, StepLane, StepWork, TokenLane, Work
from kestrel.lanes.hold import feature_key
from kestrel.media import DecoderProcesses, MediaBudget, MediaLimits
from kestrel.ops import OpTable
from kestrel.plugins import PluginHost
from kestrel.sampling import SamplingParams
from kestrel.spi import Built, PromptFormat, Request, TextTokenizer, TokenDriver
from kestrel.state import KeyRun
from kestrel.types import Layout, Media, Prepared

if TYPE_CHECKING:
    from kestrel.engine.scope import CallScope

__all__ = ["LoadedModel", "MakeWork", "Preparing", "Shared"]

MakeWork = Callable[[int, int, bool], Work | StepWork]
"""``make(work_id, choice, exempt)``: the work of one output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all models of an engine share. ``running`` is set while the engine is not paused. ``decoders``: processes
    that decode pictures, instead of the pool."""

    router: Router
    pool: CpuPool
    media_budget: MediaBudget
    host: PluginHost
    running: asyncio.Event
    decoders: DecoderProcesses | None = None


class Preparing:
    """A call's place among ``calls``, whose media are being prepared."""

    def __init__(self, calls: set[Preparing]) -> None:
        self._calls = calls
        calls.add(self)

    def close(self) -> None:
        """Give it up. Idempotent; on any thread, on two at once too."""
        self._calls.discard(self)


class LoadedModel:
    """One model, ready to serve."""

    def __init__(
        self,
        blueprint: Blueprint,
        built: Built,
        lane: TokenLane | StepLane,
        thread: DeviceThread,
        shared: Shared,
        ops: OpTable,
        decode: DecodePath,
    ) -> None:
        self.model_id = blueprint.card.model_id
        self.built = built
        self.lane = lane
        self.thread = thread
        self.router = shared.router
        self.pool = shared.pool
        self.running = shared.running
        self.ops = ops
        self.decode = decode
        self.tokenizer: TextTokenizer | None = built.main.tokenizer
        config = blueprint.config
        limits = MediaLimits.of(config)
        decode_picture = None if shared.decoders is None else shared.decoders.decode
        self.intake = MediaIntake(
            self.model_id, built.main, limits, shared.media_budget, shared.pool, decode_picture
        )
        self._max_queue = config.max_queue
        self._preparing: set[Preparing] = set()

    def require_skill(self, skill: str) -> PromptFormat:
        """The model's prompt format. InvalidRequestError when it does not do ``skill``, naming what it does."""
        prompt = self.built.prompt
        skills = prompt.skills if prompt is not None else frozenset()
        if prompt is None or skill not in skills:
            raise InvalidRequestError(
                f"{self.model_id} has no skill {skill!r}; it has: {', '.join(sorted(skills)) or 'none'}"
            )
        return prompt

    def require_tokenizer(self) -> TextTokenizer:
        """The model's tokenizer. InvalidRequestError when it has none."""
        if self.tokenizer is None:
            raise InvalidRequestError(f"{self.model_id} has no tokenizer, and this skill needs one")
        return self.tokenizer

    def preparing(self, media: Sequence[object]) -> Preparing:
        """Held by a call whose ``media`` are being prepared, before it reaches the queue. Without any it counts not.

        Raises EngineBusyError when those before it fill the queue already, so that nothing is decoded in vain.
        """
        if not media:
            return Preparing(set())
        waiting = len(self._preparing) + int(self.lane.stats()["waiting"])
        if waiting >= self._max_queue:
            raise EngineBusyError(
                f"{waiting} requests wait; max_queue is {self._max_queue}. Retry later, or raise it."
            )
        return Preparing(self._preparing)

    def works(self, request: Request, scope: CallScope) -> MakeWork:
        """What makes the request's works, one per output; tokenising and layout happen here, on a pool thread."""
        if isinstance(self.lane, StepLane):
            return self._step_works(request, scope)
        driver, lane = self.built.main, self.lane
        assert isinstance(driver, TokenDriver)
        settings = request.settings
        layout: Layout = driver.layout(request.segments)
        lane.limits.check_layout(layout)
        params = SamplingParams.resolve(settings, request.decoding, driver.spec)
        keys = KeyRun.of(layout, lane.interner)
        group: object = object()

        def make(work_id: int, choice: int, exempt: bool) -> Work:
            return Work(
                id=work_id,
                layout=layout,
                keys=keys,
                params=params,
                decoding=request.decoding,
                seed=scope.seed if settings.seed is None else settings.seed,
                choice=choice,
                group=group if settings.n > 1 else None,
                n_siblings=settings.n,
                probes=request.probes,
                deadline=scope.deadline,
                priority=settings.priority or scope.settings.priority,
                submitted=scope.submitted,
                exempt_queue=exempt,
            )

        return make

    def _step_works(self, request: Request, scope: CallScope) -> MakeWork:
        items = [segment.prepared for segment in request.segments if isinstance(segment, Media)]
        if len(items) != 1 or len(request.segments) != 1:
            raise InvalidRequestError(f"{self.model_id} takes exactly one media item per request")

        def make(work_id: int, choice: int, exempt: bool) -> StepWork:
            return StepWork(
                id=work_id,
                prepared=items[0],
                submitted=scope.submitted,
                deadline=scope.deadline,
                priority=request.settings.priority or scope.settings.priority,
                exempt_queue=exempt,
            )

        return make

    def submit(self, work: Work | StepWork) -> None:
        """Hand ``work`` to the lane; raises as the lanes' ``submit`` do."""
        if isinstance(self.lane, StepLane):
            assert isinstance(work, StepWork)
            self.lane.submit(work)
        else:
            assert isinstance(work, Work)
            self.lane.submit(work)

    @contextlib.contextmanager
    def encoded(self, media: Sequence[Prepared]) -> Iterator[list[Any]]:
        """Encoded media of a pass, one entry per item, from where the lane keeps them; on the device thread.

        Kinds that go to cross attention give ``{state: CrossView}`` of one row, others features [rows, C].
        """
        driver, lane = self.built.main, self.lane
        with contextlib.ExitStack() as held:
            if isinstance(driver, TokenDriver) and isinstance(lane, TokenLane):
                yield [_encode(driver, lane, item, held) for item in media]
            else:
                yield []

    def stats(self) -> dict[str, float]:
        """Counters of the lane."""
        return dict(self.lane.stats())

    def close(self, error: KestrelError) -> None:
        """Abort what runs with ``error`` and give everything back. Blocks until the device thread has let go."""
        self.lane.abort(error)
        self.thread.remove(self.lane)
        self.thread.call(_nothing).exception()  # once it has come to this, the thread holds the lane no more


def _nothing() -> None:
    pass


def _encode(driver: TokenDriver, lane: TokenLane, item: Prepared, held: contextlib.ExitStack) -> Any:
    """What the encoder made of ``item``; places of the lane that it lies in are given back with ``held``."""
    if driver.spec.media_spec(item.kind).into == "cross":
        return lane.borrow_cross(item, held)
    pool = lane.features
    found = None if pool is None else pool.find(feature_key(item))
    if found is not None and pool is not None:
        held.callback(pool.release, found)
        if found.is_written:
            return pool.tensor[found.start : found.start + found.rows]
    return driver.encode(item.kind, [item])
