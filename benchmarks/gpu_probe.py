"""What the machine itself can do, and how busy a run keeps it, for ``gpu.py``."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import profile

__all__ = ["busy_share", "copy_rate", "gemm_rate", "kernel_spans", "median_ms", "save_trace", "show_kernels"]


def median_ms(run: Callable[[], object], rounds: int = 7) -> float:
    """Milliseconds of ``run`` on the device, by events: the median of ``rounds`` after two that warm up."""
    times = []
    for _ in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def copy_rate(device: torch.device, gigabytes: int = 4) -> float:
    """TB/s of a large copy on the device, bytes read and written."""
    source = torch.randint(-100, 100, (gigabytes << 30,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e9


def gemm_rate(device: torch.device, rows: int = 4096, size: int = 8192) -> float:
    """TFLOP/s of a bfloat16 product of random matrices, [rows, size] by [size, size]."""
    a = torch.randn(rows, size, dtype=torch.bfloat16, device=device)
    b = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return 2 * rows * size * size / median_ms(lambda: a @ b.t()) / 1e9


def busy_share(spans: Iterable[tuple[float, float]]) -> float:
    """The share of the time from the first start to the last end in which at least one of ``spans`` runs."""
    busy, first, last = 0.0, None, 0.0
    for start, end in sorted(spans):
        if first is None:
            first, last = start, start
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return 0.0 if first is None or last == first else busy / (last - first)


def kernel_events(recorded: profile) -> list[tuple[float, float, str]]:
    """Start, end (microseconds) and name of everything that ran on the device."""
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def kernel_spans(recorded: profile) -> list[tuple[float, float]]:
    """Start and end of everything that ran on the device, in microseconds."""
    return [(start, end) for start, end, _ in kernel_events(recorded)]


def show_kernels(recorded: profile, count: int = 24) -> None:
    """Print the kernels by the time that they add: how much later the device is done because of each.

    Under programmatic dependent launch a kernel starts while the one before still runs, and waits: its duration
    (the median in the last column) holds that wait. What it adds is its end minus the latest end before it.
    """
    adds: dict[str, list[float]] = {}
    lasts: dict[str, list[float]] = {}
    done = None
    for start, end, name in sorted(kernel_events(recorded), key=lambda event: event[1]):
        adds.setdefault(name, []).append(max(0.0, end - max(start, done or start)))
        lasts.setdefault(name, []).append(end - start)
        done = end if done is None else max(done, end)
    whole = sum(map(sum, adds.values()))
    for name, times in sorted(adds.items(), key=lambda item: -sum(item[1]))[:count]:
        print(
            f"    {sum(times) / 1e3:9.2f} ms {sum(times) / whole:5.1%} {len(times):7} x adds "
            f"{statistics.median(times):7.1f} us, lasts {statistics.median(lasts[name]):7.1f}  {name[:80]}"
        )


def save_trace(recorded: profile, file: Path) -> None:
    """Write start, end (microseconds) and name of all that ran on the device, as gzipped JSON."""
    with gzip.open(file, "wt", encoding="utf-8") as out:
        json.dump([(name, start, end) for start, end, name in sorted(kernel_events(recorded))], out)
