"""A lane on a device with memory of its own, played by the CPU: everything crosses in pinned copies, or is missing."""

import random

import pytest

from kestrel.device import staging
from kestrel.runner import mirror, prefill_programs, results
from kestrel.spi.decoding import Decoding
from kestrel.testing.bench import Bench
from kestrel.testing.graphs import ReplayGraphs
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import COORD, ToyHybrid, toy_media
from kestrel.types import Layout, Span


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """The CPU as a device that does not share the host's memory."""
    for module in (staging, mirror, results):
        monkeypatch.setattr(module, "shares_host", lambda device: False)
    monkeypatch.setattr(prefill_programs, "SIZES", (8, 16))


def layout(rng):
    """A prompt of words, perhaps with a picture, perhaps over a sound."""
    words = tuple(rng.randrange(4, 20) for _ in range(rng.randrange(1, 12)))
    if rng.random() < 0.3:
        return Layout(tokens=words, media=(toy_media("audio", rng.randrange(3), 4, positions=0),))
    if rng.random() < 0.5:
        return Layout(tokens=words)
    item = toy_media("image", rng.randrange(3), 5)
    return Layout(
        tokens=(4, *(0,) * 5, *words),
        spans=(Span(1, 6, 0),),
        media=(item,),
        bidirectional=((0, 6),),
        marks=(6,),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_captured", [False, True])
def test_random_traffic_gives_what_the_oracle_gives(seed, depth, is_captured):
    rng = random.Random(seed)
    driver = ToyHybrid(3, cross=True)
    bench = Bench(
        driver,
        depth=depth,
        pages=rng.choice([14, 64]),
        head_start=1,
        deterministic=seed == 2,
        graphs=ReplayGraphs() if is_captured else None,
    )
    layouts = [layout(rng) for _ in range(9)]
    works = {}
    for one in layouts * 2:
        count = rng.randrange(1, 15)
        works[bench.submit(one, max_tokens=count)] = (one, count)
        bench.tick(rng.randrange(4))
    bench.run()
    for work_id, (one, count) in works.items():
        assert bench.outcomes[work_id].ids == Expected(driver).ids(one, count)


def test_bins_logprobs_and_probes_come_back(monkeypatch):
    def outcome():
        bench = Bench(ToyHybrid(7, aux=True, window=None), depth=2)
        settings = {"logit_bias": {COORD: 30.0}, "logprobs": True, "top_logprobs": 2}
        return bench.generate(
            (4, 5, 6), decoding=Decoding(needs_aux=True), settings=settings, probes=((1, (5, 6)), (2, (7,)))
        )

    there = outcome()
    for module in (staging, mirror, results):
        monkeypatch.setattr(module, "shares_host", lambda device: True)
    here = outcome()
    assert there.tokens == here.tokens
    assert there.finished.probes == here.finished.probes
    assert any(any(token.aux) for token in there.tokens)
    assert [len(probe) for probe in there.finished.probes] == [2, 1]


def test_result_buffers_are_used_again():
    bench = Bench(ToyHybrid(3), depth=2)
    bench.submit((4, 5, 6), max_tokens=60)
    bench.submit((4, 5), max_tokens=50)
    bench.run()
    assert 1 <= len(bench.lane._board.runner._results._free) <= 3
