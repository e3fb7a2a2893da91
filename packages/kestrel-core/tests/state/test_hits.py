"""Where a cached prefix ends, and what a hit shares or copies."""

from __future__ import annotations

import pytest

from kestrel.spi.states import WindowKV
from kestrel.state import KeyRun
from kestrel.types import Layout, Span


def cached(cache, layout: Layout, **options: int) -> int:
    lease = cache.open(KeyRun.of(layout, cache.interner), **options)
    assert lease is not None
    lease.close()
    return lease.cached


def text(*tokens: int, **options) -> Layout:
    return Layout(tokens=tokens, **options)


@pytest.mark.parametrize("positions", [729, 196])
def test_a_whole_picture_hits_through_a_mark_inside_a_page(new_cache, picture, run, positions):
    cache = new_cache("full", page_size=16, pages=128)
    run(cache, picture("cat", positions, (5, 6, 7)))
    assert (positions + 1) % 16, "the prefix ends inside a page"
    assert cached(cache, picture("cat", positions, (8, 9))) == positions + 1


def test_a_hit_inside_a_page_copies_what_is_filled_and_shares_the_rest(new_cache, picture, run):
    cache = new_cache("full")
    pool = cache.pool("full")
    lease = run(cache, picture("cat", 5, (5, 6)))
    keys = KeyRun.of(picture("cat", 5, (7, 8)), cache.interner)
    pool.k_LPKSD.copy_(pool.k_LPKSD.new_tensor(range(pool.k_LPKSD.numel())).view_as(pool.k_LPKSD))
    lease = cache.open(keys, reserve=len(keys))
    assert lease.cached == 6
    shared, own = lease.table("full")
    source = 2  # pages are taken in order: the first prompt filled 1 and 2
    assert shared == 1
    assert pool.k_LPKSD[0, own, 0, :2].tolist() == pool.k_LPKSD[0, source, 0, :2].tolist()
    assert pool.k_LPKSD[0, own, 0, 2:].tolist() != pool.k_LPKSD[0, source, 0, 2:].tolist()
    lease.close()


def test_a_hit_never_ends_inside_a_bidirectional_range(new_cache, run, media):
    cache = new_cache("full")
    layout = Layout(
        tokens=(1, 2, *[0] * 8, 3),
        spans=(Span(2, 10, 0),),
        media=(media("cat", 8),),
        bidirectional=((2, 10),),
    )
    run(cache, layout)
    assert cached(cache, layout) == 10
    assert cached(cache, layout, limit=9) == 0, "8 is a page boundary inside the range, 4 is too"


def test_other_pictures_never_share_pages(new_cache, picture, run):
    cache = new_cache("full")
    run(cache, picture("cat", 9, (5, 6)))
    assert cached(cache, picture("dog", 9, (5, 6))) == 0


def test_two_pictures_share_the_system_prompt_before_them(new_cache, run, media):
    cache = new_cache("full")

    def layout(name: str) -> Layout:
        return Layout(tokens=(*range(1, 9), 0, 0, 9), spans=(Span(8, 10, 0),), media=(media(name, 2),))

    run(cache, layout("cat"))
    assert cached(cache, layout("dog")) == 8


def test_other_adapters_and_other_cross_media_never_share(new_cache, run):
    cache = new_cache("full")
    run(cache, text(*range(9)))
    other = KeyRun.of(text(*range(9)), cache.interner, adapter_load=1)
    lease = cache.open(other)
    assert lease.cached == 0
    lease.close()


def test_one_position_is_always_left_to_compute(new_cache, run):
    cache = new_cache("full")
    run(cache, text(*range(8)))
    assert cached(cache, text(*range(8))) == 4
    assert cached(cache, text(*range(9))) == 8
    assert cached(cache, text(0)) == 0


def test_a_hit_stops_before_the_limit(new_cache, run):
    cache = new_cache("full")
    run(cache, text(*range(20), marks=(10,)))
    assert cached(cache, text(*range(20)), limit=11) == 10
    assert cached(cache, text(*range(20)), limit=9) == 8
    assert cached(cache, text(*range(20)), limit=0) == 0


def test_the_next_turn_hits_the_end_of_the_last(new_cache, run):
    cache = new_cache("full")
    run(cache, text(1, 2, 3), 4, 5, 6)
    assert cached(cache, text(1, 2, 3, 4, 5, 6, 7)) == 6


def test_sequences_computed_side_by_side_end_on_the_same_pages(new_cache):
    cache = new_cache("full", "window")
    leases = [cache.open(KeyRun.of(text(*range(10)), cache.interner), reserve=10) for _ in range(2)]
    versions = [lease.version for lease in leases]
    for lease in leases:
        lease.commit(10)
    a, b = (lease.table("full").tolist() for lease in leases)
    assert a[:2] == b[:2]
    assert a[2] != b[2], "a page that is not full is never shared"
    assert leases[1].version > versions[1], "the second was told that its table changed"
    assert cache.stats().pages_live == 4
    for lease in leases:
        lease.close()


def test_a_page_given_up_for_a_shared_one_can_be_evicted_although_a_mark_holds_it(new_cache):
    cache = new_cache("full", pages=6)
    first, second = (KeyRun.of(text(*range(8), marks=marks), cache.interner) for marks in ((), (2,)))
    a, b = cache.open(first, reserve=8), cache.open(second, reserve=8)
    b.commit(2)
    a.commit(8)
    b.commit(8)
    cache.check()
    assert cache.stats().pages_cached == 1, "the page of the mark"
    assert b.reserve(24), "two are shared, three free, one idle"
    a.close()
    b.close()


def test_nothing_is_cached_when_the_prefix_cache_is_off(new_cache, run):
    cache = new_cache("full", "window", "recurrent", "cross", prefix_cache=False)
    run(cache, text(*range(9), marks=(6,)), 1, 2)
    assert cached(cache, text(*range(9))) == 0
    assert cache.stats().pages_free == cache.stats().pages_total


def test_clearing_forgets_every_prefix_that_no_lease_holds(new_cache, run):
    cache = new_cache("full", "recurrent")
    run(cache, text(*range(9)), 1)
    kept = cache.open(KeyRun.of(text(20, 21), cache.interner), reserve=2)
    cache.clear()
    assert cached(cache, text(*range(9), 1, 2)) == 0
    assert cache.stats().pages_live == 1
    kept.close()


def test_a_window_hit_needs_the_last_positions_only_and_leaves_holes(new_cache, run):
    cache = new_cache("window")
    run(cache, text(*range(20)), 20)
    keys = KeyRun.of(text(*range(20), 20, 21), cache.interner)
    lease = cache.open(keys, reserve=len(keys))
    assert lease.cached == 21
    assert [bool(page) for page in lease.table("window")] == [False, False, False, False, True, True]
    lease.close()


def test_a_window_hit_needs_every_one_of_the_last_positions(new_cache, run):
    window = WindowKV(name="window", layers=1, kv_heads=1, head_dim=1, window=6)
    cache = new_cache("full", window, window_pages=6)
    run(cache, text(*range(8)))  # window pages 1 and 2 are cached, 1 is older
    keys = KeyRun.of(text(*range(30, 50)), cache.interner)
    lease = cache.open(keys, reserve=20)  # five pages: four free, and the oldest idle one
    lease.close()
    assert cached(cache, text(*range(9))) == 0, "position 3 is gone, and a query at 8 sees 3 to 8"


def test_a_window_without_pages_does_not_shorten_what_full_attention_can_reuse_later(new_cache, run):
    cache = new_cache("full", "window", window_pages=6)
    run(cache, text(*range(8)))
    lease = cache.open(KeyRun.of(text(*range(30, 50)), cache.interner), reserve=20)
    lease.close()
    run(cache, text(*range(9)))
    assert cached(cache, text(*range(9))) == 8, "the second run gave the nodes their window pages back"


def test_a_window_hit_at_a_mark_counts_the_positions_inside_its_page(new_cache, run):
    cache = new_cache("full", "window")
    run(cache, text(*range(6)))
    assert cached(cache, text(*range(7))) == 6, "1 to 5 are seen: a whole page and two positions"


def test_a_mark_without_its_window_page_is_no_hit(new_cache, run):
    cache = new_cache("window", window_pages=3)
    run(cache, text(*range(6), marks=(4,)))
    lease = cache.open(KeyRun.of(text(50, 51), cache.interner), reserve=8)  # takes one of the two idle pages
    assert cached(cache, text(*range(7))) == 0
    lease.close()


def test_on_a_full_pool_a_hit_takes_over_the_very_page_that_it_would_copy(new_cache, run):
    narrow = WindowKV(name="window", layers=1, kv_heads=1, head_dim=1, window=3)
    cache = new_cache("full", narrow, window_pages=3)
    run(cache, text(*range(6)))
    pool = cache.pool("window").k_LPKSD
    pool[0, :, 0, 0, 0] = pool.new_tensor([0, 10, 20, 30])
    other = cache.open(
        KeyRun.of(text(50, 51), cache.interner), reserve=8
    )  # takes the free page and the oldest
    lease = cache.open(KeyRun.of(text(*range(7)), cache.interner), reserve=7)
    assert lease.cached == 6
    assert pool[0, lease.table("window")[1], 0, 0, 0] == 20, "what the second page held"
    cache.check()
    lease.close()
    other.close()
