"""Decode by captured programs, with a stand-in that replays on the CPU: the same answers as op by op."""

import pytest

from kestrel.sampling.rows import ROOM
from kestrel.spi.decoding import Decoding, Host, HostMask, Static, TokenSet
from kestrel.testing.bench import Bench
from kestrel.testing.graphs import ReplayGraphs
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import COORD, FakeTokenDriver, ToyHybrid, toy_media
from kestrel.types import Layout, Span


def image(seed, tail):
    item = toy_media("image", seed, 5)
    return Layout(
        tokens=(4, *(0,) * 5, *tail),
        spans=(Span(1, 6, 0),),
        media=(item,),
        bidirectional=((0, 6),),
        marks=(6,),
    )


def captures(driver):
    """``driver`` and the sizes of the batches that it was given without host copies."""
    sizes = []
    forward = driver.forward

    def spy(batch, x_TC):
        if batch.extents is None:
            sizes.append(batch.limits.max_rows)
        return forward(batch, x_TC)

    driver.forward = spy
    return driver, sizes


def decode_alone(bench):
    """``bench`` with first tokens sampled op by op."""
    bench.lane._board.runner._prefiller.first_tokens = None
    return bench


def steps(bench):
    """The sizes of the decode steps that ``bench`` launches from now on."""
    sizes = []
    runner = bench.lane._board.runner
    decode = runner.decode

    def spy(stage):
        assert stage.is_captured, "a step ran op by op"
        sizes.append(stage.size)
        return decode(stage)

    runner.decode = spy
    return sizes


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pages", [14, 64])
def test_programs_give_what_the_oracle_gives(depth, deterministic, pages):
    driver = ToyHybrid(3, cross=True)
    bench = Bench(
        driver,
        depth=depth,
        deterministic=deterministic,
        pages=pages,
        head_start=1,
        graphs=ReplayGraphs(),
        max_rows=5,
    )
    sizes = steps(bench)
    layouts = [image(0, (7, 8)), image(0, (9,)), image(1, (7, 8)), Layout(tokens=tuple(range(4, 20)))]
    layouts.append(Layout(tokens=(4, 9), media=(toy_media("audio", 0, 4, positions=0),)))
    for _ in range(2):
        works = [bench.submit(layout, max_tokens=14) for layout in layouts]
        bench.run()
        for work_id, layout in zip(works, layouts, strict=True):
            assert bench.outcomes[work_id].ids == Expected(driver).ids(layout, 14)
    assert sizes
    assert set(sizes) <= ({5} if deterministic else {1, 2, 4, 5})


def test_programs_are_captured_largest_first_and_a_step_replays_the_smallest_that_fits():
    driver, captured = captures(FakeTokenDriver())
    graphs = ReplayGraphs()
    bench = Bench(driver, graphs=graphs, max_rows=6)
    assert list(dict.fromkeys(captured)) == [6, 4, 2, 1]
    assert bench.lane.captured_sizes == (1, 2, 4, 6)
    sizes = steps(bench)
    before = graphs.num_replays
    for start in (1, 2, 3):
        bench.submit([start], max_tokens=9)
    bench.run()
    assert set(sizes) == {4}
    assert graphs.num_replays - before == 2 * len(sizes), "F and S of each step, no more"
    assert graphs.rehearsals > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_sampling_by_programs_draws_the_same_tokens(depth):
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "top_k": 7},
        {"logit_bias": {5: 3.0}, "frequency_penalty": 0.5, "temperature": 0.7},
        {"logprobs": True, "top_logprobs": 2},
    ]
    results = []
    for graphs in (None, ReplayGraphs()):
        bench = Bench(ToyHybrid(3), depth=depth, graphs=graphs, max_rows=3)
        works = [
            bench.submit([4, 5, 6 + i], max_tokens=12, settings=kind, seed=i) for i, kind in enumerate(kinds)
        ]
        bench.run()
        results.append([bench.outcomes[work_id].tokens for work_id in works])
    native, captured = results
    assert [[t.id for t in tokens] for tokens in native] == [[t.id for t in tokens] for tokens in captured]
    for a, b in zip(native[-1], captured[-1], strict=True):
        assert b.logprobs.logprob == pytest.approx(a.logprobs.logprob, abs=1e-4)
        assert [i for i, _ in b.logprobs.top] == [i for i, _ in a.logprobs.top]


def test_a_rare_kind_of_sampling_runs_op_by_op_once_and_is_a_program_then():
    graphs = ReplayGraphs()
    bench = decode_alone(Bench(FakeTokenDriver(), graphs=graphs))
    at_load = len(graphs.programs)
    for max_tokens, new in ((2, 0), (6, 1), (6, 1)):
        bench.generate([1, 2], max_tokens=max_tokens, settings={"logprobs": True})
        assert len(graphs.programs) == at_load + new


def test_a_capture_that_fails_while_serving_costs_no_request(caplog):
    graphs = ReplayGraphs()
    bench = Bench(ToyHybrid(3), graphs=graphs)

    def fail(run):
        raise RuntimeError("out of memory")

    graphs.capture = fail
    for prompt in ([4, 5, 6], [9, 8]):
        wanted = Expected(bench.driver).ids(Layout(tokens=tuple(prompt)), 8)
        assert bench.generate(prompt, settings={"logprobs": True}).ids == wanted
        assert bench.generate(prompt).ids == wanted
    assert caplog.text.count("rare kinds of sampling run op by op") == 1


def test_common_kinds_of_sampling_are_captured_at_load():
    graphs = ReplayGraphs()
    bench = decode_alone(Bench(FakeTokenDriver(), graphs=graphs))
    at_load = len(graphs.programs)
    mask = Static(allowed=TokenSet.of([7]).but(), first=1)
    for settings in ({}, {"temperature": 0.5}, {"temperature": 0.2, "top_p": 0.9}, {"logit_bias": {3: -1.0}}):
        bench.generate([1, 2], max_tokens=6, settings=settings)
        bench.generate([1, 2], max_tokens=6, settings=settings, decoding=Decoding(rules=(mask,)))
    assert len(graphs.programs) == at_load


def test_programs_are_captured_anew_when_sampling_has_moved_its_tables(monkeypatch):
    monkeypatch.setitem(ROOM, "biases", 2)
    graphs = ReplayGraphs()
    bench = Bench(ToyHybrid(3), graphs=graphs, max_rows=2)
    want = Bench(ToyHybrid(3), max_rows=2)
    many = {"logit_bias": {i: float(i % 5) for i in range(4, 31)}}
    for settings in ({"logit_bias": {4: 1.0}}, {"logit_bias": {4: 1.0}}, many, many, {}):
        got = bench.generate([4, 5, 6], max_tokens=6, settings=settings)
        assert got.ids == want.generate([4, 5, 6], max_tokens=6, settings=settings).ids


@pytest.mark.parametrize("depth", [1, 2])
def test_a_newcomer_that_moves_samplings_tables_harms_no_row_that_decodes(depth):
    bench = Bench(ToyHybrid(3), depth=depth, graphs=ReplayGraphs())
    stays = bench.submit([4, 5, 6], max_tokens=12)
    bench.tick(4)
    comes = bench.submit([9, 8], max_tokens=6, settings={"repetition_penalty": 1.5})
    bench.run()
    assert bench.outcomes[comes].error is None
    assert bench.outcomes[stays].ids == Expected(ToyHybrid(3)).ids(Layout(tokens=(4, 5, 6)), 12)


@pytest.mark.parametrize("depth", [1, 2])
def test_bins_go_from_program_to_program(depth):
    driver = ToyHybrid(7, aux=True, window=None)
    bench = Bench(driver, depth=depth, graphs=ReplayGraphs())
    coords = {"logit_bias": {COORD: 30.0}}
    want = Bench(ToyHybrid(7, aux=True, window=None), depth=depth)
    for one in (bench, want):
        one.submit([4, 5, 6], decoding=Decoding(needs_aux=True), max_tokens=12, settings=coords)
        one.submit([9, 8], max_tokens=12)
        one.run()
    got, wanted = list(bench.outcomes.values()), list(want.outcomes.values())
    assert [o.tokens for o in got] == [o.tokens for o in wanted]
    assert any(token.aux for token in got[0].tokens)


def test_a_request_for_bins_that_the_model_does_not_have_is_like_any_other():
    bench = Bench(ToyHybrid(3), graphs=ReplayGraphs())
    outcome = bench.generate([4, 5, 6], decoding=Decoding(needs_aux=True))
    assert outcome.ids == Expected(bench.driver).ids(Layout(tokens=(4, 5, 6)), 8)


def test_rows_without_bins_never_see_those_of_rows_before_them():
    driver = ToyHybrid(7, aux=True, window=None)
    bench = Bench(driver, max_rows=1, prefix_cache=False, graphs=ReplayGraphs())
    want = Bench(ToyHybrid(7, aux=True, window=None), max_rows=1, prefix_cache=False)
    for one in (bench, want):
        with_bins = one.generate(
            [4, 5, 6],
            decoding=Decoding(needs_aux=True),
            max_tokens=12,
            settings={"logit_bias": {COORD: 100.0}},
        )
        assert with_bins.tokens[-1].aux
        one.plain = one.generate([4, 5, 6], max_tokens=12).ids
    assert bench.plain == want.plain


class Alternating(HostMask):
    """Allows even and odd ids in turn."""

    def __init__(self):
        self.count = 0

    def allowed(self):
        return TokenSet.of(range(4 + self.count % 2, 32, 2))

    def accept(self, token_id):
        self.count += 1


def test_masks_of_the_host_are_written_before_the_program_that_chooses():
    results = []
    for graphs in (None, ReplayGraphs()):
        bench = Bench(ToyHybrid(3), depth=2, graphs=graphs)
        works = [
            bench.submit([4, 5], max_tokens=9, decoding=Decoding(rules=(Host(start=Alternating),)))
            for _ in (1, 2)
        ]
        works.append(bench.submit([7, 5], max_tokens=9))
        bench.run()
        results.append([bench.outcomes[work_id].ids for work_id in works])
    assert results[0] == results[1]
    assert [i % 2 for i in results[1][0]] == [0, 1] * 4 + [0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_row_leaves_its_neighbours_alone(depth):
    driver = ToyHybrid(3)
    bench = Bench(driver, depth=depth, graphs=ReplayGraphs())
    stays = bench.submit([4, 5, 6], max_tokens=20)
    goes = bench.submit([9, 8], max_tokens=20)
    bench.tick(5)
    bench.lane.cancel(goes)
    bench.tick(2)
    comes = bench.submit([9, 9, 9], max_tokens=5)
    bench.run()
    assert bench.outcomes[goes].finished.finish_reason == "cancelled"
    assert bench.outcomes[stays].ids == Expected(driver).ids(Layout(tokens=(4, 5, 6)), 20)
    assert bench.outcomes[comes].ids == Expected(driver).ids(Layout(tokens=(9, 9, 9)), 5)


def test_a_poisoned_row_fails_alone():
    bench = Bench(ToyHybrid(3), depth=2, graphs=ReplayGraphs())
    works = [bench.submit([4, 3, 5], max_tokens=6), bench.submit([4, 5, 6], max_tokens=6)]
    bench.run()
    assert bench.outcomes[works[0]].error is not None
    assert bench.outcomes[works[1]].ids == Expected(bench.driver).ids(Layout(tokens=(4, 5, 6)), 6)


def test_a_lane_that_could_not_capture_goes_on_op_by_op():
    driver = ToyHybrid(3)
    bench = Bench(driver)
    bench.lane.warm_up()
    broken = ReplayGraphs()
    broken.capture = None
    with pytest.raises(TypeError):
        bench.lane.capture(broken)
    assert bench.lane.captured_sizes == ()
    assert bench.generate([4, 5, 6]).ids == Expected(driver).ids(Layout(tokens=(4, 5, 6)), 8)
