"""Pools from a budget, and the errors that say what to change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kestrel.errors import CapacityError
from kestrel.spi.driver import TokenSpec
from kestrel.spi.states import CrossKV, PagedKV, Recurrent, StatePart, WindowKV
from kestrel.state import PoolSizes, StateCache, fixed_pages, plan_sizes

STATES = (
    PagedKV(name="global", layers=2, kv_heads=2, head_dim=8),
    WindowKV(name="local", layers=3, kv_heads=1, head_dim=8, window=32),
    Recurrent(name="delta", layers=2, parts=(StatePart(name="s", shape=(2, 4, 4), dtype="float32"),)),
    CrossKV(name="heard", layers=1, kv_heads=1, head_dim=8, max_len=20),
)


def spec(*states) -> TokenSpec:
    return TokenSpec(vocab_size=8, hidden_size=8, max_positions=4096, states=states)


def plan(states, budget: int, **options) -> PoolSizes:
    given = {"dtype": torch.float16, "page_size": 16, "max_rows": 4, "max_len": 256, "max_ahead": 64}
    return plan_sizes(spec(*states), budget, **(given | options))


def bytes_of(states, sizes: PoolSizes) -> int:
    cache = StateCache(
        spec(*states), device=torch.device("meta"), dtype=torch.float16, page_size=16, sizes=sizes
    )
    tensors = []
    for state in states:
        pool = cache.pool(state.name)
        tensors += (
            list(pool.parts.values())
            if isinstance(state, Recurrent)
            else [pool.k_LEKSD, pool.v_LEKSD]
            if isinstance(state, CrossKV)
            else [pool.k_LPKSD, pool.v_LPKSD]
        )
    return sum(x.numel() * x.element_size() for x in tensors)


@given(
    budget=st.integers(100_000, 3_000_000),
    chosen=st.sets(st.sampled_from(range(4)), min_size=1),
    ahead=st.sampled_from([None, 64]),
)
def test_pools_fit_their_budget_and_hold_a_whole_sequence(budget, chosen, ahead):
    states = tuple(STATES[i] for i in sorted(chosen))
    sizes = plan(states, budget, max_ahead=ahead)
    assert bytes_of(states, sizes) <= budget
    cache = StateCache(
        spec(*states),
        device=torch.device("meta"),
        dtype=torch.float16,
        page_size=16,
        sizes=sizes,
        max_ahead=ahead,
    )
    assert cache.fits(256) is None


def test_too_small_a_budget_says_what_is_needed_given_and_to_be_changed():
    with pytest.raises(CapacityError) as caught:
        plan(STATES, 10_000, setting="memory_utilization")
    message = str(caught.value)
    for part in (
        "256 positions",
        "4 rows",
        "52,736 bytes",
        "memory_utilization",
        "kv_cache_bytes",
        "max_model_len",
    ):
        assert part in message
    assert "max_batch_size" in message


def test_a_huge_budget_is_not_spent_on_places_without_use():
    sizes = plan(STATES, 10**12)
    assert sizes == PoolSizes(
        pages=2 * 4 * 16,
        window_pages={32: 2 * 4 * 9},
        live_slots=4,
        checkpoint_slots=16,
        cross_entries=8,
    )


def test_more_budget_never_gives_fewer_pages():
    pages = [plan(STATES, budget).pages for budget in range(200_000, 2_000_000, 100_000)]
    assert pages == sorted(pages)


def test_a_fixed_number_of_pages_is_taken_as_it_is():
    sizes = fixed_pages(spec(*STATES), 7, max_rows=4)
    assert (sizes.pages, dict(sizes.window_pages), sizes.live_slots) == (7, {32: 7}, 4)
    assert fixed_pages(spec(STATES[0]), 7, max_rows=4) == PoolSizes(pages=7)


def test_what_can_never_fit_says_so_with_numbers(new_cache):
    cache = new_cache("full", "window", pages=10, window_pages=4)
    assert cache.fits(16) is None
    assert cache.fits(41) == "it needs 41 positions, the KV pool holds 40"
    assert "window of 6 needs 20 positions" in cache.fits(17)


def test_an_unknown_dtype_lists_the_choices():
    with pytest.raises(ValueError, match=r"float31.*choices: auto, float32"):
        plan((PagedKV(name="kv", layers=1, kv_heads=1, head_dim=1, dtype="float31"),), 10**6)
