"""What leaves when a pool is full, in which order, and what never does."""

from __future__ import annotations

import time

from kestrel.state import KeyRun
from kestrel.types import Layout


def open_(cache, *tokens: int, reserve: int = 0, **options):
    return cache.open(KeyRun.of(Layout(tokens=tokens, **options), cache.interner), reserve=reserve)


def cached(cache, *tokens: int) -> int:
    lease = open_(cache, *tokens)
    lease.close()
    return lease.cached


def test_the_least_recently_used_prefix_leaves_first(new_cache, run):
    cache = new_cache("full", pages=6)
    for first in (10, 20, 30):
        run(cache, Layout(tokens=(first, *range(7))), exact=False)
    assert cached(cache, 10, *range(7), 9) == 8
    lease = open_(cache, 99, reserve=8)
    assert lease is not None
    assert [cached(cache, first, *range(7), 9) for first in (10, 20, 30)] == [8, 0, 8]
    lease.close()


def test_leaves_go_before_what_they_hang_on(new_cache, run):
    cache = new_cache("full", pages=4)
    run(cache, Layout(tokens=tuple(range(16))))
    lease = open_(cache, 99, reserve=8)
    assert cached(cache, *range(16), 1) == 8
    lease.close()


def test_a_shared_head_stays_as_recent_as_its_last_user(new_cache, run):
    cache = new_cache("full", pages=6)
    run(cache, Layout(tokens=(*range(4), *range(40, 44))))  # a head and a tail
    run(cache, Layout(tokens=tuple(range(20, 28))))
    assert cached(cache, *range(4), 7, 7, 7, 7) == 4
    lease = open_(cache, 99, reserve=20)  # needs 5: two are free, then the tail, then the other prompt
    assert cached(cache, *range(4), 7, 7) == 4
    lease.close()


def test_what_live_leases_hold_is_never_evicted(new_cache, run):
    cache = new_cache("full", pages=4)
    run(cache, Layout(tokens=tuple(range(8))))
    holder = open_(cache, *range(8), 8, reserve=9)
    assert holder.cached == 8
    assert open_(cache, 99, reserve=8) is None
    assert holder.table("full").tolist()[:2] == [1, 2]
    assert cached(cache, *range(8), 9) == 8
    holder.close()


def test_window_pages_leave_before_full_ones_and_holes_keep_the_rest_usable(new_cache, run):
    cache = new_cache("full", "window", pages=64, window_pages=4)
    run(cache, Layout(tokens=tuple(range(12)), marks=(5,)))
    lease = open_(cache, *range(60, 68), reserve=8)
    lease.close()
    stats = cache.stats()
    assert (stats.pages_cached, stats.evicted_pages) == (3, 1), "full attention kept its three pages"


def test_admitting_and_closing_ten_thousand_requests_takes_linear_time(new_cache):
    cache = new_cache("full", pages=2000)

    def seconds(count: int) -> float:
        keys = [KeyRun.of(Layout(tokens=(i, *range(12))), cache.interner) for i in range(count)]
        start = time.perf_counter()
        for run in keys:
            lease = cache.open(run, reserve=13)
            lease.commit(13)
            lease.close()
        return time.perf_counter() - start

    seconds(1000)
    few, many = min(seconds(1000) for _ in range(3)), seconds(10_000)
    assert many < 40 * few, f"1,000 took {few:.3f} s, 10,000 took {many:.3f} s"


def test_outdated_entries_do_not_pile_up(new_cache, run):
    cache = new_cache("full", pages=64)
    run(cache, Layout(tokens=tuple(range(8))), 8)
    for _ in range(2000):
        assert cached(cache, *range(8), 8, 9) == 9
    assert len(cache._pools.tree._leaves) < 100
