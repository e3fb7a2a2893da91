"""What launches bring to the model: slots, life, padding, ids from the device, and no wait for it."""

import pytest
import torch

from kestrel.runner.extents import DecodeExtents
from kestrel.spi.batch import RowExtent
from kestrel.spi.decoding import Decoding
from kestrel.testing.bench import Bench
from kestrel.testing.capture import CaptureGuard
from kestrel.testing.toys import COORD, FakeTokenDriver, ToyHybrid, toy_media
from kestrel.types import Layout, Span


def spied(driver):
    """``driver`` and the launches that it gets: copies of what its batch says."""
    seen = []
    forward = driver.forward

    def spy(batch, x_TC):
        states = {}
        if "full" in batch.states:
            states["slots"] = batch.paged("full").slots_T.tolist()
        if "memory" in batch.states:
            states["state_slots"] = batch.recurrent("memory").slots_B.tolist()
            states["stores"] = batch.recurrent("memory").host_stores
        seen.append(
            {
                "decode": batch.limits.is_decode,
                "ids": batch.ids_T.tolist(),
                "positions": batch.positions_PT.tolist(),
                "media": batch.media_rows_T.tolist(),
                "has_aux": batch.has_aux,
                "aux": batch.aux_TW.tolist(),
                "extents": list(batch.extents),
                "tokens": batch.limits.max_tokens,
                **states,
            }
        )
        return forward(batch, x_TC)

    driver.forward = spy
    return driver, seen


def test_a_row_that_stopped_writes_to_scratch_in_the_step_already_under_way():
    driver, seen = spied(ToyHybrid(3))
    bench = Bench(driver, depth=2)
    first = ToyHybrid(3).oracle([4, 5, 6])[-1].argmax()
    bench.submit([4, 5, 6], max_tokens=9, stop=(int(first),))
    other = bench.submit([9, 8], max_tokens=6)
    bench.run()
    decodes = [launch for launch in seen if launch["decode"] and launch["tokens"] == 2]
    assert decodes
    assert decodes[0]["slots"][0] == 0
    assert decodes[0]["state_slots"][0] == 0
    assert decodes[0]["slots"][1] > 0
    assert len(bench.outcomes[other].ids) == 6


@pytest.mark.parametrize("depth", [1, 2])
def test_decode_takes_its_ids_from_what_sampling_left(depth):
    driver, seen = spied(FakeTokenDriver(follows=lambda i: (i + 1) % 256))
    bench = Bench(driver, depth=depth)
    bench.submit([9, 10], max_tokens=5)
    bench.submit([49, 50], max_tokens=5)
    bench.run()
    decodes = [launch["ids"] for launch in seen if launch["decode"]]
    assert decodes == [[11, 51], [12, 52], [13, 53], [14, 54]]


def test_prefill_and_decode_are_never_merged_and_chunks_lie_side_by_side():
    driver, seen = spied(ToyHybrid(3))
    bench = Bench(driver, budget=8, page_size=4)
    bench.submit([4, 5, 6], max_tokens=9)
    bench.tick(2)
    bench.submit([7] * 6, max_tokens=2)
    bench.submit([8] * 5, max_tokens=2)
    bench.tick()
    decode, prefill = seen[-2:]
    assert decode["decode"]
    assert [e.query_len for e in prefill["extents"]] == [6, 1]
    assert prefill["positions"] == [[0, 1, 2, 3, 4, 5, 0]]
    bench.run()


def test_padding_rows_stay_on_scratch():
    driver, seen = spied(ToyHybrid(3))
    bench = Bench(driver, deterministic=True, max_rows=4)
    bench.generate([4, 5, 6], max_tokens=7)
    decodes = [launch for launch in seen if launch["decode"]]
    assert all(launch["slots"][1:] == [0, 0, 0] for launch in decodes)
    assert all(launch["state_slots"][1:] == [0, 0, 0] for launch in decodes)
    assert all(e == RowExtent(1, 0) for launch in decodes for e in launch["extents"][1:])


def test_media_rows_name_the_pool_and_decode_has_none():
    driver, seen = spied(ToyHybrid(3))
    item = toy_media("image", 0, 3)
    layout = Layout(tokens=(4, 0, 0, 0, 5), spans=(Span(1, 4, 0),), media=(item,), marks=(4,))
    bench = Bench(driver, page_size=4)
    bench.generate(layout, max_tokens=3)
    assert seen[0]["media"] == [-1, 0, 1, 2, -1]
    assert seen[1]["media"] == [-1]


def test_checkpoints_are_stored_by_the_launch_that_passes_them():
    driver, seen = spied(ToyHybrid(3))
    Bench(driver, page_size=4).generate(Layout(tokens=tuple(range(4, 15)), marks=(6,)))
    assert [(row, count) for row, count, _ in seen[0]["stores"]] == [(0, 6), (0, 8)]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_launch_waits_for_the_device(depth):
    bench = Bench(FakeTokenDriver(), depth=depth)
    runner = bench.lane._board.runner
    decode, prefill = runner.decode, runner.prefill

    def guarded(run):
        def launch(what):
            with CaptureGuard():
                return run(what)

        return launch

    runner.decode, runner.prefill = guarded(decode), guarded(prefill)
    bench.submit([1, 2, 3], max_tokens=40)
    bench.submit([9], max_tokens=40, settings={"temperature": 1.0, "top_p": 0.9})
    bench.run()
    assert all(len(outcome.ids) == 40 for outcome in bench.outcomes.values())


def test_extents_follow_the_array_when_renewed():
    computed = torch.arange(3, dtype=torch.int32).numpy()
    extents = DecodeExtents(computed)
    assert list(extents) == [RowExtent(1, 0), RowExtent(1, 1), RowExtent(1, 2)]
    computed += 1
    extents.renew()
    assert extents[0] == RowExtent(1, 1)
    assert len(extents) == 3
    assert list(extents[1:]) == [RowExtent(1, 2), RowExtent(1, 3)]


def test_bins_reach_launches_of_rows_that_may_carry_them_and_no_sequence_after():
    driver, seen = spied(ToyHybrid(7, aux=True, window=None))
    bench = Bench(driver, max_rows=1, prefix_cache=False)
    coords = {"logit_bias": {COORD: 100.0}}
    bench.generate([4, 5, 6], decoding=Decoding(needs_aux=True), max_tokens=12, settings=coords)
    with_bins = [launch for launch in seen if launch["decode"]]
    assert all(launch["has_aux"] for launch in with_bins)
    assert any(any(launch["aux"][0]) for launch in with_bins)
    seen.clear()
    bench.generate([4, 5, 6], max_tokens=12)
    assert seen
    assert not any(launch["has_aux"] for launch in seen)
    assert not any(any(bins) for launch in seen for bins in launch["aux"])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_warm_up_launches_a_prompt_and_a_step_and_leaves_nothing_behind(depth):
    driver, seen = spied(ToyHybrid(3))
    bench = Bench(driver, depth=depth)
    bench.lane.warm_up()
    assert [(launch["decode"], launch["tokens"]) for launch in seen] == [(False, 2), (True, 1)]
    assert all(slot < bench.cache.page_size for launch in seen for slot in launch["slots"]), "not in scratch"
    assert all(launch["state_slots"] == [0] for launch in seen)
    bench.lane.check_empty()
    assert bench.lane.stats()["generated_tokens"] == 0
    cold = Bench(ToyHybrid(3), depth=depth)
    works = [{"layout": [4, 5, 6], "max_tokens": 9}, {"layout": [9, 8], "max_tokens": 6}]
    for one in (bench, cold):
        for work in works:
            one.submit(work["layout"], max_tokens=work["max_tokens"])
        one.run()
    assert [o.ids for o in bench.outcomes.values()] == [o.ids for o in cold.outcomes.values()]
