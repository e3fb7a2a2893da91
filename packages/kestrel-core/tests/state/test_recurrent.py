"""Recurrent state: live slots, planned checkpoints, their budget."""

from __future__ import annotations

from kestrel.state import KeyRun
from kestrel.types import Layout


def open_(cache, *tokens: int, reserve: int | None = None, **options):
    keys = KeyRun.of(Layout(tokens=tokens, **options), cache.interner)
    return cache.open(keys, reserve=len(tokens) if reserve is None else reserve)


def cached(cache, *tokens: int, **options) -> int:
    lease = open_(cache, *tokens, **options)
    lease.close()
    return lease.cached


def test_checkpoints_are_planned_at_the_last_page_boundary_the_marks_and_the_stable_mark(new_cache):
    cache = new_cache("full", "recurrent")
    lease = open_(cache, *range(18), marks=(6,), stable=11)
    assert [position for position, _ in lease.stores(0, 18)] == [6, 11, 16]
    lease.close()


def test_a_launch_stores_only_what_it_passes(new_cache):
    cache = new_cache("full", "recurrent")
    lease = open_(cache, *range(18), marks=(6,))
    assert [position for position, _ in lease.stores(0, 5)] == []
    assert [position for position, _ in lease.stores(5, 6)] == [6]
    assert [position for position, _ in lease.stores(6, 18)] == [16]
    lease.close()


def test_a_hit_ends_where_a_checkpoint_sits(new_cache, run):
    cache = new_cache("full", "recurrent")
    run(cache, Layout(tokens=tuple(range(18)), marks=(6,)), exact=False)
    assert cached(cache, *range(14)) == 6
    assert cached(cache, *range(18)) == 16


def test_the_branch_point_gets_a_checkpoint_so_the_third_prompt_hits_deeper(new_cache, run):
    cache = new_cache("full", "recurrent")
    run(cache, Layout(tokens=tuple(range(30))))
    second = (*range(13), *range(100, 120))
    assert cached(cache, *second) == 0
    run(cache, Layout(tokens=second))
    assert cached(cache, *range(13), 200, 201) == 12


def test_a_checkpoint_is_copied_into_the_live_slot_and_fresh_state_is_zero(new_cache, run):
    cache = new_cache("recurrent")
    state = cache.pool("recurrent").parts["s"]
    run(cache, Layout(tokens=(1, 2, 3, 4)), 5)
    state.fill_(7.0)
    lease = open_(cache, 1, 2, 3, 4, 5, 6)
    fresh = open_(cache, 9, 9)
    assert lease.cached == 5
    assert state[0, lease.state_slot("recurrent"), 0] == 7.0
    assert state[0, fresh.state_slot("recurrent"), 0] == 0.0
    lease.close()
    fresh.close()


def test_a_turn_keeps_its_live_state_only_when_it_is_exact(new_cache, run):
    cache = new_cache("full", "recurrent")
    run(cache, Layout(tokens=(1, 2, 3)), 4, 5, exact=False)
    assert cached(cache, 1, 2, 3, 4, 5, 6) == 0
    run(cache, Layout(tokens=(1, 2, 3)), 4, 5, exact=True)
    assert cached(cache, 1, 2, 3, 4, 5, 6) == 5


def test_an_aborted_sequence_leaves_no_checkpoint_behind(new_cache):
    cache = new_cache("full", "recurrent")
    lease = open_(cache, *range(9))
    assert lease.stores(0, 9)
    lease.close()
    assert cache.stats().checkpoints == 0


def test_checkpoints_stay_within_their_budget_and_the_oldest_leave(new_cache, run):
    cache = new_cache("full", "recurrent", checkpoints=2)
    for first in (10, 20, 30):
        run(cache, Layout(tokens=(first, 1, 2)), 3)
        cache.check()
    assert cache.stats().checkpoints == 2
    assert [cached(cache, first, 1, 2, 3, 4) for first in (10, 20, 30)] == [0, 4, 4]
    assert cache.stats().evicted_checkpoints == 1


def test_a_used_checkpoint_outlives_an_unused_one(new_cache, run):
    cache = new_cache("full", "recurrent", checkpoints=2)
    run(cache, Layout(tokens=(10, 1, 2)), 3)
    run(cache, Layout(tokens=(20, 1, 2)), 3)
    assert cached(cache, 10, 1, 2, 3, 4) == 4
    run(cache, Layout(tokens=(30, 1, 2)), 3)
    assert [cached(cache, first, 1, 2, 3, 4) for first in (10, 20)] == [4, 0]


def test_without_a_budget_nothing_is_stored_and_everything_else_works(new_cache, run):
    cache = new_cache("full", "recurrent", checkpoints=0)
    lease = open_(cache, *range(9))
    assert lease.stores(0, 9) == []
    lease.close()
    run(cache, Layout(tokens=(1, 2, 3)), 4)
    assert cache.stats().checkpoints == 0


def test_open_waits_while_every_live_slot_is_held(new_cache):
    cache = new_cache("recurrent", live=1)
    lease = open_(cache, 1, 2)
    assert open_(cache, 3, 4) is None
    lease.close()
    again = open_(cache, 3, 4)
    assert again is not None
    again.close()


def test_a_tree_of_checkpoints_alone_does_not_outgrow_them(new_cache, run):
    cache = new_cache("recurrent", checkpoints=2)
    for first in range(20):
        run(cache, Layout(tokens=(first, *range(15))), 3)
    assert cache.stats().nodes <= 2 * 4, "two ways of four nodes"
