"""The invariant check itself notices what goes wrong."""

from __future__ import annotations

import pytest

from kestrel.state import KeyRun
from kestrel.types import Layout


@pytest.fixture
def busy(simulate):
    """A cache with a lease and cached prefixes."""
    cache = simulate("full", "window", "recurrent").cache
    for tokens in (range(9), range(20, 29)):
        keys = KeyRun.of(Layout(tokens=tuple(tokens), marks=(6,)), cache.interner)
        lease = cache.open(keys, reserve=12)
        lease.stores(0, 9)
        lease.commit(9)
        if tokens.start == 0:
            lease.finish(exact=True)
    cache.check()
    return cache


def test_a_lost_page_is_noticed(busy):
    busy._pools.full.free.pop()
    with pytest.raises(AssertionError, match="pages: free"):
        busy.check()


def test_a_page_freed_twice_is_noticed(busy):
    busy._pools.full.free.append(busy._pools.full.free[0])
    with pytest.raises(AssertionError, match="recorded"):
        busy.check()


def test_a_wrong_reference_count_is_noticed(busy):
    page = next(iter(busy._pools.leases)).table("full")[0]
    busy._pools.full.lease_refs[page] += 1
    with pytest.raises(AssertionError, match=f"leases on {page}: 2 recorded, 1 counted"):
        busy.check()


def test_a_lost_slot_is_noticed(busy):
    busy._pools.slots.num_live += 1
    with pytest.raises(AssertionError, match="live slots: 2 recorded, 1 counted"):
        busy.check()


def test_a_forgotten_pin_is_noticed(busy):
    busy._pools.tree.pin(next(iter(busy._pools.tree.roots.values())))
    with pytest.raises(AssertionError, match="pins"):
        busy.check()


def test_a_leaf_that_cannot_be_evicted_is_noticed(busy):
    busy._pools.tree._leaves.clear()
    with pytest.raises(AssertionError, match="can never be evicted"):
        busy.check()


def test_a_broken_promise_is_noticed(busy):
    busy._pools.windows[0].promised -= 1
    with pytest.raises(AssertionError, match="promised"):
        busy.check()
