"""Kernel backends: providers of ops. Core ships the references; a backend says which queries it serves better."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Available", "Impl", "KernelBackend", "No", "OpCall", "OpQuery", "Unavailable", "Yes"]

OpCall = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class OpQuery:
    """One need of one op: its name and the facts that decide who can serve it (head_dim, dtype, mode, epilogue, …).

    ``facts`` is a sorted tuple of pairs, so that equal queries are equal and hashable; build with ``OpQuery.of``.
    """

    op: str
    facts: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, op: str, **facts: Any) -> OpQuery:
        """The query for ``op`` with ``facts``."""
        return cls(op, tuple(sorted(facts.items())))

    def get(self, fact: str, default: Any = None) -> Any:
        """The value of ``fact``, or ``default``."""
        return dict(self.facts).get(fact, default)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{k}={v}' for k, v in self.facts)})"


@dataclass(frozen=True, slots=True)
class Yes:
    """The implementation serves the query."""


@dataclass(frozen=True, slots=True)
class No:
    """It does not; ``reason`` is shown by ``kestrel doctor``."""

    reason: str


def _same(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _nothing(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One implementation of an op. ``fn`` has the op's own signature; ``pack`` lays a weight out for it, once.

    ``warm(query, row_counts)``: jobs that compile what launches of ``query`` with these numbers of rows (tokens) will
    run. A job compiles and launches nothing; jobs run on several threads at once while a model loads, in any order,
    and may repeat each other. What no job compiled is compiled at its first launch.
    ``eager_in``: the programs ("decode", "prefill", "encode") that ``fn`` cannot be captured in, because it waits for
    the device, reads the host's copies (``extents``) or lets numbers decide what it launches.
    """

    supports: Callable[[OpQuery], Yes | No]
    fn: OpCall
    pack: Callable[[torch.Tensor], torch.Tensor] = field(default=_same)
    warm: Callable[[OpQuery, Sequence[int]], Iterable[Callable[[], object]]] = field(default=_nothing)
    eager_in: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Available:
    """The backend runs on this device; ``detail`` is shown by ``kestrel doctor``."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The backend does not run on this device, and why."""

    reason: str


class KernelBackend(ABC):
    """A provider of op implementations. Higher ``priority`` is asked first."""

    name: str
    priority: int = 0

    @abstractmethod
    def probe(self, device: torch.device) -> Available | Unavailable:
        """Whether this backend can run on ``device``; cheap, no kernel is built here."""

    @abstractmethod
    def impls(self) -> Mapping[str, Impl]:
        """Implementations by op name. Called once, after a successful probe."""
