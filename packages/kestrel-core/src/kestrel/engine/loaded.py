"""A loaded model: its drivers, its lane, and what a call needs of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kestrel.config import Settings
from kestrel.engine.loading import Blueprint, ProgressReport
from kestrel.engine.media import MediaIntake, PreparedMedia
from kestrel.engine.memory import Demand
from kestrel.engine.router import Router
from kestrel.errors import EngineStoppedError, InvalidRequestError, KestrelError
from kestrel.lanes import DeviceThread, StepLane, StepWork, TokenLane, Work, build_token_lane
from kestrel.loading import SafetensorsReader, load_tokenizer
from kestrel.media import MediaBudget, MediaLimits
from kestrel.ops import OpTable, resolve_ops
from kestrel.plugins import PluginHost
from kestrel.sampling import SamplingParams
from kestrel.spi import (
    BuildContext,
    Built,
    PromptFormat,
    Request,
    StepDriver,
    TextTokenizer,
    TokenDriver,
)
from kestrel.state import KeyRun
from kestrel.types import Layout, Media, Prepared

if TYPE_CHECKING:
    from kestrel.engine.infer import CallScope

__all__ = ["LoadedModel", "Shared", "load_model"]

log = logging.getLogger("kestrel.engine")

MakeWork = Callable[["CallScope", int, int, bool], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all models of an engine share."""

    router: Router
    pool: Executor
    media_budget: MediaBudget
    host: PluginHost


class LoadedModel:
    """One model, ready to serve. ``in_use`` counts calls, so that idle models can be told from busy ones."""

    no_settings = Settings()

    def __init__(
        self,
        blueprint: Blueprint,
        built: Built,
        lane: TokenLane | StepLane,
        thread: DeviceThread,
        shared: Shared,
        ops: OpTable,
    ) -> None:
        self.blueprint = blueprint
        self.model_id = blueprint.card.model_id
        self.built = built
        self.lane = lane
        self.thread = thread
        self.router = shared.router
        self.pool = shared.pool
        self.ops = ops
        self.tokenizer: TextTokenizer | None = built.main.tokenizer
        config = blueprint.config
        limits = MediaLimits.of(config)
        self.intake = MediaIntake(self.model_id, built.main, limits, shared.media_budget, shared.pool)
        self.on_idle: Callable[[], None] | None = None
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_busy(self) -> bool:
        """Some call is under way."""
        return self._users > 0

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Held by every call; on the event loop."""
        self._users += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()
                if self.on_idle is not None:
                    self.on_idle()

    async def wait_idle(self) -> None:
        """Until no call is under way."""
        await self._idle.wait()

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

    async def prepare(self, role: str, raw: Any, given: Any) -> PreparedMedia:
        """Media prepared on the pool."""
        settings = Settings.from_mapping(given)
        self.intake.check([(role, raw)])
        return await self.intake.prepare(role, raw, settings)

    def works(self, request: Request) -> MakeWork:
        """What makes the request's works, one per output; tokenising and layout happen here, on a pool thread."""
        if isinstance(self.lane, StepLane):
            return self._step_works(request)
        driver, lane = self.built.main, self.lane
        assert isinstance(driver, TokenDriver)
        layout: Layout = driver.layout(request.segments)
        params = SamplingParams.resolve(request.settings, request.decoding, driver.spec)
        keys = KeyRun.of(layout, lane.interner)
        group: object = object()

        def make(scope: CallScope, work_id: int, choice: int, exempt: bool) -> Work:
            return Work(
                id=work_id,
                layout=layout,
                keys=keys,
                params=params,
                decoding=request.decoding,
                seed=scope.seed,
                choice=choice,
                group=group if request.settings.n > 1 else None,
                n_siblings=request.settings.n,
                probes=request.probes,
                deadline=scope.deadline,
                priority=request.settings.priority,
                submitted=scope.submitted,
                exempt_queue=exempt,
            )

        return make

    def _step_works(self, request: Request) -> MakeWork:
        items = [segment.prepared for segment in request.segments if isinstance(segment, Media)]
        if len(items) != 1 or len(request.segments) != 1:
            raise InvalidRequestError(f"{self.model_id} takes exactly one media item per request")

        def make(scope: CallScope, work_id: int, choice: int, exempt: bool) -> StepWork:
            return StepWork(
                id=work_id,
                prepared=items[0],
                submitted=scope.submitted,
                deadline=scope.deadline,
                priority=request.settings.priority,
                exempt_queue=exempt,
            )

        return make

    def encode_for_pass(self, media: Sequence[Prepared]) -> list[Any]:
        """Encoded media of a pass, one entry per item; on the device thread."""
        driver = self.built.main
        if not media or not isinstance(driver, TokenDriver):
            return []
        with torch.inference_mode():
            return [driver.encode(item.kind, [item]) for item in media]

    def stats(self) -> dict[str, float]:
        """Counters of the lane."""
        return dict(self.lane.stats())

    def close(self, error: KestrelError | None = None) -> None:
        """Abort what runs with ``error`` and give everything back. Blocks until the device thread has let go."""
        self.lane.abort(error or EngineStoppedError(f"model {self.model_id!r} was closed"))
        self.thread.remove(self.lane)


def load_model(
    blueprint: Blueprint,
    device: torch.device,
    demand: Demand,
    thread: DeviceThread,
    shared: Shared,
    progress: ProgressReport | None,
) -> LoadedModel:
    """The model built and on its device thread; runs on a worker thread.

    Raises LoadError, CapacityError or NoKernelError.
    """
    config, card = blueprint.config, blueprint.card
    if progress is not None:
        progress("load", 0, demand.weight_bytes)
    backends = tuple(shared.host.backends.values())
    ops = resolve_ops((), device, backends, overrides=config.ops, strict=config.strict_ops)
    with SafetensorsReader.of(card) as reader:
        context = BuildContext(
            device=device,
            dtype=demand.dtype,
            ops=ops,
            weights=reader,
            tokenizer=lambda: load_tokenizer(blueprint.tokenizer_path),
            config=config,
        )
        built = blueprint.family.build(card, context)
    for query in built.main.spec.op_needs:
        ops.resolve(query)
    if progress is not None:
        progress("load", demand.weight_bytes, demand.weight_bytes)
    lane = _make_lane(built, blueprint, device, demand, shared.router)
    thread.add(lane)
    return LoadedModel(blueprint, built, lane, thread, shared, ops)


def _make_lane(
    built: Built, blueprint: Blueprint, device: torch.device, demand: Demand, router: Router
) -> TokenLane | StepLane:
    config, driver = blueprint.config, built.main
    if isinstance(driver, StepDriver):
        return StepLane(driver, max_queue=config.max_queue, sink=router.deliver)
    most = driver.spec.max_positions
    if config.max_model_len is not None and config.max_model_len > most:
        raise InvalidRequestError(
            f"max_model_len is {config.max_model_len}; {blueprint.card.model_id} has a context of {most}"
        )
    lane = build_token_lane(
        driver,
        config,
        device=device,
        dtype=demand.dtype,
        kv_bytes=demand.kv_bytes,
        sink=router.deliver,
        setting=demand.setting,
    )
    if config.max_model_len is None and lane.limits.max_len < most:
        log.warning(
            "the context is limited to %d of %d positions by %s; raise it, or set max_model_len",
            lane.limits.max_len,
            most,
            demand.setting,
        )
    return lane
