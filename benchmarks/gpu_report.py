"""What the cases of ``gpu.py`` share: the table, an engine that is timed, loops of callers, pictures."""

from __future__ import annotations

import asyncio
import gc
import io
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_probe import busy_share, kernel_spans, save_trace, show_kernels
from torch.profiler import ProfilerActivity, profile

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, InferenceEngine

__all__ = ["DEVICE", "Report", "closed_loop", "jpegs", "opened"]

DEVICE = torch.device("cuda")


class Report:
    """Lines of the table, as they are measured."""

    def __init__(self, with_profiles: bool = False, traces: Path | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._with_profiles = with_profiles or traces is not None
        self._traces = traces
        self.copy_tb_s = 4.25
        self.gemm_tflop_s = 770.0

    def add(self, case: str, what: str, value: float, unit: str, **more: Any) -> None:
        """One measured value."""
        self.rows.append({"case": case, "what": what, "value": round(value, 4), "unit": unit, **more})
        extra = "  ".join(f"{name} {shown}" for name, shown in more.items())
        print(f"{case:<10} {what:<44} {value:>12,.3f} {unit:<8} {extra}", flush=True)

    @contextmanager
    def profiled(self, what: str) -> Iterator[None]:
        """With profiles on, the kernels of the context by the time that they took."""
        if not self._with_profiles:
            yield
            return
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            yield
            torch.cuda.synchronize()
        self.add("profile", what, 1 - busy_share(kernel_spans(recorded)), "idle")
        show_kernels(recorded)
        self.keep(recorded, what)
        del recorded
        gc.collect()  # half a second for the profiler's objects: better now than while something is timed

    def keep(self, recorded: profile, what: str) -> None:
        """Write when each kernel ran to a file, where traces are asked for."""
        if self._traces is not None:
            save_trace(recorded, self._traces / f"trace_{'_'.join(re.findall('[A-Za-z0-9]+', what))}.json.gz")


@asynccontextmanager
async def opened(path: Path, report: Report, case: str, **settings: Any) -> AsyncIterator[InferenceEngine]:
    """An engine of the checkpoint in ``path``; how long it took to be ready is reported."""
    start = time.perf_counter()
    engine = await InferenceEngine.create(RuntimeConfig(model_path=path, device=str(DEVICE), **settings))
    report.add(case, "engine ready", time.perf_counter() - start, "s")
    async with engine:
        yield engine


async def closed_loop(
    ask: Callable[[], Awaitable[EngineResult]], width: int, count: int
) -> tuple[float, list[EngineResult]]:
    """``count`` calls, ``width`` of them at a time: seconds and results."""
    left, results = iter(range(count)), []

    async def one() -> None:
        for _ in left:
            results.append(await ask())

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(width)))
    return time.perf_counter() - start, results


def jpegs(count: int, seed: int) -> list[bytes]:
    """Distinct photos of 800 × 600: smooth noise."""
    from PIL import Image

    source = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        small = source.integers(0, 256, (38, 50, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((800, 600), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found
