"""Captured prefill and encoders on an accelerator, under a mode in which waiting for the device is an error."""

import gc
import random
from dataclasses import replace

import pytest
import torch

from kestrel.device.graphs import graphs_for
from kestrel.runner import prefill_programs
from kestrel.testing.bench import Bench
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import ToyHybrid, toy_media
from kestrel.types import Layout, Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),  # so says torch
]

CUDA = torch.device("cuda:0")


class Packed(ToyHybrid):
    """The toy with its encoder split for capture."""

    device = CUDA

    def encode(self, kind, packed):
        return super(ToyHybrid, self).encode(kind, packed)

    def pack(self, kind, packed):
        return [[item.tensors["x"] for item in packed]]

    def features(self, kind, inputs):
        return inputs[0] @ self.weights.media


def layout(rng):
    words = tuple(rng.randrange(4, 20) for _ in range(rng.randrange(1, 14)))
    if rng.random() < 0.5:
        return Layout(tokens=words, marks=(len(words) // 2,) if len(words) > 3 else ())
    return Layout(
        tokens=(4, *(0,) * 5, *words),
        spans=(Span(1, 6, 0),),
        media=(toy_media("image", rng.randrange(3), 5),),
        bidirectional=((0, 6),),
        marks=(6,),
    )


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(prefill_programs, "SIZES", (4, 8, 16))
    monkeypatch.setattr(prefill_programs, "ALWAYS_WORTH", 8)


@pytest.mark.parametrize("seed", range(3))
def test_programs_on_a_gpu_give_what_the_oracle_gives(small_buckets, seed):
    rng = random.Random(seed)
    driver = Packed(3, device=CUDA)
    bench = Bench(driver, depth=2, head_start=1, device=CUDA, graphs=graphs_for(CUDA), prefix_cache=seed > 0)
    works = {}
    for one in [layout(rng) for _ in range(8)] * 2:
        count = rng.randrange(1, 12)
        works[bench.submit(one, max_tokens=count)] = (one, count)
        bench.tick(rng.randrange(4))
    bench.run()
    for work_id, (one, count) in works.items():
        assert bench.outcomes[work_id].ids == Expected(driver).ids(one, count)
    runner = bench.lane._board.runner
    assert runner.captured_prefills == (4, 8, 16)
    assert runner._encoders.num_captured


def test_pinned_media_stay_until_the_device_has_read_them():
    """The allocator gives a dropped item's memory to the next one, but not before its copy was made."""
    driver = Packed(3, device=CUDA)
    runner = Bench(driver, device=CUDA, graphs=graphs_for(CUDA)).lane._board.runner
    width = driver.weights.media.shape[0]
    wanted, found = [], []
    with torch.inference_mode():
        matrix = torch.rand(4096, 4096, device=CUDA)
        for number in range(12):
            x = torch.empty(5, width, pin_memory=True).fill_(number + 1)
            item = replace(toy_media("image", number, 5), tensors={"x": x})
            wanted.append(x.clone())
            for _ in range(6):
                matrix = (matrix @ matrix).clamp(0, 1)  # the device is busy meanwhile
            found.append(runner.encode("image", [item]).clone())
            del x, item
    assert runner._encoders.num_captured == 1
    for x, features in zip(wanted, found, strict=True):
        torch.testing.assert_close(features, x.to(CUDA) @ driver.weights.media)


def test_the_host_running_ahead_of_the_device_changes_no_chunk(small_buckets):
    """Chunks that yield no token are launched without a wait for the ones before."""
    driver = Packed(3, device=CUDA)
    bench = Bench(driver, depth=2, budget=8, pages=99, device=CUDA, graphs=graphs_for(CUDA))
    prompt = Layout(tokens=tuple(4 + (7 * i) % 15 for i in range(230)))
    matrix = torch.rand(4096, 4096, device=CUDA)
    for _ in range(30):
        matrix = matrix @ matrix  # the device is busy meanwhile
        matrix = matrix / matrix.norm()
    assert bench.generate(prompt, max_tokens=6).ids == Expected(driver).ids(prompt, 6)


def test_ticks_never_wait_but_for_results(small_buckets):
    """Text alone: the toy writes cross entries and lays media out with looks at the device."""
    bench = Bench(Packed(3, device=CUDA), depth=2, device=CUDA, graphs=graphs_for(CUDA))
    for start in (4, 5, 6):
        bench.submit([start] * 7, max_tokens=20)
    bench.run()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for start in (7, 8, 9):
            bench.submit([start] * 7, max_tokens=20)
        bench.submit([9] * 3, max_tokens=9, settings={"temperature": 1.0, "top_p": 0.9})
        bench.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(outcome.ended and outcome.error is None for outcome in bench.outcomes.values())


def test_memory_does_not_grow_over_many_steps(small_buckets):
    bench = Bench(
        Packed(3, device=CUDA), depth=2, device=CUDA, graphs=graphs_for(CUDA), max_len=4096, pages=2000
    )

    def run(count):
        for start in (4, 5):
            bench.submit([start] * 7, max_tokens=count)
        bench.run()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    gc.collect()  # earlier tests' lanes, which would leave meanwhile
    run(300)
    before = run(300)
    assert run(3000) == before
