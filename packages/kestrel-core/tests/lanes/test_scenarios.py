"""Whatever arrives, whatever is aborted and however small the pools: every work gets what it would get alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.errors import CapacityError
from kestrel.testing.bench import Bench
from kestrel.testing.graphs import ReplayGraphs
from kestrel.testing.toy_expected import Expected, TooCloseError
from kestrel.testing.toys import EOS, ToyHybrid, toy_media
from kestrel.types import Layout, Span


@dataclass(frozen=True)
class Ask:
    """One work of a scenario. ``arrives`` and ``aborted`` count ticks."""

    layout: Layout
    max_tokens: int
    priority: int
    arrives: int
    aborted: int | None
    stops: bool


@cache
def toy(kind: str) -> tuple[ToyHybrid, Expected]:
    """Toys are stateless, so scenarios share them and what the oracle said."""
    driver = _driver(kind)
    return driver, Expected(driver)


def _driver(kind: str) -> ToyHybrid:
    match kind:
        case "hybrid":
            return ToyHybrid(3)
        case "paged":
            return ToyHybrid(4, window=None, recurrent=False)
        case "window":
            return ToyHybrid(5, recurrent=False)
        case _:
            return ToyHybrid(6, cross=True)


HEADS = ((4, 5, 6, 7, 8, 9, 10, 11), (4, 5, 6, 7, 20, 21), (30,))


@st.composite
def layouts(draw, kind):
    tokens = list(draw(st.sampled_from(HEADS)))
    spans, media, ranges = [], [], []
    if draw(st.integers(0, 2)) == 0:
        size = draw(st.integers(2, 6))
        media.append(toy_media("image", draw(st.integers(0, 1)), size))
        spans.append(Span(len(tokens), len(tokens) + size, 0))
        if draw(st.booleans()):
            ranges.append((len(tokens), len(tokens) + size))
        tokens += [0] * size
    tokens += draw(st.lists(st.integers(4, 12), max_size=10))
    if kind == "cross" and draw(st.booleans()):
        media.append(toy_media("audio", draw(st.integers(0, 2)), draw(st.integers(3, 6)), positions=0))
    return Layout(
        tokens=tuple(tokens),
        spans=tuple(spans),
        media=tuple(media),
        bidirectional=tuple(ranges),
        marks=tuple(span.end for span in spans),
        stable=draw(st.sampled_from([None, len(tokens) - 1])) or None,
    )


@st.composite
def asks(draw, kind):
    return Ask(
        layout=draw(layouts(kind)),
        max_tokens=draw(st.integers(1, 14)),
        priority=draw(st.integers(0, 1)),
        arrives=draw(st.integers(0, 12)),
        aborted=draw(st.sampled_from([None, None, None, 2, 7])),
        stops=draw(st.booleans()),
    )


@st.composite
def scenarios(draw):
    kind = draw(st.sampled_from(["hybrid", "paged", "window", "cross"]))
    sizes = {
        "pages": draw(st.sampled_from([8, 12, 16, 40])),
        "page_size": draw(st.sampled_from([2, 4])),
        "max_rows": draw(st.integers(1, 4)),
        "budget": draw(st.sampled_from([6, 9, 32])),
        "depth": draw(st.sampled_from([1, 2])),
        "prefix_cache": draw(st.booleans()),
        "feature_rows": draw(st.sampled_from([6, 14])),
        "entries": draw(st.integers(1, 3)),
        "head_start": draw(st.sampled_from([1, 4])),
        "window_pages": draw(st.sampled_from([16, 40])),
    }
    return kind, sizes, draw(st.lists(asks(kind), min_size=1, max_size=6))


@settings(max_examples=120, deadline=None)
@given(scenarios())
def test_every_work_gets_what_it_would_get_alone(scenario):
    assert_each_as_alone(*scenario)


@settings(max_examples=12, deadline=None)
@given(scenarios())
def test_every_work_gets_the_same_from_captured_programs(scenario):
    assert_each_as_alone(*scenario, graphs=ReplayGraphs())


def assert_each_as_alone(kind, sizes, works, graphs=None):
    """One scenario from its first arrival to rest, each work held against the oracle."""
    driver, expected = toy(kind)
    bench = Bench(driver, **sizes, graphs=graphs)
    running: dict[int, Ask] = {}
    refused = 0
    for now in range(14 + 8):
        for ask in works:
            if ask.arrives == now:
                try:
                    work_id = bench.submit(
                        ask.layout,
                        max_tokens=ask.max_tokens,
                        priority=ask.priority,
                        stop=(EOS, 13, 14) if ask.stops else (),
                    )
                    running[work_id] = ask
                except CapacityError:
                    refused += 1
        for work_id, ask in running.items():
            if ask.aborted is not None and ask.arrives + ask.aborted == now:
                bench.lane.cancel(work_id)
        bench.tick()
    bench.run()
    assert len(running) + refused == len(works)
    for work_id, ask in running.items():
        outcome = bench.outcomes[work_id]
        assert outcome.error is None
        stop = (EOS, 13, 14) if ask.stops else ()
        try:
            wanted = expected.ids(ask.layout, ask.max_tokens, stop)
        except TooCloseError:
            continue
        assert outcome.finished is not None
        if outcome.finished.finish_reason == "cancelled":
            assert ask.aborted is not None
            assert outcome.ids == wanted[: len(outcome.ids)]
        else:
            assert outcome.ids == wanted
            assert outcome.finished.finish_reason == ("stop" if wanted[-1] in stop else "length")
