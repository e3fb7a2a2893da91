"""Captured decode programs on an accelerator: right, without a wait for the device, without an allocation."""

import contextlib

import pytest
import torch

from kestrel.device.graphs import graphs_for
from kestrel.spi.decoding import Decoding
from kestrel.testing.bench import Bench
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import COORD, FakeTokenDriver, ToyHybrid, toy_media
from kestrel.types import Layout, Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

CUDA = torch.device("cuda:0")


@contextlib.contextmanager
def no_sync():
    """Whatever waits for the device raises."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def guarded(bench):
    """The sizes of the decode steps that ``bench`` launches from now on, each of which may not wait."""
    sizes = []
    runner = bench.lane._board.runner
    decode = runner.decode

    def spy(stage):
        assert stage.is_captured, "a step ran op by op"
        sizes.append(stage.size)
        with no_sync():
            return decode(stage)

    runner.decode = spy
    return sizes


def layouts():
    picture = toy_media("image", 0, 5)
    return [
        Layout(
            tokens=(4, *(0,) * 5, 7, 8),
            spans=(Span(1, 6, 0),),
            media=(picture,),
            bidirectional=((0, 6),),
            marks=(6,),
        ),
        Layout(tokens=tuple(range(4, 20))),
        Layout(tokens=(4, 9), media=(toy_media("audio", 0, 4, positions=0),)),
        Layout(tokens=(4, 5, 6)),
        Layout(tokens=(9, 9)),
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pages", [14, 64])
def test_replays_over_other_lengths_and_tables_give_what_the_oracle_gives(depth, deterministic, pages):
    driver = ToyHybrid(3, cross=True, device=CUDA)
    bench = Bench(
        driver,
        depth=depth,
        deterministic=deterministic,
        pages=pages,
        head_start=1,
        max_rows=5,
        device=CUDA,
        graphs=graphs_for(CUDA),
    )
    sizes = guarded(bench)
    for _ in range(2):
        works = [bench.submit(layout, max_tokens=14) for layout in layouts()]
        bench.run()
        for work_id, layout in zip(works, layouts(), strict=True):
            assert bench.outcomes[work_id].ids == Expected(driver).ids(layout, 14)
    assert set(sizes) <= ({5} if deterministic else {1, 2, 4, 5})


@pytest.mark.parametrize("depth", [1, 2])
def test_every_kind_of_sampling_is_the_same_captured_and_op_by_op(depth):
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "top_k": 7},
        {"logit_bias": {5: 3.0}, "frequency_penalty": 0.5, "temperature": 0.7},
        {"logprobs": True, "top_logprobs": 2},
    ]
    results = []
    for graphs in (None, graphs_for(CUDA)):
        bench = Bench(ToyHybrid(3, device=CUDA), depth=depth, graphs=graphs, max_rows=3, device=CUDA)
        works = [
            bench.submit([4, 5, 6 + i], max_tokens=12, settings=kind, seed=i) for i, kind in enumerate(kinds)
        ]
        bench.run()
        results.append([bench.outcomes[work_id].tokens for work_id in works])
    native, captured = results
    assert [[t.id for t in tokens] for tokens in native] == [[t.id for t in tokens] for tokens in captured]
    for a, b in zip(native[-1], captured[-1], strict=True):
        assert b.logprobs.logprob == pytest.approx(a.logprobs.logprob, abs=1e-4)


def test_bins_go_from_program_to_program():
    results = []
    for graphs in (None, graphs_for(CUDA)):
        bench = Bench(ToyHybrid(7, aux=True, window=None, device=CUDA), depth=2, device=CUDA, graphs=graphs)
        bench.submit(
            [4, 5, 6],
            decoding=Decoding(needs_aux=True),
            max_tokens=12,
            settings={"logit_bias": {COORD: 30.0}},
        )
        bench.submit([9, 8], max_tokens=12)
        bench.run()
        results.append([outcome.tokens for outcome in bench.outcomes.values()])
    assert results[0] == results[1]


def test_ten_thousand_steps_allocate_nothing():
    steps = 10_000
    bench = Bench(
        FakeTokenDriver(device=CUDA),
        depth=2,
        device=CUDA,
        graphs=graphs_for(CUDA),
        page_size=16,
        pages=4 * (steps // 16 + 8),
        max_len=steps + 200,
    )
    for start in (1, 2, 3, 4):
        bench.submit([start], max_tokens=steps + 100)
    for _ in range(50):
        bench.lane.tick()

    def allocated():
        stats = torch.cuda.memory_stats(CUDA)
        return stats["allocation.all.allocated"], stats["reserved_bytes.all.current"]

    before = allocated()
    for _ in range(steps):
        bench.lane.tick()
    assert allocated() == before
    bench.run(limit=200)
    assert all(len(outcome.ids) == steps + 100 for outcome in bench.outcomes.values())


def test_a_call_that_waits_cannot_be_captured_and_leaves_the_lane_op_by_op():
    driver = ToyHybrid(3, device=CUDA)
    bench = Bench(driver, device=CUDA)
    bench.lane.warm_up()
    forward = driver.forward

    def waits(batch, x_TC):
        if batch.extents is None:
            x_TC.sum().item()
        return forward(batch, x_TC)

    driver.forward = waits
    with pytest.raises(RuntimeError):
        bench.lane.capture(graphs_for(CUDA))
    assert bench.lane.captured_sizes == ()
    assert bench.generate([4, 5, 6]).ids == Expected(driver).ids(Layout(tokens=(4, 5, 6)), 8)
