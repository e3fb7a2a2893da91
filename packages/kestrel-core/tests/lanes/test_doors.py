"""What is refused before it queues, and what time takes away."""

import pytest

from kestrel.errors import (
    CapacityError,
    EngineBusyError,
    EngineStoppedError,
    InvalidRequestError,
    ModelFaultError,
    PluginError,
    RequestTimeoutError,
)
from kestrel.lanes.deadlines import Deadlines
from kestrel.testing.bench import Bench
from kestrel.testing.invariants import check_idle
from kestrel.testing.toys import FakeTokenDriver, ToyHybrid, toy_media
from kestrel.types import Layout, Span


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers():
    bench = Bench(FakeTokenDriver(), max_len=20)
    with pytest.raises(CapacityError, match=r"20 tokens.*at most 19"):
        bench.submit([1] * 20)


def test_a_request_larger_than_the_pool_is_refused_and_harms_nobody():
    bench = Bench(FakeTokenDriver(), pages=4, page_size=4)
    other = bench.submit([1, 2], max_tokens=4)
    with pytest.raises(CapacityError, match="kv_cache_bytes"):
        bench.submit([1] * 10, max_tokens=10)
    bench.run()
    assert len(bench.outcomes[other].ids) == 4


def test_a_range_larger_than_a_step_is_refused():
    layout = Layout(tokens=(1,) * 12, bidirectional=((0, 10),))
    with pytest.raises(CapacityError, match="max_batched_tokens"):
        Bench(ToyHybrid(0), budget=9).submit(layout)


def test_a_media_item_larger_than_the_feature_pool_is_refused():
    item = toy_media("image", 0, 9)
    layout = Layout(tokens=(0,) * 10, spans=(Span(0, 9, 0),), media=(item,))
    with pytest.raises(CapacityError, match="feature pool"):
        Bench(ToyHybrid(0), feature_rows=8).submit(layout)


def test_media_that_the_model_does_not_take_are_refused():
    layout = Layout(tokens=(1, 2), media=(toy_media("audio", 0, 3, positions=0),))
    with pytest.raises(InvalidRequestError, match="audio"):
        Bench(ToyHybrid(0)).submit(layout)


def test_empty_prompts_and_probes_outside_are_refused():
    bench = Bench(FakeTokenDriver())
    with pytest.raises(InvalidRequestError, match="empty"):
        bench.submit([])
    with pytest.raises(InvalidRequestError, match="probe"):
        bench.submit([1, 2], probes=((2, (5,)),))


def test_a_full_queue_refuses_all_but_exempt_works():
    bench = Bench(FakeTokenDriver(), max_queue=2, max_rows=1)
    bench.submit([1], max_tokens=2)
    bench.submit([2], max_tokens=2)
    with pytest.raises(EngineBusyError, match="max_queue") as caught:
        bench.submit([3])
    assert caught.value.retry_after_s > 0
    bench.submit([4], max_tokens=2, exempt_queue=True)
    bench.run()
    bench.submit([5], max_tokens=2)
    bench.run()
    assert len(bench.outcomes) == 4


def test_cancelled_works_make_room_in_the_queue():
    bench = Bench(FakeTokenDriver(), max_queue=1, max_rows=1)
    bench.submit([1], max_tokens=20)
    bench.tick()
    waiting = bench.submit([2])
    bench.lane.cancel(waiting)
    bench.tick()
    bench.submit([3])
    bench.run()
    assert bench.outcomes[waiting].finished.finish_reason == "cancelled"


@pytest.mark.parametrize("ticks", [0, 1, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_deadline_counts_the_queue_and_ends_with_a_timeout(ticks, depth):
    bench = Bench(ToyHybrid(0), depth=depth)
    work_id = bench.submit([4, 5, 6], max_tokens=50, deadline=bench.clock.now + 10)
    other = bench.submit([4, 5, 6], max_tokens=5)
    bench.tick(ticks) if ticks else None
    bench.clock.now += 11
    bench.run()
    assert isinstance(bench.outcomes[work_id].error, RequestTimeoutError)
    assert len(bench.outcomes[other].ids) == 5


def test_a_paused_lane_keeps_state_launches_nothing_and_still_times_out():
    bench = Bench(ToyHybrid(3), depth=2)
    work_id = bench.submit([4, 5, 6], max_tokens=12)
    late = bench.submit([7], max_tokens=12, deadline=bench.clock.now + 10)
    bench.tick(4)
    bench.lane.pause()
    bench.tick()
    before = len(bench.outcomes[work_id].ids)
    assert not bench.tick(5)
    assert len(bench.outcomes[work_id].ids) == before
    bench.clock.now += 20
    bench.tick()
    assert isinstance(bench.outcomes[late].error, RequestTimeoutError)
    bench.lane.resume()
    bench.run()
    assert len(bench.outcomes[work_id].ids) == 12


def test_abort_ends_everything_and_closes_the_door():
    bench = Bench(ToyHybrid(3), max_rows=2, depth=2)
    works = [bench.submit([4, 5, i], max_tokens=30) for i in range(4, 9)]
    bench.tick(3)
    bench.lane.abort(EngineStoppedError("going down"))
    bench.tick(3)
    assert all(isinstance(bench.outcomes[i].error, EngineStoppedError) for i in works)
    check_idle(bench.lane)
    with pytest.raises(EngineStoppedError, match="going down"):
        bench.submit([4])


def test_a_draining_lane_finishes_what_it_has():
    bench = Bench(FakeTokenDriver())
    work_id = bench.submit([4], max_tokens=5)
    bench.lane.drain()
    with pytest.raises(EngineStoppedError):
        bench.submit([5])
    bench.run()
    assert len(bench.outcomes[work_id].ids) == 5
    assert bench.lane.wait_idle(0)


def test_ten_thousand_queued_works_are_taken_without_quadratic_cost():
    bench = Bench(FakeTokenDriver(), max_rows=64, pages=512, page_size=16, budget=2048)
    bench.tick = lambda count=1: bench.lane.tick()  # checks after each tick are for small tests
    works = [bench.submit([i % 250, i // 250], max_tokens=1) for i in range(10_000)]
    for work_id in works[5000:9000]:
        bench.lane.cancel(work_id)
    bench.run()
    assert sum(len(bench.outcomes[i].ids) for i in works) == 6000


class Interrupted:
    """``submitted`` of an intake, with something that another thread does right behind it, once."""

    def __init__(self, lane, then):
        self.real, self.then = lane._intake.submitted, then

    def __call__(self):
        found = self.real()
        then, self.then = self.then, None
        if then is not None:
            then()
        return found


def test_a_work_that_slips_in_before_an_abort_ends_with_it(monkeypatch):
    bench, late = Bench(FakeTokenDriver()), []

    def submit_and_abort():
        late.append(bench.submit([4], max_tokens=50))
        bench.lane.abort(EngineStoppedError("going down"))

    bench.submit([5], max_tokens=5)
    monkeypatch.setattr(bench.lane._intake, "submitted", Interrupted(bench.lane, submit_and_abort))
    bench.run()
    assert isinstance(bench.outcomes[late[0]].error, EngineStoppedError)
    assert bench.outcomes[late[0]].tokens == []


def test_a_work_that_is_cancelled_as_soon_as_it_is_submitted_is_cancelled(monkeypatch):
    bench, late = Bench(FakeTokenDriver()), []

    def submit_and_cancel():
        late.append(bench.submit([4], max_tokens=50))
        bench.lane.cancel(late[0])

    bench.submit([5], max_tokens=5)
    monkeypatch.setattr(bench.lane._intake, "submitted", Interrupted(bench.lane, submit_and_cancel))
    bench.run()
    assert bench.outcomes[late[0]].finished.finish_reason == "cancelled"


def test_deadlines_of_ended_works_do_not_pile_up():
    alive = set()
    deadlines = Deadlines(alive)
    for work_id in range(10_000):
        alive.add(work_id)
        deadlines.add(work_id, 1e6 + work_id)
        alive.discard(work_id - 3)
    assert len(deadlines._heap) < 200
    assert set(deadlines.expired(2e6)) >= alive


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tokens": (1, 999)}, InvalidRequestError, "token 999, outside .* 0 to 31"),
        ({"tokens": (1, -1)}, InvalidRequestError, "token -1, outside"),
        ({"aux": ((0,),)}, PluginError, "aux bins"),
        ({"aux": ((0,), (99,))}, PluginError, "aux bins"),
        ({"positions": ((0,), (0,))}, PluginError, "rows of 2 positions"),
        ({"decode_offset": (0, 0, 0, 0)}, PluginError, "decode offsets"),
        ({"spans": (Span(0, 3, 0),), "media": (toy_media("image", 0, 3),)}, PluginError, "spans in order"),
        ({"spans": (Span(0, 2, 0),), "media": (toy_media("image", 0, 1),)}, PluginError, "spans in order"),
        ({"spans": (Span(0, 1, 1),), "media": (toy_media("image", 0, 1),)}, PluginError, "spans in order"),
        ({"bidirectional": ((1, 3),)}, PluginError, "ranges inside"),
    ],
)
def test_a_prompt_that_would_break_its_launch_is_refused(change, error, words):
    bench = Bench(ToyHybrid(0))
    bench.lane.limits.check_layout(Layout(tokens=(1, 2)))
    with pytest.raises(error, match=words):
        bench.lane.limits.check_layout(Layout(**{"tokens": (1, 2), **change}))


def test_a_work_that_cannot_start_gives_back_its_row_its_pages_and_its_place_in_the_queue():
    bench = Bench(FakeTokenDriver(), max_queue=1)
    for _ in range(3):
        bad = bench.submit(Layout(tokens=(1, 2), positions=((0,), (0, 1))))
        bench.run()
        assert isinstance(bench.outcomes[bad].error, ModelFaultError)
    assert bench.lane.stats()["waiting"] == 0
    assert bench.generate([1, 2], max_tokens=3).ids
