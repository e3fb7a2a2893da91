"""Engines over toy models, for the tests of this folder. Each is checked at its end: nothing held, no thread left."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine, SyncEngine
from kestrel.testing.engines import ToyControls, ToyFamily, toy_host, write_toy
from kestrel.testing.invariants import check_idle

torch.set_num_threads(1)

LONG = {"ignore_eos": True, "max_tokens": 900}  # of the toy that talks: it never stops by itself


def picture(seed=0, width=20, height=12):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


async def until(condition, timeout_s=5.0):
    """Wait for something that happens on another thread."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.002)


def kestrel_threads():
    """Threads of engines, not those of the event loops' own pools, nor those that hash for the whole process."""
    names = {thread: thread.name for thread in threading.enumerate()}
    return {thread for thread, name in names.items() if name.startswith("kestrel-") and "hash" not in name}


def assert_threads_end(timeout_s=5.0):
    """No thread of an engine is left, at the latest ``timeout_s`` from now."""
    end = time.monotonic() + timeout_s
    while left := kestrel_threads():
        assert time.monotonic() < end, f"threads are left: {left}"
        time.sleep(0.005)


def lanes(engine):
    return [engine.fleet.slot(name).model.lane for name in engine.models if engine.fleet.slot(name).model]


async def idle(engine):
    """Wait until every lane holds nothing, and prove it."""
    for lane in lanes(engine):
        await until(lambda lane=lane: lane.is_idle)
        if hasattr(lane, "cache"):
            await asyncio.sleep(0.005)  # the tick that ended the last sequence is over
            check_idle(lane)


class Toys:
    """Toy checkpoints in a directory, a family that loads them, and the engines over them."""

    def __init__(self, directory):
        self.directory = directory
        self.family = ToyFamily()
        self.skills = ()
        self.records = []

    @property
    def host(self):
        return toy_host(self.family, skills=self.skills, observe=self.records.append)

    def config(self, name="toy", driver="talk", *, max_positions=1024, **settings):
        path = self.directory / name
        if not path.exists():
            write_toy(path, driver=driver, max_positions=max_positions)
        sizes = {"kv_cache_bytes": 2**21, "max_batch_size": 4, "page_size": 8}
        if {"kv_cache_pages", "memory_utilization"} & settings.keys():
            del sizes["kv_cache_bytes"]
        return RuntimeConfig(model_path=path, device="cpu", **{**sizes, **settings})

    def controls(self, name="toy"):
        return self.family.controls.setdefault(name, ToyControls())

    async def create(self, *configs, **options):
        first, *others = configs or (self.config(),)
        return await InferenceEngine.create(first, others, plugins=self.host, **options)

    @contextlib.asynccontextmanager
    async def engine(self, *configs, **settings):
        """An engine, by default of one model with ``settings``; at the end it must be idle, and then gone."""
        engine = await self.create(*(configs or (self.config(**settings),)))
        async with engine:
            yield engine
            await idle(engine)
        await asyncio.to_thread(assert_threads_end)

    @contextlib.contextmanager
    def sync_engine(self, *configs, **settings):
        first, *others = configs or (self.config(**settings),)
        with SyncEngine(first, others, plugins=self.host) as engine:
            yield engine
        assert_threads_end()
