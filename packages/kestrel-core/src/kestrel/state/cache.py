"""The state of one model: its pools, its prefix tree, and the leases on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kestrel.ops import OpTable
from kestrel.spi.driver import TokenSpec
from kestrel.spi.states import CrossKV, PagedKV, Recurrent, StateSpec, WindowKV
from kestrel.state.check import check_pools
from kestrel.state.cross import CrossEntries
from kestrel.state.keys import Interner, KeyRun
from kestrel.state.lease import Lease
from kestrel.state.places import Places
from kestrel.state.pools import Pools
from kestrel.state.sizes import PoolSizes
from kestrel.state.slots import StateSlots
from kestrel.state.tables import WindowGroup
from kestrel.state.tensors import CrossTensors, PagedTensors, RecurrentTensors
from kestrel.state.tree import PrefixTree

__all__ = ["CacheStats", "StateCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters since construction, and what is held now. ``usage``: the share of the busiest pool that leases hold.

    ``pages_*``: of the full-attention pool, or of the smallest window pool where there is none.
    """

    queried_positions: int = 0
    cached_positions: int = 0
    evicted_pages: int = 0
    evicted_checkpoints: int = 0
    usage: float = 0.0
    pages_total: int = 0
    pages_free: int = 0
    pages_live: int = 0
    pages_cached: int = 0
    checkpoints: int = 0
    leases: int = 0
    nodes: int = 0


class StateCache:
    """Pools, prefix tree and leases of one loaded model. Device thread only (``interner`` on any).

    ``max_ahead``: the most positions of one sequence that launches run ahead of its committed ones (steps in flight
    times the largest chunk); it bounds what window states reserve. None: they reserve all of ``capacity``. ``ops``
    serve copies of pages; None: the reference.
    """

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
        ops: OpTable | None = None,
    ) -> None:
        self.interner = Interner()
        self.page_size = page_size
        self._queried = self._cached = 0
        self._pools = _build(spec, page_size, sizes, max_ahead, prefix_cache, device, dtype, ops)

    def open(self, keys: KeyRun, *, limit: int | None = None, reserve: int = 0) -> Lease | None:
        """A lease on the longest cached prefix of ``keys`` (at most ``limit``, at most len − 1) and on ``reserve``
        positions in all; None, and nothing taken, when other leases use up the pages, slots or entries."""
        last = len(keys) - 1
        lease = Lease(self._pools, keys)
        if not lease.acquire(last if limit is None else min(limit, last), reserve):
            lease.release()
            return None
        self._pools.leases.add(lease)
        self._queried += len(keys)
        self._cached += lease.cached
        return lease

    def fits(self, total_positions: int) -> str | None:
        """Why a sequence of ``total_positions`` can never fit, with numbers; None when it can."""
        pools, size = self._pools, self.page_size
        wanted = -(-total_positions // size)
        if pools.full is not None and wanted > pools.full.total:
            return f"it needs {total_positions} positions, the KV pool holds {pools.full.total * size}"
        for group in pools.windows:
            held = wanted if group.width is None else min(wanted, group.width)
            if held > group.places.total:
                return (
                    f"its window of {group.window} needs {held * size} positions, "
                    f"the window pool holds {group.places.total * size}"
                )
        return None

    def pool(self, name: str) -> PagedTensors | RecurrentTensors | CrossTensors:
        """The tensors of state ``name``; KeyError when the model declares no such state."""
        return self._pools.tensors[name]

    def stats(self) -> CacheStats:
        """Counters and sizes."""
        pools, tree = self._pools, self._pools.tree
        paged = ([] if pools.full is None else [pools.full]) + [group.places for group in pools.windows]
        pages = pools.full or min(paged, key=lambda places: places.total, default=Places(0))
        return CacheStats(
            queried_positions=self._queried,
            cached_positions=self._cached,
            evicted_pages=0 if tree is None else tree.evicted_pages,
            evicted_checkpoints=0 if tree is None else tree.evicted_checkpoints,
            usage=max((places.live / places.total for places in paged if places.total), default=0.0),
            pages_total=pages.total,
            pages_free=len(pages.free),
            pages_live=pages.live,
            pages_cached=pages.num_idle,
            checkpoints=0 if pools.slots is None else pools.slots.places.num_idle,
            leases=len(pools.leases),
            nodes=0 if tree is None else tree.num_nodes,
        )

    def check(self) -> None:
        """Raise AssertionError unless free + live + cached = total in every pool, recounted from leases and tree."""
        check_pools(self._pools)

    def clear(self) -> None:
        """Drop everything cached that no open lease holds."""
        if self._pools.tree is not None:
            self._pools.tree.clear()
        if self._pools.cross is not None:
            self._pools.cross.clear()


def _build(
    spec: TokenSpec,
    page_size: int,
    sizes: PoolSizes,
    max_ahead: int | None,
    prefix_cache: bool,
    device: torch.device,
    dtype: torch.dtype,
    ops: OpTable | None,
) -> Pools:
    if not prefix_cache:
        sizes = replace(sizes, checkpoint_slots=0)
    kinds = {type(state) for state in spec.states}
    windowed = [state for state in spec.states if isinstance(state, WindowKV)]
    groups = {
        window: WindowGroup(window, sizes.window_pages[window], page_size=page_size, max_ahead=max_ahead)
        for window in dict.fromkeys(state.window for state in windowed)
    }
    full = Places(sizes.pages) if PagedKV in kinds else None
    slots = StateSlots(sizes.live_slots, sizes.checkpoint_slots) if Recurrent in kinds else None
    tree = None
    if prefix_cache:
        tree = PrefixTree(
            page_size,
            full=full,
            windows=tuple((window, group.places) for window, group in groups.items()),
            slots=None if slots is None else slots.places,
        )
    return Pools(
        page_size=page_size,
        max_ahead=max_ahead,
        tree=tree,
        full=full,
        windows=tuple(groups.values()),
        slots=slots,
        cross=CrossEntries(sizes.cross_entries) if CrossKV in kinds else None,
        tensors={state.name: _allocate(state, page_size, sizes, device, dtype, ops) for state in spec.states},
        window_of={state.name: list(groups).index(state.window) for state in windowed},
    )


def _allocate(
    state: StateSpec,
    page_size: int,
    sizes: PoolSizes,
    device: torch.device,
    dtype: torch.dtype,
    ops: OpTable | None,
) -> PagedTensors | RecurrentTensors | CrossTensors:
    match state:
        case PagedKV():
            pages = sizes.pages
            return PagedTensors.allocate(state, pages, page_size, dtype=dtype, device=device, ops=ops)
        case WindowKV(window=window):
            pages = sizes.window_pages[window]
            return PagedTensors.allocate(state, pages, page_size, dtype=dtype, device=device, ops=ops)
        case Recurrent():
            places = sizes.live_slots + sizes.checkpoint_slots
            return RecurrentTensors.allocate(state, places, dtype=dtype, device=device)
        case CrossKV():
            return CrossTensors.allocate(state, sizes.cross_entries, dtype=dtype, device=device)
