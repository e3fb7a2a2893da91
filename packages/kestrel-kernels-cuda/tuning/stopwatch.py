"""What the scripts beside this one share: a GPU that they need, and how they time launches."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

__all__ = ["microseconds", "need_gpu"]


def need_gpu() -> None:
    """Ends the program, with a line that says why, where there is no NVIDIA GPU."""
    if not torch.cuda.is_available():
        sys.exit("this script measures kernels on an NVIDIA GPU; torch sees none here")


def microseconds(call: Callable[[int], object], calls: int, rounds: int = 5) -> float:
    """Of one ``call``: the best of ``rounds`` replays of a graph that makes ``calls`` of them, by events."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    best = float("inf")
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / calls)
    return best
