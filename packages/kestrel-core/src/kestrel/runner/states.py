"""The model's states as launches name them: which share a page table, and the tensors behind each view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kestrel.spi.batch import CrossView, Limits, PagedView, RecurrentView, RowExtent, View
from kestrel.spi.driver import TokenSpec
from kestrel.spi.states import CrossKV, PagedKV, Recurrent, WindowKV
from kestrel.state import CrossTensors, PagedTensors, RecurrentTensors, StateCache

__all__ = ["Places", "StateMap"]


@dataclass(slots=True, kw_only=True)
class Places:
    """Where one launch finds its sequences' states, as device tensors.

    ``slots`` and ``tables`` have one entry per page-table group. ``stores`` is int64 [M, 3].
    """

    computed_B: torch.Tensor
    cu_seqlens: torch.Tensor
    limits: Limits
    extents: Sequence[RowExtent] | None
    slots: list[torch.Tensor]
    tables: list[torch.Tensor]
    state_slots_B: torch.Tensor
    entries_B: torch.Tensor
    lens_B: torch.Tensor
    stores: torch.Tensor
    host_stores: tuple[tuple[int, int, int], ...] = ()
    bidirectional_end_T: torch.Tensor | None = None


@dataclass(slots=True)
class StateMap:
    """``groups``: one state name per page table (full attention, then each window). ``group_of``: name to index."""

    cache: StateCache
    page_size: int
    groups: list[str] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)
    recurrent: list[str] = field(default_factory=list)
    cross: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, spec: TokenSpec, cache: StateCache) -> StateMap:
        """The map of a model's states over the pools of ``cache``."""
        states = cls(cache, cache.page_size)
        by_window: dict[int | None, int] = {}
        for state in spec.states:
            match state:
                case PagedKV() | WindowKV():
                    window = state.window if isinstance(state, WindowKV) else None
                    if window not in by_window:
                        by_window[window] = len(states.groups)
                        states.groups.append(state.name)
                    states.group_of[state.name] = by_window[window]
                case Recurrent():
                    states.recurrent.append(state.name)
                case CrossKV():
                    states.cross.append(state.name)
        return states

    def views(self, places: Places) -> dict[str, View]:
        """A view per declared state over ``places``."""
        views: dict[str, View] = {}
        extents = None if places.extents is None else places.extents
        for name, group in self.group_of.items():
            pages = self.cache.pool(name)
            assert isinstance(pages, PagedTensors)
            views[name] = PagedView(
                k_LPKSD=pages.k_LPKSD,
                v_LPKSD=pages.v_LPKSD,
                page_table_BN=places.tables[group],
                slots_T=places.slots[group],
                computed_B=places.computed_B,
                cu_seqlens=places.cu_seqlens,
                limits=places.limits,
                page_size=self.page_size,
                window=pages.window,
                extents=extents,
                bidirectional_end_T=places.bidirectional_end_T,
            )
        for name in self.recurrent:
            state = self.cache.pool(name)
            assert isinstance(state, RecurrentTensors)
            views[name] = RecurrentView(
                parts=state.parts,
                slots_B=places.state_slots_B,
                cu_seqlens=places.cu_seqlens,
                stores=places.stores,
                limits=places.limits,
                extents=extents,
                host_stores=places.host_stores,
            )
        for name in self.cross:
            views[name] = self.cross_view(
                name, places.entries_B, places.lens_B, places.cu_seqlens, places.limits, extents
            )
        return views

    def cross_view(
        self,
        name: str,
        entries_B: torch.Tensor,
        lens_B: torch.Tensor,
        cu_seqlens: torch.Tensor,
        limits: Limits,
        extents: Sequence[RowExtent] | None,
    ) -> CrossView:
        """The view of cross state ``name``."""
        cross = self.cache.pool(name)
        assert isinstance(cross, CrossTensors)
        return CrossView(
            k_LEKSD=cross.k_LEKSD,
            v_LEKSD=cross.v_LEKSD,
            entries_B=entries_B,
            lens_B=lens_B,
            cu_seqlens=cu_seqlens,
            limits=limits,
            extents=extents,
        )
