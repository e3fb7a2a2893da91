"""The queue's order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel.plan import WaitQueue


def drain(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_equals_come_out_in_the_order_of_arrival():
    queue = WaitQueue()
    for key in range(5):
        queue.push(key, f"s{key}", priority=0, submitted=1.0, arrival=key)
    assert drain(queue) == ["s0", "s1", "s2", "s3", "s4"]


def test_higher_priority_goes_first():
    queue = WaitQueue()
    queue.push(1, "low", priority=0, submitted=1.0, arrival=1)
    queue.push(2, "high", priority=5, submitted=1.0, arrival=2)
    assert drain(queue) == ["high", "low"]


def test_a_long_wait_makes_up_for_a_lower_priority():
    queue = WaitQueue(ageing_s=10.0)
    queue.push(1, "patient", priority=0, submitted=0.0, arrival=1)
    queue.push(2, "urgent", priority=1, submitted=11.0, arrival=2)
    assert drain(queue) == ["patient", "urgent"]


def test_a_removed_entry_is_skipped():
    queue = WaitQueue()
    for key in range(3):
        queue.push(key, key, priority=0, submitted=0.0, arrival=key)
    assert queue.remove(0) == 0
    assert queue.remove(0) is None
    assert drain(queue) == [1, 2]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_preempted_entry_comes_back_to_its_place():
    queue = WaitQueue()
    for key in range(3):
        queue.push(key, key, priority=0, submitted=float(key), arrival=key)
    first = queue.pop()
    queue.push(first, first, priority=0, submitted=0.0, arrival=0)
    assert drain(queue) == [0, 1, 2]


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 200)), min_size=1, max_size=20),
    st.integers(200, 400),
)
def test_the_order_is_that_of_priority_plus_age_at_any_moment(works, now):
    queue = WaitQueue(ageing_s=10.0)
    for key, (priority, submitted) in enumerate(works):
        queue.push(key, key, priority=priority, submitted=float(submitted), arrival=key)

    def urgency(key):
        priority, submitted = works[key]
        return (-(priority + (now - submitted) / 10.0), key)

    got = drain(queue)
    assert [round(urgency(k)[0], 6) for k in got] == sorted(round(urgency(k)[0], 6) for k in got)


def test_removed_entries_do_not_pile_up_behind_what_comes_first():
    queue = WaitQueue()
    queue.push(0, "first", priority=9, submitted=0.0, arrival=0)
    for key in range(1, 5000):
        queue.push(key, "late", priority=-9, submitted=float(key), arrival=key)
        if key > 3:
            queue.remove(key)
    assert len(queue._heap) < 200
    assert [queue.pop() for _ in range(4)] == ["first", "late", "late", "late"]
    assert not len(queue)
