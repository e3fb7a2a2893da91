"""The state of one model: its pools, its prefix tree, and the leases on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel.spi.driver import TokenSpec
from kestrel.state.keys import Interner, KeyRun
from kestrel.state.lease import Lease
from kestrel.state.sizes import PoolSizes
from kestrel.state.tensors import CrossTensors, PagedTensors, RecurrentTensors

__all__ = ["CacheStats", "StateCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters since construction, and what is held now. ``usage``: share of the busiest pool that leases hold."""

    queried_positions: int = 0
    cached_positions: int = 0
    evicted_pages: int = 0
    evicted_checkpoints: int = 0
    usage: float = 0.0
    pages_total: int = 0
    pages_free: int = 0
    pages_live: int = 0
    pages_cached: int = 0
    leases: int = 0
    nodes: int = 0


class StateCache:
    """Pools, prefix tree and leases of one loaded model. Device thread only."""

    interner: Interner
    page_size: int

    def __init__(
        self,
        spec: TokenSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        page_size: int,
        sizes: PoolSizes,
        max_ahead: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        raise NotImplementedError

    def open(self, keys: KeyRun, *, limit: int | None = None, reserve: int = 0) -> Lease | None:
        """A lease on the longest cached prefix of ``keys`` (at most ``limit``, at most len − 1) and on ``reserve``
        positions in all; None, and nothing changed, when pages, slots or entries are used up by other leases."""
        raise NotImplementedError

    def fits(self, total_positions: int) -> str | None:
        """Why a sequence of ``total_positions`` can never fit, with numbers; None when it can."""
        raise NotImplementedError

    def pool(self, name: str) -> PagedTensors | RecurrentTensors | CrossTensors:
        """The tensors of state ``name``."""
        raise NotImplementedError

    def stats(self) -> CacheStats:
        """Counters and sizes."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError unless free + live + cached = total in every pool, recounted from leases and tree."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop everything cached that no open lease holds."""
        raise NotImplementedError
