"""Programs captured once and replayed: what a device was told to do, sent again in one call.

A captured program reads and writes the memory that it was captured with. Whoever makes one keeps what it reads at the
same place and changes only what is in it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Graphs", "Program", "graphs_for"]

T = TypeVar("T")


class Program(ABC, Generic[T]):
    """One captured call."""

    @abstractmethod
    def replay(self) -> T:
        """Queue it again, on the current stream, without waiting. What it gives are the same tensors each time, and
        they hold its numbers until another program of the same ``Graphs`` is replayed, unless that program was
        captured later (then it may read them)."""


class Graphs(ABC):
    """Captures programs of one model, which share one pool of memory: replay them one at a time, on one stream."""

    @abstractmethod
    def rehearse(self, run: Callable[[], T]) -> T:
        """``run()``, at once, as capturing will run it: kernels are compiled and libraries make their workspaces."""

    @abstractmethod
    def capture(self, run: Callable[[], T]) -> Program[T]:
        """``run`` as a program; nothing is computed yet.

        ``run`` may not wait for the device or read a number back, and what it makes lives in the shared pool. Raises
        what torch raises for a call that cannot be captured.
        """

    def tidy(self) -> None:
        """Give back what rehearsals took and programs do not need."""


class _CudaProgram(Program[T]):
    """A CUDA graph and the tensors that it leaves."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T) -> None:
        self._graph, self._result = graph, result

    def replay(self) -> T:
        self._graph.replay()
        return self._result


class _CudaGraphs(Graphs):
    """``_stream``: where programs are captured and rehearsed, so that what libraries keep per stream is there already.
    ``_pool``: where programs have their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call, unused-ignore]

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def rehearse(self, run: Callable[[], T]) -> T:
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            result = run()
        outside.wait_stream(self._stream)
        return result

    def capture(self, run: Callable[[], T]) -> Program[T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                # Only this thread is held to what capturing allows: others decode pictures and load models meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = run()
                graph.capture_end()
            except BaseException:
                self._end_failed(graph)
                raise
        return _CudaProgram(graph, result)

    def tidy(self) -> None:
        torch.cuda.synchronize(self._device)  # sync: before the first request
        torch.cuda.empty_cache()

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave the capture that an error broke; what ending it raises says less than that error. torch may go on
        taking the pool for one that is being captured into, so the next capture gets a new one."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        del self._pool


def graphs_for(device: torch.device) -> Graphs | None:
    """What captures programs on ``device``; None where torch cannot."""
    return _CudaGraphs(device) if device.type == "cuda" else None
