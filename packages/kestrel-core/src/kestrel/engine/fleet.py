"""The models of one engine: loaded on threads, one device thread per device, idle ones evicted when memory is short."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from enum import Enum

import torch

from kestrel.config import RuntimeConfig
from kestrel.device import resolve_device
from kestrel.engine.loaded import LoadedModel, Shared, load_model
from kestrel.engine.loading import Blueprint, ProgressReport, survey
from kestrel.engine.memory import Demand, plan_memory
from kestrel.engine.router import Router
from kestrel.errors import CapacityError, EngineStoppedError, InvalidRequestError, UnknownModelError, closest
from kestrel.lanes import DeviceThread
from kestrel.media import MediaBudget
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel.spi import ModelInfo, Skill

__all__ = ["Fleet", "ProgressReport"]

log = logging.getLogger("kestrel.engine")


class Phase(Enum):
    """Where a model is."""

    UNLOADED = "unloaded"
    READY = "ready"
    STOPPED = "stopped"


@dataclass(slots=True, eq=False)
class Slot:
    """One model of the engine, loaded or not. ``lock`` lets one task load or unload it at a time."""

    config: RuntimeConfig
    blueprint: Blueprint
    device: torch.device
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    phase: Phase = Phase.UNLOADED
    model: LoadedModel | None = None
    used_at: float = 0.0
    idle_timer: asyncio.TimerHandle | None = None

    @property
    def model_id(self) -> str:
        """The id that users type."""
        return self.blueprint.card.model_id

    @property
    def info(self) -> ModelInfo:
        """What the family says of the checkpoint."""
        return self.blueprint.info

    @property
    def skills(self) -> tuple[str, ...]:
        """Skills of the model."""
        return self.blueprint.info.skills


class Fleet:
    """Loads, finds, evicts and stops models. Used on the event loop; the work happens on threads."""

    def __init__(
        self,
        configs: Sequence[RuntimeConfig],
        host: PluginHost,
        router: Router,
        pool: Executor,
        progress: ProgressReport | None,
    ) -> None:
        self._configs = tuple(configs)
        self._host = host
        self._skills = {skill.name: skill for skill in builtin_skills()} | dict(host.skills)
        self._progress = progress
        self._slots: dict[str, Slot] = {}
        self._threads: dict[torch.device, DeviceThread] = {}
        budget = MediaBudget(min(config.max_decoded_media_bytes for config in configs))
        self._shared = Shared(router=router, pool=pool, media_budget=budget, host=host)
        self._pool = pool
        self._is_paused = False

    async def start(self) -> None:
        """Every model located, described and loaded, in order."""
        for config in self._configs:
            blueprint = await asyncio.to_thread(survey, config, self._host, self._progress)
            model_id = blueprint.card.model_id
            if model_id in self._slots:
                raise InvalidRequestError(f"model {model_id!r} was given twice; give each model once")
            self._slots[model_id] = Slot(config, blueprint, resolve_device(config.device))
        for slot in self._slots.values():
            await self._load(slot)

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Ids of all models, loaded or not."""
        return tuple(self._slots)

    @property
    def default_id(self) -> str:
        """The first model's id."""
        return next(iter(self._slots))

    def slot(self, model_id: str) -> Slot:
        """A model of this engine. UnknownModelError names the engine's models."""
        found = self._slots.get(model_id)
        if found is None:
            raise UnknownModelError(
                f"this engine has no model {model_id!r}. {closest(model_id, self._slots)}. "
                f"Pass it in models= when the engine is created. {self._host.failures()}".rstrip()
            )
        return found

    def skill(self, name: str) -> Skill:
        """A skill by name, a plugin's included. InvalidRequestError names the known ones."""
        found = self._skills.get(name)
        if found is None:
            raise InvalidRequestError(f"no skill is called {name!r}. {closest(name, self._skills)}")
        return found

    async def ready(self, model_id: str) -> LoadedModel:
        """The model, loaded again if it was evicted."""
        slot = self.slot(model_id)
        if slot.phase is Phase.UNLOADED:
            await self._load(slot)
        if slot.model is None:
            raise EngineStoppedError(f"model {model_id!r} is stopped; create a new engine")
        slot.used_at = time.monotonic()
        return slot.model

    async def _load(self, slot: Slot) -> None:
        async with slot.lock:
            if slot.phase is not Phase.UNLOADED:
                return
            demand = await self._make_room(slot)
            thread = self._thread(slot.device)
            model = await asyncio.to_thread(
                load_model, slot.blueprint, slot.device, demand, thread, self._shared, self._progress
            )
            model.on_idle = lambda: self._idle(slot)
            slot.model, slot.phase, slot.used_at = model, Phase.READY, time.monotonic()

    async def _make_room(self, slot: Slot) -> Demand:
        """What the model may use of its device; idle models there are evicted, oldest first, until it fits."""
        on_device = [s for s in self._slots.values() if s.device == slot.device]
        while True:
            try:
                unloaded = sum(s.phase is Phase.UNLOADED for s in on_device)
                return await asyncio.to_thread(plan_memory, slot.blueprint, slot.device, unloaded)
            except CapacityError:
                idle = [s for s in on_device if s.model is not None and not s.model.is_busy]
                if not idle:
                    raise
                await self._unload(min(idle, key=lambda s: s.used_at), "to make room")

    async def _unload(self, slot: Slot, why: str) -> None:
        async with slot.lock:
            if slot.model is None or slot.model.is_busy:
                return
            model, slot.model, slot.phase = slot.model, None, Phase.UNLOADED
            log.info("model %s is unloaded %s", slot.model_id, why)
            await asyncio.to_thread(model.close, EngineStoppedError(f"model {slot.model_id!r} was unloaded"))

    def _idle(self, slot: Slot) -> None:
        """A model's last user has left: start the clock of ``idle_unload_s``."""
        delay = slot.config.idle_unload_s
        if slot.idle_timer is not None:
            slot.idle_timer.cancel()
        if delay is None or slot.phase is not Phase.READY:
            return

        def check() -> None:
            if time.monotonic() - slot.used_at >= delay:
                self._unloading = asyncio.ensure_future(self._unload(slot, f"after {delay:g} s without use"))

        slot.used_at = time.monotonic()
        slot.idle_timer = asyncio.get_running_loop().call_later(delay, check)

    def _thread(self, device: torch.device) -> DeviceThread:
        if device not in self._threads:
            thread = DeviceThread(str(device))
            thread.start()
            if self._is_paused:
                thread.pause()
            self._threads[device] = thread
        return self._threads[device]

    async def pause(self) -> None:
        """No launches until ``resume``."""
        self._is_paused = True
        for thread in self._threads.values():
            await asyncio.to_thread(thread.pause)

    async def resume(self) -> None:
        """Launches again."""
        self._is_paused = False
        for thread in self._threads.values():
            thread.resume()

    async def stop(self, *, abort: bool, timeout_s: float | None = None) -> None:
        """Stop every model and thread. Without ``abort``, users get ``timeout_s`` to finish first. Idempotent."""
        if not abort:
            await self._drain(timeout_s)
        error = EngineStoppedError("the engine was shut down before the request finished")
        self._shared.router.fail_all(error)
        for slot in self._slots.values():
            if slot.idle_timer is not None:
                slot.idle_timer.cancel()
            async with slot.lock:
                model, slot.model, slot.phase = slot.model, None, Phase.STOPPED
                if model is not None:
                    await asyncio.to_thread(model.close, error)
        threads, self._threads = list(self._threads.values()), {}
        for thread in threads:
            await asyncio.to_thread(thread.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _drain(self, timeout_s: float | None) -> None:
        await self.resume()
        waits = [slot.model.wait_idle() for slot in self._slots.values() if slot.model is not None]
        if waits:
            await asyncio.wait([asyncio.ensure_future(w) for w in waits], timeout=timeout_s)

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters of each loaded model's lane."""
        return {s.model_id: s.model.stats() for s in self._slots.values() if s.model is not None}

    def gauge(self, name: str) -> Callable[[], Iterable[tuple[float, dict[str, str]]]]:
        """A reader of one counter for telemetry."""
        return lambda: [(s[name], {"model": m}) for m, s in self.stats().items() if name in s]
