"""Step models: batched within their limits, each state closed once, failures kept apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import CapacityError, EngineBusyError, ModelFaultError, RequestTimeoutError
from kestrel.lanes import Failed, Finished, StepLane, StepWork, TokensReady
from kestrel.testing.bench import Clock, Outcome
from kestrel.testing.toys import ToyStep, toy_media


class Bench:
    """A step lane over a toy, and the outcomes of its works."""

    def __init__(self, driver, max_queue=1000):
        self.driver, self.outcomes, self.clock = driver, {}, Clock()
        self.frames = {}
        self.lane = StepLane(driver, sink=self.take, max_queue=max_queue, clock=self.clock)

    def take(self, events):
        for event in events:
            outcome = self.outcomes[event.work_id]
            assert not outcome.ended
            if isinstance(event, TokensReady):
                outcome.tokens += event.tokens
                self.frames.setdefault(event.work_id, []).extend(event.frames)
            elif isinstance(event, Finished):
                outcome.finished = event
            elif isinstance(event, Failed):
                outcome.error = event.error

    def submit(self, rows, seed=0, cost=1, **more):
        work_id = len(self.outcomes) + 1
        prepared = toy_media("audio", seed, rows, cost=cost)
        self.lane.submit(StepWork(id=work_id, prepared=prepared, submitted=self.clock(), **more))
        self.outcomes[work_id] = Outcome()
        return work_id

    def run(self, limit=500):
        for _ in range(limit):
            if not self.lane.tick():
                break
        assert self.lane.is_idle
        assert all(outcome.ended for outcome in self.outcomes.values())

    def check_closed(self, but=()):
        assert all(state.is_closed or state in but for state in self.driver.states)


def expected(rows, seed=0):
    return [abs(int(v * 100)) for v in toy_media("audio", seed, rows).tensors["x"][:, 0]]


def test_items_are_stepped_together_within_rows_and_units():
    bench = Bench(ToyStep(max_rows=4, max_units=6))
    works = {bench.submit(5, seed, cost): seed for seed, cost in enumerate((1, 2, 3, 1, 1, 6, 1))}
    bench.run()
    assert bench.driver.launches[0] == 3
    assert max(bench.driver.launches) <= 4
    for work_id, seed in works.items():
        assert bench.outcomes[work_id].ids == expected(5, seed)
        assert bench.outcomes[work_id].finished.output == 5
        assert bench.frames[work_id] == list(range(5))
    bench.check_closed()


def test_a_single_pass_driver_ends_in_its_first_step():
    bench = Bench(ToyStep(single_pass=True))
    work_id = bench.submit(50)
    bench.lane.tick()
    assert bench.outcomes[work_id].finished.output == 50
    assert bench.driver.launches == [1]


def test_a_carried_state_goes_on_where_the_last_clip_ended():
    bench = Bench(ToyStep())
    first = bench.submit(3, keep_state=True)
    bench.run()
    carried = bench.outcomes[first].finished.carried
    assert not carried.is_closed
    second = bench.submit(4, seed=1, carried=carried)
    bench.run()
    assert bench.frames[second] == [3, 4, 5, 6]
    bench.check_closed()


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_cancelled_item_is_closed_at_once(ticks):
    bench = Bench(ToyStep(max_rows=1))
    works = [bench.submit(20), bench.submit(20)]
    for _ in range(ticks):
        bench.lane.tick()
    for work_id in works:
        bench.lane.cancel(work_id)
    bench.lane.tick()
    assert all(bench.outcomes[i].finished.finish_reason == "cancelled" for i in works)
    assert bench.lane.is_idle
    bench.check_closed()


class Breaking(ToyStep):
    """Raises in a start with a costly item, or in a step with a long one."""

    def start(self, prepared, carried):
        if any(item.cost == 5 for item in prepared):
            raise RuntimeError("start")
        return super().start(prepared, carried)

    def step(self, states):
        if any(len(state.left) > 50 for state in states):
            raise RuntimeError("step")
        return super().step(states)


@pytest.mark.parametrize(("rows", "cost"), [(3, 5), (60, 2)])
def test_a_launch_that_raises_fails_its_items_and_the_lane_goes_on(rows, cost):
    bench = Bench(Breaking(max_rows=1))
    bad, good = bench.submit(rows, cost=cost), bench.submit(3)
    bench.run()
    assert isinstance(bench.outcomes[bad].error, ModelFaultError)
    assert isinstance(bench.outcomes[bad].error.__cause__, RuntimeError)
    assert bench.outcomes[good].ids == expected(3)
    bench.check_closed()


def test_an_item_that_cannot_start_fails_alone_among_those_started_with_it():
    bench = Bench(Breaking(max_rows=4, max_units=8))
    works = [bench.submit(3, seed) for seed in (0, 1)]
    bad = bench.submit(3, cost=5)
    bench.run()
    assert [bench.outcomes[i].ids for i in works] == [expected(3, 0), expected(3, 1)]
    assert isinstance(bench.outcomes[bad].error, ModelFaultError)
    bench.check_closed()


def test_a_carried_state_that_cannot_be_closed_fails_its_own_item():
    class Sticky(ToyStep):
        def close(self, state):
            super().close(state)
            if state is self.states[0]:
                raise RuntimeError("stuck")

    bench = Bench(Sticky())
    first = bench.submit(3, keep_state=True)
    bench.run()
    bad = bench.submit(4, carried=bench.outcomes[first].finished.carried)
    good = bench.submit(4, seed=1)
    bench.run()
    assert "closing the state it carried" in str(bench.outcomes[bad].error)
    assert bench.outcomes[good].ids == expected(4, 1)
    bench.check_closed()


def test_doors_of_the_step_lane():
    bench = Bench(ToyStep(max_rows=1), max_queue=1)
    with pytest.raises(CapacityError, match="7 units"):
        bench.submit(3, cost=7)
    late = bench.submit(30, deadline=bench.clock.now + 1)
    with pytest.raises(EngineBusyError):
        bench.submit(3)
    bench.lane.tick()
    bench.clock.now += 2
    bench.run()
    assert isinstance(bench.outcomes[late].error, RequestTimeoutError)
    bench.check_closed()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 9), st.integers(1, 6), st.integers(0, 6), st.sampled_from([None, None, 0, 2])
        ),
        max_size=8,
    ),
    st.integers(1, 3),
)
def test_whatever_comes_and_goes_every_state_is_closed_once(items, max_rows):
    bench = Bench(ToyStep(max_rows=max_rows))
    asked = {}
    for now in range(16):
        for index, (rows, cost, arrives, _) in enumerate(items):
            if arrives == now:
                asked[index] = bench.submit(rows, index, cost)
        for index, (_, _, arrives, aborted) in enumerate(items):
            if aborted is not None and arrives + aborted == now:
                bench.lane.cancel(asked[index])
        bench.lane.tick()
    bench.run()
    bench.check_closed()
    for index, (rows, _, _, aborted) in enumerate(items):
        outcome = bench.outcomes[asked[index]]
        wanted = expected(rows, index)
        assert outcome.ids == wanted[: len(outcome.ids)]
        assert outcome.ids == wanted or (
            aborted is not None and outcome.finished.finish_reason == "cancelled"
        )
