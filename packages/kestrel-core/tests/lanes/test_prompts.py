"""What prompts bring besides tokens: probes, siblings, bins."""

import pytest

from kestrel.spi.decoding import Decoding
from kestrel.testing.bench import Bench
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import COORD, ToyHybrid
from kestrel.types import Layout

PROMPT = tuple(range(4, 17))
BIAS = 30.0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [3, 64])
def test_probes_give_unmasked_log_probabilities_also_after_a_prefix_hit(depth, budget):
    driver = ToyHybrid(3)
    bench = Bench(driver, depth=depth, budget=budget)
    probes = ((8, (5, 6, 7)), (12, (9,)), (3, (30, 4)))
    expected = Expected(driver).logits(Layout(tokens=PROMPT)).log_softmax(-1)
    for _ in range(2):
        outcome = bench.generate(PROMPT, probes=probes)
        assert outcome.finished.metrics.cached_tokens <= 3
        for (at, ids), values in zip(probes, outcome.finished.probes, strict=True):
            assert values == pytest.approx([float(expected[at, i]) for i in ids], abs=1e-4)


def test_a_hit_may_reach_up_to_the_first_probe():
    bench = Bench(ToyHybrid(3, recurrent=False))
    bench.generate(PROMPT)
    assert bench.generate(PROMPT, probes=((10, (4,)),)).finished.metrics.cached_tokens == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_wait_for_the_prompt_and_then_hit_it(depth):
    driver = ToyHybrid(3)
    bench = Bench(driver, depth=depth, max_rows=4)
    settings = {"temperature": 1.0}
    works = [
        bench.submit(PROMPT, group="g", n_siblings=3, choice=choice, settings=settings) for choice in range(3)
    ]
    bench.tick()
    assert bench.lane.stats()["running"] == 1
    bench.run()
    cached = [bench.outcomes[i].finished.metrics.cached_tokens for i in works]
    assert cached == [0, 12, 12]


@pytest.mark.parametrize("ticks", [0, 1])
def test_when_the_first_sibling_is_cancelled_the_next_one_leads(ticks):
    bench = Bench(ToyHybrid(3), budget=4)
    works = [bench.submit(PROMPT, group="g", n_siblings=3, choice=choice) for choice in range(3)]
    bench.tick(ticks) if ticks else None
    bench.lane.cancel(works[0])
    bench.run()
    assert [len(bench.outcomes[i].ids) for i in works[1:]] == [8, 8]


def test_siblings_do_not_wait_without_a_prefix_cache():
    bench = Bench(ToyHybrid(3), prefix_cache=False, budget=64)
    for choice in range(3):
        bench.submit(PROMPT, group="g", n_siblings=3, choice=choice)
    bench.tick()
    assert bench.lane.stats()["running"] == 3
    bench.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pages", [64, 12])
def test_bins_come_with_their_token_and_are_fed_back(depth, pages):
    driver = ToyHybrid(7, aux=True, window=None)
    layout = Layout(tokens=(4, 5, 6))
    decoding = Decoding(needs_aux=True)
    settings = {"logit_bias": {COORD: BIAS}}
    bench = Bench(driver, depth=depth, pages=pages, head_start=1)
    works = [bench.submit(layout, max_tokens=20, decoding=decoding, settings=settings) for _ in range(3)]
    plain = bench.submit([9, 8], max_tokens=20)
    bench.run()
    assert (bench.lane.stats()["preemptions"] > 0) == (pages == 12)
    first = bench.outcomes[works[0]].tokens
    assert any(token.id == COORD and any(token.aux) for token in first)
    fed = [token.aux for token in first]
    whole = [*layout.tokens, *(token.id for token in first)]
    logits = driver.oracle(whole, bins=[(0, 0)] * 3 + fed)
    bins = driver.oracle_bins(whole, [(0, 0)] * 3 + fed)
    for index, token in enumerate(first):
        row = logits[2 + index].clone()
        row[COORD] += BIAS
        assert int(row.argmax()) == token.id
        assert token.aux == (bins[2 + index] if token.id == COORD else (0, 0))
    for work_id in works[1:]:
        assert bench.outcomes[work_id].tokens == first
    assert all(token.aux == () for token in bench.outcomes[plain].tokens)
