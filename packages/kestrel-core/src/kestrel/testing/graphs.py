"""Captured programs on a CPU: calls that are made again, and checked to do what the captured one did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kestrel.device.graphs import Graphs, Program
from kestrel.testing.capture import CaptureGuard

__all__ = ["ReplayGraphs"]

T = TypeVar("T")
SPOILT = 77  # what a result holds once another program may have used its memory


class ReplayGraphs(Graphs):
    """Stands in for an accelerator's: a replay calls the captured function.

    It raises AssertionError when a replay runs other operations than the first one did, with other numbers of the
    host, or on memory at other places; and when a call cannot be captured at all (see ``CaptureGuard``). What earlier
    programs gave is spoilt by each replay, unless the replayed program reads it.
    """

    def __init__(self) -> None:
        self.programs: list[_Replayed[Any]] = []
        self.num_replays = 0
        self.rehearsals = 0

    def rehearse(self, run: Callable[[], T]) -> T:
        self.rehearsals += 1
        return run()

    def capture(self, run: Callable[[], T]) -> Program[T]:
        program = _Replayed(self, run)
        self.programs.append(program)
        return program

    def replayed(self, program: _Replayed[Any]) -> None:
        """``program`` ran: what programs captured after it hold may be gone."""
        self.num_replays += 1
        for other in self.programs[self.programs.index(program) + 1 :]:
            for x in other.made:
                if x.untyped_storage().data_ptr() not in program.reads:
                    x.fill_(SPOILT)


class _Replayed(Program[T]):
    def __init__(self, graphs: ReplayGraphs, run: Callable[[], T]) -> None:
        self._graphs, self._run = graphs, run
        self._calls: list[tuple[Any, ...]] | None = None
        self._result: T | None = None
        self.made: list[torch.Tensor] = []  # of the result
        self.reads: set[int] = set()  # where memory begins that the program did not make

    def replay(self) -> T:
        trace = _Trace()
        with CaptureGuard(), trace:  # type: ignore[no-untyped-call, unused-ignore]
            new = self._run()
        if self._calls is None or self._result is None:
            self._calls, self._result = trace.calls, new
            self.made = [x for x in _tensors(new) if trace.made(x)]
            self.reads = {at for call in trace.calls for kind, at, *_ in call[1] if kind == "outside"}
        else:
            _compare(self._calls, trace.calls)
            for kept, fresh in zip(_tensors(self._result), _tensors(new), strict=True):
                if kept.data_ptr() != fresh.data_ptr():
                    kept.copy_(fresh)
        self._graphs.replayed(self)
        return self._result


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """``calls``: each operation's name, the tensors it got and its other arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.calls: list[tuple[Any, ...]] = []
        self._held: list[torch.Tensor] = []  # else new memory may lie where other memory was
        self._inside: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """``func`` run and noted."""
        kwargs = kwargs or {}
        assert "lift_fresh" not in str(func), (
            "a captured program makes a tensor of Python values (torch.tensor), which it would copy from memory that "
            "is gone; make it outside"
        )
        given = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        others = repr([_plain(arg) for arg in (*args, *kwargs.values())])
        places = tuple(self._place(x) for x in given)
        self.calls.append((str(func), places, others))
        result = func(*args, **kwargs)
        known = {x.untyped_storage().data_ptr() for x in given}
        for x in _tensors(result):
            if x.untyped_storage().data_ptr() not in known:
                self._held.append(x)
                self._inside.add(x.untyped_storage().data_ptr())
        return result

    def made(self, x: torch.Tensor) -> bool:
        """Whether ``x`` lies in memory that an operation made."""
        return x.untyped_storage().data_ptr() in self._inside

    def _place(self, x: torch.Tensor) -> tuple[str, int, int, tuple[int, ...]]:
        at = x.untyped_storage().data_ptr()
        if at in self._inside or not x.numel():
            return "inside", 0, 0, tuple(x.shape)
        return "outside", at, int(x.storage_offset()), tuple(x.shape)


def _compare(captured: list[tuple[Any, ...]], now: list[tuple[Any, ...]]) -> None:
    for at, (before, after) in enumerate(zip(captured, now, strict=False)):
        assert before == after, (
            f"call {at} of a captured program was {before}, and its replay would be {after}"
        )
    assert len(captured) == len(now), f"a program of {len(captured)} calls would replay as one of {len(now)}"


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists and slotted dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [x for item in value for x in _tensors(item)]
    if is_dataclass(value):
        return [x for field in fields(value) for x in _tensors(getattr(value, field.name))]
    return []


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
