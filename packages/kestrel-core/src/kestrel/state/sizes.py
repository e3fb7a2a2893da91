"""How large each pool is, from a budget in bytes (or pages), and the error when it cannot be large enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from kestrel.spi.driver import TokenSpec

__all__ = ["PoolSizes", "fixed_pages", "plan_sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Usable places per pool; each tensor has one more, its scratch.

    ``pages`` of the full-attention states, ``window_pages`` per window length, ``live_slots`` and
    ``checkpoint_slots`` of the recurrent states, ``cross_entries``. States of one kind share these numbers.
    """

    pages: int = 0
    window_pages: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    live_slots: int = 0
    checkpoint_slots: int = 0
    cross_entries: int = 0


def plan_sizes(
    spec: TokenSpec,
    budget_bytes: int,
    *,
    dtype: torch.dtype,
    page_size: int,
    max_rows: int,
    max_len: int,
    max_ahead: int | None = None,
    setting: str = "kv_cache_bytes",
) -> PoolSizes:
    """Pools within ``budget_bytes`` that hold one sequence of ``max_len`` and the fixed state of ``max_rows``.

    Raises CapacityError with the bytes needed, those given, and the settings to change.
    """
    raise NotImplementedError


def fixed_pages(
    spec: TokenSpec, pages: int, *, page_size: int, max_rows: int, max_ahead: int | None = None
) -> PoolSizes:
    """Pools with ``pages`` pages in each full-attention and window state (``kv_cache_pages``)."""
    raise NotImplementedError
