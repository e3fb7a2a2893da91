"""Leases: reserving, closing, pins, cross entries."""

from __future__ import annotations

import pytest

from kestrel.state import KeyRun
from kestrel.types import Layout


def open_(cache, *tokens: int, reserve: int = 0, media=(), **options):
    keys = KeyRun.of(Layout(tokens=tokens, media=tuple(media), **options), cache.interner)
    return cache.open(keys, reserve=reserve)


def test_a_dry_pool_refuses_and_changes_nothing(new_cache):
    cache = new_cache("full", "window", pages=4)
    lease = open_(cache, 1, 2, 3, reserve=8)
    before = (lease.capacity, lease.version, lease.table("full").tolist())
    assert not lease.reserve(17)
    assert (lease.capacity, lease.version, lease.table("full").tolist()) == before
    assert lease.reserve(16)
    lease.close()


def test_open_takes_nothing_when_it_cannot_reserve(new_cache):
    cache = new_cache("full", "recurrent", "cross", pages=4)
    holder = open_(cache, 1, 2, 3, reserve=12)
    assert open_(cache, 1, 2, 3, reserve=8) is None
    cache.check()
    assert cache.stats().pages_free == 1
    holder.close()


def test_closing_twice_gives_back_once(new_cache):
    cache = new_cache("full", "window", "recurrent")
    lease = open_(cache, 1, 2, reserve=5)
    lease.close()
    lease.close()
    assert lease.is_closed
    assert cache.stats().pages_free == cache.stats().pages_total


def test_a_lease_closed_while_steps_name_it_is_freed_by_the_last_of_them(new_cache):
    cache = new_cache("full", "window", "recurrent")
    lease = open_(cache, 1, 2, reserve=5)
    lease.pin()
    lease.pin()
    lease.close()
    lease.unpin()
    assert cache.stats().pages_live == 2
    lease.unpin()
    assert cache.stats().pages_live == 0


def test_what_a_cancelled_sequence_had_in_flight_is_not_cached(new_cache):
    cache = new_cache("full")
    lease = open_(cache, *range(9), reserve=9)
    lease.pin()
    lease.close()
    lease.unpin()
    lease.commit(9)
    assert cache.stats().nodes == 0


def test_nodes_appear_when_their_step_commits(new_cache):
    cache = new_cache("full")
    lease = open_(cache, *range(9), reserve=9)
    assert cache.stats().nodes == 0
    lease.commit(8)
    assert cache.stats().nodes == 2
    lease.close()


def test_tables_are_read_only_views_as_long_as_the_capacity(new_cache):
    cache = new_cache("full", page_size=2)
    lease = open_(cache, 1, 2, reserve=70)
    table = lease.table("full")
    assert (len(table), table.dtype.name, lease.capacity) == (35, "int32", 70)
    assert 0 not in table
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1
    lease.close()


def test_pages_behind_the_window_are_released_as_computed_advances(new_cache):
    cache = new_cache("window", prefix_cache=False)  # window 6, pages of 4
    lease = open_(cache, *range(30), reserve=30)
    for computed, held in ((8, 8), (12, 7), (20, 5), (29, 2)):
        lease.commit(computed)
        assert cache.stats().pages_live == held, f"at {computed}"
    lease.close()


def test_a_bounded_run_ahead_lets_a_long_prompt_use_a_small_window_pool(new_cache):
    cache = new_cache("window", window_pages=8, max_ahead=8)
    assert cache.fits(4000) is None
    lease = open_(cache, *range(400), reserve=400)
    for computed in range(8, 401, 8):
        ahead = lease.table("window")[(computed - 8) // 4 : computed // 4]
        assert 0 not in ahead, f"no place for positions up to {computed}"
        lease.commit(computed)
        cache.check()
    lease.close()


def test_promised_window_pages_are_never_given_to_others(new_cache):
    cache = new_cache("window", window_pages=8, max_ahead=8)
    lease = open_(cache, *range(400), reserve=400)
    assert open_(cache, 1, 2, 3, reserve=8) is None, "all eight are promised though not all are taken"
    lease.close()


def test_a_cross_entry_is_shared_and_written_once(new_cache, media):
    cache = new_cache("full", "cross")
    a, b = (open_(cache, 1, 2, media=[media("bark")]) for _ in range(2))
    entry, is_new = a.cross_entry("cross")
    assert (entry > 0, is_new) == (True, True)
    assert b.cross_entry("cross") == (entry, True), "still to be written, by whoever comes first"
    a.cross_written(2)
    assert b.cross_entry("cross") == (entry, False)
    assert b.cross_len == 2
    a.close()
    b.close()
    again = open_(cache, 1, 2, media=[media("bark")])
    assert again.cross_entry("cross") == (entry, False)
    again.close()


def test_a_cross_entry_that_was_never_written_is_forgotten(new_cache, media):
    cache = new_cache("cross")
    open_(cache, 1, media=[media("bark")]).close()
    again = open_(cache, 1, media=[media("bark")])
    assert again.cross_entry("cross")[1]
    again.close()


def test_the_oldest_idle_cross_entry_leaves_first_and_held_ones_stay(new_cache, media):
    cache = new_cache("cross", entries=2)
    for name in ("bark", "meow"):
        lease = open_(cache, 1, media=[media(name)])
        lease.cross_written(1)
        lease.close()
    held = open_(cache, 1, media=[media("bark")])
    other = open_(cache, 1, media=[media("moo")])
    assert not held.cross_entry("cross")[1]
    assert other.cross_entry("cross")[1]
    assert open_(cache, 1, media=[media("meow")]) is None, "both entries are held"
    held.close()
    other.close()


def test_a_sequence_without_cross_media_reads_the_scratch_entry(new_cache):
    cache = new_cache("full", "cross")
    lease = open_(cache, 1, 2)
    assert lease.cross_entry("cross") == (0, False)
    assert lease.cross_len == 0
    lease.close()
