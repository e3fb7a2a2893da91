"""Cross-attention states for a pass beside the lane: the entry that a sequence had written, or one made for it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
import torch

from kestrel.runner import Runner
from kestrel.runner.mirror import to_device
from kestrel.spi.batch import CrossView, Limits
from kestrel.spi.driver import TokenDriver
from kestrel.spi.states import CrossKV
from kestrel.state import CrossTensors, KeyRun, StateCache
from kestrel.types import Layout, Prepared

__all__ = ["borrow_cross"]


def borrow_cross(
    item: Prepared,
    driver: TokenDriver,
    runner: Runner,
    cache: StateCache,
    held: ExitStack,
    device: torch.device,
) -> Mapping[str, CrossView]:
    """A view of one row per cross state over what the encoder made of ``item``, held as long as ``held``.

    An entry that nobody has written yet is written; when other sequences hold all entries, one is made for the
    occasion. On the device thread.
    """
    lease = cache.open(KeyRun.of(Layout(tokens=(0,), media=(item,)), cache.interner))
    if lease is None:
        return _made(item, driver, runner, cache, device)
    held.callback(lease.close)
    entry, is_new = lease.cross_entry(runner.states.cross[0])
    if is_new:
        runner.write_cross([item], [lease])
    place = _Place(entry, lease.cross_len, device)
    return {
        name: runner.states.cross_view(
            name, place.entries_B, place.lens_B, place.cu_seqlens, place.limits, None
        )
        for name in runner.states.cross
    }


class _Place:
    """One row that reads ``length`` positions of ``entry``."""

    def __init__(self, entry: int, length: int, device: torch.device) -> None:
        self.entries_B = to_device(np.array([entry], dtype=np.int64), device)
        self.lens_B = to_device(np.array([length], dtype=np.int32), device)
        self.cu_seqlens = to_device(np.array([0, length], dtype=np.int32), device)
        self.limits = Limits(max_rows=1, max_tokens=length, max_query_len=length, max_context_len=length)


def _made(
    item: Prepared, driver: TokenDriver, runner: Runner, cache: StateCache, device: torch.device
) -> Mapping[str, CrossView]:
    encoded = runner.encode(item.kind, [item])
    place = _Place(1, item.cross_positions or encoded.shape[0], device)
    views = {}
    for state in driver.spec.states:
        if isinstance(state, CrossKV):
            pool = cache.pool(state.name)
            assert isinstance(pool, CrossTensors)
            tensors = CrossTensors.allocate(state, 1, dtype=pool.k_LEKSD.dtype, device=device)
            views[state.name] = CrossView(
                k_LEKSD=tensors.k_LEKSD,
                v_LEKSD=tensors.v_LEKSD,
                entries_B=place.entries_B,
                lens_B=place.lens_B,
                cu_seqlens=place.cu_seqlens,
                limits=place.limits,
            )
    driver.write_cross(encoded, [item], views)
    return views
