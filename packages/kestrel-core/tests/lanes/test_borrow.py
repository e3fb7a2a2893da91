"""What a pass is given of media that go to cross attention: what sequences had written, as long as it needs it."""

from contextlib import ExitStack

import pytest
import torch

from kestrel.testing.bench import Bench
from kestrel.testing.toys import ToyHybrid, toy_media
from kestrel.types import Layout


def clip(seed):
    return Layout(tokens=(4, 5, 6), media=(toy_media("audio", seed, 4, positions=0),))


@pytest.fixture
def toy():
    return ToyHybrid(6, cross=True)


def keys(bench, layout):
    """The keys of a clip's entry as a pass sees them."""
    with ExitStack() as held, torch.inference_mode():
        view = bench.lane.borrow_cross(layout.media[0], held)["media"]
        length = int(view.lens_B[0])
        return view.k_LEKSD[0, int(view.entries_B[0]), 0, :length].clone()


def wanted(toy, layout):
    return layout.media[0].tensors["x"] @ toy.weights.media @ toy.weights.cross[1]


def test_a_pass_reads_the_entry_that_a_sequence_had_written(toy):
    bench = Bench(toy)
    bench.generate(clip(0))
    assert torch.allclose(keys(bench, clip(0)), wanted(toy, clip(0)))
    assert toy.encoded_items == 1
    bench.lane.cache.check()


def test_what_nobody_has_encoded_is_encoded_and_kept(toy):
    bench = Bench(toy)
    assert torch.allclose(keys(bench, clip(1)), wanted(toy, clip(1)))
    assert toy.encoded_items == 1
    bench.generate(clip(1))
    assert toy.encoded_items == 1
    bench.lane.cache.check()


def test_when_others_hold_all_entries_one_is_made_for_the_occasion(toy):
    bench = Bench(toy, entries=1)
    with ExitStack() as held, torch.inference_mode():
        bench.lane.borrow_cross(clip(0).media[0], held)
        assert torch.allclose(keys(bench, clip(1)), wanted(toy, clip(1)))
    assert toy.encoded_items == 2
    bench.lane.cache.check()
    bench.generate(clip(1))
    assert toy.encoded_items == 3, "what was made for the occasion is gone"
