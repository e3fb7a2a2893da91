"""Sequence state: pools, page tables, state slots, cross entries, the prefix tree, and the leases that hold them.

Final signatures (everything but ``KeyRun``, ``Interner`` and ``plan_sizes`` runs on the device thread alone)::

    Interner()                                     cache.interner; thread-safe
    KeyRun.of(layout, interner, *, adapter_load=0) -> KeyRun          on a pool thread
        len(keys) .append(token_id, aux=()) .fork() .namespace .marks .ranges .stable
    PoolSizes(pages, window_pages={window: pages}, live_slots, checkpoint_slots, cross_entries)   scratch not counted
    plan_sizes(spec, budget_bytes, *, dtype, page_size, max_rows, max_len, max_ahead=None, setting=...) -> PoolSizes
    fixed_pages(spec, pages, *, max_rows) -> PoolSizes            the same, from ``kv_cache_pages``
    StateCache(spec, *, device, dtype, page_size, sizes, max_ahead=None, prefix_cache=True)
        .open(keys, *, limit=None, reserve=0) -> Lease | None         None: wait, something is used up; nothing changed
        .fits(total_positions) -> str | None                          why such a sequence can never fit
        .pool(name) -> PagedTensors | RecurrentTensors | CrossTensors
        .stats() -> CacheStats   .check()   .clear()   .interner   .page_size
    Lease
        .cached .computed .capacity .version .is_closed
        .reserve(end) -> bool                      pages for positions [0, end); False and unchanged when a pool is dry
        .table(name) -> int32 array of page ids    read-only view; resend when .version moved
        .state_slot(name) -> int                   live slot of a recurrent state
        .stores(start, end) -> list[(position, slot)]   checkpoints for the launch that computes (start, end]; the
                                                   same for every recurrent state
        .cross_entry(name) -> (entry, is_new)      is_new until .cross_written(length) was called by any holder
        .cross_written(length)   .cross_len
        .commit(computed)                          positions whose step committed (keys appended before)
        .finish(*, exact)                          a turn's end: node at ``computed``; with ``exact`` the live state too
        .pin() .unpin() .close()                   close() while pinned frees at the last unpin; both idempotent
    FeaturePool(rows, width, *, device, dtype)
        .find(key) -> Features | None   .allocate(key, rows) -> Features | None   .write(features, x_RC)
        .put(key, x_RC) -> Features | None   .release(features)   .tensor [rows, C]   .check()

``max_ahead``: the most positions of one sequence that launches may run ahead of its committed ones (steps in flight
times the largest chunk). Window states reserve no more than window + max_ahead; None reserves up to ``capacity``.
Page, slot and entry 0 are scratch. ``KeyRun`` carries marks and bidirectional ranges of its layout, so ``open`` needs
only the keys, a ``limit`` (never beyond len − 1) and what to reserve with them.
"""

from kestrel.state.cache import CacheStats, StateCache
from kestrel.state.features import FeaturePool, Features
from kestrel.state.keys import Interner, KeyRun
from kestrel.state.lease import Lease
from kestrel.state.sizes import PoolSizes, fixed_pages, plan_sizes, pool_bytes
from kestrel.state.tensors import CrossTensors, PagedTensors, RecurrentTensors

__all__ = [
    "CacheStats",
    "CrossTensors",
    "FeaturePool",
    "Features",
    "Interner",
    "KeyRun",
    "Lease",
    "PagedTensors",
    "PoolSizes",
    "RecurrentTensors",
    "StateCache",
    "fixed_pages",
    "plan_sizes",
    "pool_bytes",
]
