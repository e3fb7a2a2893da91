"""The engine: models, device threads and the public asynchronous API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from kestrel.config import Environment, RuntimeConfig
from kestrel.engine.calls import CallRunner
from kestrel.engine.fleet import Fleet, ProgressReport
from kestrel.engine.loaded import LoadedModel
from kestrel.engine.media import PreparedMedia
from kestrel.engine.models import GivenSettings, Verbs
from kestrel.engine.router import Router
from kestrel.engine.streams import EngineStream
from kestrel.engine.telemetry import Telemetry
from kestrel.errors import EngineStoppedError, InvalidRequestError
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel.spi import ModelInfo
from kestrel.types import EngineResult

__all__ = ["InferenceEngine", "ModelHandle", "installed_plugins"]

log = logging.getLogger("kestrel.engine")


class ModelHandle(Verbs):
    """One model of an engine, with every verb."""

    def __init__(self, engine: InferenceEngine, model_id: str) -> None:
        self._engine = engine
        self.model_id = model_id

    @property
    def info(self) -> ModelInfo:
        """What the family says of the checkpoint."""
        return self._engine.fleet.slot(self.model_id).info

    @property
    def skills(self) -> tuple[str, ...]:
        """The skills that this model can do."""
        return self._engine.fleet.slot(self.model_id).skills

    def supports(self, skill: str) -> bool:
        """Whether this model can do ``skill``."""
        return skill in self.skills

    async def run(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineResult:
        return await self._engine._run(self.model_id, skill, inputs, settings)

    async def start_stream(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineStream:
        return await self._engine._stream(self.model_id, skill, inputs, settings)

    async def stream(self, skill: str, settings: GivenSettings = None, **inputs: Any) -> EngineStream:
        """A stream of any skill, its inputs as keywords."""
        return await self.start_stream(skill, inputs, settings)

    async def prepare(self, image: Any, settings: GivenSettings = None) -> PreparedMedia:
        """``image`` decoded and prepared once; accepted wherever this model takes an image."""
        return await self._engine._prepare(self.model_id, image, settings)


class InferenceEngine(Verbs):
    """An in-process inference engine. Make one with ``await InferenceEngine.create(...)``.

    The verbs of the engine are those of its first model; ``model(id)`` gives the others. Everything runs on the
    event loop that created it, a bounded pool for CPU work, and one thread per device.
    """

    def __init__(self, fleet: Fleet, calls: CallRunner) -> None:
        self.fleet = fleet
        self._calls = calls
        self._default = fleet.default_id
        self._stopping = False

    @classmethod
    async def create(
        cls,
        config: RuntimeConfig | str | None = None,
        models: Sequence[RuntimeConfig | str] = (),
        adapter_provider: object | None = None,
        api_key: str | None = None,
        progress: ProgressReport | None = None,
        plugins: PluginHost | None = None,
    ) -> InferenceEngine:
        """An engine with its models loaded; the first is the default one.

        ``config`` None picks the embedded model. ``progress(stage, done, total)`` reports "download", "load" and
        "warm-up" from worker threads. ``plugins`` replaces the installed ones (tests, embedding hosts).
        Raises UnknownModelError, LoadError, CapacityError, NoKernelError or PluginError, with everything that
        was started taken down again: a second ``create`` starts afresh.
        """
        if adapter_provider is not None or api_key is not None:
            raise InvalidRequestError(
                "adapters are not supported yet; leave adapter_provider and api_key out"
            )
        configs = [_as_config(item) for item in (config, *models)]
        host = plugins if plugins is not None else await asyncio.to_thread(installed_plugins)
        pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="kestrel-cpu")
        fleet = Fleet(configs, host, Router(asyncio.get_running_loop()), pool, progress)
        try:
            await fleet.start()
        except BaseException:
            await fleet.stop(abort=True)
            raise
        telemetry = Telemetry(
            configs[0].service_name,
            running=fleet.gauge("running"),
            waiting=fleet.gauge("waiting"),
            cache_usage=fleet.gauge("cache_usage"),
        )
        return cls(fleet, CallRunner(telemetry, host.request_finished))

    async def __aenter__(self) -> InferenceEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(drain=kind is None)

    @property
    def models(self) -> tuple[str, ...]:
        """Ids of the engine's models, the default one first."""
        return self.fleet.model_ids

    def model(self, model_id: str | None = None) -> ModelHandle:
        """The handle of a model (None: the default). UnknownModelError names the engine's models."""
        return ModelHandle(self, self.fleet.slot(model_id or self._default).model_id)

    async def run(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineResult:
        return await self._run(self._default, skill, inputs, settings)

    async def start_stream(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineStream:
        return await self._stream(self._default, skill, inputs, settings)

    async def prepare(self, image: Any, settings: GivenSettings = None) -> PreparedMedia:
        """``image`` decoded and prepared once by the default model; accepted wherever an image is."""
        return await self._prepare(self._default, image, settings)

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters of each loaded model's lane: running, waiting, cache usage, steps, preemptions, …"""
        return self.fleet.stats()

    async def pause(self) -> None:
        """Stop launching steps, keep every state. Requests wait (their timeouts go on)."""
        self._check()
        await self.fleet.pause()

    async def resume(self) -> None:
        """Go on after ``pause``."""
        self._check()
        await self.fleet.resume()

    async def shutdown(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Stop the engine. ``drain``: let running and queued requests finish first (at most ``timeout_s``), then
        abort the rest with EngineStoppedError. Without ``drain`` all are aborted at once. Idempotent."""
        self._stopping = True
        await self.fleet.stop(abort=not drain, timeout_s=timeout_s)

    async def _run(
        self, model_id: str, skill: str, inputs: Mapping[str, Any], settings: GivenSettings
    ) -> EngineResult:
        async with self._model(model_id) as model:
            return await self._calls.run(model, self.fleet.skill(skill), inputs, settings)

    async def _stream(
        self, model_id: str, skill: str, inputs: Mapping[str, Any], settings: GivenSettings
    ) -> EngineStream:
        async with self._model(model_id) as model:
            return self._calls.stream(model, self.fleet.skill(skill), inputs, settings)

    async def _prepare(self, model_id: str, image: Any, settings: GivenSettings) -> PreparedMedia:
        async with self._model(model_id) as model:
            return await model.prepare("image", image, settings)

    @contextlib.asynccontextmanager
    async def _model(self, model_id: str) -> AsyncIterator[LoadedModel]:
        self._check()
        model = await self.fleet.ready(model_id)
        with model.in_use():
            yield model

    def _check(self) -> None:
        if self._stopping:
            raise EngineStoppedError("the engine is stopping or stopped; create a new one")


def installed_plugins() -> PluginHost:
    """The installed plugins (those that ``KESTREL_PLUGINS`` names, when set) beside the built-in skills."""
    return PluginHost.load(Environment.read(), skills=builtin_skills())


def _as_config(item: RuntimeConfig | str | None) -> RuntimeConfig:
    if isinstance(item, RuntimeConfig):
        return item
    if item is None or isinstance(item, str):
        return RuntimeConfig(model=item)
    raise InvalidRequestError(f"a model is a name or a RuntimeConfig, not a {type(item).__name__}")
