"""What is done once before a model's first request, which would else wait for it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kestrel.config import RuntimeConfig
from kestrel.device import use_device
from kestrel.lanes import DeviceThread, StepLane, TokenLane
from kestrel.ops import OpTable
from kestrel.runner import launch_sizes

__all__ = ["capture_encoders", "compile_kernels", "first_launches"]

log = logging.getLogger("kestrel.engine")

MAX_THREADS = 32


def compile_kernels(ops: OpTable, config: RuntimeConfig) -> None:
    """Compile what launches of the ops resolved since the last call will run, on many threads; what fails is compiled
    at its first launch."""
    jobs = ops.compile_jobs(launch_sizes(config.max_batch_size, config.max_batched_tokens))
    if not jobs:
        return
    threads = min(MAX_THREADS, os.cpu_count() or 1, len(jobs))
    with ThreadPoolExecutor(threads, initializer=use_device, initargs=(ops.device,)) as pool:
        started = time.perf_counter()
        failed = [error for error in pool.map(_failure, jobs) if error is not None]
        log.info("%d kernels were compiled ahead in %.1f s", len(jobs), time.perf_counter() - started)
    if failed:
        log.warning("%d of %d kernels were not compiled ahead", len(failed), len(jobs), exc_info=failed[0])


def _failure(job: Callable[[], object]) -> Exception | None:
    try:
        job()
    except Exception as error:  # a backend is a plugin
        return error
    return None


def first_launches(lane: TokenLane | StepLane, thread: DeviceThread, name: str) -> bool:
    """A first launch of each kind on the device thread; False when one failed, which is logged: requests will meet it
    again, each with an error of its own."""
    if not isinstance(lane, TokenLane):
        return True
    try:
        thread.call(lane.warm_up).result()
    except Exception as error:
        log.warning("the first launch of %s failed (%s: %s)", name, type(error).__name__, error)
        return False
    return True


def capture_encoders(lane: TokenLane | StepLane, thread: DeviceThread) -> None:
    """Capture what the lane's encoders will do, on the device thread; what fails is logged: requests will meet it."""
    if not isinstance(lane, TokenLane):
        return
    try:
        thread.call(lane.capture_encoders).result()
    except Exception as error:
        log.warning("encoders are captured as they come: %s: %s", type(error).__name__, error)
