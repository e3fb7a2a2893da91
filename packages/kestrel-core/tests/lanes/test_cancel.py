"""Whoever gives up frees the row and its pages within two ticks, at every stage."""

import pytest

from kestrel.testing.bench import Bench
from kestrel.testing.invariants import check_idle
from kestrel.testing.toys import ToyHybrid, toy_media
from kestrel.types import Layout, Span

IMAGE = Layout(
    tokens=(4, 5) + (0,) * 6 + (7, 8, 9),
    spans=(Span(2, 8, 0),),
    media=(toy_media("image", 0, 6),),
    bidirectional=((2, 8),),
    marks=(8,),
)


@pytest.mark.parametrize("ticks", range(9))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_work_holds_nothing_after_two_ticks(ticks, depth):
    bench = Bench(ToyHybrid(3), depth=depth, budget=6)
    work_id = bench.submit(IMAGE, max_tokens=40)
    for _ in range(ticks):
        bench.tick()
    bench.lane.cancel(work_id)
    bench.tick(2)
    check_idle(bench.lane)
    outcome = bench.outcomes[work_id]
    assert outcome.finished is not None
    assert outcome.finished.finish_reason == "cancelled"
    seen = len(outcome.ids)
    bench.tick(3)
    assert len(outcome.ids) == seen


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_in_flight_of_a_cancelled_work_are_not_cached(depth):
    driver = ToyHybrid(3, window=None, recurrent=False)
    bench = Bench(driver, depth=depth)
    work_id = bench.submit([4, 5, 6], max_tokens=40)
    bench.tick(12)
    bench.lane.cancel(work_id)
    bench.tick(2)
    ids = bench.outcomes[work_id].ids
    follow = bench.generate([4, 5, 6, *ids, 7], max_tokens=2)
    assert follow.finished.metrics.cached_tokens <= 3 + len(ids)


def test_cancelling_a_work_twice_or_unknown_does_nothing():
    bench = Bench(ToyHybrid(3))
    work_id = bench.submit([4, 5], max_tokens=2)
    bench.run()
    bench.lane.cancel(work_id)
    bench.lane.cancel(777)
    bench.run()
    assert bench.outcomes[work_id].finished.finish_reason == "length"


def test_a_storm_of_aborts_leaves_nothing_behind():
    bench = Bench(ToyHybrid(3), depth=2, pages=20, max_rows=3)
    works = [bench.submit([4, 5, 6 + i % 5], max_tokens=20) for i in range(30)]
    for work_id in works:
        bench.tick()
        bench.lane.cancel(work_id)
    bench.run()
    assert bench.lane.stats()["running"] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_for_the_pages_of_a_cancelled_work_gets_them(depth):
    bench = Bench(ToyHybrid(3), depth=depth, pages=12, max_rows=2)
    first = bench.submit([4] * 30, max_tokens=8)
    bench.tick(4)
    second = bench.submit([5] * 30, max_tokens=8)
    bench.lane.cancel(first)
    bench.run()
    assert len(bench.outcomes[second].ids) == 8
