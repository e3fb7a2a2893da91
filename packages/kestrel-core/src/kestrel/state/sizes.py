"""How large each pool is, from a budget in bytes (or pages), and the error when it cannot be large enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

import torch

from kestrel.errors import CapacityError
from kestrel.spi.driver import TokenSpec
from kestrel.spi.states import CrossKV, PagedKV, Recurrent, StateSpec, WindowKV
from kestrel.state.tables import window_width
from kestrel.state.tensors import torch_dtype

__all__ = ["PoolSizes", "fixed_pages", "plan_sizes", "pool_bytes"]

CHECKPOINTS_PER_ROW = 4  # of recurrent state: where useful checkpoints of a conversation lie (see planned.py)
SEQUENCES_PER_ROW = 2  # room for a running sequence and a cached one per row; more would only be idle memory


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


@dataclass(slots=True)
class _Share:
    """One pool while the budget is dealt out: bytes per place, places so far, places that are of use."""

    unit: int
    places: int
    wanted: int

    def take(self, budget_bytes: int) -> int:
        """Bytes left of ``budget_bytes`` after taking as many useful places as it pays for."""
        if not self.unit:
            return budget_bytes
        more = max(0, min(self.wanted - self.places, budget_bytes // self.unit))
        self.places += more
        return budget_bytes - more * self.unit


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
    """Pools within ``budget_bytes`` that hold one sequence of ``max_len`` and the recurrent state of ``max_rows``.

    What is left goes to cached windows, checkpoints and cross entries (a quarter each, at most), then to
    full-attention pages, never beyond what ``max_rows`` can use. ``setting`` names where the budget came from.
    Raises CapacityError with the bytes needed, those given, and the settings to change.
    """
    units = _units(spec, dtype, page_size)
    pages = -(-max_len // page_size)
    many = SEQUENCES_PER_ROW * max_rows
    full = _Share(units.page, pages, many * pages)
    windows = {
        w: _window_share(w, unit, pages, many, page_size, max_ahead) for w, unit in units.window.items()
    }
    live = _Share(units.slot, max_rows, max_rows)
    checkpoints = _Share(units.slot, 0, CHECKPOINTS_PER_ROW * max_rows)
    cross = _Share(units.entry, 1, many)
    scratch = units.page + units.slot + units.entry + sum(units.window.values())
    needed = scratch + sum(s.unit * s.places for s in (full, live, cross, *windows.values()))
    if needed > budget_bytes:
        raised = setting if setting == "kv_cache_bytes" else f"{setting} or kv_cache_bytes"
        raise CapacityError(
            f"one sequence of {max_len} positions and {max_rows} rows need {_mib(needed)} of state in pages of "
            f"{page_size} positions, {setting} gives {_mib(budget_bytes)}. Raise {raised}, or lower "
            "max_model_len, max_batch_size or page_size."
        )
    _deal(budget_bytes - needed, full, (checkpoints, cross, *windows.values()))
    return PoolSizes(
        pages=full.places if units.page else 0,
        window_pages=MappingProxyType({w: share.places for w, share in windows.items()}),
        live_slots=live.places if units.slot else 0,
        checkpoint_slots=checkpoints.places,
        cross_entries=cross.places if units.entry else 0,
    )


def _deal(left: int, full: _Share, extras: Sequence[_Share]) -> None:
    """Spend ``left`` bytes: at most a quarter on each of the ``extras``, then on ``full``, then on what they still
    have a use for."""
    quarter = left // 4
    for share in extras:
        left += share.take(min(quarter, left)) - min(quarter, left)
    for share in (full, *extras):
        left = share.take(left)


def fixed_pages(spec: TokenSpec, pages: int, *, max_rows: int) -> PoolSizes:
    """Pools with ``pages`` pages for every full-attention and window state (``kv_cache_pages``)."""
    recurrent = any(isinstance(state, Recurrent) for state in spec.states)
    cross = any(isinstance(state, CrossKV) for state in spec.states)
    return PoolSizes(
        pages=pages if any(isinstance(state, PagedKV) for state in spec.states) else 0,
        window_pages=MappingProxyType(
            {state.window: pages for state in spec.states if isinstance(state, WindowKV)}
        ),
        live_slots=max_rows if recurrent else 0,
        checkpoint_slots=CHECKPOINTS_PER_ROW * max_rows if recurrent else 0,
        cross_entries=SEQUENCES_PER_ROW * max_rows if cross else 0,
    )


def pool_bytes(spec: TokenSpec, sizes: PoolSizes, *, dtype: torch.dtype, page_size: int) -> int:
    """What pools of ``sizes`` take, their scratch included."""
    units = _units(spec, dtype, page_size)
    windows = sum(units.window[w] * (places + 1) for w, places in sizes.window_pages.items())
    slots = sizes.live_slots + sizes.checkpoint_slots + 1
    return (
        units.page * (sizes.pages + 1)
        + units.slot * slots
        + units.entry * (sizes.cross_entries + 1)
        + windows
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """Bytes of one place in each pool, over all states that share it."""

    page: int
    window: Mapping[int, int]
    slot: int
    entry: int


def _units(spec: TokenSpec, dtype: torch.dtype, page_size: int) -> _Units:
    page = slot = entry = 0
    window: dict[int, int] = {}
    for state in spec.states:
        size = _place_bytes(state, dtype, page_size)
        match state:
            case PagedKV():
                page += size
            case WindowKV():
                window[state.window] = window.get(state.window, 0) + size
            case Recurrent():
                slot += size
            case CrossKV():
                entry += size
    return _Units(page, window, slot, entry)


def _place_bytes(state: StateSpec, dtype: torch.dtype, page_size: int) -> int:
    if isinstance(state, Recurrent):
        return state.layers * sum(
            prod(part.shape) * torch_dtype(part.dtype, dtype).itemsize for part in state.parts
        )
    positions = state.max_len if isinstance(state, CrossKV) else page_size
    itemsize = torch_dtype(state.dtype, dtype).itemsize
    return 2 * state.layers * state.kv_heads * positions * state.head_dim * itemsize


def _window_share(
    window: int, unit: int, pages: int, many: int, page_size: int, max_ahead: int | None
) -> _Share:
    one = (
        pages
        if max_ahead is None
        else min(pages, window_width(window, page_size=page_size, max_ahead=max_ahead))
    )
    return _Share(unit, one, many * one)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size:,} bytes"
