"""Chunks end where the rules allow, lose nothing and never starve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel.plan import Chunk, Prefill, chunk_end, plan_chunks


def prefill(start=0, target=40, barrier=10**6, marks=(), ranges=(), key=1):
    return Prefill(key=key, start=start, target=target, barrier=barrier, marks=marks, ranges=ranges)


def test_a_chunk_that_takes_the_rest_ends_at_the_target_wherever_that_is():
    assert chunk_end(prefill(start=3, target=13), 10, 4) == 13


def test_a_chunk_that_cannot_take_the_rest_ends_at_a_page_boundary():
    assert chunk_end(prefill(start=3, target=40), 10, 4) == 12


def test_a_mark_after_the_last_page_boundary_wins():
    assert chunk_end(prefill(start=3, target=40, marks=(5, 13)), 10, 4) == 13


def test_a_chunk_without_boundary_in_reach_ends_where_the_allowance_does():
    assert chunk_end(prefill(start=1, target=40), 2, 16) == 3


def test_a_bidirectional_range_is_never_split():
    assert chunk_end(prefill(target=40, ranges=((5, 30),)), 10, 16) == 5
    assert chunk_end(prefill(start=5, target=40, ranges=((5, 30),)), 10, 16) == 5
    assert chunk_end(prefill(start=5, target=40, ranges=((5, 30),)), 25, 16) == 30


def test_a_chunk_stops_before_features_that_are_not_ready():
    assert chunk_end(prefill(target=40, barrier=7), 100, 4) == 7
    assert chunk_end(prefill(target=40, barrier=7, ranges=((4, 20),)), 100, 4) == 4
    assert chunk_end(prefill(start=7, target=40, barrier=7), 100, 4) == 7


def test_one_step_takes_chunks_of_several_sequences_in_order():
    plans = [prefill(target=5, key=7), prefill(target=3, key=2), prefill(target=30, key=9)]
    assert plan_chunks(plans, budget=12, decode_rows=2, page_size=4) == (
        Chunk(7, 0, 5),
        Chunk(2, 0, 3),
        Chunk(9, 0, 2),
    )


def test_a_sequence_that_waits_for_features_lets_the_next_one_run():
    plans = [prefill(target=5, barrier=0, key=1), prefill(target=3, key=2)]
    assert plan_chunks(plans, budget=8, decode_rows=0, page_size=4) == (Chunk(2, 0, 3),)


@pytest.mark.parametrize("decode_rows", [0, 8, 50])
def test_the_first_sequence_advances_however_many_rows_decode(decode_rows):
    (chunk,) = plan_chunks([prefill(target=30)], budget=8, decode_rows=decode_rows, page_size=4)
    assert chunk.end > 0


def test_a_range_as_large_as_the_budget_runs_beside_decoding_rows():
    plans = [prefill(target=30, ranges=((0, 8),))]
    assert plan_chunks(plans, budget=8, decode_rows=5, page_size=4) == (Chunk(1, 0, 8),)


@st.composite
def prompts(draw):
    length = draw(st.integers(1, 60))
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
    ranges = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    marks = tuple(sorted(draw(st.sets(st.integers(1, length), max_size=4))))
    return length, ranges, marks


@given(
    st.lists(prompts(), min_size=1, max_size=5),
    st.integers(1, 20),
    st.integers(0, 30),
    st.sampled_from([1, 4, 16]),
)
def test_every_prompt_is_computed_once_in_order_and_within_budget(items, spare, decode_rows, page_size):
    largest = max((b - a for _, ranges, _ in items for a, b in ranges), default=1)
    budget = max(largest, spare)
    done = [0] * len(items)
    for _ in range(1000):
        plans = [
            prefill(key=key, start=done[key], target=length, marks=marks, ranges=ranges)
            for key, (length, ranges, marks) in enumerate(items)
            if done[key] < length
        ]
        if not plans:
            break
        chunks = plan_chunks(plans, budget=budget, decode_rows=decode_rows, page_size=page_size)
        assert chunks, "somebody must advance"
        assert chunks[0].key == plans[0].key, "the first in line advances"
        assert sum(c.end - c.start for c in chunks) <= max(budget, 1)
        for chunk in chunks:
            assert chunk.start == done[chunk.key]
            assert not any(a < chunk.end < b for a, b in items[chunk.key][1])
            done[chunk.key] = chunk.end
    assert done == [length for length, _, _ in items]
