"""Plain generation: tokens, ends, metrics, sampling, order."""

import pytest

from kestrel.spi.decoding import Decoding
from kestrel.testing.bench import Bench
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import FakeTokenDriver, ToyHybrid
from kestrel.types import Layout

PROMPT = (4, 5, 6, 7, 8, 9, 10)


@pytest.fixture(scope="module")
def toy():
    return ToyHybrid(3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [3, 64])
def test_the_lane_writes_what_the_oracle_writes(toy, depth, budget):
    outcome = Bench(toy, depth=depth, budget=budget).generate(PROMPT, max_tokens=20)
    assert outcome.ids == Expected(toy).ids(Layout(tokens=PROMPT), 20)


def test_position_rows_and_the_decode_offset_reach_the_model(toy):
    driver = ToyHybrid(3, position_rows=2)
    layout = Layout(tokens=PROMPT, positions=((0, 1, 2, 2, 2, 3, 4), (0,) * 7), decode_offset=(-3, -100))
    single = Layout(tokens=PROMPT, positions=((0, 1, 2, 2, 2, 3, 4),), decode_offset=(-3,))
    outcome = Bench(driver).generate(layout, max_tokens=1)
    assert outcome.ids == Expected(driver).ids(single, 1)
    offset = Layout(tokens=PROMPT, decode_offset=(5,))
    assert Bench(toy).generate(offset, max_tokens=9).ids == Expected(toy).ids(offset, 9)


def test_a_stop_id_is_the_last_token_and_ends_with_stop():
    bench = Bench(FakeTokenDriver(follows=lambda i: i + 1 if i < 255 else 0))
    outcome = bench.generate([10], max_tokens=50, stop=(14,))
    assert outcome.ids == [11, 12, 13, 14]
    assert outcome.finished.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_ends_with_length(max_tokens):
    outcome = Bench(FakeTokenDriver()).generate([10], max_tokens=max_tokens)
    assert len(outcome.ids) == max_tokens
    assert outcome.finished.finish_reason == "length"


def test_without_max_tokens_the_context_is_filled():
    outcome = Bench(FakeTokenDriver(), max_len=30).generate([10] * 12, max_tokens=None)
    assert len(outcome.ids) == 18
    assert outcome.finished.finish_reason == "length"


def test_without_max_tokens_a_pool_smaller_than_the_context_ends_with_length():
    outcome = Bench(FakeTokenDriver(), pages=5, page_size=4).generate([10] * 12, max_tokens=None)
    assert len(outcome.ids) == 8
    assert outcome.finished.finish_reason == "length"


def test_metrics_count_tokens_and_times():
    bench = Bench(ToyHybrid(3))
    bench.generate(PROMPT, max_tokens=3)
    work = bench.work([*PROMPT, 9], max_tokens=3)
    bench.submit(work)
    bench.clock.now += 1.0
    bench.tick()
    bench.clock.now += 0.5
    bench.run()
    metrics = bench.outcomes[work.id].finished.metrics
    assert (metrics.input_tokens, metrics.output_tokens) == (8, 3)
    assert 0 < metrics.cached_tokens < 8
    assert metrics.queue_time_ms == pytest.approx(1000, abs=1)
    assert metrics.ttft_ms == pytest.approx(1000, abs=1)
    assert metrics.decode_time_ms == pytest.approx(500, abs=1)


@pytest.mark.parametrize("depth", [1, 2])
def test_seeded_samples_do_not_depend_on_neighbours_or_preemption(depth):
    settings = {"temperature": 1.0, "seed": 7}
    driver = ToyHybrid(3, window=None)
    alone = Bench(driver, depth=depth).generate(PROMPT, max_tokens=24, settings=settings, seed=7)
    bench = Bench(driver, depth=depth, pages=14, page_size=4, prefix_cache=False)
    asked = [bench.submit(PROMPT, max_tokens=24, settings=settings, seed=7) for _ in range(3)]
    other = bench.submit([9, 9, 8], max_tokens=20, settings=settings, seed=8)
    bench.run()
    assert bench.lane.stats()["preemptions"] > 0
    for work_id in asked:
        assert bench.outcomes[work_id].ids == alone.ids
    assert bench.outcomes[other].ids != alone.ids[:20]


def test_choices_of_one_request_differ():
    settings = {"temperature": 9.0}
    bench = Bench(ToyHybrid(3))
    outputs = [
        bench.generate(PROMPT, max_tokens=10, settings=settings, seed=5, choice=choice).ids
        for choice in range(3)
    ]
    assert len({tuple(ids) for ids in outputs}) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_logprobs_come_with_every_token(toy, depth):
    settings = {"logprobs": True, "top_logprobs": 3}
    outcome = Bench(toy, depth=depth).generate(PROMPT, max_tokens=6, settings=settings)
    expected = Expected(toy).logits(Layout(tokens=PROMPT), outcome.ids[:-1]).log_softmax(-1)
    for index, token in enumerate(outcome.tokens):
        row = expected[len(PROMPT) - 1 + index]
        assert token.logprobs.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert [i for i, _ in token.logprobs.top] == row.topk(3).indices.tolist()


def test_works_of_equal_priority_start_in_the_order_of_their_arrival():
    bench = Bench(FakeTokenDriver(), max_rows=1)
    first = [bench.submit([10 + i], max_tokens=2) for i in range(5)]
    urgent = bench.submit([99], max_tokens=2, priority=1)
    ended = []
    while bench.tick():
        ended += [i for i, o in bench.outcomes.items() if o.ended and i not in ended]
    ended += [i for i, o in bench.outcomes.items() if o.ended and i not in ended]
    assert ended == [urgent, *first]


def test_a_second_turn_hits_what_the_first_one_generated():
    driver = ToyHybrid(3)
    bench = Bench(driver)
    first = bench.generate(PROMPT, max_tokens=9)
    again = [*PROMPT, *first.ids, 6]
    second = bench.generate(again, max_tokens=9)
    assert second.finished.metrics.cached_tokens == len(PROMPT) + 8
    assert second.ids == Expected(driver).ids(Layout(tokens=tuple(again)), 9)


@pytest.mark.parametrize("depth", [1, 2])
def test_deterministic_lanes_pad_and_still_agree(toy, depth):
    bench = Bench(toy, depth=depth, deterministic=True)
    asked = {bench.submit([*PROMPT, i], max_tokens=8): i for i in range(4, 7)}
    bench.run()
    for work_id, i in asked.items():
        assert bench.outcomes[work_id].ids == Expected(toy).ids(Layout(tokens=(*PROMPT, i)), 8)


def test_two_steps_are_in_flight_where_asked_for():
    bench = Bench(FakeTokenDriver(), depth=2)
    bench.submit([1, 2, 3], max_tokens=30)
    bench.tick(4)
    assert len(bench.lane.in_flight) == 1
    assert len(bench.outcomes[1].ids) == 3
    bench.run()


def test_an_unchanged_cohort_keeps_its_buffers():
    bench = Bench(FakeTokenDriver())
    bench.submit([1, 2, 3], max_tokens=30)
    bench.tick(2)
    before = bench.lane.cohort
    bench.tick(10)
    assert bench.lane.cohort is before
    assert before is not None
    bench.run()


def test_decoding_max_tokens_caps_the_settings():
    outcome = Bench(FakeTokenDriver()).generate([1], max_tokens=9, decoding=Decoding(max_tokens=4))
    assert len(outcome.ids) == 4


def test_a_launch_does_not_wait_for_those_who_come_after_it(toy):
    bench = Bench(toy, budget=16, depth=2)
    for i in range(4):
        bench.submit([4 + i] * 8, max_tokens=4)
    seen = []
    for _ in range(2):
        bench.tick()
        seen.append((bench.lane.stats()["running"], bench.lane.stats()["prefill_tokens"]))
    assert seen == [(2, 16), (4, 28)]  # two decode in the second, and chunks end where pages do
    bench.run()
