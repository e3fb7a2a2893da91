"""What an op is: a contract with a reference, a tolerance per dtype, and cases that every implementation must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kestrel.spi.backend import OpCall, OpQuery

__all__ = ["Case", "Inputs", "Op", "Tolerance", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """How queries spell ``dtype``: "float32", "bfloat16", …"""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An implementation passes when |got − reference| <= ``atol`` + ``rtol`` · |reference| everywhere."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of one call, and what of its effect is defined, hence compared.

    ``written``: tensors (or views of them) that the op updates in place. ``num_rows``: how many leading rows of each
    output count; None: all. ``weight``: which argument a provider lays out for itself (``Impl.pack``).
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    written: tuple[torch.Tensor, ...] = ()
    num_rows: int | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One situation that an op must handle.

    ``facts`` complete the query together with the dtype. ``make(seed, device, dtype)`` builds fresh inputs: equal
    seeds give equal values on every device (random numbers are drawn on the CPU).
    """

    op: str
    name: str
    make: Callable[[int, torch.device, torch.dtype], Inputs]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def query(self, dtype: torch.dtype) -> OpQuery:
        """What a provider is asked whether it serves."""
        return OpQuery.of(self.op, dtype=dtype_name(dtype), **self.facts)

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A kernel contract. ``reference`` has the signature that all implementations share; its docstring is the contract.

    ``facts`` says what a query of this op carries. ``tolerances`` are by dtype name; a dtype without one is not
    tested. ``eager_in``: programs in which the reference is not captured (as ``Impl.eager_in``), since without the
    host's copies of lengths it computes for the longest that there could be.
    """

    name: str
    reference: OpCall
    cases: Callable[[], Sequence[Case]]
    tolerances: Mapping[str, Tolerance]
    facts: Mapping[str, str] = field(default_factory=dict)
    eager_in: frozenset[str] = frozenset()

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """How far an implementation may be from the reference in ``dtype``; KeyError when it is not tested."""
        return self.tolerances[dtype_name(dtype)]
