"""One request never harms its neighbours: numbers that are not finite, and launches that raise."""

import pytest

from kestrel.errors import ModelFaultError
from kestrel.testing.bench import Bench
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import NAN, FakeTokenDriver, ToyHybrid
from kestrel.types import Layout


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_that_are_not_finite_fail_that_request_only(depth):
    driver = ToyHybrid(3)
    bench = Bench(driver, depth=depth, pages=24)
    bad = [bench.submit([4, 5, NAN, 6]) for _ in range(3)]
    good = [bench.submit([4, 5, i], max_tokens=12) for i in (6, 7, 8)]
    bench.run()
    for work_id in bad:
        assert isinstance(bench.outcomes[work_id].error, ModelFaultError)
        assert "not finite" in str(bench.outcomes[work_id].error)
    for work_id, i in zip(good, (6, 7, 8), strict=True):
        assert bench.outcomes[work_id].ids == Expected(driver).ids(Layout(tokens=(4, 5, i)), 12)
    assert bench.lane.stats()["faults"] == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_of_a_poisoned_request_do_not_poison_the_next(depth):
    driver = ToyHybrid(3)
    bench = Bench(driver, depth=depth, pages=6, prefix_cache=False)
    bench.generate([NAN] * 12)
    outcome = bench.generate([4, 5, 6], max_tokens=12)
    assert outcome.ids == Expected(driver).ids(Layout(tokens=(4, 5, 6)), 12)


class Breaking(FakeTokenDriver):
    """Raises in the launch that ``when`` picks."""

    def __init__(self, when):
        super().__init__(follows=lambda i: (i + 1) % 256)
        self.when, self.is_broken = when, True

    def forward(self, batch, x_TC):
        if self.is_broken and self.when(batch):
            raise RuntimeError("CUDA error: an illegal memory access")
        return super().forward(batch, x_TC)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_decode", [True, False])
def test_a_launch_that_raises_fails_its_works_and_the_lane_goes_on(depth, is_decode):
    driver = Breaking(lambda batch: batch.limits.is_decode == is_decode)
    bench = Bench(driver, depth=depth)
    bad = [bench.submit([10, 11]), bench.submit([20, 21])]
    bench.run()
    for work_id in bad:
        error = bench.outcomes[work_id].error
        assert isinstance(error, ModelFaultError)
        assert isinstance(error.__cause__, RuntimeError)
        assert f"RuntimeError in {__name__}.forward: CUDA error" in str(error)
        assert "ops={'add_norm': 'reference'}" in str(error)
    driver.is_broken = False
    assert bench.generate([10], max_tokens=3).ids == [11, 12, 13]


def test_a_prefill_that_raises_leaves_decoding_rows_alone():
    driver = Breaking(lambda batch: batch.limits.max_query_len == 5)
    bench = Bench(driver)
    good = bench.submit([10, 11], max_tokens=9)
    bench.tick(2)
    bad = bench.submit([1, 2, 3, 4, 5])
    bench.run()
    assert isinstance(bench.outcomes[bad].error, ModelFaultError)
    assert bench.outcomes[good].ids == list(range(12, 21))


def test_a_tick_that_raises_costs_what_runs_and_not_what_waits():
    bench = Bench(FakeTokenDriver(), max_rows=1)
    running, waiting = bench.submit([10], max_tokens=20), bench.submit([11], max_tokens=3)
    bench.tick(3)
    bench.lane.recover(RuntimeError("a bug"))
    bench.run()
    assert isinstance(bench.outcomes[running].error, ModelFaultError)
    assert len(bench.outcomes[waiting].ids) == 3
