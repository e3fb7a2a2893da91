"""One thread per device: sleeps when idle, takes turns, survives what its lanes do."""

import threading
import time

import pytest

from kestrel.errors import EngineStoppedError, ModelFaultError, RequestTimeoutError
from kestrel.lanes import DeviceThread
from kestrel.testing.bench import Bench
from kestrel.testing.invariants import check_idle
from kestrel.testing.toys import FakeTokenDriver

WAIT_S = 20
LONG = 5000  # tokens: it cannot end before a test has said what it wants


class Threaded(Bench):
    """A bench whose lane a device thread ticks; its clock is the real one."""

    def __init__(self, **sizes):
        super().__init__(FakeTokenDriver(), **{"max_len": 2 * LONG, "pages": LONG, **sizes})
        self.clock = time.monotonic
        self.lane._clock = time.monotonic
        self.news = threading.Condition()
        self.lane.sink = self.hear

    def hear(self, events):
        with self.news:
            self.take(events)
            self.news.notify_all()

    def submit(self, layout, **more):
        with self.news:  # so that no event comes before the outcome is there
            return super().submit(layout, **more)

    def wait(self, condition):
        with self.news:
            assert self.news.wait_for(condition, WAIT_S), "nothing came"


@pytest.fixture
def thread():
    thread = DeviceThread("test")
    thread.start()
    yield thread
    thread.stop()
    assert not thread.is_alive


def test_works_are_run_and_then_the_thread_sleeps(thread):
    bench = Threaded()
    thread.add(bench.lane)
    for _ in range(2):
        work_id = bench.submit([1, 2], max_tokens=5)
        bench.wait(lambda work_id=work_id: bench.outcomes[work_id].ended)
        assert bench.lane.wait_idle(WAIT_S)
    steps = bench.lane.stats()["steps"]
    time.sleep(0.05)
    assert bench.lane.stats()["steps"] == steps


def test_lanes_take_turns(thread):
    benches = [Threaded(), Threaded()]
    for bench in benches:
        thread.add(bench.lane)
    works = [bench.submit([1], max_tokens=60) for bench in benches]
    for bench, work_id in zip(benches, works, strict=True):
        bench.wait(lambda bench=bench, work_id=work_id: bench.outcomes[work_id].ended)
    assert [bench.lane.stats()["finished"] for bench in benches] == [1, 1]


def test_calls_run_on_the_device_thread_and_hand_back_what_they_raise(thread):
    name = thread.call(lambda: threading.current_thread().name).result(WAIT_S)
    assert "test" in name
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(WAIT_S)


def test_pause_stops_launches_and_keeps_state(thread):
    bench = Threaded(depth=2)
    thread.add(bench.lane)
    work_id = bench.submit([1], max_tokens=LONG)
    bench.wait(lambda: len(bench.outcomes[work_id].ids) > 3)
    thread.pause()
    seen = len(bench.outcomes[work_id].ids)
    assert not bench.lane.in_flight
    assert thread.call(lambda: 7).result(WAIT_S) == 7
    time.sleep(0.05)
    assert len(bench.outcomes[work_id].ids) == seen < LONG
    thread.resume()
    bench.wait(lambda: bench.outcomes[work_id].ended)
    assert len(bench.outcomes[work_id].ids) == LONG


def test_a_deadline_passes_while_everything_sleeps(thread):
    bench = Threaded()
    thread.add(bench.lane)
    thread.pause()
    work_id = bench.submit([1], deadline=time.monotonic() + 0.05)
    bench.wait(lambda: bench.outcomes[work_id].ended)
    assert isinstance(bench.outcomes[work_id].error, RequestTimeoutError)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tick_that_raises_fails_its_works_and_the_thread_goes_on(thread, depth, caplog):
    bench = Threaded(depth=depth)
    launch, ticks = bench.lane._launch, []

    def failing():
        ticks.append(1)
        if len(ticks) == 4:
            raise RuntimeError("a bug")
        return launch()

    bench.lane._launch = failing
    thread.add(bench.lane)
    work_id = bench.submit([1], max_tokens=100)
    bench.wait(lambda: bench.outcomes[work_id].ended)
    assert isinstance(bench.outcomes[work_id].error, ModelFaultError)
    assert "tick failed" in caplog.text
    again = bench.submit([1], max_tokens=3)
    bench.wait(lambda: bench.outcomes[again].ended)
    assert len(bench.outcomes[again].ids) == 3
    assert bench.lane.wait_idle(WAIT_S)
    thread.call(lambda: check_idle(bench.lane)).result(WAIT_S)


def test_a_removed_lane_has_ended_its_works(thread):
    bench = Threaded()
    thread.add(bench.lane)
    work_id = bench.submit([1], max_tokens=LONG)
    bench.wait(lambda: len(bench.outcomes[work_id].ids) > 3)
    bench.lane.abort(EngineStoppedError("unloaded"))
    thread.remove(bench.lane)
    assert isinstance(bench.outcomes[work_id].error, EngineStoppedError)
    check_idle(bench.lane)


def test_stop_delivers_an_end_to_everybody():
    thread = DeviceThread("test")
    thread.start()
    bench = Threaded(max_rows=1)
    thread.add(bench.lane)
    works = [bench.submit([1], max_tokens=LONG) for _ in range(3)]
    bench.wait(lambda: len(bench.outcomes[works[0]].ids) > 3)
    thread.stop()
    assert all(isinstance(bench.outcomes[i].error, EngineStoppedError) for i in works)
    check_idle(bench.lane)
    with pytest.raises(EngineStoppedError):
        thread.call(lambda: 1).result(WAIT_S)
    thread.stop()
