"""The engine: models, device threads and the public asynchronous API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any

from kestrel import checks
from kestrel.config import Environment, RuntimeConfig
from kestrel.engine.calls import CallRunner
from kestrel.engine.fleet import Fleet, ProgressReport
from kestrel.engine.loop_thread import check_process
from kestrel.engine.media import PreparedMedia
from kestrel.engine.router import Router
from kestrel.engine.streams import EngineStream
from kestrel.engine.telemetry import Telemetry
from kestrel.engine.verbs import GivenSettings, Verbs
from kestrel.errors import EngineStoppedError, InvalidRequestError
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel.spi import ModelInfo
from kestrel.types import EngineResult

__all__ = ["InferenceEngine", "ModelHandle", "installed_plugins"]

AsyncVerbs = Verbs[Coroutine[Any, Any, EngineResult], Coroutine[Any, Any, EngineStream]]


class ModelHandle(AsyncVerbs):
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
        return await self._engine.calls().run(self.model_id, skill, inputs, settings)

    async def start_stream(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineStream:
        return await self._engine.calls().stream(self.model_id, skill, inputs, settings)

    async def prepare(self, image: Any, settings: GivenSettings = None) -> PreparedMedia:
        """``image`` decoded and prepared once; accepted wherever this model takes an image."""
        return await self._engine.calls().prepare(self.model_id, image, settings)


class InferenceEngine(AsyncVerbs):
    """An in-process inference engine. Make one with ``await InferenceEngine.create(...)``.

    The verbs of the engine are those of its first model; ``model(id)`` gives the others. Everything runs on the
    event loop that created it, a bounded pool for CPU work, and one thread per device.
    """

    def __init__(self, fleet: Fleet, calls: CallRunner, loop: asyncio.AbstractEventLoop) -> None:
        self.fleet = fleet
        self._calls = calls
        self._loop = loop
        self._pid = os.getpid()
        self._default = ModelHandle(self, fleet.default_id)
        self._is_stopping = False
        self._shutting = asyncio.Lock()

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

        ``config`` None picks the embedded model. ``progress(stage, done, total)`` is called from worker threads; the
        stages are "download FILE" and "load", both in bytes. ``plugins`` replaces the installed ones (tests,
        embedding hosts). Raises UnknownModelError, LoadError, CapacityError, NoKernelError or PluginError. Whatever
        ends it, a cancellation too, everything that was started is taken down: a second ``create`` starts afresh.
        """
        if adapter_provider is not None or api_key is not None:
            raise InvalidRequestError(
                "adapters are not supported yet; leave adapter_provider and api_key out"
            )
        configs = [_as_config(item) for item in (config, *models)]
        host = plugins if plugins is not None else await asyncio.to_thread(installed_plugins)
        loop = asyncio.get_running_loop()
        fleet = Fleet(configs, host, Router(loop), progress)
        try:
            await fleet.start()
        except BaseException:
            await fleet.stop()
            raise
        telemetry = Telemetry(configs[0].service_name, fleet.stats)
        return cls(fleet, CallRunner(fleet, telemetry, host.request_finished), loop)

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
        return self._default if model_id is None else ModelHandle(self, self.fleet.slot(model_id).model_id)

    async def run(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineResult:
        return await self._default.run(skill, inputs, settings)

    async def start_stream(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineStream:
        return await self._default.start_stream(skill, inputs, settings)

    async def prepare(self, image: Any, settings: GivenSettings = None) -> PreparedMedia:
        """``image`` decoded and prepared once by the default model; accepted wherever an image is."""
        return await self._default.prepare(image, settings)

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters of each loaded model's lane: running, waiting, cache usage, steps, preemptions, …; any thread."""
        return self.fleet.stats()

    async def pause(self) -> None:
        """Stop launching steps, keep every state. Requests wait (their timeouts go on)."""
        self.calls()
        await self.fleet.pause()

    async def resume(self) -> None:
        """Go on after ``pause``."""
        self.calls()
        await self.fleet.resume()

    async def shutdown(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Stop the engine; new requests are refused at once. Idempotent.

        ``drain``: let requests under way finish first (at most ``timeout_s``; a paused engine goes on), then end the
        rest with EngineStoppedError. Without ``drain`` all end at once, also those that another shutdown waits for.
        """
        self._check_loop()
        timeout_s = checks.number("timeout_s", timeout_s, 0.0)
        self._is_stopping = True
        error = EngineStoppedError("the engine was shut down before the request finished")
        if not drain:
            await self._calls.end_all(error)
        async with self._shutting:
            if drain:
                await self.fleet.resume()
                await self._calls.wait_ended(timeout_s)
            await self._calls.end_all(error)
            await self.fleet.stop()
            await self._calls.end_all(error)  # those that were waiting for a model

    def calls(self) -> CallRunner:
        """What runs calls, while the engine takes any."""
        self._check_loop()
        if self._is_stopping:
            raise EngineStoppedError("the engine is stopping or stopped; create a new one")
        return self._calls

    def _check_loop(self) -> None:
        check_process(self._pid)
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidRequestError(
                "the engine belongs to the event loop that created it, and was used on another one. Create it where "
                "it is used, or use SyncEngine, which has a loop of its own"
            )


def installed_plugins() -> PluginHost:
    """The installed plugins (those that ``KESTREL_PLUGINS`` names, when set) beside the built-in skills."""
    return PluginHost.load(Environment.read(), skills=builtin_skills())


def _as_config(item: RuntimeConfig | str | None) -> RuntimeConfig:
    if isinstance(item, RuntimeConfig):
        return item
    if item is None or isinstance(item, str):
        return RuntimeConfig(model=item)
    raise InvalidRequestError(f"a model is a name or a RuntimeConfig, not a {type(item).__name__}")
