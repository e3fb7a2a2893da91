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

from kestrel.config import RuntimeConfig, Settings
from kestrel.device import has_streams
from kestrel.engine.loading import Blueprint, ProgressReport
from kestrel.engine.media import MediaIntake, PreparedMedia
from kestrel.engine.memory import Demand
from kestrel.engine.router import Router
from kestrel.errors import CapacityError, EngineStoppedError, InvalidRequestError, KestrelError
from kestrel.lanes import DeviceThread, LaneConfig, StepLane, StepWork, TokenLane, Work
from kestrel.loading import SafetensorsReader, load_tokenizer
from kestrel.media import MediaBudget, MediaLimits
from kestrel.ops import OpTable, resolve_ops
from kestrel.plugins import PluginHost
from kestrel.sampling import Sampler, SamplingParams
from kestrel.spi import (
    BuildContext,
    Built,
    PromptFormat,
    Request,
    StepDriver,
    TextTokenizer,
    TokenDriver,
    TokenSpec,
)
from kestrel.state import FeaturePool, KeyRun, PoolSizes, StateCache, fixed_pages, plan_sizes
from kestrel.types import Layout, Media, Prepared

if TYPE_CHECKING:
    from kestrel.engine.infer import CallScope

__all__ = ["LoadedModel", "Shared", "load_model"]

log = logging.getLogger("kestrel.engine")

FEATURE_LAUNCHES = 4
LEAST_CONTEXT = 1024  # below, a model that does not fit is an error rather than a smaller model
MOST_FEATURE_ROWS = 32_768

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
    spec = driver.spec
    if config.max_model_len is not None and config.max_model_len > spec.max_positions:
        raise InvalidRequestError(
            f"max_model_len is {config.max_model_len}; {blueprint.card.model_id} has a context of {spec.max_positions}"
        )
    steps = config.steps_in_flight or (2 if has_streams(device) else 1)
    max_len, sizes = _fit(spec, config, demand, steps * config.max_batched_tokens)
    cache = StateCache(
        spec,
        device=device,
        dtype=demand.dtype,
        page_size=config.page_size,
        sizes=sizes,
        max_ahead=steps * config.max_batched_tokens,
        prefix_cache=config.enable_prefix_cache,
    )
    lane_config = LaneConfig(
        max_rows=config.max_batch_size,
        max_batched_tokens=config.max_batched_tokens,
        max_len=max_len,
        steps_in_flight=steps,
        max_queue=config.max_queue,
        prefix_cache=config.enable_prefix_cache,
        deterministic=config.deterministic,
    )
    return TokenLane(
        driver,
        cache=cache,
        sampler=Sampler(spec, max_rows=config.max_batch_size, device=device),
        features=_features(spec, config, max_len, device, demand.dtype),
        config=lane_config,
        device=device,
        sink=router.deliver,
    )


def _fit(spec: TokenSpec, config: RuntimeConfig, demand: Demand, max_ahead: int) -> tuple[int, PoolSizes]:
    """The context and its pools. A context that nobody asked for is halved until it fits, and that is logged."""
    max_len = config.max_model_len or spec.max_positions
    while True:
        try:
            sizes = _pool_sizes(spec, config, demand, max_len, max_ahead)
        except CapacityError:
            if config.max_model_len is not None or max_len < 2 * LEAST_CONTEXT:
                raise
            max_len //= 2
            continue
        if max_len < (config.max_model_len or spec.max_positions):
            log.warning(
                "the context is limited to %d of %d positions by %s; raise it, or set max_model_len",
                max_len, spec.max_positions, demand.setting,
            )  # fmt: skip
        return max_len, sizes


def _pool_sizes(
    spec: TokenSpec, config: RuntimeConfig, demand: Demand, max_len: int, max_ahead: int
) -> PoolSizes:
    if demand.kv_pages is not None:
        return fixed_pages(
            spec,
            demand.kv_pages,
            page_size=config.page_size,
            max_rows=config.max_batch_size,
            max_ahead=max_ahead,
        )
    return plan_sizes(
        spec,
        demand.kv_bytes,
        dtype=demand.dtype,
        page_size=config.page_size,
        max_rows=config.max_batch_size,
        max_len=max_len,
        max_ahead=max_ahead,
        setting=demand.setting,
    )


def _features(
    spec: TokenSpec, config: RuntimeConfig, max_len: int, device: torch.device, dtype: torch.dtype
) -> FeaturePool | None:
    """Encoder features of media under way: a few launches' worth, and never less than one whole context."""
    if not any(media.into == "positions" for media in spec.media):
        return None
    rows = max(FEATURE_LAUNCHES * config.max_batched_tokens, min(max_len, MOST_FEATURE_ROWS))
    return FeaturePool(rows, spec.hidden_size, device=device, dtype=dtype)
