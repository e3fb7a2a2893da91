"""The models of one engine: loaded on threads, one device thread per device, idle ones evicted when memory is short."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kestrel.config import RuntimeConfig
from kestrel.device import has_streams, resolve_device, use_device
from kestrel.engine import heap, turns
from kestrel.engine.building import load_model
from kestrel.engine.loaded import LoadedModel, Shared
from kestrel.engine.loading import ProgressReport, survey
from kestrel.engine.memory import plan_memory, return_memory
from kestrel.engine.pool import WORKERS, CpuPool, on_thread
from kestrel.engine.router import Router
from kestrel.engine.slots import Phase, Slot
from kestrel.errors import (
    CapacityError,
    EngineStoppedError,
    InvalidRequestError,
    UnknownModelError,
    closest,
    shown,
)
from kestrel.lanes import DeviceThread
from kestrel.lanes.lane import Lane
from kestrel.media import DecoderProcesses, MediaBudget
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel.spi import Skill

__all__ = ["Fleet", "ProgressReport"]

log = logging.getLogger("kestrel.engine")


class Fleet:
    """Loads, finds, evicts and stops models. Used on the event loop; the work happens on threads.

    One change (a load, an unload, the stop) happens at a time, since each reads how much memory is free. ``on_lost``
    is called with a model that broke beyond repair, and with why.
    """

    def __init__(
        self,
        configs: Sequence[RuntimeConfig],
        host: PluginHost,
        router: Router,
        progress: ProgressReport | None,
    ) -> None:
        self._configs = tuple(configs)
        self._host = host
        self._skills = {skill.name: skill for skill in builtin_skills()} | dict(host.skills)
        self._reporter = _Reporter(progress)
        self._slots: dict[str, Slot] = {}
        self._threads: dict[torch.device, DeviceThread] = {}
        self._has_short_turns = False
        self._change = asyncio.Lock()
        self._pausing = asyncio.Lock()
        self._unloads: set[asyncio.Task[None]] = set()
        processes = max(config.media_processes for config in configs)
        self._shared = Shared(
            router=router,
            pool=CpuPool(max(WORKERS, processes)),  # a thread waits for each process
            media_budget=MediaBudget(min(config.max_decoded_media_bytes for config in configs)),
            host=host,
            running=asyncio.Event(),
            decoders=DecoderProcesses(processes) if processes else None,
        )
        self._shared.running.set()
        self.on_lost: Callable[[str, BaseException], None] = lambda model_id, error: None

    async def start(self) -> None:
        """Every model located, described and loaded, in order."""
        for config in self._configs:
            blueprint = await asyncio.to_thread(survey, config, self._host, self._reporter)
            model_id = blueprint.card.model_id
            if model_id in self._slots:
                raise InvalidRequestError(f"model {model_id!r} was given twice; give each model once")
            if blueprint.note:
                log.info("%s: %s", model_id, blueprint.note)
            device = resolve_device(config.device)
            self._slots[model_id] = Slot(config=config, blueprint=blueprint, device=device)
        for model_id in self._slots:
            await self.ready(model_id)

    # -- finding

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
        found = self._slots.get(model_id) if isinstance(model_id, str) else None
        if found is None:
            raise UnknownModelError(
                f"this engine has no model {shown(model_id)}. {closest(shown(model_id), self._slots)}. "
                f"Pass it in models= when the engine is created. {self._host.failures()}".rstrip()
            )
        return found

    def has_skill(self, name: str) -> bool:
        """Whether a skill is called ``name``."""
        return isinstance(name, str) and name in self._skills

    def skill(self, name: str) -> Skill:
        """A skill by name, a plugin's included. InvalidRequestError names the known ones."""
        found = self._skills.get(name) if isinstance(name, str) else None
        if found is None:
            raise InvalidRequestError(
                f"no skill is called {shown(name)}. {closest(shown(name), self._skills)}"
            )
        return found

    @contextlib.contextmanager
    def in_use(self, model_id: str) -> Iterator[None]:
        """Held by every call: a model in use is never unloaded."""
        slot = self.slot(model_id)
        slot.num_users += 1
        try:
            yield
        finally:
            slot.num_users -= 1
            if not slot.num_users:
                self._watch_idle(slot)

    async def ready(self, model_id: str) -> LoadedModel:
        """The model, loaded again if it was unloaded. A caller that is cancelled leaves the load to the others."""
        slot = self.slot(model_id)
        while slot.phase is Phase.UNLOADED:
            if slot.loading is None:
                slot.loading = asyncio.ensure_future(self._load(slot))
                slot.loading.add_done_callback(lambda task: _load_ended(slot, task))
            await asyncio.shield(slot.loading)
        if slot.model is None:
            raise EngineStoppedError(f"model {model_id!r} is stopped; create a new engine")
        return slot.model

    def stats(self) -> dict[str, dict[str, float]]:
        """Counters of each loaded model's lane; on any thread."""
        loaded = [(slot.model_id, slot.model) for slot in list(self._slots.values())]
        return {model_id: model.stats() for model_id, model in loaded if model is not None}

    # -- loading and unloading

    async def _load(self, slot: Slot) -> None:
        async with self._change:
            if slot.phase is not Phase.UNLOADED:
                return
            slot.model = await self._fitted(slot)
            slot.phase = Phase.READY
        self._watch_idle(slot)

    async def _fitted(self, slot: Slot) -> LoadedModel:
        """The model loaded; idle models on its device are unloaded, the longest unused first, until it fits."""
        others = [s for s in self._slots.values() if s.device == slot.device and s is not slot]
        while True:
            problem = ""
            try:
                return await self._loaded(slot, sharers=1 + sum(s.phase is Phase.UNLOADED for s in others))
            except CapacityError as error:
                problem = str(error)  # the error itself holds on to what was loaded
            idle = [s for s in others if s.model is not None and not s.num_users]
            if not idle:
                busy = ", ".join(s.model_id for s in others if s.model is not None)
                raise CapacityError(f"{problem} In use beside it: {busy}." if busy else problem)
            await self._unload(min(idle, key=lambda s: s.used_at), f"to make room for {slot.model_id}")

    async def _loaded(self, slot: Slot, sharers: int) -> LoadedModel:
        blueprint, device = slot.blueprint, slot.device
        demand = await asyncio.to_thread(plan_memory, blueprint, device, sharers)
        thread = self._thread(device)
        heap.thaw()
        model = await on_thread(
            partial(load_model, blueprint, device, demand, thread, self._shared, self._reporter)
        )
        if has_streams(device):
            heap.freeze()
            if not self._has_short_turns:  # not before: many threads compile kernels without a pause
                self._has_short_turns = True
                turns.shorten()
        return model

    async def _unload(self, slot: Slot, why: str) -> None:
        """Close a loaded model; the caller holds the lock."""
        if slot.model is None:
            return
        slot.stop_clock()
        model, slot.model, slot.phase = slot.model, None, Phase.UNLOADED
        log.info("model %s is unloaded %s", slot.model_id, why)
        gone = EngineStoppedError(f"model {slot.model_id!r} was unloaded")
        await on_thread(partial(model.close, gone))
        del model
        heap.thaw()
        await on_thread(partial(return_memory, slot.device))
        if any(other.model is not None and has_streams(other.device) for other in self._slots.values()):
            heap.freeze()

    def _watch_idle(self, slot: Slot) -> None:
        """A model's last user has left: start the clock of ``idle_unload_s``."""
        slot.stop_clock()
        slot.used_at = time.monotonic()
        delay = slot.config.idle_unload_s
        if delay is not None and slot.phase is Phase.READY:
            slot.idle_timer = asyncio.get_running_loop().call_later(delay, self._idle_too_long, slot, delay)

    def _idle_too_long(self, slot: Slot, delay: float) -> None:
        async def unload() -> None:
            async with self._change:
                if not slot.num_users:
                    await self._unload(slot, f"after {delay:g} s without use")

        task = asyncio.ensure_future(unload())
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    def _thread(self, device: torch.device) -> DeviceThread:
        thread = self._threads.get(device)
        if thread is None or not thread.is_alive:
            thread = self._threads[device] = DeviceThread(str(device))
            thread.on_lost = self._lane_lost
            thread.start()
            thread.call(partial(use_device, device))
            if not self._shared.running.is_set():
                thread.pause()
        return thread

    def _lane_lost(self, lane: Lane, error: BaseException) -> None:
        """A lane is beyond repair: its model is loaded anew when it is next asked. On the device thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._shared.router.loop.call_soon_threadsafe(self._forget, lane, error)

    def _forget(self, lane: Lane, error: BaseException) -> None:
        for slot in self._slots.values():
            if slot.model is not None and slot.model.lane is lane and slot.phase is Phase.READY:
                slot.stop_clock()
                slot.model, slot.phase = None, Phase.UNLOADED
                heap.thaw()
                log.error("model %s is lost; it is loaded anew when it is next asked", slot.model_id)
                self.on_lost(slot.model_id, error)

    # -- the whole engine

    async def pause(self) -> None:
        """No launches until ``resume``; returns once none is in flight."""
        async with self._pausing:
            self._shared.running.clear()
            for thread in list(self._threads.values()):
                await on_thread(thread.pause)

    async def resume(self) -> None:
        """Launches again."""
        async with self._pausing:
            for thread in self._threads.values():
                thread.resume()
            self._shared.running.set()

    async def stop(self) -> None:
        """Unload every model, end every thread. What still runs ends with EngineStoppedError. Idempotent."""
        error = EngineStoppedError("the engine was shut down before the request finished")
        self._reporter.stop()
        self._shared.pool.close()
        if self._shared.decoders is not None:
            await on_thread(self._shared.decoders.close)
        async with self._change:
            for slot in self._slots.values():
                slot.stop_clock()
                model, slot.model, slot.phase = slot.model, None, Phase.STOPPED
                if model is not None:
                    await on_thread(partial(model.close, error))
            threads, self._threads = list(self._threads.values()), {}
            for thread in threads:
                await on_thread(thread.stop)
            if self._has_short_turns:
                self._has_short_turns = False
                turns.lengthen()
            heap.thaw()


def _load_ended(slot: Slot, task: asyncio.Task[None]) -> None:
    slot.loading = None
    if not task.cancelled():
        task.exception()  # seen: whoever waits has it, and perhaps nobody waits any more


class _Reporter:
    """Progress on its way from a worker thread to the caller; ends the work when the engine stops meanwhile."""

    def __init__(self, progress: ProgressReport | None) -> None:
        self._progress = progress
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Whatever reports next ends with EngineStoppedError."""
        self._stopped.set()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise EngineStoppedError("the engine was stopped while a model was loading; create a new one")
        if self._progress is not None:
            self._progress(stage, done, total)
