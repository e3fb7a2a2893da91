"""Prefill and encoders by captured programs, with a stand-in that replays on the CPU: the same answers as op by op."""

import random

import pytest
import torch

from kestrel.ops.cross_attention import write_cross
from kestrel.runner import first_tokens, prefill, prefill_programs
from kestrel.sampling.rows import ROOM
from kestrel.spi.decoding import Decoding
from kestrel.testing.bench import Bench
from kestrel.testing.graphs import ReplayGraphs
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import COORD, ToyHybrid, toy_media
from kestrel.types import Layout, Span


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(prefill_programs, "SIZES", (4, 8, 16, 64))
    monkeypatch.setattr(prefill_programs, "ALWAYS_WORTH", 8)


def layout(rng):
    """A prompt of words, perhaps with a picture, perhaps over a sound."""
    words = tuple(rng.randrange(4, 20) for _ in range(rng.randrange(1, 14)))
    if rng.random() < 0.3:
        return Layout(tokens=words, media=(toy_media("audio", rng.randrange(3), 4, positions=0),))
    if rng.random() < 0.5:
        return Layout(tokens=words, marks=(len(words) // 2,) if len(words) > 3 else ())
    item = toy_media("image", rng.randrange(3), 5)
    return Layout(
        tokens=(4, *(0,) * 5, *words),
        spans=(Span(1, 6, 0),),
        media=(item,),
        bidirectional=((0, 6),),
        marks=(6,),
    )


def launches(bench):
    """Sizes of the captured prefill launches that ``bench`` makes from now on, and how many chunks each has."""
    seen = []
    captured = bench.lane._board.runner._prefiller.captured
    launch = captured.launch

    def spy(arrays):
        h_TC = launch(arrays)
        seen.append((len(h_TC), len(arrays.lengths)))
        return h_TC

    class Spied:
        has = captured.has
        launch = staticmethod(spy)

    bench.lane._board.runner._prefiller.captured = Spied
    return seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 2])
def test_random_traffic_gives_what_the_oracle_gives(seed, depth):
    rng = random.Random(seed)
    driver = ToyHybrid(3, cross=True, window=None if seed == 3 else 6)
    bench = Bench(driver, depth=depth, pages=rng.choice([14, 64]), head_start=1, graphs=ReplayGraphs())
    seen = launches(bench)
    works = {}
    for one in [layout(rng) for _ in range(8)] * 2:
        count = rng.randrange(1, 12)
        works[bench.submit(one, max_tokens=count)] = (one, count)
        bench.tick(rng.randrange(4))
    bench.run()
    for work_id, (one, count) in works.items():
        assert bench.outcomes[work_id].ids == Expected(driver).ids(one, count)
    assert {8, 16} <= {size for size, _ in seen} <= {4, 8, 16}
    assert max(chunks for _, chunks in seen) > 1


def test_bins_logprobs_and_probes_come_out_of_programs():
    results = []
    for graphs in (None, ReplayGraphs()):
        bench = Bench(ToyHybrid(7, aux=True, window=None), graphs=graphs)
        settings = {"logit_bias": {COORD: 30.0}, "logprobs": True, "top_logprobs": 2}
        decoding = Decoding(needs_aux=True)
        results.append(
            bench.generate((4, 5, 6), decoding=decoding, settings=settings, probes=((1, (5, 6)), (2, (7,))))
        )
    plain, captured = results
    assert captured.ids == plain.ids
    assert [token.aux for token in captured.tokens] == [token.aux for token in plain.tokens]
    for a, b in zip(plain.finished.probes, captured.finished.probes, strict=True):
        assert b == pytest.approx(a, abs=1e-4)


def test_prompts_with_bins_run_op_by_op_and_others_by_programs():
    driver = ToyHybrid(7, aux=True, window=None)
    empty = (0,) * driver.spec.aux_width
    with_bins = Layout(tokens=(4, COORD, 6), aux=(empty, (3, *empty[1:]), empty))
    results = []
    for graphs in (None, ReplayGraphs()):
        bench = Bench(driver, graphs=graphs)
        seen = launches(bench) if graphs else []
        results.append([bench.generate(prompt, max_tokens=3).ids for prompt in (with_bins, (4, COORD, 6))])
    assert results[0] == results[1]
    assert seen == [(4, 1)]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 7}, {"logprobs": True}])
def test_first_tokens_come_out_of_programs_as_they_do_op_by_op(settings):
    found = []
    for graphs in (None, ReplayGraphs()):
        bench = Bench(ToyHybrid(5, window=None), max_rows=8, pages=99, graphs=graphs)
        works = []
        for _ in range(4):  # in groups of one, two and three: programs of 1, 2 and 4 rows
            for group in (1, 2, 3):
                works += [
                    bench.submit([4 + group, 5 + i], max_tokens=3, settings=settings) for i in range(group)
                ]
                bench.run()
        found.append([bench.outcomes[work].ids for work in works])
    assert found[0] == found[1]
    first = bench.lane._board.runner._prefiller.first_tokens
    assert sorted(first._sizes) == [1, 2, 4]
    assert all(entry.choices for entry in first._sizes.values())


def test_first_tokens_are_captured_anew_when_sampling_has_moved_its_tables(monkeypatch):
    monkeypatch.setitem(ROOM, "biases", 2)
    bench = Bench(ToyHybrid(5, window=None), graphs=ReplayGraphs())
    many = {i: float(i % 5) for i in range(4, 31)}
    for bias in ({4: 99.0}, {4: 99.0}, {4: 99.0}, many, {9: 99.0}, {9: 99.0}, {9: 99.0}):
        ids = bench.generate([4, 5, 6], max_tokens=1, settings={"logit_bias": bias}).ids
        assert bias == many or list(ids) == list(bias)
    entries = bench.lane._board.runner._prefiller.first_tokens._sizes
    assert entries[1].choices, "the last ones came out of a program again"


def test_first_tokens_beyond_the_last_program_are_sampled_op_by_op(monkeypatch):
    monkeypatch.setattr(first_tokens, "MAX_PROGRAMS", 1)
    bench = Bench(ToyHybrid(5, window=None), graphs=ReplayGraphs())
    want = Bench(ToyHybrid(5, window=None))
    for settings in ({}, {"temperature": 1.0, "seed": 7}):
        for _ in range(3):
            ids = bench.generate([4, 5, 6], max_tokens=2, settings=settings).ids
            assert ids == want.generate([4, 5, 6], max_tokens=2, settings=settings).ids
    entries = bench.lane._board.runner._prefiller.first_tokens._sizes
    assert [len(entry.choices) for entry in entries.values()] == [1]


def test_first_tokens_that_cannot_be_captured_are_sampled_op_by_op(caplog):
    bench = Bench(ToyHybrid(5, window=None), graphs=ReplayGraphs())
    first = bench.lane._board.runner._prefiller.first_tokens

    class Refusing:
        def capture(self, run):
            raise RuntimeError("no")

    first._graphs = Refusing()
    expected = Expected(ToyHybrid(5, window=None))
    for _ in range(4):
        assert bench.generate([4, 5, 6], max_tokens=2).ids == expected.ids(Layout(tokens=(4, 5, 6)), 2)
    assert caplog.text.count("first tokens are sampled op by op") == 1


def test_checkpoints_that_a_program_stored_are_found_again():
    driver = ToyHybrid(3)
    bench = Bench(driver, page_size=4, graphs=ReplayGraphs())
    prompt = Layout(tokens=tuple(range(4, 15)), marks=(6,))
    first = bench.generate(prompt, max_tokens=4)
    other = Layout(tokens=(*prompt.tokens[:8], 15, 16))
    again = bench.generate(other, max_tokens=4)
    assert again.finished.metrics.cached_tokens == 8
    assert first.ids == Expected(driver).ids(prompt, 4)
    assert again.ids == Expected(driver).ids(other, 4)


def test_launches_of_many_chunks_or_much_padding_run_op_by_op(monkeypatch):
    monkeypatch.setattr(prefill_programs, "MAX_CHUNKS", 2)
    bench = Bench(ToyHybrid(3), budget=64, max_rows=8, pages=99, graphs=ReplayGraphs())
    seen = launches(bench)
    for start in range(3):
        bench.submit([4 + start, 5], max_tokens=2)
    bench.run()
    assert not seen
    bench.submit([9] * 9, max_tokens=2)
    bench.run()
    assert not seen, "9 tokens in a program of 16"
    bench.submit([8] * 12, max_tokens=2)
    bench.run()
    assert seen == [(16, 1)]


def test_large_launches_run_op_by_op_for_less_padding(monkeypatch):
    monkeypatch.setattr(prefill_programs, "LARGE", 16)
    bench = Bench(ToyHybrid(3), budget=64, max_rows=8, pages=99, graphs=ReplayGraphs())
    seen = launches(bench)
    for token, count in ((7, 58), (8, 61)):
        bench.submit([token] * count, max_tokens=2)
        bench.run()
    assert seen == [(64, 1)]


class Packed(ToyHybrid):
    """The toy with its encoder split for capture; pictures are filled up to even numbers of rows."""

    device = torch.device("cpu")

    def encode(self, kind, packed):
        return super(ToyHybrid, self).encode(kind, packed)

    def pack(self, kind, packed):
        self.encoded_items += len(packed)
        parts = [item.tensors["x"] for item in packed]
        rows = sum(len(part) for part in parts)
        return [[*parts, torch.zeros(rows % 2, parts[0].shape[1])]]

    def features(self, kind, inputs):
        return inputs[0] @ self.weights.media

    def write_cross(self, encoded, packed, views):
        lengths = [len(item.tensors["x"]) for item in packed]
        _, key, value = self.weights.cross[:3]
        rows = encoded[: sum(lengths), None]
        write_cross(rows @ key, rows @ value, lengths, views["media"], 0)


@pytest.mark.parametrize("graphs", [None, ReplayGraphs()])
def test_a_packed_encoder_gives_what_the_oracle_gives(graphs):
    rng = random.Random(1)
    driver = Packed(3, cross=True)
    bench = Bench(driver, graphs=graphs, prefix_cache=False, feature_rows=8)
    works = {}
    for _ in range(24):
        one = layout(rng)
        works[bench.submit(one, max_tokens=5)] = one
        bench.tick(rng.randrange(3))
    bench.run()
    for work_id, one in works.items():
        assert bench.outcomes[work_id].ids == Expected(ToyHybrid(3, cross=True)).ids(one, 5)
    captured = bench.lane._board.runner._encoders.num_captured
    assert bool(captured) == (graphs is not None)


def test_what_the_device_reads_by_itself_goes_straight_to_the_program(monkeypatch):
    bench = Bench(Packed(3), graphs=ReplayGraphs())
    runner = bench.lane._board.runner
    staged = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.dtype == torch.float32)
    put_all = runner._encoders._media.put_all
    monkeypatch.setattr(
        runner._encoders._media, "put_all", lambda parts: (staged.append(1), put_all(parts))[1]
    )
    with torch.inference_mode():
        for number in range(5):
            items = [toy_media("image", 2 * number + i, 3) for i in range(2)]
            x_RC = runner.encode("image", items)
            wanted = torch.cat([item.tensors["x"] for item in items]) @ runner._driver.weights.media
            assert torch.equal(x_RC, wanted)
    assert len(staged) == 2  # the first launch, and the one that was captured


@pytest.mark.parametrize("graphs", [None, ReplayGraphs()])
def test_cross_entries_are_written_by_the_encoders_program(graphs):
    driver = Packed(3, cross=True, max_cost=4)
    bench = Bench(driver, graphs=graphs, prefix_cache=False, entries=8, max_rows=8)
    runner = bench.lane._board.runner
    works = {}
    for wave in range(4):
        for number in range(5):
            sound = toy_media("audio", 10 * wave + number, 4, positions=0)
            one = Layout(tokens=(4 + number, 5), media=(sound,))
            works[bench.submit(one, max_tokens=5)] = one
        bench.run()
    for work_id, one in works.items():
        assert bench.outcomes[work_id].ids == Expected(ToyHybrid(3, cross=True)).ids(one, 5)
    sizes = sorted(shapes[1][0][1][0] // 4 for shapes in runner._encoders._captured)
    assert sizes == ([] if graphs is None else [1, 4])


def test_launches_of_equal_items_are_captured_before_anybody_asks():
    bench = Bench(
        Packed(3, cross=True, max_cost=4), graphs=ReplayGraphs(), prefix_cache=False, entries=8, max_rows=8
    )
    encoders = bench.lane._board.runner._encoders
    with torch.inference_mode():
        bench.lane._board.runner.capture_cross(toy_media("audio", 1, 4, positions=0), 5)
    assert [shapes[1][0][1][0] // 4 for shapes in encoders._captured] == [4, 2, 1]
    works = {}
    for number in range(7):
        one = Layout(tokens=(4 + number, 5), media=(toy_media("audio", number, 4, positions=0),))
        works[bench.submit(one, max_tokens=5)] = one
    bench.run()
    for work_id, one in works.items():
        assert bench.outcomes[work_id].ids == Expected(ToyHybrid(3, cross=True)).ids(one, 5)
    assert encoders.num_captured == 3


def test_nothing_is_captured_ahead_where_nothing_is_captured():
    bench = Bench(Packed(3, cross=True, max_cost=4), entries=8)
    bench.lane._board.runner.capture_cross(toy_media("audio", 1, 4, positions=0), 4)
    assert not bench.lane._board.runner._encoders.num_captured


def test_programs_of_the_encoder_are_kept_by_last_use(monkeypatch):
    from kestrel.runner import encoders

    monkeypatch.setattr(encoders, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(encoders, "REPLACE_EVERY", 0)
    bench = Bench(Packed(3), graphs=ReplayGraphs())
    runner = bench.lane._board.runner
    with torch.inference_mode():
        for rows in (3, 3, 5, 5, 3, 7, 7, 3):
            item = toy_media("image", rows, rows)
            x_RC = runner.encode("image", [item])
            assert torch.equal(x_RC, item.tensors["x"] @ runner._driver.weights.media)
    kept = [shapes[1][0][1][0] for shapes in runner._encoders._captured]
    assert kept == [8, 4]


def test_pictures_of_all_sizes_do_not_push_each_others_programs_out(monkeypatch):
    from kestrel.runner import encoders

    monkeypatch.setattr(encoders, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(encoders, "REPLACE_EVERY", 20)
    graphs = ReplayGraphs()
    bench = Bench(Packed(3), graphs=graphs)
    runner, before, rng = bench.lane._board.runner, len(graphs.programs), random.Random(0)
    with torch.inference_mode():
        for _ in range(120):
            rows = 2 * rng.randrange(1, 8)
            item = toy_media("image", rows, rows)
            x_RC = runner.encode("image", [item])
            assert torch.equal(x_RC, item.tensors["x"] @ runner._driver.weights.media)
    assert runner._encoders.num_captured == 3
    assert 3 < len(graphs.programs) - before <= 3 + 120 // 20


def test_an_encoder_that_cannot_be_captured_runs_op_by_op(caplog):
    class Refusing(ReplayGraphs):
        refuses = False

        def capture(self, run):
            if self.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().capture(run)

    graphs = Refusing()
    bench = Bench(Packed(3), graphs=graphs)
    graphs.refuses = True
    runner = bench.lane._board.runner
    item = toy_media("image", 1, 3)
    with torch.inference_mode():
        for _ in range(3):
            x_RC = runner.encode("image", [item])
            assert torch.equal(x_RC, item.tensors["x"] @ runner._driver.weights.media)
    assert caplog.text.count("the encoder of image runs op by op") == 1


def test_probes_of_several_chunks_are_answered_together_each_with_its_own(monkeypatch):
    prompts = [((4, 5, 6, 7)[: 2 + i], ((1 + i, (5, 6, 9)[: 1 + i]), (0, (3,)))) for i in range(3)]
    alone = [Bench(ToyHybrid(7, window=None)).generate(ids, probes=probes) for ids, probes in prompts]
    monkeypatch.setattr(prefill, "PROBED_AT_ONCE", 4)
    bench = Bench(ToyHybrid(7, window=None))
    works = [bench.submit(ids, probes=probes) for ids, probes in prompts]
    bench.run()
    for one, work in zip(alone, works, strict=True):
        here, there = one.finished.probes, bench.outcomes[work].finished.probes
        assert [len(probe) for probe in there] == [len(probe) for probe in here]
        for a, b in zip(here, there, strict=True):
            assert b == pytest.approx(a, abs=1e-4)
